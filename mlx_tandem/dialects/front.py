"""The front of a server, which may learn from its traffic."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mlx_tandem.config import Config
from mlx_tandem.dialects.response_store import ResponseStore
from mlx_tandem.engine.client.process import Launch
from mlx_tandem.engine.client.start_times import KeptTimes, StartProgress
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.front import Front
from mlx_tandem.training.feedback.completions import Completions
from mlx_tandem.training.feedback.store import FeedbackStore

if TYPE_CHECKING:
    from mlx_tandem.training.feedback.teacher import Teacher
    from mlx_tandem.training.live.learning import Learning
    from mlx_tandem.training.tinker.service import Tinker


class ServerFront(Front):
    """A front with stores of responses and feedback, and with a learner and Tinker's API if its settings ask for them.

    `learning` is None on a server that does not learn by itself, and `tinker` on one without Tinker's API.
    """

    def __init__(
        self,
        config: Config,
        launch: Launch,
        *,
        on_progress: Callable[[StartProgress], None] | None = None,
        times: KeptTimes | None = None,
    ) -> None:
        """Load the tokenizer and the template, and create the learner. Raises NotFound and ModelError."""
        super().__init__(config, launch, on_progress=on_progress, times=times)
        self.responses = ResponseStore()
        self.completions = Completions(config.feedback, time.time)
        self.learning: Learning | None = None
        self.tinker: Tinker | None = None
        if config.tinker.enabled:
            from mlx_tandem.training.tinker.service import Tinker

            self.tinker = Tinker(self)
        if config.rl_training.enabled:
            from mlx_tandem.training.live.learning import Learning  # Its imports take time and memory.

            self.learning = Learning(self)
        watch = None if self.learning is None else self.learning.learner.folder
        self.feedback = FeedbackStore(config, None if watch is None else lambda: watch.database)
        self.teacher: Teacher | None = None
        if self.learning is not None and config.feedback.learn:
            from mlx_tandem.training.feedback.teacher import Teacher

            self.teacher = Teacher(config, self.learning.learner, self.feedback, time.time)

    async def bring_up(self) -> None:
        """Tell a new engine about the adapters, then bring its trainer to the learner's state."""
        if self.tinker is not None:
            self.tinker.start()
        if self.learning is None:
            await super().bring_up()
            return
        await self.learning.read_checkpoints()  # Adapters that are loaded next may not take the checkpoints' names.
        await super().bring_up()
        await self.learning.bring_up()
        if self.teacher is not None:
            self.teacher.start()

    async def close(self) -> None:
        """End the learner, the sessions of Tinker's clients, and the worker processes."""
        if self.tinker is not None:
            await self.tinker.close()
        if self.teacher is not None:
            await self.teacher.close()
        if self.learning is not None:
            await self.learning.close()
        await self.feedback.close()
        await super().close()

    def check_tinker(self) -> Tinker:
        """Return Tinker's API. Raises InvalidRequest (`learning_disabled`) on a server without it."""
        if self.tinker is None:
            raise InvalidRequest(
                "Tinker's API is switched off: start the server with --enable-tinker", code="learning_disabled"
            )
        return self.tinker

    def check_learning(self, what: str, param: str | None = None) -> Learning:
        """Return the learner. Raises InvalidRequest (`learning_disabled`) about `what` on a server without one."""
        if self.learning is None:
            raise InvalidRequest(
                f"{what} needs a server that learns: start it with --enable-rl-training",
                param=param,
                code="learning_disabled",
            )
        return self.learning
