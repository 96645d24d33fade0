"""Ranks as processes of this machine: the environment that MLX wants of each, and how they are started and ended."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlx_tandem.engine.ranks import messages as g
from mlx_tandem.engine.ranks.channel import RankChannel
from mlx_tandem.engine.ranks.leader import LedRank

HOST = "127.0.0.1"

KEY = b"the socket pair of a parent and its child"
"""Key of the seals between a process and its child. It is no secret, since nobody else can reach their socket pair."""

PROGRAM = "mlx_tandem.rank_main"
"""The program of a led rank."""

PORTS_FROM, PORTS_TO = 10_000, 32_000
"""The range of ports of the ranks, below the one from which systems take ports of outgoing connections."""


def unused_ports(count: int) -> list[int]:
    """Return ports of this machine that nobody listens on. Each is held until all are found."""
    held: list[socket.socket] = []
    try:
        at = PORTS_FROM + int.from_bytes(os.urandom(4), "little") % (PORTS_TO - PORTS_FROM)
        while len(held) < count:
            at = at + 1 if at < PORTS_TO else PORTS_FROM
            sock = socket.socket()
            try:
                sock.bind((HOST, at))
            except OSError:
                sock.close()
                continue
            held.append(sock)
        return [sock.getsockname()[1] for sock in held]
    finally:
        for sock in held:
            sock.close()


def environment(mode: str, rank: int, ranks: int, ports: Sequence[int], hostfile: str) -> dict[str, str]:
    """Return the variables by which MLX connects rank number `rank` of `ranks` ranks on this machine.

    They are those that `mlx.launch` sets. `hostfile` is the path of a file with `hostfile_text(ports)`.
    """
    own = {"MLX_RANK": str(rank)}
    if mode == "ring":
        return own | {"MLX_HOSTFILE": hostfile}
    if mode == "nccl":
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        visible = devices.split(",") if devices else [str(number) for number in range(ranks)]
        return own | {
            "MLX_WORLD_SIZE": str(ranks),
            "NCCL_HOST_IP": HOST,
            "NCCL_PORT": str(ports[0]),
            "CUDA_VISIBLE_DEVICES": visible[rank] if rank < len(visible) else str(rank),
        }
    return own


def hostfile_text(ports: Sequence[int]) -> str:
    """Return the text of a file of hosts for the ring: for each rank its addresses."""
    return json.dumps([[f"{HOST}:{port}"] for port in ports])


class LocalRanks:
    """The other ranks of this machine, as children of the process of rank 0. They end when this process ends."""

    def __init__(self, mode: str, ranks: int):
        """Choose ports and set this process's environment as that of rank 0. MLX must not be loaded yet."""
        self._folder = tempfile.TemporaryDirectory(prefix="tandem-ranks-")
        self._hostfile = Path(self._folder.name) / "hosts.json"
        self._mode, self._ranks = mode, ranks
        self._ports = unused_ports(ranks)
        self._hostfile.write_text(hostfile_text(self._ports))
        self._others = [self._environment(rank) for rank in range(1, ranks)]
        self._children: list[subprocess.Popen[bytes]] = []
        os.environ.update(self._environment(0))

    def _environment(self, rank: int) -> dict[str, str]:
        own = environment(self._mode, rank, self._ranks, self._ports, str(self._hostfile))
        if "OPENBLAS_NUM_THREADS" not in os.environ:
            # Threads of several ranks would take each other's cores, and ranks with different numbers of them would
            # round differently.
            own["OPENBLAS_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // self._ranks))
        return own

    def start(self, program: Sequence[str] = ("-P", "-m", PROGRAM)) -> list[LedRank]:
        """Start the other ranks and return them. Raises OSError."""
        followers = []
        for rank, own in enumerate(self._others, 1):
            ours, theirs = socket.socketpair()
            try:
                self._children.append(_child(program, rank, theirs.fileno(), os.environ | own))
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
            channel: RankChannel[g.Answer] = RankChannel(ours, KEY, g.Answer)
            followers.append(LedRank(rank, channel))
        return followers

    @property
    def pids(self) -> list[int]:
        """The process ids of the other ranks."""
        return [child.pid for child in self._children]

    def connected(self) -> None:
        """Remove the file of hosts, which MLX has read."""
        self._folder.cleanup()

    def close(self) -> None:
        """End the other ranks and wait for them."""
        for child in self._children:
            child.kill()
        for child in self._children:
            child.wait()
        self._folder.cleanup()


def _child(program: Sequence[str], rank: int, fd: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a rank, whose lines on standard error go where this process's go."""
    return subprocess.Popen(
        [sys.executable, *program, "--fd", str(fd), "--rank", str(rank)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(fd,),
        env=dict(env),
    )
