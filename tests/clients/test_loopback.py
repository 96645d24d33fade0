"""The guard that the other tests here rely on does refuse."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys

import pytest

from tests.clients import loopback, node
from tests.clients.elsewhere import elsewhere
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


def test_what_a_program_for_node_reaches_for_is_seen():
    program = shutil.which("node", path=node.path())
    if program is None:
        pytest.skip("the extra `clients` is not installed")
    fetch = "await fetch(process.argv[1]).catch(() => 0)"
    with elsewhere() as found:
        for url in ("https://example.invalid/", "http://example.invalid/"):
            command = [program, "--input-type=module", "-e", fetch, url]
            subprocess.run(command, env=found.environment, check=True, timeout=60)
    assert len(found.tried) == 2
    assert all("example.invalid" in attempt for attempt in found.tried)
