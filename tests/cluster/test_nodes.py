"""Several Ray nodes, which are raylets on this machine: who runs where, one that is drained, and one that is lost."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from ray.cluster_utils import Cluster as Nodes

from tests.cluster.checks import post
from tests.cluster.conftest import TINY, free_port
from tests.cluster.test_failures import body

HEADWATER = [sys.executable, "-m", "cluster.cli"]
LIMIT_S = 120.0


class Site:
    """A Ray cluster of nodes, and commands that an operator gives there."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.port = free_port()
        self.nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"gateway": 1}})
        self.env = {**os.environ, "RAY_ADDRESS": self.nodes.address, "RAY_AUTH_MODE": "disabled"}
        self.config = folder / "headwater.yaml"
        tree: dict[str, Any] = {
            "model": {"name": str(model)},
            "gateway": {"port": self.port, "resources": {"gateway": 1}},
        }
        for role in ("prefill", "decode"):
            tree[role] = {"replicas": 1, "resources": {role: 1}}
        for name, value in TINY.items():
            section, key = name.split("__")
            tree.setdefault(section, {})[key] = value
        tree["worker"] |= {"dtype": "float32", "drain_s": 0.5}
        self.config.write_text(yaml.safe_dump(tree))

    def do(self, *command: str, fails: bool = False) -> str:
        done = subprocess.run(
            [*HEADWATER, *command, "--address", self.nodes.address],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert bool(done.returncode) == fails, done.stderr
        return done.stderr if fails else done.stdout

    def where(self) -> dict[str, tuple[str, str]]:
        """The Ray node of each actor, and its state. The controller may begin again just now."""
        deadline = time.monotonic() + LIMIT_S
        while (known := json.loads(self.do("status", "--json"))["controller"]) is None:
            assert time.monotonic() < deadline
        return {one["name"]: (one["node_id"], one["state"]) for one in known["actors"]}

    def until(self, name: str, nodes: set[str]) -> None:
        """Wait until an actor is up on one of these nodes."""
        deadline = time.monotonic() + LIMIT_S
        while (found := self.where()[name]) != (found[0], "up") or found[0] not in nodes:
            assert time.monotonic() < deadline, found
            time.sleep(0.5)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("site"), tiny)
    yield made
    made.nodes.shutdown()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_actors_are_where_their_resources_are_and_nodes_may_go(site: Site) -> None:
    said = site.do("deploy", "--config", str(site.config), "--wait", "0", fails=True)
    assert "prefill: 1 wanted (1 x prefill.resources 1), 0 in the Ray cluster" in said
    first = site.nodes.add_node(num_cpus=1, resources={"prefill": 1})
    second = site.nodes.add_node(num_cpus=1, resources={"prefill": 1, "decode": 1})
    assert f"http://127.0.0.1:{site.port}" in site.do("deploy", "--config", str(site.config))
    url = f"http://127.0.0.1:{site.port}/v1/completions"
    answer = post(url, body(list(range(5, 305)), 8, return_token_ids=True)).json()["choices"][0]["token_ids"]
    there = {name: node for name, (node, _) in site.where().items()}
    assert there["decode-0"] == second.node_id
    assert there["prefill-0"] in (first.node_id, second.node_id)
    assert there["gateway-0"] not in (first.node_id, second.node_id)
    others = {first.node_id, second.node_id} - {there["prefill-0"]}
    assert "prefill-0" in site.do("drain", "--node", there["prefill-0"])
    third = site.nodes.add_node(num_cpus=1, resources={"decode": 1, "prefill": 1})
    site.until("prefill-0", others | {third.node_id})
    site.until("decode-0", {second.node_id, third.node_id})
    # A node is lost: what ran there runs elsewhere.
    lost = site.where()["decode-0"][0]
    site.nodes.add_node(num_cpus=1, resources={"decode": 1, "prefill": 1})
    site.nodes.remove_node(second if lost == second.node_id else third, allow_graceful=False)
    deadline = time.monotonic() + LIMIT_S
    while (found := site.where()["decode-0"]) == (lost, "up") or found[1] != "up":
        assert time.monotonic() < deadline, found
        time.sleep(0.5)
    again = post(url, body(list(range(5, 305)), 8, return_token_ids=True))
    assert again.json()["choices"][0]["token_ids"] == answer
    site.do("down")
    with pytest.raises(httpx.TransportError):
        post(url, body([1], 1))
    assert "no Headwater cluster" in site.do("scale", "--decode", "2", fails=True)
