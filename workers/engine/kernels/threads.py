"""Run compiled kernels on PyTorch's own OpenMP threads.

A second pool of threads would compete for the cores with PyTorch's, which keep spinning for a while after each
operator. So kernels are started through the entry point that compiled OpenMP code uses, `GOMP_parallel` of the library
that PyTorch has loaded. Where it is another OpenMP, kernels run on one thread.
"""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from workers.engine.kernels.compiled import compiled

_log = logging.getLogger(__name__)
_THREAD, _TEAM = "headwater_omp_thread", "headwater_omp_team"
_thread = types.ExternalFunction(_THREAD, types.int32())
_team = types.ExternalFunction(_TEAM, types.int32())
_PART = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_BYTE = ir.IntType(8)
_FILL = {dimensions: (1,) * (3 - dimensions) for dimensions in (1, 2, 3)}


@cache
def _openmp() -> ctypes.CDLL | None:
    """The GNU OpenMP library that PyTorch uses, if it is the only one in this process or comes with PyTorch."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        maps = []
    paths = {line.split()[-1] for line in maps if "libgomp" in line}
    installed = Path(torch.__file__).parent.parent
    own = (installed / "torch", installed / "torch.libs")
    mine = [path for path in paths if any(Path(path).is_relative_to(one) for one in own)] or list(paths)
    if len(mine) != 1:
        _log.warning("compiled kernels run on one thread: PyTorch's OpenMP was not found among %s", sorted(paths))
        return None
    return ctypes.CDLL(mine[0])


def threads() -> int:
    """How many threads a kernel is given: as many as PyTorch is set to use, if it can be."""
    return 1 if _openmp() is None else torch.get_num_threads()


def runner(name: str, part: Any) -> Callable[[list[int]], None]:
    """A function that runs `part(data)`, which it compiles under a name, on `threads()` threads.

    `part` finds in `data` what `described` says of tensors, for `argument1` and so on to read, and takes the share that
    `share` gives it."""
    library = _openmp()
    for symbol, function in _team_functions(library).items():
        llvm.add_symbol(symbol, ctypes.cast(function, ctypes.c_void_p).value)
    kernel = compiled(name, part)

    def run(arguments: list[int]) -> None:
        data = array("q", arguments)
        address = ctypes.c_void_p(data.buffer_info()[0])
        if library is None:
            _PART(kernel.address)(address)
        else:
            library.GOMP_parallel(ctypes.c_void_p(kernel.address), address, threads(), 0)

    return run


@cache
def _team_functions(library: ctypes.CDLL | None) -> dict[str, Any]:
    """What says, inside a team, which thread this is, and of how many."""
    if library is not None:
        return {_THREAD: library.omp_get_thread_num, _TEAM: library.omp_get_num_threads}
    number = ctypes.CFUNCTYPE(ctypes.c_int)
    return {_THREAD: number(lambda: 0), _TEAM: number(lambda: 1)}


@njit
def share(count: int) -> Any:
    """The range `(begin, end)` of `count` things that this thread does. OpenMP may start fewer threads than it is asked
    for, so the size of the team is only known inside it."""
    thread, team = _thread(), _team()
    return count * thread // team, count * (thread + 1) // team


def described(*tensors: torch.Tensor) -> list[int]:
    """Addresses and shapes of contiguous tensors of up to three dimensions, as arguments of a kernel. The caller keeps
    the tensors."""
    return [number for one in tensors for number in (one.data_ptr(), *one.shape, *_FILL[one.dim()])]


@intrinsic
def _pointer(_: Any, address: Any) -> Any:
    return types.voidptr(types.int64), lambda context, to, signature, args: to.inttoptr(args[0], _BYTE.as_pointer())


@njit(inline="always")
def argument1(arguments: Any, index: int, element: Any) -> Any:
    """The array of `element`, a type of numpy's, that the tensor of this index is, of one dimension."""
    at = 4 * index
    return carray(_pointer(arguments[at]), (arguments[at + 1],), element)


@njit(inline="always")
def argument2(arguments: Any, index: int, element: Any) -> Any:
    """The same of two dimensions."""
    at = 4 * index
    return carray(_pointer(arguments[at]), (arguments[at + 1], arguments[at + 2]), element)


@njit(inline="always")
def argument3(arguments: Any, index: int, element: Any) -> Any:
    """The same of three dimensions."""
    at = 4 * index
    return carray(_pointer(arguments[at]), (arguments[at + 1], arguments[at + 2], arguments[at + 3]), element)
