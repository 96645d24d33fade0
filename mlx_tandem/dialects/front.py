"""The front of a server, which may learn from its traffic."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_tandem.config import Config
from mlx_tandem.dialects.batches.service import Batches
from mlx_tandem.dialects.idling import Idling
from mlx_tandem.dialects.response_store import ResponseStore
from mlx_tandem.engine.client.process import Launch
from mlx_tandem.engine.client.start_times import KeptTimes, StartProgress
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.front import Front
from mlx_tandem.training.ab.running import AliasTests
from mlx_tandem.training.feedback.completions import Completions
from mlx_tandem.training.feedback.store import FeedbackStore
from mlx_tandem.training.store.on_use import DatabaseOnUse

if TYPE_CHECKING:
    from mlx_tandem.training.cluster.follower import Follower
    from mlx_tandem.training.cluster.leader import Leader
    from mlx_tandem.training.cluster.relay import Relay
    from mlx_tandem.training.cluster.trainer import Trainer
    from mlx_tandem.training.feedback.teacher import Teacher
    from mlx_tandem.training.live.learners import Learners
    from mlx_tandem.training.live.recorder import Collecting
    from mlx_tandem.training.tinker.service import Tinker


class ServerFront(Front):
    """A front with stores of responses and feedback, with A/B tests of aliases, and with learners, Tinker's API and
    other machines if its settings ask for them.

    `learning` is None on a server that does not learn by itself, and `tinker` on one without Tinker's API. At most one
    of `leader`, `follower` and `distant`, which is a trainer for another machine's traffic, is there.
    """

    def __init__(
        self,
        config: Config,
        launch: Launch,
        *,
        on_progress: Callable[[StartProgress], None] | None = None,
        times: KeptTimes | None = None,
    ) -> None:
        """Load the tokenizer and the template, and create the learners. Raises NotFound and ModelError."""
        if config.server.idle_unload_s and (config.cluster.share or config.cluster.connect_to):
            raise InvalidRequest(
                "--idle-unload-s cannot be used with --share-model or --connect-to: other machines use this engine",
                param="idle_unload_s",
            )
        super().__init__(config, launch, on_progress=on_progress, times=times)
        self.responses = ResponseStore()
        self.batches = Batches(config, self.client, self.request_admission)
        self.idling = Idling(self.client, config.server.idle_unload_s, self._is_free, self._save_for_idle)
        """Unloads the engine when nobody uses it, if the settings say so."""
        self.completions = Completions(config.feedback, time.time)
        self.learning: Learners | None = None
        self.tinker: Tinker | None = None
        if config.tinker.enabled:
            from mlx_tandem.training.tinker.service import Tinker

            self.tinker = Tinker(self)
        if config.rl_training.enabled:
            from mlx_tandem.training.live.learners import Learners  # Its imports take time and memory.

            self.learning = Learners(self)
        watch = None if self.learning is None else self.learning.default.learner.folder
        folder = Path(config.checkpointing.checkpoint_dir)
        self._database = DatabaseOnUse(folder, None if watch is None else lambda: watch.database)
        self.feedback = FeedbackStore(config.feedback, self._database)
        self.ab_tests = AliasTests(config, self.models, self._database, time.time)
        self.teacher: Teacher | None = None
        if self.learning is not None and config.feedback.learn:
            from mlx_tandem.training.feedback.teacher import Teacher

            learner = self.learning.of(config.feedback.learn).learner
            self.teacher = Teacher(config, learner, self.feedback, time.time)
        self.leader: Leader | None = None
        self.follower: Follower | None = None
        self.distant: Trainer | None = None
        if config.cluster.share:
            from mlx_tandem.training.cluster.leader import Leader

            self.leader = Leader(self)
        elif config.cluster.connect_to and self.learning is None:
            from mlx_tandem.training.cluster.follower import Follower

            self.follower = Follower(self)
        elif config.cluster.connect_to and self.learning is not None:
            from mlx_tandem.training.cluster.trainer import Trainer

            self.distant = Trainer(self, self.learning.default)

    @property
    def cluster(self) -> Leader | Follower | Trainer | None:
        """The part that this server has among several machines; None on one that has none."""
        return self.leader or self.follower or self.distant

    @property
    def relay(self) -> Relay | None:
        """The way of collected completions to the machine that learns; None on a server that has none."""
        relaying = self.leader or self.follower
        return None if relaying is None else relaying.relay

    @property
    def collecting(self) -> Learners | Relay | None:
        """The learners, or the relay to those of another machine, which collect completions; None if nothing does."""
        return self.relay or self.learning

    def collector(self, adapter: str) -> Collecting | None:
        """Return what collects the completions of an adapter; None if nothing does. Raises NotFound."""
        return self.relay or (None if self.learning is None else self.learning.of(adapter))

    def _is_free(self) -> bool:
        """Return whether neither learning nor a client of Tinker's API needs the engine."""
        if self.tinker is not None and self.tinker.is_used:
            return False
        return self.learning is None or self.learning.is_resting

    async def _save_for_idle(self) -> bool:
        """Save what learning needs to go on in the next engine; return False if that is not possible."""
        return self.learning is None or await self.learning.save_for_idle()

    async def bring_up(self) -> None:
        """Tell a new engine about the adapters, then bring its trainers to the learners' state."""
        if self.tinker is not None:
            self.tinker.start()
        if self.learning is not None:
            await self.learning.read_checkpoints()  # Adapters that are loaded next may not take the checkpoints' names.
            if self.distant is not None:
                await self.distant.join()
        await super().bring_up()
        if self.distant is not None:
            self.distant.count()
        if self.learning is not None:
            await self.learning.bring_up()
        await self.ab_tests.bring_up()
        if self.teacher is not None:
            self.teacher.start()
        if self.cluster is not None:
            await self.cluster.bring_up()
        self.batches.start()
        self.idling.start()

    async def close(self) -> None:
        """End the work for other machines, the learners, the sessions of Tinker's clients, and the worker processes."""
        await self.idling.close()
        await self.batches.close()
        if self.cluster is not None:
            await self.cluster.close()
        if self.tinker is not None:
            await self.tinker.close()
        if self.teacher is not None:
            await self.teacher.close()
        if self.learning is not None:
            await self.learning.close()
        await self._database.close()
        await super().close()

    def check_tinker(self) -> Tinker:
        """Return Tinker's API. Raises InvalidRequest (`learning_disabled`) on a server without it."""
        if self.tinker is None:
            raise InvalidRequest(
                "Tinker's API is switched off: start the server with --enable-tinker", code="learning_disabled"
            )
        return self.tinker

    def check_leader(self) -> Leader:
        """Return the leader's side of this server. Raises InvalidRequest (`learning_disabled`) if it does not lead."""
        if self.leader is None:
            raise InvalidRequest(
                "this server shares nothing with other machines: start it with --share-model", code="learning_disabled"
            )
        return self.leader

    def check_learning(self, what: str, param: str | None = None) -> Learners:
        """Return the learners. Raises InvalidRequest (`learning_disabled`) about `what` on a server without one."""
        if self.learning is None:
            raise InvalidRequest(
                f"{what} needs a server that learns: start it with --enable-rl-training",
                param=param,
                code="learning_disabled",
            )
        return self.learning
