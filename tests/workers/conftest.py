"""Models of this package's tests, built and loaded once."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests import model_zoo
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
