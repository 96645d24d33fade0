"""Which trainer goes next."""

from __future__ import annotations

from mlx_tandem.engine import messages as m
from mlx_tandem.engine.learning import Batch, Datum, LossConfig
from mlx_tandem.engine.trainer_queues import TrainerQueues, Work


def a_pass(call: int, name: str) -> m.ForwardBackward:
    return m.ForwardBackward(call, (Batch(name, (Datum((0,), 1, ()),), LossConfig()),), False, call)


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
