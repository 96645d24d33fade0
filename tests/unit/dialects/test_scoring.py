"""Scores, vectors and perplexities as replies show them: whole bodies over plain numbers."""

from __future__ import annotations

import json
import math
from array import array
from base64 import b64decode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from mlx_tandem.dialects.ollama.embeddings import EmbeddingsRenderer as OllamaVector
from mlx_tandem.dialects.ollama.embeddings import EmbedRenderer as OllamaVectors
from mlx_tandem.dialects.openai.embeddings import EmbeddingsRenderer
from mlx_tandem.dialects.parallm.perplexity import PerplexityRenderer
from mlx_tandem.dialects.vllm.scoring import RerankRenderer, ScoreRenderer
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.answers import Answers
from mlx_tandem.generation.embeddings import EmbeddingOptions, embedding_request, vectors
from mlx_tandem.generation.events import Finish, PromptRead, TextDelta, Usage
from mlx_tandem.generation.output import TextOptions
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.generation.reranking import Reranker, probability
from mlx_tandem.types import AdapterRef, SamplingParams, TokenLogprob
from tests.api.scripted import INFO

YES, NO = 5, 6
RERANKER = Reranker(None, YES, NO)  # type: ignore[arg-type]
USAGE = Usage(9, 4, 3)
USED = {
    "prompt_tokens": 9,
    "total_tokens": 9,
    "completion_tokens": 0,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def drawn(*draws: tuple[int, float]) -> Answers:
    """Answers of one token each, whose probability among yes and no is given."""
    answers = Answers(len(draws), len(draws))
    for i, (token, p) in enumerate(draws):
        lp = TokenLogprob(-9.0, math.log(p))
        answers.add([PromptRead(i, 0), TextDelta(i, "", (token,), (lp,)), Finish(i, "length")])
    return answers


@given(st.floats(0.001, 0.999))
def test_scores_are_the_probability_of_yes_whichever_was_drawn(p: float) -> None:
    odds = math.log(p / (1 - p))
    assert RERANKER.log_odds(drawn((YES, p), (NO, 1 - p))) == pytest.approx([odds, odds], abs=1e-6)
    assert probability(odds) == pytest.approx(p)
    assert probability(-odds) == pytest.approx(1 - p)


def test_certain_scores_are_numbers() -> None:
    high, low = RERANKER.log_odds(drawn((YES, 1.0), (NO, 1.0)))
    assert 0 < high < 100
    assert low == -high
    assert (probability(high), probability(low), probability(800.0), probability(-700.0)) == (
        1.0,
        pytest.approx(0),
        1.0,
        pytest.approx(0),
    )


def test_the_request_for_scores() -> None:
    own = AdapterRef("own", 1, "d")
    params = SamplingParams(max_tokens=1, logprobs=0, allowed_token_ids=(YES, NO), ignore_eos=True)
    expected = Prompted([[1], [2, 3]], [own, own], params, priority=4, speculate=False)
    assert RERANKER.request([[1], [2, 3]], own, 4) == expected
    assert (params.temperature, params.top_p) == (1.0, 1.0)


FOUR = drawn((NO, 0.75), (YES, 0.75), (YES, 0.5), (YES, 0.75))
SCORES = [0.25, 0.75, 0.5, 0.75]


@pytest.mark.parametrize("raw", [False, True])
def test_scores_in_the_order_of_the_pairs(raw: bool) -> None:
    made = ScoreRenderer(RERANKER, raw=raw)
    made.model = "own@1"
    body = json.loads(made.whole(FOUR, USAGE, []))
    assert body.pop("created") > 0
    data = body.pop("data")
    assert body == {"id": made.id, "object": "list", "model": "own@1", "usage": USED}
    values = [math.log(p / (1 - p)) for p in SCORES] if raw else SCORES
    assert [entry.pop("score") for entry in data] == pytest.approx(values)
    assert data == [{"index": i, "object": "score"} for i in range(4)]


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("shows", [False, True])
@pytest.mark.parametrize("top", [1, 3, 4, 9])
def test_documents_by_their_scores(raw: bool, shows: bool, top: int) -> None:
    """Those with the same score keep their order."""
    texts = ["a", "b", "c", "d"]
    made = RerankRenderer(RERANKER, texts, raw=raw, top=top, shows=shows)
    made.model = "own@1"
    body = json.loads(made.whole(FOUR, USAGE, []))
    results = body.pop("results")
    assert body == {"id": made.id, "model": "own@1", "usage": USED}
    order = [1, 3, 2, 0][:top]
    values = [math.log(SCORES[i] / (1 - SCORES[i])) if raw else SCORES[i] for i in order]
    assert [entry.pop("relevance_score") for entry in results] == pytest.approx(values, abs=1e-9)
    assert results == [{"index": i} | ({"document": {"text": texts[i]}} if shows else {}) for i in order]


# --- vectors -------------------------------------------------------------------------------------------------------


def read(*numbers: list[float]) -> Answers:
    answers = Answers(len(numbers), len(numbers))
    answers.add([PromptRead(i, 0, (), array("f", own).tobytes()) for i, own in enumerate(numbers)])
    return answers


VECTOR = st.lists(st.floats(-8, 8, width=16), min_size=4, max_size=4)


@given(st.lists(VECTOR, min_size=1, max_size=3), st.booleans(), st.sampled_from([None, 1, 3, 4]))
def test_vectors_are_cut_and_then_have_the_length_1(own: list[list[float]], normalize: bool, kept: int | None) -> None:
    found = vectors(read(*own), EmbeddingOptions("mean", normalize, kept))
    for numbers, made in zip(own, found, strict=True):
        cut = numbers[:kept]
        length = math.hypot(*cut) if normalize else 1.0
        assert made.tolist() == pytest.approx([x / (length or 1.0) for x in cut], rel=1e-6, abs=1e-9)


def test_the_request_for_vectors() -> None:
    info, own = structs.replace(INFO, hidden_size=8), AdapterRef("own", 1, "d")
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    for kept in (None, 1, 8):
        options = EmbeddingOptions("last", True, kept)
        made = embedding_request(info, [[1], [2]], own, options, priority=3)
        assert made == Prompted(
            [[1], [2]], [own, own], params, text=TextOptions(silent=True), priority=3, pooling="last"
        )
    for engine, kept, param in ((info, 9, "dimensions"), (INFO, None, "model"), (INFO, 9, "model")):
        with pytest.raises(InvalidRequest) as refused:
            embedding_request(engine, [[1]], None, EmbeddingOptions("mean", True, kept))
        assert refused.value.param == param


TWO = read([3.0, 4.0, 12.0], [0.0, 0.0, 0.0])


@pytest.mark.parametrize("is_text", [False, True])
def test_openai_s_vectors(is_text: bool) -> None:
    made = EmbeddingsRenderer("own@1", EmbeddingOptions("mean", True, 2), is_text=is_text)
    body = json.loads(made.whole(TWO, USAGE, []))
    given: list[Any] = [entry.pop("embedding") for entry in body["data"]]
    found = [array("f", b64decode(v)).tolist() if is_text else v for v in given]
    assert found == [pytest.approx([0.6, 0.8]), [0.0, 0.0]]
    assert body == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0}, {"object": "embedding", "index": 1}],
        "model": "own@1",
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
    }


def test_ollama_s_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 12.5)
    made = OllamaVectors("own@1", EmbeddingOptions("mean", True), 10.0, 0.25)
    body = json.loads(made.whole(TWO, USAGE, []))
    assert body.pop("embeddings") == [pytest.approx([3 / 13, 4 / 13, 12 / 13]), [0.0, 0.0, 0.0]]
    assert body == {
        "model": "own@1",
        "total_duration": 2_500_000_000,
        "load_duration": 250_000_000,
        "prompt_eval_count": 9,
    }
    one = OllamaVector(EmbeddingOptions("mean", normalize=False)).whole(read([3.0, 4.0]), USAGE, [])
    assert json.loads(one) == {"embedding": [3.0, 4.0]}


# --- perplexities --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logprobs", "count", "mean"), [([], 0, 0.0), ([-1.0], 1, 1.0), ([-1.0, -2.0, -6.0], 3, 3.0), ([0.0], 1, 0.0)]
)
def test_the_perplexity_is_that_of_all_tokens_but_the_first(logprobs: list[float], count: int, mean: float) -> None:
    answers = Answers(1, 1)
    answers.add([PromptRead(0, 0, tuple(TokenLogprob(lp, -9.0) for lp in logprobs))])
    body = json.loads(PerplexityRenderer("own@1").whole(answers, USAGE, []))
    assert body == {
        "model": "own@1",
        "token_count": count,
        "avg_nll": pytest.approx(mean),
        "ppl": pytest.approx(math.exp(mean)),
    }
