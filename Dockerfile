# Headwater for the pods of its chart.
#   docker build -t headwater .                                        CPUs
#   docker build -t headwater-cuda --build-arg ACCELERATOR=cuda .      NVIDIA GPUs
# Behind a mirror: --build-arg PIP_INDEX_URL=… . For CPUs a PyTorch without CUDA is smaller by gigabytes: name the index
# that has it with --build-arg PIP_EXTRA_INDEX_URL=… --build-arg TORCH=torch==2.13.0+cpu .
ARG ACCELERATOR=cpu

FROM python:3.12-slim-bookworm AS base-cpu

# Attention kernels are compiled on the GPU's machine, which takes the compiler of CUDA.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS base-cuda
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

FROM base-${ACCELERATOR} AS headwater
ARG ACCELERATOR
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG TORCH=torch==2.13.0
# The model that is in the image; empty for none.
ARG MODEL=smollm2-135m-instruct

# KubeRay's probes call bash and wget. The user is made first: what follows changes more often.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bash ca-certificates tini wget \
    && rm -rf /var/lib/apt/lists/* \
    && (userdel --remove ubuntu 2>/dev/null || true) \
    && groupadd --gid 1000 headwater \
    && useradd --uid 1000 --gid 1000 --create-home headwater \
    && install -d -o headwater -g headwater /opt/headwater /var/cache/headwater /var/lib/headwater/blocks

ENV PATH=/opt/headwater/venv/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0

USER 1000:1000
WORKDIR /opt/headwater
RUN python3 -m venv venv
COPY --chown=1000:1000 pyproject.toml constraints.txt README.md LICENSE src/
RUN sed '/^torch==/d' src/constraints.txt > constraints.txt && pip install -c constraints.txt "${TORCH}"
COPY --chown=1000:1000 transfer src/transfer
COPY --chown=1000:1000 workers src/workers
COPY --chown=1000:1000 router src/router
COPY --chown=1000:1000 cluster src/cluster
RUN if [ "${ACCELERATOR}" = cuda ]; then extras=cluster,parquet,cuda; else extras=cluster,parquet; fi \
    && pip install -c constraints.txt "./src[${extras}]" \
    && rm -rf src
RUN if [ -n "${MODEL}" ]; then HEADWATER_CACHE=/opt/headwater headwater model pull "${MODEL}"; fi

ENV HEADWATER_CACHE=/var/cache/headwater
EXPOSE 8000
ENTRYPOINT ["tini", "--"]
CMD ["headwater", "serve", "--host", "0.0.0.0", "--model", "/opt/headwater/models/smollm2-135m-instruct"]
