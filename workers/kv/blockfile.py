"""Block files: one KV block on disk, with everything by which a reader can tell that it is exactly what it looks for.

A file is a fixed part (magic, version, lengths, depth, digests, checksum of the payload), fingerprint, salt and tokens,
a checksum of all that, and the payload: the block's bytes in layer order. Checksums are xxh3-128. A file gets its name,
the block's digest, when it is complete. It is not forced to the disk: what a crash of the machine tears, the checksums
tell.
"""

from __future__ import annotations

import hashlib
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

DIGEST_BYTES = 16
SUFFIX = ".kv"
UNFINISHED = ".tmp"
"""Suffix of a file that is being written."""

_MAGIC = b"HWkvBLK\0"
_VERSION = 1
_FIXED = struct.Struct("<8sHHIIIQ16s16s16s")
_SUM_BYTES = 16
_MAX_FINGERPRINT, _MAX_SALT, _MAX_TOKENS = 64, 2048, 4096
MAX_HEAD_BYTES = _FIXED.size + _MAX_FINGERPRINT + _MAX_SALT + _MAX_TOKENS + _SUM_BYTES
"""What a file has before its payload, at most."""

Payload = bytes | bytearray | memoryview


class BadFile(Exception):
    """A file that is not the block it is named after; the message says in what, without showing its content."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block below the device. `digest` names the whole prefix that ends with it, `parent` the one before (of a first
    block: the root's); `depth` counts the blocks before it. `salt` says which tree of the radix cache it belongs to,
    `tokens` are its own, packed."""

    digest: bytes
    parent: bytes
    depth: int
    salt: bytes
    tokens: bytes


def root_digest(fingerprint: str, salt: bytes) -> bytes:
    """Names the empty prefix of a salt, given the layout's fingerprint."""
    return _digest(b"headwater-root", fingerprint.encode(), salt)


def child_digest(parent: bytes, tokens: bytes) -> bytes:
    """Names the prefix that goes on from `parent` with one block of packed tokens."""
    return _digest(b"headwater-block", parent, tokens)


def write(path: str | Path, fingerprint: str, block: Block, payload: Payload) -> None:
    """Write a file and publish it when it is complete; the directory must exist. Raises OSError, and then leaves
    nothing behind, and ValueError where the block has a longer salt or more tokens than a file can."""
    if max(len(fingerprint) - _MAX_FINGERPRINT, len(block.salt) - _MAX_SALT, len(block.tokens) - _MAX_TOKENS) > 0:
        raise ValueError("fingerprint, salt or tokens are longer than a block file can have")
    data = memoryview(payload).cast("B")
    head = _head(fingerprint, block, data.nbytes, xxhash.xxh3_128_digest(data))
    unfinished = os.fspath(path).removesuffix(SUFFIX) + UNFINISHED
    try:
        with open(unfinished, "wb", buffering=0) as file:
            # With its full length from the start some file systems (XFS) do not allocate space in advance.
            file.truncate(len(head) + data.nbytes)
            _write_all(file, memoryview(head))
            _write_all(file, data)
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)
        raise


def read_header(path: str | Path, fingerprint: str) -> Block:
    """Which block a file has. Checks everything but the payload. Raises BadFile or OSError."""
    with _open(path) as file:
        return _read_header(file, path, fingerprint)[0]


def read(path: str | Path, fingerprint: str, block: Block, out: memoryview) -> None:
    """Read a block's payload into `out`. Raises OSError, or BadFile when the file is not exactly that block with so
    many bytes; `out` is undefined then."""
    with _open(path) as file:
        _read(file, fingerprint, block, out.cast("B"))


def verify(path: str | Path, fingerprint: str) -> int:
    """Check all of a file; the length of its payload. Raises BadFile or OSError."""
    with _open(path) as file:
        block, payload_bytes = _read_header(file, path, fingerprint)
        file.seek(0)
        _read(file, fingerprint, block, memoryview(bytearray(payload_bytes)))
        return payload_bytes


def prefetch(path: str | Path) -> None:
    """Let the system begin to read a file that will be read soon. Raises OSError."""
    with _open(path) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _digest(kind: bytes, *parts: bytes) -> bytes:
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES, person=kind)
    for part in parts:
        hasher.update(len(part).to_bytes(4, "little") + part)
    return hasher.digest()


def _head(fingerprint: str, block: Block, payload_bytes: int, payload_sum: bytes) -> bytes:
    name = fingerprint.encode()
    lengths = (len(name), len(block.salt), len(block.tokens))
    fixed = _FIXED.pack(_MAGIC, _VERSION, *lengths, block.depth, payload_bytes, block.digest, block.parent, payload_sum)
    head = b"".join((fixed, name, block.salt, block.tokens))
    return head + xxhash.xxh3_128_digest(head)


def _write_all(file: BinaryIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _open(path: str | Path) -> BinaryIO:
    """Without waiting for the other end of what may be a pipe. Raises OSError."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def _read_header(file: BinaryIO, path: str | Path, fingerprint: str) -> tuple[Block, int]:
    """The block, and the length of its payload."""
    fixed = file.read(_FIXED.size)
    if len(fixed) < _FIXED.size:
        raise BadFile("it ends within its header")
    magic, version, *lengths, depth, payload_bytes, digest, parent, payload_sum = _FIXED.unpack(fixed)
    if magic != _MAGIC or version != _VERSION:
        raise BadFile("it is no block file of this version")
    if any(length > most for length, most in zip(lengths, (_MAX_FINGERPRINT, _MAX_SALT, _MAX_TOKENS), strict=True)):
        raise BadFile("its header is too long")
    name, salt, tokens = (file.read(length) for length in lengths)
    block = Block(digest, parent, depth, salt, tokens)
    if name != fingerprint.encode():
        raise BadFile("it belongs to another model or layout")
    head = _head(fingerprint, block, payload_bytes, payload_sum)
    if fixed + name + salt + tokens + file.read(_SUM_BYTES) != head:
        raise BadFile("its header is damaged")
    if os.path.basename(path) != digest.hex() + SUFFIX:
        raise BadFile("it has the name of another block")
    if digest != child_digest(parent, tokens) or (not depth and parent != root_digest(fingerprint, salt)):
        raise BadFile("its digests are wrong")
    if os.fstat(file.fileno()).st_size != len(head) + payload_bytes:
        raise BadFile("its length is wrong")
    return block, payload_bytes


def _read(file: BinaryIO, fingerprint: str, block: Block, out: memoryview) -> None:
    head = _head(fingerprint, block, out.nbytes, bytes(_SUM_BYTES))
    found = file.read(len(head))
    payload_sum = found[_FIXED.size - _SUM_BYTES : _FIXED.size]
    if len(payload_sum) != _SUM_BYTES or found != _head(fingerprint, block, out.nbytes, payload_sum):
        raise BadFile("its header is damaged or that of another block")
    if file.readinto(out) != out.nbytes or file.read(1):  # type: ignore[attr-defined]
        raise BadFile("its length is wrong")
    if xxhash.xxh3_128_digest(out) != payload_sum:
        raise BadFile("its payload is damaged")
