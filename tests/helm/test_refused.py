"""Values that cannot work are refused, and the message names the value."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.helm.chart import objects

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("default", {"gatway": {}}, "gatway"),
    ("default", {"gateway.pord": 1}, "pord"),
    ("default", {"gateway.port": 80}, "/gateway/port"),
    ("default", {"gateway.replicas": 0}, "/gateway/replicas"),
    ("default", {"workers.prefill.gpus": 1}, "gpus"),
    ("default", {"workers.prefill.gpu": 2}, "/workers/prefill"),
    ("default", {"workers.extra": {"replicas": 1}}, "role"),
    ("default", {"workers.gateway": {"role": "decode"}}, "workers.gateway: this name"),
    ("default", {"workers.Pre": {"role": "prefill"}}, "Pre"),
    ("default", {"workers.decode": None}, "workers: prefill and decode workers only work together"),
    ("default", {"workers.prefill": None, "workers.decode": None}, "workers: no group"),
    ("default", {"workers.prefill.max": 3}, "workers.prefill.min, workers.prefill.max: have no effect"),
    ("ha", {"workers.prefill.min": 3}, "workers.prefill.min: 3 is more than"),
    ("ha", {"workers.prefill.max": 1}, "workers.prefill.max: 1 is less than"),
    ("ha", {"gateway.max": 1}, "gateway.max: 1 is less than"),
    ("default", {"workers.prefill.shmSize": "64Mi"}, "workers.prefill.shmSize: 64Mi is too small"),
    ("default", {"head.shmSize": "4Gi"}, "head.resources.limits.memory"),
    ("default", {"workers.prefill.shmSize": "7Gi"}, "workers.prefill.resources.limits.memory: 8Gi does not hold"),
    ("default", {"tiers.host": "7GiB"}, "resources.limits.memory: 8Gi does not hold"),
    ("default", {"config": {"worker": {"kv_memory": "8GiB"}}}, "config.worker.kv_memory"),
    ("default", {"tiers.host": "much"}, "/tiers/host"),
    ("default", {"tiers.disk": "8GiB"}, "tiers.host: is 0"),
    ("default", {"tiers.storageClass": "fast"}, "tiers.disk: is 0"),
    ("gpu-rdma", {"tiers.existingClaim": "blocks"}, "tiers.storageClass: has no effect"),
    (
        "gpu-rdma",
        {"workers.prefill.gpu": 0, "tiers.host": "1GiB"},
        "workers.prefill-spare.gpu: is 1, and another group",
    ),
    ("gpu-rdma", {"kvTransfer.rdma.memlock": ""}, "kvTransfer.rdma.memlock: is not set"),
    ("default", {"kvTransfer.rdma.memlock": "root"}, "kvTransfer.rdma.memlock: has no effect"),
    ("gpu-rdma", {"kvTransfer.ucx.TLS": "rc,tcp"}, "kvTransfer.ucx.TLS: rc,tcp has neither"),
    ("gpu-rdma", {"kvTransfer.interface": "eth0"}, "kvTransfer.ucx.NET_DEVICES: is already"),
    ("default", {"kvTransfer.ucx": {"UCX_TLS": "tcp"}}, "UCX_TLS"),
    ("default", {"kvTransfer.ports": "20100-20000"}, "kvTransfer.ports: 20100-20000"),
    ("default", {"workers.prefill.resources": {"limits": {"nvidia.com/gpu": "1"}}}, "set workers.prefill.gpu instead"),
    ("default", {"workers.prefill.resources": {"limits": {"rdma/hca": "1"}}}, "set kvTransfer.rdma instead"),
    ("default", {"config": {"gateway": {"port": 9000}}}, "config.gateway.port: the chart sets it; use gateway.port"),
    (
        "default",
        {"config": {"gateway": {"batch_path": "/b"}}},
        "config.gateway.batch_path: the chart sets it; use gateway.b",
    ),
    ("default", {"config": {"prefill": {"replicas": 9}}}, "config.prefill.replicas: the chart sets it; use workers"),
    ("default", {"config": {"gossip": {"host": "127.0.0.1"}}}, "config.gossip.host"),
    ("default", {"config": {"gossip": {"key": "secret"}}}, "config.gossip.key: the chart sets it; use gossip.existing"),
    ("default", {"config": {"gateway": {"api_keys": ["k"]}}}, "config.gateway.api_keys"),
    ("default", {"config": {"worker": 1}}, "/config/worker"),
    ("default", {"env": [{"name": "HEADWATER__GATEWAY__PORT", "value": "1"}]}, "env: HEADWATER__GATEWAY__PORT"),
    ("default", {"env": [{"name": "HF_TOKEN", "value": "1"}]}, "env: HF_TOKEN is set by the chart"),
    ("default", {"model.name": "org/name"}, "model.cache: is not set"),
    ("default", {"workers.prefill.drainSeconds": 9}, "drainSeconds"),
    ("default", {"config": {"worker": {"drain_s": 9}}}, "config.worker.drain_s: the chart sets it; use workerDefaults"),
    ("default", {"model.cache": {"size": "1Gi", "existingClaim": "c"}}, "model.cache.size: has no effect"),
    (
        "default",
        {"model.cache": {"size": "1Gi", "accessMode": "ReadWriteOnce"}},
        "model.cache.accessMode: ReadWriteOnce",
    ),
    ("default", {"ray.gcsFaultTolerance.enabled": True}, "ray.gcsFaultTolerance.redisAddress: is not set"),
    ("ha", {"gossip.existingSecret": ""}, "gossip.existingSecret: is not set"),
    ("default", {"ray.version": "2.60"}, "/ray/version"),
    ("default", {"gateway.ingress.enabled": True}, "gateway.ingress.host: is not set"),
    ("default", {"gateway.httpRoute.enabled": True}, "gateway.httpRoute.parentRefs: names no Gateway"),
    ("default", {"batch.enabled": True}, "batch.input: is not set"),
    ("cpu-sim", {"batch.input": "a; rm b"}, "/batch/input"),
    ("ha", {"networkPolicy.enabled": True}, "networkPolicy.egress: is empty"),
    ("default", {"securityContext.runAsUser": 0}, "/securityContext/runAsUser"),
]


@pytest.mark.parametrize(("example", "values", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_refused(example: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        objects(example, values)


def test_old_kubernetes_is_refused() -> None:
    with pytest.raises(ValueError, match="kubeVersion"):
        objects(version="1.28")
