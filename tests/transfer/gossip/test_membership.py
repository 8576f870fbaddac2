"""Members, one node at a time."""

from dataclasses import replace
from random import Random

from tests.transfer.gossip.cluster import KEY
from transfer.gossip.config import GossipConfig
from transfer.gossip.frames import ALIVE, DEAD, MAX_NODES, ROUTER, SUSPECT, WORKER, Claim, Member, Notice, Sealer, pack
from transfer.gossip.membership import Membership
from transfer.gossip.protocol import Gossip
from transfer.gossip.replicas import Replicas


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


def test_members_with_the_longest_names_fit_frames() -> None:
    """As many as there can be, told to somebody who knows nobody."""
    gossip = Gossip(Member("r0", ROUTER, "10.0.0.1", 1, 5), GossipConfig(), KEY, Random(1), Replicas(8))
    for number in range(MAX_NODES):
        name = f"{number:0128}"
        gossip.membership.hear(Claim(name, WORKER, "fe80:" + ":1234" * 6, 100, 2**63, 2**63, SUSPECT, "o" * 128), 0.0)
    stranger = Gossip(Member("r1", ROUTER, "10.0.0.3", 1, 5), GossipConfig(), KEY, Random(1), Replicas(8))
    gossip.membership.hear(stranger.membership.claim, 0.0)
    (hello,) = stranger._post([stranger.membership.sync(gossip.me.address)])
    for send in gossip.receive(1.0, hello.data, stranger.me.address):
        stranger.receive(1.0, send.data, gossip.me.address)
    assert len(stranger.membership.members) == MAX_NODES
    assert not stranger.refused


def test_nobody_is_asked_at_the_port_that_a_connection_came_from() -> None:
    listening, connected = ("10.0.0.3", 1), ("10.0.0.3", 40_000)
    for sender, keys, asked in ((listening, 0, True), (connected, 2000, False)):
        gossip = Gossip(Member("r0", ROUTER, "10.0.0.1", 1, 5), GossipConfig(), KEY, Random(1), Replicas(8))
        data = Sealer("r1", 7, KEY).seal([pack(Notice("r1", "w0", 1, 1, 1, "", bytes(keys)))])
        assert [send.address for send in gossip.receive(1.0, data, sender)] == [sender] * asked
