"""A receiver of traces, as collectors are: OTLP over HTTP."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Received:
    """A span: its name, ids as hexadecimal digits, and which service's instance it is of."""

    name: str
    trace: str
    span: str
    parent: str
    service: str
    instance: str


@dataclass
class Receiver:
    """What has come so far, and where it is to be sent."""

    url: str = ""
    spans: list[Received] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """For processes whose traces it is to get, of requests whose callers want that, when they end."""
        return {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": self.url,
            "OTEL_TRACES_SAMPLER": "parentbased_always_off",
            "OTEL_BSP_SCHEDULE_DELAY": "3600000",
        }

    def take(self, body: bytes) -> None:
        """A request has come."""
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = {one.key: one.value.string_value for one in resource.resource.attributes}
            for one in (span for scope in resource.scope_spans for span in scope.spans):
                ids = (one.trace_id.hex(), one.span_id.hex(), one.parent_span_id.hex())
                where = (about["service.name"], about["service.instance.id"])
                self.spans.append(Received(one.name, *ids, *where))


@contextmanager
def receiving() -> Iterator[Receiver]:
    """One that listens until the block ends."""
    made = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            made.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield made
    server.shutdown()
    server.server_close()
