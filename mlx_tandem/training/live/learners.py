"""The learners of a server, one for each adapter that it trains. The engine shares learning's time among them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

from mlx_tandem.errors import NotFound
from mlx_tandem.explain import did_you_mean
from mlx_tandem.generation.front import Front
from mlx_tandem.training.live.jobs import Job
from mlx_tandem.training.live.learning import Learning
from mlx_tandem.training.own_settings import own_settings
from mlx_tandem.training.store.shared import SharedDatabase
from mlx_tandem.types import AdapterRef


class Learners:
    """All learners of a server, on the front's event loop. A failure of one does not affect the others."""

    def __init__(self, front: Front, clock: Callable[[], float] = time.time):
        """Create the learners, which `bring_up` starts. `clock` returns the time in Unix seconds."""
        own = own_settings(front.config)
        shared = SharedDatabase(own[0].database)
        self._each = {each.name: Learning(front, each, shared, clock) for each in own}
        front.models.rules.is_checkpoint = self._is_checkpoint

    def __iter__(self) -> Iterator[Learning]:
        """Yield the learners, that of the default adapter first."""
        return iter(self._each.values())

    def __len__(self) -> int:
        """Return the number of learners."""
        return len(self._each)

    @property
    def default(self) -> Learning:
        """The learner of the default adapter."""
        return next(iter(self))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the trained adapters, the default one first."""
        return tuple(self._each)

    def of(self, adapter: str | None, param: str = "adapter") -> Learning:
        """Return the learner of an adapter; None means the default one. Raises NotFound naming `param`."""
        if adapter is None:
            return self.default
        if adapter not in self._each:
            near = did_you_mean(adapter, self._each)
            raise NotFound(
                f"{adapter[:140]!r} is not trained by this server{near}; trained are: {', '.join(self._each)}",
                param=param,
                code="adapter_not_found",
            )
        return self._each[adapter]

    def of_version(self, ref: AdapterRef | None) -> Learning | None:
        """Return the learner that learns from answers of this version, which may be a checkpoint's.

        That is the default one for the base. None: nothing is learned from answers of this version.
        """
        if ref is None:
            return self.default
        named = [each for each in self if each.name == ref.name or each.is_checkpoint(ref.name)]
        return next((each for each in named or self if each.version_of(ref) is not None), None)

    def version_of(self, ref: AdapterRef | None) -> int | None:
        """Return the number of the trained adapter's version with this content; 0 for the base, None for others."""
        found = self.of_version(ref)
        return None if found is None else found.version_of(ref)

    def keeping(self, trajectory: str) -> Learning:
        """Return the learner that knows this trajectory, with a reward or without; the default one if none does."""
        return next((each for each in self if trajectory in each.learner.later), self.default)

    def job(self, id: str) -> Job:
        """Return the job with this id. Raises NotFound."""
        for each in self:
            if id in each.jobs:
                return each.jobs.get(id)
        return self.default.jobs.get(id)

    async def lost(self) -> str:
        """Return what is wrong with the folder to which learning writes; empty: nothing."""
        errors = await asyncio.gather(*(each.learner.folder.error() for each in self))
        return next(filter(None, errors), "")

    # -- life -----------------------------------------------------------------------------------------------------

    async def read_checkpoints(self) -> None:
        """Reserve the names of the checkpoints in all folders."""
        for each in self:
            await each.read_checkpoints()

    async def bring_up(self) -> None:
        """Bring the trainers of a new engine to where the learners are, one after the other."""
        for each in self:
            await each.bring_up()

    @property
    def is_resting(self) -> bool:
        """Whether no learner has anything to do."""
        return all(each.learner.is_resting() for each in self)

    async def save_for_idle(self) -> bool:
        """Save what the next engine needs to go on from here; return False if that was not possible."""
        return all([await each.learner.save_for_idle() for each in self])

    async def settled(self) -> None:
        """Wait until all tasks in the background have ended."""
        for each in self:
            await each.settled()

    async def close(self) -> None:
        """Cancel all jobs and tasks and end the learners. The next start continues from the database.

        All of them are closed before the first error of one is raised.
        """
        ended = await asyncio.gather(*(each.close() for each in self), return_exceptions=True)
        for error in filter(None, ended):
            raise error

    def _is_checkpoint(self, name: str) -> bool:
        return any(each.is_checkpoint(name) for each in self)
