"""An engine with tiers that answers one request after the other, to be killed: `python -m tests.workers.tiered`."""

import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.workers.drive import engine, poison, request
from transfer.layout import WHOLE, Shard
from transfer.messages import Delta
from workers.config import TiersConfig
from workers.engine.engine import Engine
from workers.engine.model import Model
from workers.kv.tier_io import TierIO

PREFIXES, PREFIX, OWN, OUTPUT = 24, 96, 7, 3
BLOCKS = PREFIXES * PREFIX // 16
"""What all prefixes together take."""


@dataclass(frozen=True, slots=True)
class Tiered:
    """An engine and the threads of its tiers."""

    engine: Engine
    io: TierIO

    def close(self) -> None:
        """End the threads and give the directory back."""
        self.io.stop(5.0)

    def rest(self) -> None:
        """Wait until nothing goes up or down."""
        tiers = self.engine.cache.tiers
        assert tiers is not None
        until = time.monotonic() + 20
        while tiers.busy or tiers.status().under_way:
            assert time.monotonic() < until, "it never comes to rest"
            self.engine.plan()
            time.sleep(0.002)


def tiered(
    model: Model,
    device: int,
    host: int,
    disk: int = 0,
    path: Path | None = None,
    shard: Shard = WHOLE,
    **more: object,
) -> Tiered:
    """Tiers of so many blocks each."""
    block_bytes = engine(model, max_model_len=32).memory.layout.block_bytes
    made = engine(model, shard, kv_memory=device * block_bytes, max_model_len=min(device * 16, 256))
    files = disk and (disk + 1) * (block_bytes + 40_000)
    config = TiersConfig(host=host * block_bytes, disk=files, disk_path=path, **more)  # type: ignore[arg-type]
    return Tiered(made, made.attach("worker", config, None, lambda: None))


def prompts(seed: int, count: int) -> list[list[int]]:
    """Prompts that begin with one of few prefixes, or with a part of it, and go on by themselves."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(1, 250) for _ in range(PREFIX)] for _ in range(PREFIXES)]
    return [
        rng.choice(beginnings)[: rng.choice([PREFIX, PREFIX, PREFIX // 2 + 3])]
        + [rng.randrange(1, 250) for _ in range(OWN)]
        for _ in range(count)
    ]


def answer(one: Engine, prompt: list[int], salt: bytes = b"") -> tuple[list[int], Delta]:
    """The tokens of an answer, and its last delta."""
    each = request(prompt, OUTPUT, salt)
    one.add(each)
    tokens: list[int] = []
    until = time.monotonic() + 30
    while time.monotonic() < until:
        plan = one.plan()
        deltas = one.run(plan.works).deltas
        poison(one)
        for delta in deltas:
            assert delta.error is None, delta.error
            tokens.extend(delta.tokens)
            if delta.finish_reason:
                return tokens, delta
        if not plan.works:
            time.sleep(0.0005)
    raise AssertionError("no answer")


def main() -> None:
    """Answer, a line each: the tokens and how many of the prompt were cached."""
    model, path, count, first = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    one = tiered(Model(model, "float32", "cpu"), BLOCKS // 10, 3 * BLOCKS // 10, BLOCKS * 2, path)
    time.sleep(0.2)
    for prompt in prompts(4, count)[first:]:
        tokens, last = answer(one.engine, prompt)
        sys.stdout.write(json.dumps({"tokens": tokens, "cached": last.cached_tokens}) + "\n")
        sys.stdout.flush()
    one.rest()
    one.close()


if __name__ == "__main__":
    main()
