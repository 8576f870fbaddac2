"""The constants of policies, looked for on the first quarter of a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cluster.simulate.policies import Constants, Policy
from cluster.simulate.run import Settings, simulate
from cluster.simulate.trace import Request


def first_quarter(trace: Sequence[Request]) -> Sequence[Request]:
    """The requests of the first quarter of the time."""
    end = trace[-1].arrival / 4
    return [request for request in trace if request.arrival <= end]


def tune(
    trace: Sequence[Request], settings: Settings, policy: Policy, done: Callable[[], None] = lambda: None
) -> tuple[Constants, float]:
    """The combination of the least mean time on a trace's first quarter, and that time in seconds. `done` is called
    after each."""
    part = first_quarter(trace)
    tried: list[tuple[float, Constants]] = []
    for constants in policy.choices:
        tried.append((float(simulate(part, settings, policy.made(constants)).seconds.mean()), constants))
        done()
    mean, best = min(tried, key=lambda item: item[0])
    return best, mean
