"""Masks that take long: nobody waits for those of another grammar, and rows that wait say what they say alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
from msgspec import structs

from mlx_tandem.engine import messages as m
from mlx_tandem.engine.grammars import matching, threads
from mlx_tandem.engine.grammars.masks import Grammars
from mlx_tandem.engine.grammars.matching import Job
from mlx_tandem.engine.grammars.shared import QUICK_MASKS
from mlx_tandem.engine.masks import Place
from mlx_tandem.types import Request, SamplingParams
from tests.engine.front import Front
from tests.engine.test_grammars import EOS, OPENED, TOKENS, VOCAB, admit, mask_alone, request
from tests.engine.toy_model import alone
from tests.waiting import until

SLOW = "[ab]{4,9}"
A = TOKENS.index(b"a")


class Gate:
    """Holds up the masks of one grammar, but the first of a text, until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.held: list[Job] = []

    def pass_through(self, job: Job) -> None:
        if SLOW in job.place.grammar.text and not self.opened.is_set():
            self.held.append(job)
            assert self.opened.wait(60)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    original = Job.make
    monkeypatch.setattr(Job, "make", lambda self: (made.pass_through(self), original(self))[1])
    monkeypatch.setattr(threads, "STEP_SECONDS", 0.03)  # enough for quick masks on a busy machine
    yield made
    made.opened.set()


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(lambda: OPENED, VOCAB, lambda: None)
    yield made
    made.close()


def prepared(grammars: Grammars, place: Place) -> bytes:
    grammars.prepare(place)
    until(lambda: grammars.is_ready(place.request.id, place.choice))
    (mask,) = grammars.masks([place])
    assert mask is not None
    return bytes(mask)


def oracle(place: Place) -> bytes:
    mask_of = mask_alone(place.request)
    assert mask_of is not None
    return mask_of(place.tokens)


def test_a_mask_that_takes_long_is_late_and_those_of_other_grammars_are_not(gate: Gate, grammars: Grammars) -> None:
    slow, quick = request(SLOW, 1, n=2), [request(pattern, i) for i, pattern in ((2, "[abc]{9}"), (3, "a+b"))]
    for each in (slow, *quick):
        admit(grammars, each)
    assert None not in grammars.masks([Place(slow, choice, (1,)) for choice in (0, 1)]), "a text begins at once"
    places = [Place(each, choice, (1, A)) for each, choice in ((slow, 0), (quick[0], 0), (slow, 1), (quick[1], 0))]
    for _ in range(2):
        first, second, third, fourth = grammars.masks(places)
        assert first is None and third is None
        assert [second, fourth] == [oracle(places[1]), oracle(places[3])]
    assert grammars.is_slow(1, 0) and grammars.is_slow(1, 1)
    assert not grammars.is_slow(2, 0) and not grammars.is_slow(3, 0)
    assert len(gate.held) == 1, "other threads wait for a lexer in use"
    gate.opened.set()
    assert [prepared(grammars, places[at]) for at in (0, 2)] == [oracle(places[at]) for at in (0, 2)]


def test_a_slow_grammar_is_slow_until_its_masks_are_quick_again(gate: Gate, grammars: Grammars) -> None:
    asked = request(SLOW, 1)
    admit(grammars, asked)
    place = Place(asked, 0, (1, A))
    assert grammars.masks([place]) == [None]
    gate.opened.set()
    for turn in range(1000 * QUICK_MASKS):  # A busy machine makes some of them slow.
        place = Place(asked, 0, (1, *[A] * (1 + turn % 2)))
        assert prepared(grammars, place) == oracle(place)
        if not grammars.is_slow(1, 0):
            break
    assert not grammars.is_slow(1, 0) and turn + 1 >= QUICK_MASKS
    place = Place(asked, 0, (1, A, A, A))
    assert grammars.masks([place]) == [oracle(place)]
    gate.opened.clear()
    assert grammars.masks([Place(asked, 0, (1, A))]) == [None]
    gate.opened.set()
    for turn in range(4 * QUICK_MASKS - 1):
        prepared(grammars, Place(asked, 0, (1, *[A] * (1 + turn % 2))))
        assert grammars.is_slow(1, 0), "it is as soon quick again as the first time"


def test_tokens_are_consumed_ahead_of_steps_as_within_them(gate: Gate, grammars: Grammars) -> None:
    """Also those of drafts that were not accepted."""
    asked = request(SLOW, 1)
    admit(grammars, asked)
    assert grammars.masks([Place(asked, 0, (1, A))]) == [None]
    gate.opened.set()
    for text in (b"a", b"abab", b"ab", b"abba", b"", b"bbbbbbbbb"):
        place = Place(asked, 0, (1, *[TOKENS.index(bytes([c])) for c in text]))
        assert prepared(grammars, place) == oracle(place)


def test_a_mask_that_stays_late_fails_its_request(gate: Gate) -> None:
    now = [0.0]
    grammars = Grammars(lambda: OPENED, VOCAB, lambda: None, clock=lambda: now[0])
    asked = request(SLOW, 1)
    admit(grammars, asked)
    place = Place(asked, 0, (1, A))
    assert grammars.masks([place]) == [None]
    grammars.prepare(place)
    now[0] = matching.WAITING_SECONDS
    assert not grammars.is_ready(1, 0) and grammars.failure(1) is None
    now[0] += 1
    assert grammars.is_ready(1, 0)
    (mask,) = grammars.masks([place])
    assert mask is not None and not any(mask)
    why = grammars.failure(1)
    assert why is not None and "takes too long" in why.message and why.param == "guided_regex"
    grammars.forget(1, 0)
    assert grammars._store.find(gate.held[0].place.grammar.digest) is not None
    assert gate.held[0].place.grammar.users == 1, "a thread still has its lexer"
    gate.opened.set()
    until(lambda: not gate.held[0].is_open)
    assert not list(grammars.poll()) and gate.held[0].place.grammar.users == 0
    grammars.close()


def test_masks_that_take_too_long_in_all_fail_their_request(gate: Gate) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.9
        return now[0]

    grammars = Grammars(lambda: OPENED, VOCAB, lambda: None, clock=clock)
    asked = request(SLOW, 1)
    admit(grammars, asked)
    assert grammars.masks([Place(asked, 0, (1, A))]) == [None]
    gate.opened.set()
    seconds = 0.0
    while (why := grammars.failure(1)) is None:
        prepared(grammars, Place(asked, 0, (1, *[A] * (1 + int(seconds) % 2))))
        seconds += 1
        assert seconds < 2 * matching.MASKS_SECONDS
    assert "too long" in why.message and seconds > matching.MASKS_SECONDS / 2
    grammars.close()


def test_a_mask_that_breaks_fails_its_request(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a step and ahead of one."""
    asked = [request("[ab]{9}", number) for number in (1, 2)]
    for each in asked:
        admit(grammars, each)

    def broken(job: Job) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(Job, "make", broken)
    (within,) = grammars.masks([Place(asked[0], 0, (1, A))])
    ahead = prepared(grammars, Place(asked[1], 0, (1, A)))
    assert within is not None and not any(within) and not any(ahead)
    for number in (1, 2):
        why = grammars.failure(number)
        assert why is not None and "RuntimeError" in why.message


def test_threads_that_are_left_with_a_mask_end(gate: Gate, grammars: Grammars) -> None:
    asked = [request(SLOW, 1), request("a{9}", 2)]
    for each in asked:
        admit(grammars, each)
    names = {"tandem-step-masks"}
    before = {t for t in threading.enumerate() if t.name in names}
    grammars.masks([Place(each, 0, (1, A)) for each in asked])
    grammars.masks([Place(asked[1], 0, (1, A, A))])
    mine = {t for t in threading.enumerate() if t.name in names} - before
    assert len(mine) == 2
    gate.opened.set()
    until(lambda: len([t for t in mine if t.is_alive()]) == 1)


# --- the engine --------------------------------------------------------------------------------------------------


@pytest.fixture
def front(make_front: Callable[..., Front]) -> Front:
    made = make_front(eos=(EOS,))
    made.core._grammars._open_tokenizer = lambda: OPENED
    return made


def asked_slowly(n: int = 1) -> Request:
    return structs.replace(request(SLOW, 1, n=n), params=SamplingParams(8, temperature=1.0))


def assert_exact(front: Front, asked: Request) -> None:
    for choice in range(asked.n):
        mask_of = mask_alone(asked)
        want = alone(asked.prompt, asked.params, choice, "", VOCAB, (EOS,), mask_of=mask_of)
        assert front.tokens(asked.id, choice) == want


@pytest.mark.promise("E10")
@pytest.mark.parametrize("choices", [1, 2])
def test_others_go_on_while_a_mask_is_made_and_its_request_loses_nothing(
    front: Front, gate: Gate, choices: int
) -> None:
    slow = asked_slowly(choices)
    others = [structs.replace(request("[abc]{30}", 2), params=SamplingParams(20, temperature=1.0))]
    others.append(Request(3, (1, 2), SamplingParams(20, temperature=0.0)))
    front.send(m.Submit(slow), *map(m.Submit, others))
    while not {2, 3} <= front.finished():
        front.turn()
    assert 1 not in front.finished() and len(gate.held) == 1
    gate.opened.set()
    front.finish()
    assert front.finished() == {1, 2, 3} and not front.got(m.Failed)
    for each in (slow, *others[:1]):
        assert_exact(front, each)
    front.assert_nothing_is_held()


def test_a_request_whose_mask_stays_late_ends_with_a_typed_error(front: Front, gate: Gate) -> None:
    now = [0.0]
    front.core._grammars._clock = lambda: now[0]
    front.send(m.Submit(asked_slowly()), m.Submit(Request(2, (1, 2), SamplingParams(20, temperature=0.0))))
    while not gate.held or 2 not in front.finished():
        front.turn()
    now[0] = matching.WAITING_SECONDS + 1
    while not front.got(m.Failed):
        front.turn()
    (failed,) = front.got(m.Failed)
    assert (failed.request, failed.code, failed.param) == (1, "grammar_too_complex", "guided_regex")
    gate.opened.set()
    front.finish()
    front.assert_nothing_is_held()


def test_a_request_that_waits_for_its_mask_can_be_cancelled(front: Front, gate: Gate) -> None:
    front.send(m.Submit(asked_slowly(2)))
    while not gate.held:
        front.turn()
    front.send(m.Cancel(1))
    front.turn()
    assert not front.core._scheduler.requests
    front.send(m.Submit(structs.replace(asked_slowly(), id=2)))
    gate.opened.set()
    front.finish()
    assert front.finished() == {2}
    front.assert_nothing_is_held()


def test_many_batches_at_once_make_the_masks_that_they_make_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that leave no time make masks late or not, as the threads happen to run."""
    monkeypatch.setattr(threads, "STEP_SECONDS", 0.0)
    grammars = Grammars(lambda: OPENED, VOCAB, lambda: None)
    asked = [request(pattern, number, n=2) for number, pattern in enumerate(("[ab]{2,9}", "(ab|ba)*x", "[abc]{30}"))]
    for each in asked:
        admit(grammars, each)
    texts: dict[tuple[int, int], Sequence[int]] = {(each.id, c): (1,) for each in asked for c in range(2)}
    for turn in range(30):
        places = [Place(each, choice, texts[each.id, choice]) for each in asked for choice in range(2)]
        for place, mask in zip(places, grammars.masks(places), strict=True):
            if mask is None:
                mask = prepared(grammars, place)
            assert bytes(mask) == oracle(place)
            allowed = [t for t in range(VOCAB) if t != EOS and mask[t // 8] >> t % 8 & 1]
            if allowed:
                texts[place.request.id, place.choice] = (*place.tokens, allowed[turn % len(allowed)])
    grammars.close()
