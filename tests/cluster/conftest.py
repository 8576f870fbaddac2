"""Real clusters for the tests: one local Ray, and Headwater clusters on it that share the machine."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cluster.config import ClusterConfig, load, on_this_machine
from cluster.connection import connect, disconnect
from cluster.control import Control, begin
from cluster.launch import Cluster
from cluster.models import DEFAULT_MODEL, resolve
from tests import model_zoo

Launch = Callable[..., Cluster]
PAIR_CONTEXT = 2048
TINY = {"worker__kv_memory": "16MiB", "worker__max_model_len": 1024, "worker__step_tokens": 64}

CONTROLLED = "test-controlled"
CONTROL = {
    "prefill.replicas": 3,
    "decode.replicas": 3,
    "gateway.replicas": 2,
    "gateway.drain_s": 10.0,
    "worker.drain_s": 0.5,
    "transfer.call_timeout_s": 2.0,
    "transfer.lease_s": 2.0,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs the largest cluster comes last: even one that rests takes a share of the machine."""
    items.sort(key=lambda item: "control" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """References are computed beside clusters that run; torch threads that wait for busy cores lose far more than a
    second thread gains."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def smollm() -> Path:
    return resolve(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of a few layers: wrong words, right arithmetic, and quick."""
    return model_zoo.build("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    connect(None)
    yield
    disconnect()


def settings(**flags: object) -> ClusterConfig:
    """A configuration from dotted keys with `__` for dots; float32 and a free port unless told otherwise. Everything
    is handed over, however short: tests whose subject is who computes what say so."""
    given = {name.replace("__", "."): value for name, value in flags.items()}
    defaults = {"worker.dtype": "float32", "gateway.port": 0, "router.local_tokens": 0}
    return on_this_machine(load(None, {**defaults, **given}, environ={}))


@pytest.fixture(scope="module")
def launch(local_ray: None) -> Iterator[Launch]:
    """Start clusters that live as long as the module."""
    clusters: list[Cluster] = []

    def start(model: Path, **flags: object) -> Cluster:
        made = Cluster(settings(model__name=str(model), **flags), model, f"test-{len(clusters)}-{free_port()}")
        clusters.append(made)
        made.start()
        return made

    yield start
    for one in clusters:
        one.stop()


@pytest.fixture(scope="session")
def pair(local_ray: None, smollm: Path) -> Iterator[Cluster]:
    """One prefill and one decode worker over SmolLM2, for tests that leave no traces."""
    made = Cluster(settings(worker__max_model_len=PAIR_CONTEXT), smollm, "test-pair")
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="session")
def tiny_pair(local_ray: None, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The same over the tiny model, whose prompts may have 1,024 tokens and are computed 64 at a time, with files and
    batches."""
    flags = {"model.name": str(tiny), "gateway.batch_path": tmp_path_factory.mktemp("batches"), **TINY}
    made = Cluster(settings(**flags), tiny, "test-tiny-pair")
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="session")
def narrow(local_ray: None, tiny: Path) -> Iterator[Cluster]:
    """One prefill and one decode worker over the tiny model, where one request runs on each and one waits. As by
    default, the decode worker computes what is short."""
    flags = {"worker.kv_memory": "8MiB", "worker.max_waiting": 1, "worker.max_running": 1, "router.local_tokens": 512}
    made = Cluster(settings(**{"model.name": str(tiny), **flags}), tiny, "test-narrow")
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="session")
def control(local_ray: None, tiny: Path) -> Iterator[Control]:
    """Three prefill and three decode workers and two gateways over the tiny model, as `headwater deploy` starts them;
    for tests that bring back what they change. Clients ask in turns, so what leaves must not take long."""
    made = begin(detached=True, name=CONTROLLED)
    flags = {name.replace("__", "."): value for name, value in TINY.items()} | CONTROL
    made.call("deploy", settings(**{"model.name": str(tiny), **flags}), tiny, 0.0)
    yield made
    made.end(drain=False)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
