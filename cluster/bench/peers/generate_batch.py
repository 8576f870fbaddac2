"""transformers as a peer: its own continuous batching, `generate_batch`, in a process of its own.

It computes in a thread that it starts. Beside another thread that has computed, such as that of the engine alone,
OpenMP's helpers would sleep after each operator, and it would be slower than it is.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from cluster.bench.peers.program import PeerError, last_line, run
from workers.engine.model import resolve_device, resolve_dtype
from workers.kv.memory import DTYPES

PAGE_TOKENS = 256
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Transformers:
    """How it is run: `batch_tokens` tokens in a batch."""

    batch_tokens: int

    def output_tokens_per_s(
        self, path: Path, dtype: str, device: str, threads: int, prompts: list[list[int]], output: int
    ) -> float:
        """Throughput of all prompts at once. It shares blocks of common beginnings, but begins with an empty cache: one
        prompt more to compute than for servers that have seen the prefix. Raises PeerError."""
        job = Job(os.getpid(), str(path), dtype, device, threads, self.batch_tokens, prompts, output)
        said = run([sys.executable, "-m", __name__], "generate_batch", json.dumps(asdict(job)))
        try:
            return float(last_line(said))
        except ValueError:
            raise PeerError(f"generate_batch printed no result: {last_line(said)}") from None


@dataclass(frozen=True, slots=True)
class Job:
    """What the process is told, and by whom."""

    asker: int
    path: str
    dtype: str
    device: str
    threads: int
    batch_tokens: int
    prompts: list[list[int]]
    output: int


def measure(job: Job) -> float:
    """Output tokens a second, loading not counted. Raises what transformers raises."""
    torch.set_num_threads(job.threads)
    with ThreadPoolExecutor(1) as loader:  # a thread that ends, and its OpenMP helpers with it
        model = loader.submit(_load, job).result()
    generation = GenerationConfig(max_new_tokens=job.output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    start = time.perf_counter()
    answers = model.generate_batch(job.prompts, generation_config=generation, continuous_batching_config=_batching(job))
    seconds = time.perf_counter() - start
    tokens = sum(len(answer.generated_tokens) for answer in answers.values())
    if tokens != len(job.prompts) * job.output:
        raise RuntimeError(f"{tokens} tokens came instead of {len(job.prompts) * job.output}")
    return tokens / seconds


def _load(job: Job) -> Any:
    where = resolve_device(job.device)
    kind = DTYPES[resolve_dtype(job.dtype, where)]
    return AutoModelForCausalLM.from_pretrained(job.path, dtype=kind, attn_implementation="sdpa").to(where).eval()


def _batching(job: Job) -> ContinuousBatchingConfig:
    # Just enough pages for all of them: by default it takes over half of the machine's memory, and minutes to fill it.
    pages = sum(-(-(len(prompt) + job.output) // PAGE_TOKENS) + 1 for prompt in job.prompts)
    return ContinuousBatchingConfig(page_size=PAGE_TOKENS, num_blocks=pages, max_batch_tokens=job.batch_tokens)


def main() -> None:
    """Do the job on standard input. The last line of output is the result; that of errors says what went wrong."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # who asked may be killed, and cannot end this then
    job = Job(**json.load(sys.stdin))
    if os.getppid() != job.asker:
        sys.exit("nobody waits for the result")
    try:
        speed = measure(job)
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
    sys.stdout.write(f"\n{speed}\n")


if __name__ == "__main__":
    main()
