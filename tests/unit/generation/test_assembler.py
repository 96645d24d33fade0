"""The one way from deltas to events: nothing is lost, said twice or said in another order, whatever the pieces are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.engine.client.stream import Stream
from mlx_tandem.generation.answers import Answers
from mlx_tandem.generation.assembler import Assembler
from mlx_tandem.generation.events import Event, Finish, PromptRead, TextDelta, Usage
from mlx_tandem.generation.output import TextOptions
from mlx_tandem.generation.parsers import MakeParser
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.types import Delta, Request, SamplingParams, TokenLogprob
from tests.toys.parser import ToyParser
from tests.unit.text_tools import byte_level

END = byte_level().special_tokens["<|im_end|>"]
FIRST = 7
"""The id of the first request."""


class Owner:
    """What the streams tell the engine's client."""

    def __init__(self) -> None:
        self.cancelled: list[tuple[int, int | None]] = []

    def cancel(self, request: int, choice: int | None = None) -> None:
        self.cancelled.append((request, choice))

    def forget(self, request: int) -> None:
        pass


class Submission:
    """An assembler over a stream that nobody fills."""

    def __init__(
        self, prompts: int = 1, n: int = 1, text: TextOptions | None = None, min_tokens: int = 0, **options: object
    ):
        self.prompted = Prompted(
            [[1, 2, 3]] * prompts,
            [None] * prompts,
            SamplingParams(max_tokens=1000, min_tokens=min_tokens),
            n,
            text or TextOptions(),
            **options,  # type: ignore[arg-type]
        )
        self.owner = Owner()
        requests = [Request(FIRST + k, (1, 2, 3), self.prompted.params, n=n) for k in range(prompts)]
        self.assembler = Assembler(self.prompted, Stream(self.owner, requests), byte_level(), [END])

    def answers(self, batches: Sequence[Sequence[Delta]]) -> Answers:
        answers = Answers(len(self.prompted.prompts), self.prompted.choices)
        for batch in batches:
            answers.add(self.assembler.push(batch))
        return answers


def score(token: int) -> TokenLogprob:
    return TokenLogprob(-float(token), -float(token))


def deltas(
    ids: Sequence[int], sizes: Iterator[int], *, request: int = FIRST, choice: int = 0, ends: bool = True
) -> list[Delta]:
    """The tokens of a choice in deltas of these sizes, the last of which ends it; versions go up by one."""
    made: list[Delta] = []
    rest = list(ids)
    while rest or not made:
        k = next(sizes)
        part, rest = tuple(rest[:k]), rest[k:]
        finish = "length" if ends and not rest else None
        made.append(Delta(request, choice, part, tuple(map(score, part)), finish, version=len(made) + 1))
    return made


PIECES = ["a", " bc", "<think>", "</think>", "<thi", "[", "add", ":", "{1}", "]", "é🦊", "nk>"]
texts = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


def sizes(data: st.DataObject) -> Iterator[int]:
    while True:
        yield data.draw(st.integers(1, 4))


@given(texts, texts, st.sampled_from([None, ToyParser]), st.booleans(), st.data())
@settings(max_examples=150)
def test_every_token_is_said_once_and_in_order(
    one: str, other: str, parser: MakeParser | None, versions: bool, data: st.DataObject
) -> None:
    """Of two choices that come in any order, in deltas of any size, with and without a parser."""
    ids = [byte_level().encode_plain(text) or [300] for text in (one, other)]
    queues = [deltas(own, sizes(data), choice=i) for i, own in enumerate(ids)]
    submission = Submission(n=2, parser=parser, version=9 if versions else None)
    made_by = [[d.version for d in queue for _ in d.tokens] for queue in queues]
    batches: list[list[Delta]] = []
    while any(queues):
        batch = []
        for _ in range(data.draw(st.integers(1, 5))):
            if live := [queue for queue in queues if queue]:
                batch.append(data.draw(st.sampled_from(live)).pop(0))
        batches.append(batch)
    answers = submission.answers(batches)
    for answer, own, made in zip(answers.choices, ids, made_by, strict=True):
        assert answer.tokens == own
        assert answer.logprobs == [score(token) for token in own]
        assert answer.versions == (made if versions else [])
        assert answer.reason == "length"
        if parser is None:
            assert answer.text == byte_level().decode(own)
    assert submission.assembler.usage().completion == sum(map(len, ids))


@given(texts, st.data())
@settings(max_examples=150)
def test_a_parser_says_the_same_however_the_text_comes(text: str, data: st.DataObject) -> None:
    ids = byte_level().encode_plain(text)
    whole = Submission(parser=ToyParser).answers([deltas(ids, iter([len(ids) or 1]))]).choices[0]
    pieces = Submission(parser=ToyParser).answers([[d] for d in deltas(ids, sizes(data))]).choices[0]
    for answer in (whole, pieces):
        assert answer.finish is not None
    assert (pieces.text, pieces.reasoning) == (whole.text, whole.reasoning)
    assert [(c.id, c.name, "".join(c.pieces)) for c in pieces.calls] == [
        (c.id, c.name, "".join(c.pieces)) for c in whole.calls
    ]


def test_a_toy_parser_from_outside_of_the_package_finds_thoughts_and_calls() -> None:
    text = "Hm. <think>17 and 25</think>It is [add:17, 25] or so"
    ids = byte_level().encode_plain(text)
    submission = Submission(parser=ToyParser)
    answer = submission.answers([[d] for d in deltas(ids, iter([1] * len(ids)))]).choices[0]
    assert (answer.text, answer.reasoning) == ("Hm. It is  or so", "17 and 25")
    assert [(c.name, "".join(c.pieces)) for c in answer.calls] == [("add", "17, 25")]
    usage = submission.assembler.usage()
    assert 0 < usage.reasoning < usage.completion == len(ids)


def test_a_stop_string_ends_a_choice_in_the_engine_too_and_is_named() -> None:
    submission = Submission(n=2, text=TextOptions(("x",)))
    ids = byte_level().encode_plain("abxcd")
    events = submission.assembler.push(deltas(ids, iter([1] * 9), ends=False))
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == "ab"
    assert [(e.choice, e.reason, e.stop) for e in events if isinstance(e, Finish)] == [(0, "stop", "x")]
    assert submission.owner.cancelled == [(FIRST, 0)]
    assert not submission.assembler.push([Delta(FIRST, 0, (300,))]), "what comes later is dropped"


def test_a_stop_string_and_a_parser_work_together() -> None:
    """What the parser holds back when the text has ended is looked through, too."""
    submission = Submission(text=TextOptions(("!",)), parser=ToyParser)
    ids = byte_level().encode_plain("a <thi! more")
    answer = submission.answers([[d] for d in deltas(ids, iter([1] * 20))]).choices[0]
    assert (answer.text, answer.reason) == ("a <thi", "stop")


STOPPED = [
    ("<think>one END two</think>a b END c", "a b ", "one END two"),
    ("<think>EN</think>D", "D", "EN"),
    ("aE[add:END]ND b END c", "aEND b ", ""),
    ("[add:1]END", "", ""),
    ("EN", "EN", ""),
]


@pytest.mark.parametrize("size", [1, 3, 40])
@pytest.mark.parametrize(("text", "said", "thought"), STOPPED)
def test_stop_strings_are_looked_for_in_the_content(text: str, said: str, thought: str, size: int) -> None:
    """Not in thoughts and calls, nor across them, and at the same token however many come at once."""
    ids = byte_level().encode_plain(text)
    submission = Submission(text=TextOptions(("END",)), parser=ToyParser, version=3)
    answer = submission.answers([[d] for d in deltas(ids, iter([size] * 60))]).choices[0]
    assert (answer.text, answer.reasoning) == (said, thought)
    stops = said != text.replace(f"<think>{thought}</think>", "")
    assert answer.end.stop == ("END" if stops else None)
    assert answer.reason == ("stop" if stops else "length")
    end = len(byte_level().encode_plain(text[: text.rindex("END") + 3])) if stops else len(ids)
    assert answer.tokens == ids[:end] and len(answer.versions) == end
    assert answer.logprobs == [*map(score, answer.tokens)]
    assert submission.owner.cancelled == ([(FIRST, None)] if stops and end < len(ids) else [])


@pytest.mark.parametrize(("least", "said"), [(0, "a!"), (1, "a!"), (2, "a!b!"), (9, "a!b!c")])
def test_a_stop_string_behind_a_parser_waits_for_the_least_tokens_and_may_be_shown(least: int, said: str) -> None:
    ids = [byte_level().encode_plain(character)[0] for character in "a!b!c"]
    options = TextOptions(("!",), include_stop=True)
    submission = Submission(text=options, parser=ToyParser, min_tokens=least)
    answer = submission.answers([deltas(ids, iter([9]))]).choices[0]
    assert answer.text == said


def test_every_prompt_is_read_once_before_its_choices_speak() -> None:
    submission = Submission(prompts=2, n=2)
    scores = (score(2), score(3))
    events = submission.assembler.push(
        [
            Delta(FIRST + 1, 1, (300,), cached=2, prompt_logprobs=scores),
            Delta(FIRST, 0, (300,), cached=1),
            Delta(FIRST + 1, 0, (300,), cached=2),
        ]
    )
    kinds: list[Event | type] = [e if isinstance(e, PromptRead) else type(e) for e in events]
    assert kinds == [PromptRead(1, 2, scores), TextDelta, PromptRead(0, 1), TextDelta, TextDelta]
    assert [e.choice for e in events if isinstance(e, TextDelta)] == [3, 0, 2]
    assert submission.assembler.usage() == Usage(prompt=6, cached=3, completion=3)


def test_predicted_and_thought_tokens_add_up_over_deltas_and_choices() -> None:
    """The last delta comes after its choice has ended, and does not count."""
    submission = Submission(n=2, parser=ToyParser)
    think = byte_level().encode("<think>one two three")
    submission.assembler.push(
        [
            Delta(FIRST, 0, tuple(think), predicted=(3, 1)),
            Delta(FIRST, 1, (300,), predicted=(2, 2)),
            Delta(FIRST, 0, (301,), predicted=(0, 4)),
            Delta(FIRST, 1, (302,), finish="length", predicted=(1, 0)),
            Delta(FIRST, 1, (303,), predicted=(7, 7)),
        ]
    )
    usage = submission.assembler.usage()
    assert (usage.accepted, usage.rejected) == (6, 7)
    assert (usage.completion, usage.reasoning) == (len(think) + 3, len(think) + 1)


def test_running_usage_comes_before_the_tokens_that_it_counts() -> None:
    submission = Submission(running_usage=True)
    events = submission.assembler.push([Delta(FIRST, 0, (300,)), Delta(FIRST, 0, (301,), finish="length")])
    counts = [e.completion if isinstance(e, Usage) else type(e) for e in events]
    assert counts == [PromptRead, 1, TextDelta, 2, TextDelta, Finish]


@pytest.mark.parametrize("parser", [None, ToyParser])
def test_the_token_that_ends_a_text_is_a_detail_of_its_end(parser: MakeParser | None) -> None:
    submission = Submission(parser=parser, version=4)
    (_, text), (finish,) = (
        submission.assembler.push([Delta(FIRST, 0, (300,))]),
        submission.assembler.push([Delta(FIRST, 0, (END,), (score(END),), "stop")]),
    )
    assert isinstance(text, TextDelta) and (text.tokens, text.versions) == ((300,), (4,))
    assert finish == Finish(0, "stop", None, (END,), (score(END),), (4,))
