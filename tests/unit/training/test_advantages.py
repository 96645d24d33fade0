"""How much better each completion was than its siblings, and the loss that follows from it."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mlx_tandem.config import RLTrainingConfig
from mlx_tandem.engine.learning import WHOLE, Batch, Truncation
from mlx_tandem.training.online.advantages import RECIPES, advantages, batches, by_group, spread, varies
from mlx_tandem.training.trajectories import Trajectory

REWARDS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12)
GROUPS = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=2, max_size=5).filter(
        lambda g: len({r for r, _ in g}) > 1
    ),
    min_size=1,
    max_size=6,
)


def made(sizes: list[list[tuple[int, int]]]) -> list[list[Trajectory]]:
    """Groups of completions of (reward, length)."""
    return [
        [
            Trajectory(f"{g}-{i}", f"g{g}", (1, 2), (3,) * n, (-0.5,) * n, (-0.7,) * n, (1,) * n, 0.8, float(r))
            for i, (r, n) in enumerate(group)
        ]
        for g, group in enumerate(sizes)
    ]


@given(REWARDS)
def test_advantages_add_up_to_nothing_and_keep_the_order(rewards: list[float]) -> None:
    for leave_one_out in (True, False):
        found = advantages(rewards, leave_one_out=leave_one_out)
        assert sum(found) == pytest.approx(0.0, abs=1e-6 * max(1.0, *map(abs, found)))
        order = sorted(range(len(rewards)), key=lambda i: rewards[i])
        assert all(found[i] <= found[j] for i, j in itertools.pairwise(order))


def test_advantages_by_hand() -> None:
    assert advantages([1, 0, 0, 0]) == pytest.approx([0.75, -0.25, -0.25, -0.25])
    assert advantages([1, 0, 0, 0], leave_one_out=True) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert spread([1, 0, 0, 1], 0.01) == 0.5
    assert spread([3, 2, 1], 0.01) == pytest.approx(math.sqrt(2 / 3))


def weights(config: RLTrainingConfig, *rewards: list[float]) -> list[float]:
    groups = [
        [Trajectory(f"{g}-{i}", f"g{g}", (1,), (2,), (-0.5,), (-0.5,), (1,), 1.0, r) for i, r in enumerate(group)]
        for g, group in enumerate(rewards)
    ]
    return [d.weights[0] for b in batches(groups, config) for d in b.data]


def test_what_advantages_are_divided_by() -> None:
    rewards = [[1.0, 0.0], [3.0, 1.0]]
    assert weights(RLTrainingConfig(), *rewards) == pytest.approx([1, -1, 1, -1])
    assert weights(RLTrainingConfig(advantage_scale="none"), *rewards) == pytest.approx([0.5, -0.5, 1, -1])
    whole = math.sqrt((2 * 0.25 + 2) / 4)
    found = weights(RLTrainingConfig(advantage_scale="batch"), *rewards)
    assert found == pytest.approx([0.5 / whole, -0.5 / whole, 1 / whole, -1 / whole])
    assert weights(RLTrainingConfig(algorithm="dr_grpo", leave_one_out=True), *rewards) == [1, -1, 2, -2]


def test_rewards_that_hardly_differ_are_not_blown_up() -> None:
    found = weights(RLTrainingConfig(), [0.1] * 7 + [0.099])
    assert max(map(abs, found)) < 0.1


@pytest.mark.promise("I6")
@given(st.floats(-1e6, 1e6), st.integers(1, 9))
def test_equal_rewards_teach_nothing(reward: float, n: int) -> None:
    assert advantages([reward] * n) == (0.0,) * n


def counted(batch: Batch) -> float:
    """What the device's normalisation makes of a loss of 1 for each token that is trained on."""
    kept = [sum(d.trained) for d in batch.data]
    return batch.loss.scale * (float(sum(kept)) if batch.loss.normalize == "token_sum" else 1.0)


@given(GROUPS, st.sampled_from(sorted(RECIPES)), st.integers(1, 8))
def test_however_it_is_cut_the_loss_is_the_mean_over_the_whole_update(
    sizes: list[list[tuple[int, int]]], algorithm: str, frequency: int
) -> None:
    groups = made(sizes)
    data = [t for g in groups for t in g]
    cut = batches(groups, RLTrainingConfig(algorithm=algorithm, update_frequency=frequency))  # type: ignore[arg-type]
    assert [d.tokens for b in cut for d in b.data] == [t.prompt + t.tokens for t in data]
    assert all(len(b.data) <= frequency for b in cut)
    assert all(all(d.trained) for b in cut for d in b.data), "an average completion counts, too"
    tokens = sum(len(t.tokens) for t in data)
    expected = tokens / (len(data) * 256) if RECIPES[algorithm].normalize == "token_sum" else 1.0
    assert sum(map(counted, cut)) == pytest.approx(expected)


def test_switches_follow_the_algorithm_and_the_settings() -> None:
    groups = made([[(0, 2), (1, 4)]])
    config = RLTrainingConfig(
        algorithm="gspo", adapter="mine", clip_low=0.1, clip_high=0.3, kl_coef=0.05, max_importance_ratio=3.0
    )
    (batch,) = batches(groups, config)
    loss = batch.loss
    assert (batch.trainer, loss.kind, loss.ratio, loss.normalize) == ("mine", "ppo", "sequence", "sequence_mean")
    assert (loss.clip_low, loss.clip_high, loss.kl_coef, loss.max_importance_ratio) == (0.1, 0.3, 0.05, 3.0)
    (batch,) = batches(groups, replace(config, algorithm="dr_grpo"))
    assert (batch.loss.normalize, batch.loss.scale) == ("token_sum", 1 / (2 * 256))
    assert [d.weights[0] for d in batch.data] == [-0.5, 0.5]


@pytest.mark.parametrize(
    ("algorithm", "clip"),
    [("grpo", (0.2, 0.2)), ("dapo", (0.2, 0.28)), ("gspo", (3e-4, 4e-4)), ("cispo", (1.0, 3.0))],
)
def test_each_algorithm_has_a_clip_range_of_its_own(algorithm: str, clip: tuple[float, float]) -> None:
    groups = made([[(0, 2), (1, 4)]])
    (batch,) = batches(groups, RLTrainingConfig(algorithm=algorithm))  # type: ignore[arg-type]
    assert (batch.loss.clip_low, batch.loss.clip_high) == clip


def test_greedy_completions_count_as_drawn_from_the_model() -> None:
    (group,) = made([[(0, 1), (1, 1)]])
    greedy = [replace(t, temperature=0.0, logprobs=(0.0,)) for t in group]
    (batch,) = batches([greedy], RLTrainingConfig())
    assert [(d.temperature, d.logprobs) for d in batch.data] == [(1.0, (-0.7,))] * 2
    (batch,) = batches([group], RLTrainingConfig())
    assert [(d.temperature, d.logprobs) for d in batch.data] == [(0.8, (-0.5,))] * 2


def test_what_something_else_has_drawn_counts_as_drawn_by_the_trainer() -> None:
    """Whatever it says of its logprobs."""
    (group,) = made([[(0, 1), (1, 1)]])
    (batch,) = batches([[replace(group[0], external=True), group[1]]], RLTrainingConfig())
    assert [(d.temperature, d.logprobs) for d in batch.data] == [(0.8, None), (0.8, (-0.5,))]


def test_groups() -> None:
    groups = made([[(0, 1), (1, 1)], [(1, 1), (1, 2)]])
    mixed = [groups[1][0], groups[0][0], groups[1][1], groups[0][1]]
    assert by_group(mixed) == [groups[1], groups[0]]
    assert [varies(g) for g in groups] == [True, False]


def test_answers_that_were_cut_off_are_compared_with_and_not_learned_from() -> None:
    (group,) = made([[(0, 2), (1, 4)]])
    cut = [replace(group[0], finish_reason="length"), replace(group[1], finish_reason="stop")]
    (batch,) = batches([cut], RLTrainingConfig(algorithm="dapo", mask_truncated=True))
    assert [d.weights[0] for d in batch.data] == pytest.approx([-1, 1])
    assert [sum(d.trained) for d in batch.data] == [0, 4]
    assert batch.loss.scale == 1.0, "the mean is over what is learned"
    (batch,) = batches([cut], RLTrainingConfig(algorithm="dapo"))
    assert [sum(d.trained) for d in batch.data] == [2, 4]


def test_means_over_several_batches_count_only_what_is_learned() -> None:
    groups = made([[(0, 2), (1, 4)], [(0, 3), (1, 5)]])
    cut = [
        [replace(t, finish_reason="length") if t.reward == 0 and g == 0 else t for t in own]
        for g, own in enumerate(groups)
    ]
    for algorithm, wanted in (("grpo", [1 / 3, 2 / 3]), ("dapo", [4 / 12, 8 / 12])):
        config = RLTrainingConfig(algorithm=algorithm, mask_truncated=True, update_frequency=2)  # type: ignore[arg-type]
        assert [b.loss.scale for b in batches(cut, config)] == pytest.approx(wanted)


def test_truncation_goes_with_the_draw() -> None:
    (group,) = made([[(0, 1), (1, 1), (1, 1)]])
    cut = Truncation(0.5, 10, 0.1)
    drawn, greedy, external = (replace(t, truncation=cut) for t in group)
    own = [drawn, replace(greedy, temperature=0.0), replace(external, external=True)]
    (batch,) = batches([own], RLTrainingConfig())
    found = [d.truncation for d in batch.data]
    assert found == [cut, WHOLE, WHOLE], "a greedy choice counts as drawn from the whole, and so does what others drew"
