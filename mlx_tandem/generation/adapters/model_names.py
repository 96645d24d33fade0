"""The names that a request's `model` can have: those of the base, of adapters, of their versions, and of aliases.

The server reads the adapters of its settings at start. An adapter under the adapter root has its folder's name and is
read on first use. A path from a request is accepted only if it lies under that root.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Literal

from mlx_tandem import limits
from mlx_tandem.adapters.aliases import AliasArm, Aliases
from mlx_tandem.adapters.registry import Counters, Entry, Registry
from mlx_tandem.config import Arm, Config
from mlx_tandem.engine.client import EngineClient, State
from mlx_tandem.errors import (
    Conflict,
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    ModelError,
    NotFound,
    TandemError,
    renamed,
)
from mlx_tandem.explain import did_you_mean
from mlx_tandem.generation.adapters.adapter_root import AdapterRoot
from mlx_tandem.generation.adapters.elsewhere import Elsewhere
from mlx_tandem.generation.adapters.engine_contents import EngineContents
from mlx_tandem.generation.adapters.first_reads import FirstReads
from mlx_tandem.generation.adapters.name_rules import NameRules, base_names
from mlx_tandem.generation.adapters.quota import AdapterQuota
from mlx_tandem.limits import BASE, BASE_NAMES
from mlx_tandem.log import log
from mlx_tandem.types import AdapterInfo, AdapterRef, AdapterSource

Status = Literal["loaded", "loading", "available_not_loaded", "error_loading"]
"""The state of a model, in MLX ParaLLM's words. A model that is `available_not_loaded` is read on first use."""

NAMED = 8
"""Most names that the refusal of an unknown model lists."""

_BASE_STATUS: dict[State, Status] = {
    "starting": "loading",
    "ready": "loaded",
    "idle": "available_not_loaded",
    "waking": "loading",
    "restarting": "loading",
    "draining": "loaded",
    "dead": "error_loading",
}


@dataclass(frozen=True)
class Selection:
    """The model that a request runs under.

    `entry` is None for the base. `arm` is the arm of the alias that the request named, if it named one, and `user` the
    user that the request named with it.
    """

    entry: Entry | None
    arm: AliasArm | None = None
    user: str | None = None

    @property
    def ref(self) -> AdapterRef | None:
        """The adapter version; None for the base."""
        return None if self.entry is None else self.entry.ref

    @property
    def counters(self) -> list[Counters]:
        """The counters that requests under this model have to update."""
        return [x.counters for x in (self.entry, self.arm) if x is not None]


class Models:
    """The models of one server, on one event loop. The caller runs `bring_up` whenever a new engine is ready."""

    def __init__(self, config: Config, client: EngineClient):
        """Register no adapter yet: `bring_up` loads those of the settings."""
        folder = Path(config.engine.model.path)
        names = config.server.served_model_names
        self.id = names[0] if names else folder.resolve().name
        """The name of the base model in replies."""
        self.served_names = tuple(n for n in names if n != self.id)
        self.base_names = base_names(config)
        self.registry = Registry()
        self.aliases = Aliases()
        training, cluster = config.rl_training, config.cluster
        distant = (training.adapter,) if cluster.share or cluster.connect_to else ()  # trained on another machine
        self._trained = frozenset(training.trained if training.enabled else distant)
        self.rules = NameRules(self.base_names, self.registry, self.aliases, self._trained)
        self._quota = AdapterQuota(config, self.registry)
        self._config = config
        self._client = client
        self._root = AdapterRoot(config.adapter_root)
        self._first_reads = FirstReads(config.server.first_token_timeout_s)
        self._contents = EngineContents(self.registry, client)
        self.elsewhere = Elsewhere(self.rules, self.registry, self._contents, client)
        """The adapters that come from other machines."""
        self._shelves: dict[str, dict[str, AdapterSource]] = {}  # folders of trained adapters' saved versions, by label
        self._reread: set[str] = set()  # labels of the shelf's versions that were read for a request
        self._expected: dict[str, frozenset[str]] = {}  # labels that are being made again, by trained adapter
        self._checkpoints = os.path.abspath(config.checkpointing.checkpoint_dir)

    # -- what a request means -----------------------------------------------------------------------------------

    async def select(self, model: str | None, user: str | None = None) -> Selection:
        """Return the model that the name `model` stands for now. Raises NotFound (`model_not_found`).

        `user` keeps a caller on the same arm of an alias. An adapter is read from its folder on first use.
        """
        default = self._config.server.default_adapter
        if model is None or (model in self.base_names and model != BASE):
            if not default:
                return Selection(None)
            model = default
        arm = self.aliases.choose(model, user)
        if arm is not None:
            model = arm.adapter
        return Selection(None if model == BASE else await self.entry(model), arm, user)

    async def select_adapter(self, adapter: str, model: str | None, user: str | None = None) -> Selection:
        """Return the model that the field `lora_adapter` stands for now.

        Raises InvalidRequest when `model` names neither the base nor the same version.
        """
        with renamed(model="lora_adapter"):
            chosen = await self.select(adapter, user)
        if model is None or model in self.base_names or model == adapter:
            return chosen
        if (await self.select(model, user)).ref != chosen.ref:
            raise InvalidRequest("lora_adapter and model name different adapters", param="lora_adapter")
        return chosen

    def status(self, model_id: str) -> Status:
        """Return the state of `model_id`, which names the base, an adapter, a version or an alias.

        Raises NotFound when nothing has this name.
        """
        if model_id in self.base_names:
            return _BASE_STATUS[self._client.state]
        if model_id in self.aliases:
            try:
                arms = {self.status(arm.adapter) for arm in self.aliases.arms(model_id)}
            except NotFound:  # An adapter of this alias was removed.
                return "error_loading"
            return "loaded" if arms == {"loaded"} else "available_not_loaded"
        if model_id in self._first_reads:
            return "loading"
        if model_id in self.registry and not self.registry.is_read(model_id):
            return "available_not_loaded"
        try:
            return "loading" if self.registry.entry(model_id).ref.digest in self._contents.lost else "loaded"
        except NotFound:
            if any(model_id in labels for labels in self._expected.values()):
                return "loading"
            if self.shelved(model_id) is None and self._unread(model_id.partition("@")[0]) is None:
                raise
            return "available_not_loaded"

    def label(self, adapter: AdapterRef | None) -> str:
        """Return the name that replies give as their model: name@version, or the base's own name."""
        return self.id if adapter is None else adapter.label

    async def entry(self, model_id: str) -> Entry:
        """Return the version that the id `name` or `name@version` names. It is read from its folder on first use.

        Raises NotFound for an unknown name, ModelError for a folder that cannot be read, and EngineUnavailable while
        the version is being made again after a restart.
        """
        try:
            entry = self.registry.entry(model_id)
            if entry.ref.digest in self._contents.lost:
                raise EngineUnavailable(f"{entry.ref.label} is being made again")
            return entry
        except NotFound as e:
            if any(model_id in labels for labels in self._expected.values()):
                raise EngineUnavailable(f"{model_id} is being made again") from None
            source = self.shelved(model_id)
            name = model_id.partition("@")[0] if source is None else model_id
            source = source or self._unread(name)
            if source is None:
                raise self.unknown(model_id, e) from None
        try:
            await self._first_reads.wait(name, lambda: self._first_read(name, source))
        except (ModelError, NotFound) as e:
            folder = os.path.dirname(source.path)
            saved = self._checkpoints in (folder, os.path.dirname(folder))
            in_removal = saved and not os.path.isdir(source.path)
            if isinstance(e, NotFound) or in_removal:
                raise NotFound(f"{name!r} is no longer there", param="model", code="model_not_found") from None
            raise ModelError(f"adapter {name}: {e.message}", param="model", code=e.code) from e
        return self.registry.entry(model_id)

    def unknown(self, model_id: str, error: NotFound) -> NotFound:
        """Return `error`, which says that nothing has the name `model_id`, extended by names that exist.

        These are the ones that are spelled similarly, and the first NAMED ones of all.
        """
        aliases = [name for name, _ in self.aliases.items()]
        named = (self.id, *self.served_names)
        near = did_you_mean(model_id, chain(named, BASE_NAMES, aliases, self.registry.names()))
        total = len({*named, BASE}) + len(aliases) + len(self.registry)
        names = dict.fromkeys(chain(named, (BASE,), aliases, islice(self.registry.names(), NAMED)))
        listed = ", ".join(repr(name[:140]) for name in islice(names, NAMED))
        more = f" and {total - NAMED} more" if total > NAMED else ""
        default = self._config.server.default_adapter or BASE
        says = f"{near or '.'} Models here: {listed}{more}. The model may be left out: then {default!r} answers"
        return NotFound(error.message + says, param=error.param, code=error.code)

    async def _first_read(self, name: str, source: AdapterSource) -> None:
        """Read an adapter or a version on the shelf for the first request that names it."""
        info = await self._client.load_adapter(source)
        trained, at, number = name.partition("@")
        if at:
            ref = self.reserve(trained, info, int(number))
            self.registry.entry(ref.label).source = source
            self._reread.add(ref.label)
        elif not self.registry.was_removed(name) and not self.registry.is_read(name):
            self._contents.publish(name, source, info)
        else:
            await self._contents.let_go(info.digest)

    def _unread(self, name: str) -> AdapterSource | None:
        """Return the folder of a name that has no version yet; None if it has none or is not free.

        The folder is either announced already or new under the adapter root.
        """
        registry = self.registry
        if registry.is_read(name) or registry.was_removed(name) or self.rules.is_reserved(name) or name in self.aliases:
            return None
        return registry.source(name) or _under_root(self._root, self.rules, registry, name)

    # -- adapters -----------------------------------------------------------------------------------------------

    def source(self, name: str, path: str | None) -> AdapterSource:
        """Return the folder of an adapter that a caller wants loaded: `path` under the root, or else the known folder.

        Raises InvalidRequest naming `path` or `name`, and NotFound naming `name` when no folder is known for it.
        """
        self.rules.check_adapter(name)
        if path is None:
            found = self.registry.source(name) or _under_root(self._root, self.rules, self.registry, name)
            if found is None:
                raise NotFound(
                    f"no folder is known for the adapter {name[:140]!r}", param="name", code="adapter_not_found"
                )
            return found
        return self._root.resolve(path)

    async def load(
        self, name: str, source: AdapterSource, pin: bool = False, check: Callable[[], None] = lambda: None
    ) -> Entry:
        """Read a folder and make it the current version of `name`. Running requests keep their versions.

        `check` runs before and after the reading, and raises the caller's own objections. Raises Conflict for a name
        that is taken, and QuotaExceeded.
        """
        limited = self.rules.is_up  # The adapters of the settings are the operator's and have no quota.
        self.rules.check_adapter(name)
        check()
        if limited:
            self._quota.check(name)
        info = await self._client.load_adapter(source)
        try:  # Names and quotas may have changed during the reading, so all checks run again.
            self.rules.check_adapter(name)
            check()
            if limited:
                self._quota.check(name, info.digest)
                if pin:
                    self._quota.check_pin(name, info)
        except TandemError:
            await self._contents.let_go(info.digest)
            raise
        entry = self._contents.publish(name, source, info, pin)
        if limited:
            self._quota.note(entry.ref)
        return entry

    def stand_for(self, name: str, number: int, pin: bool = False) -> Entry:
        """Make `name` stand for the version with this number again. Running requests keep their versions.

        Raises Conflict for a name that is taken, QuotaExceeded, and NotFound naming `version`.
        """
        self.rules.check_adapter(name)
        try:
            entry = self.registry.entry(f"{name}@{number}")
        except NotFound as e:
            raise NotFound(e.message, param="version", code="adapter_not_found") from None
        if pin:
            self._quota.check_pin(name, entry.info)
        return self._contents.publish(name, entry.source, entry.info, pin)

    async def unload(self, name: str) -> list[AdapterRef]:
        """Forget a name and all its versions, and return those. Running requests finish.

        Raises Conflict for the trained adapter, and for a checkpoint, which exists as long as its folder does.
        """
        self.rules.check_untrained(name)
        self.rules.check_no_checkpoint(name)
        return await self._remove(name)

    async def _remove(self, name: str) -> list[AdapterRef]:
        """Forget a name and all its versions, and return those."""
        refs = self.registry.remove(name)
        self._quota.forget(refs)
        for digest in {r.digest for r in refs}:
            await self._contents.let_go(digest)
        log("adapter removed", adapter=name, versions=len(refs))
        return refs

    # -- versions that are made here ----------------------------------------------------------------------------

    def made(self, name: str, source: AdapterSource | None, info: AdapterInfo, number: int = 0) -> AdapterRef:
        """Make content that the engine holds the current version of `name`, and return the version.

        `source` is a folder that has the same content, if there is one. `number` is the version's number if it had one
        before a restart, else 0.
        """
        ref = self.registry.publish(name, source, info, number=number)
        self._contents.found(ref.digest)
        return ref

    def reserve(self, name: str, info: AdapterInfo, number: int = 0) -> AdapterRef:
        """Return a new version of `name` for content that the engine holds, without making it the current one."""
        ref = self.registry.reserve(name, info, number)
        self._contents.found(ref.digest)
        return ref

    async def retire(self, ref: AdapterRef) -> None:
        """Forget a version, so that new requests cannot name it. Requests that run under it finish."""
        self.registry.retire(ref)
        self._quota.forget((ref,))
        await self._contents.let_go(ref.digest)

    def saved(self, trained: str, name: str, source: AdapterSource, info: AdapterInfo) -> None:
        """Record that this content of a trained adapter also lies in a folder, and serve the folder as `name`."""
        for entry in self.registry.holders(info.digest):
            if entry.name == trained:
                entry.source = source
        self._contents.publish(name, source, info)

    def shelve(self, trained: str, versions: Mapping[int, AdapterSource]) -> None:
        """Set the shelf of a trained adapter: the checkpoints that hold versions of it. Each is read on use."""
        self._shelves[trained] = {f"{trained}@{number}": source for number, source in versions.items()}

    def shelved(self, label: str) -> AdapterSource | None:
        """Return the checkpoint that holds the version with this label; None if there is none."""
        return self._shelves.get(label.partition("@")[0], {}).get(label)

    async def unsaved(self, name: str, source: AdapterSource) -> None:
        """Forget the checkpoint `name`, whose folder `source` is gone, and the versions that only it had."""
        for label in [label for label in self._reread if self.shelved(label) is None]:
            self._reread.discard(label)
            with contextlib.suppress(Conflict, NotFound):
                await self.retire(self.registry.entry(label).ref)
        for digest in {e.ref.digest for e in self.registry.versions(name)} if self.registry.is_read(name) else ():
            for entry in self.registry.holders(digest):
                if entry.source == source:
                    entry.source = None
        if name in self.registry:
            await self._remove(name)

    def expect(self, trained: str, numbers: Iterable[int]) -> None:
        """Answer requests for these versions with EngineUnavailable until `drop_lost`: they are being made again."""
        self._expected[trained] = frozenset(f"{trained}@{number}" for number in numbers)

    async def drop_lost(self, trained: str) -> None:
        """Forget the versions of a trained adapter that were not made again after the engine had ended.

        Those of other trained adapters may still be made again.
        """
        self._expected.pop(trained, None)
        others = self._trained - {trained}
        for digest in list(self._contents.lost):
            for entry in [e for e in self.registry.holders(digest) if e.name not in others]:
                try:
                    await self.retire(entry.ref)
                except Conflict:
                    log("adapter lost", adapter=entry.ref.label)

    # -- aliases ------------------------------------------------------------------------------------------------

    async def put_alias(self, name: str, arms: Sequence[Arm], test: str = "") -> tuple[AliasArm, ...]:
        """Make `name` an alias of these arms for new requests, after reading the arms' adapters. `test` is the id of
        their A/B test.

        Raises NotFound naming the arm, and Conflict for a name that is taken.
        """
        self.rules.check_alias(name)
        for i, arm in enumerate(arms[: limits.MAX_ARMS]):
            if arm.adapter != BASE:
                try:
                    await self.entry(arm.adapter)
                except NotFound as e:
                    e.param = f"arms[{i}].adapter"
                    raise
        self.rules.check_alias(name)  # An adapter may have taken the name during the reading.
        return self.aliases.put(name, arms, test)

    # -- the engine's life --------------------------------------------------------------------------------------

    async def bring_up(self) -> None:
        """Tell a new engine about all registered versions. At the first start, load those of the settings instead."""
        if self.rules.is_up:
            self._contents.tell_all()
            return
        if self._root.path is not None:
            await asyncio.to_thread(_announce_root, self._root, self.rules, self.registry)
        for name, path in self._config.adapters:
            try:
                await self.load(name, AdapterSource(os.path.abspath(path), follow_links=True))
            except EngineError:
                raise
            except TandemError as e:
                e.message = f"adapter {name}: {e.message}"
                raise
        for name, arms in self._config.aliases:
            await self.put_alias(name, arms)
        default = self._config.server.default_adapter
        comes_later = self._config.cluster.share or self._config.cluster.connect_to  # from another machine
        if default and default not in self.aliases and default != BASE and not comes_later:
            await self.entry(default)
        self.rules.is_up = True


def _under_root(root: AdapterRoot, rules: NameRules, registry: Registry, name: str) -> AdapterSource | None:
    """Return the folder `name` under `root`; None if there is none or the name is not allowed."""
    try:
        registry.check(name)
    except InvalidRequest:
        return None
    return None if rules.is_checkpoint(name) else root.find(name)


def _announce_root(root: AdapterRoot, rules: NameRules, registry: Registry) -> None:
    """Register every adapter folder under `root` by its name. Folders whose names are not allowed are logged."""
    found = 0
    for name, source in root.folders():
        if rules.is_base(name):
            continue
        try:
            rules.check_no_checkpoint(name)
            rules.check_reserved(name)
            registry.announce(name, source)
            found += 1
        except InvalidRequest as e:
            log("adapter folder passed over", folder=name, reason=e.message)
    log("adapter root read", root=root.path, adapters=found)
