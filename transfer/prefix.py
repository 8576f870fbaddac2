"""PrefixChain: one 64-bit key for every whole-block prefix of a prompt.

Each key is a keyed BLAKE2b hash of the block's tokens and of the parent's key, so a key names the whole prefix. The
root is derived from the model's fingerprint and the salts, each under a tag of its own kind, so that a tenant can
never be mistaken for an adapter of the same name. Keys are equal in every process and after every restart.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

KEY_BYTES = 8


def root_key(model: str, adapter: str = "", tenant: bytes = b"") -> bytes:
    """The 8-byte key of the empty prefix for a model fingerprint, an adapter and a tenant salt."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"headwater-root")
    for tag, value in ((b"model", model.encode()), (b"adapter", adapter.encode()), (b"tenant", tenant)):
        digest.update(tag + len(value).to_bytes(4, "little") + value)
    return digest.digest()


def block_keys(parent: bytes, tokens: bytes, step: int) -> list[bytes]:
    """The keys of packed `tokens` in blocks of `step` bytes, behind the prefix with the key `parent`; a last partial
    block has none."""
    keys = []
    blake2b = hashlib.blake2b  # a prompt has hundreds of blocks
    for start in range(0, len(tokens) - step + 1, step):
        parent = blake2b(tokens[start : start + step], digest_size=KEY_BYTES, key=parent).digest()
        keys.append(parent)
    return keys


@dataclass(frozen=True, slots=True)
class PrefixChain:
    """Keys of a prompt's whole blocks, shallowest first; `keys[i]` names the first `(i + 1) * block_size` tokens."""

    root: bytes
    keys: tuple[bytes, ...]
    block_size: int

    @classmethod
    def of(cls, root: bytes, prompt: bytes, block_size: int) -> PrefixChain:
        """The chain of packed tokens `prompt`; a last partial block has no key."""
        return cls(root, (), block_size).extended(prompt)

    def extended(self, tokens: bytes) -> PrefixChain:
        """The chain of packed `tokens` that begin with those of this chain."""
        step = self.block_size * 4
        more = block_keys(self.anchor(len(self.keys)), tokens[len(self.keys) * step :], step)
        return PrefixChain(self.root, (*self.keys, *more), self.block_size)

    def numbers(self, depths: np.ndarray) -> np.ndarray:
        """The keys of the prefixes of `depths` blocks (each at least 1) as uint64, as summaries have them."""
        return np.frombuffer(b"".join(self.keys), "<u8")[depths - 1]

    def anchor(self, depth: int) -> bytes:
        """The key that stands for the prompt's beginning: the one of block number `depth` or the deepest there is."""
        return self.keys[min(depth, len(self.keys)) - 1] if self.keys else self.root
