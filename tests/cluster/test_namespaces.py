"""A cluster over machines that only a network connects: KV travels over it, and one that is cut off is left behind."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests import model_zoo
from tests.cluster.checks import post
from tests.cluster.conftest import TINY, free_port
from tests.cluster.namespaces import Machines
from tests.cluster.test_failures import body

HEADWATER = [sys.executable, "-m", "cluster.cli"]
LIMIT_S = 120.0
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="network namespaces need root on Linux"),
]


class Site:
    """Gateway here, a prefill worker and two places for a decode worker elsewhere."""

    def __init__(self, machines: Machines, model: Path, folder: Path) -> None:
        self.machines = machines
        self.port = free_port()
        self.ray = machines.head(free_port(), '--resources={"gateway": 1}')
        for name, role in (("p", "prefill"), ("d", "decode"), ("e", "decode")):
            machines.add(name, self.ray, f'--resources={{"{role}": 1}}')
        tree: dict[str, Any] = {
            "model": {"name": str(model)},
            "gateway": {"port": self.port, "host": machines.address, "resources": {"gateway": 1}},
        }
        for role in ("prefill", "decode"):
            tree[role] = {"replicas": 1, "resources": {role: 1}}
        for name, value in TINY.items():
            section, key = name.split("__")
            tree.setdefault(section, {})[key] = value
        tree["worker"] |= {"dtype": "float32"}
        tree["router"] = {"local_tokens": 0}
        self.config = folder / "headwater.yaml"
        self.config.write_text(yaml.safe_dump(tree))
        self.url = f"http://{machines.address}:{self.port}/v1/completions"

    def do(self, *command: str) -> str:
        done = subprocess.run(
            [*HEADWATER, *command, "--address", self.ray],
            env=self.machines.env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def worker(self, name: str) -> dict[str, Any]:
        return next(one for one in json.loads(self.do("status", "--json"))["workers"] if one["name"] == name)


@pytest.fixture
def site(tmp_path: Path, tiny: Path) -> Iterator[Site]:
    try:
        machines = Machines(tmp_path)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        yield Site(machines, tiny, tmp_path)
    finally:
        machines.stop()


def test_kv_travels_between_machines_and_a_lost_one_is_done_without(site: Site, tiny: Path) -> None:
    prompt, answer = model_zoo.clear_prompt(tiny, 300, 600)
    site.do("deploy", "--config", str(site.config), "--wait", "60")
    first = post(site.url, body(prompt, 8, return_token_ids=True)).json()["choices"][0]
    assert first["token_ids"] == answer[:8]
    decode = site.worker("decode-0")
    assert decode["transfer"]["accepted"] == 1
    # The decode worker's machine is cut off in the middle of an answer, which goes on elsewhere.
    tokens: list[int] = []
    wanted = body(prompt, 600, return_token_ids=True, stream=True)
    with httpx.stream("POST", site.url, json=wanted, timeout=90, verify=False) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                before = len(tokens)
                for choice in json.loads(line[6:])["choices"]:
                    tokens += choice["token_ids"]
                if before < 20 <= len(tokens) < 600:
                    site.machines.cut(decode["pid"])
    assert tokens == answer
    again = post(site.url, body(prompt, 8, return_token_ids=True)).json()["choices"][0]
    assert again["token_ids"] == answer[:8]
    site.do("down")
