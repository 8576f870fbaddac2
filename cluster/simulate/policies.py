"""The policies by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from cluster.simulate.baselines import BoundedLoad, CacheAware, Overlap, Product, RoundRobin, Rule, TwoChoices
from cluster.simulate.gossiping import Gossiping
from cluster.simulate.headwater import Exact
from cluster.simulate.informed import Informed
from cluster.simulate.run import MakeRouters

HEADWATER, ORACLE = "headwater", "oracle"
Constants = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Baseline:
    """Another router's rule. `grid` has the values to try for each of its constants."""

    rule: Callable[..., Rule]
    grid: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def made(self, constants: Constants) -> MakeRouters:
        """Its routers, with constants other than the default ones. What a rule remembers is no router's alone."""
        return lambda world: Informed(world, self.rule(**constants))

    @property
    def choices(self) -> list[Constants]:
        """Every combination of values."""
        return [dict(zip(self.grid, values, strict=True)) for values in product(*self.grid.values())]


BASELINES = {
    "round-robin": Baseline(RoundRobin),
    "two-choices": Baseline(TwoChoices),
    "chwbl": Baseline(BoundedLoad, {"blocks": (1, 2, 3, 4, 6, 8), "load": ("requests", "tokens")}),
    "sglang": Baseline(CacheAware, {"threshold": (0.1, 0.3, 0.5), "absolute": (1, 3, 8, 64)}),
    "dynamo": Baseline(Overlap, {"weight": (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)}),
    "lmetric": Baseline(Product, {"tokens": ("own", "queued"), "alone": (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)}),
}
PEERS = [name for name, one in BASELINES.items() if one.grid]
"""What Headwater is to be better than: every baseline has as many combinations to choose from."""
OURS: dict[str, MakeRouters] = {HEADWATER: Gossiping, ORACLE: Exact}
NAMES = [HEADWATER, *BASELINES, ORACLE]


def made(name: str, constants: Constants) -> MakeRouters:
    """The routers of a policy."""
    return OURS[name] if name in OURS else BASELINES[name].made(constants)
