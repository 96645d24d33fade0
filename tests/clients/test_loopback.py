"""The guard that the other tests here rely on does refuse."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.clients import loopback
from tests.serving import ROOT


def test_nothing_elsewhere_is_reached(server):
    assert server.client.get("/livez").status_code == 200
    with pytest.raises(OSError, match="tried to reach"):
        socket.create_connection(("192.0.2.1", 9))
    with pytest.raises(OSError, match="tried to reach"):
        socket.getaddrinfo("example.invalid", 80)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams, pytest.raises(OSError, match="tried to reach"):
        datagrams.sendto(b"", ("192.0.2.1", 9))
    assert loopback.tried == ["192.0.2.1", "example.invalid", "192.0.2.1"]
    del loopback.tried[:]


def test_a_module_that_hides_its_attempt_still_fails(tmp_path):
    hides = (
        "import contextlib, socket\nwith contextlib.suppress(OSError):\n    socket.getaddrinfo('example.invalid', 80)\n"
    )
    (tmp_path / "hides.py").write_text(hides)
    found = subprocess.run(
        [sys.executable, "-m", "tests.clients.loopback", "hides"],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1
    assert "example.invalid" in found.stderr
