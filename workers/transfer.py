"""The thread that owns a worker's end of the KV channel: it posts, polls and judges, away from the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from transfer.channel import Accepted, Receiver, Refused, Sender, SendFailed, Sent
from transfer.gang import GangTransport
from transfer.messages import Peer, Reservation
from workers.loop import Loop

_log = logging.getLogger(__name__)
IDLE_POLL_S = 0.1
Event = Sent | SendFailed | Accepted | Refused


class TransferLoop(Loop):
    """Runs sender and receiver over one transport. `on_event` is called in this thread."""

    def __init__(
        self,
        transport: GangTransport,
        sender: Sender,
        receiver: Receiver,
        poll_interval_s: float,
        on_event: Callable[[Event], None],
    ) -> None:
        super().__init__("kv-transfer", self._poll)
        self.sender = sender
        self.receiver = receiver
        self.transport = transport
        self._poll_interval_s = poll_interval_s
        self._on_event = on_event

    def open(self, lease_id: str, reservation: Reservation, peer: Peer) -> None:
        """Connect to the receiver, if that is not done yet, and let the transfer's writes begin."""
        self.transport.connect(peer)
        self.sender.connect(lease_id, reservation, peer.agent)

    def _received(self) -> list[tuple[str, bytes]]:
        try:
            return self.transport.receive()
        except Exception:
            # Deadlines and the other transfers must go on; what is lost here is found by the leases.
            _log.exception("receiving notifications failed")
            return []

    def _poll(self) -> float | None:
        if not (self.sender.open or self.receiver.waiting):
            return None
        if self.receiver.waiting:
            self.transport.expect()
        for agent, message in self._received():
            if (judged := self.receiver.on_notification(agent, message)) is not None:
                self._on_event(judged)
        for event in self.sender.step(time.monotonic()):
            self._on_event(event)
        # Between chunks the sender only has deadlines to watch, and each look costs the engine thread a moment.
        busy = self.sender.moving or self.receiver.waiting
        return self._poll_interval_s if busy else IDLE_POLL_S
