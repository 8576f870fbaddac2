"""What every part of `headwater bench tiers` is given and brings: sizes, names of sides, engines to measure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cluster.bench.report import Check, Figures
from cluster.bench.tiers.engine import TieredEngine
from transfer.layout import KVLayout
from workers.config import TiersConfig, WorkerConfig
from workers.engine.engine import spare_blocks
from workers.engine.model import Model
from workers.speeds import SpeedMeter

NONE, TIERS, ALWAYS, HOST, DISK = "no tiers", "tiers", "always load", "host hit", "disk hit"
"""The sides."""
FILE_SPARE = 64 * 1024
"""Bytes that a block may take on disk beside its own."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Hits of `prompt` tokens; the guard with prompts of `guarded` tokens; `streams` answers that run while `demoted`
    bytes go down; `conversations` of `turns` turns, with a message of `first` tokens before them and `question` tokens
    and an answer of `output` in each; `requests` different prompts of `different` tokens. Hits, the guard and different
    prompts are measured `rounds` times."""

    prompt: int
    guarded: int
    streams: int
    demoted: int
    conversations: int
    turns: int
    first: int
    question: int
    output: int
    requests: int
    different: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a part measured and what of that is checked."""

    results: dict[str, Figures]
    checks: list[Check]


@dataclass(frozen=True, slots=True)
class Bench:
    """A model, the settings of its workers, and an empty directory. All engines tell one meter how fast prompts are
    computed, so that it is settled soon."""

    model: Model
    worker: WorkerConfig
    tiers: TiersConfig
    path: Path
    shape: Shape
    speeds: SpeedMeter = field(default_factory=SpeedMeter)

    def blocks(self, tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-tokens // self.worker.block_size)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        model = self.model
        return KVLayout(model.identity, model.dtype, self.worker.block_size, model.layers, num_blocks=1).block_bytes

    @contextmanager
    def engines(self, *sizes: Sizes) -> Iterator[list[TieredEngine]]:
        """Engines of these sizes; their threads end with the block."""
        with ExitStack() as stack:
            yield [stack.enter_context(self._engine(one, f"worker-{number}")) for number, one in enumerate(sizes)]

    @contextmanager
    def _engine(self, sizes: Sizes, name: str) -> Iterator[TieredEngine]:
        blocks = max(sizes.device, self.blocks(sizes.longest)) + spare_blocks(self.model)
        memory = {"kv_memory": blocks * self.block_bytes, "max_model_len": sizes.longest, "prefix_cache": True}
        tiers = {
            "host": sizes.host * self.block_bytes,
            "disk": (sizes.disk + 1) * (self.block_bytes + FILE_SPARE) if sizes.disk else 0,
            "disk_path": self.path,
            "guard": sizes.guard,
        }
        worker, below = self.worker.model_copy(update=memory), self.tiers.model_copy(update=tiers)
        engine = TieredEngine(name, self.model, worker, below, self.speeds, sizes.load_s)
        try:
            yield engine
        finally:
            engine.close()


@dataclass(frozen=True, slots=True)
class Sizes:
    """Blocks of an engine's tiers, and its longest sequence in tokens. From host memory a block takes `load_s`
    seconds at least."""

    longest: int
    device: int
    host: int = 0
    disk: int = 0
    guard: bool = True
    load_s: float = 0.0
