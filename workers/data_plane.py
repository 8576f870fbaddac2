"""The thread that owns the end of the KV channel of a rank other than 0, which does what rank 0 asks for."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from transfer.channel import Pool
from transfer.gang import RankEnd, RankTransport
from workers.loop import Loop


class DataPlane(Loop):
    """Runs a `RankEnd` over a rank's transport and pool; that rank's engine computes in another thread."""

    def __init__(self, transport: RankTransport, pool: Pool, poll_interval_s: float) -> None:
        super().__init__("kv-transfer", self._poll)
        self._transport = transport
        self._end = RankEnd(transport, pool)
        self._poll_interval_s = poll_interval_s

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        """See `RankEnd.ask`; any thread may call this."""
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()

        def answered(its: Future[Any]) -> None:
            error = its.exception()
            answer.set_exception(error) if error else answer.set_result(its.result())

        def run() -> None:
            try:
                self._end.ask(method, *arguments).add_done_callback(answered)
            except Exception as error:
                answer.set_exception(error)

        self.call(run)
        return answer

    def close(self, timeout: float) -> None:
        """End the thread and close the transport."""
        self.stop(timeout)
        self._transport.close()

    def _poll(self) -> float | None:
        if not self._end.busy:
            return None
        self._end.step()
        return self._poll_interval_s
