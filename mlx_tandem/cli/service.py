"""Servers that the system starts at login and restarts: units of systemd on Linux, agents of launchd on a Mac.

The agents of launchd have never run on a Mac.
"""

from __future__ import annotations

import os
import plistlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_tandem import files
from mlx_tandem.cli.console import fail, say
from mlx_tandem.errors import TandemError

MORE_SECONDS = 10
"""Seconds beyond those for draining in which the server has to end."""


@dataclass(frozen=True)
class Service:
    """A server that is a service: the words behind `tandem`, the folder it runs in, and how long it may take to end."""

    name: str
    words: Sequence[str]
    folder: str
    stop_seconds: int

    @property
    def command(self) -> list[str]:
        """The program and its arguments."""
        return [sys.executable, "-P", "-m", "mlx_tandem", *self.words]


@dataclass(frozen=True)
class Manager:
    """The service manager of a system: where the file of a service is, and the commands that begin, end and show it."""

    file: Path
    starts: Sequence[Sequence[str]]
    stops: Sequence[Sequence[str]]
    forgets: Sequence[Sequence[str]]
    """Commands that are run once the file is gone."""
    shows: Sequence[str]
    hint: str
    """A line for the user once the service runs."""


def manager(name: str) -> Manager:
    """Return the service manager of this system for a service."""
    return launchd(name) if sys.platform == "darwin" else systemd(name)


def _check(keeper: Manager) -> None:
    """End the process with one line and status 1 if this machine does not have the program of a service manager."""
    program = keeper.shows[0]
    if shutil.which(program) is None:
        fail(f"there is no {program}, so this machine keeps no services: 'tandem serve --daemon' starts a server")


def systemd(name: str) -> Manager:
    """Return the service manager of the user on Linux."""
    unit = f"{name}.service"
    ask = ("systemctl", "--user")
    return Manager(
        Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user" / unit,
        starts=[(*ask, "daemon-reload"), (*ask, "enable", "--now", unit)],
        stops=[(*ask, "disable", "--now", unit)],
        forgets=[(*ask, "daemon-reload")],
        shows=(*ask, "status", "--no-pager", unit),
        hint=f"it starts when you log in; 'loginctl enable-linger' starts it with the machine\n"
        f"log: journalctl --user -u {name}",
    )


def launchd(name: str) -> Manager:
    """Return the service manager of the user on a Mac."""
    label = f"org.{name}"
    domain = f"gui/{os.getuid()}"
    file = Path.home() / "Library" / "LaunchAgents" / f"{label}.plist"
    return Manager(
        file,
        starts=[("launchctl", "bootstrap", domain, str(file))],
        stops=[("launchctl", "bootout", f"{domain}/{label}")],
        forgets=[],
        shows=("launchctl", "print", f"{domain}/{label}"),
        hint=f"it starts when you log in\nlog: {_log(name)}",
    )


def unit(service: Service) -> str:
    """Return the unit of systemd for a service of the user."""
    return f"""\
[Unit]
Description=mlx-tandem

[Service]
WorkingDirectory={service.folder.replace("%", "%%")}
ExecStart={" ".join(map(_quoted, service.command))}
KillMode=mixed
TimeoutStopSec={service.stop_seconds}
Restart=on-failure
RestartSec=5

[Install]
WantedBy=default.target
"""


def agent(service: Service) -> str:
    """Return the property list of launchd for a service of the user. The machine stays awake while it runs."""
    job = {
        "Label": f"org.{service.name}",
        "ProgramArguments": ["/usr/bin/caffeinate", "-i", *service.command],
        "WorkingDirectory": service.folder,
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ExitTimeOut": service.stop_seconds,
        "ProcessType": "Interactive",
        "StandardErrorPath": str(_log(service.name)),
    }
    return plistlib.dumps(job, sort_keys=False).decode()


def _log(name: str) -> Path:
    return Path.home() / "Library" / "Logs" / f"{name}.log"


def _quoted(word: str) -> str:
    """Return a word as a unit of systemd has it: in quotes, and without specifiers or variables."""
    for old, new in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        word = word.replace(old, new)
    return f'"{word}"'


def install(service: Service, *, dry_run: bool) -> None:
    """Write the file of a service and start it. With `dry_run` print the file and the commands, and do nothing."""
    for what in (*service.words, service.folder):
        if not what.isprintable():
            fail(f"{what!a} has a line break or another control character, which the file of a service cannot hold")
    keeper = manager(service.name)
    text = agent(service) if sys.platform == "darwin" else unit(service)
    if dry_run:
        print(f"# {keeper.file}\n{text}")
        for command in keeper.starts:
            print(shlex.join(command))
        return
    _check(keeper)
    if keeper.file.exists():
        fail(f"{keeper.file} exists already; 'tandem service uninstall' removes it, or choose another --name")
    try:
        with files.storage(keeper.file):
            keeper.file.parent.mkdir(parents=True, exist_ok=True)
            with keeper.file.open("x", encoding="utf-8") as file:
                file.write(text)
    except TandemError as e:
        fail(e.message)
    for command in keeper.starts:
        _run(command)
    print(f"{service.name} runs as a service ({keeper.file})\n{keeper.hint}")


def _installed(name: str) -> Manager:
    """Return the manager of a service. End the process with one line and status 1 if it was not installed."""
    keeper = manager(name)
    _check(keeper)
    if not keeper.file.exists():
        fail(f"there is no {keeper.file}, so no service of the name {name} was installed")
    return keeper


def uninstall(name: str) -> None:
    """Stop a service and remove its file."""
    keeper = _installed(name)
    for command in keeper.stops:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            say(f"{shlex.join(command)} failed: {done.stderr.strip()}")
    keeper.file.unlink()
    for command in keeper.forgets:
        _run(command)
    print(f"{name} is no service any more")


def show(name: str) -> int:
    """Print what the service manager says of a service; return its exit status."""
    keeper = _installed(name)
    return subprocess.run(keeper.shows, check=False).returncode


def _run(command: Sequence[str]) -> None:
    """Run a command of the service manager. End the process with one line and status 1 if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        fail(f"{shlex.join(command)} failed: {' '.join(done.stderr.split())}")
