"""RadixCache: which token prefixes have their KV in which blocks.

A radix tree over whole blocks (after SGLang's RadixAttention): an edge holds a run of blocks and their tokens, and
splits only at block boundaries. Children are found by the exact tokens of their first block, so a hash can never
vouch for a block. Each salt has a tree of its own. The tree knows block ids and tokens; ownership is the pool's.

A `Watcher` is told which prefixes come and go. For it, every node keeps the chain keys of its blocks (see
transfer/prefix.py); without one nothing is hashed.

Below whole blocks there is `Partial`: the cached block that begins most like what is wanted, for copying. A `tail` is
a leaf of one block that is not full; it is only ever found that way.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Protocol

from sortedcontainers import SortedList

from transfer.gossip.ladder import between
from transfer.prefix import KEY_BYTES, block_keys
from workers.kv.policies import Policy

TOKEN_BYTES = 4


class Watcher(Protocol):
    """Who is told, with '<u8' chain keys as numbers, which checkpoints (see transfer/gossip/ladder.py) the tree has.
    What is had after each call is closed under prefix. Called by the thread that changes the tree."""

    def root(self, salt: bytes) -> bytes:
        """The key that a salt's chains begin with."""

    def came(self, keys: list[int]) -> None:
        """These are cached from now on, ancestors first."""

    def went(self, keys: list[int]) -> None:
        """These are not any more, descendants first."""


class Node:
    """An edge of whole blocks, behind the first `start` blocks of its prefix. `keys` are its chain keys, 8 bytes a
    block, where there is a watcher; of a root the one to start from. `pins` counts live references to this node or to
    anything below it. `order` has the keys of `children`, sorted, where there are several. Evicted after everything of
    a lower `priority`, and before its time `keep_until` only when nothing else is left."""

    __slots__ = (
        "blocks",
        "children",
        "created",
        "keep_until",
        "keys",
        "last_use",
        "order",
        "parent",
        "pins",
        "previous_use",
        "priority",
        "start",
        "tokens",
        "uses",
    )

    def __init__(self, parent: Node | None, tokens: bytes, blocks: array[int]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.blocks = blocks
        self.start: int = parent.start + len(parent.blocks) if parent else 0
        self.keys = b""
        self.children: dict[bytes, Node] = _NO_CHILDREN
        self.order: SortedList | None = None
        self.pins = 0
        self.created = self.last_use = self.previous_use = self.uses = 0
        self.priority = 0
        self.keep_until = 0.0


_NO_CHILDREN: dict[bytes, Node] = {}
"""Shared by all leaves, which are most of a tree; never written to."""


@dataclass(frozen=True, slots=True)
class Partial:
    """A cached block, the first of `node`, whose first `tokens` tokens are the ones wanted next."""

    node: Node
    block: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix: its blocks in order and the node that ends it; `partial` goes on inside a block."""

    node: Node
    blocks: list[int]
    partial: Partial | None


@dataclass(frozen=True, slots=True)
class Insertion:
    """What an insert did: the table to use from now on, ids now owned by the tree, ids that were duplicates, and ids
    the tree gives up because a longer block has come in their place."""

    node: Node
    blocks: list[int]
    adopted: list[int]
    duplicates: list[int]
    superseded: list[int]


class RadixCache:
    """Prefix tree of cached blocks with pins and leaf-first eviction in O(log n). `clock` gives seconds."""

    def __init__(self, block_size: int, policy: Policy, clock: Callable[[], float]) -> None:
        self._step = block_size * TOKEN_BYTES
        self._block_size = block_size
        self._policy = policy
        self._clock = clock
        self._watcher: Watcher | None = None
        self._roots: dict[bytes, Node] = {}
        self._uses = count(1)
        self._serial = count()
        # (priority, worth, serial, leaf). A sorted list, not a heap: its costs hardly grow with its length.
        self._queue = SortedList()
        # (keep_until, serial, leaf), to see whose time is over; (priority, keep_until, serial, leaf), to see who goes
        # first when there is nobody else.
        self._kept: list[tuple[float, int, Node]] = []
        self._kept_by_priority = SortedList()
        self.cached = 0
        self.pinned = 0

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher` of everything from now on. Raises ValueError where something is cached already."""
        if self.cached:
            raise ValueError("a tree can be watched only from its beginning")
        self._watcher = watcher

    @property
    def roots(self) -> dict[bytes, Node]:
        """The root of each salt's tree; do not change it."""
        return self._roots

    @property
    def evictable(self) -> int:
        """Blocks that eviction could free: all that no pin holds."""
        return self.cached - self.pinned

    def match(self, salt: bytes, tokens: bytes) -> Match:
        """The longest cached prefix of packed `tokens` in whole blocks. Splits an edge that matches in part, so that
        the returned node ends exactly where the match does; what other matches return does not change. It is no use by
        itself: see `touch`."""
        node = self._root(salt)
        blocks: list[int] = []
        position = 0
        while (child := self._child(node, tokens, position)) is not None:
            length = self._common(child.tokens, tokens, position)
            if length < len(child.tokens):
                child = self._split(child, length // self._step)
            node = child
            blocks.extend(node.blocks)
            position += length
        return Match(node, blocks, self._partial(node, tokens[position : position + self._step]))

    def peek(self, salt: bytes, tokens: bytes, partial: bool) -> int:
        """Tokens that `match` would find, with or without those inside a block; changes nothing."""
        node = self._roots.get(salt)
        position = 0
        while node and (child := self._child(node, tokens, position)) is not None:
            length = self._common(child.tokens, tokens, position)
            node, position = child, position + length
            if length < len(child.tokens):
                rest = child.tokens[length : length + self._step]
                inside = _common_tokens(rest, tokens[position : position + self._step])
                return position // TOKEN_BYTES + (inside if partial else 0)
        inner = self._partial(node, tokens[position : position + self._step]) if node and partial else None
        return position // TOKEN_BYTES + (inner.tokens if inner else 0)

    def insert(self, salt: bytes, tokens: bytes, blocks: list[int], own: Node | None = None) -> Insertion:
        """Make `blocks` findable under packed `tokens` (whole blocks, `len(blocks)` of them). Where the tree already
        holds a prefix under other ids, its ids win and the caller's come back as duplicates. `own` is the node that the
        caller has pinned: if the caller alone has made and used it, it grows instead of getting a child, so that an
        answer, which comes block by block, does not become a chain of nodes."""
        match = self.match(salt, tokens)
        known = len(match.blocks)
        duplicates = [mine for mine, theirs in zip(blocks, match.blocks, strict=False) if mine != theirs]
        adopted = blocks[known:]
        node = match.node
        superseded: list[int] = []
        if adopted and node is own and (node.uses, node.pins) == (1, 1) and node.parent and not node.children:
            node.tokens += tokens[known * self._step :]
            node.blocks.extend(adopted)
            self.cached += len(adopted)
            self.pinned += len(adopted)
            self._came(node, len(node.blocks) - len(adopted))
        elif adopted:
            node = self._grow(salt, match.node, tokens[known * self._step :], adopted)
            superseded = self._supersede(match.partial, node)
        return Insertion(node, match.blocks + adopted, adopted, duplicates, superseded)

    def keep_tail(
        self, salt: bytes, node: Node | None, tokens: bytes, block: int, priority: int = 0, keep_until: float = 0.0
    ) -> list[int] | None:
        """Make a block that is not full findable behind `node` (None: at the beginning) for copying. Returns the ids
        that the tree gives up for it, or None when the tree has all its tokens already. For `priority` and
        `keep_until` see `protect`."""
        if node is None or node.parent is None:
            # A match that found nothing may have returned a root that never got into the tree.
            node = self._root(salt)
        known = self._partial(node, tokens)
        if known is not None and known.tokens * TOKEN_BYTES == len(tokens):
            return None
        return self._supersede(known, self._grow(salt, node, tokens, [block], priority, keep_until))

    def touch(self, node: Node) -> None:
        """A request uses the prefix that ends with a node."""
        while node.parent is not None:
            self._use(node)
            node = node.parent

    def renew(self, node: Node) -> None:
        """The use of the prefix that ends with a node is over: it was in use until now."""
        while node.parent is not None:
            self._policy.renewed(node, next(self._uses))
            node = node.parent

    def pin(self, node: Node) -> None:
        """Forbid eviction of a node and of all its ancestors until `unpin`."""
        at: Node | None = node
        while at is not None:
            if at.pins == 0:
                self.pinned += len(at.blocks)
            at.pins += 1
            at = at.parent

    def unpin(self, node: Node) -> None:
        """Undo one `pin` of this node."""
        at: Node | None = node
        while at is not None:
            at.pins -= 1
            if at.pins == 0:
                self.pinned -= len(at.blocks)
                self._offer(at)
                self._drop_empty_root(at)
            at = at.parent

    def protect(self, node: Node, priority: int, keep_until: float) -> None:
        """Let a pinned node and its ancestors be evicted after what has a lower priority, and before the time
        `keep_until` only when nothing else can be. Never takes protection away."""
        while node.parent is not None:
            node.priority, node.keep_until = max(node.priority, priority), max(node.keep_until, keep_until)
            node = node.parent

    def evict(self, wanted: int) -> list[int]:
        """Forget up to `wanted` blocks, the leaves of least worth first, each from its end; returns their ids."""
        freed: list[int] = []
        while len(freed) < wanted and (node := self._next_to_go()) is not None:
            take = min(wanted - len(freed), len(node.blocks))
            keep = len(node.blocks) - take
            freed.extend(node.blocks[keep:])
            self.cached -= take
            self._went(node, keep)
            if keep:
                node.blocks, node.tokens = node.blocks[:keep], node.tokens[: keep * self._step]
                self._offer(node)
            else:
                self._remove(node)
        return freed

    def least(self, count: int) -> list[Node]:
        """Up to `count` of the leaves that go next, roughly in order; changes nothing."""
        queued = (entry[-1] for entry in self._queue)
        return list(islice((node for node in queued if _evictable(node)), count))

    def prefix(self, node: Node) -> tuple[bytes, bytes]:
        """The salt and the packed tokens, in whole blocks, of the prefix that ends with a node."""
        edges: list[bytes] = []
        while node.parent is not None:
            edges.append(node.tokens[: len(node.tokens) // self._step * self._step])
            node = node.parent
        return node.tokens, b"".join(reversed(edges))

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before children."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # --- matching -----------------------------------------------------------------------------------------------

    def _common(self, edge: bytes, tokens: bytes, position: int) -> int:
        """Bytes of `edge` that `tokens` from `position` on share with it, in whole blocks."""
        if tokens[position : position + len(edge)] == edge:
            return len(edge)
        length = self._step
        while edge[length : length + self._step] == tokens[position + length : position + length + self._step]:
            length += self._step
        return length

    def _root(self, salt: bytes) -> Node:
        """The root of a salt; one that is not in the tree yet gets there with its first child."""
        return self._roots.get(salt) or Node(None, salt, array("i"))

    def _child(self, node: Node, tokens: bytes, position: int) -> Node | None:
        """The child that begins with the next whole block of `tokens`."""
        if position + self._step > len(tokens):
            return None  # what is left could only be equal to a tail
        return node.children.get(tokens[position : position + self._step])

    def _partial(self, node: Node, tokens: bytes) -> Partial | None:
        """The child whose first block begins most like `tokens`: in sorted order it stands next to them."""
        near = node.children.keys()
        if node.order is not None:
            at = node.order.bisect_left(tokens)
            near = node.order[max(0, at - 1) : at + 1]
        best, length = b"", 0
        for key in near:
            common = _common_tokens(key, tokens)
            if common > length:
                best, length = key, common
        if not length:
            return None
        child = node.children[best]
        return Partial(child, child.blocks[0], length)

    def _use(self, node: Node) -> None:
        demoted = self._policy.used(node, next(self._uses))
        if isinstance(demoted, Node):
            self._offer(demoted)

    # --- the tree -----------------------------------------------------------------------------------------------

    def _grow(
        self, salt: bytes, parent: Node, tokens: bytes, blocks: list[int], priority: int = 0, keep_until: float = 0.0
    ) -> Node:
        if parent.parent is None:
            self._roots[salt] = parent
            if self._watcher is not None and not parent.keys:
                parent.keys = self._watcher.root(salt)
        node = Node(parent, tokens, array("i", blocks))
        node.priority, node.keep_until = priority, keep_until
        self._use(node)
        node.created = node.last_use
        self._adopt(parent, node)
        self.cached += len(blocks)
        self._came(node, 0)
        self._offer(node)
        return node

    def _supersede(self, partial: Partial | None, by: Node) -> list[int]:
        """Drop the tail that a new node begins with."""
        if partial is None or partial.node.pins or not by.tokens.startswith(partial.node.tokens):
            return []
        blocks = list(partial.node.blocks)
        self.cached -= len(blocks)
        self._remove(partial.node)
        return blocks

    def _adopt(self, parent: Node, child: Node) -> None:
        if parent.children is _NO_CHILDREN:
            parent.children = {}
        key = child.tokens[: self._step]
        new = key not in parent.children
        parent.children[key] = child
        if new and parent.order is not None:
            parent.order.add(key)
        elif len(parent.children) == 2:
            parent.order = SortedList(parent.children)

    def _split(self, node: Node, blocks: int) -> Node:
        """Cut an edge after `blocks` blocks. The old object stays the lower part, so references to it stay right."""
        parent = node.parent
        assert parent is not None
        cut = blocks * self._step
        upper = Node(parent, node.tokens[:cut], node.blocks[:blocks])
        upper.pins, upper.priority, upper.keep_until = node.pins, node.priority, node.keep_until
        self._use(upper)
        upper.created, upper.uses = node.created, node.uses
        upper.last_use, upper.previous_use = node.last_use, node.previous_use
        upper.keys, node.keys = node.keys[: blocks * KEY_BYTES], node.keys[blocks * KEY_BYTES :]
        node.start += blocks
        node.parent, node.tokens, node.blocks = upper, node.tokens[cut:], node.blocks[blocks:]
        self._adopt(upper, node)
        self._adopt(parent, upper)
        return upper

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        key = node.tokens[: self._step]
        del parent.children[key]
        if parent.order is not None:
            parent.order.remove(key)
            parent.order = parent.order if len(parent.order) > 1 else None
        node.blocks = array("i")
        self._policy.removed(node)
        self._offer(parent)
        self._drop_empty_root(parent)

    def _drop_empty_root(self, node: Node) -> None:
        """A salt nobody uses any more leaves nothing behind. A root keeps its salt where an edge has its tokens."""
        if node.parent is None and not node.children and not node.pins and self._roots.get(node.tokens) is node:
            del self._roots[node.tokens]

    # --- the watcher --------------------------------------------------------------------------------------------

    def _came(self, node: Node, known: int) -> None:
        """A node has more than its first `known` blocks now. A tail has no key."""
        if self._watcher is None:
            return
        above = node if known else node.parent
        assert above is not None
        new = block_keys(above.keys[-KEY_BYTES:], node.tokens[known * self._step :], self._step)
        node.keys += b"".join(new)
        if keys := self._checkpoints(node, known):
            self._watcher.came(keys)

    def _went(self, node: Node, keep: int) -> None:
        """A node loses all but its first `keep` blocks."""
        if self._watcher is None:
            return
        keys = self._checkpoints(node, keep)
        node.keys = node.keys[: keep * KEY_BYTES]
        if keys:
            self._watcher.went(keys[::-1])

    def _checkpoints(self, node: Node, first: int) -> list[int]:
        """Keys of the checkpoints among a node's blocks from number `first` on."""
        start = node.start
        ends = between(start + first, start + len(node.keys) // KEY_BYTES, self._block_size)
        packed = (node.keys[(end - start - 1) * KEY_BYTES : (end - start) * KEY_BYTES] for end in ends)
        return [int.from_bytes(key, "little") for key in packed]

    # --- eviction -----------------------------------------------------------------------------------------------

    def _offer(self, node: Node, now: float | None = None) -> None:
        """Queue a node for eviction if it qualifies; entries that have gone stale are dropped when they come up."""
        if not _evictable(node):
            return
        if len(self._queue) + max(len(self._kept), len(self._kept_by_priority)) > 1024 + 4 * self.cached:
            self._rebuild()
        if node.keep_until > (self._clock() if now is None else now):
            number = next(self._serial)
            heapq.heappush(self._kept, (node.keep_until, number, node))
            self._kept_by_priority.add((node.priority, node.keep_until, number, node))
        else:
            self._queue.add((node.priority, self._policy.worth(node), next(self._serial), node))

    def _rebuild(self) -> None:
        """Drop stale entries, of which every use of a leaf leaves one."""
        queued = {entry[-1]: None for entry in self._queue} | {entry[-1]: None for entry in self._kept}
        self._queue, self._kept, self._kept_by_priority = SortedList(), [], SortedList()
        for node in queued:
            self._offer(node)

    def _next_to_go(self) -> Node | None:
        """The leaf of least worth; one whose time has not come only when there is no other."""
        now = self._clock()  # read once: a node whose time ends meanwhile must not go back and forth
        while self._kept and self._kept[0][0] <= now:
            self._offer(heapq.heappop(self._kept)[-1], now)
        while self._queue:
            priority, worth, _, node = self._queue.pop(0)
            if not _evictable(node):
                continue
            if (node.priority, self._policy.worth(node)) == (priority, worth) and node.keep_until <= now:
                return node
            self._offer(node, now)
        while self._kept_by_priority:
            priority, keep_until, _, node = self._kept_by_priority.pop(0)
            if not _evictable(node):
                continue
            if (node.priority, node.keep_until) == (priority, keep_until):
                return node
            self._offer(node, now)
        return None


def _evictable(node: Node) -> bool:
    return not node.children and not node.pins and node.parent is not None and len(node.blocks) > 0


def _common_tokens(one: bytes, other: bytes) -> int:
    """Leading tokens that two packed blocks have in common."""
    length = 0
    stop = min(len(one), len(other))
    while length < stop and one[length : length + TOKEN_BYTES] == other[length : length + TOKEN_BYTES]:
        length += TOKEN_BYTES
    return length // TOKEN_BYTES
