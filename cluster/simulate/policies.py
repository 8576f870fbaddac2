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
from cluster.simulate.run import MakeRouters, Routers, World
from router.config import RouterConfig

HEADWATER, ORACLE = "headwater", "oracle"
Constants = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Policy:
    """How routers choose. `build` makes them in a world, with constants other than the default ones; `grid` has the
    values to try for each of these."""

    build: Callable[[World, Constants], Routers]
    grid: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def made(self, constants: Constants) -> MakeRouters:
        """Its routers, with these constants."""
        return lambda world: self.build(world, constants)

    @property
    def choices(self) -> list[Constants]:
        """Every combination of values."""
        return [dict(zip(self.grid, values, strict=True)) for values in product(*self.grid.values())]


def _rule(rule: Callable[..., Rule], **grid: tuple[Any, ...]) -> Policy:
    """Another router's rule. What it remembers is no router's alone."""
    return Policy(lambda world, constants: Informed(world, rule(**constants)), grid)


BASELINES = {
    "round-robin": _rule(RoundRobin),
    "two-choices": _rule(TwoChoices),
    "chwbl": _rule(BoundedLoad, blocks=(1, 2, 3, 4, 6, 8), load=("requests", "tokens")),
    "sglang": _rule(CacheAware, threshold=(0.3, 0.5, 0.7), absolute=(1, 3, 8, 64)),
    "dynamo": _rule(Overlap, weight=(0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)),
    "lmetric": _rule(Product, tokens=("own", "queued"), alone=(0.25, 1.0, 4.0, 64.0, 256.0, 1024.0)),
}
PEERS = [name for name, one in BASELINES.items() if one.grid]
"""What Headwater is to be better than: each has as many combinations to choose from as Headwater itself."""
POLICIES = {
    HEADWATER: Policy(
        lambda world, constants: Gossiping(world, RouterConfig(**constants)),
        {"cache_weight": (1.0, 1.5, 2.0, 3.0), "load_slack_s": (4.0, 8.0, 16.0)},
    ),
    **BASELINES,
    ORACLE: Policy(lambda world, constants: Exact(world, RouterConfig(**constants))),
}
NAMES = list(POLICIES)


def made(name: str, constants: Constants) -> MakeRouters:
    """The routers of a policy."""
    return POLICIES[name].made(constants)
