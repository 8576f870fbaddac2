"""Machines of one's own: network namespaces with a Ray node in each, which reach each other over a bridge alone."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.cluster.checks import alive

BIN = Path(sys.executable).parent
NETWORK = "10.213.77"
BRIDGE = "hw-bridge"
LIMIT_S = 120.0


class Machines:
    """This machine, which is at the bridge, and others by name. Raises CalledProcessError where none may be made."""

    def __init__(self, folder: Path) -> None:
        self.address = f"{NETWORK}.1"
        self.env = {**os.environ, "RAY_AUTH_MODE": "disabled", "PATH": f"{BIN}:{os.environ['PATH']}"}
        self._folder = folder
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "addr", "add", f"{self.address}/24", "dev", BRIDGE)
        _run("ip", "link", "set", BRIDGE, "up")

    def head(self, port: int, resources: str) -> str:
        """Start the head node here; returns the Ray cluster's address."""
        self._start([], "head", "--head", f"--port={port}", f"--node-ip-address={self.address}", resources)
        return f"{self.address}:{port}"

    def add(self, name: str, cluster: str, resources: str) -> str:
        """Start a node on a machine of its own; returns its address."""
        address, space = f"{NETWORK}.{len(self._nodes) + 1}", _space(name)
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", space, "type", "veth", "peer", "name", "eth0", "netns", space)
        _run("ip", "link", "set", space, "master", BRIDGE, "up")
        inside = ["ip", "netns", "exec", space]
        _run(*inside, "ip", "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _run(*inside, "ip", "link", "set", device, "up")
        self._start(inside, name, f"--address={cluster}", f"--node-ip-address={address}", resources)
        return address

    def cut(self, process: int) -> None:
        """From now on nothing comes from or to the machine where this process runs."""
        _run("ip", "link", "set", _run("ip", "netns", "identify", str(process)).strip(), "down")

    def stop(self) -> None:
        """End every process of these machines, and the machines."""
        children = [one for node in self._nodes.values() for one in psutil.Process(node.pid).children(recursive=True)]
        for node in self._nodes.values():
            node.terminate()
        for node in self._nodes.values():
            node.wait(60)
        until = time.monotonic() + 5
        while any(map(alive, children)) and time.monotonic() < until:
            time.sleep(0.1)
        for one in filter(alive, children):
            one.kill()
        for name in self._nodes.keys() - {"head"}:
            _run("ip", "netns", "del", _space(name))
        _run("ip", "link", "del", BRIDGE)

    def _start(self, inside: list[str], name: str, *arguments: str) -> None:
        command = [*inside, str(BIN / "ray"), "start", "--block", "--num-cpus=1", *arguments]
        with (self._folder / f"{name}.log").open("wb") as log:
            self._nodes[name] = subprocess.Popen(command, env=self.env, stdout=log, stderr=log)


def _space(name: str) -> str:
    return f"hw-{name}"


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout
