"""Ranks on several machines: `mlx.launch` runs the same command on each. On all but the first it becomes a led rank."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_tandem.cli import hub
from mlx_tandem.cli.callers import CALLERS
from mlx_tandem.cli.console import fail, say
from mlx_tandem.cli.keys import variable
from mlx_tandem.cli.parallel import machines
from mlx_tandem.cli.settings import KEYS_VARIABLE, SettingsError, build
from mlx_tandem.config import Config
from mlx_tandem.engine.ranks.launched import launched_rank
from mlx_tandem.engine.ranks.leader import EXIT_GROUP
from mlx_tandem.engine.ranks.local import PROGRAM

PAUSE_SECONDS = 0.5
"""Seconds between the end of a led rank and the start of the next one, which joins the first rank's next group."""


def go(
    file: Path | None,
    options: Mapping[str, object],
    called_as: str,
    defaults: Mapping[str, object] | None,
    words: Sequence[str],
) -> None:
    """Return on the first rank, and where the settings name no other machines. On other ranks run a led rank. Where
    nothing was launched yet, replace this process by `mlx.launch`. The process ends in both cases.

    words: the command line after the program's name, which every machine runs.
    """
    rank = launched_rank()
    if rank is not None:
        _end_with_launcher()
    if rank == 0:
        return
    caller = CALLERS[called_as]
    try:
        config = build(file, caller.options(options), {**caller.defaults, **(defaults or {})})
        if config.engine.parallel.ranks == 1:
            return
        if rank is None:
            if not config.engine.parallel.hostfile:
                return
            _check_keys(options)
            command = launch_command(config, words)
            say(shlex.join(command))
            os.execv(command[0], command)
        engine, model = hub.find_models(config.engine)
    except (SettingsError, hub.HubError) as e:
        fail(str(e))
    hub.close()
    raise SystemExit(_follow(engine.parallel.mode, rank, str(model.folder)))


def _check_keys(options: Mapping[str, object]) -> None:
    """End the process with one line where the server on the first machine would not have its keys, or all machines
    would show them.
    """
    key, file, keys = (options.get(name) for name in ("api_key", "api_key_file", "keys"))
    is_lost = (key is None and file is None and variable()) or (keys is None and os.environ.get(KEYS_VARIABLE))
    if key or is_lost:
        fail(
            "a key on the command line is seen on every machine, and variables such as TANDEM_API_KEY do not reach "
            "them: use --api-key-file or --keys, with a file on the first machine"
        )


def ports_from(config: Config) -> int:
    """Return the first of the ports by which MLX connects the ranks: they follow the server's port."""
    return (config.server.port or Config(config.engine).server.port) + 1


def launch_command(config: Config, words: Sequence[str]) -> list[str]:
    """Return the command that runs `tandem` with `words` on all machines of the file of hosts."""
    parallel = config.engine.parallel
    program = shutil.which("mlx.launch", path=str(Path(sys.executable).parent)) or shutil.which("mlx.launch")
    found = [program or "mlx.launch", "--hostfile", parallel.hostfile, "--backend", parallel.mode]
    port = "--nccl-port" if parallel.mode == "nccl" else "--starting-port"
    return [*found, port, str(ports_from(config)), "--", sys.executable, "-P", "-m", "mlx_tandem", *words]


def variables(config: Config) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield for each rank the machine and the variables that `mlx.launch` sets for MLX there. A variable that names a
    file is shown with what the file holds.
    """
    mode, port = config.engine.parallel.mode, ports_from(config)
    rows = machines(config.engine.parallel.hostfile)
    addresses = [[str(ip) for ip in row.get("ips", [])] for row in rows]
    ports = iter(range(port, port + sum(map(len, addresses))))
    ring = [[f"{ip}:{next(ports)}" for ip in own] for own in addresses]
    for rank, row in enumerate(rows):
        own: dict[str, Any] = {"MLX_RANK": rank}
        if mode == "ring":
            own["MLX_HOSTFILE"] = ring
        elif mode == "jaccl":
            own["MLX_IBV_DEVICES"] = [each.get("rdma", []) for each in rows]
            own["MLX_JACCL_COORDINATOR"] = f"{addresses[0][0]}:{port}"
        elif mode == "nccl":
            own |= {"MLX_WORLD_SIZE": len(rows), "NCCL_HOST_IP": addresses[0][0], "NCCL_PORT": port}
        yield str(row["ssh"]), {k: v if isinstance(v, str) else json.dumps(v) for k, v in own.items()}


def plan_lines(config: Config, words: Sequence[str]) -> Iterator[str]:
    """Yield what `--dry-run` prints of ranks on several machines: the command, and what each rank gets."""
    yield ""
    yield f"launch    {shlex.join(launch_command(config, words))}"
    for rank, (host, own) in enumerate(variables(config)):
        yield f"rank {rank}    {host}"
        yield from (f"          {name}={value}" for name, value in own.items())


def _end_with_launcher() -> None:
    """End this process as by SIGTERM when `mlx.launch` has ended, which holds the other end of standard input."""
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        return

    def wait() -> None:
        while os.read(0, 1 << 12):
            pass
        nowhere = os.open(os.devnull, os.O_RDWR)  # nobody reads what this process prints any more
        for fd in range(3):
            os.dup2(nowhere, fd)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="launcher", daemon=True).start()


def _follow(mode: str, rank: int, model: str) -> int:
    """Run a led rank, and again with each group that the first rank begins; return the exit status."""
    words = [sys.executable, "-P", "-m", PROGRAM, "--mode", mode, "--rank", str(rank), "--model", model]
    children: list[subprocess.Popen[bytes]] = []
    ends = threading.Event()

    def end(*_: object) -> None:
        ends.set()
        for child in children:
            child.kill()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    while not ends.is_set():
        children[:] = [subprocess.Popen(words, stdin=subprocess.PIPE)]  # it ends when this process does
        status = children[0].wait()
        if status >= 0 and status != EXIT_GROUP:  # it has found no first rank, or was refused
            return status
        ends.wait(PAUSE_SECONDS)
    return 0
