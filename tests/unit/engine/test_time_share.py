"""The device's time between requests and learning: shares by weight, idle time lent, nobody left out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_tandem.config import DutyConfig
from mlx_tandem.engine.time_share import BOUND_MS, GAPS, TOLERANCE, TimeShare

LONGEST = 20.0
WINDOW = 10_000.0

pieces = st.floats(0.5, LONGEST)
weights = st.tuples(st.floats(0.05, 1.0), st.floats(0.05, 1.0))


def work(duty: TimeShare, serving: Iterator[float] | None, training: Iterator[float] | None) -> tuple[bool, float]:
    """One piece for whoever has the turn: (was it learning, how long)."""
    learns = duty.may_train(serving is not None, training is not None)
    side = training if learns else serving
    assert side is not None, "nobody works although somebody wants to"
    ms = next(side)
    (duty.note_training if learns else duty.note_serving)(ms)
    return learns, ms


def busy(duty: TimeShare, serving: Iterator[float], training: Iterator[float], ms: float) -> list[tuple[bool, float]]:
    done: list[tuple[bool, float]] = []
    while ms > 0:
        done.append(work(duty, serving, training))
        ms -= done[-1][1]
    return done


def cycle(values: list[float]) -> Iterator[float]:
    while True:
        yield from values


@pytest.mark.promise("I11")
@settings(max_examples=60)
@given(weights, st.lists(pieces, min_size=1, max_size=20), st.lists(pieces, min_size=1, max_size=20), st.data())
def test_shares_hold_in_every_window_while_both_are_busy(
    shares: tuple[float, float], serving: list[float], training: list[float], data: st.DataObject
) -> None:
    """Whatever went before: idle phases of either side, budgets missed."""
    duty = TimeShare(DutyConfig(inference=shares[0], training=shares[1]))
    one, other = cycle(serving), cycle(training)
    for side in data.draw(st.lists(st.sampled_from(["serving", "training", "both"]), max_size=5)):
        for _ in range(60):
            work(duty, None if side == "training" else one, None if side == "serving" else other)
    done = busy(duty, one, other, 2 * WINDOW)
    starts = [0.0]
    for _, ms in done:
        starts.append(starts[-1] + ms)
    first = data.draw(st.integers(0, sum(s <= starts[-1] - WINDOW for s in starts) - 1))
    last = next(i for i in range(first, len(starts)) if starts[i] - starts[first] >= WINDOW)
    window = done[first:last]
    learned = sum(ms for learns, ms in window if learns) / sum(ms for _, ms in window)
    assert abs(learned - shares[1] / sum(shares)) < 0.02


@settings(max_examples=100)
@given(weights, st.lists(st.tuples(st.booleans(), st.booleans(), pieces, st.booleans()), max_size=300))
def test_what_one_side_does_not_want_the_other_has_and_a_debt_is_small(
    shares: tuple[float, float], turns: list[tuple[bool, bool, float, bool]]
) -> None:
    """After any past, either side gets a turn within a bounded time of the other's."""
    duty = TimeShare(DutyConfig(inference=shares[0], training=shares[1]))
    for serving, training, ms, _ in turns:
        if serving or training:
            one = repeat(ms) if serving else None
            other = repeat(ms) if training else None
            learns, _ = work(duty, one, other)
            assert learns == training if serving != training else True
    waited = {True: 0.0, False: 0.0}
    most = {
        True: (BOUND_MS + LONGEST) * sum(shares) / shares[1] + LONGEST,  # learning waits while it pays back
        False: (BOUND_MS + LONGEST) * sum(shares) / shares[0] + LONGEST,
    }
    for _ in range(500):
        learns, ms = work(duty, repeat(5.0), repeat(LONGEST))
        waited[learns] = 0.0
        waited[not learns] += ms
        assert waited[not learns] <= most[not learns]


def test_idle_time_is_not_paid_back_beyond_the_bound() -> None:
    """After an hour of learning alone, requests run for no longer than the bound before learning has its share."""
    for alone, expected in ((True, BOUND_MS / 0.3), (False, 0.0)):
        duty = TimeShare(DutyConfig())
        for _ in range(36_000):
            work(duty, None if alone else repeat(10.0), repeat(10.0) if alone else None)
        waited = 0.0
        while not duty.may_train(True, True):
            duty.note_serving(10.0)
            waited += 10.0
        assert expected <= waited <= expected + 10.0
    burst = 0.0
    while duty.may_train(True, True):
        duty.note_training(10.0)
        burst += 10.0
    assert burst <= BOUND_MS / 0.7 + 10.0


@settings(max_examples=25)
@given(weights, st.floats(1.0, LONGEST), st.floats(1.0, LONGEST))
@example((0.7, 0.3), 10.0, 3.8)  # with one piece 0.275
@example((0.7, 0.3), 10.0, 1.0)
def test_one_piece_goes_before_a_step_where_that_is_enough(
    shares: tuple[float, float], step: float, piece: float
) -> None:
    """Or nearly. Also after learning wanted nothing for long, and while its pieces are short, as those of a forward
    are; else as many as its share needs, less the tolerance."""
    duty = TimeShare(DutyConfig(inference=shares[0], training=shares[1]))
    share = shares[1] / sum(shares)
    for _ in range(1_000):
        duty.may_train(True, False)
        duty.note_serving(step)
    some = int(60 / piece) + 1
    sizes = cycle([0.5 * piece] * some + [1.5 * piece] * some)
    needed = step * share / (1 - share)
    learned: list[float] = []
    most = 0
    for _ in range(4_000):
        learned.append(0.0)
        count = 0
        while duty.may_train(True, True):
            go_on, ms = duty.may_go_on, next(sizes)
            learned[-1] += ms
            count += 1
            duty.note_training(ms)
            if not go_on:
                break
        duty.note_serving(step)
        most = max(most, count)
    least = max(share - TOLERANCE, 0.85 * share)
    window = learned[: int(WINDOW / (step + sum(learned) / len(learned)))]
    assert sum(window) / (sum(window) + step * len(window)) > share - 0.05
    if step * least / (1 - least) <= 0.95 * piece:
        assert most == 1
    late = learned[2_000:]
    assert least - 0.02 < sum(late) / (sum(late) + step * len(late)) < share + 0.02
    assert max(late) <= needed + 3 * piece


def test_a_piece_longer_than_the_bound_is_paid_for() -> None:
    """300 ms at once, again and again: no bound forgives what was taken in the contest."""
    duty = TimeShare(DutyConfig())
    done = busy(duty, repeat(10.0), repeat(300.0), 60_000.0)
    learned = sum(ms for learns, ms in done if learns) / sum(ms for _, ms in done)
    assert abs(learned - 0.3) < 0.02


@pytest.mark.parametrize(
    ("mode", "alone", "contested"), [("inference_only", False, False), ("training_only", True, True)]
)
def test_modes_decide_without_counting(mode: str, alone: bool, contested: bool) -> None:
    duty = TimeShare(DutyConfig(mode=mode))  # type: ignore[arg-type]
    for _ in range(100):
        assert duty.may_train(True, True) is contested
        assert duty.may_train(False, True) is alone
        assert not duty.may_train(True, False)
        duty.note_serving(10.0)
        duty.note_training(10.0)
    assert (duty.serving_ms, duty.training_ms) == (1000.0, 1000.0)


@pytest.mark.parametrize(("inference", "training", "turns"), [(1.0, 0.0, 0), (0.0, 1.0, 99)])
def test_a_weight_of_nothing_is_idle_time_only(inference: float, training: float, turns: int) -> None:
    duty = TimeShare(DutyConfig(inference=inference, training=training))
    duty.note_serving(1.0)
    learned = sum(work(duty, repeat(10.0), repeat(10.0))[0] for _ in range(99))
    assert learned == turns
    assert duty.may_train(False, True)


def tokens(duty: TimeShare, gaps: list[float], at: float = 0.0) -> None:
    duty.note_tokens(at, True)
    for gap in gaps:
        at += gap
        duty.note_tokens(at, True)


def test_learning_waits_while_streams_are_slow() -> None:
    """More than one gap in twenty over the limit; and no debt grows from the wait."""
    duty = TimeShare(DutyConfig(inter_token_p95_ms=50.0))
    duty.note_serving(10.0)
    tokens(duty, [49.0] * 122 + [51.0] * 6)
    assert duty.may_train(True, True)
    tokens(duty, [49.0] * 121 + [51.0] * 7)
    assert not duty.may_train(True, True)
    assert duty.may_train(False, True)
    for _ in range(1000):
        assert not duty.may_train(True, True)
        duty.note_serving(10.0)
    tokens(duty, [49.0] * GAPS)
    burst = 0.0
    while duty.may_train(True, True):
        duty.note_training(10.0)
        burst += 10.0
    assert 0 < burst <= BOUND_MS / 0.7 + 10.0


def test_one_slow_gap_in_twenty_is_within_the_budget() -> None:
    duty = TimeShare(DutyConfig(inter_token_p95_ms=50.0))
    assert not duty.is_slow
    tokens(duty, [51.0] + [49.0] * 19)
    assert not duty.is_slow
    tokens(duty, [51.0])
    assert duty.is_slow


def test_the_pause_between_two_streams_is_no_gap() -> None:
    duty = TimeShare(DutyConfig(inter_token_p95_ms=50.0))
    for start in range(0, 100_000, 1000):
        duty.note_tokens(float(start), False)  # a step that reads the prompt
        tokens(duty, [10.0], float(start + 90))
    assert not duty.is_slow
