"""Router: the decision which workers a request goes to.

The prompt's beginning (its anchor) has a home on the ring of prefill workers, so that prompts that share it meet the
same cache. Bounded load (Mirrokni, Thorup, Zadimoghaddam, 2018) sends a request on to the next worker in ring order
when its home already has more than its share. The decode worker is the least loaded; ties go to the anchor's home.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.config import RouterConfig
from router.ring import Ring
from router.view import BOTH, DECODE, PREFILL, View, WorkerView
from transfer.messages import Plan
from transfer.prefix import PrefixChain


class NoWorkers(Exception):
    """No living worker of a role that the request needs."""


@dataclass(slots=True)
class Ticket:
    """A dispatch that the view counts until it is over. Every method may be called any number of times."""

    _prefill: WorkerView
    _decode: WorkerView
    _tokens: int
    _computing: bool = True
    _open: bool = True

    def __post_init__(self) -> None:
        self._prefill.prefill_tokens += self._tokens
        self._decode.decodes += 1

    def computed(self) -> None:
        """The prompt is done."""
        if self._computing:
            self._computing = False
            self._prefill.prefill_tokens -= self._tokens

    def close(self) -> None:
        """The request is over."""
        self.computed()
        if self._open:
            self._open = False
            self._decode.decodes -= 1


class Router:
    """Decides over a `View`; asks nobody."""

    def __init__(self, view: View, config: RouterConfig) -> None:
        self.view = view
        self._config = config
        self._prefill_ring = Ring()
        self._decode_ring = Ring()

    def plan(self, chain: PrefixChain, tokens: int, generate: bool, avoid: frozenset[str] = frozenset()) -> Plan:
        """Workers for a prompt of `tokens` tokens; `generate` is whether more than one output token is wanted, and
        `avoid` names workers that have just failed or are busy. Raises NoWorkers."""
        able = [worker for worker in self.view.able(PREFILL, BOTH) if worker.name not in avoid]
        if not self.view.able(DECODE):
            able = [worker for worker in able if worker.role == BOTH]
        if not able:
            raise NoWorkers("no prefill worker is available" if self.view.able(DECODE, BOTH) else "no decode worker")
        self._prefill_ring.set(worker.name for worker in able)
        anchor = chain.anchor(self._config.anchor_blocks)
        order = [self.view.workers[name] for name in self._prefill_ring.order(anchor)]
        prefill = self._bounded(order, tokens)
        why = {"home": order[0].name, "load": prefill.prefill_tokens, "spilled": prefill is not order[0]}
        if prefill.role == BOTH or not generate:
            return Plan(prefill.name, None, why)
        return Plan(prefill.name, self._decode_for(anchor, avoid).name, why)

    def dispatch(self, plan: Plan, tokens: int) -> Ticket:
        """Count a plan as under way."""
        workers = self.view.workers
        return Ticket(workers[plan.prefill], workers[plan.decode or plan.prefill], tokens)

    def _bounded(self, order: list[WorkerView], tokens: int) -> WorkerView:
        mean = (sum(worker.prefill_tokens for worker in order) + tokens) / len(order)
        bound = max(self._config.load_bound * mean, mean + self._config.load_slack_tokens)
        for worker in order:
            if worker.prefill_tokens == 0 or worker.prefill_tokens + tokens <= bound:
                return worker
        return min(order, key=lambda worker: worker.prefill_tokens)

    def _decode_for(self, anchor: bytes, avoid: frozenset[str]) -> WorkerView:
        able = [worker for worker in self.view.able(DECODE) if worker.name not in avoid]
        if not able:
            raise NoWorkers("no decode worker is available")
        self._decode_ring.set(worker.name for worker in able)
        order = [self.view.workers[name] for name in self._decode_ring.order(anchor)]
        return min(order, key=lambda worker: worker.decodes)
