"""`tandem service`: what the service managers get. Their programs are doubles here; the unit is checked by systemd."""

from __future__ import annotations

import plistlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_tandem.cli import service
from tests.unit.cli_tools import tandem

WORDS = ("--port", "9001", "--drain-seconds", "7", "--api-key-file", "./a key%u$HOME")
MADE = service.Service("mlx-tandem", ["serve", "a b", "100%", "$x", 'q"'], "/srv/50%", 17)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home whose `systemctl` notes what it is asked, and fails where the file `fails` is."""
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n'
        f"[ ! -e {tmp_path}/fails ] || {{ echo Failed to connect to bus >&2; exit 1; }}\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked(home: Path) -> list[str]:
    return (home / "asked").read_text().splitlines() if (home / "asked").exists() else []


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux's")


def test_a_line_break_does_not_become_a_line_of_the_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "a\nb").mkdir()
    monkeypatch.chdir(home / "a\nb")
    done = tandem("service", "install", "--port", "9001")
    assert (done.returncode, "a line break or another control character" in done.stderr) == (1, True)
    assert not (home / ".config").exists() and not asked(home)


def test_a_service_is_installed_shown_and_removed(home: Path) -> None:
    file = home / ".config/systemd/user/mlx-tandem.service"
    dry = tandem("service", "install", "--dry-run", *WORDS)
    assert dry.returncode == 0, dry.stderr
    assert not file.exists() and not asked(home)

    done = tandem("service", "install", *WORDS)
    assert done.returncode == 0, done.stderr
    assert "loginctl enable-linger" in done.stdout
    text = file.read_text()
    assert dry.stdout.startswith(f"# {file}\n{text}")
    assert dry.stdout.endswith("systemctl --user daemon-reload\nsystemctl --user enable --now mlx-tandem.service\n")
    assert f"WorkingDirectory={home}\n" in text and "TimeoutStopSec=17\n" in text and "Restart=on-failure" in text
    (start,) = [line for line in text.splitlines() if line.startswith("ExecStart=")]
    words = shlex.split(start.removeprefix("ExecStart=").replace("$$", "$").replace("%%", "%"))
    assert words == [sys.executable, "-P", "-m", "mlx_tandem", "serve", *WORDS]
    assert asked(home) == ["--user daemon-reload", "--user enable --now mlx-tandem.service"]

    again = tandem("service", "install", "--port", "1")
    assert again.returncode == 1 and "exists already" in again.stderr and file.read_text() == text
    assert tandem("service", "status").returncode == 0
    assert tandem("service", "uninstall").returncode == 0
    assert not file.exists()
    assert asked(home)[2:] == [
        "--user status --no-pager mlx-tandem.service",
        "--user disable --now mlx-tandem.service",
        "--user daemon-reload",
    ]


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("install --api-key x", 2, "--api-key-file"),
        ("install --port 99999", 1, "'server.port' is 99999"),
        ("install --name a/b", 2, "must be letters, digits"),
        ("uninstall", 1, "no service of the name mlx-tandem was installed"),
        ("status --name other", 1, "no service of the name other was installed"),
    ],
)
def test_what_cannot_be_done_is_said(home: Path, words: str, status: int, said: str) -> None:
    done = tandem("service", *words.split())
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr
    assert not asked(home) and not (home / ".config").exists()


def test_without_a_manager_there_is_another_way(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "ExecStart=" in tandem("service", "install", "--dry-run").stdout
    for words in (("install",), ("uninstall",), ("status",)):
        done = tandem("service", *words)
        assert done.returncode == 1
        assert done.stderr.startswith("tandem: there is no systemctl, so this machine keeps no services: 'tandem serve")


def test_a_manager_that_fails_is_quoted(home: Path) -> None:
    (home / "fails").touch()
    done = tandem("service", "install")
    assert done.stderr == "tandem: systemctl --user daemon-reload failed: Failed to connect to bus\n"
    assert tandem("service", "uninstall").returncode == 1, "its file is gone; the manager could not be told"
    assert not (home / ".config/systemd/user/mlx-tandem.service").exists()


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    (tmp_path / "mlx-tandem.service").write_text(service.unit(service.Service("x", MADE.words, "/", 17)))
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "mlx-tandem.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "mlx-tandem.service" not in done.stderr, done.stderr


def test_a_mac_runs_it_as_a_program_in_use_and_stays_awake() -> None:
    """The text; it has never run on a Mac."""
    job = plistlib.loads(service.agent(MADE).encode())
    assert job["ProgramArguments"] == ["/usr/bin/caffeinate", "-i", *MADE.command]
    assert (job["ProcessType"], job["ExitTimeOut"], job["RunAtLoad"]) == ("Interactive", 17, True)
    assert job["WorkingDirectory"] == "/srv/50%"
    keeper = service.launchd("mlx-tandem")
    assert keeper.file.name == f"{job['Label']}.plist"
    assert keeper.stops[0][-1].endswith(f"/{job['Label']}")
