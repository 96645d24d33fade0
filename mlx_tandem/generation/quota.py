"""How many adapters requests may register, and how much of the engine's memory they may pin."""

from __future__ import annotations

from collections.abc import Iterable

from mlx_tandem.adapters.registry import Registry
from mlx_tandem.config import Config
from mlx_tandem.errors import QuotaExceeded
from mlx_tandem.types import AdapterInfo, AdapterRef


class AdapterQuota:
    """The bounds of what requests may register. Adapters that the settings name, that are found under the adapter root
    when they are asked for, or that training has made are not counted: they are the operator's."""

    def __init__(self, config: Config, registry: Registry):
        lora = config.engine.lora
        self._most = config.server.max_registered_adapters
        self._most_pinned = lora.max_cpu_loras
        self._most_pinned_bytes = int(lora.max_cpu_lora_gb * 1e9)
        self._registry = registry
        self._registered: set[str] = set()  # labels of versions

    def check(self, name: str, digest: str = "") -> None:
        """Raise QuotaExceeded if there are as many versions as may be and content with this digest (empty: not known
        yet) would be another one of `name`."""
        if len(self._registered) < self._most or any(e.name == name for e in self._registry.holders(digest)):
            return
        if digest or name not in self._registry:
            raise QuotaExceeded(
                f"{self._most} versions of adapters are registered by requests, as many as this server takes "
                "(--max-registered-adapters): remove some first",
                param="name",
            )

    def check_pin(self, name: str, info: AdapterInfo) -> None:
        """Raise QuotaExceeded if pinning this content as the current version of `name` would fill the engine's memory
        for adapters with what may not leave it."""
        pinned = {e.ref.digest: e.info.memory_bytes for e in self._registry.entries() if e.pinned and e.name != name}
        pinned[info.digest] = info.memory_bytes
        nbytes = sum(pinned.values())
        if nbytes > self._most_pinned_bytes or 0 < self._most_pinned < len(pinned):
            raise QuotaExceeded(
                f"{len(pinned)} pinned adapters of {nbytes / 1e6:.1f} MB in all do not fit into the memory for "
                "adapters (--max-cpu-lora-gb, --max-cpu-loras): unpin or remove some first",
                param="pin",
            )

    def note(self, ref: AdapterRef) -> None:
        """Count a version that a request has registered, once."""
        self._registered.add(ref.label)

    def forget(self, refs: Iterable[AdapterRef]) -> None:
        """Count these versions no longer."""
        self._registered.difference_update(ref.label for ref in refs)
