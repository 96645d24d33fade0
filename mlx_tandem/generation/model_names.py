"""The names that a request's `model` can be: the base's, those of adapters and their versions, and aliases.

Adapters that the settings name are read at start. Those under the adapter root are known by their folder's name and
read when they are first asked for. Paths never come from a request unless they lie under that root.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
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
from mlx_tandem.generation.adapter_root import AdapterRoot
from mlx_tandem.generation.first_reads import FirstReads
from mlx_tandem.generation.name_rules import NameRules
from mlx_tandem.generation.quota import AdapterQuota
from mlx_tandem.limits import BASE, BASE_NAMES
from mlx_tandem.log import log
from mlx_tandem.types import AdapterInfo, AdapterRef, AdapterSource

Status = Literal["loaded", "loading", "available_not_loaded", "error_loading"]
"""How far a model has been read, in MLX ParaLLM's words. `available_not_loaded`: it is read when it is asked for."""

_BASE_STATUS: dict[State, Status] = {
    "starting": "loading",
    "ready": "loaded",
    "restarting": "loading",
    "draining": "loaded",
    "dead": "error_loading",
}


@dataclass(frozen=True)
class Selection:
    """The model that a request runs under. `entry` None: the base. `arm`: the alias's arm that led there, if any."""

    entry: Entry | None
    arm: AliasArm | None = None

    @property
    def ref(self) -> AdapterRef | None:
        return None if self.entry is None else self.entry.ref

    @property
    def counters(self) -> list[Counters]:
        """Return all counters of what is done with it."""
        return [x.counters for x in (self.entry, self.arm) if x is not None]


class Models:
    """The models of one server. `bring_up` has to be run whenever a fresh engine is ready."""

    def __init__(self, config: Config, client: EngineClient):
        folder = Path(config.engine.model.path)
        names = config.server.served_model_names
        self.id = names[0] if names else folder.resolve().name
        """The base's own name."""
        self.served_names = tuple(n for n in names if n != self.id)
        self.base_names = frozenset((*BASE_NAMES, folder.resolve().name, config.engine.model.path, *names))
        self.registry = Registry()
        self.aliases = Aliases()
        self._trained = config.rl_training.adapter if config.rl_training.enabled else None
        self.rules = NameRules(self.base_names, self.registry, self.aliases, self._trained)
        self._quota = AdapterQuota(config, self.registry)
        self._config = config
        self._client = client
        self._root = AdapterRoot(config.adapter_root)
        self._first_reads = FirstReads(config.server.first_token_timeout_s)
        self._lost: set[str] = set()  # digests that went with an earlier engine and are being made again
        self._shelf: dict[str, AdapterSource] = {}  # versions of the trained adapter that lie in checkpoints
        self._reread: set[str] = set()  # those of them that were read because somebody has asked for them
        self._expected: frozenset[str] = frozenset()  # versions of an earlier server that are being made again
        self._checkpoints = os.path.abspath(config.checkpointing.checkpoint_dir)

    # -- what a request means -----------------------------------------------------------------------------------

    async def select(self, model: str | None, user: str | None = None) -> Selection:
        """Return what `model` stands for now. Raises NotFound (`model_not_found`).

        `user` keeps a caller on one arm of an alias. An adapter that was never used is read from its folder first.
        """
        default = self._config.server.default_adapter
        if model is None or (model in self.base_names and model != BASE):
            if not default:
                return Selection(None)
            model = default
        arm = self.aliases.choose(model, user)
        if arm is not None:
            model = arm.adapter
        return Selection(None if model == BASE else await self.entry(model), arm)

    async def select_adapter(self, adapter: str, model: str | None, user: str | None = None) -> Selection:
        """Return what `lora_adapter` stands for now. Raises InvalidRequest when `model` names neither the base nor the
        same version."""
        with renamed(model="lora_adapter"):
            chosen = await self.select(adapter, user)
        if model is None or model in self.base_names or model == adapter:
            return chosen
        if (await self.select(model, user)).ref != chosen.ref:
            raise InvalidRequest("lora_adapter and model name different adapters", param="lora_adapter")
        return chosen

    def status(self, selector: str) -> Status:
        """Return how far what `selector` means has been read: a name of the base, an adapter, a version or an alias.

        Raises NotFound for what nothing is called.
        """
        if selector in self.base_names:
            return _BASE_STATUS[self._client.state]
        if selector in self.aliases:
            try:
                arms = {self.status(arm.adapter) for arm in self.aliases.arms(selector)}
            except NotFound:  # an adapter of it was removed
                return "error_loading"
            return "loaded" if arms == {"loaded"} else "available_not_loaded"
        if selector in self._first_reads:
            return "loading"
        if selector in self.registry and not self.registry.is_read(selector):
            return "available_not_loaded"
        return "loading" if self.registry.entry(selector).ref.digest in self._lost else "loaded"

    def label(self, adapter: AdapterRef | None) -> str:
        return self.id if adapter is None else adapter.label

    async def entry(self, selector: str) -> Entry:
        """Return the version that `name` or `name@version` selects, read from its folder when it is first asked for."""
        try:
            entry = self.registry.entry(selector)
            if entry.ref.digest in self._lost:
                raise EngineUnavailable(f"{entry.ref.label} is being made again")
            return entry
        except NotFound as e:
            if selector in self._expected:
                raise EngineUnavailable(f"{selector} is being made again") from None
            source = self._shelf.get(selector)
            name = selector.partition("@")[0] if source is None else selector
            source = source or self._unread(name)
            if source is None:
                raise self.unknown(selector, e) from None
        try:
            await self._first_reads.wait(name, lambda: self._first_read(name, source))
        except (ModelError, NotFound) as e:
            in_removal = os.path.dirname(source.path) == self._checkpoints and not os.path.isdir(source.path)
            if isinstance(e, NotFound) or in_removal:
                raise NotFound(f"{name!r} is no longer there", param="model", code="model_not_found") from None
            raise ModelError(f"adapter {name}: {e.message}", param="model", code=e.code) from e
        return self.registry.entry(selector)

    def unknown(self, selector: str, error: NotFound) -> NotFound:
        """Return `error`, which says that nothing is called `selector`, with the names that are spelled like it."""
        aliases = (name for name, _ in self.aliases.items())
        names = chain((self.id, *self.served_names, *BASE_NAMES), aliases, self.registry.names())
        return NotFound(error.message + did_you_mean(selector, names), param=error.param, code=error.code)

    async def _first_read(self, name: str, source: AdapterSource) -> None:
        info = await self._client.load_adapter(source)
        trained, at, number = name.partition("@")
        if at:
            ref = self.reserve(trained, info, int(number))
            self.registry.entry(ref.label).source = source
            self._reread.add(ref.label)
        elif not self.registry.was_removed(name) and not self.registry.is_read(name):
            self._publish(name, source, info)
        else:
            await self._let_go(info.digest)

    def _unread(self, name: str) -> AdapterSource | None:
        """Return the folder of a name that has no version yet, announced or new under the root; None: there is none."""
        registry = self.registry
        if registry.is_read(name) or registry.was_removed(name) or self.rules.is_reserved(name) or name in self.aliases:
            return None
        return registry.source(name) or self._under_root(name)

    def _under_root(self, name: str) -> AdapterSource | None:
        try:
            self.registry.check(name)
        except InvalidRequest:
            return None
        return None if self.rules.is_checkpoint(name) else self._root.find(name)

    # -- adapters -----------------------------------------------------------------------------------------------

    def source(self, name: str, path: str | None) -> AdapterSource:
        """Return where a caller's adapter is: the known folder of `name`, or `path` under the root. Raises
        InvalidRequest naming `path`, NotFound naming `name`."""
        self.rules.check_adapter(name)
        if path is None:
            found = self.registry.source(name) or self._under_root(name)
            if found is None:
                raise NotFound(
                    f"no folder is known for the adapter {name[:140]!r}", param="name", code="adapter_not_found"
                )
            return found
        return self._root.resolve(path)

    async def load(
        self, name: str, source: AdapterSource, pin: bool = False, check: Callable[[], None] = lambda: None
    ) -> Entry:
        """Read a folder and make it the current version of `name`; requests that run keep theirs. `check` raises what
        the caller has against it, now and when it was read. Raises Conflict, QuotaExceeded."""
        limited = self.rules.is_up  # at the start it is the operator who names adapters
        self.rules.check_adapter(name)
        check()
        if limited:
            self._quota.check(name)
        info = await self._client.load_adapter(source)
        try:  # again: much may have happened meanwhile
            self.rules.check_adapter(name)
            check()
            if limited:
                self._quota.check(name, info.digest)
                if pin:
                    self._quota.check_pin(name, info)
        except TandemError:
            await self._let_go(info.digest)
            raise
        entry = self._publish(name, source, info, pin)
        if limited:
            self._quota.note(entry.ref)
        return entry

    def _publish(self, name: str, source: AdapterSource, info: AdapterInfo, pin: bool = False) -> Entry:
        ref = self.registry.publish(name, source, info, pin)
        for version in self.registry.versions(name):
            self._tell(version.ref.digest)
        log("adapter loaded", adapter=ref.label, digest=ref.digest, rank=info.rank, bytes=info.nbytes)
        return self.registry.entry(ref.label)

    def _tell(self, digest: str) -> None:
        """Have the engine know where this content may be found, and whether anybody wants it pinned."""
        holders = self.registry.holders(digest)
        # The folders are others': what has none of its own must not leave memory, as they may go at any time.
        pinned = any(entry.pinned or entry.source is None for entry in holders)
        for source in {entry.source: None for entry in holders if entry.source is not None}:
            self._client.know_adapter(holders[0].info, source, pinned)

    async def unload(self, name: str) -> list[AdapterRef]:
        """Forget a name and all its versions. Requests that run are finished. Raises Conflict for what is trained here
        and for a checkpoint, which is there as long as its folder is."""
        self.rules.check_untrained(name)
        self.rules.check_no_checkpoint(name)
        return await self._remove(name)

    async def _remove(self, name: str) -> list[AdapterRef]:
        refs = self.registry.remove(name)
        self._quota.forget(refs)
        for digest in {r.digest for r in refs}:
            await self._let_go(digest)
        log("adapter removed", adapter=name, versions=len(refs))
        return refs

    async def _let_go(self, digest: str) -> None:
        """Have the engine forget content that no version has any more, or know who has it now."""
        try:
            if self.registry.holders(digest):
                self._tell(digest)
            else:
                self._lost.discard(digest)
                await self._client.unload_adapter(digest)
        except EngineError as e:  # it is gone, and with it the adapter
            log("adapter not unloaded", digest=digest, error=e.message)

    # -- versions that are made here ----------------------------------------------------------------------------

    def made(self, name: str, source: AdapterSource | None, info: AdapterInfo, number: int = 0) -> AdapterRef:
        """Let `name` stand, from the next request on, for content that the engine has made or has again. `source`: a
        folder that also has it; `number`: the version's number if it had one before."""
        ref = self.registry.publish(name, source, info, number=number)
        self._found(ref)
        return ref

    def reserve(self, name: str, info: AdapterInfo, number: int = 0) -> AdapterRef:
        """Return a version for content that the engine has made and `name` does not stand for yet."""
        ref = self.registry.reserve(name, info, number)
        self._found(ref)
        return ref

    def _found(self, ref: AdapterRef) -> None:
        self._lost.discard(ref.digest)
        self._tell(ref.digest)

    async def retire(self, ref: AdapterRef) -> None:
        """Forget a version, so that nobody may ask for it. Requests that run under it are finished."""
        self.registry.retire(ref)
        self._quota.forget((ref,))
        await self._let_go(ref.digest)

    def saved(self, name: str, source: AdapterSource, info: AdapterInfo) -> None:
        """Note that this content of the trained adapter also lies in a folder, and serve it as `name`, too."""
        for entry in self.registry.holders(info.digest):
            if entry.name == self._trained:
                entry.source = source
        self._publish(name, source, info)

    def shelve(self, versions: dict[str, AdapterSource]) -> None:
        """Set the trained adapter's versions, by label, that lie in checkpoints. Each is read when it is asked for."""
        self._shelf = versions

    def shelved(self, label: str) -> AdapterSource | None:
        """Return the checkpoint that has this version; None: there is none."""
        return self._shelf.get(label)

    async def unsaved(self, name: str, source: AdapterSource) -> None:
        """Note that the folder of `saved` is gone, and no longer on the shelf."""
        for label in [label for label in self._reread if label not in self._shelf]:
            self._reread.discard(label)
            with contextlib.suppress(Conflict, NotFound):
                await self.retire(self.registry.entry(label).ref)
        for digest in {e.ref.digest for e in self.registry.versions(name)} if self.registry.is_read(name) else ():
            for entry in self.registry.holders(digest):
                if entry.source == source:
                    entry.source = None
        if name in self.registry:
            await self._remove(name)

    def expect(self, labels: Iterable[str]) -> None:
        """Note that these versions are being made again: who asks for one is told so until `drop_lost`."""
        self._expected = frozenset(labels)

    async def drop_lost(self) -> None:
        """Forget the versions that were not made again after the engine had ended."""
        self._expected = frozenset()
        for digest in list(self._lost):
            for entry in self.registry.holders(digest):
                try:
                    await self.retire(entry.ref)
                except Conflict:
                    log("adapter lost", adapter=entry.ref.label)

    # -- aliases ------------------------------------------------------------------------------------------------

    async def put_alias(self, name: str, arms: Sequence[Arm]) -> tuple[AliasArm, ...]:
        """Let `name` stand for these arms from the next request on; their adapters are read before."""
        self.rules.check_alias(name)
        for i, arm in enumerate(arms[: limits.MAX_ARMS]):
            if arm.adapter != BASE:
                try:
                    await self.entry(arm.adapter)
                except NotFound as e:
                    e.param = f"arms[{i}].adapter"
                    raise
        self.rules.check_alias(name)  # again: an adapter may have taken it meanwhile
        return self.aliases.put(name, arms)

    # -- the engine's life --------------------------------------------------------------------------------------

    async def bring_up(self) -> None:
        """Bring a fresh engine to where the registry is; at the first start, to where the settings say."""
        if self.rules.is_up:
            for current in self.registry.entries():
                for entry in self.registry.versions(current.name):
                    digest = entry.ref.digest
                    if all(holder.source is None for holder in self.registry.holders(digest)):
                        self._lost.add(digest)
                    self._tell(digest)
            return
        if self._root.path is not None:
            await asyncio.to_thread(self._announce_root)
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
        if default and default not in self.aliases and default != BASE:
            await self.entry(default)
        self.rules.is_up = True

    def _announce_root(self) -> None:
        """Make every adapter folder under the root known by its name; what is not a legal name is passed over."""
        found = 0
        for name, source in self._root.folders():
            if name in self.base_names:
                continue
            try:
                self.rules.check_no_checkpoint(name)
                self.rules.check_reserved(name)
                self.registry.announce(name, source)
                found += 1
            except InvalidRequest as e:
                log("adapter folder passed over", folder=name, reason=e.message)
        log("adapter root read", root=self._root.path, adapters=found)
