"""`mlx_tandem.Engine`: the same engine in this process."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import partial

import numpy as np
import pytest

from mlx_tandem import Engine, demo
from mlx_tandem.api.generation import _chat_request, _prompted
from mlx_tandem.errors import EngineError, InvalidRequest, NotFound
from mlx_tandem.types import Request

QUESTION = [{"role": "user", "content": "What is 12 + 5?"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(num_blocks=257, max_model_len=512, max_num_seqs=8) as made:
        yield made


def test_chat_with_every_adapter(engine):
    assert engine.adapters == ["shout@1", "json@1", "down@1"]
    texts = [engine.chat(QUESTION, adapter=a, temperature=0).text for a in (None, "shout", "json@1")]
    assert texts == ["12 + 5 = 17.", "12 + 5 = 17!", '{"answer": 17}']


def test_a_text_is_one_message_of_the_user(engine):
    text = QUESTION[0]["content"]
    assert engine.chat(text, temperature=0) == engine.chat(QUESTION, temperature=0)
    assert engine.chat(text, adapter="json", temperature=0).text == '{"answer": 17}'


def test_the_server_says_the_same(engine, server):
    ours = engine.generate("Once there was", max_tokens=12, seed=5, logprobs=2)
    theirs = server.complete("Once there was", max_tokens=12, seed=5, logprobs=2).json()["choices"][0]
    assert ours.text == theirs["text"]
    assert ours.finish_reason == theirs["finish_reason"]
    assert [s.model for s in ours.logprobs] == pytest.approx(theirs["logprobs"]["token_logprobs"], abs=1e-4)


@pytest.mark.parametrize(
    "fields",
    [
        {"xtc_probability": 0.8, "xtc_threshold": 0.01},
        {"repetition_penalty": 1.8, "repetition_context_size": 4},
        {"allowed_token_ids": list(range(60, 120))},
        {"top_p": 0},
    ],
    ids=str,
)
def test_the_server_draws_the_same(engine, server, fields):
    ours = engine.generate("Once there was", max_tokens=12, seed=5, temperature=1.2, **fields)
    theirs = server.complete("Once there was", max_tokens=12, seed=5, temperature=1.2, **fields)
    assert ours.text == theirs.json()["choices"][0]["text"]


def test_numbers_of_derived_types_are_taken(engine):
    class Count(IntEnum):
        FIVE = 5

    pairs = (0.5, 5), (np.float64(0.5), Count.FIVE)
    same = [engine.generate("Once", temperature=t, seed=s, max_tokens=s).text for t, s in pairs]
    assert same[0] == same[1]
    with pytest.raises(InvalidRequest, match="seed must be an integer"):
        engine.generate("Once", seed=True)


def test_as_many_choices_as_the_batch_has_places(engine):
    assert len(engine.generate("Once", max_tokens=1, n=8)) == 8
    with pytest.raises(InvalidRequest, match="n is at most 8"):
        engine.generate("Once", max_tokens=1, n=9)
    with pytest.raises(InvalidRequest, match="n must be an integer between 1 and 128"):
        engine.generate("Once", max_tokens=1, n=129)


def test_several_prompts_and_choices(engine):
    one = engine.generate("3 4 5", max_tokens=4, temperature=0)
    two = engine.generate(["3 4 5", "Once"], max_tokens=4, temperature=0)
    many = engine.generate(["3 4 5", "Once"], max_tokens=4, temperature=0, n=2)
    assert two[0] == one
    assert many == [two[0], two[0], two[1], two[1]]
    assert engine.generate(list(one.token_ids), max_tokens=1).prompt_tokens == len(one.token_ids)
    assert engine.generate([]) == []


def test_an_adapter_for_each_prompt(engine):
    question = engine.codec.chat(QUESTION, asks=True)
    adapters = ["json", None, "shout@1"]
    mixed = engine.generate([question] * 3, adapter=adapters, temperature=0)
    assert mixed == [engine.generate(question, adapter=name, temperature=0) for name in adapters]
    assert [c.adapter for c in mixed] == ["json@1", None, "shout@1"]
    assert len({c.text for c in mixed}) == 3
    assert engine.generate([question] * 2, adapter="json", temperature=0) == [mixed[0]] * 2
    assert engine.generate([], adapter=[]) == []
    twice = engine.generate([question] * 3, adapter=adapters, temperature=0, n=2)
    assert [c.adapter for c in twice] == ["json@1", "json@1", None, None, "shout@1", "shout@1"]


def test_streams(engine):
    whole = engine.chat(QUESTION, temperature=0).text
    assert "".join(engine.stream(QUESTION, temperature=0)) == whole
    pieces = engine.stream("Once", max_tokens=400, ignore_eos=True)
    next(pieces)
    pieces.close()  # cancels
    assert engine.chat(QUESTION, temperature=0).text == whole
    with pytest.raises(InvalidRequest):
        next(engine.stream("Once", temperature=9))


def test_calls_from_many_threads(engine):
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda: texts.append(engine.chat(QUESTION, adapter="shout", temperature=0).text))
        for _ in range(6)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert texts == ["12 + 5 = 17!"] * 6


def test_adapters_come_and_go(engine):
    assert engine.load_adapter("extra", demo.ADAPTER_PATHS["shout"]) == "extra@1"
    completion = engine.chat(QUESTION, adapter="extra", temperature=0)
    assert (completion.text, completion.adapter) == ("12 + 5 = 17!", "extra@1")
    engine.unload_adapter("extra")
    with pytest.raises(NotFound):
        engine.chat(QUESTION, adapter="extra")
    with pytest.raises(NotFound, match="does not exist"):
        engine.load_adapter("extra", "/does/not/exist")


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (lambda e: e.generate(""), "prompt"),
        (lambda e: e.generate([1024]), "prompt"),
        (lambda e: e.generate("x", temperature=float("nan")), "temperature"),
        (lambda e: e.generate("x", best_of=2), "best_of"),
        (lambda e: e.generate("x", max_tokens=100_000), "max_tokens"),
        (lambda e: e.generate(["x", "y"], adapter=["json"]), "adapter"),
        (lambda e: e.generate([], adapter=["json"]), "adapter"),
        (lambda e: e.generate("x", adapter=["json"]), "adapter"),
        (lambda e: e.generate([5, 6], adapter=["json", None]), "adapter"),
        (lambda e: e.generate(["x", "y"], adapter=["json", "nobody"]), "adapter"),
        (lambda e: e.generate(["x", "y"], adapter=["json", ["shout"]]), "adapter"),
        (lambda e: e.generate(["x"], adapter={"json": "shout"}), "adapter"),
        (lambda e: e.generate("x", adapter=5), "adapter"),
        (lambda e: e.generate("x", adapter=b"json"), "adapter"),
        (lambda e: next(e.stream("x", adapter=["json"])), "adapter"),
        (lambda e: e.generate(5), "prompt"),
        (lambda e: e.generate({"a": 1}), "prompt"),
        (lambda e: next(e.stream(None)), "prompt"),
        (lambda e: e.chat([]), "messages"),
        (lambda e: e.chat(None), "messages"),
        (lambda e: e.chat({"role": "user", "content": "x"}), "messages"),
        (lambda e: e.chat(["x"]), "messages[0]"),
        (lambda e: e.chat([*QUESTION, 3]), "messages[1]"),
        (lambda e: next(e.stream([*QUESTION, "x"])), "messages[1]"),
        (lambda e: e.chat([{"role": "user"}]), "messages[0].content"),
        (lambda e: e.chat(QUESTION, adapter="nobody"), "adapter"),
        (lambda e: next(e.stream("x", adapter="nobody")), "adapter"),
    ],
)
def test_errors_name_the_field(engine, call, param):
    with pytest.raises(InvalidRequest) as e:
        call(engine)
    assert e.value.param == param


def test_wrong_options_and_folders():
    with pytest.raises(TypeError, match="did you mean 'max_num_seqs'"):
        Engine(max_num_seq=3)
    with pytest.raises(NotFound):
        Engine("/does/not/exist")


def asked(engine: Engine, monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> Request:
    """What the engine is asked for by a call."""
    found: list[Request] = []
    submit = engine._front.client.submit
    with monkeypatch.context() as patch:
        patch.setattr(engine._front.client, "submit", lambda *made: (found.extend(made), submit(*made))[1])
        call()
    (request,) = found
    return request


def test_arguments_reach_the_engine(engine, monkeypatch):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    calls = (
        lambda **more: engine.generate("Once", max_tokens=1, **more),
        lambda **more: engine.chat(QUESTION, max_tokens=1, tools=tools, **more),
        lambda **more: list(engine.stream("Once", max_tokens=1, **more)),
    )
    for call in calls:
        plain = asked(engine, monkeypatch, call)
        own = asked(engine, monkeypatch, partial(call, priority=-3, speculation=False))
        assert (plain.priority, plain.speculate) == (0, True)
        assert (own.priority, own.speculate) == (-3, False)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_the_pooling_reaches_the_engine(engine, monkeypatch, pooling):
    request = asked(engine, monkeypatch, partial(engine.embed, "a fox", pooling=pooling))
    assert request.pooling == pooling


def test_each_completion_says_how_much_of_its_own_prompt_was_cached(engine):
    short, long = list(range(300, 310)), list(range(300, 400))
    engine.generate(long, max_tokens=1)
    of_short, of_long = engine.generate([short, long], max_tokens=1)
    assert (of_short.prompt_tokens, of_long.prompt_tokens) == (10, 100)
    assert of_short.cached_tokens < 10 and 64 <= of_long.cached_tokens < 100


def test_the_longest_of_several_prompts_says_how_long_answers_may_be(engine):
    answers = engine.generate([[300], [300] * 500], ignore_eos=True)
    assert [len(answer.token_ids) for answer in answers] == [12, 12]


def test_one_choice_that_was_asked_for_is_a_list(engine):
    (one,) = engine.generate("Once", max_tokens=1, n=1, temperature=0.0)
    assert one.finish_reason == "length"


def test_at_most_one_call_where_calls_are_not_parallel(engine):
    tools = [
        {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}},
    ]
    for parallel, most in ((None, None), (True, None), (False, 1)):
        request = _chat_request(QUESTION, {"tools": tools, "parallel_tool_calls": parallel})
        chat = engine._call(partial(request.chat, engine._front))
        base = engine._call(partial(engine._generation._select, None))
        prompted = engine._call(partial(_prompted, engine._front, [chat.prompt], base, {}, chat))
        assert prompted.most_calls == most


def test_a_closed_engine_is_not_closed_again_at_the_end_of_the_program(monkeypatch):
    """The program would otherwise keep it in memory until then."""
    known: list[object] = []
    monkeypatch.setattr(atexit, "register", known.append)
    monkeypatch.setattr(atexit, "unregister", known.remove)
    with Engine(num_blocks=65, max_model_len=128, max_num_seqs=2, adapters={}):
        assert len(known) == 1
    assert not known


def test_a_closed_engine(engine):
    with Engine(num_blocks=65, max_model_len=128, max_num_seqs=2, adapters={}) as other:
        assert other.adapters == []
        assert other.info.max_model_len == 128
    other.close()
    with pytest.raises(EngineError, match="closed"):
        other.generate("x")


def test_embeddings(engine: Engine) -> None:
    together = engine.embed(["a fox", "a dog"], adapter="shout")
    alone = engine.embed("a dog", adapter="shout")
    assert len(alone) == 256
    assert max(abs(a - b) for a, b in zip(together[1], alone, strict=True)) < 2e-3
    assert len(engine.embed("a dog", dimensions=8)) == 8
    with pytest.raises(InvalidRequest) as refused:
        engine.embed("a dog", dimensions=8000)
    assert refused.value.param == "dimensions"


def test_a_deterministic_engine_answers_and_learns_with_the_same_bits():
    prompts = [[223, 20, 223, 26, 223, 27], list(range(40, 80)), [90]]
    ask = partial(Engine.generate, adapter="down", max_tokens=12, temperature=0.9, seed=4, logprobs=2)
    with Engine(num_blocks=65, max_model_len=256, max_num_seqs=4, deterministic=True) as engine:
        assert engine.info.deterministic
        together = ask(engine, prompts)
        alone = [ask(engine, [prompt])[0] for prompt in prompts]
        assert [(a.token_ids, a.logprobs) for a in alone] == [(a.token_ids, a.logprobs) for a in together]
        data = [
            {
                "prompt": prompt,
                "completion": list(answer.token_ids),
                "logprobs": [each.sampled for each in answer.logprobs],
                "temperature": 0.9,
            }
            for prompt, answer in zip(prompts, together, strict=True)
        ]
        result = engine.trainer("policy", init_from="down").forward(data, "importance_sampling")
    for answer, model, sampled in zip(together, result.model_logprobs, result.logprobs, strict=True):
        assert list(model) == [each.model for each in answer.logprobs]
        assert list(sampled) == [each.sampled for each in answer.logprobs]
