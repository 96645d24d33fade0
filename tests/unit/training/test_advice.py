"""Advice of the online loop: what keeps it from learning is said, with what to change, and nothing without need."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_tandem.config import RLTrainingConfig
from mlx_tandem.training.evidence import Comparison
from mlx_tandem.training.online import rates
from mlx_tandem.training.online.advice import FRUITLESS_PROMPTS, FRUITLESS_UPDATES, advice
from mlx_tandem.training.online.guard import Course
from mlx_tandem.training.online.live_rewards import Mean
from mlx_tandem.training.online.serving import Recorded, UpdateReport
from mlx_tandem.training.online.trial import Trial
from mlx_tandem.training.trajectories import Counts
from tests.unit.learning_fakes import config, group
from tests.unit.online_side import on_a_loop, running

TARGET = RLTrainingConfig().target_kl
NOTHING = Recorded()


class Buffer(SimpleNamespace):
    def __len__(self) -> int:
        return int(self.size)


def update(kl: float = TARGET, rate: float = 1e-4, outcome: Any = "published", reason: str = "") -> UpdateReport:
    return UpdateReport(
        step=1, version=1, trajectories=4, tokens=4, groups=1, skipped_groups=0, mean_reward=0.5, loss=0.0,
        grad_norm=1.0, kl=kl, kl_reference=0.0, mismatch_k3=0.0, verdict="ok", outcome=outcome, reason=reason,
        learning_rate=rate,
    )  # fmt: skip


def learner(
    *,
    updates: int = 5,
    history: Sequence[UpdateReport] = (),
    size: int = 0,
    usable: int = 0,
    alike: int = 0,
    lately: Counts | None = None,
    in_a_row: int = 0,
    trial: Trial | None = None,
    reward: float | None = None,
    **counts: int,
) -> Any:
    buffer = Buffer(counts=Counts(**counts), size=size, usable=usable, alike=alike)
    counters = SimpleNamespace(updates=updates, course=Course(in_a_row=in_a_row), trial=trial or Trial())
    means = {} if reward is None else {1: Mean(9, 0.0), 2: Mean(9, reward)}
    return SimpleNamespace(
        ledger=SimpleNamespace(
            buffer=buffer, counters=counters, told=Counts(**counts).since(lately or Counts()), waiting=[]
        ),
        history=history,
        judging=SimpleNamespace(live=SimpleNamespace(means=means)),
    )


def said(learner: Any, recorded: Recorded = NOTHING, **settings: Any) -> str:
    return advice(learner, RLTrainingConfig(**{"update_frequency": 4} | settings), recorded)


@pytest.mark.parametrize(
    ("counts", "alike", "says"),
    [
        ({}, 0, ()),
        ({"skipped_groups": 10}, 4, ()),
        ({"skipped_groups": 11}, 4, ("groups taught nothing",)),
        ({}, 5, ("wait, since all of them got the same reward",)),
        ({"dropped_stale": 1}, 0, ("max_staleness",)),
        ({"dropped_overflow": 1, "dropped_no_reward": 1}, 0, ("trajectory_buffer_size", "open_trajectory_s")),
    ],
)
def test_it_is_given_from_its_bound_on(counts: dict[str, int], alike: int, says: tuple[str, ...]) -> None:
    """After five updates of four trajectories."""
    found = said(learner(alike=alike, size=alike, **counts))
    assert len(found.split(". ")) == max(len(says), 1) and bool(found) == bool(says)
    assert all(part in found for part in says)


def test_a_server_that_nobody_has_asked_to_learn_says_what_a_request_needs() -> None:
    assert '"collect_trajectory": true' in said(learner(updates=0))
    assert said(learner(updates=0, collected=1)) == ""


@pytest.mark.parametrize(("lately", "advised"), [(4, False), (5, True)])
def test_groups_that_teach_nothing_any_more_are_noticed_late_in_a_long_run(lately: int, advised: bool) -> None:
    found = said(learner(updates=1000, skipped_groups=500, lately=Counts(skipped_groups=lately)))
    assert ("since the last update taught nothing" in found) == advised


def test_where_all_rewards_are_equal_since_all_answers_are_right_harder_prompts_are_advised() -> None:
    assert "harder prompts" in said(learner(skipped_groups=11, reward=0.95))
    assert "sometimes, not always or never" in said(learner(skipped_groups=11, reward=0.02))


@pytest.mark.parametrize(
    ("recorded", "says"),
    [
        (Recorded(5, solved=5), "All 5 recorded prompts are solved: harder prompts would teach more."),
        (Recorded(5, hopeless=5), "The answers to each of all 5 recorded prompts got the same low reward: ask easier"),
        (Recorded(5, solved=2, hopeless=3), "Of 5 recorded prompts 2 are solved and 3 hopeless: ask easier prompts"),
        (Recorded(5, new=1, solved=4), "5 groups since the last update taught nothing"),
        (Recorded(5, hopeless=4, between=1), "5 groups since the last update taught nothing"),
        (Recorded(6, solved=6), "5 groups since the last update taught nothing"),
    ],
)
def test_where_all_recorded_prompts_are_solved_or_hopeless_that_is_said(recorded: Recorded, says: str) -> None:
    """Only once each of them was answered since the last update, and instead of what groups in general would mean."""
    spent = learner(updates=1000, skipped_groups=500, lately=Counts(skipped_groups=5))
    found = said(spent, recorded)
    assert found.startswith(says) and (says.startswith("5 groups") or "taught nothing" not in found)


def test_where_everything_is_too_old_that_is_said() -> None:
    assert said(learner(dropped_stale=20, lately=Counts(dropped_stale=9), size=1)).startswith("Nearly everything")
    assert said(learner(dropped_stale=20, lately=Counts(dropped_stale=8), size=2)).startswith("20 trajectories")


def test_answers_that_wait_for_others_are_pointed_out() -> None:
    assert "wait for others to the same prompts" in said(learner(size=5))
    assert said(learner(size=4)) == said(learner(size=9, usable=5)) == ""


def test_updates_that_hardly_move_the_policy_are_pointed_out_with_the_rate_that_would() -> None:
    still = [update(kl=TARGET * 1e-4, rate=1e-5)] * 3
    found = said(learner(history=still), learning_rate=1e-5)
    assert "moved the policy by 1e-07 nats" in found
    assert "set rl_training.learning_rate to auto, or to about 0.001." in found
    assert said(learner(history=[*still[:2], update(outcome="refused")]), learning_rate=1e-5) == ""
    assert said(learner(history=still[:2]), learning_rate=1e-5) == ""
    assert said(learner(history=[update()] * 3), learning_rate=1e-4) == ""
    assert "the learning rate is 0" in said(learner(history=[update(kl=0.0, rate=0.0)] * 3), learning_rate=0.0)


def test_a_rate_that_is_still_being_found_needs_no_advice_until_it_is_the_highest() -> None:
    assert said(learner(history=[update(kl=1e-9, rate=1e-4)] * 3)) == ""
    assert "lora_alpha" in said(learner(history=[update(kl=1e-9, rate=rates.MOST)] * 3))


def test_gradients_that_do_not_agree_are_pointed_out_unless_the_rate_is_fixed() -> None:
    noisy, sure = learner(), learner()
    for i in range(12):
        noisy.ledger.counters.course.pace.note(TARGET, 1e-4, TARGET, 0.1 * (-1) ** i)
        sure.ledger.counters.course.pace.note(TARGET, 1e-4, TARGET, 0.4 + 0.1 * (-1) ** i)
    found = said(noisy)
    assert "do not agree (mean cosine -0.01)" in found and "only 6% of the learning rate" in found
    assert "rl_training.update_frequency" in found
    assert said(noisy, learning_rate=1e-4) == said(sure) == ""
    once = learner()
    once.ledger.counters.course.pace.note(TARGET, 1e-4, TARGET, 0.0)
    assert said(once) == "", "one cosine says nothing"


def test_updates_that_are_taken_back_again_and_again_are_pointed_out() -> None:
    back = [update(outcome="rolled_back", reason="the policy moved by 1 nats")] * 3
    found = said(learner(history=back, in_a_row=3), learning_rate=1.0)
    assert "3 updates in a row were taken back (the policy moved by 1 nats)" in found and "to auto" in found
    assert "target_kl" in said(learner(history=back, in_a_row=3))


def test_updates_without_a_gain_are_called_that() -> None:
    def trial(count: int = FRUITLESS_PROMPTS, gained: float = 0.0) -> Trial:
        return Trial(comparison=Comparison(count=count, total=0.01 * count), gained=gained)

    found = said(learner(updates=FRUITLESS_UPDATES, trial=trial()))
    assert "gained nothing that can be shown" in found and f"+0.01 on {FRUITLESS_PROMPTS} prompts" in found
    assert said(learner(updates=FRUITLESS_UPDATES - 1, trial=trial())) == ""
    assert said(learner(updates=FRUITLESS_UPDATES, trial=trial(FRUITLESS_PROMPTS - 1))) == ""
    assert said(learner(updates=FRUITLESS_UPDATES, trial=trial(gained=0.1))) == ""


@pytest.mark.usefixtures("at_once")
@on_a_loop
async def test_a_loop_whose_fixed_rate_is_too_low_says_so(tmp_path: Path) -> None:
    async with running(config(tmp_path, learning_rate=1e-5), start=False) as side:
        for number in range(1, 4):
            assert side.learner.status().advice in ("", said(learner(updates=0), adapter="policy"))
            await side.learner.update(group(number))
        assert "set rl_training.learning_rate to auto" in side.learner.status().advice
