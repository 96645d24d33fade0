"""The status of the online loop: every number is the one that its name says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import structs

from mlx_tandem.config import Config, DutyConfig, EngineConfig, ModelConfig, RLTrainingConfig
from mlx_tandem.training.evidence import Comparison
from mlx_tandem.training.online import status
from mlx_tandem.training.online.guard import Course
from mlx_tandem.training.online.serving import Recorded, TrainingStatus, UpdateReport
from mlx_tandem.training.online.trial import Reference, Trial
from mlx_tandem.training.trajectories import Counts
from mlx_tandem.types import AdapterRef, PassUnderWay

CONFIG = Config(
    EngineConfig(ModelConfig(path=""), duty=DutyConfig(mode="pause")),
    rl_training=RLTrainingConfig(enabled=True, adapter="policy", learning_rate=8.0, max_staleness=3),
)

RECORDED = Recorded(prompts=10, new=1, solved=2, hopeless=3, between=4)


class Buffer(SimpleNamespace):
    def __len__(self) -> int:
        return 102


def learner(updates: int = 100, history: int = 2, pending: Any = None, **counts: int) -> Any:
    reports = [
        UpdateReport(*[number] * 6, mean_reward=0.5 + number, loss=0.25 + number, grad_norm=0.75 + number,
                     kl=0.125 + number, kl_reference=9.0, mismatch_k3=9.0, verdict=verdict, outcome="kept")
        for number, verdict in ((1, "refused"), (2, "corrected"))
    ][:history]  # fmt: skip
    trial = Trial(accepted=Reference("c", 107, "d"), candidate=Reference("e", 1, "f"), updates=1)
    trial.gained = 0.5
    trial.comparison = Comparison(seen=50, count=8, total=2.0)
    counters = SimpleNamespace(
        updates=updates, last_update=86400.0, trial=trial, publishes=109,
        course=Course(rate_scale=0.5, rollbacks=106, in_a_row=1, rate=8.0),
        checkpoint_saves=108, since_checkpoint=1, compared=1,
    )  # fmt: skip
    listed = [SimpleNamespace(name="b"), SimpleNamespace(name="a")]
    buffer = Buffer(counts=Counts(**counts), alike=0, usable=100)
    ledger = SimpleNamespace(
        counters=counters,
        buffer=buffer,
        waiting=[0] * 104,
        listed=listed,
        told=Counts(**counts),
        pending=pending,
    )
    return SimpleNamespace(
        ledger=ledger,
        history=reports,
        trainer=SimpleNamespace(left=110, step=111),
        judging=SimpleNamespace(live=SimpleNamespace(alarm="it falls", means={}), compares=True),
        client=SimpleNamespace(
            stats=SimpleNamespace(serving_ms=112.0, training_ms=113.0, passes=(PassUnderWay("policy", 0.5),))
        ),
    )


def of(learner: Any, current: AdapterRef | None = None, works: bool = False, **loop: Any) -> TrainingStatus:
    wanted = {"running": True, "has_enough": False, "reason": "so"} | loop
    return status.of(CONFIG, learner, cast(Any, SimpleNamespace(**wanted)), current, works, RECORDED)


def test_every_number_is_there_under_its_name() -> None:
    counts = Counts(201, 202, 203, 204, 205, 206, 207, drawn=90)
    found = of(learner(**structs.asdict(counts)), AdapterRef("policy", 120, "d"))
    assert structs.replace(found, advice="") == TrainingStatus(
        training_enabled=True,
        mode="pause",
        running=True,
        busy=False,
        update_done=None,
        update_left_s=None,
        reason="so",
        recovering=110,
        current_lora="policy@120",
        version=120,
        step=111,
        updates=100,
        trajectories_collected=111,
        siblings_drawn=90,
        buffered=102,
        dropped_stale=203,
        dropped_duplicate=205,
        dropped_overflow=204,
        dropped_no_reward=207,
        open_trajectories=104,
        skipped_groups=206,
        recorded_prompts=RECORDED,
        advice="",
        last_update="1970-01-02T00:00:00Z",
        loss=2.25,
        kl=2.125,
        mean_reward=2.5,
        grad_norm=2.75,
        learning_rate=4.0,
        target_kl=0.0,
        rollbacks=106,
        accepted=107,
        compared=8,
        difference=0.25,
        gain=0.5,
        alarm="it falls",
        last_verdict="corrected",
        checkpoint_saves=108,
        publishes=109,
        available_checkpoints=("b", "a"),
        serving_ms=112.0,
        training_ms=113.0,
    )
    for number in (203, 204, 206, 207):
        assert f"{number} " in found.advice


def test_before_the_first_update_it_says_what_to_ask_for() -> None:
    side = learner(0, history=0)
    side.ledger.waiting = []
    side.ledger.counters.last_update = side.ledger.counters.trial.accepted = None
    found = of(side)
    assert (found.current_lora, found.version, found.accepted, found.last_update) == ("", 0, 0, None)
    assert (found.loss, found.kl, found.mean_reward, found.grad_norm, found.last_verdict) == (0.0, 0.0, 0.0, 0.0, "ok")
    assert "No answer was collected so far" in found.advice and "collect_trajectory" in found.advice


def test_the_update_under_way_has_a_share_that_is_done_and_a_time_that_is_left() -> None:
    class Progress:
        def share(self, of_pass: float) -> float:
            return of_pass / 2

        def seconds_left(self, share: float) -> float:
            return 12.0

    found = of(learner(pending=SimpleNamespace(progress=Progress())))
    assert (found.update_done, found.update_left_s) == (0.25, 12.0)
    found = of(learner(pending=SimpleNamespace(progress=None)))
    assert (found.update_done, found.update_left_s) == (None, None), "it waits for its turn"


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("works", [False, True])
@pytest.mark.parametrize("enough", [False, True])
def test_it_is_busy_when_it_runs_and_has_something_to_do(running: bool, works: bool, enough: bool) -> None:
    found = of(learner(), None, works, running=running, has_enough=enough)
    assert (found.running, found.busy) == (running, running and (works or enough))


@pytest.mark.parametrize(("skipped", "advised"), [(0, False), (20, False), (21, True)])
def test_groups_that_taught_nothing_are_pointed_out_where_they_are_most(skipped: int, advised: bool) -> None:
    assert ("taught nothing" in of(learner(10, skipped_groups=skipped)).advice) == advised


@pytest.mark.parametrize("alike", [0, 1])
def test_answers_that_wait_beside_equal_ones_are_pointed_out_from_one_update_s_on(alike: int) -> None:
    side = learner()
    side.ledger.buffer.alike = CONFIG.rl_training.update_frequency + alike
    assert ("answers to different prompts wait" in of(side).advice) == bool(alike)
