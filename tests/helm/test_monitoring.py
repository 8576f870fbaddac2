"""Rules and dashboards speak of metrics that gateways and workers export, in PromQL."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.helm.chart import CHART, EXAMPLES, MONITORING, ROOT, container, groups, objects, only
from tests.helm.test_render import only_config

RULES = CHART / "rules" / "headwater.yaml"
TARGET_LABELS = {"namespace", "pod"}
"""Labels that Prometheus adds to what it scrapes."""


@lru_cache(1)
def scraped() -> str:
    """What `/metrics` of gateways and workers can contain."""
    command = [sys.executable, "-m", "tests.helm.exported"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=ROOT).stdout


@lru_cache(1)
def exported() -> dict[str, dict[str, set[str]]]:
    """Its sample names, with their labels and the values that these have there."""
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(scraped()):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


def panels() -> Iterator[tuple[str, str]]:
    """Titles and queries of all dashboards."""
    for file in (CHART / "dashboards").glob("*.json"):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel.get("targets", []):
                yield panel["title"], target["expr"].replace("$__rate_interval", "5m").replace("$namespace", "llm")


def alerts() -> list[dict[str, Any]]:
    """All alerting rules."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def selectors(query: str) -> list[Any]:
    """Every vector selector of a query."""
    found: list[Any] = []
    pending = [promql_parser.parse(query)]
    while pending:
        one = pending.pop()
        if isinstance(one, promql_parser.VectorSelector):
            found.append(one)
        for part in ("expr", "lhs", "rhs", "param", "vector_selector", "vs"):
            if (child := getattr(one, part, None)) is not None and not isinstance(child, str):
                pending.append(child)
        pending.extend(getattr(one, "args", None) or [])
    return found


QUERIES = [*panels(), *((rule["alert"], rule["expr"]) for rule in alerts())]


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[title for title, _ in QUERIES])
def test_queries_ask_for_what_is_exported(title: str, query: str) -> None:
    found = selectors(query)
    assert len(found) == len(re.findall("headwater_", query)), "every metric of the query was looked at"
    for selector in found:
        assert selector.name in exported()
        labels = exported()[selector.name]
        for matcher in selector.matchers.matchers:
            if matcher.name in labels:
                pattern = re.compile(matcher.value)
                assert any(pattern.fullmatch(value) for value in labels[matcher.name]), matcher.value
            else:
                assert matcher.name in TARGET_LABELS | {"outcome", "route", "reason", "direction", "priority"}


def test_workers_are_counted_once() -> None:
    """What every gateway says of every worker: a sum would count each as often as there are gateways."""
    for title, query in QUERIES:
        for metric in re.findall(r"headwater_(?:worker_up|gossip_age)\w*", query):
            before = query[: query.index(metric)]
            assert re.search(r"max by \([^)]*\) \((?:rate|increase)?\(?$", before), f"{title}: {metric}"


def test_rules_are_rules() -> None:
    promtool = promtool_or_skip()
    done = subprocess.run([promtool, "check", "rules", str(RULES)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_fire() -> None:
    promtool = promtool_or_skip()
    cases = Path(__file__).with_name("rules_test.yaml")
    covered = {
        alert["alertname"] for test in yaml.safe_load(cases.read_text())["tests"] for alert in test["alert_rule_test"]
    }
    assert covered == {rule["alert"] for rule in alerts()}
    done = subprocess.run(
        [promtool, "test", "rules", cases.name], capture_output=True, text=True, timeout=60, cwd=cases.parent
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_metrics_are_as_prometheus_wants_them() -> None:
    promtool = promtool_or_skip()
    ours = "".join(line + "\n" for line in scraped().splitlines() if "headwater_" in line)
    done = subprocess.run([promtool, "check", "metrics"], input=ours, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr


def test_they_are_rendered_where_prometheus_is_known() -> None:
    assert only(objects(apis=MONITORING), "PrometheusRule")["spec"] == yaml.safe_load(RULES.read_text())
    endpoints = only(objects("locked-down", apis=MONITORING), "PodMonitor")["spec"]["podMetricsEndpoints"]
    found = {one["port"]: (one["path"], one.get("scheme", "http")) for one in endpoints}
    assert found == {"http": ("/metrics", "https"), "metrics": ("/metrics", "http")}
    kinds = {one["kind"] for one in objects()}
    assert not kinds & {"PodMonitor", "PrometheusRule"}
    boards = next(one for one in objects() if one["metadata"]["name"].endswith("-dashboards"))
    assert json.loads(boards["data"]["headwater.json"])["title"] == "Headwater"


@pytest.mark.parametrize("example", EXAMPLES)
def test_each_pod_is_scraped_once(example: str) -> None:
    """At one port, where Headwater listens; the head has none."""
    found = objects(example, {"monitoring": {"podMonitor": {"enabled": True}}}, apis=MONITORING)
    monitor = only(found, "PodMonitor")["spec"]
    scraped_ports = {one["port"] for one in monitor["podMetricsEndpoints"]}
    config = yaml.safe_load(only_config(example)["headwater.yaml"])
    listens = {"http": config["gateway"]["port"], "metrics": config["telemetry"]["metrics_port"]}
    for name, group in groups(found).items():
        pod = group["template"]
        assert monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        named = {one["name"]: one["containerPort"] for one in container(pod)["ports"] if one["name"] in scraped_ports}
        expected = {"head": (), "gateway": ("http",)}.get(name, ("metrics",))
        assert named == {port: listens[port] for port in expected}, name


def promtool_or_skip() -> str:
    """Prometheus's own checker."""
    found = os.environ.get("PROMTOOL") or shutil.which("promtool")
    if not found:
        pytest.skip("no promtool: set PROMTOOL or install it (Debian: the package prometheus)")
    return found
