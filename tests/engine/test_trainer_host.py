"""The host of many trainers on a back end without a device: who goes next, in which order, and what fails with whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.engine import messages as m
from mlx_tandem.engine.learning import AdamParams, Batch, Datum, LossConfig, TrainerSpec
from mlx_tandem.engine.plan import DeviceError, OutOfMemory, Slice
from tests.engine.hosts import Backend, Driver, adapter

NAMES = "abcd"
ERRORS: tuple[type[Exception], ...] = (RuntimeError, ValueError, DeviceError, OutOfMemory)


def opened(*names: str) -> tuple[Backend, Driver]:
    """A back end and a driver whose trainers of these names are open."""
    backend = Backend()
    return backend, Driver(backend).open(*names)


def a_pass(call: int, names: str, pieces: Sequence[int]) -> m.ForwardBackward:
    """The length of each piece, in slices. The call is handed to the back end as the number of tokens."""
    data = tuple(Datum((0,) * slices, 1, ()) for slices in pieces)
    return m.ForwardBackward(call, tuple(Batch(name, data, LossConfig()) for name in names), False, call)


pieces = st.lists(st.integers(1, 4), min_size=1, max_size=5)
teams = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True).map("".join)
kinds = st.sampled_from(["pass", "pass", "step", "publish", "settle", "save"])


def _message(call: int, kind: str, names: str, sizes: list[int]) -> m.Learning:
    match kind:
        case "pass":
            return a_pass(call, names, sizes)
        case "step":
            return m.OptimStep(call, names[0], AdamParams(0.1))
        case "publish":
            return m.PublishTrainer(call, names[0])
        case "settle":
            return m.SettleTrainer(call, names[0], True)
        case _:
            return m.SaveTrainer(call, names[0], "/folder")


def test_passes_under_way_say_how_far_they_are() -> None:
    _, driver = opened("a", "b")
    assert driver.host.passes() == ()
    driver.host.submit(a_pass(1, "a", [1, 1, 1, 1]))
    driver.host.submit(a_pass(2, "b", [1, 1]))
    seen = []
    while driver.host.jobs:
        driver.turn()
        seen.append({p.trainer: p.done for p in driver.host.passes()})
    for name, shares in (("a", [0.0, 0.25, 0.5, 0.75]), ("b", [0.0, 0.5])):
        own = [each[name] for each in seen if name in each]
        assert own == sorted(own) and sorted(set(own)) == shares
    assert seen[-1] == {}


@pytest.mark.promise("PRP-8")
@settings(max_examples=150)
@given(
    st.lists(st.tuples(kinds, teams, pieces, st.integers(0, 6)), max_size=25),
    st.lists(st.tuples(teams, st.integers(0, 8), st.sampled_from(ERRORS), st.booleans()), max_size=4),
)
def test_every_message_is_answered_once_and_in_order_of_its_trainer(
    asked: list[tuple[str, str, list[int], int]], broken: list[tuple[str, int, type[Exception], bool]]
) -> None:
    """Whatever fails: a step uses the gradients of exactly those passes of its own that went well since the last."""
    backend, driver = opened(*NAMES)
    for names, number, error, when in broken:
        (backend.fail_wait if when else backend.fail)[names, number] = error("broken")
    messages = [_message(call, kind, names, sizes) for call, (kind, names, sizes, _) in enumerate(asked)]
    for message, (*_, turns) in zip(messages, asked, strict=True):
        driver.host.submit(message)
        for _ in range(turns):
            driver.turn()
    driver.run()
    assert Counter(x.call for x in driver.answers) == Counter(range(len(messages)))  # type: ignore[union-attr]
    assert driver.host.next_slice() is None
    bad = {x.call for x in driver.answers if isinstance(x, m.CallFailed)}
    place = {x.call: i for i, x in enumerate(driver.answers)}  # type: ignore[union-attr]
    for name in NAMES:
        own = [x for x in messages if name in _names(x) and not isinstance(x, m.PublishTrainer | m.SaveTrainer)]
        assert [x.call for x in own] == sorted((x.call for x in own), key=place.__getitem__), "another order"
    for name in NAMES:
        since: list[int] = []
        used = []
        for x in messages:
            if name not in _names(x) or isinstance(x, m.PublishTrainer | m.SaveTrainer | m.SettleTrainer):
                continue
            if isinstance(x, m.OptimStep):
                used.append(since)
                since = []
            elif x.call in bad:
                since = []
            else:
                since.append(x.call)
        late = {n for names, *_ in broken for n in names}  # a slice may fail after the answer was given
        if name not in late:
            assert backend.steps[name] == used and backend.gradients[name] == since


def _names(message: m.Learning) -> str:
    if isinstance(message, m.ForwardBackward):
        return "".join(batch.trainer for batch in message.batches)
    assert not isinstance(message, m.OpenTrainer)
    return message.trainer


@settings(max_examples=100)
@given(
    st.lists(st.floats(0.2, 30.0), min_size=2, max_size=4),
    st.lists(pieces, min_size=2, max_size=4),
    st.integers(0, 200),
)
def test_trainers_share_learning_s_time_by_milliseconds(
    speeds: list[float], lengths: list[list[int]], late: int
) -> None:
    """However long their slices and their pieces are, and however long some of them wanted nothing before."""
    names = NAMES[: min(len(speeds), len(lengths))]
    cost = dict(zip(names, speeds, strict=False))
    _, driver = opened(*names)
    longest = {name: max(sizes) * cost[name] for name, sizes in zip(names, lengths, strict=False)}
    calls = iter(range(100_000))

    def keep_busy(who: str) -> None:
        queued = {x.name: x.jobs for x in driver.host.open_trainers()}
        for name, sizes in zip(names, lengths, strict=False):
            if name in who and queued[name] < 2:
                driver.host.submit(a_pass(next(calls), name, sizes))

    def turn(who: str, count: int) -> None:
        for _ in range(count):
            keep_busy(who)
            driver.turn(lambda slice_: cost[slice_.trainers[0]])

    turn(names[0], late)  # what it has had alone is not held against it
    before = dict(driver.took)
    turn(names, 600)
    had = {name: driver.took[name] - before.get(name, 0.0) for name in names}
    # Of each a piece more or less, and two slices whose time was not known when the next was chosen.
    for name in names:
        for other in names:
            bound = longest[name] + longest[other] + 3 * (cost[name] + cost[other])
            assert abs(had[name] - had[other]) <= bound, (had, bound)


def test_a_long_pass_does_not_keep_others_waiting() -> None:
    """A short message comes in after the piece that is under way."""
    backend, driver = opened("a", "b")
    driver.host.submit(a_pass(1, "a", [4] * 50))
    for _ in range(10):
        driver.turn()
    driver.host.submit(a_pass(2, "b", [4]))
    driver.host.submit(m.OptimStep(3, "b", AdamParams(0.1)))
    for _ in range(25):
        driver.turn()
    assert [x.call for x in driver.answers] == [2, 3]  # type: ignore[union-attr]
    driver.run()
    assert backend.gradients["a"] == [1]


def test_what_is_brief_goes_before_the_next_slice_of_another() -> None:
    _, driver = opened("a", "b")
    driver.host.submit(a_pass(1, "a", [40]))
    for _ in range(10):
        driver.turn()
    driver.host.submit(m.SettleTrainer(2, "b", True))
    slice_ = driver.host.next_slice()
    assert slice_ == Slice(("b",), "settle", 0) and slice_.is_brief
    driver.turn()
    assert [x.call for x in driver.answers] == [2]  # type: ignore[union-attr]
    following = driver.host.next_slice()
    assert following == Slice(("a",), "forward_backward", 10) and not following.is_brief


def test_a_pass_over_several_trainers_waits_for_each_and_is_one_piece_of_work() -> None:
    """What comes after it for one of them waits; a third trainer does not."""
    backend, driver = opened(*"abc")
    driver.host.submit(a_pass(1, "a", [3, 3]))
    driver.host.submit(a_pass(2, "ab", [3, 3]))
    driver.host.submit(a_pass(3, "b", [3]))
    driver.host.submit(a_pass(4, "c", [3]))
    driver.run()
    order = [x.call for x in driver.answers]  # type: ignore[union-attr]
    assert order.index(1) < order.index(2) < order.index(3) and order.index(4) < 2
    assert backend.gradients == {"a": [1, 2], "b": [2, 3], "c": [4]}
    assert {s.trainers for s in driver.slices} == {("a",), ("a", "b"), ("b",), ("c",)}


def test_slices_have_names_that_count_from_zero() -> None:
    _, driver = opened("a", "b")
    for call, name in enumerate("ab"):
        driver.host.submit(a_pass(call, name, [2, 1]))
    driver.run()
    for name in "ab":
        own = [s for s in driver.slices if s.trainers == (name,)]
        assert own == [Slice((name,), "forward_backward", i) for i in range(3)]


@pytest.mark.parametrize("when", ["launch", "wait"])
@pytest.mark.parametrize("error", ERRORS)
def test_a_failure_costs_its_own_trainer_its_gradients_and_nobody_else_anything(
    error: type[Exception], when: str
) -> None:
    backend, driver = opened(*NAMES)
    for call, name in enumerate(NAMES):
        driver.host.submit(a_pass(call, name, [1]))
    driver.run()
    broken = backend.fail if when == "launch" else backend.fail_wait
    broken["ab", 2] = error("at 0x7f00")
    driver.host.submit(a_pass(10, "ab", [2, 2]))
    for call, name in enumerate(NAMES):
        driver.host.submit(a_pass(20 + call, name, [3, 3]))
    driver.run()
    (failed,) = (x for x in driver.answers if isinstance(x, m.CallFailed))
    assert (failed.call, failed.code) == (10, "engine_error")
    assert "0x7f00" not in failed.message
    assert backend.gradients == {"a": [20], "b": [21], "c": [2, 22], "d": [3, 23]}
    assert len(driver.failures) == (error is DeviceError)


def test_slices_behind_one_that_failed_fail_nobody_twice() -> None:
    """They were launched with its arrays, and the device says the same of each of them."""
    backend, driver = opened("a", "b")
    backend.fail_wait = {("a", number): DeviceError("broken") for number in range(2, 8)}
    driver.host.submit(a_pass(1, "a", [8]))
    driver.host.submit(a_pass(2, "b", [1]))
    driver.run()
    assert sorted(x.call for x in driver.answers) == [1, 2]  # type: ignore[union-attr]
    assert len(driver.failures) == 1


def test_memory_is_admitted_before_anything_is_computed() -> None:
    """A refusal names what the trainer would take, what is left and who has the rest."""
    driver = Driver(Backend(), 3_000_000)
    sizes: Iterator[tuple[str, int]] = iter([("a", 2_000_000), ("b", 1_000_001), ("b", 1_000_000), ("a", 2_000_000)])
    for call, (name, size) in enumerate(sizes):
        driver.host.submit(m.OpenTrainer(call, TrainerSpec(name, size, 1.0)))
    driver.run()
    (failed,) = (x for x in driver.answers if isinstance(x, m.CallFailed))
    assert (failed.call, failed.param) == (1, "rank")
    assert "1.0 MB" in failed.message and "3.0 MB" in failed.message and "a has 2.0 MB" in failed.message
    assert [(x.name, x.nbytes) for x in driver.host.open_trainers()] == [("a", 2_000_000), ("b", 1_000_000)]
    driver.host.submit(m.CloseTrainer(10, "a"))
    driver.host.submit(m.OpenTrainer(11, TrainerSpec("c", 2_000_000, 1.0)))
    driver.run()
    assert [x.name for x in driver.host.open_trainers()] == ["b", "c"]
    assert len([x for x in driver.answers if isinstance(x, m.CallFailed)]) == 1


def test_no_trainer_begins_with_an_adapter_that_is_invoked() -> None:
    """A trainer applies its adapter to every position, so the answers would be others than those of the adapter."""
    driver = Driver(Backend())
    driver.host.submit(m.OpenTrainer(1, TrainerSpec("a", 1, 1.0), digest="plain"))
    driver.host.submit(m.OpenTrainer(2, TrainerSpec("b", 1, 1.0), digest="invoked"))
    for weights in (adapter("plain"), adapter("invoked", invocation=(5, 6))):
        driver.adapters.publish(weights)
    driver.run()
    (failed,) = (x for x in driver.answers if isinstance(x, m.CallFailed))
    assert (failed.call, failed.param) == (2, "init_from")
    assert "alora_invocation_tokens" in failed.message
    assert [x.name for x in driver.host.open_trainers()] == ["a"]


def test_where_nothing_is_trained_trainers_are_opened_published_and_saved_all_the_same() -> None:
    driver = Driver(Backend(), learns=False).open("a")
    asked: list[m.Learning] = [
        a_pass(0, "a", [1]),
        m.OptimStep(1, "a", AdamParams(0.1)),
        m.PublishTrainer(2, "a"),
        m.SaveTrainer(3, "a", "/folder"),
        m.SettleTrainer(4, "a", True),
        m.CloseTrainer(5, "a"),
    ]
    for message in asked:
        driver.host.submit(message)
    driver.run()
    failed = [(x.call, x.code, x.param) for x in driver.answers if isinstance(x, m.CallFailed)]
    assert failed == [(0, "conflict", "mode"), (1, "conflict", "mode")]
    assert sorted(x.call for x in driver.answers) == list(range(6))  # type: ignore[union-attr]


def test_a_stopped_host_answers_everybody_and_takes_nothing_more() -> None:
    _, driver = opened("a", "b")
    for call, names in enumerate(["a", "ab", "b"]):
        driver.host.submit(a_pass(call, names, [5, 5]))
    for _ in range(3):
        driver.turn()
    driver.host.stop()
    driver.host.submit(a_pass(3, "a", [1]))
    driver.run()
    said: list[Any] = driver.answers
    assert [(x.call, x.code) for x in said] == [(call, "engine_unavailable") for call in range(4)]
    assert not driver.host.has_work
