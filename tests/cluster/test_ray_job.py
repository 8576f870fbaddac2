"""`ray job submit -- headwater batch` on a Ray cluster with its job server: the status of a job is that of its rows."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.cluster.checks import alive
from tests.cluster.conftest import TINY, free_port
from tests.cluster.test_batch import rows_of, written

BIN = Path(sys.executable).parent
LIMIT_S = 240.0
PORTS = ("port", "dashboard-port", "ray-client-server-port", "dashboard-agent-listen-port", "metrics-export-port")

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("aiohttp_cors") is None, reason="Ray's job server needs ray[default]"),
]


class Head:
    """A Ray head node with a job server, in a process group of its own."""

    def __init__(self, folder: Path) -> None:
        ports = {name: free_port() for name in PORTS}
        self.address, self.jobs = (f"127.0.0.1:{ports['port']}", f"http://127.0.0.1:{ports['dashboard-port']}")
        # What runs in a job finds commands as whoever has started the node does.
        self.env = {**os.environ, "RAY_AUTH_MODE": "disabled", "PATH": f"{BIN}:{os.environ['PATH']}"}
        command = [str(BIN / "ray"), "start", "--head", "--block", "--num-cpus=8", "--include-dashboard=true"]
        command += [f"--{name}={port}" for name, port in ports.items()]
        with (folder / "ray.log").open("wb") as log:
            self.process = subprocess.Popen(command, env=self.env, stdout=log, stderr=log)

    def ready(self) -> None:
        until = time.monotonic() + LIMIT_S
        while True:
            try:
                if httpx.get(f"{self.jobs}/api/jobs/", verify=False).status_code == 200:
                    return
            except httpx.TransportError:
                assert self.process.poll() is None
                assert time.monotonic() < until
            time.sleep(0.2)

    def do(self, *command: str) -> subprocess.CompletedProcess[str]:
        name, *arguments = command
        return subprocess.run(
            [str(BIN / name), *arguments], env=self.env, capture_output=True, text=True, timeout=LIMIT_S
        )

    def submit(self, *command: str) -> tuple[str, int, str]:
        """Submit a job and wait for its end: its status, the exit code of the submission, and what was said."""
        done = self.do("ray", "job", "submit", "--address", self.jobs, "--", *command)
        name = re.search(r"raysubmit_\w+", done.stdout)
        assert name, done.stdout + done.stderr
        (job,) = [
            one
            for one in httpx.get(f"{self.jobs}/api/jobs/", verify=False).json()
            if one["submission_id"] == name.group()
        ]
        return job["status"], done.returncode, done.stdout + done.stderr

    def stop(self) -> None:
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()
        self.process.wait(60)
        until = time.monotonic() + 5
        while any(map(alive, children)) and time.monotonic() < until:
            time.sleep(0.1)
        for one in filter(alive, children):
            one.kill()


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Head]:
    folder = tmp_path_factory.mktemp("head")
    made = Head(folder)
    try:
        made.ready()
        tree: dict[str, dict[str, object]] = {"model": {"name": str(tiny)}, "gateway": {"port": free_port()}}
        for name, value in TINY.items():
            section, key = name.split("__")
            tree.setdefault(section, {})[key] = value
        tree["gossip"] = {"host": "127.0.0.1"}
        (folder / "headwater.yaml").write_text(yaml.safe_dump(tree))
        done = made.do("headwater", "deploy", "--address", made.address, "--config", str(folder / "headwater.yaml"))
        assert done.returncode == 0, done.stderr
        yield made
    finally:
        made.stop()


def test_the_status_of_a_job_is_that_of_its_rows(head: Head, tmp_path: Path) -> None:
    """The job finds the cluster that it runs in; nobody tells it."""
    path, output = written(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    status, code, said = head.submit("headwater", "batch", str(path), "-o", str(output))
    assert (status, code) == ("SUCCEEDED", 0), said
    assert "12 rows succeeded, 0 failed" in said
    assert len(rows_of(output)) == 12

    path, output = written(tmp_path / "bad.jsonl", 1, "{"), tmp_path / "bad.out"
    status, code, said = head.submit("headwater", "batch", str(path), "-o", str(output))
    assert (status, code) == ("FAILED", 1), said
    assert "4 rows succeeded, 1 failed" in said
    assert [row["error"]["code"] for row in rows_of(output) if row["error"]] == ["invalid_line"]

    twice = tmp_path / "twice.jsonl"
    twice.write_text(
        "\n".join([json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}})] * 2)
    )
    status, code, said = head.submit("headwater", "batch", str(twice), "-o", str(tmp_path / "twice.out"))
    assert (status, code) == ("FAILED", 1), said
    assert f"{twice}:2: custom_id: 'a' is used in {twice}:1 already" in said
