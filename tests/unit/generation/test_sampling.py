"""From the fields of a request to the engine's parameters: lengths that fit, defaults, and the limits of each field."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from mlx_tandem import demo
from mlx_tandem.config import Config, EngineConfig, ModelConfig, ServerConfig
from mlx_tandem.errors import InvalidRequest, ModelError
from mlx_tandem.generation.defaults import generation_folder, sampling_defaults
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.sampling import (
    NUMBERS,
    Sampling,
    check_logprobs,
    choices,
    kept_tokens,
    sampling_params,
    stop_strings,
    text_options,
)
from mlx_tandem.limits import MAX_ALLOWED_TOKEN_IDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from mlx_tandem.types import SamplingParams
from tests.api.scripted import INFO

ROOM = INFO.max_model_len


def never() -> NoReturn:
    raise AssertionError("no engine is started here")


def config(**server: Any) -> Config:
    return Config(EngineConfig(ModelConfig(str(demo.MODEL_PATH))), ServerConfig(**server))


@pytest.fixture(scope="module")
def loaded() -> Front:
    made = Front(config(), never)
    made.client.state, made.client.info = "ready", INFO
    return made


@pytest.fixture
def front(loaded: Front) -> Front:
    """A front whose settings and defaults a test may change."""
    loaded.config, loaded.defaults = config(), {}
    return loaded


def refusal(error: InvalidRequest) -> tuple[str | None, str | None]:
    return error.param, error.code


LIMITS = st.sampled_from([0, 1, 7, 100, ROOM - 1, ROOM, 2 * ROOM])


@settings(max_examples=300)
@given(
    most_prompt=LIMITS, most=LIMITS, default=st.sampled_from([1, 50, 2 * ROOM]), prompt=st.integers(1, ROOM + 2),
    asked=st.none() | st.integers(1, ROOM + 2),
)  # fmt: skip
@example(most_prompt=0, most=0, default=512, prompt=ROOM - 1, asked=1)
@example(most_prompt=0, most=0, default=512, prompt=ROOM, asked=None)
@example(most_prompt=0, most=7, default=512, prompt=ROOM - 3, asked=4)
def test_the_length_of_an_answer(
    loaded: Front, most_prompt: int, most: int, default: int, prompt: int, asked: int | None
) -> None:
    loaded.config = config(max_prompt_tokens=most_prompt, max_generation_tokens=most, default_max_tokens=default)
    longest = min(most_prompt or ROOM, ROOM - 1)
    fits = min(most or ROOM, ROOM - prompt)
    assert loaded.longest_prompt() == longest
    if prompt > longest or (asked is not None and asked > fits):
        with pytest.raises(InvalidRequest) as refused:
            loaded.max_tokens(prompt, asked, "max_tokens", "prompt")
        param = "prompt" if prompt > longest else "max_tokens"
        assert refusal(refused.value) == (param, "context_length_exceeded")
    else:
        assert loaded.max_tokens(prompt, asked, "max_tokens", "prompt") == (
            min(default, fits) if asked is None else asked
        )


@settings(max_examples=200)
@given(
    most_prompt=LIMITS, default=st.sampled_from([1, 50, 2 * ROOM]), asked=st.integers(-1, 2 * ROOM) | st.just(1 << 20),
    max_tokens=st.none() | st.integers(0, ROOM + 2) | st.booleans(),
)  # fmt: skip
@example(most_prompt=0, default=2 * ROOM, asked=-1, max_tokens=None)
@example(most_prompt=0, default=1, asked=-1, max_tokens=ROOM - 1)
def test_a_prompt_that_is_cut_leaves_room_for_the_answer(
    loaded: Front, most_prompt: int, default: int, asked: int, max_tokens: Any
) -> None:
    loaded.config = config(max_prompt_tokens=most_prompt, default_max_tokens=default)
    assert kept_tokens(loaded, None, max_tokens) is None
    if asked == 0:
        with pytest.raises(InvalidRequest) as refused:
            kept_tokens(loaded, asked, max_tokens)
        assert refused.value.param == "truncate_prompt_tokens"
        return
    kept = kept_tokens(loaded, asked, max_tokens)
    if asked > 0:
        assert kept == asked
        return
    is_usable = type(max_tokens) is int and 0 < max_tokens < ROOM
    answer = max_tokens if is_usable else min(default, ROOM // 2)
    assert kept == min(most_prompt or ROOM, ROOM - answer)
    length = min(kept, loaded.longest_prompt())
    assert loaded.max_tokens(length, max_tokens if is_usable else None, "max_tokens", "prompt") >= min(answer, default)


# --- defaults ------------------------------------------------------------------------------------------------------

GIVEN: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "repetition_penalty": 1.5, "presence_penalty": 0.5,
    "frequency_penalty": -0.5, "xtc_probability": 0.75, "xtc_threshold": 0.25,
}  # fmt: skip


def params(front: Front, **fields: Any) -> SamplingParams:
    return sampling_params(front, Sampling(**{"max_tokens": 4, "seed": 3} | fields), 10, "prompt")


PLAIN = SamplingParams(4, seed=3)


def test_every_number_is_known_here() -> None:
    assert set(GIVEN) == set(NUMBERS)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_the_request_counts_before_that_of_the_folder(front: Front, name: str) -> None:
    kept = tuple(sorted({*front.tokenizer.encode("\n"), *INFO.eos_token_ids}))
    more = {"xtc_kept": kept} if name == "xtc_probability" else {}
    plain, own, folder = params(front), params(front, **{name: GIVEN[name]}), GIVEN[name] / 2
    assert plain == PLAIN
    assert own == structs.replace(PLAIN, **{name: GIVEN[name]}, **more)
    front.defaults = {name: folder}
    expected = {name: int(folder) if name == "top_k" else folder}
    assert params(front) == params(front, **{name: None}) == structs.replace(PLAIN, **expected, **more)
    assert params(front, **{name: GIVEN[name]}) == own
    others = {other: value for other, value in GIVEN.items() if other not in (name, "xtc_probability")}
    assert params(front, **others) == structs.replace(PLAIN, **others | expected, **more)


def test_values_that_turn_something_off(front: Front) -> None:
    front.defaults = {"top_k": -1, "repetition_penalty": 1.5}
    assert params(front) == structs.replace(PLAIN, repetition_penalty=1.5)
    for zero in (0, 0.0):
        assert params(front, repetition_penalty=zero, top_k=-1) == PLAIN
    for wrong, code in ((False, "invalid_type"), ("1", "invalid_type"), (-1, "invalid_value"), (11, "invalid_value")):
        with pytest.raises(InvalidRequest) as refused:
            params(front, repetition_penalty=wrong)
        assert refusal(refused.value) == ("repetition_penalty", code)


@pytest.mark.promise("D7")
def test_the_seed_is_the_request_s_or_one_of_the_server_s(front: Front) -> None:
    assert params(front, seed=0).seed == 0
    drawn = [params(front, seed=None).seed for _ in range(20)]
    assert len(set(drawn)) == 20
    assert all(0 <= seed < 2**63 for seed in drawn)
    series = []
    for _ in range(2):
        made = Front(config(seed=5), never)
        series.append([made.seed(None) for _ in range(3)])
    assert series[0] == series[1]
    assert len(set(series[0])) == 3


@pytest.mark.parametrize(
    ("file", "found"),
    [
        (None, {}),
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.1}, ...),
        ({"top_p": 0, "temperature": None, "do_sample": True, "eos_token_id": [1, 2], "max_length": 20}, {}),
        ({"top_k": -1, "top_p": 0.0}, {"top_k": -1}),
        ({"temperature": 2.5}, "temperature must be a number between 0 and 2"),
        ({"top_k": 1.5}, "top_k must be an integer"),
        ({"min_p": "0.1"}, "min_p must be a number"),
    ],
)
def test_what_a_folder_recommends(file: dict[str, Any] | None, found: Any, tmp_path: Path) -> None:
    if file is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(file))
    if isinstance(found, str):
        with pytest.raises(ModelError) as refused:
            sampling_defaults(tmp_path)
        assert refused.value.message == f"{tmp_path / 'generation_config.json'}: {found}"
        assert refused.value.param == found.partition(" ")[0]
    else:
        assert sampling_defaults(tmp_path) == (file if found is ... else found)


def test_which_folder_recommends_values(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    assert generation_folder("auto", own) == own
    assert generation_folder("vllm", own) is generation_folder("none", own) is None
    with pytest.raises(ModelError) as refused:
        generation_folder(str(tmp_path), own)
    assert refused.value.param == "generation_config"
    (tmp_path / "generation_config.json").write_text("{}")
    assert generation_folder(str(tmp_path), own) == tmp_path


# --- the other fields ----------------------------------------------------------------------------------------------


@pytest.mark.promise("D1")
def test_as_many_choices_as_the_settings_and_the_batch_allow(front: Front) -> None:
    for most, seats in ((5, 8), (8, 5), (8, 8)):
        front.config = config(max_n=most)
        front.client.info = structs.replace(INFO, max_num_seqs=seats)
        assert choices(front, Sampling()) == 1
        assert choices(front, Sampling(n=min(most, seats))) == min(most, seats)
        with pytest.raises(InvalidRequest) as refused:
            choices(front, Sampling(n=min(most, seats) + 1))
        assert refused.value.param == "n"
    front.client.info = INFO


@pytest.mark.promise("D2")
def test_as_many_alternatives_as_the_settings_allow(front: Front) -> None:
    front.config = config(max_logprobs=5)
    for asked in (None, 0, 5):
        check_logprobs(front, "logprobs", asked)
        assert params(front, prompt_logprobs=asked).prompt_logprobs == asked
    for call in (lambda: check_logprobs(front, "logprobs", 6), lambda: params(front, prompt_logprobs=6)):
        with pytest.raises(InvalidRequest, match=r"logprobs is 6; this server gives 5 at most"):
            call()


@pytest.mark.parametrize(
    ("fields", "echo", "logprobs", "made"),
    [
        ({}, True, 2, {"logprobs": 2, "prompt_logprobs": 2}),
        ({}, False, 2, {"logprobs": 2}),
        ({}, True, None, {}),
        ({"prompt_logprobs": 1}, True, 2, {"logprobs": 2, "prompt_logprobs": 2}),
        ({"prompt_logprobs": 3}, True, 0, {"logprobs": 0, "prompt_logprobs": 3}),
        ({"prompt_logprobs": 0}, False, None, {"prompt_logprobs": 0}),
        ({"max_tokens": 0}, True, None, {"max_tokens": 1}),
        ({"max_tokens": 0, "prompt_logprobs": 0}, False, None, {"max_tokens": 1, "prompt_logprobs": 0}),
    ],
)
def test_logprobs_of_the_prompt(
    front: Front, fields: dict[str, Any], echo: bool, logprobs: int | None, made: dict[str, Any]
) -> None:
    body = Sampling(**{"max_tokens": 4, "seed": 3} | fields)
    found = sampling_params(front, body, 10, "prompt", logprobs=logprobs, echo=echo)
    assert found == structs.replace(PLAIN, **made)
    assert text_options(body, echo).silent == (fields.get("max_tokens") == 0)


def test_the_fewest_tokens_are_at_most_the_most(front: Front) -> None:
    assert params(front, min_tokens=4).min_tokens == 4
    for fields in ({"min_tokens": 5}, {"min_tokens": 1, "max_tokens": 0, "prompt_logprobs": 0}):
        with pytest.raises(InvalidRequest) as refused:
            params(front, **fields)
        assert refused.value.param == "min_tokens"


@pytest.mark.parametrize("asked", [None, 0, 1, 13, 14, 15])
def test_a_window_over_everything_is_no_window(front: Front, asked: int | None) -> None:
    """The prompt has 10 tokens and the answer 4."""
    window = asked if asked and asked < 14 else 0
    assert params(front, repetition_context_size=asked) == structs.replace(PLAIN, repetition_context=window)


@pytest.mark.promise("D3")
def test_stop_strings_within_their_bounds() -> None:
    assert stop_strings(None) == stop_strings([]) == ()
    assert stop_strings("a") == ("a",)
    assert stop_strings(["b", "a", "b"]) == ("b", "a")
    most = [chr(97 + i) * 256 for i in range(8)]
    assert stop_strings(most) == tuple(most)
    for wrong, code in (
        ("", "invalid_value"), (["a", ""], "invalid_value"), ("a" * 257, "invalid_value"),
        ([*most, "x"], "invalid_value"), ([1], "invalid_type"), (1, "invalid_type"), ({"a": 1}, "invalid_type"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest) as refused:
            stop_strings(wrong)
        assert refusal(refused.value) == ("stop", code)


@pytest.mark.parametrize(("name", "most"), [("stop_token_ids", MAX_STOP_TOKEN_IDS), ("allowed_token_ids", 0)])
def test_lists_of_token_ids_within_their_bounds(front: Front, name: str, most: int) -> None:
    most = most or MAX_ALLOWED_TOKEN_IDS
    ids = [i % INFO.vocab_size for i in range(most)]
    assert getattr(params(front, **{name: ids}), name) == tuple(ids)
    for wrong in ([*ids, 0], [INFO.vocab_size], [-1], "1", *([[]] if name == "allowed_token_ids" else [])):
        with pytest.raises(InvalidRequest) as refused:
            params(front, **{name: wrong})
        assert refused.value.param == name
    if name == "stop_token_ids":
        assert params(front, stop_token_ids=[]) == PLAIN


def test_biases_within_their_bounds(front: Front) -> None:
    most = {str(i): 1 for i in range(MAX_LOGIT_BIAS)}
    assert len(params(front, logit_bias=most).logit_bias) == MAX_LOGIT_BIAS
    assert params(front, logit_bias={"7": -100, "3": 100}).logit_bias == ((3, 100.0), (7, -100.0))
    assert params(front, logit_bias={}) == PLAIN
    for wrong, code in (
        (most | {"x": 1}, "invalid_value"), ({"7": 1, "07": 1}, "invalid_value"), ({"x": 1}, "invalid_value"),
        ({"-1": 1}, "invalid_value"), ({str(INFO.vocab_size): 1}, "invalid_value"), ({"7": 101}, "invalid_value"),
        ({"7": "1"}, "invalid_type"), ([7], "invalid_type"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest) as refused:
            params(front, logit_bias=wrong)
        assert refusal(refused.value) == ("logit_bias", code)


# --- prompts -------------------------------------------------------------------------------------------------------


def test_a_prompt_has_tokens_of_the_model_and_fits(front: Front) -> None:
    def prompt(text: str, **options: Any) -> list[int]:
        return asyncio.run(front.text_prompt(text, "field", **options))

    ids = prompt("one two three")
    for vocab_size, is_fine in ((max(ids) + 1, True), (max(ids), False)):
        front.client.info = structs.replace(INFO, vocab_size=vocab_size)
        if is_fine:
            assert prompt("one two three") == ids
        else:
            with pytest.raises(InvalidRequest, match="field holds text that this model has no token for"):
                prompt("one two three")
    front.client.info = structs.replace(INFO, max_model_len=len(ids) + 1)
    assert prompt("one two three") == ids
    front.client.info = structs.replace(INFO, max_model_len=len(ids))
    with pytest.raises(InvalidRequest) as refused:
        prompt("one two three")
    assert refusal(refused.value) == ("field", "context_length_exceeded")
    assert prompt("one two three", cut=True) == ids, "the caller cuts it"
    for options in ({}, {"cut": True}):
        with pytest.raises(InvalidRequest, match="field gives an empty prompt"):
            prompt("", **options)
    front.client.info = INFO
