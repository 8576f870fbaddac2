"""What UCX is told: variables from settings, mistakes by name, and real workers of one host that never collide."""

import multiprocessing
import os
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection

import psutil
import pytest

from tests.transfer.test_nixl import TIMEOUT_S, UNTOUCHED, Worker, until
from transfer import ucx
from transfer.channel import TransportError
from transfer.config import TransferConfig, parse_ports
from transfer.nixl_transport import agent_name

PORTS = "23100-23119"
MACHINE = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.7", "10.0.0.8", "fd00::7"]}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        ({"interface": "eth0"}, {"UCX_NET_DEVICES": "eth0"}),
        ({"interface": "10.0.0.7"}, {"UCX_NET_DEVICES": "eth0"}),
        ({"interface": "10.0.0.0/24"}, {"UCX_NET_DEVICES": "eth0"}),
        ({"interface": "127.0.0.1", "ports": "20000-20100"}, {"UCX_NET_DEVICES": "lo"}),
        ({"ucx": {"TLS": "tcp,sm", "MAX_RMA_RAILS": 1}}, {"UCX_TLS": "tcp,sm", "UCX_MAX_RMA_RAILS": "1"}),
    ],
)
def test_variables_of_a_configuration(settings: dict[str, object], expected: dict[str, str]) -> None:
    assert ucx.variables(TransferConfig.model_validate(settings), MACHINE) == expected


@pytest.mark.parametrize("interface", ["eth1", "10.0.0.9", "10.0.0.8", "10.1.0.0/16", "::1", ""])
def test_an_interface_that_cannot_be_is_named_with_those_that_can(interface: str) -> None:
    """UCX announces the first address of a device; another would not be what was asked for."""
    there = r"it has lo \(127.0.0.1, ::1\), eth0 \(10.0.0.7, 10.0.0.8, fd00::7\)$"
    with pytest.raises(TransportError, match=rf"^transfer\.interface: '{interface}' is neither a device of .*{there}"):
        ucx.variables(TransferConfig(interface=interface), MACHINE)


def test_the_devices_of_this_machine() -> None:
    assert ucx.local_addresses()["lo"][0] == "127.0.0.1"


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


def test_ports_that_are_taken_are_passed_over(taken: int) -> None:
    assert not ucx.is_free(taken, "127.0.0.1")
    assert not ucx.is_free(taken, "")
    first, last = (taken, taken + 9) if taken < 65000 else (taken - 9, taken)
    assert {ucx.free_port(f"{first}-{last}", "127.0.0.1") for _ in range(20)} <= {*range(first, last + 1)} - {taken}


def test_a_range_without_a_free_port_is_a_start_error(taken: int) -> None:
    with pytest.raises(TransportError, match=rf"^transfer\.ports: no port of {taken}-{taken} can be bound on 127"):
        ucx.configure(TransferConfig(interface="lo", ports=f"{taken}-{taken}"))


def test_a_transport_that_ucx_does_not_know_is_a_start_error() -> None:
    """UCX alone would go on without it."""
    before = dict(os.environ)
    says = r"^transfer\.ucx: transport 'pigeon' is not available, please use one or more of: .*tcp[^\n]*$"
    with pytest.raises(TransportError, match=says):
        ucx.configure(TransferConfig(ucx={"TLS": "tcp,pigeon"}))
    assert dict(os.environ) == before


def test_variables_that_ucx_knows_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TCP_NODELAY", raising=False)
    ucx.configure(TransferConfig(ucx={"TCP_NODELAY": "y"}))
    assert os.environ.pop("UCX_TCP_NODELAY") == "y"


@pytest.mark.parametrize(
    ("said", "returncode", "expected"),
    [
        ("", 0, None),
        ("[1.2] [vm:1:0] ucp_worker.c:1997 UCX  WARN  CPU affinity is not set\n", 0, None),
        (
            "[1.2] [vm:1:0] parser.c:2578 UCX  WARN  unused environment variable: UCX_TLSS (maybe: UCX_TLS?)\n"
            "[1.2] [vm:1:0] parser.c:2578 UCX  WARN  (set UCX_WARN_UNUSED_ENV_VARS=n to suppress this warning)\n",
            0,
            "unused environment variable: UCX_TLSS (maybe: UCX_TLS?)",
        ),
        (
            "[1.2] [vm:1:0] parser.c:1558 UCX  ERROR Invalid value for NODELAY: 'perhaps'. Expected: <y|n>\n"
            "[1.2] [vm:1:0] uct_md.c:217  UCX  ERROR Failed to read iface config\nTraceback\nNIXL_ERR_BACKEND\n",
            1,
            "Invalid value for NODELAY: 'perhaps'. Expected: <y|n>",
        ),
        ("Traceback:\n  File\nImportError: no module\n", 1, "ImportError: no module"),
        ("", -11, "UCX does not start"),
    ],
)
def test_complaints_of_ucx(said: str, returncode: int, expected: str | None) -> None:
    assert ucx.complaint(said, returncode) == expected


def test_a_transport_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "pigeon")
    with pytest.raises(TransportError, match=r"^transfer\.backend: NIXL cannot start UCX with .*UCX_TLS=pigeon[^\n]*$"):
        Worker("p/1", 1)


def test_a_port_that_is_taken_at_the_last_moment_is_passed_over(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setenv("UCX_TCP_PORT_RANGE", "0")
    config = TransferConfig(interface="lo", ports=PORTS)
    free = ucx.free_port(PORTS, "127.0.0.1")
    answers = iter([taken, free])
    monkeypatch.setattr(ucx, "free_port", lambda ports, address: next(answers))
    worker = Worker("p/1", 1, config=config)
    assert free in listening()
    worker.transport.close()


def test_names_of_agents_differ_for_equal_workers_of_two_clusters() -> None:
    """And so for two lives of one worker."""
    assert agent_name("prefill-0", 7) != agent_name("prefill-0", 7)


def listening() -> set[int]:
    """The ports that this process listens on."""
    return {one.laddr.port for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN}


def exchange(pipe: Connection, config: TransferConfig, sign: int) -> None:
    """A worker's process: say where it listens and how to reach it, write a block to the next one, say what it has."""
    os.environ["UCX_TLS"] = "tcp"
    ucx.configure(config)
    worker = Worker(agent_name("prefill-0", 1), sign, config=config)
    pipe.send((worker.transport.describe("prefill-0", 1), listening()))
    peer = pipe.recv()
    worker.transport.connect(peer)
    handle = worker.transport.write(peer.agent, [2], [5], (0, len(worker.layout.layers)), b"here")
    until(lambda: worker.transport.done(handle) and worker.inbox, worker)
    pipe.send(worker.blocks())
    until(pipe.poll, worker)  # the others may still need its progress
    worker.transport.close()


def test_four_workers_of_one_host_name_in_one_range_of_ports() -> None:
    """Each writes a block to the next over TCP alone, on the loopback device."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pipes, processes = [], []
    for index in range(4):
        mine, theirs = context.Pipe()
        config = TransferConfig(interface=("lo", "127.0.0.1")[index % 2], ports=PORTS)
        processes.append(context.Process(target=exchange, args=(theirs, config, index + 1), daemon=True))
        processes[-1].start()
        pipes.append(mine)
    peers, ports = zip(*(pipe.recv() for pipe in pipes), strict=True)
    assert len({peer.agent for peer in peers}) == 4
    assert all(len(held) == 1 and held < {*parse_ports(PORTS)} for held in ports)
    assert len(set.union(*ports)) == 4
    for index, pipe in enumerate(pipes):
        pipe.send(peers[(index + 1) % 4])
    for index, pipe in enumerate(pipes):
        assert pipe.poll(TIMEOUT_S)
        sign, writer = index + 1, (index - 1) % 4 + 1
        expected = [-block * sign for block in UNTOUCHED]
        expected[5] = 3 * writer
        assert pipe.recv() == expected
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send("done")
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
