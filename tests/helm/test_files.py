"""The files around the chart say what the chart does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from tests.helm.chart import CHART, ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()


def named(pattern: str, text: str = DOCKERFILE) -> str:
    """What the only line of that pattern names."""
    (found,) = re.findall(pattern, text, re.MULTILINE)
    return str(found)


def paths(values: Any, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all values that are no mappings of values themselves."""
    if isinstance(values, dict) and values and prefix != "workers":
        for key, value in values.items():
            yield from paths(value, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix


def test_the_readme_has_every_value() -> None:
    documented = set(re.findall(r"^\| `([^`]+)` \|", (CHART / "README.md").read_text(), re.MULTILINE))
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for path in paths(values):
        parts = path.split(".")
        assert any(".".join(parts[:end]) in documented for end in range(1, len(parts) + 1)), path
    for path in documented - {path for path in documented if path.endswith((".yaml", ".tpl", "/"))}:
        one: Any = values
        for part in path.split("."):
            assert part in one, path
            one = one[part]


def test_the_image_is_what_the_chart_expects() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    user = named(r"^USER (\d+:\d+)$").split(":")
    assert (int(user[0]), int(user[1])) == (
        values["securityContext"]["runAsUser"],
        values["securityContext"]["runAsGroup"],
    )
    assert {"bash", "wget"} <= set(named(r"recommends (bash .*) \\").split())
    model = named(r"^ARG MODEL=(\S+)$")
    assert values["model"]["name"] == f"/opt/headwater/models/{model}"
    assert "HEADWATER_CACHE=/opt/headwater headwater model pull" in DOCKERFILE
    assert ":latest" not in DOCKERFILE


def test_the_image_has_every_package_and_nothing_else() -> None:
    include = named(r"^include = (\[.*\])$", (ROOT / "pyproject.toml").read_text())
    packages = {name.removesuffix("*") for name in json.loads(include)}
    copied = {
        word for line in re.findall(r"^COPY --chown=\S+ (.*) \S+$", DOCKERFILE, re.MULTILINE) for word in line.split()
    }
    assert packages < copied
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == allowed
    torch = named(r"^ARG TORCH=(\S+)$")
    assert f"{torch}\n" in (ROOT / "constraints.txt").read_text()
