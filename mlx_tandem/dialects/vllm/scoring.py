"""`/score` in vLLM's form, and `/rerank` in the form of Cohere, Jina and vLLM."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from mlx_tandem import limits
from mlx_tandem.dialects.plan import Plan, Renderer
from mlx_tandem.dialects.vllm.bodies import RerankBody, ScoreBody, ScoringBody
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.answers import Answers
from mlx_tandem.generation.events import Usage
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.reranking import Reranker, check_reranker, probability
from mlx_tandem.strict_json import dumps
from mlx_tandem.training.live.recorder import Outcome

Pair = tuple[str, str]
"""A query and a document."""


async def plan_score(front: Front, body: ScoreBody) -> Plan:
    """Return the plan of a request for the scores of pairs. Raises InvalidRequest and NotFound.

    One text goes with each of several; otherwise there are as many of the one as of the other.
    """
    reranker = check_reranker(front.reranker)
    first, second = _texts(body.text_1, "text_1"), _texts(body.text_2, "text_2")
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise InvalidRequest(f"text_1 has {len(first)} texts and text_2 {len(second)}", param="text_2")
    renderer = ScoreRenderer(reranker, raw=body.use_activation is False)
    return await _plan(front, body, reranker, list(zip(first, second, strict=True)), renderer)


async def plan_rerank(front: Front, body: RerankBody) -> Plan:
    """Return the plan of a request that sorts documents by their scores. Raises InvalidRequest and NotFound."""
    reranker = check_reranker(front.reranker)
    documents = [text if isinstance(text, str) else text.text for text in body.documents]
    documents = _texts(documents, "documents")
    renderer = RerankRenderer(
        reranker,
        documents,
        raw=body.use_activation is False,
        top=body.top_n or len(documents),
        shows=body.return_documents is not False,
    )
    return await _plan(front, body, reranker, [(body.query, document) for document in documents], renderer)


async def _plan(
    front: Front, body: ScoringBody, reranker: Reranker, pairs: Sequence[Pair], renderer: ScoreRenderer
) -> Plan:
    """Return the plan for the scores of pairs."""
    model = await front.models.select(body.model, body.user)
    prompts = [await reranker.prompt(front.prompts, query, document, body.instruction) for query, document in pairs]
    for prompt in prompts:
        front.max_tokens(len(prompt), 1, "max_tokens", renderer.documents)
    renderer.model = front.models.label(model.ref)
    return Plan(reranker.request(prompts, model.ref, body.priority or 0), model, renderer)


def _texts(given: str | Sequence[str], param: str) -> list[str]:
    """Return the texts of a field. Raises InvalidRequest for none and for too many."""
    texts = [given] if isinstance(given, str) else list(given)
    if not texts:
        raise InvalidRequest(f"{param} is empty", param=param)
    if len(texts) > limits.MAX_PROMPTS:
        raise InvalidRequest(f"{param} has at most {limits.MAX_PROMPTS} texts", param=param)
    return texts


class ScoreRenderer(Renderer):
    """A writer of vLLM's list of scores, in the order of the pairs. With `raw` they are logarithms of odds."""

    documents = "text_2"
    """The field of the documents, for errors."""

    def __init__(self, reranker: Reranker, *, raw: bool):
        self.id = f"score-{secrets.token_hex(12)}"
        self.model = ""
        self._reranker = reranker
        self._raw = raw

    def scores(self, answers: Answers) -> list[float]:
        """Return the score of each pair."""
        found = self._reranker.log_odds(answers)
        return found if self._raw else [probability(odds) for odds in found]

    def whole(self, answers: Answers, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        """Return the JSON body."""
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(self.scores(answers))]
        head = {"id": self.id, "object": "list", "created": int(time.time()), "model": self.model}
        return dumps(head | {"data": data, "usage": _usage(usage)})


class RerankRenderer(ScoreRenderer):
    """A writer of documents with their scores, the best one first."""

    documents = "documents"

    def __init__(self, reranker: Reranker, documents: Sequence[str], *, raw: bool, top: int, shows: bool):
        """Begin a reply with at most `top` results, which have the documents' texts if it `shows` them."""
        super().__init__(reranker, raw=raw)
        self.id = f"rerank-{secrets.token_hex(12)}"
        self._documents = documents
        self._top = top
        self._shows = shows

    def whole(self, answers: Answers, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        """Return the JSON body. Documents with equal scores keep their order."""
        best = sorted(enumerate(self.scores(answers)), key=lambda scored: -scored[1])[: self._top]
        results = [self._result(i, score) for i, score in best]
        return dumps({"id": self.id, "model": self.model, "usage": _usage(usage), "results": results})

    def _result(self, index: int, score: float) -> dict[str, Any]:
        document = {"document": {"text": self._documents[index]}} if self._shows else {}
        return {"index": index, **document, "relevance_score": score}


def _usage(usage: Usage) -> dict[str, Any]:
    """Return the usage object."""
    return {
        "prompt_tokens": usage.prompt,
        "total_tokens": usage.prompt,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
