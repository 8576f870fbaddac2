"""The table beside a dict for each row."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from transfer.gossip.summary import DEVICE, DISK, HOST, digest
from transfer.gossip.table import SummaryTable

CAP = 12
# 32 slots, of which these keys want few: runs that wrap around the end and homes that coincide are common.
NEAR = [key for key in range(1, 4000) if (key * 0x9E3779B97F4A7C15 >> 32) & 31 in (0, 1, 29, 30, 31)]
keys = st.sampled_from(NEAR[:40]) | st.integers(1, 2**64 - 1)
rows = st.integers(0, 2)


def array(some: list[int]) -> np.ndarray:
    return np.array(some, np.uint64)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = SummaryTable(CAP)
        self.model: list[dict[int, int]] = [{}, {}, {}]
        self.digests = [0, 0, 0]
        for _ in self.model:
            self.table.new_row()

    @rule(row=rows, some=st.lists(st.tuples(keys, st.integers(0, 2)), max_size=16))
    def add(self, row: int, some: list[tuple[int, int]]) -> None:
        done, grown = self.table.add(row, array([key for key, _ in some]), np.array([t for _, t in some], np.uint8))
        model = self.model[row]
        for key, tier in some[:done]:
            model[key] = tier
        assert done == len(some) or (len(model) == CAP and some[done][0] not in model)
        self.digests[row] = (self.digests[row] + grown) % 2**64

    @rule(row=rows, some=st.lists(keys, max_size=6), known=st.integers(0, 12))
    def remove(self, row: int, some: list[int], known: int) -> None:
        model = self.model[row]
        gone = some + list(model)[:known]
        self.digests[row] = (self.digests[row] + self.table.remove(row, array(gone))) % 2**64
        for key in gone:
            model.pop(key, None)

    @rule(row=rows)
    def clear(self, row: int) -> None:
        self.table.clear(row)
        self.model[row], self.digests[row] = {}, 0

    @invariant()
    def equal(self) -> None:
        for row, model in enumerate(self.model):
            there, tiers = self.table.items(row)
            assert dict(zip(there.tolist(), tiers.tolist(), strict=True)) == model
            assert self.table.counts[row] == len(model) == len(there)
            assert self.digests[row] == self.table.digest(row) == digest(array(list(model)), tiers_of(model))
            assert all(self.table.tier(row, key) == model.get(key) for key in [*model, *NEAR[:10]])


def tiers_of(model: dict[int, int]) -> np.ndarray:
    return np.array(list(model.values()), np.uint8)


Machine.TestCase.settings = settings(stateful_step_count=30)
TestTable = Machine.TestCase


@given(st.lists(keys, min_size=1, max_size=CAP, unique=True), st.lists(st.integers(0, CAP), min_size=1, max_size=70))
def test_depths_are_what_a_walk_finds(prompt: list[int], held: list[int]) -> None:
    table = SummaryTable(CAP)
    for depth in held:
        own = array(prompt[:depth])
        table.add(table.new_row(), own, np.zeros(len(own), np.uint8))
    assert table.depths(array(prompt)).tolist() == [min(depth, len(prompt)) for depth in held]
    assert table.depths(array([])).tolist() == [0] * len(held)


@given(st.lists(keys, min_size=1, max_size=CAP, unique=True), st.data())
def test_tiers_are_what_a_walk_finds(prompt: list[int], data: st.DataObject) -> None:
    """Of rows that have all of it, the first keys on the device, others anywhere below."""
    table = SummaryTable(CAP)
    some = data.draw(st.lists(st.tuples(st.integers(0, len(prompt)), st.integers(1, len(prompt))), max_size=70))
    for device, _ in some:
        below = data.draw(st.lists(st.sampled_from([HOST, DISK]), min_size=CAP, max_size=CAP))
        tiers = [DEVICE] * device + below[device : len(prompt)]
        row = table.new_row()
        table.add(row, array(prompt), np.array(tiers, np.uint8))
        for depth in range(1, len(prompt) + 1):
            assert table.tiers(row, array(prompt), depth) == (min(device, depth), tiers[:depth].count(HOST))
    depths = np.array([depth for _, depth in some], np.int32)
    assert table.device_depths(array(prompt), depths).tolist() == [min(one) for one in some]


def test_key_0_is_never_there() -> None:
    table = SummaryTable(CAP)
    table.new_row()
    assert table.add(0, array([0, 7]), np.zeros(2, np.uint8))[0] == 2
    assert table.items(0)[0].tolist() == [7]
    assert table.depths(array([0])).tolist() == [0]
    assert table.tier(0, 0) is None
    assert table.remove(0, array([0])) == 0


def test_memory_is_what_it_says() -> None:
    table = SummaryTable(6250)
    for _ in range(1000):
        table.new_row()
    assert 1000 * table.row_bytes <= table.nbytes <= 250_000_000
    allocated = sum(array.nbytes for chunk in table._chunks for array in chunk)
    assert table.nbytes == allocated
