"""Ranks that `mlx.launch`, or somebody on each machine, has started: how they find the leading rank.

MLX connects the ranks first, by its own variables. Over that connection the leading rank tells the others on which port
it listens for them, and a key that was drawn for this group; so neither has to be configured.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable

import msgspec
from msgspec import Struct

from mlx_tandem.engine.ranks import messages as g
from mlx_tandem.engine.ranks.channel import ChannelError, RankChannel
from mlx_tandem.engine.ranks.launched import read_hosts
from mlx_tandem.engine.ranks.leader import LedRank
from mlx_tandem.errors import GroupFailed, ModelError

MEET_SECONDS = 60.0
"""Seconds in which the other ranks have to reach the leading one once MLX has connected them."""

HELLO_SECONDS = 5.0
"""Seconds in which somebody who has connected has to say who it is. Ranks say it at once."""

MOST_HELLO = 256
"""Most bytes of the first message of a rank."""

Meet = Callable[[bytes], bytes]
"""A function that connects this process with the other ranks by MLX and returns the bytes that the first of them has
passed to it. The others pass b""."""


class Meeting(Struct, frozen=True):
    """Where the leading rank listens, and the key of the group."""

    host: str
    port: int
    key: bytes


def own_host(mode: str) -> str:
    """Return the address of the first rank by which the others reach it."""
    if mode == "nccl":
        return os.environ.get("NCCL_HOST_IP", "127.0.0.1")
    if mode == "jaccl":
        return os.environ.get("MLX_JACCL_COORDINATOR", "127.0.0.1:0").rpartition(":")[0]
    listed = read_hosts(os.environ.get("MLX_HOSTFILE", ""))
    if mode == "ring" and isinstance(listed, list) and listed and isinstance(listed[0], list):
        return str(listed[0][0]).rpartition(":")[0]
    return socket.gethostbyname(socket.gethostname())


class LaunchedRanks:
    """The other ranks of a group that `mlx.launch` or a person has started, as the first rank sees them."""

    def __init__(self, mode: str, ranks: int, meet: Meet):
        self._mode, self._ranks, self._meet = mode, ranks, meet

    def start(self) -> list[LedRank]:
        """Wait for the other ranks and return them. Raises GroupFailed."""
        host = own_host(self._mode)
        try:
            with socket.create_server((host, 0), backlog=self._ranks) as server:
                server.settimeout(MEET_SECONDS)
                meeting = Meeting(host, server.getsockname()[1], secrets.token_bytes(32))
                self._meet(msgspec.msgpack.encode(meeting))
                return self._accept(server, meeting.key)
        except OSError as e:
            raise GroupFailed(f"not all ranks have come to {host}: {e}") from e

    def _accept(self, server: socket.socket, key: bytes) -> list[LedRank]:
        found: dict[int, LedRank] = {}
        while len(found) < self._ranks - 1:
            sock, _ = server.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel: RankChannel[g.Answer] = RankChannel(sock, key, g.Answer)
            channel.wait_at_most(HELLO_SECONDS)
            try:
                first = channel.receive(MOST_HELLO)
            except ChannelError:  # somebody without the key, or who says nothing
                channel.close()
                continue
            channel.wait_at_most(None)
            if isinstance(first, g.Hello) and 0 < first.rank < self._ranks:
                found[first.rank] = LedRank(first.rank, channel)
        return [found[rank] for rank in sorted(found)]

    def close(self) -> None:
        """Do nothing: the other ranks end when their connections do."""


def reach(meeting: bytes, rank: int) -> RankChannel[g.Order]:
    """Connect a led rank with the leading one. Raises ModelError."""
    try:
        told = msgspec.msgpack.decode(meeting, type=Meeting)
        sock = socket.create_connection((told.host, told.port), MEET_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel: RankChannel[g.Order] = RankChannel(sock, told.key, g.Order)
        channel.send(g.Hello(rank))
    except (OSError, ChannelError, msgspec.DecodeError, msgspec.ValidationError) as e:
        raise ModelError(f"the first rank cannot be reached: {e}", param="distributed_mode") from e
    return channel
