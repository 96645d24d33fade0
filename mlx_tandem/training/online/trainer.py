"""The one trainer in the engine: opened where it was left, and taken through what the journal says of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from mlx_tandem.config import Config
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.engine.learning import TrainerSpec
from mlx_tandem.training.online import recovery
from mlx_tandem.training.online.versions import RECENT, Version, Versions
from mlx_tandem.training.store.manifests import Manifest
from mlx_tandem.training.store.records import Ended, Record
from mlx_tandem.types import AdapterSource

log = logging.getLogger(__name__)


class Trainer:
    def __init__(self, config: Config, client: EngineClient, versions: Versions) -> None:
        self.name = config.rl_training.adapter
        self.step = 0  # of the optimiser
        self._config, self._client, self._versions = config, client, versions

    async def begin(self, folder: str) -> None:
        """As the checkpoint in `folder` has it; without one as the settings say, fresh or from an adapter."""
        await self.open(folder, "" if folder else await self._initial())

    async def open(self, folder: str, digest: str) -> None:
        """From a checkpoint, else from an adapter in the engine's memory, else fresh."""
        config = self._config.rl_training
        spec = TrainerSpec(self.name, config.lora_rank, config.lora_alpha, config.lora_target_modules, config.seed)
        self.step = (await self._client.open_trainer(spec, folder=folder, digest=digest)).step

    async def _initial(self) -> str:
        name = self._config.rl_training.init_from
        if not name:
            return ""
        named = dict(self._config.adapters).get(name)
        if named is not None:
            source = AdapterSource(os.path.abspath(named), follow_links=True)
        else:
            root = os.path.realpath(self._config.adapter_root)
            source = AdapterSource(os.path.join(root, name), root)
        return (await self._client.load_adapter(source)).digest

    async def catch_up(
        self, manifest: Manifest | None, folder: str, records: Sequence[Record], held: int, highest: int
    ) -> None:
        """Compute the journal's updates after the first `held`, from the checkpoint on. What the trainer is on the way
        and at the end is served under the numbers that it had, up to `highest`; what comes out differently, as the
        device may not compute the same twice, under a new one."""
        versions = self._versions
        ends = [end for _, end in recovery.ended(records, held)]
        published = [end for end in ends if end.version]
        wanted = versions.digests | {end.digest for end in published[-RECENT:]}
        head: Version | None = None
        made: set[int] = set()

        async def remake(number: int, digest: str, folder: str = "") -> None:
            nonlocal head
            info = await self._client.publish_trainer(self.name)
            same = number > 0 and digest in ("", info.digest)
            if digest and not same:
                log.warning("weights differ", extra={"fields": {"version": number, "was": digest, "is": info.digest}})
            versions.count_from(number - 1 if same else highest)
            head = versions.reserve(info, folder)
            made.add(head.ref.version)

        async def passed(end: Ended) -> None:
            if end.digest in wanted or end is published[-1]:
                await remake(end.version, end.digest)

        if manifest is None:
            await remake(1, "")
        elif manifest.version or not published:
            await remake(manifest.version, manifest.digest, folder)
        step = await recovery.replay(self._client, self.name, records, held, passed)
        self.step = self.step if step is None else step
        assert head is not None
        versions.count_from(highest)
        versions.settle(head, made)
        good = [end for end in ends if end.outcome in recovery.GOOD]
        if good and not good[-1].version:
            versions.head = None  # it has learned something since then that was not published
