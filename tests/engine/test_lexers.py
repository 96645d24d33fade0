"""Lexers that become full: whoever fills one up goes on with another, and so does everybody who shared it."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mlx_tandem import demo
from mlx_tandem.engine.grammars import compiling, matching, shared
from mlx_tandem.engine.grammars.compiling import STATES, open_tokenizer
from mlx_tandem.engine.grammars.masks import Grammars
from mlx_tandem.engine.grammars.shared import SharedGrammar, Store, size_of
from mlx_tandem.engine.masks import Place, allows
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.grammar.constraint import Constraint, Schema
from mlx_tandem.generation.grammar.lark import grammar_of
from mlx_tandem.strict_json import dumps
from mlx_tandem.types import Grammar, Request, SamplingParams
from tests.engine.workloads import mask_at
from tests.waiting import until

VOCAB, EOS = 1024, 2
SMALL = (200, 400, 600)


def limits(states: int) -> LLParserLimits:
    return LLParserLimits(max_lexer_states=states, step_lexer_fuel=200_000, verbose_errors=False)


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return open_tokenizer(demo.MODEL_PATH, VOCAB, [EOS])


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> str:
    """The grammar of an ordinary schema, which fills lexers that are so small up within some tokens."""
    for states, small in zip(STATES, SMALL, strict=True):
        monkeypatch.setitem(compiling.LIMITS, states, limits(small))
    patterns = {
        f"k{i}": {"type": "string", "pattern": f"^.*[{'abcdefghijkl'[i]}-z].{{{5 + i % 4}}}$"} for i in range(12)
    }
    schema = {"type": "object", "properties": patterns, "required": [*patterns], "additionalProperties": False}
    return grammar_of(Constraint(Schema(dumps(schema)), "guided_json"), {})


class Choice:
    """A request with one choice, whose tokens are drawn at random from its masks."""

    def __init__(self, grammars: Grammars, number: int, text: str):
        self._grammars = grammars
        self.request = Request(number, (1,), SamplingParams(5), grammar=Grammar(text.encode(), "guided_json"))
        self.tokens = [1]
        ready: list[Request] = []
        while not grammars.hold(self.request):
            until(lambda: ready.extend(grammars.poll()) or ready)

    def mask(self) -> bytes:
        return bytes(mask_at(self._grammars, Place(self.request, 0, self.tokens)))

    def draw(self, rng: Random) -> bool:
        """Draw a token; return False if the text has ended or failed."""
        return self.add(self.mask(), rng)

    def add(self, mask: bytes, rng: Random) -> bool:
        """Add a token that the mask allows; return False if it allows none."""
        allowed = [token for token in range(VOCAB) if token != EOS and allows(mask, token)]
        if allowed:
            self.tokens.append(rng.choice(allowed))
        return bool(allowed)

    def end(self) -> None:
        self._grammars.forget(self.request.id, 0)


def alone(tokenizer: LLTokenizer, text: str, output: list[int]) -> bytes:
    """The oracle: a matcher with a lexer of its own, which has room for everything."""
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits(1_000_000))
    assert matcher.consume_tokens(output)
    return matcher.compute_bitmask()[: VOCAB // 8]


@pytest.mark.promise("E9")
def test_who_fills_a_lexer_up_fails_nobody_else(tokenizer: LLTokenizer, text: str) -> None:
    """One request goes on over the ends of the lexers that others fill up, and every mask of it is right."""
    grammars = Grammars(lambda: tokenizer, VOCAB, lambda: None)
    rng = Random(1)
    steady = Choice(grammars, 0, text)
    lexers: set[SharedGrammar] = set()
    for number in range(1, 9):
        other = Choice(grammars, number, text)
        for turn in range(200):
            if not other.draw(rng):
                break
            lexers.add(grammars._places[number, 0].grammar)
            if turn % 25 == 0:
                assert steady.mask() == alone(tokenizer, text, steady.tokens[1:])
                steady.draw(rng)
                assert grammars.failure(0) is None
        other.end()
    assert len(lexers) > 5, "no lexer was full"
    assert len(steady.tokens) > 10
    steady.end()
    assert not any(made.users for made in grammars._store._kept.values() if isinstance(made, SharedGrammar))
    grammars.close()


def test_who_comes_while_a_lexer_is_full_gets_another_one(tokenizer: LLTokenizer, text: str) -> None:
    grammars, rng = Grammars(lambda: tokenizer, VOCAB, lambda: None), Random(1)
    first = Choice(grammars, 0, text)
    full = grammars._places[0, 0].grammar
    while (mask := grammars.masks([Place(first.request, 0, first.tokens)])[0]) is not None or not full.is_exhausted:
        first.add(bytes(mask or first.mask()), rng)
    second = Choice(grammars, 1, text)
    assert not grammars._places[1, 0].grammar.is_exhausted
    for choice in (first, second):
        assert choice.mask() == alone(tokenizer, text, choice.tokens[1:])
        choice.end()
    made = [each for each in grammars._store._kept.values() if isinstance(each, SharedGrammar)]
    assert grammars._store.bytes == sum(each.size for each in made) and not any(each.users for each in made)
    grammars.close()


def test_a_text_goes_on_over_lexers_that_it_fills_up_itself(
    tokenizer: LLTokenizer, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matching, "RENEWING_TOKENS", 2)
    grammars, rng = Grammars(lambda: tokenizer, VOCAB, lambda: None), Random(3)
    choice = Choice(grammars, 1, text)
    lexers: set[SharedGrammar] = set()
    for turn in range(300):
        assert turn % 20 or choice.mask() == alone(tokenizer, text, choice.tokens[1:])
        lexers.add(grammars._places[1, 0].grammar)
        if not choice.draw(rng):
            break
    assert grammars.failure(1) is None and len(lexers) > 3
    grammars.close()


@pytest.mark.parametrize("tokens", [40, 10_000])
def test_a_text_that_fills_up_the_largest_lexer_at_once_fails_alone(
    tokenizer: LLTokenizer, text: str, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """A lexer of its own lasts for 16 tokens here, and the text begins with over 100 others."""
    monkeypatch.setattr(matching, "RENEWING_TOKENS", tokens)
    grammars, rng = Grammars(lambda: tokenizer, VOCAB, lambda: None), Random(3)
    choice, other = Choice(grammars, 1, text), Choice(grammars, 2, text)
    while choice.draw(rng):
        pass
    why = grammars.failure(1)
    assert why is not None and why.param == "guided_json" and "too many states" in why.message
    assert other.draw(rng) and other.mask() == alone(tokenizer, text, other.tokens[1:])
    choice.end()
    other.end()
    later = Choice(grammars, 3, text)
    assert later.draw(rng) and later.mask() == alone(tokenizer, text, later.tokens[1:])
    grammars.close()


# --- the bytes of compiled grammars ------------------------------------------------------------------------------


class Root:
    """Stands for a matcher."""

    def compute_bitmask(self) -> bytes:
        return bytes(4)


def made(number: int, level: int = 0) -> SharedGrammar:
    return SharedGrammar(bytes([number]), "x" * number, level, Root())  # type: ignore[arg-type]


MOST = size_of("", 0) * 5


@pytest.mark.promise("E9")
@given(st.lists(st.tuples(st.sampled_from("compile use leave renew own fail".split()), st.integers(1, 7)), max_size=60))
@settings(max_examples=200)
def test_no_more_bytes_of_grammars_are_in_memory(what: list[tuple[str, int]]) -> None:
    """Those in use and those that are kept together, whatever is compiled, used, exhausted and left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "STATES", (STATES[0], 2 * STATES[0]))
        store, used = Store(MOST), []  # type: tuple[Store, list[SharedGrammar]]
        for action, number in what:
            if action == "compile" and store.reserve(size_of("x" * number, 0)):
                store.add(bytes([number]), made(number), size_of("x" * number, 0))
            elif action == "fail" and store.reserve(size_of("x" * number, 0)):
                store.add(bytes([number]), InvalidRequest("no"), size_of("x" * number, 0))
            elif action == "use":
                found = store.find(bytes([number]), 1)
                if isinstance(found, SharedGrammar) and not found.is_exhausted:
                    used.append(found)
            elif used and action == "leave":
                store.leave(used.pop(number % len(used)))
            elif used and action in ("renew", "own"):
                at = number % len(used)
                used[at].is_exhausted = True
                try:
                    used[at] = store.renew(used[at], lambda text, states: Root(), alone=action == "own")  # type: ignore[arg-type, return-value]
                except InvalidRequest:
                    store.leave(used.pop(at))
            kept = [each for each in store._kept.values() if isinstance(each, SharedGrammar)]
            alive = {id(each): each for each in (*kept, *used)}
            assert store.bytes == sum(each.size for each in alive.values())
            assert store.bytes <= MOST + size_of("x" * 7, 1), "a lexer takes the place of one that is left"
            for each in alive.values():
                assert each.users == sum(one is each for one in used)
        for each in used:
            store.leave(each)
        assert store.bytes <= MOST and all(
            not each.users for each in store._kept.values() if isinstance(each, SharedGrammar)
        )


def test_a_grammar_in_use_is_not_dropped_for_another() -> None:
    used, unused, another = made(1), made(2), made(3)
    store = Store(used.size + another.size)
    for each in (used, unused):
        assert store.reserve(each.size)
        store.add(each.digest, each, each.size)
    assert store.find(used.digest, 1) is used and store.find(unused.digest) is unused
    assert store.reserve(another.size), "the one that nobody uses makes room"
    assert store.find(unused.digest) is None
    assert not store.reserve(another.size)
    assert store.find(used.digest) is used and store.bytes == used.size + another.size


@pytest.mark.parametrize("users", [1, 2])
def test_a_lexer_takes_the_place_of_a_full_one_that_nobody_else_uses(users: int) -> None:
    store, old = Store(size_of("x", 1)), made(1)
    assert store.reserve(old.size)
    store.add(old.digest, old, old.size)
    assert store.find(old.digest, users) is old
    old.is_exhausted = True
    if users > 1:
        with pytest.raises(InvalidRequest, match="no memory"):
            store.renew(old, lambda text, states: Root(), alone=False)  # type: ignore[arg-type, return-value]
        return
    new = store.renew(old, lambda text, states: Root(), alone=False)  # type: ignore[arg-type, return-value]
    assert (new.level, new.users, store.bytes) == (1, 1, size_of("x", 1))


def test_a_request_waits_while_the_grammars_in_use_leave_no_room(tokenizer: LLTokenizer) -> None:
    grammars = Grammars(lambda: tokenizer, VOCAB, lambda: None, most_bytes=2 * size_of("start: /a{10}/", 0))
    first, second = (Choice(grammars, number, f"start: /a{{1{number}}}/") for number in (0, 1))
    third = Request(3, (1,), SamplingParams(5), grammar=Grammar(b"start: /b/", "guided_regex"))
    fourth = Request(4, (1,), SamplingParams(5), grammar=Grammar(b"start: /c/", "guided_regex"))
    assert not grammars.hold(third) and not grammars.hold(fourth)
    assert not list(grammars.poll()) and grammars.waiting == [third, fourth]
    grammars.cancel(4)
    assert not list(grammars.poll()) and grammars.waiting == [third]
    second.end()
    ready: list[Request] = []
    until(lambda: ready.extend(grammars.poll()) or ready)
    assert ready == [third] and grammars.hold(third) and grammars.is_idle
    first.end()
    grammars.close()
