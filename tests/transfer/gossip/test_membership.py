"""Members, one node at a time."""

from dataclasses import replace
from random import Random

from transfer.gossip.config import GossipConfig
from transfer.gossip.frames import ALIVE, DEAD, ROUTER, SUSPECT, WORKER, Claim, Member
from transfer.gossip.membership import Membership


def member_of(others: int, seed: int = 1) -> Membership:
    membership = Membership(Member("r0", ROUTER, "10.0.0.1", 1, 5), GossipConfig(), Random(seed))
    for number in range(others):
        name = f"w{number}"
        membership.hear(Claim(name, WORKER, "10.0.0.2", 100 + number, 1, 0, ALIVE, name), 0.0)
    return membership


def test_a_pause_counts_against_no_suspect_when_others_confirm_after_it() -> None:
    membership = member_of(6)
    now = 0.0
    while now < 1.0:
        membership.tick(now)
        now += 0.05
    suspicion = Claim("w0", WORKER, "10.0.0.2", 100, 1, 0, SUSPECT, "w1")
    membership.hear(suspicion, now)
    now += 6.0
    membership.tick(now)
    for origin in ("w2", "w3"):  # what waited while this node stood still
        membership.hear(replace(suspicion, origin=origin), now)
    end = now + 3.9  # it has four seconds to contradict
    while now < end:
        membership.tick(now)
        held = membership.held("w0")
        assert held is not None
        assert held.status == SUSPECT
        now += 0.05
    while now < end + 0.3:
        membership.tick(now)
        now += 0.05
    held = membership.held("w0")
    assert held is not None
    assert held.status == DEAD
