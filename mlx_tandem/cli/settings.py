"""One `Config` out of defaults, a YAML file and command-line options, in that order of weight.

The file has the nested layout of config.py. An unknown key is an error that offers the nearest known one; a value out
of its range (limits.py) is an error that names its place.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from mlx_tandem import limits
from mlx_tandem.config import Config

OPTIONS: dict[str, str] = {
    "model": "engine.model.path",
    "dtype": "engine.model.dtype",
    "max_model_len": "engine.model.max_model_len",
    "random_weights": "engine.model.random_weights",
    "block_size": "engine.cache.block_size",
    "num_blocks": "engine.cache.num_blocks",
    "memory_fraction": "engine.cache.memory_fraction",
    "max_num_seqs": "engine.scheduler.max_num_seqs",
    "max_chunk_tokens": "engine.scheduler.max_chunk_tokens",
    "prefill_share": "engine.scheduler.prefill_share",
    "idle_prefill_ms": "engine.scheduler.idle_prefill_ms",
    "max_loras": "engine.lora.max_loras",
    "max_lora_rank": "engine.lora.max_lora_rank",
    "lora_backend": "engine.lora.backend",
    "heartbeat_seconds": "engine.heartbeat_seconds",
    "stall_seconds": "engine.stall_seconds",
    "host": "server.host",
    "port": "server.port",
    "served_model_name": "server.served_model_names",
    "default_max_tokens": "server.default_max_tokens",
    "max_request_bytes": "server.max_request_bytes",
    "max_queue_size": "server.max_queue_size",
    "drain_seconds": "server.drain_seconds",
    "adapter": "adapters",
}
"""Parameter of `tandem serve` → place in `Config`. The command line and the file say the same things."""


class SettingsError(Exception):
    """A setting that cannot be used; the message names its place."""


def build(file: Path | None, options: Mapping[str, object]) -> Config:
    """The settings of one server. `options` are parameters by name; None and empty ones were not given."""
    tree = _read(file) if file else {}
    for name, value in options.items():
        if value is not None and value != [] and value != ():
            _put(tree, OPTIONS[name], value)
    if "path" not in tree.get("engine", {}).get("model", {}):
        _use_demo_model(tree)
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as e:
        raise SettingsError(str(e).replace("`$.", "`").replace("`$`", "the settings")) from None
    _check_ranges(config)
    return config


def _use_demo_model(tree: dict[str, Any]) -> None:
    """Without a model the built-in one is served, with its adapters unless others were named."""
    from mlx_tandem import demo

    _put(tree, "engine.model.path", str(demo.MODEL_PATH))
    tree.setdefault("adapters", [(name, str(path)) for name, path in demo.ADAPTER_PATHS.items()])


def _read(file: Path) -> dict[str, Any]:
    import yaml

    try:
        if file.stat().st_size > limits.MAX_CONFIG_BYTES:
            raise SettingsError(f"{file} is larger than {limits.MAX_CONFIG_BYTES} bytes")
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise SettingsError(f"{file} cannot be read: {e.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise SettingsError(f"{file} is not YAML: {' '.join(str(e).split())}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise SettingsError(f"{file} must hold settings by name, such as 'server: {{port: 8000}}'")
    _check_keys(tree, Config, "", file)
    if isinstance(adapters := tree.get("adapters"), dict):
        tree["adapters"] = list(adapters.items())
    return tree


def _check_keys(tree: dict[Any, Any], struct: type, place: str, file: Path) -> None:
    hints = get_type_hints(struct)
    for key, value in tree.items():
        where = f"{place}{key}"
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1) or _elsewhere(str(key))
            hint = f"; did you mean '{near[0]}'?" if near else f"; known are: {', '.join(hints)}"
            raise SettingsError(f"{file}: unknown setting '{where}'{hint}")
        inner = hints[key]
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            if not isinstance(value, dict):
                raise SettingsError(f"{file}: '{where}' must hold settings by name")
            _check_keys(value, inner, f"{where}.", file)


def _elsewhere(key: str) -> list[str]:
    """A known place for a key that was put in a wrong section or named like its option."""
    known = {place.rsplit(".", 1)[-1]: place for place in OPTIONS.values()} | dict(OPTIONS)
    return [known[match] for match in difflib.get_close_matches(key, known, n=1)]


def _put(tree: dict[str, Any], place: str, value: object) -> None:
    *sections, key = place.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[key] = value


def _check_ranges(config: Config) -> None:
    for place, r in limits.SETTINGS.items():
        value: Any = config
        for part in place.split("."):
            value = getattr(value, part)
        if not (r.low <= value <= r.high) or not math.isfinite(value):
            raise SettingsError(f"'{place}' is {value}: it must lie between {r.low:.10g} and {r.high:.10g}")
    for name, _ in config.adapters:
        limits.check_name(name, "adapter name")
    names = [name for name, _ in config.adapters]
    if twice := {name for name in names if names.count(name) > 1}:
        raise SettingsError(f"adapter '{min(twice)}' is named twice")
