"""Limits on the adapters that requests register and on the engine memory that they pin."""

from __future__ import annotations

from collections.abc import Iterable

from mlx_tandem.adapters.registry import Registry
from mlx_tandem.config import Config
from mlx_tandem.errors import QuotaExceeded
from mlx_tandem.generation.caller import CALLER
from mlx_tandem.types import AdapterInfo, AdapterRef


class AdapterQuota:
    """The limits on adapters that requests register.

    It does not count the operator's adapters: those of the settings, those found under the adapter root on first use,
    and those that training has made.
    """

    def __init__(self, config: Config, registry: Registry):
        lora = config.engine.lora
        self._most = config.server.max_registered_adapters
        self._most_pinned = lora.max_cpu_loras
        self._most_pinned_bytes = int(lora.max_cpu_lora_gb * 1e9)
        self._registry = registry
        self._registered: dict[str, str] = {}  # by the label of each version: the tenant that registered it

    def check(self, name: str, digest: str = "") -> None:
        """Raise QuotaExceeded if registering content with this digest under `name` would exceed the limit of versions.

        An empty `digest` means that the content is not known yet. The tenant of the caller has a limit of its own.
        """
        if any(e.name == name for e in self._registry.holders(digest)) or not (digest or name not in self._registry):
            return
        caller = CALLER.get()
        most = caller.limits.adapters
        if most and sum(tenant == caller.tenant for tenant in self._registered.values()) >= most:
            raise QuotaExceeded(
                f"{most} versions of adapters are registered by the tenant '{caller.tenant}', the most for the key "
                f"'{caller.name}' (its limit adapters): remove some first",
                param="name",
            )
        if len(self._registered) >= self._most:
            raise QuotaExceeded(
                f"{self._most} versions of adapters are registered by requests, as many as this server takes "
                "(--max-registered-adapters): remove some first",
                param="name",
            )

    def check_pin(self, name: str, info: AdapterInfo) -> None:
        """Raise QuotaExceeded if all pinned adapters together would not fit into the engine's memory for adapters.

        They are counted as if this content were the pinned current version of `name`.
        """
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
        """Count a version that a request has registered. A second call for the same version has no effect."""
        self._registered.setdefault(ref.label, CALLER.get().tenant)

    def forget(self, refs: Iterable[AdapterRef]) -> None:
        """Stop counting these versions."""
        for ref in refs:
            self._registered.pop(ref.label, None)
