"""`tandem serve`: settings, a port that is free, progress while the model loads, and what to try once it answers."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_tandem.cli.console import fail
from mlx_tandem.cli.settings import SettingsError, build
from mlx_tandem.config import Config
from mlx_tandem.errors import TandemError

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from mlx_tandem.engine.messages import Progress
    from mlx_tandem.server.front import Front


QUESTION = "What is 17 + 25?"  # a skill of the built-in model


def serve(file: Path | None, options: Mapping[str, object]) -> None:
    """Serve until a signal. Ends the process with status 1 and one line when the settings, the port, the model or an
    adapter cannot be used."""
    try:
        config = build(file, options)
    except (SettingsError, TandemError) as e:
        fail(str(e))
    if not Path(config.engine.model.path).is_dir():
        fail(f"there is no model folder {config.engine.model.path}")
    for name, path in config.adapters:
        if not Path(path).is_dir():
            fail(f"there is no folder {path} for the adapter '{name}'")
    sock = _bind(config)
    # Nothing is fetched while serving: a folder that names a hub id must not open a connection.
    os.environ["HF_HUB_OFFLINE"] = "1"
    from mlx_tandem.server.serve import run

    loading = Loading()

    def ready(front: Front, port: int) -> None:
        loading.stop()
        _ready(front, port)

    try:
        status = run(config, sock=sock, on_progress=loading.update, on_ready=ready)
    except TandemError as e:
        fail(e.message)
    finally:
        loading.stop()
    raise SystemExit(status)


def _bind(config: Config) -> socket.socket:
    host, port = config.server.host, config.server.port
    from mlx_tandem.server.serve import bind

    try:
        sock = bind(host, port)
    except OSError as e:
        if e.errno and e.strerror and "in use" in e.strerror:
            fail(f"port {port} on {host} is in use; choose another with --port (0: any free one)")
        fail(f"{host}:{port} cannot be bound: {e.strerror or e}")
    if not _is_loopback(host):
        print(
            f"tandem: warning: {host} can be reached from other machines, and this version has no API key: "
            "everybody who reaches the port can use it and load adapters from this machine's folders",
            file=sys.stderr,
        )
    return sock


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Loading:
    """A progress bar on a terminal, a line per stage elsewhere; gone once the server is ready."""

    def __init__(self) -> None:
        self._stage = ""
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def update(self, progress: Progress) -> None:
        if sys.stderr.isatty():
            self._draw(progress)
        elif progress.stage != self._stage:
            print(f"tandem: {progress.stage} …", file=sys.stderr, flush=True)
        self._stage = progress.stage

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _draw(self, progress: Progress) -> None:
        if self._bar is None or self._task is None:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(progress.stage, total=1.0)
            self._bar.start()
        if progress.stage != self._stage:
            self._bar.reset(self._task, description=progress.stage)
        self._bar.update(self._task, completed=progress.fraction)


def _ready(front: Front, port: int) -> None:
    """Say what is served, where, and one command that shows it."""
    host = front.config.server.host
    url = f"http://{_reachable(host)}:{port}"
    info = front.client.check_ready()
    names = [entry.name for entry in front.registry.entries()]
    model = names[0] if names else front.model_id
    print(
        f"\nReady: {url}\n"
        f"  model     {front.model_id} ({info.model_type}, {_count(info.parameters)} parameters, {info.dtype}"
        f"{', ' + info.quantization if info.quantization else ''}; {info.device})\n"
        f"  adapters  {', '.join(names) or 'none'}\n"
        f"  try       curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f'              -d \'{{"model": "{model}", "messages": [{{"role": "user", '
        f'"content": "{QUESTION if _is_demo(front) else "Hello!"}"}}]}}\'\n',
        flush=True,
    )


def _is_demo(front: Front) -> bool:
    return Path(__file__).parents[1] / "demo" in Path(front.config.engine.model.path).resolve().parents


def _reachable(host: str) -> str:
    """An address that a client on this machine can use."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _count(parameters: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M")):
        if parameters >= size:
            return f"{parameters / size:.1f}{unit}"
    return f"{parameters / 1e3:.0f}K"
