"""Saving the trainer: states, checkpoints, those that the guard needs, what they are worth, and which of them go."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from mlx_tandem.config import Config
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.errors import TandemError
from mlx_tandem.files import StorageError
from mlx_tandem.training.online.judging import Judging
from mlx_tandem.training.online.ledger import Ledger
from mlx_tandem.training.online.policy import PolicyTrainer
from mlx_tandem.training.online.serving import Serving
from mlx_tandem.training.online.states import States
from mlx_tandem.training.online.trial import Reference
from mlx_tandem.training.online.versions import Versions
from mlx_tandem.training.store.checkpoints import BEST, CheckpointInfo
from mlx_tandem.training.store.manifests import Manifest
from mlx_tandem.types import AdapterSource

log = logging.getLogger(__name__)

WORTH = 16
"""A checkpoint has a reward once its version has answered one prompt for so many completions of an update."""


class Saver:
    """Used by one task at a time, like the learner that it belongs to."""

    def __init__(
        self,
        config: Config,
        client: EngineClient,
        serving: Serving,
        ledger: Ledger,
        versions: Versions,
        trainer: PolicyTrainer,
        judging: Judging,
        states: States,
    ) -> None:
        self.saved = ""
        """The checkpoint that has exactly the trainer's state; empty: none has."""
        self._training = config.rl_training
        self._client, self._serving = client, serving
        self._ledger, self._versions, self._trainer, self._judging = ledger, versions, trainer, judging
        self._states = states

    @property
    def is_saved(self) -> bool:
        """Whether a checkpoint has exactly the trainer's state."""
        return any(info.name == self.saved for info in self._ledger.listed)

    async def keep(self) -> None:
        """Save the trainer as the state from which the next engine goes on. Raises StorageError, EngineError."""
        head, began = self._versions.head, time.monotonic()
        number, digest = (0, "") if head is None else (head.ref.version, head.ref.digest)
        self._ledger.counters.last_version = max(self._ledger.counters.last_version, number)
        folder = await self._states.new()
        await self._client.save_trainer(self._trainer.name, folder)
        await self._states.commit(folder, self._trainer.step, number, digest, began)

    async def try_to_keep(self) -> None:
        """Save the trainer as a state if that is possible; else more updates are computed again by the next engine."""
        try:
            await self.keep()
        except TandemError as e:
            log.error("state not saved", extra={"fields": {"error": e.message}})

    async def checkpoint(self, name: str | None, *, guards: bool = False) -> str:
        """Save the trainer as it is and return the name. Raises Conflict, StorageError, EngineError.

        Without a name, a checkpoint that has the very same state becomes the newest again, and nothing is saved twice.
        One that is made for the guard goes when the guard needs it no more.
        """
        ledger, versions, head = self._ledger, self._versions, self._versions.head
        info = await self._client.publish_trainer(self._trainer.name) if head is None else head.info
        number = 0 if head is None else head.ref.version
        same = name is None and any(i.name == self.saved and (guards or not i.guards) for i in ledger.listed)
        chosen = self.saved if same else name
        if chosen is None:
            chosen = await asyncio.to_thread(ledger.checkpoints.free_name, self._trainer.step, guards=guards)
        reward = self._judging.validation.present if self._judging.validation.prompts else self._worth(number)
        if number and self._judging.compares:
            ledger.counters.trial.propose(Reference(chosen, number, info.digest))
        manifest = Manifest(
            name=chosen,
            step=self._trainer.step,
            version=number,
            digest=info.digest,
            reward=reward,
            pinned=name is not None,
        )
        ledger.counters.means = self._judging.live.means
        write = None if same else (lambda folder: self._client.save_trainer(self._trainer.name, folder))
        await ledger.save(manifest, write, guards=guards and not same)
        versions.saved(info, str(ledger.checkpoints.folder / chosen), chosen)
        self.saved = chosen
        await self._prune()
        return chosen

    async def propose_if_due(self) -> bool:
        """Save the version that everything is compared with at first, or the one that may be accepted next, if it is
        time for it; return whether one was saved. Nothing may have been taken from the buffer for an update.
        """
        if not self._judging.compares or self._versions.head is None or not self._ledger.counters.trial.wants_candidate:
            return False
        await self.checkpoint(None, guards=True)
        return True

    async def judge_checkpoints(self) -> bool:
        """Note what checkpoints are worth whose versions had too few answers when they were saved and have enough now;
        return whether there was one.
        """
        if self._judging.validation.prompts:  # they are judged before they are published
            return False
        judged = False
        try:
            for info in self._ledger.listed:
                reward = self._worth(info.version)
                if info.reward is None and info.name != BEST and reward is not None:
                    await self._judge(info.name, reward)
                    judged = True
        except StorageError as e:  # the next answers are another occasion
            log.warning("checkpoint not judged", extra={"fields": {"error": e.message}})
        if judged:
            self._serving.relist()
        return judged

    async def _judge(self, name: str, reward: float) -> None:
        """Note what a checkpoint is worth. Raises StorageError."""
        await asyncio.to_thread(self._ledger.checkpoints.judge, name, reward)
        self._ledger.listed = await asyncio.to_thread(self._ledger.checkpoints.list)

    async def _remove(self, infos: Sequence[CheckpointInfo]) -> None:
        """Remove these checkpoints. Raises StorageError."""
        try:
            for info in infos:
                await asyncio.to_thread(self._ledger.checkpoints.delete, info.name)
        finally:
            self._ledger.listed = await asyncio.to_thread(self._ledger.checkpoints.list)

    def _worth(self, version: int) -> float | None:
        """Return the mean reward of a version's live answers; None: to too few prompts."""
        mean = self._judging.live.means.get(version)
        return mean.mean if mean is not None and mean.count * WORTH >= self._training.update_frequency else None

    async def _prune(self) -> None:
        """Remove the checkpoints that are not to be kept, and the versions that only they kept; versions of theirs that
        are kept for another reason stay in the engine's memory. What cannot be removed now goes with the next ones.
        """
        ledger, folder = self._ledger, self._ledger.checkpoints.folder
        going = ledger.checkpoints.surplus(ledger.listed, ledger.counters.trial.checkpoints)
        if not going:
            return
        left = {info.digest: str(folder / info.name) for info in ledger.listed if info not in going}
        kept = self.kept([info for info in ledger.listed if info not in going])
        try:
            for info in going:
                path = str(folder / info.name)
                if info.digest not in left and self._versions.in_folder(path, kept):
                    await self._client.load_adapter(AdapterSource(path), pin=True)
            await self._remove(going)
        except TandemError as e:
            log.warning("checkpoints not removed", extra={"fields": {"error": e.message}})
        there = {info.name for info in ledger.listed}
        for info in going:
            if info.name not in there:
                self._versions.removed(str(folder / info.name), left)
        await self._versions.retire_except(self.kept(ledger.listed))
        self._serving.relist()

    def kept(self, checkpoints: Sequence[CheckpointInfo]) -> set[int]:
        """Return the numbers of the versions that go on existing when there are these checkpoints."""
        accepted = self._judging.accepted
        return self._versions.kept(checkpoints, () if accepted is None else (accepted.version,))
