"""Advice: what keeps the online loop from learning, in words, and which setting or request would change that."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mlx_tandem.config import RLTrainingConfig
from mlx_tandem.training.online import rates
from mlx_tandem.training.online.curriculum import MASTERED
from mlx_tandem.training.online.learner import Learner
from mlx_tandem.training.online.serving import Recorded
from mlx_tandem.training.store.records import GOOD
from mlx_tandem.training.trajectories import Counts

LOOKED_AT = 3
"""Updates that all have to say the same before anything is advised."""

AGREEMENTS = 3
"""Measured agreements, the later of which count more, from which on the advice speaks of them."""

STILL = 1 / 25
"""Share of `target_kl` below which an update hardly moves the policy: less than a fifth of the step."""

NEARLY_ALL = 0.9
"""Share of the trajectories since the last update from which on the advice says "nearly everything"."""

FRUITLESS_UPDATES, FRUITLESS_PROMPTS = 30, 60
"""Updates without a gain, and comparisons since the accepted version, after which the advice says that."""

NOISE = 0.25
"""Share of the learning rate that is used from which down on the advice says that gradients do not agree."""


def advice(learner: Learner, training: RLTrainingConfig, recorded: Recorded) -> str:
    """Return what to do about whatever keeps the loop from learning; empty if nothing seems to."""
    spent = _spent(learner, recorded)
    said = [each(learner, training) for each in _EACH if not (spent and each is _equal)]
    return " ".join(text for text in (*said, spent) if text)


def _spent(learner: Learner, recorded: Recorded) -> str:
    """Return what to do where each recorded prompt was answered since the last update, and taught nothing."""
    whole = recorded.prompts
    if not whole or recorded.new or recorded.between or _lately(learner).skipped_groups < whole:
        return ""
    if recorded.solved == whole:
        return f"All {whole} recorded prompts are solved: harder prompts would teach more."
    way = "ask easier prompts as well, score parts of an answer, or begin with examples."
    if recorded.hopeless == whole:
        return f"The answers to each of all {whole} recorded prompts got the same low reward: {way}"
    return f"Of {whole} recorded prompts {recorded.solved} are solved and {recorded.hopeless} hopeless: {way}"


def _nothing_came(learner: Learner, training: RLTrainingConfig) -> str:
    if learner.ledger.buffer.counts.collected or len(learner.ledger.waiting) or learner.ledger.counters.updates:
        return ""
    return (
        'No answer was collected so far: a request needs "collect_trajectory": true, a scoring_function, the model '
        f"{training.adapter} and a temperature above 0."
    )


def _stale(learner: Learner, training: RLTrainingConfig) -> str:
    buffer, lately = learner.ledger.buffer, _lately(learner).dropped_stale
    count = buffer.counts.dropped_stale
    if not count:
        return ""
    most = lately and lately >= NEARLY_ALL * (lately + len(buffer))
    return ("Nearly everything that came since the last update was too old. " if most else "") + (
        f"{count} trajectories were not learned from because the versions that made them were "
        f"more than max_staleness = {training.max_staleness} away from the one that was trained: ask for "
        f"{training.adapter} itself rather than for the base or an older version, raise "
        "rl_training.max_staleness, or raise rl_training.update_frequency, so that there are fewer versions."
    )


def _overflow(learner: Learner, training: RLTrainingConfig) -> str:
    count = learner.ledger.buffer.counts.dropped_overflow
    if not count:
        return ""
    return (
        f"{count} trajectories were not learned from because the buffer was full: raise "
        "rl_training.trajectory_buffer_size or learning's share of the device, or collect fewer."
    )


def _no_reward(learner: Learner, training: RLTrainingConfig) -> str:
    count = learner.ledger.buffer.counts.dropped_no_reward
    if not count:
        return ""
    return (
        f"{count} trajectories were not learned from because no reward came for them: send one "
        "for each, also after a failure, or raise rl_training.open_trajectories or open_trajectory_s."
    )


def _equal(learner: Learner, training: RLTrainingConfig) -> str:
    """Return what to do where all answers of most groups get the same reward, since the beginning or lately."""
    counts, lately = learner.ledger.buffer.counts, _lately(learner).skipped_groups
    if counts.skipped_groups > 2 * learner.ledger.counters.updates:
        said = f"{counts.skipped_groups} groups taught nothing, since"
    elif lately > training.update_frequency:
        said = f"{lately} groups since the last update taught nothing, since"
    else:
        return ""
    if _mean_reward(learner) >= MASTERED:
        return f"{said} nearly all answers are right: harder prompts would teach more."
    return (
        f"{said} all answers of each got the same reward: ask "
        "prompts that the adapter answers right sometimes, not always or never, or score parts of an answer."
    )


def _alike(learner: Learner, training: RLTrainingConfig) -> str:
    alike = learner.ledger.buffer.alike
    if alike <= training.update_frequency:
        return ""
    return (
        f"{alike} answers to different prompts wait, since all of them got the same reward and are compared with "
        "one another: ask prompts that the adapter answers right sometimes, or score parts of an answer."
    )


def _waiting(learner: Learner, training: RLTrainingConfig) -> str:
    buffer = learner.ledger.buffer
    waiting = len(buffer) - buffer.usable - buffer.alike
    if waiting <= training.update_frequency or buffer.usable >= training.update_frequency:
        return ""
    return (
        f"{waiting} answers wait for others to the same prompts: ask each prompt with n, or send the missing rewards "
        "of their groups."
    )


def _still(learner: Learner, training: RLTrainingConfig) -> str:
    """Return what to do where updates hardly move the policy."""
    last = list(learner.history)[-LOOKED_AT:]
    if len(last) < LOOKED_AT or not all(r.outcome in GOOD for r in last):
        return ""
    if not any(r.learning_rate for r in last):
        return "Nothing is learned because the learning rate is 0: set rl_training.learning_rate or decay_steps."
    moved = sorted(r.kl for r in last)[LOOKED_AT // 2]
    if moved >= STILL * training.target_kl:
        return ""
    said = f"The last {LOOKED_AT} updates moved the policy by {moved:.1g} nats each, which teaches hardly anything: "
    rate = last[-1].learning_rate
    if training.learning_rate != "auto":
        nearer = rate * math.sqrt(training.target_kl / moved) if moved else rates.MOST
        return said + (
            "set rl_training.learning_rate to auto"
            + (f", or to about {min(nearer, rates.MOST):.1g}." if nearer > rate else ".")
        )
    if rate < rates.MOST / 2:
        return ""  # it still rises
    return said + "the learning rate is the highest already; raise rl_training.lora_alpha or lora_rank."


def _noise(learner: Learner, training: RLTrainingConfig) -> str:
    """Return what to do where the gradients of updates do not agree."""
    pace = learner.ledger.counters.course.pace
    if training.learning_rate != "auto" or pace.agreements < AGREEMENTS or pace.share > NOISE:
        return ""
    return (
        f"The gradients of the last updates do not agree (mean cosine {pace.agreed / pace.agreements:.2f}), as if "
        f"rewards were noise, so that only {pace.share:.0%} of the learning rate that was found is used: look at how "
        "answers are scored, or raise rl_training.update_frequency, so that each update learns from more answers."
    )


def _taken_back(learner: Learner, training: RLTrainingConfig) -> str:
    course, last = learner.ledger.counters.course, learner.history[-1] if learner.history else None
    if course.in_a_row < LOOKED_AT or last is None:
        return ""
    how = "set rl_training.learning_rate to auto" if training.learning_rate != "auto" else "lower rl_training.target_kl"
    reason = f" ({last.reason})" if last.reason else ""
    return f"{course.in_a_row} updates in a row were taken back{reason}: {how}, or look at how answers are scored."


def _fruitless(learner: Learner, training: RLTrainingConfig) -> str:
    """Return what to do where versions were compared and none was shown to be better."""
    counters = learner.ledger.counters
    trial = counters.trial
    if trial.gained or counters.updates < FRUITLESS_UPDATES or trial.comparison.count < FRUITLESS_PROMPTS:
        return ""
    return (
        f"{counters.updates} updates gained nothing that can be shown: later versions got "
        f"{trial.comparison.mean:+.2g} on {trial.comparison.count} prompts. Ask easier prompts first, score parts of "
        "an answer, or begin with examples."
    )


_EACH: Sequence[Callable[[Learner, RLTrainingConfig], str]] = (
    _nothing_came, _still, _noise, _taken_back, _stale, _overflow, _no_reward, _equal, _alike, _waiting, _fruitless,
)  # fmt: skip


def _lately(learner: Learner) -> Counts:
    """Return what was counted since the last update, or since the start if that was later."""
    return learner.ledger.buffer.counts.since(learner.ledger.told)


def _mean_reward(learner: Learner) -> float:
    """Return the mean reward of live answers of the newest version that has any; 0: nobody knows."""
    means = learner.judging.live.means
    return means[max(means)].mean if means else 0.0
