"""Adapters that come from other machines, which have given them their names and numbers."""

from __future__ import annotations

from mlx_tandem.adapters.registry import Registry
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.errors import Conflict
from mlx_tandem.generation.adapters.engine_contents import EngineContents
from mlx_tandem.generation.adapters.name_rules import NameRules
from mlx_tandem.log import log
from mlx_tandem.types import AdapterInfo, AdapterRef, AdapterSource


class Elsewhere:
    """The registration of such adapters, whose content the engine has read already."""

    def __init__(self, rules: NameRules, registry: Registry, contents: EngineContents, client: EngineClient):
        self._rules, self._registry, self._contents, self._client = rules, registry, contents, client

    def check(self, name: str, *, known: bool) -> None:
        """Raise InvalidRequest unless an adapter of another machine may have the name `name`. One that is `known` has
        come from there before.
        """
        self._rules.check_elsewhere(name)
        if name in self._registry and not known:
            raise Conflict(f"{name!r} is the name of an adapter of this server", param="name")

    def adopt(self, name: str, number: int, info: AdapterInfo, source: AdapterSource | None) -> None:
        """Register a version under the number that it has elsewhere, without making it the current one.

        Raises Conflict for content that the name has under another number here.
        """
        ref = self._registry.reserve(name, info, number)
        if ref.version != number:
            raise Conflict(f"{ref.label} is the same content as {name}@{number}", param="version")
        self._registry.entry(ref.label).source = source
        self._contents.found(ref.digest)
        log("adapter adopted", adapter=ref.label, digest=ref.digest)

    def stand_for(self, name: str, number: int) -> None:
        """Make `name` stand for one of its versions, and let requests that follow go on under it."""
        entry = self._registry.entry(f"{name}@{number}")
        if self._registry.is_read(name) and self._registry.entry(name) is entry:
            return
        self._registry.publish(name, entry.source, entry.info)
        self._client.follow_adapter(entry.ref)
        log("adapter published", adapter=entry.ref.label, digest=entry.ref.digest)

    async def forget(self, name: str) -> None:
        """Forget an adapter and all its versions. Running requests finish. Raises NotFound."""
        refs: list[AdapterRef] = self._registry.remove(name)
        for digest in {ref.digest for ref in refs}:
            await self._contents.let_go(digest)
        log("adapter removed", adapter=name, versions=len(refs))

    async def let_go(self, digest: str) -> None:
        """Make the engine forget content, unless a version has it."""
        await self._contents.let_go(digest)
