"""A router's copies: the writer's set or nothing, whatever is lost, repeated or out of order."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from transfer.gossip.replicas import Applied, Replicas
from transfer.gossip.summary import HOST, Load, Summary, Update, bucket_digests

CAP = 8
IDLE = Load()
names = st.sampled_from(["a", "b", "c"])
numbers = st.integers(1, 12)


def summary_of(keys: list[int], worker: str = "w", incarnation: int = 1, limit: int = CAP) -> Summary:
    summary = Summary(worker, incarnation, limit)
    for key in keys:
        summary.add(key)
    return summary


def keys_of(replicas: Replicas, worker: str) -> dict[int, int]:
    row = replicas.row(worker)
    return {} if row is None else dict(zip(*(part.tolist() for part in replicas.table.items(row)), strict=True))


class Machine(RuleBasedStateMachine):
    """Three workers that restart, a network that loses, repeats and reorders, and two routers that repair."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.lives = {"a": 1, "b": 1, "c": 1}
        self.summaries = {name: Summary(name, 1, CAP, ring=5) for name in self.lives}
        self.states: dict[tuple[str, int, int], dict[int, int]] = {}
        self.sent: list[Update] = []
        self.routers = [Replicas(CAP), Replicas(CAP)]
        self.newest = [dict.fromkeys(self.lives, (0, 0)) for _ in self.routers]

    @rule(name=names, add=st.lists(numbers, max_size=5), remove=st.lists(numbers, max_size=5), tier=st.integers(0, 2))
    def change(self, name: str, add: list[int], remove: list[int], tier: int) -> None:
        for key in add:
            self.summaries[name].add(key, tier)
        for key in remove:
            self.summaries[name].remove(key)

    @rule(name=names, queued=st.integers(0, 99), at=st.sampled_from([(), (0,), (0, 1)]))
    def publish(self, name: str, queued: int, at: tuple[int, ...]) -> None:
        summary = self.summaries[name]
        update = summary.update(Load(queued))
        told = summary.snapshot(IDLE)
        keys = np.frombuffer(told.added, "<u8").tolist()
        self.states[name, update.incarnation, update.seq] = dict(zip(keys, told.tiers, strict=True))
        self.sent.append(update)
        for router in at:
            self.deliver(router, update)

    @rule(router=st.integers(0, 1), back=st.integers(0, 30))
    def late(self, router: int, back: int) -> None:
        if back < len(self.sent):
            self.deliver(router, self.sent[-1 - back])

    @rule(name=names)
    def restart(self, name: str) -> None:
        self.lives[name] += 1
        self.summaries[name] = Summary(name, self.lives[name], CAP, ring=5)

    @rule(router=st.integers(0, 1), name=names)
    def forget(self, router: int, name: str) -> None:
        self.routers[router].forget(name)
        self.newest[router][name] = (0, 0)

    @rule(router=st.integers(0, 1), name=names, how=st.sampled_from(["log", "snapshot", "buckets"]))
    def repair(self, router: int, name: str, how: str) -> None:
        """From the worker: afterwards the copy is the worker's set."""
        summary, replicas = self.summaries[name], self.routers[router]
        if not summary.seq or (name, summary.incarnation) < (name, self.newest[router][name][0]):
            return
        life, seq, _ = replicas.state(name)
        if how == "log":
            for update in summary.since(seq if life == summary.incarnation else 0) or [summary.snapshot(IDLE)]:
                self.deliver(router, update)
        elif how == "snapshot":
            self.deliver(router, summary.snapshot(Load(7)))
        elif life == summary.incarnation:
            replicas.mend(summary.repair(replicas.buckets(name), Load(7)), self.now)
            self.heard(router, name, summary.incarnation, summary.seq)
        else:
            return
        assert replicas.state(name) == (summary.incarnation, summary.seq, summary.digest)

    @rule(to=st.integers(0, 1), name=names, whole=st.booleans())
    def repair_from_router(self, to: int, name: str, whole: bool) -> None:
        source, target = self.routers[1 - to], self.routers[to]
        if source.state(name)[1] == 0:
            assert source.snapshot(name) is source.repair(name, target.buckets(name)) is None
            return
        if whole or source.state(name)[0] != target.state(name)[0]:
            snapshot = source.snapshot(name)
            assert snapshot is not None
            self.deliver(to, snapshot)
        else:
            repair = source.repair(name, target.buckets(name))
            assert repair is not None
            assert target.mend(repair, self.now) is not Applied.GAP
            self.heard(to, name, repair.incarnation, repair.seq)
        assert target.state(name)[:2] >= source.state(name)[:2]

    def deliver(self, router: int, update: Update) -> None:
        replicas, name = self.routers[router], update.worker
        self.now += 1
        life, seq, _ = replicas.state(name)
        past, before = self.newest[router][name], (replicas.heard(name), replicas.load(name))
        done = replicas.apply(update, self.now)
        if update.incarnation < past[0] or (life, seq) >= (update.incarnation, update.seq):
            expected = Applied.OLD
        elif update.base == 0 or (life, seq) == (update.incarnation, update.base):
            expected = Applied.APPLIED
        else:
            expected = Applied.GAP
        assert done is expected
        self.heard(router, name, update.incarnation, update.seq)
        if (update.incarnation, update.seq) > past:
            assert replicas.heard(name) == self.now
            assert replicas.load(name) == update.load
        elif before[0] is not None:
            assert (replicas.heard(name), replicas.load(name)) == before, "old news of the load"

    def heard(self, router: int, name: str, incarnation: int, seq: int) -> None:
        self.newest[router][name] = max(self.newest[router][name], (incarnation, seq))

    @invariant()
    def a_copy_is_a_state_of_the_writer(self) -> None:
        for replicas in self.routers:
            for name in self.lives:
                life, seq, sum_ = replicas.state(name)
                # After a gap or a restart nothing is here of a life that it was heard of.
                assert keys_of(replicas, name) == (self.states[name, life, seq] if seq else {})
                assert sum_ == (replicas.table.digest(replicas.row(name) or 0) if seq else 0)
                assert sum(replicas.buckets(name)) % 2**64 == sum_

    @invariant()
    def rows_have_names(self) -> None:
        for replicas in self.routers:
            assert len(replicas.workers) == replicas.table.rows <= 3
            assert {name: row for row, name in enumerate(replicas.workers) if name} == {
                name: replicas.row(name) for name in self.lives if name in replicas
            }


Machine.TestCase.settings = settings(stateful_step_count=40)
TestReplicas = Machine.TestCase


def test_a_wrong_digest_drops_the_copy_and_a_snapshot_brings_it_back() -> None:
    summary, replicas = summary_of([1, 2]), Replicas(CAP)
    replicas.apply(summary.update(IDLE), 1.0)
    summary.add(3)
    update = summary.update(Load(5))
    assert replicas.apply(replace(update, digest=update.digest ^ 1), 2.0) is Applied.GAP
    assert replicas.state("w") == (1, 0, 0)
    assert keys_of(replicas, "w") == {}
    assert (replicas.load("w"), replicas.heard("w")) == (Load(5), 2.0)
    assert replicas.apply(update, 3.0) is Applied.GAP
    assert replicas.apply(summary.snapshot(IDLE), 4.0) is Applied.APPLIED
    assert set(keys_of(replicas, "w")) == {1, 2, 3}


def test_an_update_from_an_earlier_state_is_a_gap() -> None:
    """It says what has changed since then, not since now."""
    summary, replicas = summary_of([1, 2]), Replicas(CAP)
    for _ in range(3):
        replicas.apply(summary.update(IDLE), 1.0)
    summary.add(3)
    update = summary.update(IDLE)
    assert replicas.apply(replace(update, base=2), 2.0) is Applied.GAP
    assert (replicas.state("w")[1], set(keys_of(replicas, "w"))) == (3, {1, 2})
    assert replicas.apply(update, 3.0) is Applied.APPLIED


def test_a_repair_brings_what_came_went_and_moved() -> None:
    summary, replicas = summary_of([1, 2, 3]), Replicas(CAP)
    replicas.apply(summary.update(IDLE), 1.0)
    for key in (1, 2):
        summary.remove(key)
    summary.add(3, HOST)
    summary.add(4)
    summary.update(IDLE)
    summary.update(IDLE)
    assert replicas.mend(summary.repair(replicas.buckets("w"), Load(3)), 2.0) is Applied.APPLIED
    assert keys_of(replicas, "w") == {3: HOST, 4: 0}
    assert replicas.state("w") == (1, 3, summary.digest)
    assert replicas.load("w") == Load(3)


def test_a_lying_repair_changes_nothing() -> None:
    summary, replicas = summary_of([1, 2]), Replicas(CAP)
    replicas.apply(summary.update(IDLE), 1.0)
    summary.add(3)
    summary.update(IDLE)
    repair = summary.repair(replicas.buckets("w"), IDLE)
    before = (replicas.state("w"), keys_of(replicas, "w"))
    assert replicas.mend(replace(repair, digest=repair.digest ^ 1), 2.0) is Applied.GAP
    assert (replicas.state("w"), keys_of(replicas, "w")) == before
    assert replicas.mend(repair, 3.0) is Applied.APPLIED


def test_a_worker_first_heard_of_in_the_middle_is_known_with_its_load() -> None:
    summary, replicas = summary_of([1]), Replicas(CAP)
    summary.update(IDLE)
    assert replicas.apply(summary.update(Load(9)), 5.0) is Applied.GAP
    assert (replicas.load("w"), replicas.heard("w"), replicas.state("w")) == (Load(9), 5.0, (1, 0, 0))
    assert replicas.load("x") is replicas.heard("x") is replicas.row("x") is replicas.tier("x", 1) is None


def test_more_keys_than_a_row_holds() -> None:
    """The first are kept, which are closed under prefix; additions wait for a snapshot, removals do not."""
    writer, replicas = summary_of(list(range(1, 21)), limit=20), Replicas(CAP)
    assert replicas.apply(writer.update(IDLE), 1.0) is Applied.APPLIED
    assert set(keys_of(replicas, "w")) == set(range(1, CAP + 1))
    assert replicas.state("w") == (1, 1, writer.digest)
    assert replicas.snapshot("w") is replicas.repair("w", (0,) * 64) is None
    for key in (8, 7):
        writer.remove(key)
    writer.add(21)
    assert replicas.apply(writer.update(IDLE), 2.0) is Applied.APPLIED
    assert set(keys_of(replicas, "w")) == set(range(1, 7))
    for key in (6, 5, 4):
        writer.remove(key)
    assert replicas.apply(writer.update(IDLE), 3.0) is Applied.GAP
    assert replicas.apply(writer.snapshot(IDLE), 4.0) is Applied.APPLIED
    assert len(keys_of(replicas, "w")) == CAP


def test_growth_over_the_row_is_refused_too() -> None:
    writer, replicas = summary_of(list(range(1, 7)), limit=20), Replicas(CAP)
    replicas.apply(writer.update(IDLE), 1.0)
    for key in range(7, 12):
        writer.add(key)
    assert replicas.apply(writer.update(IDLE), 2.0) is Applied.APPLIED
    assert set(keys_of(replicas, "w")) == set(range(1, CAP + 1))


def test_rows_are_reused_and_bounded() -> None:
    replicas = Replicas(CAP, workers=3)
    for round_ in range(5):
        for name in "abc":
            writer = summary_of([round_ + 1], f"{name}{round_}")
            assert replicas.apply(writer.update(IDLE), 0.0) is Applied.APPLIED
        assert replicas.apply(summary_of([1], "more").update(IDLE), 0.0) is Applied.FULL
        assert replicas.depths(np.array([round_ + 1], np.uint64)).tolist() == [1, 1, 1]
        for name in "bac":
            replicas.forget(f"{name}{round_}")
    assert replicas.workers == ["", "", ""]


def test_an_earlier_life_counts_only_when_the_later_one_is_forgotten() -> None:
    replicas = Replicas(CAP)
    old, new = summary_of([1], incarnation=1), summary_of([2], incarnation=2)
    replicas.apply(new.update(IDLE), 1.0)
    assert replicas.apply(old.update(IDLE), 2.0) is Applied.OLD
    assert set(keys_of(replicas, "w")) == {2}
    replicas.forget("w")
    assert replicas.apply(old.snapshot(IDLE), 3.0) is Applied.APPLIED
    assert set(keys_of(replicas, "w")) == {1}


def test_tiers_travel() -> None:
    writer, replicas = Summary("w", 1, CAP), Replicas(CAP)
    writer.add(4)
    replicas.apply(writer.update(IDLE), 1.0)
    writer.add(4, HOST)
    replicas.apply(writer.update(IDLE), 2.0)
    assert (replicas.tier("w", 4), replicas.tier("w", 5)) == (HOST, None)
    other = Replicas(CAP)
    snapshot = replicas.snapshot("w")
    assert snapshot is not None
    other.apply(snapshot, 3.0)
    assert other.tier("w", 4) == HOST


def test_bucket_digests_of_a_copy_are_the_writers() -> None:
    writer, replicas = summary_of(list(range(1, 301)), limit=300), Replicas(300)
    replicas.apply(writer.update(IDLE), 1.0)
    assert replicas.buckets("w") == writer.buckets()
    assert replicas.buckets("x") == bucket_digests(np.array([], np.uint64), np.array([], np.uint8)) == (0,) * 64
