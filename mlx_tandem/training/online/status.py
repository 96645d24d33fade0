"""The status of the online loop."""

from __future__ import annotations

from datetime import UTC, datetime

from mlx_tandem.config import Config
from mlx_tandem.training.online.advice import advice
from mlx_tandem.training.online.learner import Learner
from mlx_tandem.training.online.loop import Loop
from mlx_tandem.training.online.serving import Recorded, TrainingStatus
from mlx_tandem.types import AdapterRef


def of(
    config: Config, learner: Learner, loop: Loop, current: AdapterRef | None, works: bool, recorded: Recorded
) -> TrainingStatus:
    """Return how the loop is doing now.

    `current` is the version that is served, `works` whether somebody waits, and `recorded` what is known of prompts.
    """
    ledger, training = learner.ledger, config.rl_training
    counters, counts = ledger.counters, ledger.buffer.counts
    last = learner.history[-1] if learner.history else None
    when = counters.last_update
    done, left = _progress(learner, training.adapter)
    return TrainingStatus(
        training_enabled=training.enabled,
        mode=config.engine.duty.mode,
        running=loop.running,
        busy=loop.running and (bool(works) or loop.has_enough),
        update_done=done,
        update_left_s=left,
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
        recorded_prompts=recorded,
        advice=advice(learner, training, recorded),
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
        gain=counters.trial.gained if learner.judging.compares else None,
        alarm=learner.judging.live.alarm,
        last_verdict="ok" if last is None else last.verdict,
        checkpoint_saves=counters.checkpoint_saves,
        publishes=counters.publishes,
        available_checkpoints=tuple(info.name for info in ledger.listed),
        serving_ms=learner.client.stats.serving_ms,
        training_ms=learner.client.stats.training_ms,
    )


def _progress(learner: Learner, trainer: str) -> tuple[float | None, float | None]:
    """Return the share of the update under way that is done, and the seconds that are left; None without an update."""
    pending = learner.ledger.pending
    if pending is None or pending.progress is None:
        return None, None
    of_pass = next((p.done for p in learner.client.stats.passes if p.trainer == trainer), 0.0)
    share = pending.progress.share(of_pass)
    return share, pending.progress.seconds_left(share)
