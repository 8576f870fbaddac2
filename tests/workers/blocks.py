"""Blocks with payloads that tell whose they are; and, as a program, a worker that uses a store at random."""

import random
import sys
from pathlib import Path

from transfer.messages import pack_tokens
from workers.kv.blockfile import Block, child_digest, root_digest
from workers.kv.disk import DiskStore

LAYOUT = "a1" * 16
OTHER_LAYOUT = "b2" * 16
SIZE = 20_000


def chain(length: int, first: int = 0, salt: bytes = b"", fingerprint: str = LAYOUT) -> list[Block]:
    """The blocks of a prefix whose tokens begin with `first`."""
    blocks: list[Block] = []
    parent = root_digest(fingerprint, salt)
    for depth in range(length):
        tokens = pack_tokens([first, *range(depth, depth + 15)])
        digest = child_digest(parent, tokens)
        blocks.append(Block(digest, parent, depth, salt, tokens))
        parent = digest
    return blocks


def payload(block: Block, size: int = SIZE) -> bytes:
    """What a block holds: always the same, and never the same for two blocks."""
    return random.Random(block.digest).randbytes(size)


def store(path: Path, worker: str = "w0", limit: int = 1 << 30, **more: object) -> DiskStore:
    """A store for blocks of SIZE bytes."""
    settings: dict[str, object] = {"fingerprint": LAYOUT, "block_bytes": SIZE, **more}
    return DiskStore(path, worker, limit=limit, **settings)  # type: ignore[arg-type]


def get(disk: DiskStore, owner: str, block: Block, size: int = SIZE) -> bytes | None:
    """A block's payload, None for a miss."""
    out = bytearray(size)
    return bytes(out) if disk.read(owner, block, memoryview(out)) else None


def use_at_random(path: Path, worker: str, workers: list[str], operations: int, seed: int) -> int:
    """Write, remove, and read what any worker may have; how many reads were hits. Raises when a read is torn."""
    chance, disk, hits = random.Random(seed), store(path, worker, 4 << 20), 0
    blocks = chain(60)
    for _ in range(operations):
        block = chance.choice(blocks)
        match chance.randrange(4):
            case 0:
                disk.write(block, payload(block))
            case 1:
                disk.remove(block.digest)
            case _:
                found = get(disk, chance.choice(workers), block)
                if found is not None and found != payload(block):
                    raise AssertionError("a torn read")
                hits += found is not None
    if disk.stats.bad_files or disk.stats.write_errors:
        raise AssertionError(f"{disk.stats}")
    return hits


if __name__ == "__main__":
    where, me, operations, seed = sys.argv[1:]
    print(use_at_random(Path(where), me, ["w0", "w1"], int(operations), int(seed)))  # noqa: T201
