"""What comes out of the chart is what Kubernetes and KubeRay accept, for every example."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cluster.config import load
from tests.helm import schemas
from tests.helm.chart import (
    CHART,
    EXAMPLES,
    LONGEST,
    MONITORING,
    ROOT,
    VERSIONS,
    container,
    example_file,
    objects,
    only,
    pods,
    run,
    text,
)

BUILT_IN = {
    "ConfigMap",
    "Ingress",
    "Job",
    "NetworkPolicy",
    "PersistentVolumeClaim",
    "Pod",
    "PodDisruptionBudget",
    "Service",
    "ServiceAccount",
}
CUSTOM = {"RayCluster", "RayJob", "PodMonitor", "PrometheusRule", "HTTPRoute"}
"""Kinds that Kubernetes itself does not know; a kind in neither set would not be checked by anything."""


@pytest.mark.parametrize("example", EXAMPLES)
def test_lint(example: str) -> None:
    done = run("lint", "--strict", str(CHART), "-f", example_file(example))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


def test_package(tmp_path: Path) -> None:
    done = run("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["headwater-0.1.0.tgz"]


@pytest.mark.parametrize("apis", [(), MONITORING], ids=["plain", "monitoring"])
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("example", EXAMPLES)
def test_kubernetes_accepts_it(example: str, version: str, apis: tuple[str, ...]) -> None:
    found = objects(example, version=version, apis=apis)
    for one in found:
        assert one["kind"] in BUILT_IN | CUSTOM
        if one["kind"] in BUILT_IN:
            schemas.check(one, version)
    for name, pod in pods(found):
        metadata = {"name": name.replace(" ", "-").lower(), **pod["metadata"]}
        schemas.check({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"]}, version)


def test_unknown_keys_are_noticed() -> None:
    """What this file relies on: strictness, also inside of pods."""
    pod = objects()[0] | {"kind": "Pod", "apiVersion": "v1", "spec": {"containers": [{"name": "a", "imagee": "b"}]}}
    with pytest.raises(Exception, match="imagee"):
        schemas.check(pod, "1.37")


@pytest.mark.parametrize("name", ["test", LONGEST])
@pytest.mark.parametrize("example", EXAMPLES)
def test_kuberay_accepts_it(example: str, name: str) -> None:
    if not (directory := os.environ.get("KUBERAY_CRDS")):
        pytest.skip(
            "KUBERAY_CRDS is not set: the directory of KubeRay's ray.io_rayclusters.yaml and ray.io_rayjobs.yaml"
        )
    for one in objects(example, name=name):
        if one["kind"] in ("RayCluster", "RayJob"):
            file = Path(directory) / f"ray.io_{one['kind'].lower()}s.yaml"
            validator = schemas.resource_validator(file)
            problems = [
                f"{error.json_path}: {error.message}" for error in validator.iter_errors(schemas.without_nulls(one))
            ]
            assert not problems


@pytest.mark.parametrize("example", EXAMPLES)
def test_two_renders_are_identical(example: str) -> None:
    assert text(example, apis=MONITORING) == text.__wrapped__(example, apis=MONITORING)


@pytest.mark.parametrize("example", EXAMPLES)
def test_headwater_accepts_its_configuration(example: str, tmp_path: Path) -> None:
    config = yaml.safe_load(only_config(example)["headwater.yaml"])
    gateway = config["gateway"]
    if "keys_file" in gateway:
        (tmp_path / "tenants.yaml").write_text(f"tenants: {{acme: {{keys: ['sha256:{'0' * 64}']}}}}")
        gateway["keys_file"] = str(tmp_path / "tenants.yaml")
    for key in ("tls_certificate", "tls_key"):  # read when they are loaded, and not made here
        gateway.pop(key, None)
    file = tmp_path / "headwater.yaml"
    file.write_text(yaml.safe_dump(config))
    loaded = load(file, {}, environ={})
    assert loaded.gateway.host == "0.0.0.0"
    assert loaded.gateway.same_port, "each in a pod of its own"
    assert loaded.gossip.host is None, "nodes announce the address of their pod"


def test_large_numbers_stay_whole(tmp_path: Path) -> None:
    """Helm holds numbers as floats, and would write them with an exponent."""
    values = {"config": {"worker": {"kv_memory": 1073741824}, "gateway": {"max_body_bytes": 1000000}}}
    found = yaml.safe_load(only_config("default", values)["headwater.yaml"])
    assert found["worker"]["kv_memory"] == 1073741824
    assert found["gateway"]["max_body_bytes"] == 1000000


def test_the_deploy_job_waits_for_this_configuration() -> None:
    """Mounted files change later than the object; a job that starts sooner would deploy the old configuration."""
    found = objects("ha")
    config = next(one for one in found if one["kind"] == "ConfigMap" and "headwater.yaml" in one["data"])
    digest = hashlib.sha256(config["data"]["headwater.yaml"].encode()).hexdigest()
    job = only(found, "Job")
    assert f"grep -q {digest}" in container(job["spec"]["template"])["args"][0]
    other = only(objects("ha", {"gateway.drainSeconds": 30}), "Job")
    assert other["metadata"]["name"] != job["metadata"]["name"], "a Job cannot be changed"


def test_the_deploy_command_is_what_a_shell_reads(tmp_path: Path) -> None:
    """The whole script of the Job, with stand-ins for what it calls."""
    script = container(only(objects(), "Job")["spec"]["template"])["args"][0]
    for name in ("wget", "ray"):
        (tmp_path / name).write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@" >> {tmp_path}/calls\n')
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["/bin/sh", "-ec", script], env=environment, check=True, timeout=20)
    calls = (tmp_path / "calls").read_text()
    assert "ray\njob\nsubmit\n--address\nhttp://test-headwater-head-svc:8265\n--\nsh\n-ec\n" in calls
    inner = calls.split("-ec\n", 1)[1]
    assert subprocess.run(["/bin/sh", "-n"], input=inner, text=True, timeout=20).returncode == 0
    assert inner.rstrip().endswith("exec headwater deploy --config /etc/headwater/headwater.yaml --wait 3600")


def test_startup_probe_asks_for_this_pods_worker(tmp_path: Path) -> None:
    script = tmp_path / "serving.py"
    script.write_text(only_config("default")["serving.py"])
    stub = tmp_path / "headwater"

    def probe(answer: str, code: int = 0) -> int:
        stub.write_text(f"#!/bin/sh\necho '{answer}'\nexit {code}\n")
        stub.chmod(0o755)
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        return subprocess.run([sys.executable, script], env=environment, capture_output=True, timeout=20).returncode

    here = os.uname().nodename
    worker = '{"workers": [{"node": "%s", "state": "%s"}]}'
    assert probe(worker % (here, "ready")) == 0
    assert probe(worker % (here, "starting")) == 1
    assert probe(worker % ("elsewhere", "ready")) == 1
    assert probe(worker % (here, "ready"), code=1) == 1


def test_sources_are_tidy_yaml() -> None:
    rules = (
        "{extends: default, rules: {line-length: {max: 120}, document-start: disable, braces: {max-spaces-inside: 1}}}"
    )
    files = [CHART / "values.yaml", CHART / "Chart.yaml", *(CHART / "ci").iterdir(), *(CHART / "rules").iterdir()]
    yamllint = shutil.which("yamllint") or str(Path(sys.executable).with_name("yamllint"))
    done = subprocess.run([yamllint, "-s", "-d", rules, *files], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def only_config(example: str, values: dict[str, object] | None = None) -> dict[str, str]:
    """The files of the chart's ConfigMap."""
    found = (one for one in objects(example, values) if one["kind"] == "ConfigMap")
    return next(one["data"] for one in found if "headwater.yaml" in one["data"])


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert f'version = "{chart["appVersion"]}"' in (ROOT / "pyproject.toml").read_text()
    assert (
        f"ray=={yaml.safe_load((CHART / 'values.yaml').read_text())['ray']['version']}\n"
        in (ROOT / "constraints.txt").read_text()
    )
