"""One update on the trainer: gradients, the verdict over the sampler, the step, and whether it went too far.

Everything that an update depends on is in its Began record, so that it can be computed again with the same result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import Struct
from msgspec.structs import replace

from mlx_tandem.config import RLTrainingConfig
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.engine.learning import AdamParams, Batch, BatchResult, StepDone
from mlx_tandem.training.online import advantages, guard
from mlx_tandem.training.online.progress import Progress
from mlx_tandem.training.online.serving import Outcome, UpdateReport
from mlx_tandem.training.schedules import Schedule
from mlx_tandem.training.store.records import Began
from mlx_tandem.training.trajectories import Counts, Trajectory

GUARD_TOKENS = 1024
"""The movement of the policy is measured on about so many tokens of an update."""


@dataclass
class Pending:
    """An update that has begun and whose end is not written down yet."""

    began: Began
    trajectories: Sequence[Trajectory]  # as far as they are known
    left_out: Counts = field(default_factory=Counts)  # what was dropped since the update before this one
    attempts: int = 0
    written: bool = True  # whether the database has `began`, which waits for what the engine has to compute first
    progress: Progress | None = None  # of the attempt under way


class Finding(Struct, frozen=True):
    """How an attempt went. `outcome` None: the step is done and can still be taken back; else nothing was changed."""

    outcome: Outcome | None
    reason: str = ""
    verdict: guard.Verdict = "ok"
    step: int = 0
    loss: float = math.nan
    grad_norm: float = 0.0
    agreement: float | None = None
    kl: float = 0.0
    kl_reference: float = 0.0
    mismatch_k3: float = 0.0


def adam(config: RLTrainingConfig, step: int, rate: float) -> AdamParams:
    """Return the numbers of the optimiser's step `step`, from 1 on. `rate` is the learning rate before its schedule."""
    schedule = Schedule(config.schedule, config.warmup_steps, config.decay_steps, config.rate_floor)
    return AdamParams(
        learning_rate=rate * schedule.share(step),
        beta1=config.beta1,
        beta2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        grad_norm=config.max_grad_norm,
    )


async def gradients(
    client: EngineClient, began: Began, progress: Progress, first: Sequence[BatchResult] = ()
) -> list[BatchResult]:
    """Run the passes of one step, one batch after the other. Raises what the engine raises.

    `first` are the results of the update's first step; empty: this is the first.
    """
    batches = [_anchored(b, r) for b, r in zip(began.batches, first, strict=True)] if first else began.batches
    results: list[BatchResult] = []
    for batch in batches:
        with progress.passing(batch.data, gradients=True):
            results += await client.run_pass([batch], micro_batch_tokens=began.micro_batch_tokens)
    return results


def _anchored(batch: Batch, first: BatchResult) -> Batch:
    """Return a batch for the later steps of its update, whose anchor is the policy of the first one."""
    data = []
    for datum, logprobs in zip(batch.data, first.logprobs, strict=True):
        inside = [math.isfinite(x) for x in logprobs]  # what a truncated draw could take then
        before = tuple(x if ok else 0.0 for x, ok in zip(logprobs, inside, strict=True))
        mask = tuple(int(on and ok) for on, ok in zip(datum.trained, inside, strict=True))
        drawn = before if datum.logprobs is None else datum.logprobs
        data.append(replace(datum, logprobs=drawn, anchor=before if batch.loss.decoupled else (), mask=mask))
    return Batch(batch.trainer, tuple(data), batch.loss)


async def further(
    client: EngineClient, began: Began, progress: Progress, first: Sequence[BatchResult], done: StepDone
) -> StepDone:
    """Take the steps of an update after its first, which is `done`; end at gradients that are not finite."""
    for count in range(2, began.steps + 1):
        if done.finite:
            await gradients(client, began, progress, first)
            done = await client.step_trainer(began.batches[0].trainer, began.adam, more=count < began.steps)
    return done


async def again(client: EngineClient, trainer: str, began: Began) -> int:
    """Compute an update whose end is known to have been good, and return the optimiser's step."""
    progress = Progress(began, ())
    results = await gradients(client, began, progress)
    done = await client.step_trainer(trainer, began.adam, more=began.steps > 1)
    done = await further(client, began, progress, results, done)
    await client.settle_trainer(trainer, keep=True)
    return done.step


async def attempt(client: EngineClient, pending: Pending, version: int, config: RLTrainingConfig) -> Finding:
    """Learn, up to a step that can still be taken back. `version`: of the trainer's weights, as served; 0: they are
    not. Raises what the engine raises; the trainer is then as the engine left it.
    """
    began = pending.began
    guarded = [[b.data[i] for i in chosen] for b, chosen in zip(began.batches, _guarded(began), strict=True)]
    progress = pending.progress = Progress(began, guarded)
    results = await gradients(client, began, progress)
    k3 = _mismatch(pending, results, version)
    finding = Finding(
        None,
        verdict=guard.verdict(k3, config.refuse_mismatch),
        step=began.step - 1,
        loss=sum(r.loss for r in results),
        kl_reference=_mean([r.kl_reference for r in results], [r.tokens for r in results]),
        mismatch_k3=k3 or 0.0,
    )
    if finding.verdict == "refused":
        reason = f"sampler and trainer disagree by {k3:.3g} nats"
        return await _take_back(client, config.adapter, replace(finding, outcome="refused", reason=reason))
    if not math.isfinite(finding.loss):
        reason = "the loss is not finite"
        return await _take_back(client, config.adapter, replace(finding, outcome="rolled_back", reason=reason))
    done = await client.step_trainer(config.adapter, began.adam, more=began.steps > 1)
    # Further steps have the same answers, whose gradients agree also where rewards are noise.
    finding = replace(finding, agreement=done.agreement)
    done = await further(client, began, progress, results, done)
    finding = replace(finding, grad_norm=done.grad_norm, step=done.step)
    reason = "the gradients are not finite"
    if done.finite:
        moved = await _moved(client, began, results, progress)
        finding = replace(finding, kl=moved)
        if moved <= config.guard_kl:
            return finding
        reason = f"the policy moved by {moved:.3g} nats"
    finding = replace(finding, outcome="rolled_back", reason=reason, step=began.step - 1)
    return await _take_back(client, config.adapter, finding)


def report(pending: Pending, finding: Finding, seconds: float, validation: float | None) -> UpdateReport:
    """Return the report of an update that has come to its end, and was not published so far."""
    rewards = [t.reward for t in pending.trajectories]
    taught = pending.began.taught
    return UpdateReport(
        step=finding.step,
        version=0,
        trajectories=len(pending.began.trajectories),
        tokens=sum(sum(d.trained) for b in pending.began.batches for d in b.data),
        groups=len(advantages.by_group(pending.trajectories)),
        skipped_groups=pending.left_out.skipped_groups,
        dropped={reason: count for reason, count in pending.left_out.dropped.items() if count},
        mean_reward=math.fsum(rewards) / len(rewards) if rewards else 0.0,
        loss=_finite(finding.loss if taught is None or taught.loss is None else taught.loss),
        grad_norm=_finite(finding.grad_norm),
        kl=_finite(finding.kl),
        kl_reference=_finite(finding.kl_reference),
        mismatch_k3=_finite(finding.mismatch_k3),
        verdict=finding.verdict,
        outcome=finding.outcome or "kept",
        reason=finding.reason,
        seconds=seconds,
        validation=validation,
        learning_rate=pending.began.adam.learning_rate,
        agreement=finding.agreement,
        feedback=0 if taught is None else taught.feedback,
        replayed=0 if taught is None else taught.replayed,
    )


def _finite(x: float) -> float:
    """Return a number that JSON has, 0 for others; the report's reason says what was wrong."""
    return x if math.isfinite(x) else 0.0


async def _take_back(client: EngineClient, trainer: str, finding: Finding) -> Finding:
    await client.settle_trainer(trainer, keep=False)
    return finding


def _mismatch(pending: Pending, results: Sequence[BatchResult], version: int) -> float | None:
    known = {t.id: t for t in pending.trajectories}
    if not known:
        return None
    own = [logprobs for r in results for logprobs in r.model_logprobs]
    pairs = [(known[i], o) for i, o in zip(pending.began.trajectories, own, strict=True) if i in known]
    return guard.mismatch([t for t, _ in pairs], [o for _, o in pairs], version) if version else None


def _guarded(began: Began) -> list[list[int]]:
    """Return the numbers of the sequences of each batch that movement is measured on, about GUARD_TOKENS in all.

    They are spread over the update, since answers to one prompt move alike. There is at least one; a batch may have
    none.
    """
    sizes = [len(datum.tokens) for batch in began.batches for datum in batch.data]
    count = min(max(len(sizes) * GUARD_TOKENS // max(sum(sizes), 1), 1), len(sizes))
    chosen = {i * len(sizes) // count for i in range(count)}
    found: list[list[int]] = []
    first = 0
    for batch in began.batches:
        found.append([i for i in range(len(batch.data)) if first + i in chosen])
        first += len(batch.data)
    return found


async def _moved(client: EngineClient, began: Began, results: Sequence[BatchResult], progress: Progress) -> float:
    """Return how far the step that was just done moved the policy, on some sequences of the update."""
    before: list[tuple[float, ...]] = []
    after: list[tuple[float, ...]] = []
    for batch, chosen, result in zip(began.batches, _guarded(began), results, strict=True):
        if chosen:
            data = tuple(batch.data[i] for i in chosen)
            part = Batch(batch.trainer, data, replace(batch.loss, kl_coef=0.0))
            with progress.passing(data, gradients=False):
                (now,) = await client.run_pass([part], forward_only=True, micro_batch_tokens=began.micro_batch_tokens)
            trained = [datum.trained for datum in part.data]
            before += map(_chosen, [result.model_logprobs[i] for i in chosen], trained)
            after += map(_chosen, now.model_logprobs, trained)
    return guard.movement(before, after)


def _chosen(values: Sequence[float], chosen: Sequence[bool]) -> tuple[float, ...]:
    return tuple(itertools.compress(values, chosen))


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    whole = sum(weights)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / whole if whole else 0.0
