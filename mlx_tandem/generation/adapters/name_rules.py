"""Rules for the names that adapters, aliases and checkpoints may have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mlx_tandem.adapters.aliases import Aliases
from mlx_tandem.adapters.registry import Registry
from mlx_tandem.config import Config
from mlx_tandem.errors import Conflict, TandemError
from mlx_tandem.limits import BASE_NAMES
from mlx_tandem.types import AdapterSource


def base_names(config: Config) -> frozenset[str]:
    """Return the names that the base model has under these settings."""
    path = config.engine.model.path
    return frozenset((*BASE_NAMES, Path(path).resolve().name, path, *config.server.served_model_names))


def check_settings(config: Config) -> None:
    """Raise InvalidRequest for an adapter or alias of the settings whose name is not allowed, before anything loads."""
    registry = Registry()
    rules = NameRules(base_names(config), registry, Aliases(), frozenset())
    try:
        for name, path in config.adapters:
            what = f"adapter {name}"
            rules.check_adapter(name)
            registry.announce(name, AdapterSource(path))
        for name, _ in config.aliases:
            what = f"alias {name}"
            rules.check_alias(name)
    except TandemError as e:
        e.message = f"{what}: {e.message}"
        raise


class NameRules:
    """The rules for new names on one server. Its checks raise InvalidRequest naming `name`."""

    def __init__(self, base_names: frozenset[str], registry: Registry, aliases: Aliases, trained: frozenset[str]):
        """Set up the rules. `trained` are the names of the adapters that the server trains."""
        self._base_names = base_names
        self._reserved = frozenset(name.casefold() for name in base_names)
        self._registry = registry
        self._aliases = aliases
        self._trained = trained
        self.is_up = False
        """Whether the settings' adapters are loaded. Until then, a folder may be loaded under a trained name."""
        self.is_checkpoint: Callable[[str], bool] = lambda name: False
        """A function that returns whether a name belongs to a checkpoint, so that nothing else may take it."""

    def is_base(self, name: str) -> bool:
        """Return whether `name` is exactly a name of the base model."""
        return name in self._base_names

    def is_reserved(self, name: str) -> bool:
        """Return whether `name` is a name of the base model. Upper and lower case are not told apart."""
        return name.casefold() in self._reserved

    def check_reserved(self, name: str) -> None:
        """Raise Conflict when `name` is a name of the base model. Upper and lower case are not told apart."""
        if name in self._base_names:
            raise Conflict(f"{name!r} is the name of the base model", param="name")
        if self.is_reserved(name):
            raise Conflict(f"{name!r} differs from a name of the base model in case only", param="name")

    def check_no_checkpoint(self, name: str) -> None:
        """Raise Conflict when `name` is the name of a checkpoint."""
        if self.is_checkpoint(name):
            raise Conflict(f"{name!r} is the name of a checkpoint of this server", param="name")

    def check_untrained(self, name: str) -> None:
        """Raise Conflict when `name` is the name of a trained adapter."""
        if name in self._trained and self.is_up:
            raise Conflict(f"{name!r} is trained by this server", param="name")

    def check_adapter(self, name: str) -> None:
        """Raise InvalidRequest unless an adapter may have the name `name`. An adapter that exists may keep its name."""
        self._check_others(name)
        self.check_no_checkpoint(name)

    def check_elsewhere(self, name: str) -> None:
        """Raise InvalidRequest unless an adapter of another machine, such as the trained one, may have this name."""
        self._registry.check(name)
        self.check_reserved(name)
        if name in self._aliases:
            raise Conflict(f"{name!r} is the name of an alias", param="name")

    def check_free(self, name: str) -> None:
        """Raise InvalidRequest unless `name` is legal and not in use, so that a new checkpoint may take it."""
        self._check_others(name)
        if name in self._registry:
            raise Conflict(f"{name!r} is the name of an adapter", param="name")

    def check_alias(self, name: str) -> None:
        """Raise Conflict when `name` is taken by the base model, an adapter or a checkpoint."""
        self.check_reserved(name)
        if name in self._registry:
            raise Conflict(f"{name!r} is the name of an adapter", param="name")
        self.check_no_checkpoint(name)

    def _check_others(self, name: str) -> None:
        """Raise if `name` is not a legal adapter name, or belongs to the base, an alias or the trained adapter."""
        self.check_elsewhere(name)
        self.check_untrained(name)
