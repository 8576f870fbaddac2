"""What a rank other than 0 does with its KV when rank 0 asks for it, beside what it computes."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from transfer.gang import RankEnd, RankTransport
from workers.kv.gang_records import RankRecords
from workers.kv.memory import KVMemory
from workers.loop import Loop


class DataPlane(Loop):
    """The thread that owns a rank's end of the KV channel, over its transport and its `memory`, and its threads for
    tiers."""

    def __init__(self, transport: RankTransport, memory: KVMemory, poll_interval_s: float) -> None:
        super().__init__("kv-transfer", self._poll)
        self._transport = transport
        self._end = RankEnd(transport, memory)
        self._records = RankRecords(memory)
        self._poll_interval_s = poll_interval_s

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        """See `RankEnd.ask` and `RankRecords.ask`; any thread may call this."""
        if method in RankRecords.METHODS:
            return self._records.ask(method, *arguments)
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
        """End the threads and close the transport."""
        self._records.close()
        self.stop(timeout)
        self._transport.close()

    def _poll(self) -> float | None:
        if not self._end.busy:
            return None
        self._end.step()
        return self._poll_interval_s
