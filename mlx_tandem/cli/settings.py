"""Builds one `Config` from defaults, a YAML file, the environment's API key and options, the later ones taking
precedence.

The file has the layout of config.py with the sections of the engine at the top. An unknown key is an error that
offers the most similar known one; a value outside its range (limits.py) is an error that names its place.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from mlx_tandem import limits
from mlx_tandem.adapters.aliases import Aliases
from mlx_tandem.cli import keys, learning, parallel
from mlx_tandem.cli.flags import MODES
from mlx_tandem.cli.options import FLAG, OPTIONS, with_flag
from mlx_tandem.config import Config, EngineConfig
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.explain import explain
from mlx_tandem.printable import printable
from mlx_tandem.training.ab.comparing import check as check_test

SECTIONS = ("model", "cache", "disk", "scheduler", "speculation", "lora", "duty", "parallel")
"""Parts of the engine's settings that are sections of their own in the file."""

TRAINED = "rl_training.adapters"
"""Place of the adapters that are trained, each with settings of `rl_training` in place of the common ones."""

_SCIENTIFIC = re.compile(r"[-+]?\d+[eE][-+]?\d+")
"""Pattern of a number such as 1e-3, which YAML 1.1 takes for a text because it has no point."""

_REWARDS = re.compile(rf"rl_training\.rewards\.|{re.escape(TRAINED)}\.[^.]+(\.[^.]+)?\.rewards\.")
"""Pattern of places of settings of rewards. An adapter's name may have points."""

_NUMBERED = re.compile(r"(adapters|aliases|ab_tests)\[(\d+)\]\[1\]")
"""Pattern of the place of what the file has under a name."""

OTHER_NAMES = {
    "model.base_model_path": "model.path",
    "model.lora_rank": "rl_training.lora_rank",
    "model.lora_alpha": "rl_training.lora_alpha",
    "model.lora_target_modules": "rl_training.lora_target_modules",
    "server.max_batch_size": "scheduler.max_num_seqs",
    "server.mode": "duty.mode",
}
"""Other names of settings that a file may use."""


KEYS_VARIABLE = "TANDEM_KEYS_FILE"
"""Environment variable that names the file of named keys."""


class SettingsError(Exception):
    """A setting that cannot be used; the message names its place."""


def build(file: Path | None, options: Mapping[str, object], defaults: Mapping[str, object] | None = None) -> Config:
    """Return the settings of one server. Raise SettingsError for one that cannot be used; warn about those without
    effect.

    Args:
        file: A YAML file, or None.
        options: Values by the name of the parameter; None and empty lists were not given.
        defaults: Values by path in config.py for settings that are set nowhere else.
    """
    tree = _read(file) if file else {}
    for name, value in options.items():
        if value is not None and value != [] and value != ():
            _put(tree, OPTIONS[name], value)
    if isinstance(share := options.get("training_share"), float):
        if not 0 <= share <= 1:
            raise SettingsError(f"--training-share is {share:g}: it must lie between 0 and 1")
        _put(tree, "engine.duty.inference", 1.0 - share)
    if said := keys.source(_text(options, "api_key"), _text(options, "api_key_file")):
        tree.setdefault("server", {}).update(zip(("api_key", "api_key_file"), said, strict=True))
    if options.get("keys") is None and (named := os.environ.get(KEYS_VARIABLE)):
        _put(tree, "server.keys_file", named)
    if options.get("host") is None and (host := os.environ.get("TANDEM_HOST")):
        _put(tree, "server.host", host)
    for place, value in (defaults or {}).items():
        _put(tree, place, value, over=False)
    engine = tree.setdefault("engine", {})
    if engine.get("scheduler", {}).get("max_num_seqs") == 0:  # some servers write 0 for "no batching"
        engine["scheduler"]["max_num_seqs"] = 1
    if "path" not in engine.get("model", {}):
        if tree.get("cluster", {}).get("connect_to"):
            _put(tree, "engine.model.path", "")  # that of the leader, once it is known
        else:
            _use_demo_model(tree)
    if "aliases" in tree:
        tree["aliases"] = [
            (name, [{"adapter": adapter, "weight": weight} for adapter, weight in arms.items()])
            for name, arms in tree["aliases"]
        ]
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as e:
        wrong = _NUMBERED.sub(lambda m: f"{m[1]}.{tree[m[1]][int(m[2])][0]}", _shown(explain(e, Config).message))
        raise SettingsError(f"{file}: {wrong}" if file else wrong) from None
    _check(config, options)
    try:
        return parallel.resolve(learning.resolve(config, options), options)
    except InvalidRequest as e:
        raise SettingsError(_with_flags(e.message, options)) from None


def _with_flags(message: str, options: Mapping[str, object]) -> str:
    """Return the message of an error, and append each given option whose setting the message names."""
    given = [name for name, value in options.items() if value not in (None, [], ())]
    named = set(re.findall(r"--[\w-]+", message))
    flags = [FLAG[name] for name in given if f"'{_shown(OPTIONS[name])}'" in message and FLAG[name] not in named]
    return f"{message} ({', '.join(flags)})" if flags else message


def _shown(text: str) -> str:
    """Return an error's text with places named as in the file."""
    for section in SECTIONS:
        text = text.replace(f"engine.{section}", section)
    return text


def _text(options: Mapping[str, object], name: str) -> str | None:
    value = options.get(name)
    return value if isinstance(value, str) else None


def _use_demo_model(tree: dict[str, Any]) -> None:
    """Serve the built-in model, with its adapters unless others were named."""
    from mlx_tandem import demo

    _put(tree, "engine.model.path", str(demo.MODEL_PATH))
    tree.setdefault("adapters", [(name, str(path)) for name, path in demo.ADAPTER_PATHS.items()])


# -- The file -------------------------------------------------------------------------------------------------------


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
    except RecursionError:
        raise SettingsError(f"{file} is nested too deeply") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise SettingsError(f"{file} must hold settings by name, such as 'server: {{port: 8000}}'")
    try:
        _rename(tree)
        _check_keys(tree, _layout(), "")
        return _nested(tree)
    except SettingsError as e:
        raise SettingsError(f"{file}: {e}") from None


def _layout() -> dict[str, Any]:
    """Return the type of each key at the top of a file."""
    hints, engine = get_type_hints(Config), get_type_hints(EngineConfig)
    rest = {name: kind for name, kind in engine.items() if name not in SECTIONS}
    return {name: engine[name] for name in SECTIONS} | {"engine": rest} | {n: hints[n] for n in hints if n != "engine"}


def _rename(tree: dict[Any, Any]) -> None:
    """Replace other servers' names of settings by ours."""
    for old, new in OTHER_NAMES.items():
        (old_section, old_key), (section, key) = old.split("."), new.split(".")
        source = tree.get(old_section)
        if isinstance(source, dict) and old_key in source:
            target = tree.setdefault(section, {})
            if isinstance(target, dict):
                if key in target:
                    raise SettingsError(f"'{old}' and '{new}' are the same setting")
                target[key] = source.pop(old_key)
    duty = tree.get("duty")
    if isinstance(duty, dict) and isinstance(mode := duty.get("mode"), str):
        duty["mode"] = MODES.get(mode, mode)


def _check_keys(tree: dict[Any, Any], known: Mapping[str, Any], place: str) -> None:
    for key, value in tree.items():
        where = f"{place}{key}"
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1) or _elsewhere(str(key))
            hint = f"; did you mean '{near[0]}'?" if near else f"; known are: {', '.join(known)}"
            raise SettingsError(f"unknown setting '{where}'{hint}")
        inner = known[key]
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            inner = get_type_hints(inner)
        if where == TRAINED and isinstance(value, dict):
            inner = dict.fromkeys(value, known)  # each adapter has the settings of the section
        if isinstance(inner, dict):
            if not isinstance(value, dict):
                raise SettingsError(f"'{where}' must hold settings by name")
            _check_keys(value, inner, f"{where}.")
        elif isinstance(value, str) and float in (inner, *get_args(inner)) and _SCIENTIFIC.fullmatch(value):
            tree[key] = float(value)


def _elsewhere(key: str) -> list[str]:
    """Return a known place for a key that was put into a wrong section or named like its option."""
    if key in SECTIONS:
        return [key]
    known = {place.rsplit(".", 1)[-1]: _shown(place) for place in OPTIONS.values()}
    known |= {name: _shown(place) for name, place in OPTIONS.items()}
    return [known[match] for match in difflib.get_close_matches(key, known, n=1)]


def _nested(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the file's settings in the layout of config.py."""
    for section in SECTIONS:
        if section in tree:
            tree.setdefault("engine", {})[section] = tree.pop(section)
    for name in ("adapters", "aliases", "ab_tests"):
        if name in tree and not isinstance(tree[name], dict):
            raise SettingsError(f"'{name}' must hold one entry for each name")
        if name in tree:
            tree[name] = list(tree[name].items())
    for name, arms in tree.get("aliases", ()):
        if not isinstance(arms, dict):
            raise SettingsError(f"'aliases.{name}' must hold the weight of each adapter, such as {{a: 9, b: 1}}")
    return tree


def _put(tree: dict[str, Any], place: str, value: object, *, over: bool = True) -> None:
    """Set the value at `place`; with `over` false, only if nothing is there."""
    *sections, key = place.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[key] = value if over else tree.get(key, value)


# -- Values -----------------------------------------------------------------------------------------------------------


def _check(config: Config, options: Mapping[str, object]) -> None:
    given = {OPTIONS[name]: FLAG[name] for name, value in options.items() if value is not None}
    for place, r in limits.SETTINGS.items():
        value: Any = config
        for part in place.split("."):
            value = getattr(value, part)
        if value is None or isinstance(value, str):  # a word in place of a number
            continue
        if not (r.low <= value <= r.high) or not math.isfinite(value):
            raise SettingsError(with_flag(f"'{_shown(place)}' is {value}: it must lie {r}", given.get(place)))
    names = [name for name, _ in (*config.adapters, *config.aliases)]
    for name in names:
        limits.check_name(name, f"adapter name '{name}'")
    if twice := {name for name in names if names.count(name) > 1}:
        raise SettingsError(f"adapter '{min(twice)}' is named twice")
    aliases = Aliases()
    for name, arms in config.aliases:
        try:
            aliases.put(name, arms)
        except InvalidRequest as e:
            raise SettingsError(f"alias '{name}': {e.message}") from None
    _check_tests(config)
    for place, text in _texts(msgspec.to_builtins(config) | {"adapters": dict(config.adapters)}):
        # Patterns and schemas of rewards may have lines.
        if printable(text, len(text)) != text and not _REWARDS.match(place):
            raise SettingsError(f"'{_shown(place)}' must be UTF-8 text without control characters")


def _check_tests(config: Config) -> None:
    aliases, names = dict(config.aliases), [name for name, _ in config.ab_tests]
    for name, test in config.ab_tests:
        if name not in aliases or names.count(name) > 1:
            reason = "there is no alias of this name" if name not in aliases else "it is named twice"
            raise SettingsError(f"A/B test '{name}': {reason}")
        try:
            check_test(test, aliases[name])
        except InvalidRequest as e:
            raise SettingsError(f"A/B test '{name}': {e.message}") from None


def _texts(value: object, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text in the settings with its place."""
    match value:
        case str():
            yield place, value
        case dict():
            for key, inner in value.items():
                yield from _texts(inner, f"{place}.{key}" if place else key)
        case list() | tuple():
            for inner in value:
                yield from _texts(inner, place)
