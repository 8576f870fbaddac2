"""Models of this package's tests, built and loaded once."""

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import workers.actor
import workers.takeover
import workers.watch
from tests import model_zoo
from tests.workers.house import House, LateWrites, answers, smooth, until
from workers.engine.model import Model


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from more threads, and lose much when the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a tiny model of an architecture."""
    return functools.cache(lambda arch: model_zoo.build(arch, tmp_path_factory.mktemp("zoo") / arch))


@pytest.fixture(scope="session")
def tiny(zoo: Callable[[str], Path]) -> Model:
    """The tiny llama, in float32."""
    return Model(zoo("llama"), "float32", "cpu")


@pytest.fixture(scope="module")
def shared(zoo: Callable[[str], Path]) -> Iterator[House]:
    patch = pytest.MonkeyPatch()
    patch.setattr(workers.actor, "NixlTransport", LateWrites)
    patch.setattr(workers.watch, "INTERVAL_S", 0.05)
    patch.setattr(workers.actor, "TIMEOUT_S", 0.2)
    patch.setattr(workers.gateways, "TIMEOUT_S", 0.2)
    patch.setattr(workers.takeover, "SETTLE_RETRY_S", 0.01)
    patch.setattr(workers.takeover, "SETTLE_RETRY_MAX_S", 0.05)
    interval = sys.getswitchinterval()
    made = House(zoo("llama"))
    yield made
    made.close()
    patch.undo()
    sys.setswitchinterval(interval)
    gc.unfreeze()


@pytest.fixture
def house(shared: House) -> Iterator[House]:
    """Without faults and without cached prompts; afterwards everything must be at rest and answer."""
    yield shared
    shared.calls.rule = smooth
    shared.calls.listeners.clear()
    shared.gateway.open.set()
    for worker in (shared.p, shared.d):
        worker._transfer_loop.transport.own.delay = lambda: 0.0
        worker._transfer_loop.transport.own.fail = lambda: False
    shared.run(shared.rest())
    shared.run(until(lambda: answers(shared)))
    shared.run(shared.rest())
