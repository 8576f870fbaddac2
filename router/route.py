"""Router: the decision which workers a request goes to.

The prompt's beginning (its anchor) has a home on the ring of prefill workers, so that prompts that share it meet the
same cache. Bounded load (Mirrokni, Thorup, Zadimoghaddam, 2018) sends a request on to the next worker in ring order
when its home already has more than its share. The decode worker is the least loaded; ties go to the one that holds most
of the prompt. What little a decode worker lacks of a prompt it computes itself, when that costs less time than a
hand-over; and what another worker holds is copied from there when that is faster than computing it.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.config import RouterConfig
from router.cost import Reach, handed_over, local, reach
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
    _keys: tuple[bytes, ...]
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
            self._prefill.held.add(self._keys, there=True)

    def close(self) -> None:
        """The request is over."""
        if self._computing:  # whatever kept it from that
            self._computing = False
            self._prefill.prefill_tokens -= self._tokens
            self._prefill.held.forget_soon(self._keys)
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

    def plan(
        self,
        chain: PrefixChain,
        tokens: int,
        generate: bool,
        avoid: frozenset[str] = frozenset(),
        local_tokens: int | None = None,
    ) -> Plan:
        """Workers for a prompt of `tokens` tokens; `generate` is whether more than one output token is wanted, and
        `avoid` names workers that have just failed or are busy. `local_tokens` stands in for the configuration's.
        Raises NoWorkers."""
        most = self._config.local_tokens if local_tokens is None else local_tokens
        able = [worker for worker in self.view.able(PREFILL, BOTH) if worker.name not in avoid]
        if all(worker.name in avoid for worker in self.view.able(DECODE)):
            able = [worker for worker in able if worker.role == BOTH]
        if not able:
            raise NoWorkers("no prefill worker is available" if self.view.able(DECODE, BOTH) else "no decode worker")
        self._prefill_ring.set(worker.name for worker in able)
        anchor = chain.anchor(self._config.anchor_blocks)
        order = [self.view.workers[name] for name in self._prefill_ring.order(anchor)]
        prefill = self._bounded(order, chain, tokens)
        way = self._reach(prefill, chain, tokens, avoid)
        why = {"home": order[0].name, "load": prefill.prefill_tokens, "spilled": prefill is not order[0]}
        if prefill.role == BOTH or not generate:
            return Plan(prefill.name, None, way.fetch, why=why | {"missing": way.missing, "seconds": way.seconds})
        decode = self._decode_for(chain, anchor, avoid)
        here = self._reach(decode, chain, tokens, avoid)
        why |= {"missing": {prefill.name: way.missing, decode.name: here.missing}}
        why |= {"seconds": {prefill.name: handed_over(prefill, way), decode.name: local(decode, here)}}
        if here.missing <= most and local(decode, here) <= handed_over(prefill, way):
            return Plan(decode.name, None, here.fetch, most, why)
        return Plan(prefill.name, decode.name, way.fetch, why=why)

    def dispatch(self, plan: Plan, chain: PrefixChain, tokens: int) -> Ticket:
        """Count a plan as under way. The worker that computes the prompt soon holds it: whoever else begins like it
        should wait there."""
        prefill, decode = (self.view.workers[name] for name in (plan.prefill, plan.decode or plan.prefill))
        known = max(self._held(prefill, chain, tokens), plan.fetch.tokens if plan.fetch else 0)
        prefill.held.add(chain.keys, there=False)
        return Ticket(prefill, decode, tokens - known, chain.keys)

    def holds(self, name: str, chain: PrefixChain) -> None:
        """A worker has all of this."""
        self.view.workers[name].held.add(chain.keys, there=True)

    def lacks(self, name: str, chain: PrefixChain, cached: int) -> None:
        """A worker turned out to have no more than the first `cached` tokens of this."""
        self.view.workers[name].held.cut(chain.keys, cached // chain.block_size)

    def _bounded(self, order: list[WorkerView], chain: PrefixChain, tokens: int) -> WorkerView:
        missing = tokens - self._held(order[0], chain, tokens)
        mean = (sum(worker.prefill_tokens for worker in order) + missing) / len(order)
        bound = max(self._config.load_bound * mean, mean + self._config.load_slack_tokens)
        for worker in order:
            missing = tokens - self._held(worker, chain, tokens)
            if worker.prefill_tokens == 0 or worker.prefill_tokens + missing <= bound:
                return worker
        return min(order, key=lambda worker: worker.prefill_tokens)

    def _decode_for(self, chain: PrefixChain, anchor: bytes, avoid: frozenset[str]) -> WorkerView:
        """The least loaded; of these, the one that holds most of the prompt, then the anchor's home."""
        able = [worker for worker in self.view.able(DECODE) if worker.name not in avoid]
        if not able:
            raise NoWorkers("no decode worker is available")
        self._decode_ring.set(worker.name for worker in able)
        order = [self.view.workers[name] for name in self._decode_ring.order(anchor)]
        return min(order, key=lambda worker: (worker.decodes, -worker.held.match(chain.keys)))

    def _reach(self, worker: WorkerView, chain: PrefixChain, tokens: int, avoid: frozenset[str]) -> Reach:
        """How a worker gets at a prompt: alone, or with the help of the one that holds most of it."""
        own = self._held(worker, chain, tokens)
        source, most = None, own
        for other in self.view.workers.values():
            if other is worker or not other.alive or other.name in avoid or not _alike(worker, other):
                continue
            held = self._held(other, chain, tokens, there=True)
            if held > most:
                source, most = other, held
        return reach(worker, tokens, own, source, most)

    @staticmethod
    def _held(worker: WorkerView, chain: PrefixChain, tokens: int, there: bool = False) -> int:
        """Tokens of a prompt that a worker holds in whole blocks; at least one is left to compute."""
        size = chain.block_size
        return min(worker.held.match(chain.keys, there), (tokens - 1) // size) * size


def _alike(one: WorkerView, other: WorkerView) -> bool:
    """Whether a block of one worker's KV means the same to another."""
    return one.status is not None and other.status is not None and one.status.fingerprint == other.status.fingerprint
