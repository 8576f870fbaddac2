"""Run a compiled kernel on PyTorch's own OpenMP threads.

A second pool of threads would compete for the cores with PyTorch's, which keep spinning for a while after each
operator. So kernels are started through the entry point that compiled OpenMP code uses, `GOMP_parallel` of the library
that PyTorch has loaded. Where it is another OpenMP, kernels run on one thread.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import torch
from numba import carray, cfunc, types

_log = logging.getLogger(__name__)
_THREAD, _TEAM = "headwater_omp_thread", "headwater_omp_team"
_thread = types.ExternalFunction(_THREAD, types.int32())
_team = types.ExternalFunction(_TEAM, types.int32())


@cache
def _openmp() -> ctypes.CDLL | None:
    """The GNU OpenMP library that PyTorch uses, if it is the only one in this process or comes with PyTorch."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libgomp" in line}
    installed = Path(torch.__file__).parent.parent
    own = (installed / "torch", installed / "torch.libs")
    mine = [path for path in paths if any(Path(path).is_relative_to(one) for one in own)] or list(paths)
    if len(mine) == 1:
        return ctypes.CDLL(mine[0])
    _log.warning("compiled kernels run on one thread: PyTorch's OpenMP was not found among %s", sorted(paths))
    return None


def runner(part: Any) -> Callable[[np.ndarray], None]:
    """A function that runs `part(arguments, thread, threads)`, compiled by numba, on all threads PyTorch is set to use.
    `arguments` is an int64 array of numbers and addresses. OpenMP may start fewer threads than it is asked for, so the
    size of the team is only known inside it."""
    library = _openmp()
    if library is None:
        return lambda arguments: part(arguments, 0, 1)
    llvm.add_symbol(_THREAD, ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p).value)
    llvm.add_symbol(_TEAM, ctypes.cast(library.omp_get_num_threads, ctypes.c_void_p).value)

    @cfunc(types.void(types.CPointer(types.int64)))
    def body(data: Any) -> None:
        length = carray(data, 1)[0]
        part(carray(data, length)[1:], _thread(), _team())

    def run(arguments: np.ndarray) -> None:
        threads = torch.get_num_threads()
        if threads == 1:
            part(arguments, 0, 1)
            return
        data = np.concatenate([np.array([len(arguments) + 1]), arguments])
        library.GOMP_parallel(ctypes.c_void_p(body.address), ctypes.c_void_p(data.ctypes.data), threads, 0)

    return run
