"""The chart as the tests see it: rendered by a real Helm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "headwater"
EXAMPLES = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))
VERSIONS = ("1.29", "1.33", "1.37")
MONITORING = ("monitoring.coreos.com/v1", "ray.io/v1")
LONGEST = "r" * 53
"""The longest name that Helm gives a release."""
Object = dict[str, Any]


def helm() -> str:
    """The program: $HELM, one on the PATH, or one that is fetched. Skips the test where there is none."""
    program, problem = _find_helm()
    if problem:
        pytest.skip(f"no Helm: set HELM or install it; {problem}")
    return program


@lru_cache(1)
def _find_helm() -> tuple[str, str]:
    """The program, or why there is none; asked once, as fetching may take long to fail."""
    if found := os.environ.get("HELM") or shutil.which("helm"):
        return found, ""
    fetched = subprocess.run(
        [sys.executable, ROOT / "helm" / "get_helm.py"], capture_output=True, text=True, timeout=180, cwd=ROOT
    )
    return fetched.stdout.strip(), fetched.stderr.strip() if fetched.returncode else ""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """One call of Helm, which needs no cluster."""
    return subprocess.run([helm(), *arguments], capture_output=True, text=True, timeout=60)


def example_file(name: str) -> str:
    """The path of an example's values."""
    return str(CHART / "ci" / f"{name}-values.yaml")


@lru_cache(None)
def text(
    example: str = "default", values: str = "{}", version: str = "1.37", apis: tuple[str, ...] = (), name: str = "test"
) -> str:
    """All manifests with an example's values, and `values`, as JSON, on top."""
    command = [
        "template",
        name,
        str(CHART),
        "--namespace",
        "llm",
        "--kube-version",
        version,
        "-f",
        example_file(example),
    ]
    command += [
        part for key, value in json.loads(values).items() for part in ("--set-json", f"{key}={json.dumps(value)}")
    ]
    command += [part for api in apis for part in ("--api-versions", api)]
    done = run(*command)
    if done.returncode != 0:
        raise ValueError(done.stderr)
    return done.stdout


def objects(example: str = "default", values: Mapping[str, Any] | None = None, **options: Any) -> list[Object]:
    """The objects of `text`, not to be changed. Raises ValueError with what Helm says when it refuses."""
    return _parse(text(example, json.dumps(values or {}), **options))


@lru_cache(None)
def _parse(manifests: str) -> list[Object]:
    return [one for one in yaml.load_all(manifests, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if one]


def only(found: list[Object], kind: str) -> Object:
    """The one object of a kind."""
    (one,) = [one for one in found if one["kind"] == kind]
    return one


def groups(found: list[Object]) -> dict[str, Object]:
    """Groups of the Ray cluster by name, the head among them."""
    spec = only(found, "RayCluster")["spec"]
    return {"head": spec["headGroupSpec"], **{one["groupName"]: one for one in spec["workerGroupSpecs"]}}


def pods(found: list[Object]) -> Iterator[tuple[str, Object]]:
    """Every pod or template of a pod, with a name for messages."""
    for one in found:
        if one["kind"] == "RayCluster":
            yield from ((f"group {name}", group["template"]) for name, group in groups([one]).items())
        elif one["kind"] == "RayJob":
            yield "RayJob", one["spec"]["submitterPodTemplate"]
        elif one["kind"] == "Job":
            yield "Job", one["spec"]["template"]
        elif one["kind"] == "Pod":
            yield "Pod", one


def container(pod: Object) -> Object:
    """A pod's only container."""
    (one,) = pod["spec"]["containers"]
    return one


def variables(pod: Object) -> dict[str, Object]:
    """Its environment by name."""
    return {one["name"]: one for one in container(pod)["env"]}
