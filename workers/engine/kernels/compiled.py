"""How kernels are compiled, and where the result is kept."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from numba import cfunc, config, types

from workers.paths import cache_dir

# Rounding may be reordered, as in any matrix product, but infinities and signs are kept.
FAST = {"reassoc", "contract", "arcp", "nsz"}


def compiled(name: str, function: Callable[..., Any]) -> Any:
    """`function` compiled by numba as a C function of the address of int64 numbers, from the cache where it can be.

    numba files a function under its source file and line and looks at no other file and at no constant that it has
    captured. So each `name`, which must tell constants apart, and each state of all kernel sources has a directory of
    its own. Where no directory can be written, it is compiled anew in every process.
    """
    compiler = partial(cfunc, types.void(types.CPointer(types.int64)), error_model="numpy", fastmath=FAST)
    if (directory := _writable(name)) is None:
        return compiler()(function)
    before, config.CACHE_DIR = config.CACHE_DIR, str(directory)
    try:
        return compiler(cache=True)(function)
    finally:
        config.CACHE_DIR = before


def _writable(name: str) -> Path | None:
    """The directory of a kernel; None where it cannot be written, for numba would then choose another one."""
    try:
        directory = cache_dir() / "kernels" / _sources() / name
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        return None


@cache
def _sources() -> str:
    """A digest of everything that a kernel may be made of."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted([*Path(__file__).parent.glob("*.py"), *Path(__file__).parent.parent.glob("attention/*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()
