"""The real transport: NIXL writes between registered KV pools.

Every worker registers its pool once and prepares one descriptor per block and region (strided, so that the list costs
a row a region); a write names blocks by index. Peers are described by plain numbers (`transfer.messages.Peer`), never
by NIXL's own pickled descriptor lists. One thread owns an instance.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from transfer import ucx
from transfer.channel import Layers, TransportError
from transfer.config import TransferConfig
from transfer.layout import KVLayout, Slices
from transfer.messages import Peer

os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")


@dataclass(frozen=True, slots=True)
class _Remote:
    peer: Peer
    layout: KVLayout
    descriptors: Any


def _descriptor_rows(base: int, device: int, layout: KVLayout) -> np.ndarray:
    """Strided descriptors, one row a region: (address, length, device, stride, count)."""
    rows = [(base + r.offset, r.block_bytes, device, r.block_bytes, layout.num_blocks) for r in layout.regions()]
    return np.array(rows, dtype=np.uint64)


def _indices(blocks: Sequence[int], layers: Layers, slices: Slices, layout: KVLayout) -> np.ndarray:
    """Descriptor numbers of these blocks in every region of these layers of slices, region by region. Raises
    TransportError when the pool does not hold the slices."""
    (begin, end), (first, stop), shard = layers, slices, layout.shard
    if not (set(range(first, stop)) and set(range(first, stop)) <= set(shard.slices)):
        raise TransportError(f"slices {first} to {stop - 1} are not among those of {shard}")
    numbers = np.arange(first - shard.first, stop - shard.first, dtype=np.int32) * 2 * len(layout.layers)
    regions = (numbers[:, None] + np.arange(2 * begin, 2 * end, dtype=np.int32)).ravel()
    return (regions[:, None] * np.int32(layout.num_blocks) + np.asarray(blocks, dtype=np.int32)).ravel()


def agent_name(worker: str, incarnation: int) -> str:
    """A name for one life of a worker that no other has, not even in another cluster that started at the same time."""
    return f"{worker}/{incarnation}/{secrets.token_hex(4)}"


def _start_agent(name: str, config: TransferConfig) -> Any:
    """A NIXL agent that listens where it should. Raises TransportError."""
    if config.ports is None:
        return _new_agent(name, config.backend)
    address, failed = ucx.listen_address(config), 0
    while True:
        port = ucx.free_port(config.ports, address)
        # Never the whole range: while every port of it is taken, UCX tries them again and again without end.
        os.environ["UCX_TCP_PORT_RANGE"] = f"{port}-{port}"
        try:
            return _new_agent(name, config.backend)
        except TransportError:
            # If nobody has taken the port, it was not about that; or somebody was just trying it out.
            failed += ucx.is_free(port, address)
            if failed == ucx.TRIES:
                raise


def _new_agent(name: str, backend: str) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    logging.getLogger("nixl").setLevel(logging.WARNING)
    try:
        # NIXL's progress thread spins on a core of its own; the owner polls instead.
        agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[backend]))
    except Exception as error:  # NIXL raises its own untyped exceptions
        told = " ".join(f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith("UCX_"))
        raise TransportError(
            f"transfer.backend: NIXL cannot start {backend} with {told or 'defaults'}: {error}"
        ) from error
    if backend not in agent.backends:
        raise TransportError(f"transfer.backend: NIXL has no plugin {backend!r} here")
    return agent


class NixlTransport:
    """A NIXL agent over one pool. `agent` must be unique in the cluster, for every life of a worker (`agent_name`).
    Raises TransportError when NIXL cannot start."""

    def __init__(self, agent: str, memory: torch.Tensor, layout: KVLayout, config: TransferConfig) -> None:
        self._agent = _start_agent(agent, config)
        self.agent = agent
        self._layout = layout
        self._memory = memory
        self._kind = "VRAM" if memory.is_cuda else "DRAM"
        self._registration = self._agent.register_memory([memory])
        rows = _descriptor_rows(memory.data_ptr(), self._device, layout)
        self._local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows, self._kind)
        self._remotes: dict[str, _Remote] = {}

    @property
    def _device(self) -> int:
        return self._memory.get_device() if self._memory.is_cuda else 0

    def describe(self, name: str, incarnation: int) -> Peer:
        """What others need to write here."""
        return Peer(
            name=name,
            incarnation=incarnation,
            agent=self.agent,
            metadata=self._agent.get_agent_metadata(),
            base=self._memory.data_ptr(),
            device=self._device,
            on_cuda=self._memory.is_cuda,
            layout=self._layout.to_tuple(),
        )

    def connect(self, peer: Peer) -> None:
        """Learn how to write to a peer. Raises TransportError, naming the field, when the layouts do not fit, and when
        the peer has the agent name of another."""
        if known := self._remotes.get(peer.agent):
            if known.peer == peer:
                return
            raise TransportError(f"two peers have the agent name {peer.agent}: {known.peer.name} and {peer.name}")
        if peer.agent == self.agent:
            raise TransportError(f"{peer.name} has this worker's own agent name {self.agent}")
        layout = KVLayout.from_tuple(peer.layout)
        if difference := self._layout.difference(layout):
            raise TransportError(f"KV layouts of {self.agent} and {peer.agent} do not fit: {difference}")
        rows = _descriptor_rows(peer.base, peer.device, layout)
        try:
            self._agent.add_remote_agent(peer.metadata)
            descriptors = self._agent.prep_xfer_dlist(peer.agent, rows, "VRAM" if peer.on_cuda else "DRAM")
        except Exception as error:  # NIXL raises its own untyped exceptions
            raise TransportError(f"cannot connect to {peer.agent}: {error}") from error
        self._remotes[peer.agent] = _Remote(peer, layout, descriptors)

    def disconnect(self, agent: str) -> None:
        """Forget a peer whose life has ended."""
        if remote := self._remotes.pop(agent, None):
            try:
                remote.descriptors.release()
                self._agent.remove_remote_agent(agent)
            except Exception as error:
                logging.getLogger(__name__).debug("disconnecting %s: %s", agent, error)

    def write(
        self,
        agent: str,
        local: Sequence[int],
        remote: Sequence[int],
        layers: Layers,
        notify: bytes,
        slices: Slices | None = None,
    ) -> Any:
        """Post a write, of all slices that are here unless it is said which; see `Transport`."""
        target = self._remotes.get(agent)
        if target is None:
            raise TransportError(f"not connected to {agent}")
        shard = self._layout.shard
        slices = slices or (shard.first, shard.first + shard.count)
        ends = _indices(local, layers, slices, self._layout), _indices(remote, layers, slices, target.layout)
        try:
            handle = self._agent.make_prepped_xfer("WRITE", self._local, ends[0], target.descriptors, ends[1], notify)
        except Exception as error:
            raise TransportError(f"write to {agent} cannot be prepared: {error}") from error
        try:
            state = self._agent.transfer(handle)
        except Exception as error:
            self.release(handle)
            raise TransportError(f"write to {agent} failed: {error}") from error
        if state == "ERR":
            handle.release()
            raise TransportError(f"write to {agent} failed")
        return handle

    def done(self, handle: Any) -> bool:
        """Whether a write has completed; see `Transport`."""
        try:
            state = self._agent.check_xfer_state(handle)
        except Exception as error:
            raise TransportError(f"write failed: {error}") from error
        if state == "ERR":
            raise TransportError("write failed")
        return bool(state == "DONE")

    def release(self, handle: Any) -> None:
        """Forget a handle; one still in progress is aborted."""
        try:
            handle.release()
        except Exception as error:
            logging.getLogger(__name__).debug("releasing a transfer: %s", error)

    def notify(self, agent: str, message: bytes) -> None:
        """Send a message without data; see `Transport`."""
        if agent not in self._remotes:
            raise TransportError(f"not connected to {agent}")
        try:
            self._agent.send_notif(agent, message)
        except Exception as error:
            raise TransportError(f"notification to {agent} failed: {error}") from error

    def receive(self) -> list[tuple[str, bytes]]:
        """Notifications that have arrived; polling also lets NIXL make progress."""
        arrived = self._agent.get_new_notifs()
        return [(agent, message) for agent, messages in arrived.items() for message in messages]

    def close(self) -> None:
        """Forget every peer and give the memory's registration back."""
        for agent in list(self._remotes):
            self.disconnect(agent)
        self._local.release()
        self._agent.deregister_memory(self._registration)
