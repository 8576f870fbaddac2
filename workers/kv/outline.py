"""Outline: a look at the radix tree and at what lies below the device, together, in bounded time.

The engine's thread owns both, so the walk is made there, between two steps, and stops after `seconds`. It goes breadth
first: what it has not seen by then is deep. What is shown of it is chosen elsewhere: the subtrees with the most tokens.
Since a subtree has no more than the one it is in, that is a tree again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from heapq import nsmallest
from typing import NamedTuple

from transfer.outline import Outline, Run
from transfer.prefix import KEY_BYTES
from workers.kv.cache import KVCache
from workers.kv.radix import TOKEN_BYTES, Node
from workers.kv.tier_index import Entry

CHECK = 64
"""Blocks, those of one run or of many, between two looks at the clock."""
LONG = 4096
"""Blocks after which a run goes on as another one."""
HEAD_TOKENS = 64
START_TOKENS = 512
"""Tokens whose text can be shown: of a run, and of the one that is looked at."""


class Seen(NamedTuple):
    """What was seen of a run; see `Run`."""

    key: bytes = b""
    tokens: int = 0
    device: int = 0
    host: int = 0
    disk: int = 0
    packed: bytes = b""
    salt: bytes = b""
    uses: int = 0
    last_use: int = 0
    pins: int = 0


class Step:
    """One run while the walk goes on: where it ends in the tree and in the tiers, if it is there, and the entries that
    leave it before its end."""

    __slots__ = ("device", "disk", "entry", "host", "key", "last_use", "node", "packed", "parent", "sides", "tokens")

    def __init__(self, parent: int, node: Node | None, entry: Entry | None) -> None:
        self.parent = parent
        self.node = node
        self.entry = entry
        self.key = self.packed = b""
        self.tokens = self.device = self.host = self.disk = 0
        self.sides: list[Entry] = []


class Walk:
    """A walk from the run on that the keys of `path` lead to. It is made on the engine's thread, in `seconds` at most,
    a long run more or less. `salts` is what the salts of the trees begin with that may be seen; None for all of them.
    `seen` are the runs, each behind its parent, of which the first `expanded` have all their children there."""

    def __init__(
        self,
        cache: KVCache,
        path: tuple[bytes, ...],
        salts: bytes | None,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        begun = clock()
        self._step = cache.block_size * TOKEN_BYTES
        self._nodes, self._entries = cache.radix.roots, cache.tiers.index.roots if cache.tiers else {}
        self._salts = salts
        self.path: list[bytes] = []
        self.start = 0
        self.expanded = 0
        self.seen: list[Seen] = []
        self.parents: list[int] = []
        at = self._found(path)
        self._breadth_first(at, begun + seconds, clock)
        self.seconds = clock() - begun

    def _found(self, path: tuple[bytes, ...]) -> Step | None:
        """Where a path leads as far as it goes; None for above all trees."""
        at: Step | None = None
        for key in path:
            found = self._child(at, key)
            if found is None:
                break
            self.start += at.tokens if at is not None else 0
            self.path.append(key)
            at = found
        return at

    def _breadth_first(self, at: Step | None, until: float, clock: Callable[[], float]) -> None:
        steps: list[Step | None] = [at]
        blocks, size = 0, self._step // TOKEN_BYTES
        self._note(at, -1)
        for number, step in enumerate(steps):
            for child in self._children(step, number):
                steps.append(child)
                self._note(child, number)
                blocks += 1 + child.tokens // size
                if blocks >= CHECK:
                    blocks = 0
                    if clock() > until:
                        return
            self.expanded = number + 1

    def _note(self, step: Step | None, parent: int) -> None:
        self.parents.append(parent)
        if step is None:
            self.seen.append(Seen())
            return
        node, salt = step.node, b""
        if not step.tokens:
            salt = node.tokens if node is not None else step.entry.salt if step.entry is not None else b""
        packed = step.packed[: (HEAD_TOKENS if parent >= 0 else START_TOKENS) * TOKEN_BYTES]
        uses, last_use, pins = (node.uses, node.last_use, node.pins) if node is not None else (0, 0, 0)
        held = step.tokens, step.device, step.host, step.disk
        self.seen.append(Seen(step.key, *held, packed, salt, uses, last_use, pins))

    # --- who comes after whom -----------------------------------------------------------------------------------

    def _children(self, step: Step | None, number: int) -> Iterator[Step]:
        if step is None:
            yield from self._trees(number)
            return
        node, entry = step.node, step.entry
        for side in step.sides:
            yield self._below(side, number)
        for edge in node.children.values() if node is not None else ():
            yield self._on_device(edge, entry, number)
        for tokens, child in entry.children.items() if entry is not None else ():
            if node is None or tokens not in node.children:
                yield self._below(child, number)

    def _child(self, step: Step | None, key: bytes) -> Step | None:
        """The one with this key. Of the others nothing is looked at but theirs."""
        if step is None:
            return next((one for one in self._trees(-1) if one.key == key), None)
        for edge in step.node.children.values() if step.node is not None else ():
            if edge.keys[:KEY_BYTES] == key:
                return self._on_device(edge, step.entry, -1)
        for one in (*step.sides, *(step.entry.children.values() if step.entry is not None else ())):
            if one.key == key:
                return self._below(one, -1)
        return None

    def _trees(self, number: int) -> Iterator[Step]:
        for salt in dict.fromkeys((*self._nodes, *self._entries)):
            if self._salts is not None and not salt.startswith(self._salts):
                continue
            step = Step(number, self._nodes.get(salt), self._entries.get(salt))
            step.key = step.node.keys if step.node is not None else step.entry.key if step.entry is not None else b""
            yield step

    def _on_device(self, node: Node, entry: Entry | None, number: int) -> Step:
        """An edge of the tree, and what the tiers have of it."""
        step = Step(number, node, entry)
        step.key, step.packed = node.keys[:KEY_BYTES], node.tokens
        step.tokens = step.device = len(node.tokens) // TOKEN_BYTES
        size = self._step // TOKEN_BYTES
        for start in range(0, len(node.tokens), self._step):
            if entry is None:
                break
            above, entry = entry, entry.children.get(node.tokens[start : start + self._step])
            if start and len(above.children) > (entry is not None):
                step.sides.extend(one for one in above.children.values() if one is not entry)
            if entry is not None:
                step.host += size * entry.ready
                step.disk += size * bool(entry.owner)
        step.entry = entry
        return step

    def _below(self, entry: Entry, number: int) -> Step:
        """What only lower tiers have, down to where it branches."""
        step = Step(number, None, entry)
        step.key, packed = entry.key, [entry.tokens]
        size = self._step // TOKEN_BYTES
        while True:
            step.tokens += size
            step.host += size * entry.ready
            step.disk += size * bool(entry.owner)
            if len(entry.children) != 1 or len(packed) == LONG:
                break
            (entry,) = entry.children.values()
            packed.append(entry.tokens)
        step.entry, step.packed = entry, b"".join(packed)
        return step


def outline(walk: Walk, most: int) -> Outline:
    """The `most` runs of a walk that have most behind them. Any thread may do this."""
    seen, parents = walk.seen, walk.parents
    below = [one.tokens for one in seen]
    children = [0] * len(seen)
    for number in range(len(seen) - 1, 0, -1):
        below[parents[number]] += below[number]
        children[parents[number]] += 1
    shown = sorted(nsmallest(most, range(len(seen)), key=lambda number: (-below[number], number)))
    places = {number: place for place, number in enumerate(shown)}
    among = [0] * len(seen)
    for number in shown[1:]:
        among[parents[number]] += 1
    latest = max(one.last_use for one in seen)
    runs = []
    for number in shown:
        one, parent = seen[number]._asdict(), places[parents[number]] if number else -1
        last_use = one.pop("last_use")
        ago, count = latest - last_use if last_use else 0, children[number]
        runs.append(Run(parent, ago=ago, below=below[number], children=count, hidden=count - among[number], **one))
    whole = walk.expanded == len(seen)
    return Outline(tuple(walk.path), walk.start, tuple(runs), len(seen), whole, walk.seconds)
