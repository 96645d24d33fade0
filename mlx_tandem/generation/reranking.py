"""Scores of documents for a query, by models that were trained to answer whether a document fits.

Qwen 3's rerankers are language models. Their score is the probability of "yes" as the next token, when only "yes" and
"no" are possible, behind the prompt that the authors publish with the models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_tandem.errors import InvalidRequest, ModelError
from mlx_tandem.generation.answers import Answers
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.generation.prompts import Prompts
from mlx_tandem.generation.templates.client import ChatTemplate
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.small_files import read_object
from mlx_tandem.types import AdapterRef, SamplingParams

NAMES = ("auto", "none", "qwen3")
"""The values of the setting: by the model's folder, not a reranker, and Qwen 3's form."""

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""What a document has to do for the query, unless a request says so itself. It is what the authors use."""

SOURCE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {{ instruction }}\n<Query>: {{ query }}\n<Document>: {{ document }}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The template of the prompt of Qwen 3's rerankers."""

WHY_NOT = (
    "this model is no reranker: it was not trained to score documents, and a likeness of its hidden states would not "
    "be the score that this route promises; /v1/embeddings has these. A model that is one is told by --reranker"
)
"""The refusal of requests for scores."""


@dataclass(frozen=True)
class Reranker:
    """A model's way to score: the template of its prompt, and its tokens for yes and no."""

    template: ChatTemplate
    yes: int
    no: int

    async def prompt(self, prompts: Prompts, query: str, document: str, instruction: str | None) -> list[int]:
        """Return the token ids of the question whether the document fits. Raises InvalidRequest."""
        values = {"query": query, "document": document, "instruction": instruction or INSTRUCTION}
        return list(await prompts.tokens(await self.template.render([], values), "documents"))

    def request(self, prompts: Sequence[Sequence[int]], adapter: AdapterRef | None, priority: int) -> Prompted:
        """Return the request for the scores of `prompts`.

        One token is drawn among yes and no at temperature 1, so that its logprob under this distribution is that of the
        one answer, and what is left is that of the other one.
        """
        params = SamplingParams(max_tokens=1, logprobs=0, allowed_token_ids=(self.yes, self.no), ignore_eos=True)
        return Prompted(prompts, [adapter] * len(prompts), params, priority=priority, speculate=False)

    def log_odds(self, answers: Answers) -> list[float]:
        """Return ln(p / (1 - p)) of each prompt, where p is the probability of yes."""
        found: list[float] = []
        for answer in answers.choices:
            drawn = min(answer.logprobs[0].sampled, -1e-30)  # the logarithm of a probability below 1
            odds = drawn - math.log(-math.expm1(drawn))
            found.append(odds if answer.tokens[0] == self.yes else -odds)
        return found


def probability(log_odds: float) -> float:
    """Return p for ln(p / (1 - p))."""
    return 1 / (1 + math.exp(-log_odds)) if log_odds > 0 else 1 - 1 / (1 + math.exp(log_odds))


def reranker_of(setting: str, folder: Path, tokenizer: Tokenizer) -> Reranker | None:
    """Return what scores with the model in `folder`; None if it is no reranker.

    With `auto`, a reranker is a folder whose `config.json` says `is_original_qwen3_reranker`, as vLLM is told, or that
    has the configuration of Sentence Transformers' layer LogitScore. Raises ModelError for a setting that there is not,
    and for a model without tokens for yes and no.
    """
    if setting not in NAMES:
        raise ModelError(f"reranker must be one of {', '.join(NAMES)}", param="reranker")
    if setting == "none" or (setting == "auto" and not _is_reranker(folder)):
        return None
    yes, no = (tokenizer.encode(word) for word in ("yes", "no"))
    if len(yes) != 1 or len(no) != 1:
        raise ModelError("this model cannot be a reranker: it has no single tokens for yes and no", param="reranker")
    return Reranker(ChatTemplate(SOURCE, tokenizer, where="the template of the reranker"), yes[0], no[0])


def _is_reranker(folder: Path) -> bool:
    """Return whether the model in this folder says that it is one of Qwen 3's rerankers."""
    config = read_object(folder / "config.json") or {}
    return config.get("is_original_qwen3_reranker") is True or (folder / "1_LogitScore" / "config.json").is_file()


def check_reranker(reranker: Reranker | None) -> Reranker:
    """Return the reranker. Raises InvalidRequest for a model that is none."""
    if reranker is None:
        raise InvalidRequest(WHY_NOT, param="model", code="unsupported_parameter")
    return reranker
