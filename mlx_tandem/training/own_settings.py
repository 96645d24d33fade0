"""The settings of each adapter that a server trains: those of `rl_training`, with the adapter's own in their place.

The default adapter, `rl_training.adapter`, keeps its checkpoints in the folder of the settings, and each other one in a
folder of its own name beneath. All of them have their rows in the one database of that folder.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from mlx_tandem import files, limits
from mlx_tandem.config import Config, RLTrainingConfig
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.explain import explain
from mlx_tandem.training.store.database import NAME as DATABASE

PLACE = "rl_training.adapters"

OF_THE_SERVER = ("enabled", "adapter", "adapters", "atropos_url", "atropos_api", "environment")
"""Settings of `rl_training` that belong to the server. What comes from Atropos goes to the default adapter."""

FOLDERS = ("journal", "tensorboard", "wandb")
"""Names of folders beside the checkpoints that belong to no adapter."""


class Own(NamedTuple):
    """The settings of one trained adapter, as if the server trained no other."""

    config: Config
    database: Path  # the folder of the database
    prefix: str  # of the names under which its checkpoints are served

    @property
    def name(self) -> str:
        """The adapter's name."""
        return self.config.rl_training.adapter


def own_settings(config: Config) -> tuple[Own, ...]:
    """Return the settings of each trained adapter, the default one first. Raises InvalidRequest naming the setting."""
    training, folder = config.rl_training, Path(config.checkpointing.checkpoint_dir)
    _check_names(training)
    return tuple(
        _own(config, _merged(training, name), _folder(folder, name, default=name == training.adapter))
        for name in training.trained
    )


def _own(config: Config, training: RLTrainingConfig, folder: Path) -> Own:
    root, default = config.checkpointing.checkpoint_dir, training.adapter == config.rl_training.adapter
    if folder != Path(root):
        checkpointing = msgspec.structs.replace(config.checkpointing, checkpoint_dir=str(folder))
        config = msgspec.structs.replace(config, checkpointing=checkpointing)
    prefix = "" if default else f"{training.adapter}."
    return Own(msgspec.structs.replace(config, rl_training=training), Path(root), prefix)


def _check_names(training: RLTrainingConfig) -> None:
    names = training.trained
    for name in names:
        limits.check_name(name, f"the name '{name}' in '{PLACE}'" if training.adapters else "'rl_training.adapter'")
    if not training.adapters:
        return
    if training.adapter not in training.adapters:
        raise InvalidRequest(
            f"'{PLACE}' does not name '{training.adapter}', the default adapter: add it there, or set "
            f"'rl_training.adapter' to one of {', '.join(training.adapters)}"
        )
    if len({name.casefold() for name in names}) < len(names):
        raise InvalidRequest(f"names in '{PLACE}' must differ in more than case")
    for name in names:
        if name.casefold() in FOLDERS and name != training.adapter:
            raise InvalidRequest(
                f"'{name}' in '{PLACE}' is the name of a folder beside the checkpoints: choose another"
            )
        if f"{name}-reference" in names:  # the trainer that `kl_reference` needs would have this name
            raise InvalidRequest(f"'{name}-reference' in '{PLACE}' is reserved for '{name}': choose another name")


def _merged(training: RLTrainingConfig, name: str) -> RLTrainingConfig:
    """Return the common settings with those of one adapter in their place."""
    if not training.adapters:
        return training
    given, place = training.adapters[name], f"{PLACE}.{name}"
    for key in given:
        if key in OF_THE_SERVER:
            raise InvalidRequest(
                f"'{place}.{key}' belongs to the server, and not to one adapter: set 'rl_training.{key}'"
            )
    own: dict[str, Any] = {"adapter": name, "adapters": {}}
    if name != training.adapter:
        own |= {"atropos_url": "", "atropos_api": False}
    try:
        merged = msgspec.convert(msgspec.to_builtins(training) | given | own, RLTrainingConfig)
    except msgspec.ValidationError as e:
        raise explain(e, RLTrainingConfig, place) from None
    for key in given:
        bounds, value = limits.SETTINGS.get(f"rl_training.{key}"), getattr(merged, key)
        if (
            bounds is not None
            and isinstance(value, int | float)
            and not (bounds.low <= value <= bounds.high and math.isfinite(value))
        ):
            raise InvalidRequest(f"'{place}.{key}' is {value}: it must lie {bounds}")
    return merged


def _folder(root: Path, name: str, *, default: bool) -> Path:
    """Return the folder of an adapter's checkpoints. One that has learned stays where it is."""
    own, prefix = root / name, f".state-{name}-"
    is_other_s = (own / DATABASE).exists()  # a folder of another server that has this adapter's name by chance
    has_learned = (own / files.LOCK).is_file() and not is_other_s
    is_in_root = any(p.name.removeprefix(prefix).isdigit() for p in root.glob(f"{prefix}*"))
    if default:
        return own if has_learned and not is_in_root else root
    if is_in_root and not has_learned:
        raise InvalidRequest(
            f"'{name}' has learned in {root} as the default adapter: set 'rl_training.adapter' to it, or name another "
            "folder with 'checkpointing.checkpoint_dir'"
        )
    if is_other_s:
        raise InvalidRequest(
            f"{own}, the folder of '{name}', has a {DATABASE} of its own and belongs to another server: name another "
            "folder with 'checkpointing.checkpoint_dir'"
        )
    return own
