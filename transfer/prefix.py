"""PrefixChain: one 64-bit key for every whole-block prefix of a prompt.

Each key is a keyed BLAKE2b hash of the block's tokens and of the parent's key, so a key names the whole prefix. The
root is derived from the model's fingerprint and the salts, each under a tag of its own kind, so that a tenant can
never be mistaken for an adapter of the same name. Keys are equal in every process and after every restart.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

KEY_BYTES = 8


def root_key(model: str, adapter: str = "", tenant: bytes = b"") -> bytes:
    """The 8-byte key of the empty prefix for a model fingerprint, an adapter and a tenant salt."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"headwater-root")
    for tag, value in ((b"model", model.encode()), (b"adapter", adapter.encode()), (b"tenant", tenant)):
        digest.update(tag + len(value).to_bytes(4, "little") + value)
    return digest.digest()


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
        keys, step = list(self.keys), self.block_size * 4
        for start in range(len(keys) * step, len(tokens) - step + 1, step):
            key = keys[-1] if keys else self.root
            keys.append(hashlib.blake2b(tokens[start : start + step], digest_size=KEY_BYTES, key=key).digest())
        return PrefixChain(self.root, tuple(keys), self.block_size)

    def anchor(self, depth: int) -> bytes:
        """The key that stands for the prompt's beginning: the one of block number `depth` or the deepest there is."""
        return self.keys[min(depth, len(self.keys)) - 1] if self.keys else self.root
