"""What UCX is told, on which NIXL moves the blocks: the network device, the ports, and what else an operator sets.

UCX reads its variables from the environment of a process when a NIXL agent is created. NIXL's own parameters cannot
carry them: its device list is for RDMA devices, and its list of variables is split at commas. So a worker calls
`configure` before it creates its agent.
"""

from __future__ import annotations

import ipaddress
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import psutil

from transfer.channel import TransportError
from transfer.config import TransferConfig, parse_ports

CHECK_TIMEOUT_S = 60.0
TRIES, TRY_S = 3, 0.1
"""How often a range of ports is gone through, and the longest pause behind each time."""
_CHECK = """
from nixl._api import nixl_agent, nixl_agent_config
nixl_agent("check", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
"""
_COMPLAINT = re.compile(r"UCX  (?:ERROR|WARN +(?=.* is not available|unused environment variable)) *(.+)")


def configure(config: TransferConfig) -> None:
    """Put what UCX is told into this process's environment. Raises TransportError, naming the setting, for what cannot
    work on this machine."""
    chosen = variables(config, local_addresses())
    if config.ports is not None:
        free_port(config.ports, listen_address(config))
    if config.ucx:
        check(chosen)
    os.environ.update(chosen)


def variables(config: TransferConfig, addresses: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The environment variables of this configuration on a machine with these devices. Raises TransportError."""
    chosen = {f"UCX_{key}": value for key, value in config.ucx.items()}
    if config.interface is not None:
        chosen["UCX_NET_DEVICES"], _ = resolve(config.interface, addresses)
    return chosen


def resolve(interface: str, addresses: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """The device that `interface` means, by name, address or network, and the address that UCX listens on there, which
    is the first. Raises TransportError."""
    for device, held in addresses.items():
        if interface == device or _means(interface, held[0]):
            return device, held[0]
    here = ", ".join(f"{device} ({', '.join(held)})" for device, held in addresses.items())
    raise TransportError(
        f"transfer.interface: {interface!r} is neither a device of {socket.gethostname()} nor the first address of "
        f"one: it has {here}"
    )


def _means(interface: str, address: str) -> bool:
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(interface, strict=False)
    except ValueError:  # the name of a device
        return False


def local_addresses() -> dict[str, list[str]]:
    """The addresses of each device of this machine that is up, in the order in which UCX prefers them: IPv4 first."""
    up = {device for device, stats in psutil.net_if_stats().items() if stats.isup}
    found: dict[str, list[str]] = {}
    for device, held in psutil.net_if_addrs().items():
        for family in (socket.AF_INET, socket.AF_INET6):
            usable = [one.address for one in held if one.family == family and _reaches_others(one.address)]
            if usable and device in up:
                found.setdefault(device, []).extend(usable)
    return found


def _reaches_others(address: str) -> bool:
    return not ipaddress.ip_address(address.partition("%")[0]).is_link_local


def check(chosen: Mapping[str, str]) -> None:
    """Let UCX itself judge the variables, in a process that ends: it knows which transports exist here, but only logs
    what it does not understand and goes on without. Raises TransportError."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CHECK],
            env={**os.environ, **chosen},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=CHECK_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise TransportError(f"transfer.ucx: UCX did not start within {CHECK_TIMEOUT_S:.0f} s") from None
    if problem := complaint(done.stdout, done.returncode):
        raise TransportError(f"transfer.ucx: {problem}")


def complaint(said: str, returncode: int) -> str | None:
    """What UCX found wrong with its variables, in its own words, or None."""
    if found := _COMPLAINT.search(said):
        return found[1]
    return (said.strip().splitlines() or ["UCX does not start"])[-1] if returncode else None


def listen_address(config: TransferConfig) -> str:
    """The address that a worker listens on; empty for all addresses. Raises TransportError."""
    return "" if config.interface is None else resolve(config.interface, local_addresses())[1]


def free_port(ports: str, address: str) -> int:
    """A port of the range that can be bound, chosen at random: workers that start at once rarely meet. Raises
    TransportError when there is none."""
    wanted = parse_ports(ports)
    for _ in range(TRIES):
        for port in random.sample(wanted, len(wanted)):
            if is_free(port, address):
                return port
        time.sleep(random.uniform(0, TRY_S))  # others may just have been trying the same ones out
    raise TransportError(f"transfer.ports: no port of {ports} can be bound on {address or socket.gethostname()}")


def is_free(port: int, address: str) -> bool:
    """Whether a port can be bound. UCX, too, binds without SO_REUSEADDR."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
