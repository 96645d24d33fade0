"""The adapter contents that the engine holds or may read, kept in step with the registry."""

from __future__ import annotations

from mlx_tandem.adapters.registry import Entry, Registry
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.errors import EngineError
from mlx_tandem.log import log
from mlx_tandem.types import AdapterInfo, AdapterSource


class EngineContents:
    """The engine's knowledge of adapter contents, each of which it knows by its digest.

    `lost` has the digests that were lost with an earlier engine and are being made again.
    """

    def __init__(self, registry: Registry, client: EngineClient):
        self.lost: set[str] = set()
        self._registry = registry
        self._client = client

    def publish(self, name: str, source: AdapterSource | None, info: AdapterInfo, pin: bool = False) -> Entry:
        """Register this content as the current version of `name`, and tell the engine about all versions of it."""
        ref = self._registry.publish(name, source, info, pin)
        for version in self._registry.versions(name):
            self.tell(version.ref.digest)
        log("adapter loaded", adapter=ref.label, digest=ref.digest, rank=info.rank, bytes=info.nbytes)
        return self._registry.entry(ref.label)

    def tell(self, digest: str) -> None:
        """Tell the engine the folders of this content, and whether it has to stay in memory."""
        holders = self._registry.holders(digest)
        # Other versions' folders may be removed at any time, so the content of a version without a folder stays pinned.
        pinned = any(entry.pinned or entry.source is None for entry in holders)
        for source in {entry.source: None for entry in holders if entry.source is not None}:
            self._client.know_adapter(holders[0].info, source, pinned)

    def tell_all(self) -> None:
        """Tell a new engine about all registered versions. Those without a folder count as lost from now on."""
        for current in self._registry.entries():
            for entry in self._registry.versions(current.name):
                digest = entry.ref.digest
                if all(holder.source is None for holder in self._registry.holders(digest)):
                    self.lost.add(digest)
                self.tell(digest)

    def found(self, digest: str) -> None:
        """Record that the engine holds this content, and tell it who has it."""
        self.lost.discard(digest)
        self.tell(digest)

    async def let_go(self, digest: str) -> None:
        """Make the engine forget content that no version has any more, or else tell it who still has it."""
        try:
            if self._registry.holders(digest):
                self.tell(digest)
            else:
                self.lost.discard(digest)
                await self._client.unload_adapter(digest)
        except EngineError as e:  # The engine has ended, and its adapters with it.
            log("adapter not unloaded", digest=digest, error=e.message)
