"""The front of a server, which may learn from its traffic."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mlx_tandem.config import Config
from mlx_tandem.dialects.response_store import ResponseStore
from mlx_tandem.engine.client.process import Launch
from mlx_tandem.engine.client.start_times import KeptTimes, StartProgress
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.front import Front

if TYPE_CHECKING:
    from mlx_tandem.training.live.learning import Learning


class ServerFront(Front):
    """A front with a store of responses, and with a learner if its settings ask for one.

    `learning` is None on a server that does not learn.
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
        self.learning: Learning | None = None
        if config.rl_training.enabled:
            from mlx_tandem.training.live.learning import Learning  # Its imports take time and memory.

            self.learning = Learning(self)

    async def bring_up(self) -> None:
        """Tell a new engine about the adapters, then bring its trainer to the learner's state."""
        if self.learning is None:
            await super().bring_up()
            return
        await self.learning.read_checkpoints()  # Adapters that are loaded next may not take the checkpoints' names.
        await super().bring_up()
        await self.learning.bring_up()

    async def close(self) -> None:
        """End the learner and the worker processes."""
        if self.learning is not None:
            await self.learning.close()
        await super().close()

    def check_learning(self, what: str, param: str | None = None) -> Learning:
        """Return the learner. Raises InvalidRequest (`learning_disabled`) about `what` on a server without one."""
        if self.learning is None:
            raise InvalidRequest(
                f"{what} needs a server that learns: start it with --enable-rl-training",
                param=param,
                code="learning_disabled",
            )
        return self.learning
