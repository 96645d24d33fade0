"""Masks that come too late: their rows wait a turn and say what they say alone, and so does everybody else."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from mlx_tandem.engine import run_queue
from mlx_tandem.engine.late_rows import LateRows
from mlx_tandem.types import Request, SamplingParams
from tests.engine.late import LateMasks
from tests.engine.random_workloads import Settings, play
from tests.engine.workloads import assert_exact, make_engine

SETTINGS = {
    "prefixes": Settings(masks=1.0, late=0.3, states=0.0),
    "states": Settings(masks=1.0, late=0.1, states=1.0),
    "windows": Settings(masks=1.0, late=0.8, windows=True, states=0.0),
    "a drive": Settings(masks=1.0, late=0.3, drives=1.0, states=0.0),
}
SEEDS = 40


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_queue, "OVERTAKEN_FOR_SLOT", Settings().patience)


def play_late(seed: int, settings: Settings) -> int:
    """Return how many masks of a workload were late."""
    made: list[LateMasks] = []
    original = LateMasks.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LateMasks, "__init__", lambda self, *args: (original(self, *args), made.append(self))[0])
        play(Random(seed), settings)
    return sum(masks.late for masks in made)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_rows_that_wait_a_turn_lose_and_change_no_token(settings: Settings) -> None:
    """With drafts, failing steps, preemption, cancels, adapters that change, and learning."""
    assert sum(play_late(seed, settings) for seed in range(SEEDS)) > SEEDS


def _drawn_by_late_rows(patch: pytest.MonkeyPatch) -> None:
    """What late rows draw is taken."""
    patch.setattr(LateRows, "drops", lambda self, plan, s: False)


def _every_row_is_void(patch: pytest.MonkeyPatch) -> None:
    """Later rows of a sequence that was late draw nothing, either."""
    original = LateRows.drops
    patch.setattr(LateRows, "drops", lambda self, plan, s: original(self, self._void[0] or plan, s))


def _not_held_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LateRows, "hold_back", lambda self, *args: None)


def _never_resumed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LateRows, "resume", lambda self, maker: None)


def _clears_nothing(patch: pytest.MonkeyPatch) -> None:
    """Rows of lost steps stay late."""
    patch.setattr(LateRows, "clear", lambda self: None)


PLANTS = [
    _drawn_by_late_rows,
    _every_row_is_void,
    _not_held_back,
    _never_resumed,
    _clears_nothing,
]


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_bugs_are_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found = False
    for seed in range(SEEDS):
        try:
            play_late(seed, SETTINGS["windows"])
        except (AssertionError, LookupError, ValueError):
            found = True
            break
    assert found


class AlwaysSlow(LateMasks):
    """Masks that come only if they are prepared, and requests that are always slow."""

    def is_slow(self, request: int, choice: int) -> bool:
        return True


@pytest.mark.promise("E10")
@pytest.mark.parametrize("choices", [1, 3])
def test_a_request_with_slow_masks_keeps_its_seat_and_holds_nobody_up(choices: int) -> None:
    engine = make_engine(num_blocks=60, block_size=4, max_num_seqs=6, max_loras=0, depth=1, eos=(0,))
    maker = engine.scheduler.mask_maker = AlwaysSlow(Random(1), 1.0)
    slow = Request(0, (1, 2, 3), SamplingParams(20, seed=0), n=choices)
    others = [Request(i, (1, 2, 3, i), SamplingParams(20, seed=1)) for i in (1, 2)]
    assert maker.constrains(slow) and not any(map(maker.constrains, others))
    for request in (slow, *others):
        engine.loop.add(request)
    done: list[int] = []
    while engine.loop.step():
        done += [request for request, _ in engine.loop.finished if request not in done]
    assert done[-1] == 0, "others wait for the masks of one"
    assert engine.loop.steps > 40 and engine.scheduler.queue.preemptions <= choices
    assert_exact(engine.loop, (0,), masks=maker)
    engine.loop.assert_idle()
