"""The account of a worker that is not there: what a router reads of it, and nothing else."""

from __future__ import annotations

from transfer.messages import CacheStats, Speeds, TransferStats, WorkerStatus


def stand_in(name: str, role: str, speeds: Speeds, token_bytes: int) -> WorkerStatus:
    """A worker's status with these speeds and bytes of KV a token. All have the same model and one life."""
    return WorkerStatus(
        name=name,
        role=role,
        node="",
        pid=0,
        state="ready",
        model="",
        incarnation=1,
        running=0,
        waiting=0,
        queued_tokens=0,
        prefix_cache=True,
        blocks={},
        fragmentation=0.0,
        cache=CacheStats(),
        transfer=TransferStats(),
        speeds=speeds,
        token_bytes=token_bytes,
        resident_bytes=0,
        block_size=0,
        max_model_len=0,
        vocab_size=0,
        fingerprint="",
    )
