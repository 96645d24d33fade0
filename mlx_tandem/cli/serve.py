"""`tandem serve`: reads the settings, binds the port, shows progress while the model loads, and prints what to try."""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import shlex
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from mlx_tandem import demo, files
from mlx_tandem.adapters import CONFIG as ADAPTER_CONFIG
from mlx_tandem.cli import hub, keys
from mlx_tandem.cli.adapters import URL
from mlx_tandem.cli.callers import CALLERS
from mlx_tandem.cli.console import fail, say
from mlx_tandem.cli.daemon import Detached
from mlx_tandem.cli.options import FLAG, with_flag
from mlx_tandem.cli.settings import SettingsError, build
from mlx_tandem.cli.start_up import StageEvents, StartUp
from mlx_tandem.config import BatchesConfig, Config, ServerConfig
from mlx_tandem.errors import InvalidRequest, TandemError
from mlx_tandem.limits import BASE
from mlx_tandem.types import EngineInfo

if TYPE_CHECKING:
    from mlx_tandem.generation.front import Front


QUESTION = "What is 17 + 25?"
"""A question that the built-in model can answer."""

NAMES = 12
"""Most names of adapters in the line that says what is served."""


def prepare(
    file: Path | None,
    options: Mapping[str, object],
    called_as: str = "tandem",
    defaults: Mapping[str, object] | None = None,
) -> tuple[Config, socket.socket]:
    """Return the settings with the key read and every folder on this machine, and the socket that is bound to the
    port.

    The port is bound before hub ids are fetched. End the process with one line and status 1 if something cannot be
    used.
    """
    from mlx_tandem.generation.adapters.name_rules import check_settings
    from mlx_tandem.server.checks import check

    caller = CALLERS[called_as]
    try:
        config = build(file, caller.options(options), {**caller.defaults, **(defaults or {})})
        server = config.server
        check(server)
        if config.engine.model.path:
            check_settings(config)  # by the names that the base has before its folder is known
        key = keys.read(server.api_key, server.api_key_file)
    except SettingsError as e:
        fail(str(e))
    except TandemError as e:
        fail(with_flag(e.message, FLAG.get(e.param or "")))
    if config.rl_training.verifiers and server.keys_file and not key:
        key = secrets.token_hex(24)  # for the environment, which asks this server over HTTP
    if different := "; ".join(caller.said(config)):
        say(f"{called_as}'s defaults apply, except that {different}")
    if config.adapter_root and not Path(config.adapter_root).is_dir():
        fail(f"there is no folder {config.adapter_root} for --adapter-root")
    _check_files(config)
    sock = _bind(config.server)
    if config.cluster.connect_to:
        from mlx_tandem.cli.joining import join

        config = join(config, key)
        server = config.server
    try:
        engine, model = hub.find_models(config.engine)
        adapters = tuple((name, _adapter(name, path)) for name, path in config.adapters)
    except hub.HubError as e:
        sock.close()
        fail(str(e))
    names = (*server.served_model_names, *([model.id] if model.id else []))
    taken = {name for name, _ in (*config.adapters, *config.aliases)}
    if caller.also_called and caller.also_called not in taken:
        names = (*(names or (model.folder.resolve().name,)), caller.also_called)
    replace = msgspec.structs.replace
    config = replace(
        config,
        engine=engine,
        server=replace(server, served_model_names=names, api_key=key, api_key_file=""),
        adapters=adapters,
    )
    try:
        check_settings(config)
        _check_names(config)
    except TandemError as e:
        sock.close()
        fail(e.message)
    return with_own_adapters(config), sock


def with_own_adapters(config: Config) -> Config:
    """Return the settings with the user's own folder of adapters, if the built-in model has no other folder of them and
    that one can be used.
    """
    if config.adapter_root or config.cluster.connect_to or Path(config.engine.model.path) != demo.MODEL_PATH:
        return config
    root = files.own_adapters()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return config
    return msgspec.structs.replace(config, adapter_root=str(root))


def _adapter(name: str, path: str) -> str:
    """Return the folder of an adapter. Raise HubError if there is none, or one that is no adapter's."""
    folder = hub.find(path, f"'{name}' adapter").folder
    if not (folder / ADAPTER_CONFIG).is_file():
        raise hub.HubError(f"adapter {name}: the folder {path} has no {ADAPTER_CONFIG} (--adapter)")
    return str(folder)


def _check_names(config: Config) -> None:
    """Raise InvalidRequest for a name that no adapter will have. Adapters may be added later to
    an adapter root, as checkpoints or by other machines.
    """
    if config.adapter_root or config.rl_training.enabled or config.cluster.share or config.cluster.connect_to:
        return
    from mlx_tandem.generation.adapters.name_rules import base_names

    adapters = [name for name, _ in (*config.adapters, *config.aliases)]
    known = {*adapters, *base_names(config)}
    wanted = [(config.server.default_adapter, "--default-adapter")] if config.server.default_adapter else []
    wanted += [(arm.adapter, f"--alias {alias}") for alias, arms in config.aliases for arm in arms]
    for name, flag in wanted:
        if not {name, name.partition("@")[0]} & known:
            raise InvalidRequest(f"there is no adapter '{name}' ({flag}); there are {', '.join((*adapters, BASE))}")


def _check_files(config: Config) -> None:
    """Check the server's files and folders whose faults would otherwise show only once the model is loaded."""
    if config.rl_training.enabled:
        _check_learning(config)
    if config.tinker.enabled:
        with _about("--tinker-dir"):
            files.check_usable(Path(config.tinker.dir))
    if config.cluster.share or config.cluster.connect_to:
        with _about("--cluster-dir"):
            files.check_usable(Path(config.cluster.dir))
    if config.batches.dir != BatchesConfig().dir:  # the folder of the defaults is made when it is used
        with _about("--batch-dir"):
            files.check_usable(Path(config.batches.dir))
    if config.engine.disk.on and config.engine.disk.dir:
        from mlx_tandem.kv.disk.cache import open_folder

        with _about("--ssd-cache-dir"):
            open_folder(config.engine.disk).close()


def _check_learning(config: Config) -> None:
    """Check the files and folders of each adapter that is trained."""
    from mlx_tandem.training.own_settings import own_settings

    root = Path(config.checkpointing.checkpoint_dir)
    for own in (each.config for each in own_settings(config)):
        prompts, folder = own.rl_training.validation_prompts, Path(own.checkpointing.checkpoint_dir)
        if prompts and not Path(prompts).is_file():
            fail(f"there is no file {prompts} for --validation-prompts")
        for each in dict.fromkeys((root, folder)):
            if each.exists() and not each.is_dir():
                fail(f"{each} is not a folder; name another one with --checkpoint-dir")
            with _about("--checkpoint-dir"):
                files.check_usable(each)
        if own.rl_training.metrics_file:
            with _about("--metrics-file"):
                files.check_writable(Path(own.rl_training.metrics_file))


@contextlib.contextmanager
def _about(flag: str) -> Iterator[None]:
    """End the process with one line that names the option, and status 1, after a TandemError inside the block."""
    try:
        yield
    except TandemError as e:
        fail(f"{e.message} ({flag})")


def serve(
    file: Path | None,
    options: Mapping[str, object],
    defaults: Mapping[str, object] | None = None,
    *,
    called_as: str = "tandem",
    verbose: bool = False,
) -> NoReturn:
    """Serve until a signal, then end the process; end it as `prepare` does if the port, model or an adapter is
    unusable.
    """
    by_flag = any(options.get(name) is not None for name in ("api_key", "api_key_file"))
    variable = None if by_flag else keys.variable()
    detached = Detached.from_environment(variable)
    if detached is not None and detached.port is not None:
        options = {**options, "port": detached.port}
    config, sock = prepare(file, options, called_as, defaults)
    hub.close()
    keys.forget_environment()
    from mlx_tandem.log import log
    from mlx_tandem.server.serve import run

    starting = StartUp(verbose)
    as_json = config.server.log_format == "json"  # from the first line on, for programs that read standard error

    def ready(front: Front, port: int) -> None:
        log("settings", logging.DEBUG, **_without_key(config))
        text = _ready(front, port, variable)
        if awaited := CALLERS[called_as].ready:
            text += f"{awaited} {_address(front.config.server, port)[1]}\n"
        if detached is None:
            print(text, flush=True)
        else:
            detached.ready(port, text)

    try:
        level = logging.DEBUG if verbose else logging.INFO
        status = run(
            config,
            sock=sock,
            on_progress=StageEvents().update if as_json else starting.update,
            on_ready=ready,
            log_level=level,
            start_up=None if as_json else starting,
        )
    except TandemError as e:
        starting.close()
        fail(with_flag(e.message, FLAG.get(e.param or "")))
    finally:
        starting.close()
    if detached is not None and status == 0:
        detached.end()
    raise SystemExit(status)


def _without_key(config: Config) -> dict[str, object]:
    shown: dict[str, object] = msgspec.to_builtins(config)
    return shown | {"server": msgspec.to_builtins(config.server) | {"api_key": "…" if config.server.api_key else ""}}


def _bind(server: ServerConfig) -> socket.socket:
    host, port = server.host, server.port
    from mlx_tandem.server.sockets import bind

    try:
        return bind(host, port, server.uds)
    except OSError as e:
        if server.uds:
            fail(f"the unix socket {server.uds} cannot be bound: {e.strerror or e}")
        if e.errno == errno.EADDRINUSE:
            fail(f"port {port} on {host} is in use; choose another with --port (0: any free one)")
        fail(f"{host}:{port} cannot be bound: {e.strerror or e}")


def _ready(front: Front, port: int, variable: str | None) -> str:
    """Return the text that says what is served and where, with one command that shows it.

    `variable` is the environment variable that the key came from, if it came from one.
    """
    server = front.config.server
    where, url, curl = _address(server, port)
    info = front.client.check_ready()
    loaded = [entry.name for entry in front.models.registry.entries()]
    unread = sorted(name for name, _ in front.models.registry.unread())
    root = front.config.adapter_root
    if root == str(files.own_adapters()) and not unread:
        root = ""  # which nobody asked for, and which has nothing
    model = next(iter((*loaded, *unread)), front.models.id)
    bearer = f"${variable}" if variable and not variable.endswith("_FILE") else "KEY"
    key = f' -H "Authorization: Bearer {bearer}"' if server.api_key or server.keys_file else ""
    return (
        f"\nReady: {where}\n"
        f"  model     {front.models.id} ({info.model_type}, {_count(info.parameters)} parameters, {info.dtype}"
        f"{', ' + info.quantization if info.quantization else ''}; {info.device})\n"
        f"{_images(info)}"
        f"  adapters  {adapters_line(loaded, unread, root)}\n"
        f"{_learning(front.config)}"
        f"{_tinker(front.config)}"
        f"{_machines(front.config, url)}"
        f"  try       {curl} {url}/v1/chat/completions \\\n"
        f"              -H 'Content-Type: application/json'{key} \\\n"
        f'              -d \'{{"model": "{model}", "messages": [\n'
        f'                  {{"role": "user", "content": "{QUESTION if _is_demo(front) else "Hello!"}"}}]}}\'\n'
        f"{_next(server, url)}"
    )


def _next(server: ServerConfig, url: str) -> str:
    """Return the lines with commands that talk to this server; empty for a unix socket, which they cannot reach."""
    at = "" if url == URL else f" --url {url}"
    return "" if server.uds else f"  or        tandem chat{at}\n            tandem top{at}\n"


def adapters_line(loaded: Sequence[str], unread: Sequence[str], root: str) -> str:
    """Return the names of loaded adapters, and how many folders under `root` have not been read yet."""
    parts = []
    if loaded or not root:
        more = f" and {len(loaded) - NAMES} more" if len(loaded) > NAMES else ""
        parts.append((", ".join(loaded[:NAMES]) or "none") + more)
    if root:
        folders = "1 folder" if len(unread) == 1 else f"{len(unread)} folders"
        parts.append(f"{folders} in {root}" + (f", such as {unread[0]}" if unread else ""))
    return "; ".join(parts)


def _images(info: EngineInfo) -> str:
    """Return the line that says whether the model takes images; empty for a model of text only."""
    return "" if info.vision is None else f"  images    {info.vision.outcome}\n"


def _learning(config: Config) -> str:
    """Return the line that says what is trained; empty if nothing is."""
    duty = config.engine.duty
    if not config.rl_training.enabled:
        return ""
    from mlx_tandem.training.own_settings import own_settings

    own = [each.config.rl_training for each in own_settings(config)]
    trained = [f"{each.adapter} (rank {each.lora_rank}, {each.algorithm})" for each in own]
    share = {
        "inference_only": "collected, but not trained (inference_only)",
        "training_only": "training comes first (training_only)",
        "inference_and_training": f"{100 * duty.training / (duty.inference + duty.training):.0f} % of the device",
    }
    return (
        f"  learning  {', '.join(trained)}; {share[duty.mode]}; checkpoints in {config.checkpointing.checkpoint_dir}\n"
    )


def _tinker(config: Config) -> str:
    """Return the line that says what clients of Tinker's API may train; empty without it."""
    tinker = config.tinker
    if not tinker.enabled:
        return ""
    return f"  tinker    {tinker.trainers} models of rank {tinker.rank} at most; checkpoints in {tinker.dir}\n"


def _machines(config: Config, url: str) -> str:
    """Return the line that says what this server has to do with other machines; empty if nothing."""
    if config.cluster.share:
        return f"  machines  leads; others join it with --connect-to {url.partition('//')[2]}\n"
    return f"  machines  connected to {config.cluster.connect_to}\n" if config.cluster.connect_to else ""


def _is_demo(front: Front) -> bool:
    return Path(__file__).parents[1] / "demo" in Path(front.config.engine.model.path).resolve().parents


def _address(server: ServerConfig, port: int) -> tuple[str, str, str]:
    """Return where the server is, its URL, and the command that can use this URL."""
    scheme = "https" if server.ssl_certfile else "http"
    if server.uds:
        return f"unix socket {server.uds}", f"{scheme}://localhost", f"curl --unix-socket {shlex.quote(server.uds)}"
    url = f"{scheme}://{_reachable(server.host)}:{port}"
    return url, url, "curl"


def _reachable(host: str) -> str:
    """Return an address that a client on this machine can use."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _count(parameters: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M")):
        if parameters >= size:
            return f"{parameters / size:.1f}{unit}"
    return f"{parameters / 1e3:.0f}K"
