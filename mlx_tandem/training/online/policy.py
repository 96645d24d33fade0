"""The trainer of the served policy: opened where it was left, and taken through what the journal says of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_tandem.config import Config
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.engine.learning import LoraOptions, TrainerSpec
from mlx_tandem.training.online import recovery
from mlx_tandem.training.online.versions import RECENT, Version, Versions
from mlx_tandem.training.store.manifests import Manifest
from mlx_tandem.training.store.records import Ended, Record
from mlx_tandem.types import AdapterInfo, AdapterSource

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Behind:
    """What the trainer has to be taken through to be where it was."""

    records: Sequence[Record]  # of the journal
    held: int  # so many of its updates are in the checkpoint
    ends: Sequence[Ended]  # of the others
    first: Version  # what the trainer is now


class PolicyTrainer:
    """The one trainer of the online loop, by its name in the engine. `left` counts updates that have to be computed
    again.
    """

    def __init__(self, config: Config, client: EngineClient, versions: Versions) -> None:
        self.name = config.rl_training.adapter
        self.step = 0  # of the optimiser
        self.left = 0
        self._config, self._client, self._versions = config, client, versions

    async def begin(
        self, manifest: Manifest | None, folder: str, records: Sequence[Record], held: int, highest: int
    ) -> Behind:
        """Open the trainer as the checkpoint in `folder` has it; without one as the settings say, fresh or from an
        adapter.

        It is served under its number until `catch_up`. Numbers up to `highest` were given before.
        """
        ends = [end for _, end in recovery.ended(records, held)]
        self.left = len(ends)
        await self.open(folder, "" if folder else await self.initial())
        info = await self._client.publish_trainer(self.name)
        self._versions.count_from(highest)
        number, digest = (1, "") if manifest is None else (manifest.version, manifest.digest)
        first = self._versions.begin(info, folder, self._same(number, digest, info))
        return Behind(records, held, ends, first)

    async def open(self, folder: str, digest: str) -> None:
        """Open the trainer from a checkpoint, else from an adapter in the engine's memory, else fresh."""
        # What lies in a folder need not be in the engine's memory.
        opening = self._client.open_trainer(self.spec(self.name), folder=folder, digest="" if folder else digest)
        self.step = (await opening).step

    def spec(self, name: str) -> TrainerSpec:
        """Return the shape of a trainer of this name that is like the policy's."""
        config = self._config.rl_training
        options = LoraOptions(rslora=config.use_rslora, plus_ratio=config.lora_plus_ratio)
        return TrainerSpec(name, config.lora_rank, config.lora_alpha, config.lora_target_modules, config.seed, options)

    async def initial(self) -> str:
        """Return the digest of the adapter that learning begins with, loaded; empty: a fresh one."""
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

    async def catch_up(self, behind: Behind) -> None:
        """Compute the journal's updates since the checkpoint again. What the trainer is on the way and at the end is
        there again under the numbers that it had; what comes out differently, as the device may not compute the same
        twice, under a new one.
        """
        versions, head = self._versions, behind.first
        published = [end for end in behind.ends if end.version]
        wanted = versions.digests | {end.digest for end in published[-RECENT:]}
        expected = [end for end in published if end.digest in wanted or end is published[-1]]
        numbers = {end.version for end in expected}
        versions.expect(sorted(numbers))
        made = {head.ref.version}

        async def done(end: Ended, step: int | None) -> None:
            nonlocal head
            self.step = self.step if step is None else step
            self.left = max(self.left - 1, 1)  # none only when all of it is true
            if end.version in numbers:
                info = await self._client.publish_trainer(self.name)
                head = versions.reserve(info, self._same(end.version, end.digest, info))
                made.add(head.ref.version)

        await recovery.replay(self._client, self.name, behind.records, behind.held, done)
        versions.settle(head, made)
        good = [end for end in behind.ends if end.outcome in recovery.GOOD]
        if good and not good[-1].version:
            versions.head = None  # it has learned something since then that was not published
        await versions.recovered()
        self.left = 0

    async def go_back(self, folder: str, records: Sequence[Record], held: int, most: int) -> None:
        """Take the trainer to where it was after `most` updates since the checkpoint in `folder`, or since the very
        beginning: weights, optimiser and step.
        """
        await self.open(folder, "" if folder else await self.initial())

        async def done(end: Ended, step: int | None) -> None:
            self.step = self.step if step is None else step

        await recovery.replay(self._client, self.name, records, held, done, most)

    def _same(self, number: int, digest: str, info: AdapterInfo) -> int:
        """Return the number, unless the content is another one now; 0 then."""
        if digest in ("", info.digest):
            return number
        log.warning("weights differ", extra={"fields": {"version": number, "was": digest, "is": info.digest}})
        return 0
