"""Which trainer goes next."""

from __future__ import annotations

from mlx_tandem.engine import messages as m
from mlx_tandem.engine.learning import Batch, Datum, LossConfig
from mlx_tandem.engine.trainer_queues import TrainerQueues, Work


def a_pass(call: int, *names: str) -> m.ForwardBackward:
    data = (Datum((0,), 1, ()),)
    return m.ForwardBackward(call, tuple(Batch(name, data, LossConfig()) for name in names), False, call)


def run(queues: TrainerQueues, milliseconds: float) -> str:
    """Run the next work, in one slice of so many milliseconds; its trainer."""
    work: Work = queues.chosen()
    queues.begin(work)
    queues.charge(work.slice, milliseconds)
    queues.remove(work)
    return work.trainers[0]


def test_who_asks_for_one_thing_at_a_time_pays_for_it_all_the_same() -> None:
    queues = TrainerQueues()
    queues.add(a_pass(0, "dear"))
    for call in range(1, 20):
        queues.add(a_pass(call, "cheap"))
    order = [run(queues, 100.0)]
    assert order == ["dear"]
    for call in range(20, 30):
        queues.add(a_pass(call, "dear"))
        name = run(queues, 10.0)
        order.append(name)
        if name == "dear":
            break
        queues.remove(queues.first("dear"))  # its caller takes it back, and asks again
    assert order.count("cheap") >= 9, "as long as its own work took"


def test_the_time_of_a_pass_is_charged_to_its_trainers_in_equal_parts() -> None:
    queues = TrainerQueues()
    for call, names in enumerate(("c", "c", "ab", "a")):
        queues.add(a_pass(call, *names))
    assert [run(queues, milliseconds) for milliseconds in (60.0, 100.0)] == ["c", "a"]
    assert run(queues, 1.0) == "a", "it has had 50 milliseconds, c 60"


def test_what_a_trainer_had_before_everything_was_done_is_not_held_against_it() -> None:
    queues = TrainerQueues()
    queues.add(a_pass(0, "a"))
    assert run(queues, 1000.0) == "a"
    for call in range(1, 9):
        queues.add(a_pass(call, "ba"[call % 2]))
    assert sorted(run(queues, 100.0) for _ in range(4)) == ["a", "a", "b", "b"]
