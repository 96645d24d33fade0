"""Updates that learn from something else than trajectories, such as feedback: their weights come from a lesson."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mlx_tandem.config import RLTrainingConfig
from mlx_tandem.engine.learning import Batch, Datum, LossConfig
from mlx_tandem.training.online import update
from mlx_tandem.training.online.learner import Learner
from mlx_tandem.training.online.serving import UpdateReport
from mlx_tandem.training.online.update import Pending
from mlx_tandem.training.store.database import Statement
from mlx_tandem.training.store.records import Began, Taught

Logprobs = Sequence[Sequence[float]]
"""The logprobs of each token of each sequence's completion."""


class Lesson(Protocol):
    """What one update learns."""

    @property
    def compared(self) -> Sequence[Datum]:
        """The sequences whose logprobs decide on the weights."""
        ...

    def weighed(self, policy: Logprobs, reference: Logprobs) -> tuple[Sequence[Datum], Taught]:
        """Return the data of the update. The logprobs are those of `compared`, by the trainer and by the reference.

        The gradient of the update is that of the logprobs of the data's completions times their weights.
        """
        ...


async def teach(
    learner: Learner, config: RLTrainingConfig, lesson: Lesson, learning_rate: float, noted: Sequence[Statement]
) -> UpdateReport:
    """Do one update from a lesson, as `Learner.learn` does from groups. `noted` is written with the update's beginning.

    Raises EngineError and StorageError; what has begun is pending then, and `Learner.finish` goes on with it.
    """
    micro, trainer = learner.client.check_ready().micro_batch_tokens, learner.trainer
    policy: Logprobs = ()
    reference: Logprobs = ()
    if lesson.compared:
        asked = Batch(trainer.name, tuple(lesson.compared), LossConfig("cross_entropy"))
        (found,) = await learner.client.run_pass([asked], forward_only=True, micro_batch_tokens=micro)
        policy, reference = found.logprobs, await learner.reference.logprobs(lesson.compared, micro)
    data, taught = lesson.weighed(policy, reference)
    step = trainer.step + 1
    began = Began(
        step=step,
        trajectories=(),
        batches=(Batch(trainer.name, tuple(data), LossConfig("cross_entropy")),),
        adam=update.adam(config, step, learning_rate * learner.ledger.counters.course.rate_scale),
        micro_batch_tokens=micro,
        taught=taught,
    )
    learner.ledger.begin(Pending(began, (), learner.ledger.untold()))
    learner.ledger.put(*noted)
    return await learner.finish()
