"""Metrics of every process of a cluster, as Prometheus finds and scrapes them; traces that nobody takes."""

import re
import socket
import time
from collections import Counter
from random import Random

import httpx
import pytest

from cluster import telemetry
from cluster.config import TelemetryConfig
from cluster.launch import Cluster
from tests.cluster.checks import post
from tests.cluster.conftest import free_port

SAMPLE = re.compile(r"(headwater_\w+)(?:{(.*)})? (\S+)")
PROMPT, OUTPUT = 200, 4


def prompt(seed: int) -> list[int]:
    """One that nobody has seen."""
    return Random(seed).choices(range(3, 200), k=PROMPT)


def scraped(cluster: Cluster) -> list[tuple[str, str, float]]:
    """Names, labels and values of what all targets export."""
    answer = httpx.get(f"{cluster.url}/metrics/targets")
    assert answer.headers["content-type"] == "application/json"
    found = []
    for target in answer.json():
        text = httpx.get(f"http://{target['targets'][0]}/metrics").text
        found += [(one[1], one[2] or "", float(one[3])) for one in map(SAMPLE.fullmatch, text.splitlines()) if one]
    return found


def test_every_process_is_a_target(tiny_pair: Cluster) -> None:
    found = {
        tuple(one["labels"][f"__meta_headwater_{name}"] for name in ("kind", "name"))
        for one in httpx.get(f"{tiny_pair.url}/metrics/targets").json()
    }
    assert found == {("worker", "prefill-0"), ("worker", "decode-0"), ("gateway", "gateway-0")}


def test_each_series_of_a_worker_is_there_once(tiny_pair: Cluster) -> None:
    counts = Counter((name, labels) for name, labels, _ in scraped(tiny_pair) if "worker=" in labels)
    assert len(counts) > 100
    assert set(counts.values()) == {1}


def test_workers_say_what_a_request_took(tiny_pair: Cluster) -> None:
    def seen() -> dict[str, float]:
        return {f"{name}{{{labels}}}": value for name, labels, value in scraped(tiny_pair)}

    before = seen()
    body = {"model": tiny_pair.model_name, "prompt": prompt(77), "max_tokens": OUTPUT, "ignore_eos": True}
    answer = post(f"{tiny_pair.url}/v1/completions", body)
    assert answer.status_code == 200, answer.text
    after = seen()
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    for name, expected in {
        'cache_queries_total{kind="tokens",worker="prefill-0"}': PROMPT,
        'cache_queries_total{kind="requests",worker="decode-0"}': 1,
        'new_prompt_tokens_total{worker="prefill-0"}': PROMPT,
        'new_prompt_tokens_total{worker="decode-0"}': PROMPT,
        'transfers_total{kind="sent",worker="prefill-0"}': 1,
        'transfers_total{kind="accepted",worker="decode-0"}': 1,
        'queue_time_seconds_count{kind="prompt",worker="prefill-0"}': 1,
        'queue_time_seconds_count{kind="reservation",worker="decode-0"}': 1,
        'transfer_duration_seconds_count{kind="total",worker="prefill-0"}': 1,
        'transfer_duration_seconds_count{kind="exposed",worker="prefill-0"}': 1,
        'engine_step_seconds_count{kind="prefill",worker="prefill-0"}': 4,
        'engine_step_seconds_count{kind="decode",worker="decode-0"}': OUTPUT - 1,
        'time_to_first_token_seconds_count{priority="normal"}': 1,
        "time_between_tokens_seconds_count{}": OUTPUT - 1,
    }.items():
        assert grown[f"headwater_{name}"] == expected, name
    assert 0 < after['headwater_gossip_age_seconds{worker="decode-0"}'] < 5


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"^telemetry.metrics_port: cannot listen on 127.0.0.1:{port}: Address"):
            telemetry.serve(TelemetryConfig(metrics_host="127.0.0.1", metrics_port=port), "prefill-0")


def test_a_receiver_that_is_not_there_is_said_once_and_waited_for_by_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://127.0.0.1:{free_port()}",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "0.1",
        "OTEL_BSP_SCHEDULE_DELAY": "20",
        "OTEL_BSP_MAX_QUEUE_SIZE": "100",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "50",
    }.items():
        monkeypatch.setenv(name, value)
    provider = telemetry.tracer_provider("prefill-0")
    tracer = provider.get_tracer("tests")
    took = []
    for _ in range(1000):  # ten times what there is room for
        begun = time.perf_counter()
        tracer.start_span("one").end()
        took.append(time.perf_counter() - begun)
        time.sleep(0.0002)
    telemetry.end(provider, 5)
    assert sorted(took)[len(took) // 2] < 0.001
    assert [one.getMessage() for one in caplog.records] == ["traces cannot be sent, and are lost"]


def test_a_receiver_that_does_not_answer_keeps_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        provider = telemetry.tracer_provider("prefill-0")
        provider.get_tracer("tests").start_span("one").end()
        begun = time.monotonic()
        telemetry.end(provider, 0.2)
        assert 0.2 <= time.monotonic() - begun < 1


WHERE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1"}, True),
        ({"OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, True),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, False),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}, True),
    ],
)
def test_the_environment_says_whether_and_where(more: dict[str, str], wanted: bool) -> None:
    assert telemetry.sends_traces({**WHERE, **more}) == wanted


def test_what_is_not_supported_is_said(caplog: pytest.LogCaptureFixture) -> None:
    telemetry.sends_traces({**WHERE, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    (said,) = caplog.records
    assert said.getMessage().startswith("OTEL_EXPORTER_OTLP_PROTOCOL: only http/protobuf is supported, not 'grpc'")
