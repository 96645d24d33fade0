"""The status of the online loop, and in words what keeps it from learning."""

from __future__ import annotations

from datetime import UTC, datetime

from mlx_tandem.config import Config, RLTrainingConfig
from mlx_tandem.training.online.learner import Learner
from mlx_tandem.training.online.loop import Loop
from mlx_tandem.training.online.serving import TrainingStatus
from mlx_tandem.types import AdapterRef


def of(config: Config, learner: Learner, loop: Loop, current: AdapterRef | None, works: bool) -> TrainingStatus:
    """Return how the loop is doing now. `current` is the version that is served, `works` whether somebody waits."""
    ledger, training = learner.ledger, config.rl_training
    counters, counts = ledger.counters, ledger.buffer.counts
    last = learner.history[-1] if learner.history else None
    when = counters.last_update
    return TrainingStatus(
        training_enabled=training.enabled,
        mode=config.engine.duty.mode,
        running=loop.running,
        busy=loop.running and (bool(works) or loop.has_enough),
        reason=loop.reason,
        recovering=learner.trainer.left,
        current_lora="" if current is None else current.label,
        version=0 if current is None else current.version,
        step=learner.trainer.step,
        updates=counters.updates,
        trajectories_collected=counts.collected - counts.drawn,
        siblings_drawn=counts.drawn,
        buffered=len(ledger.buffer),
        dropped_stale=counts.dropped_stale,
        dropped_duplicate=counts.dropped_duplicate,
        dropped_overflow=counts.dropped_overflow,
        dropped_no_reward=counts.dropped_no_reward,
        open_trajectories=len(ledger.waiting),
        skipped_groups=counts.skipped_groups,
        advice=_advice(learner, training),
        last_update=None if when is None else datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        loss=0.0 if last is None else last.loss,
        kl=0.0 if last is None else last.kl,
        mean_reward=0.0 if last is None else last.mean_reward,
        grad_norm=0.0 if last is None else last.grad_norm,
        learning_rate=counters.course.learning_rate,
        target_kl=training.target_kl if counters.course.rate == "auto" else 0.0,
        rollbacks=counters.course.rollbacks,
        accepted=0 if counters.trial.accepted is None else counters.trial.accepted.version,
        compared=counters.trial.comparison.count,
        difference=counters.trial.comparison.mean,
        alarm=learner.judging.live.alarm,
        last_verdict="ok" if last is None else last.verdict,
        checkpoint_saves=counters.checkpoint_saves,
        publishes=counters.publishes,
        available_checkpoints=tuple(info.name for info in ledger.listed),
        serving_ms=learner.client.stats.serving_ms,
        training_ms=learner.client.stats.training_ms,
    )


def _advice(learner: Learner, training: RLTrainingConfig) -> str:
    """Return what to do about trajectories that are dropped; empty: none are."""
    counts = learner.ledger.buffer.counts
    said = []
    if counts.dropped_stale:
        said.append(
            f"{counts.dropped_stale} trajectories were not learned from because the versions that made them were "
            f"more than max_staleness = {training.max_staleness} away from the one that was trained: ask for "
            f"{training.adapter} itself rather than for the base or an older version, raise "
            "rl_training.max_staleness, or raise rl_training.update_frequency, so that there are fewer versions."
        )
    if counts.dropped_overflow:
        said.append(
            f"{counts.dropped_overflow} trajectories were not learned from because the buffer was full: raise "
            "rl_training.trajectory_buffer_size or learning's share of the device, or collect fewer."
        )
    if counts.dropped_no_reward:
        said.append(
            f"{counts.dropped_no_reward} trajectories were not learned from because no reward came for them: send one "
            "for each, also after a failure, or raise rl_training.open_trajectories or open_trajectory_s."
        )
    if counts.skipped_groups > 2 * learner.ledger.counters.updates:
        said.append(
            f"{counts.skipped_groups} groups taught nothing, since all answers of each got the same reward: ask "
            "prompts that the adapter answers right sometimes, not always or never, or score parts of an answer."
        )
    alike = learner.ledger.buffer.alike
    if alike > training.update_frequency:
        said.append(
            f"{alike} answers to different prompts wait, since all of them got the same reward and are compared with "
            "one another: ask prompts that the adapter answers right sometimes, or score parts of an answer."
        )
    return " ".join(said)
