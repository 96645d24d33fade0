"""Random requests and two trainers through the whole loop: each request and message comes out as it would alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
from msgspec import structs

from mlx_tandem.config import DutyConfig
from mlx_tandem.engine import messages as m
from mlx_tandem.engine import pipeline
from mlx_tandem.engine.learning import TrainerSpec
from mlx_tandem.engine.plan import OutOfMemory
from mlx_tandem.types import Request
from tests.engine.front import Front, request
from tests.engine.hosts import PAIR, Backend, draw_message
from tests.engine.workloads import VOCAB, expected

SEEDS = 100
PLACES = 10
"""Seeds of one test, so that a failure names few."""


def draw_request(rng: Random, number: int) -> Request:
    drawn = request(number, n=rng.randint(1, 3), length=rng.randint(1, VOCAB - 1), max_tokens=rng.randint(1, 25))
    return structs.replace(drawn, background=rng.random() < 0.3)


def run_workload(rng: Random, steps: Random, make_front: Callable[..., Front]) -> tuple[int, int]:
    """One life of an engine, in which some steps fail; how many slices ran, and how many messages failed."""
    backend = Backend()
    share = rng.choice((0.05, 0.3, 0.9))
    options = {"one_at_a_time": True} if rng.random() < 0.5 else {}
    front = make_front(trainers=backend, duty=DutyConfig(inference=1 - share, training=share))
    for name, value in options.items():
        setattr(front.reference, name, value)
    front.send(*(m.OpenTrainer(10_000 + i, TrainerSpec(name, 1, 1.0)) for i, name in enumerate(PAIR)))
    front.finish()
    for _ in range(rng.choice((0, 1, 2))):
        broken = rng.choice((backend.fail, backend.fail_wait))
        broken[rng.choice(("a", "b", "ab")), rng.randint(0, 9)] = rng.choice((RuntimeError, OutOfMemory))("broken")
    failing = steps.sample(range(80), steps.choice((0, 6)))
    front.reference.fail = {number: steps.choice(("launch", "half", "wait")) for number in failing}
    front.reference.again = frozenset(front.reference.fail)  # all of them are computed again
    requests: list[Request] = []
    messages: list[m.Learning] = []
    slices = 0
    for _ in range(rng.randint(10, 60)):
        if rng.random() < 0.3:
            requests.append(draw_request(rng, len(requests)))
            front.send(m.Submit(requests[-1]))
        if rng.random() < 0.4:
            messages.append(draw_message(rng, len(messages), exports=True))
            front.send(messages[-1])
        slices += front.trainers.has_work
        front.turn()
    front.finish()
    for r in requests:
        assert not front.got(m.Failed)
        assert [front.tokens(r.id, choice) for choice in range(r.n)] == [expected(r, choice) for choice in range(r.n)]
    kinds = (m.PassDone, m.Stepped, m.AdapterLoaded, m.CallDone, m.CallFailed)
    answers = [x for x in front.received if isinstance(x, kinds)]
    assert Counter(x.call for x in answers) == Counter(x.call for x in messages), "a message is lost or answered twice"
    failed = [x for x in answers if isinstance(x, m.CallFailed)]
    assert all(x.code == "engine_error" for x in failed)
    front.assert_nothing_is_held()
    assert not front.trainers.has_work and not backend.under_way
    return slices, len(failed)


@pytest.mark.parametrize("place", range(PLACES))
def test_requests_and_two_trainers_come_out_as_alone(
    place: int, make_front: Callable[..., Front], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "APART_TOKENS", 10)
    slices = failed = 0
    for seed in range(place, SEEDS, PLACES):
        try:
            ran, lost = run_workload(Random(seed), Random(1000 + seed), make_front)
        except BaseException as e:
            e.add_note(f"seed {seed}")
            raise
        slices, failed = slices + ran, failed + lost
    assert slices > 100 and failed
