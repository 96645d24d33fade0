"""Grammars on the reference runner: random rows say what they say alone, and what they say matches."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from random import Random

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from msgspec import structs

from mlx_tandem.engine import messages as m
from mlx_tandem.engine.grammars import masks, shared, threads
from mlx_tandem.engine.grammars.compiling import compiled
from mlx_tandem.engine.grammars.masks import Grammars
from mlx_tandem.engine.grammars.matching import Matching
from mlx_tandem.engine.masks import Place
from mlx_tandem.engine.plan import Mask
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.types import AdapterRef, AdapterSource, Grammar, Request, SamplingParams
from tests.engine.front import Front
from tests.engine.guessing import RowByRow
from tests.engine.toy_model import alone
from tests.engine.workloads import VOCAB, digest_of, make_engine, mask_at

EOS = 0
TOKENS = [b"", b"a", b"b", b"c", b"ab", b"abc", b"0", b"1", b"10", b"x", b"-", b"(", b")"]
assert len(TOKENS) == VOCAB
PATTERNS = ("[ab]{2,9}", "(ab|ba)*-[01]+", "a+b+c+", "(x[01]{1,3}-?){1,4}", "(abc|a|b)?1*")
NESTED = 'start: "(" (start | ITEM)* ")"\nITEM: /[abc01]{1,3}/'


def tokenizer() -> LLTokenizer:
    class Spelling:
        """Spells with one token for each byte, or an error for what has none."""

        eos_token_id, bos_token_id, special_token_ids = EOS, None, [EOS]
        tokens = TOKENS

        def __call__(self, text: bytes | str) -> list[int]:
            raw = text.encode() if isinstance(text, str) else text
            return [TOKENS.index(bytes([b])) for b in raw if bytes([b]) in TOKENS]

    return LLTokenizer(TokenizerWrapper(Spelling()), n_vocab=VOCAB)


OPENED = tokenizer()


def lark(pattern: str) -> bytes:
    return (pattern if pattern.startswith("start") else f"start: /{pattern}/").encode()


def store() -> Grammars:
    return Grammars(lambda: OPENED, VOCAB, lambda: None)


def admit(grammars: Grammars, request: Request) -> None:
    """Wait until the grammar of a request is compiled, as the core does over its turns."""
    while not grammars.hold(request):
        while not list(grammars.poll()):
            pass


def mask_alone(request: Request) -> Callable[[Sequence[int]], bytes] | None:
    """The oracle: a new matcher for each mask."""
    grammar = request.grammar
    if grammar is None:
        return None

    def mask_of(tokens: Sequence[int]) -> bytes:
        matcher = compiled(OPENED, grammar.text.decode())
        assert matcher.consume_tokens(list(tokens[len(request.prompt) :]))
        return matcher.compute_bitmask()[:4]

    return mask_of


def expected(request: Request, choice: int) -> list[int]:
    mask_of = mask_alone(request)
    return alone(request.prompt, request.params, choice, digest_of(request), VOCAB, (EOS,), mask_of=mask_of)


class Guesses(RowByRow):
    """A proposer that is right as often as not."""

    def __init__(self, rng: Random):
        self._rng = rng

    def needs_newest(self, request: Request, choice: int) -> bool:
        return self._rng.random() < 0.7

    def propose(self, request: Request, choice: int, tokens: Sequence[int], unread: int, most: int) -> list[int]:
        said = expected(request, choice)[len(tokens) + unread - len(request.prompt) :]
        guesses = [t if self._rng.random() < 0.7 else self._rng.randrange(VOCAB) for t in said]
        return guesses[: min(most, self._rng.randint(0, 5))]


def play(rng: Random) -> tuple[int, int, int, int]:
    """One random workload; return how many choices ended, how many matched to the end, preemptions, and drafts."""
    engine = make_engine(
        num_blocks=rng.choice((9, 14, 60)),
        block_size=rng.choice((1, 4)),
        max_num_seqs=rng.randint(2, 6),
        depth=rng.choice((0, 1, 1)),
        eos=(EOS,),
        piggybacked=rng.choice((0, 3)),
        fail={rng.randrange(40): "wait"} if rng.random() < 0.3 else {},
        again=frozenset(range(0, 40, 2)),
    )
    loop, grammars = engine.loop, store()
    engine.scheduler.mask_maker = grammars
    if rng.random() < 0.4:
        engine.scheduler.drafting.proposer = Guesses(rng)
    prompts = [tuple(rng.randrange(1, VOCAB) for _ in range(9)) for _ in range(2)]
    total = rng.randint(2, 8)
    while True:
        while len(loop.requests) < total and rng.random() < 0.4:
            made = draw(rng, len(loop.requests), prompts, engine.max_num_seqs, engine.room)
            admit(grammars, made)
            loop.add(made)
        if rng.random() < 0.03 and (open_choices := loop.open_choices()):
            key = rng.choice(open_choices)
            loop.cancel(key[0], rng.choice((None, key[1])))
        busy = loop.step()
        assert loop.steps < 2000, "no progress"
        if not busy and len(loop.requests) == total:
            break
    loop.assert_idle()
    assert not grammars._places, "states of choices that have ended are kept"
    matched = 0
    for (request, choice), tokens in loop.tokens.items():
        asked = loop.requests[request]
        want = expected(asked, choice)
        finish = loop.finished.get((request, choice))
        assert tokens == (want if finish else want[: len(tokens)]), f"request {request}, choice {choice}"
        if finish == "stop" and asked.grammar is not None:
            text = b"".join(TOKENS[t] for t in tokens).decode()
            pattern = asked.grammar.text.decode().removeprefix("start: /").removesuffix("/")
            assert pattern.startswith("start") or re.fullmatch(pattern, text), text
            matched += 1
    grammars.close()
    return len(loop.finished), matched, engine.scheduler.queue.preemptions, engine.runner.drafted


def draw(rng: Random, number: int, prompts: list[tuple[int, ...]], seats: int, room: int) -> Request:
    prompt = rng.choice(prompts)[: min(rng.randint(1, 9), room - 2)]
    params = SamplingParams(
        max_tokens=min(rng.randint(2, 14), room - len(prompt)),
        temperature=rng.choice((0.0, 1.0)),
        seed=rng.randrange(9),
        presence_penalty=rng.choice((0.0, 0.5)),
        logprobs=rng.choice((None, 0)),
    )
    pattern = rng.choice((*PATTERNS, NESTED, None))
    grammar = None if pattern is None else Grammar(lark(pattern), "guided_regex")
    return Request(number, prompt, params, n=min(rng.choice((1, 2, 3)), seats), grammar=grammar)


WORKLOADS = 60


def test_constrained_rows_say_what_they_say_alone_and_match() -> None:
    """Preemption, choices of one prompt, cached prefixes, drafts, failing steps and cancels change nothing."""
    counts = [play(Random(seed)) for seed in range(WORKLOADS)]
    ended, matched, preempted, drafted = map(sum, zip(*counts, strict=True))
    assert ended > 300 and matched > 80 and min(preempted, drafted) > 20, counts


def _no_rollback(patch: pytest.MonkeyPatch) -> None:
    """Drafts that were not accepted stay in the matcher."""

    def change(self: Matching, tokens: Sequence[int], begin: int) -> tuple[int, list[int]]:
        return 0, list(tokens[begin + len(self.consumed) :])

    patch.setattr(Matching, "change", change)


def _places(patch: pytest.MonkeyPatch, change: Callable[[Place], Place]) -> None:
    """Masks are made for other places than were asked for."""
    original = Grammars.masks
    patch.setattr(Grammars, "masks", lambda self, places: [original(self, [change(place)])[0] for place in places])


def _one_matcher(patch: pytest.MonkeyPatch) -> None:
    """All choices of a request share one state."""
    _places(patch, lambda place: place._replace(choice=0))


def _one_token_late(patch: pytest.MonkeyPatch) -> None:
    """Masks are those of the token before."""
    _places(patch, lambda p: p._replace(tokens=p.tokens[: max(len(p.tokens) - 1, len(p.request.prompt))]))


def _prompt_is_matched(patch: pytest.MonkeyPatch) -> None:
    """The prompt is taken for output."""
    _places(patch, lambda place: place._replace(request=structs.replace(place.request, prompt=())))


def _masks_of_neighbours(patch: pytest.MonkeyPatch) -> None:
    """Rows get each other's masks."""
    original = Grammars.masks
    patch.setattr(Grammars, "masks", lambda self, places: original(self, places)[::-1])


def _forget_all(patch: pytest.MonkeyPatch) -> None:
    """The end of one choice forgets all choices."""

    def forget(self: Grammars, request: int, choice: int) -> None:
        for key in [key for key in self._places if key[0] == request]:
            del self._places[key]

    patch.setattr(Grammars, "forget", forget)


def _never_forget(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Grammars, "forget", lambda self, request, choice: None)


@pytest.mark.parametrize(
    "plant",
    [
        _no_rollback,
        _one_matcher,
        _one_token_late,
        _prompt_is_matched,
        _masks_of_neighbours,
        _forget_all,
        _never_forget,
    ],
)
def test_planted_bugs_are_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found = False
    for seed in range(WORKLOADS):
        try:
            play(Random(seed))
        except Exception:
            found = True
            break
    assert found


def request(pattern: str, number: int = 0, n: int = 1) -> Request:
    return Request(number, (1,), SamplingParams(5), n=n, grammar=Grammar(lark(pattern), "guided_regex"))


def test_a_grammar_that_cannot_be_compiled_refuses_its_requests() -> None:
    grammars = store()
    with pytest.raises(InvalidRequest) as e:
        admit(grammars, request("(a"))
    assert e.value.param == "guided_regex"
    assert grammars.is_idle and not grammars._places
    admit(grammars, request("a", 1))  # others go on


def test_requests_with_one_grammar_wait_for_one_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(masks, "compiled", lambda opened, *own: (made.append(own[0]), compiled(opened, *own))[1])
    grammars = store()
    assert not grammars.hold(request("ab", 0))
    assert not grammars.hold(request("ab", 1, n=2))
    assert [r.id for r in grammars.waiting] == [0, 1]
    ready: list[Request] = []
    while len(ready) < 2:
        ready += grammars.poll()
    assert all(map(grammars.hold, ready)) and made == ["start: /ab/"]
    assert grammars.hold(request("ab", 2)), "compiled grammars are kept"
    assert len(grammars._places) == 4


def test_a_request_that_is_cancelled_while_it_waits_is_gone() -> None:
    grammars = store()
    assert not grammars.hold(request("ab", 0)) and not grammars.hold(request("ab", 1))
    grammars.cancel(0)
    ready: list[Request] = []
    while not ready:
        ready += grammars.poll()
    assert [r.id for r in ready] == [1] and grammars.is_idle


@pytest.mark.promise("E6")
def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MOST_GRAMMARS", 2)
    grammars = store()
    for number, pattern in enumerate(("a", "b", "a", "c")):
        admit(grammars, request(pattern, number))
        grammars.release(request(pattern, number))
    assert len(grammars._store._kept) == 2
    assert grammars.hold(request("a", 9)), "the last used ones are kept"
    assert not grammars.hold(request("b", 10))


@pytest.mark.promise("E6")
@pytest.mark.parametrize("room", [200, 20], ids=["by their number", "by their bytes"])
def test_any_number_of_grammars_keeps_few(room: int) -> None:
    most = room * shared.size_of("x" * 40, 0)
    grammars = Grammars(lambda: OPENED, VOCAB, lambda: None, most_bytes=most)
    for number in range(150):
        asked = request(f"[ab]{{{number + 1},{number + 2}}}", number)
        admit(grammars, asked)
        grammars.release(asked)
        assert len(grammars._store._kept) <= min(shared.MOST_GRAMMARS, room) and grammars._store.bytes <= most
    assert len(grammars._store._kept) == min(shared.MOST_GRAMMARS, room), "no fewer than there is room for"
    grammars.close()


def test_a_matcher_that_fails_says_why_once() -> None:
    grammars = store()
    asked = request("ab")
    admit(grammars, asked)
    assert grammars.failure(0) is None
    mask = mask_at(grammars, Place(asked, 0, (1, TOKENS.index(b"c"))))
    assert not any(mask), "nothing may follow a token that is not allowed"
    error = grammars.failure(0)
    assert error is not None and error.param == "guided_regex"
    assert grammars.failure(0) is None


def test_masks_made_together_are_those_made_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This also holds if one of the matchers fails."""
    monkeypatch.setattr(threads, "STEP_SECONDS", 60.0)  # so that none is late on a busy machine
    grammars = store()
    asked = [request(pattern, number) for number, pattern in enumerate(("ab", "[abc]{3}", "c+"))]
    for one in asked:
        admit(grammars, one)
    bad = Place(asked[0], 0, (1, TOKENS.index(b"c")))
    places = [bad, Place(asked[1], 0, (1, TOKENS.index(b"b"))), Place(asked[2], 0, (1,))]
    made = [bytes(mask) for mask in grammars.masks(places)]
    assert grammars.failure(0) is not None and grammars.failure(1) is None
    assert made == [bytes(mask) for place in places for mask in grammars.masks([place])]
    assert not any(made[0]) and len(set(made)) == 3


def test_a_tokenizer_that_cannot_be_opened_refuses_requests_and_not_the_engine() -> None:
    def fails() -> LLTokenizer:
        raise InvalidRequest("no")

    grammars = Grammars(fails, VOCAB, lambda: None)
    for number in range(2):
        with pytest.raises(InvalidRequest):
            admit(grammars, request("a", number))


def test_the_matchers_of_choices_share_nothing() -> None:
    first = compiled(OPENED, "start: /ab/")
    second = first.deep_copy()
    assert isinstance(first, LLMatcher) and first.consume_token(1)
    assert second.consume_token(TOKENS.index(b"ab")) and not first.is_accepting() and second.is_accepting()


# --- the core ----------------------------------------------------------------------------------------------------


@pytest.fixture
def front(make_front: Callable[..., Front]) -> Front:
    made = make_front(eos=(EOS,))
    made.core._grammars._open_tokenizer = lambda: OPENED
    return made


def test_a_request_waits_for_its_grammar_and_others_do_not(front: Front) -> None:
    constrained = structs.replace(request("[ab]{2,4}", 1, n=2), params=SamplingParams(6, temperature=1.0))
    front.send(m.Submit(constrained), m.Submit(Request(2, (1, 2), SamplingParams(4, temperature=0.0))))
    front.finish()
    assert front.finished() == {1, 2}
    for choice in range(2):
        want = alone((1,), constrained.params, choice, "", VOCAB, (EOS,), mask_of=mask_alone(constrained))
        assert front.tokens(1, choice) == want
    front.assert_nothing_is_held()


def test_masks_are_made_while_the_forward_runs_and_the_step_before_has_been_read(front: Front) -> None:
    asked = structs.replace(request("[ab]{4}", 1), params=SamplingParams(3, temperature=0.0))
    front.send(m.Submit(asked))
    front.finish()
    calls = ["launch 0", "sample 0", "launch 1", "wait 0", "sample 1", "launch 2", "wait 1", "sample 2", "wait 2"]
    assert front.runner.calls == calls


def test_a_request_is_refused_by_the_field_that_has_no_grammar(front: Front) -> None:
    front.send(m.Submit(request("(a", 1)), m.Submit(request("ab", 2)))
    front.finish()
    (failed,) = front.got(m.Failed)
    assert (failed.request, failed.param, failed.retryable) == (1, "guided_regex", False)
    front.assert_nothing_is_held()


def test_a_grammar_that_fails_while_the_text_grows_ends_its_request_alone(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Grammars.masks

    def masks_of(self: Grammars, places: Sequence[Place]) -> list[Mask]:
        wrong = [place.request.id == 1 and len(place.tokens) > 2 for place in places]
        behind = [place._replace(tokens=[*place.tokens, TOKENS.index(b"x")]) for place in places]
        return original(self, [after if w else place for w, place, after in zip(wrong, places, behind, strict=True)])

    monkeypatch.setattr(Grammars, "masks", masks_of)
    front.send(m.Submit(request("[ab]{4}", 1)), m.Submit(request("[ab]{4}", 2)))
    front.finish()
    (failed,) = front.got(m.Failed)
    assert (failed.request, failed.code, failed.retryable) == (1, "grammar_too_complex", False)
    assert failed.param == "guided_regex" and front.finished() == {2}
    front.assert_nothing_is_held()


def test_an_adapter_stays_in_memory_while_its_request_waits_for_a_grammar(
    make_front: Callable[..., Front], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others end and are cancelled meanwhile, and another adapter needs its room."""
    front = make_front(eos=(EOS,), most_loaded=1)
    go_on = threading.Event()

    def opened() -> LLTokenizer:
        assert go_on.wait(20)
        return OPENED

    monkeypatch.setattr(front.core._grammars, "_open_tokenizer", opened)
    front.load("a")
    constrained = structs.replace(request("[ab]{2,4}", 1), adapter=AdapterRef("a", 1, "a"))
    front.send(m.Submit(constrained), m.Submit(Request(2, (1, 2), SamplingParams(4))))
    front.send(m.Submit(Request(3, (1, 2), SamplingParams(30))))
    while 2 not in front.finished():
        front.turn()
    front.send(m.Cancel(3), m.LoadAdapter(9, AdapterSource("/adapters/b")))
    while not front.got(m.AdapterLoaded)[1:]:
        front.turn()
    assert "a" in front.weights and front.core._adapters.store.users("a") == 1
    front.send(m.Cancel(1))
    front.turn()
    assert front.core._adapters.store.users("a") == 0, "who is cancelled while it waits holds nothing"
    go_on.set()
    front.finish()
    front.assert_nothing_is_held()


def test_every_choice_that_waits_for_a_grammar_is_counted_as_waiting(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def opened() -> LLTokenizer:
        assert go_on.wait(20)
        return OPENED

    monkeypatch.setattr(front.core._grammars, "_open_tokenizer", opened)
    front.send(m.Submit(request("[ab]{2,4}", 1, n=3)), m.Submit(request("[ab]{2,4}", 2)))
    front.turn()
    load = front.got(m.Occupancy)[-1]
    assert (load.running, load.waiting, load.deferred) == (0, 4, 4)
    go_on.set()
    front.finish()
    assert front.finished() == {1, 2}
    load = front.got(m.Occupancy)[-1]
    assert (load.running, load.waiting, load.deferred) == (0, 0, 0)
