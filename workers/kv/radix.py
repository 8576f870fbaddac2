"""RadixCache: which token prefixes have their KV in which blocks.

A radix tree over whole blocks (after SGLang's RadixAttention): an edge holds a run of blocks and their tokens, and
splits only at block boundaries. Children are found by the exact tokens of their first block, so a hash can never
vouch for a block. Each salt has a tree of its own. The tree knows block ids and tokens; ownership is the pool's.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count


class Node:
    """An edge of whole blocks. `pins` counts live references to this node or to anything below it."""

    __slots__ = ("blocks", "children", "last_use", "parent", "pins", "tokens")

    def __init__(self, parent: Node | None, tokens: bytes, blocks: list[int]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.blocks = blocks
        self.children: dict[bytes, Node] = {}
        self.pins = 0
        self.last_use = 0


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix: its blocks in order and the node that ends it."""

    node: Node
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Insertion:
    """What an insert did: the table to use from now on, ids now owned by the tree, ids that were duplicates."""

    node: Node
    blocks: list[int]
    adopted: list[int]
    duplicates: list[int]


class RadixCache:
    """Prefix tree of cached blocks with pins and leaf-first LRU eviction in O(log n)."""

    def __init__(self, block_size: int) -> None:
        self._step = block_size * 4
        self._roots: dict[bytes, Node] = {}
        self._clock = count(1)
        self._serial = count()
        self._heap: list[tuple[int, int, Node]] = []
        self.cached = 0
        self.pinned = 0

    @property
    def evictable(self) -> int:
        """Blocks that eviction could free: all that no pin holds."""
        return self.cached - self.pinned

    def match(self, salt: bytes, tokens: bytes) -> Match:
        """The longest cached prefix of packed `tokens` in whole blocks. Splits an edge that matches in part, so that
        the returned node ends exactly where the match does; what other matches return does not change."""
        node, blocks = self._roots.get(salt) or Node(None, salt, []), []
        position = 0
        while (child := node.children.get(tokens[position : position + self._step])) is not None:
            length = self._common(child.tokens, tokens, position)
            if length < len(child.tokens):
                child = self._split(child, length // self._step)
            node = child
            node.last_use = next(self._clock)
            blocks.extend(node.blocks)
            position += length
        return Match(node, blocks)

    def insert(self, salt: bytes, tokens: bytes, blocks: list[int]) -> Insertion:
        """Make `blocks` findable under packed `tokens` (whole blocks, `len(blocks)` of them). Where the tree already
        holds a prefix under other ids, its ids win and the caller's come back as duplicates."""
        match = self.match(salt, tokens)
        known = len(match.blocks)
        duplicates = [mine for mine, theirs in zip(blocks, match.blocks, strict=False) if mine != theirs]
        adopted = blocks[known:]
        node = match.node
        if adopted:
            if node.parent is None:
                self._roots[salt] = node
            node = Node(match.node, tokens[known * self._step :], list(adopted))
            node.last_use = next(self._clock)
            match.node.children[node.tokens[: self._step]] = node
            self.cached += len(adopted)
            self._offer(node)
        return Insertion(node, match.blocks + adopted, adopted, duplicates)

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

    def evict(self, wanted: int) -> list[int]:
        """Forget up to `wanted` blocks, least recently used leaves first, each from its end; returns their ids."""
        freed: list[int] = []
        while len(freed) < wanted and self._heap:
            last_use, _, node = heapq.heappop(self._heap)
            if node.children or node.pins or node.parent is None or not node.blocks:
                continue
            if node.last_use != last_use:
                self._offer(node)
                continue
            take = min(wanted - len(freed), len(node.blocks))
            keep = len(node.blocks) - take
            freed.extend(node.blocks[keep:])
            self.cached -= take
            if keep:
                node.blocks, node.tokens = node.blocks[:keep], node.tokens[: keep * self._step]
                self._offer(node)
            else:
                self._remove(node)
        return freed

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before children."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _drop_empty_root(self, node: Node) -> None:
        """A salt nobody uses any more leaves nothing behind. A root keeps its salt where an edge has its tokens."""
        if node.parent is None and not node.children and not node.pins and self._roots.get(node.tokens) is node:
            del self._roots[node.tokens]

    def _common(self, edge: bytes, tokens: bytes, position: int) -> int:
        """Bytes of `edge` that `tokens` from `position` on share with it, in whole blocks."""
        if tokens[position : position + len(edge)] == edge:
            return len(edge)
        length = self._step
        while edge[length : length + self._step] == tokens[position + length : position + length + self._step]:
            length += self._step
        return length

    def _split(self, node: Node, blocks: int) -> Node:
        """Cut an edge after `blocks` blocks. The old object stays the lower part, so references to it stay right."""
        parent = node.parent
        assert parent is not None
        cut = blocks * self._step
        upper = Node(parent, node.tokens[:cut], node.blocks[:blocks])
        upper.pins, upper.last_use = node.pins, node.last_use
        node.parent, node.tokens, node.blocks = upper, node.tokens[cut:], node.blocks[blocks:]
        upper.children[node.tokens[: self._step]] = node
        parent.children[upper.tokens[: self._step]] = upper
        return upper

    def _offer(self, node: Node) -> None:
        """Queue a node for eviction if it qualifies; entries that have gone stale are dropped when they come up."""
        if node.children or node.pins or node.parent is None:
            return
        if len(self._heap) > 1024 and len(self._heap) > 4 * self.cached:
            queued = {id(one): one for _, _, one in self._heap if one.blocks and not one.children and not one.pins}
            self._heap = [(one.last_use, next(self._serial), one) for one in queued.values()]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (node.last_use, next(self._serial), node))

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens[: self._step]]
        node.blocks = []
        self._offer(parent)
        self._drop_empty_root(parent)
