"""What a router does about what it lacks, and what of it counts as a sign of life."""

import itertools
import logging
from random import Random

import pytest

from tests.transfer.gossip.cluster import KEY
from transfer.gossip.config import GossipConfig
from transfer.gossip.frames import ALIVE, WORKER, Claim, Member
from transfer.gossip.membership import Membership
from transfer.gossip.protocol import Gossip
from transfer.gossip.replicas import Replicas
from transfer.gossip.spread import Collector
from transfer.gossip.summary import Load, Summary

ROUTER_0 = Member("r0", 1, "10.0.0.1", 1, 1)
W0 = Claim("w0", WORKER, "10.0.0.1", 2, 7, 0, ALIVE, "w0")


def test_what_is_never_answered_is_asked_for_ever() -> None:
    config = GossipConfig()
    membership = Membership(ROUTER_0, config, Random(1))
    membership.hear(W0, 0.0)
    collector, summary = Collector(Replicas(10), membership, config, Random(1)), Summary("w0", 7, 10)
    summary.update(Load())
    collector.on_news(summary.update(Load()), "w0", 0.0)
    asked = [now for now in range(1, 6000) if collector.tick(float(now))]
    assert len(asked) > 2500
    assert all(later - now <= 2 for now, later in itertools.pairwise(asked))


def test_a_part_that_fails_takes_nothing_from_the_others(caplog: pytest.LogCaptureFixture) -> None:
    membership_broken, publisher_broken = (
        Gossip(ROUTER_0, GossipConfig(), KEY, Random(1), summary=Summary("r0", 1, 10), load=Load) for _ in range(2)
    )
    for gossip in (membership_broken, publisher_broken):
        gossip.membership.hear(W0, 0.0)
        gossip.membership.hear(Claim("r1", 1, "10.0.0.1", 3, 7, 0, ALIVE, "r1"), 0.0)

    def broken(now: float) -> list:
        raise OverflowError("broken")

    membership_broken.membership.tick = broken  # type: ignore[method-assign]
    publisher_broken._publisher.tick = broken  # type: ignore[method-assign,union-attr]
    with caplog.at_level(logging.ERROR):
        for gossip, part in ((membership_broken, "membership"), (publisher_broken, "publisher")):
            sends = [send for step in range(100) for send in gossip.tick(step * 0.05)]
            assert len(sends) > 3
            assert gossip.failed == {part: 100}
    assert len(caplog.records) == 2
