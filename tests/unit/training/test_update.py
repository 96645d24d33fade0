"""One update: what the trainer is asked for, in which order, and what its answers come to."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, cast

import pytest
from msgspec.structs import astuple, replace

from mlx_tandem.config import RLTrainingConfig
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.engine.learning import AdamParams, Batch, BatchResult, Datum, LossConfig, StepDone
from mlx_tandem.training.online import update
from mlx_tandem.training.online.update import Finding, Pending
from mlx_tandem.training.store.records import Began
from mlx_tandem.training.trajectories import Counts, Trajectory

INF = math.inf
LOSS = LossConfig(kl_coef=0.5)
DECOUPLED = LossConfig(kl_coef=0.5, decoupled=True)
ADAM = AdamParams(0.25)
DATA = (
    Datum((1, 2, 3, 4), 1, (1.0, 0.0, 1.0), None),  # made by something else
    Datum((1, 5, 6), 1, (-1.0, -1.0), (-0.5, -0.25)),
    Datum((1, 7), 1, (1.0,), (-0.75,), mask=(1,)),
)
FIRST = (  # the trainer's answers before any step; what a truncated draw leaves out has no logprob
    (((-1.0, -2.0, -INF), (-0.5, -INF)), ((-1.0, -2.0, -3.0), (-0.5, -0.25)), 0.5, 0.5, 3),
    (((-0.75,),), ((-0.75,),), 0.25, 1.5, 1),
)
KINDS = ["", "far", "diverged", "infinite", "gradients"]


def k3(*differences: float) -> float:
    return sum(math.exp(d) - 1 - d for d in differences) / len(differences)


class Client:
    """A trainer that writes down what it is asked. `kind` says what goes wrong with it."""

    def __init__(self, kind: str = "", bad_step: int = 0):
        self.asked: list[Any] = []
        self.kind, self.bad_step, self.step = kind, bad_step, 40

    async def run_pass(
        self, batches: Sequence[Batch], *, forward_only: bool = False, micro_batch_tokens: int = 0
    ) -> list[BatchResult]:
        (batch,) = batches
        self.asked.append(("forward" if forward_only else "gradients", batch, micro_batch_tokens))
        logprobs, model, loss, kl, tokens = FIRST[batch.data[0].tokens[1] == 7]
        if forward_only:
            moved = 9.0 if self.kind == "far" else 0.125
            after = tuple(tuple(p + moved * i for i, p in enumerate(ps, start=1)) for ps in model)
            return [BatchResult(batch.trainer, 0.0, 0, (), after)]
        loss = INF if self.kind == "infinite" else loss
        return [BatchResult(batch.trainer, loss, tokens, logprobs, model, kl)]

    async def step_trainer(self, trainer: str, adam: AdamParams, *, more: bool = False) -> StepDone:
        self.asked.append(("step", trainer, adam, more))
        self.step += 1
        finite = not (self.kind == "gradients" and self.step - 40 == self.bad_step)
        done = StepDone(trainer, self.step if finite else self.step - 1, 0.1 * (self.step - 40), finite)
        return replace(done, agreement=0.5 / (self.step - 40))

    async def settle_trainer(self, trainer: str, *, keep: bool) -> None:
        self.asked.append(("settle", trainer, keep))


def trajectories(kind: str) -> list[Trajectory]:
    """The answers that `DATA` are; only the one of version 3 can be compared with the sampler."""
    far = 9.0 if kind == "diverged" else 0.0

    def made(name: str, group: str, i: int, versions: tuple[int, ...], reward: float, external: bool) -> Trajectory:
        model = () if external else (-0.5 - far, -0.5) if i == 1 else (-5.0,)
        tokens = DATA[i].tokens[1:]
        return Trajectory(name, group, (1,), tokens, model, model, versions, 1.0, reward, external)

    return [
        made("a", "g", 0, (), 1.0, True),
        made("b", "g", 1, (3, 3), 0.25, False),
        made("c", "h", 2, (0,), 0.25, False),
    ]


def pending(loss: LossConfig, steps: int, kind: str = "") -> Pending:
    batches = Batch("policy", DATA[:2], loss), Batch("policy", DATA[2:], loss)
    began = Began(41, ("a", "b", "c"), batches, ADAM, 77, steps=steps)
    return Pending(began, trajectories(kind), Counts(dropped_stale=2, skipped_groups=1))


def passes(loss: LossConfig, steps: int) -> list[list[Any]]:
    """What is asked for in each step: the first from the data as they are, the others from where that one began."""
    first = (-1.0, -2.0, 0.0), (-0.5, 0.0), (-0.75,)
    drawn = first[0], (-0.5, -0.25), (-0.75,)
    masks = (1, 0, 0), (1, 0), (1,)
    later = tuple(
        replace(d, logprobs=q, anchor=p if loss.decoupled else (), mask=m)
        for d, q, p, m in zip(DATA, drawn, first, masks, strict=True)
    )
    return [
        [
            ("gradients", Batch("policy", data[:2], loss), 77),
            ("gradients", Batch("policy", data[2:], loss), 77),
            ("step", "policy", ADAM, i < steps),
        ]
        for i, data in enumerate([DATA, *[later] * (steps - 1)], start=1)
    ]


def attempt(client: Client, wanted: Pending, version: int = 3) -> Finding:
    config = RLTrainingConfig(adapter="policy", refuse_mismatch=0.1, guard_kl=0.5)
    return asyncio.run(update.attempt(cast(EngineClient, client), wanted, version, config))


@pytest.mark.parametrize("loss", [LOSS, DECOUPLED])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("version", [3, 0])
def test_an_update_asks_for_its_passes_and_steps_in_turn(loss: LossConfig, steps: int, version: int) -> None:
    """Then for how far the policy has moved, without what only the loss needs; it can still be taken back."""
    client = Client()
    finding = attempt(client, pending(loss, steps), version)
    plain = replace(loss, kl_coef=0.0)
    moved = [("forward", Batch("policy", part, plain), 77) for part in (DATA[:2], DATA[2:])]
    assert client.asked == [*chain(*passes(loss, steps)), *moved]
    seen = k3(0.0, 0.25) if version else 0.0
    verdict = "corrected" if version else "ok"
    assert astuple(finding)[:8] == (None, "", verdict, 40 + steps, 0.75, 0.1 * steps, 0.5, finding.kl), (
        "the gradient of the first step agrees with those of other answers, and that of a later one with the same"
    )
    moves = 0.125, 0.375, 0.125, 0.25, 0.125  # of the tokens that are trained on
    assert astuple(finding)[7:] == (pytest.approx(k3(*moves)), 0.75, pytest.approx(seen))


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("bad_step", [1, 2, 3])
def test_what_went_wrong_is_taken_back_and_named(kind: str, bad_step: int) -> None:
    """Nothing more is asked for from there on, and the step is the one from before."""
    client, steps = Client(kind, bad_step), 3
    finding = attempt(client, pending(LOSS, steps, kind))
    taken = {"far": 3, "gradients": bad_step}.get(kind, 0)
    whole = passes(LOSS, steps)
    expected = chain(*whole[:taken]) if taken else whole[0][:-1]
    asked = [a for a in client.asked if a[0] != "forward"]
    assert asked == [*expected, ("settle", "policy", False)]
    assert (len(client.asked) > len(asked)) == (kind == "far")
    assert finding.outcome == ("refused" if kind == "diverged" else "rolled_back")
    assert finding.step == 40
    says = {"far": "moved by", "diverged": "disagree by", "infinite": "loss", "gradients": "gradients are not finite"}
    assert says[kind] in finding.reason
    report = update.report(pending(LOSS, steps, kind), finding, 2.5, None)
    assert (report.outcome, report.reason, report.step) == (finding.outcome, finding.reason, 40)
    assert (report.loss, report.grad_norm) == (0.0 if kind == "infinite" else 0.75, pytest.approx(0.1 * taken))


@pytest.mark.parametrize("steps", [1, 3])
def test_an_update_that_was_good_is_computed_again_just_so(steps: int) -> None:
    client = Client()
    wanted = pending(DECOUPLED, steps)
    assert asyncio.run(update.again(cast(EngineClient, client), "policy", wanted.began)) == 40 + steps
    assert client.asked == [*chain(*passes(DECOUPLED, steps)), ("settle", "policy", True)]


def test_the_report_says_what_was_learned_from() -> None:
    wanted = pending(LOSS, 2)
    finding = attempt(Client(), wanted)
    report = update.report(wanted, finding, 2.5, 0.75)
    assert (report.step, report.version, report.trajectories, report.tokens, report.groups) == (42, 0, 3, 5, 2)
    assert (report.skipped_groups, report.dropped, report.mean_reward) == (1, {"stale": 2}, 0.5)
    assert (report.loss, report.grad_norm, report.kl) == (finding.loss, finding.grad_norm, finding.kl)
    assert (report.kl_reference, report.mismatch_k3, report.verdict) == (0.75, finding.mismatch_k3, "corrected")
    assert (report.outcome, report.reason, report.seconds, report.validation) == ("kept", "", 2.5, 0.75)
    assert report.learning_rate == 0.25


@pytest.mark.parametrize(("field", "value"), [("kl", math.nan), ("kl_reference", INF), ("mismatch_k3", INF)])
def test_numbers_that_json_does_not_have_are_reported_as_0(field: str, value: float) -> None:
    finding: Callable[..., Finding] = Finding
    report = update.report(pending(LOSS, 1), finding(None, loss=1.0, **{field: value}), 1.0, None)
    assert getattr(report, field) == 0.0


def test_movement_is_measured_on_so_many_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many sequences as have so many tokens, of nine in three, and one at least."""
    for tokens, counts in ((1, [1]), (5, [1]), (6, [2]), (8, [2]), (9, [2, 1])):
        monkeypatch.setattr(update, "GUARD_TOKENS", tokens)
        client = Client()
        attempt(client, pending(LOSS, 1))
        assert [len(a[1].data) for a in client.asked if a[0] == "forward"] == counts, tokens


def test_movement_is_measured_on_sequences_from_all_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers to one prompt stand together and move alike."""
    monkeypatch.setattr(update, "GUARD_TOKENS", 16)
    began = pending(LOSS, 1).began
    batch = replace(began.batches[0], data=(began.batches[0].data[0],) * 6)
    assert len(batch.data[0].tokens) == 4
    assert update._guarded(replace(began, batches=(batch, batch))) == [[0, 3], [0, 3]]
