"""Adapters that came from another machine: kept on the drive, registered under the names and numbers that they had."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from mlx_tandem.adapters.registry import Entry
from mlx_tandem.errors import Conflict, EngineError, InvalidRequest, ModelError, NotFound
from mlx_tandem.generation.front import Front
from mlx_tandem.log import log
from mlx_tandem.training.cluster.folder import ClusterFolder
from mlx_tandem.training.cluster.wire import Adapter, Version
from mlx_tandem.types import AdapterInfo

KNOWN = "adapters.json"
"""The file of the adapters that were adopted last."""

KEPT = 8
"""Versions of one name that are kept."""


class Adopted:
    """The adapters that this server has from other machines. One call at a time changes them."""

    def __init__(self, front: Front, folder: ClusterFolder):
        """Begin without any: `restore` reads those of the last run."""
        self._front, self._folder = front, folder
        self._adapters: dict[str, Adapter] = {}
        self._changing = asyncio.Lock()

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The adapters as they are served."""
        return tuple(self._adapters.values())

    def get(self, name: str) -> Adapter | None:
        """Return an adapter as it is served; None if there is none of this name."""
        return self._adapters.get(name)

    def check(self, name: str, version: Version) -> bool:
        """Return whether a name has a version here.

        Raises InvalidRequest if it can never be added: for a name that this server uses itself, and for a number or a
        content that the name has with another content or number.
        """
        self._front.models.elsewhere.check(name, known=name in self._adapters)
        entry = self._entry(name, version.number)
        if entry is not None and entry.ref.digest != version.digest:
            raise Conflict(f"{entry.ref.label} has other content here", param="version")
        for other in self._front.models.registry.holders(version.digest):
            if other.name == name and other.ref.version != version.number:
                label = f"{name}@{version.number}"
                raise Conflict(f"{other.ref.label} is the same content as {label}", param="version")
        return entry is not None

    async def restore(self) -> None:
        """Register what the folder has, on a server that has just started. What is damaged is left out."""
        known = await asyncio.to_thread(self._folder.read, KNOWN, tuple[Adapter, ...]) or ()
        for adapter in known:
            versions = tuple(v for v in adapter.versions if self._folder.source(v.digest) is not None)
            if not versions:
                continue
            current = adapter.current if any(v.number == adapter.current for v in versions) else versions[-1].number
            try:
                await self.put(Adapter(adapter.name, current, versions))
            except EngineError:
                raise
            except InvalidRequest as e:
                log("an adapter of the last run is left out", adapter=adapter.name, reason=e.message)

    async def put(self, adapter: Adapter) -> None:
        """Serve an adapter as another machine does. The folder has all of its versions already.

        Raises InvalidRequest for a name that this server uses itself, a number that stands for other content, and
        content that is not what its digest says; nothing has changed then.
        """
        async with self._changing:
            await self._put(adapter)
            await self._keep()

    async def remove(self, name: str) -> None:
        """Forget an adapter."""
        async with self._changing:
            if self._adapters.pop(name, None) is not None:
                with contextlib.suppress(NotFound):  # somebody has removed it here
                    await self._front.models.elsewhere.forget(name)
                await self._keep()

    async def _put(self, adapter: Adapter) -> None:
        models = self._front.models
        new: list[tuple[Version, AdapterInfo]] = []
        for version in adapter.versions:
            if not self.check(adapter.name, version):
                new.append((version, await load(self._front, self._folder, version)))
        for version, info in new:
            models.elsewhere.adopt(adapter.name, version.number, info, self._folder.source(version.digest))
        models.elsewhere.stand_for(adapter.name, adapter.current)
        self._adapters[adapter.name] = adapter
        numbers = {version.number for version in adapter.versions}
        for entry in models.registry.versions(adapter.name):
            if entry.ref.version not in numbers:
                await models.retire(entry.ref)

    def _entry(self, name: str, number: int) -> Entry | None:
        try:
            return self._front.models.registry.entry(f"{name}@{number}")
        except NotFound:
            return None

    async def _keep(self) -> None:
        """Write down what is served, and remove the folders of what is not."""
        await asyncio.to_thread(self._folder.write, KNOWN, self.adapters)
        needed = {version.digest for adapter in self.adapters for version in adapter.versions}
        there = await asyncio.to_thread(self._folder.digests)
        for digest in there:
            if digest not in needed and not self._front.models.registry.holders(digest):
                await asyncio.to_thread(self._folder.remove, digest)


async def load(front: Front, folder: ClusterFolder, version: Version) -> AdapterInfo:
    """Have the engine read a version that a folder has; `elsewhere.let_go` makes the engine forget it.

    Raises ModelError if its content is not what its digest says, and removes it from the folder then.
    """
    source = folder.source(version.digest)
    if source is None:
        raise NotFound(f"the content {version.digest} is not here", param="version")
    try:
        info = await front.client.load_adapter(source)
        if info.digest == version.digest:
            return info
        error = ModelError(f"the content is {info.digest}, not {version.digest}: it was changed", param="version")
        await front.models.elsewhere.let_go(info.digest)
    except EngineError:
        raise
    except InvalidRequest as e:
        error = ModelError(e.message, param="version", code=e.code)
    await asyncio.to_thread(folder.remove, version.digest)
    raise error


def with_version(adapter: Adapter | None, name: str, version: Version) -> Adapter:
    """Return an adapter with a version that its name stands for from now on. The oldest go when there are too many."""
    others: Sequence[Version] = () if adapter is None else adapter.versions
    others = [v for v in others if v.number != version.number]
    return Adapter(name, version.number, (*others[-(KEPT - 1) :], version))
