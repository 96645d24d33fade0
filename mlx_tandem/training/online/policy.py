"""The trainer of the served policy: opened where it was left, and taken through the updates since then."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlx_tandem.config import Config
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.engine.learning import LoraOptions, TrainerSpec
from mlx_tandem.training.online import update
from mlx_tandem.training.online.states import Start, States, Way
from mlx_tandem.training.online.versions import RECENT, Version, Versions
from mlx_tandem.training.store.saved import UpdateRow
from mlx_tandem.types import AdapterInfo, AdapterSource

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Behind:
    """What the trainer has to be taken through to be where it was."""

    updates: Sequence[UpdateRow]
    first: Version  # what is served until then
    is_published: bool  # whether the trainer is that now


class PolicyTrainer:
    """The one trainer of the online loop, by its name in the engine. `left` counts updates that have to be computed
    again.
    """

    def __init__(self, config: Config, client: EngineClient, versions: Versions, states: States) -> None:
        self.name = config.rl_training.adapter
        self.step = 0  # of the optimiser
        self.left = 0
        self._config, self._client, self._versions, self._states = config, client, versions, states

    async def begin(self, start: Start, folders: Mapping[str, str], highest: int) -> Behind:
        """Open the trainer as a state has it; without one as the settings say, fresh or from an adapter.

        What was published last is served under its number until `catch_up`. `folders` are those of checkpoints, by
        digest. Numbers up to `highest` were given before.
        """
        way, served = start.way, start.served
        self.left = len(way.updates)
        await self.open("" if served is None else self._states.path(served))
        info = await self._client.publish_trainer(self.name)
        self._versions.count_from(highest)
        number, digest = (min(highest, 1), "") if served is None else (served.version, served.digest)
        first = self._versions.begin(info, folders.get(info.digest, ""), self._same(number, digest, info))
        if way.base is not None and way.base is not served:
            await self.open(self._states.path(way.base))
        return Behind(way.updates, first, way.base is served)

    async def open(self, folder: str) -> None:
        """Open the trainer from a state or a checkpoint; without a folder as the settings say."""
        digest = "" if folder else await self.initial()
        self.step = (await self._client.open_trainer(self.spec(self.name), folder=folder, digest=digest)).step

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
        """Compute the updates since the state again. What the trainer is on the way and at the end is there again under
        the numbers that it had; what comes out differently, as the device may not compute the same twice, under a new
        one. The other versions that states have are there again, too.
        """
        versions, head = self._versions, behind.first
        published = [u.end for u in behind.updates if u.end.version]
        wanted = versions.digests | {end.digest for end in published[-RECENT:]}
        numbers = {end.version for end in published if end.digest in wanted or end is published[-1]}
        others = [s for s in self._states if s.version and s.digest not in versions.digests]
        versions.expect(sorted(numbers | {s.version for s in others}))
        made = {head.ref.version}
        for state in others:
            info = await self._client.load_adapter(AdapterSource(self._states.path(state)), pin=True)
            made.add(versions.reserve(info, self._same(state.version, state.digest, info)).ref.version)
        for each in behind.updates:
            self.step = await update.again(self._client, self.name, await self._states.began(each))
            self.left = max(self.left - 1, 1)  # none only when all of it is true
            if each.end.version in numbers:
                info = await self._client.publish_trainer(self.name)
                head = versions.reserve(info, self._same(each.end.version, each.end.digest, info))
                made.add(head.ref.version)
        versions.settle(head, made)
        if not (behind.updates[-1].end.version if behind.updates else behind.is_published):
            versions.head = None  # it has learned something since then that was not published
        await versions.recovered()
        self.left = 0

    async def follow(self, way: Way) -> None:
        """Take the trainer where a way leads: weights, optimiser and step."""
        await self.open("" if way.base is None else self._states.path(way.base))
        for each in way.updates:
            self.step = await update.again(self._client, self.name, await self._states.began(each))

    def _same(self, number: int, digest: str, info: AdapterInfo) -> int:
        """Return the number, unless the content is another one now; 0 then."""
        if digest in ("", info.digest):
            return number
        log.warning("weights differ", extra={"fields": {"version": number, "was": digest, "is": info.digest}})
        return 0
