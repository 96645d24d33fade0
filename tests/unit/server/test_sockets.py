"""macOS allows a process little by default: open files, and bytes on their way between processes."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys

import pytest

from mlx_tandem.config import EngineConfig, ModelConfig
from mlx_tandem.engine.client.process import process_launch
from mlx_tandem.server.sockets import bind, unused_port

RAISE = """
import resource
from mlx_tandem.server.sockets import allow_many_connections
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
allow_many_connections()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def raised(soft: int, hard: int) -> list[int]:
    code = RAISE.format(soft=soft, hard=hard)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [int(n) for n in done.stdout.split()]


def test_the_soft_limit_of_open_files_becomes_the_hard_one() -> None:
    assert raised(256, 1000) == [1000, 1000]


def test_a_limit_that_is_high_enough_stays() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert raised(1000, 1000) == [1000, 1000]
    if hard >= 70_000 or hard == resource.RLIM_INFINITY:
        assert raised(70_000, 70_000) == [70_000, 70_000]


def test_a_step_s_tokens_never_block_the_engine_s_end() -> None:
    """More than the 8 KB of macOS go into the socket while nobody reads it."""
    ours, engine = process_launch(EngineConfig(ModelConfig("")), ("-c", "import time; time.sleep(60)"))()
    try:
        ours.setblocking(False)
        assert ours.send(b"x" * (256 << 10)) >= 128 << 10
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) >= 128 << 10
    finally:
        engine.kill()
        engine.wait(10)
        ours.close()


def test_an_unused_port_is_none_that_outgoing_connections_get() -> None:
    """A server cannot listen at the local port of anybody's connection."""
    with socket.create_server(("127.0.0.1", 0)) as anybody, socket.create_connection(anybody.getsockname()) as client:
        with pytest.raises(OSError, match="in use"):
            bind("127.0.0.1", client.getsockname()[1])
        port = unused_port()
        assert port < min(32_768, client.getsockname()[1])
        bind("127.0.0.1", port).close()
