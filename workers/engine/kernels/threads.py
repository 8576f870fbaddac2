"""Run a compiled kernel on PyTorch's own OpenMP threads.

A second pool of threads would compete for the cores with PyTorch's, which keep spinning for a while after each
operator. So kernels are started through the entry point that compiled OpenMP code uses, `GOMP_parallel` of the library
that PyTorch has loaded. Where it is another OpenMP, kernels run on one thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import torch
from numba import carray, cfunc, types

_THREAD = "headwater_omp_thread"
_thread = types.ExternalFunction(_THREAD, types.int32())
Part = Callable[[np.ndarray, int, int], None]


@cache
def _openmp() -> ctypes.CDLL | None:
    """The GNU OpenMP library in this process, if there is exactly one that PyTorch uses."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libgomp" in line}
    mine = [path for path in paths if "torch" in path] or list(paths)
    return ctypes.CDLL(mine[0]) if len(mine) == 1 else None


def runner(part: Any) -> Callable[[np.ndarray], None]:
    """A function that runs `part(arguments, thread, threads)`, compiled by numba, on all threads PyTorch is set to use.
    `arguments` is an int64 array of numbers and addresses."""
    library = _openmp()
    if library is None:
        return lambda arguments: part(arguments, 0, 1)
    llvm.add_symbol(_THREAD, ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p).value)

    @cfunc(types.void(types.CPointer(types.int64)))
    def body(data: Any) -> None:
        head = carray(data, 2)
        part(carray(data, head[1])[2:], _thread(), head[0])

    def run(arguments: np.ndarray) -> None:
        threads = torch.get_num_threads()
        if threads == 1:
            part(arguments, 0, 1)
            return
        data = np.concatenate([np.array([threads, len(arguments) + 2]), arguments])
        library.GOMP_parallel(ctypes.c_void_p(body.address), ctypes.c_void_p(data.ctypes.data), threads, 0)

    return run
