"""From a request to a sampler to submissions, and from their answers to Tinker's message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import structs

from mlx_tandem import limits
from mlx_tandem.dialects.tinker import wire
from mlx_tandem.dialects.tinker.bodies import PromptBody, SampleBody, SamplingBody
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.answers import Answer, Answers
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.output import TextOptions
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.generation.sampling import check_logprobs, stop_strings
from mlx_tandem.training.tinker.promises import Result
from mlx_tandem.types import AdapterRef, SamplingParams

EMPTY = -99999.0
"""The logprob in a cell of a list of likely tokens that has none."""

SEEDS = 0x9E3779B97F4A7C15
"""The distance of the seeds of two submissions of one request: their answers must not be the same."""


class Sample:
    """A checked request to a sampler."""

    def __init__(self, front: Front, body: SampleBody):
        """Check `body`. Raises InvalidRequest naming the field."""
        self.prompt = _prompt(body.prompt, front.client.check_ready().vocab_size)
        self.count = body.num_samples
        if not 1 <= self.count <= limits.MAX_TINKER_SAMPLES:
            raise InvalidRequest(f"num_samples is 1 to {limits.MAX_TINKER_SAMPLES}", param="num_samples")
        self.last = body.prompt_logprobs_last_n
        if self.last is not None and not (body.prompt_logprobs and 1 <= self.last < len(self.prompt)):
            raise InvalidRequest(
                "prompt_logprobs_last_n is 1 to the length of the prompt less 1, and needs prompt_logprobs",
                param="prompt_logprobs_last_n",
            )
        self.wants_prompt = bool(body.prompt_logprobs)
        self.prompt_top = _top(front, body.topk_prompt_logprobs, "topk_prompt_logprobs")
        self.top = _top(front, body.topk_sample_logprobs, "topk_sample_logprobs")
        self._front = front
        self._stops, ids, ignores_end = _stops(body.sampling_params.stop, front.client.check_ready().vocab_size)
        self._params = SamplingParams(
            logprobs=self.top,
            prompt_logprobs=self.prompt_top if self.wants_prompt or self.prompt_top else None,
            stop_token_ids=ids,
            ignore_eos=ignores_end,
            **_numbers(front, body.sampling_params, len(self.prompt)),
        )

    def submissions(self, adapter: AdapterRef | None, follow: bool) -> list[Prompted]:
        """Return what is asked of the engine: as many samples in one submission as it takes at once."""
        most = self._front.client.check_ready().max_num_seqs
        counts = [min(most, self.count - done) for done in range(0, self.count, most)]
        text = TextOptions(self._stops, show_special=True)
        params = self._params
        made = []
        for i, count in enumerate(counts):
            seed = (params.seed + i * SEEDS + 2**63) % 2**64 - 2**63
            asked = params.prompt_logprobs if not i else None
            own = structs.replace(params, seed=seed, prompt_logprobs=asked)
            made.append(Prompted([self.prompt], [adapter], own, count, text, follow=follow))
        return made

    def write(self, answers: Sequence[Answers]) -> Result:
        """Return Tinker's message with the answers to all submissions."""
        read = answers[0].prompts[0]
        prompt: wire.Array | None = None
        if self.wants_prompt:
            prompt = np.full(len(self.prompt), np.nan, np.float32)
            prompt[1:] = [own.model for own in read.logprobs]
            prompt[: len(prompt) - (self.last or len(prompt))] = np.nan
        topk = None
        if self.prompt_top:
            rows: list[Sequence[tuple[int, float]]] = [(), *(own.top for own in read.logprobs)]
            left = len(rows) - (self.last or len(rows))
            topk = _topk([() if i < left else row for i, row in enumerate(rows)], self.prompt_top)
        sequences = [self._sequence(choice) for each in answers for choice in each.choices]
        return Result(wire.write_samples(sequences, prompt, topk, read.cached), "protobuf")

    def _sequence(self, answer: Answer) -> wire.Sampled:
        reason = wire.STOP if answer.reason == "stop" else wire.LENGTH
        topk = _topk([own.top for own in answer.logprobs], self.top) if self.top else None
        return wire.Sampled(answer.tokens, [own.sampled for own in answer.logprobs], reason, topk)


def _topk(rows: Sequence[Sequence[tuple[int, float]]], k: int) -> wire.Topk:
    """Return the most likely tokens of each position; a position without any has empty cells."""
    ids, logprobs = np.zeros((len(rows), k), np.int32), np.full((len(rows), k), EMPTY, np.float32)
    for i, row in enumerate(rows):
        for j, (token, logprob) in enumerate(row[:k]):
            ids[i, j], logprobs[i, j] = token, logprob
    return wire.Topk(ids, logprobs)


def _prompt(body: PromptBody, vocab_size: int) -> tuple[int, ...]:
    """Return the token ids of a prompt. Raises InvalidRequest for other chunks than tokens."""
    ids: list[int] = []
    for i, chunk in enumerate(body.chunks):
        where = f"prompt.chunks[{i}]"
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise InvalidRequest(f"{where} is no encoded_text: samplers read tokens here", param=where)
        ids += limits.check_token_ids(chunk.get("tokens"), vocab_size, f"{where}.tokens")
    if not ids:
        raise InvalidRequest("prompt is empty", param="prompt")
    return tuple(ids)


def _top(front: Front, asked: int, param: str) -> int:
    """Return how many likely tokens are asked for. Raises InvalidRequest for more than the server gives."""
    if asked < 0:
        raise InvalidRequest(f"{param} is at least 0", param=param)
    check_logprobs(front, param, asked)
    return asked


def _stops(given: Any, vocab_size: int) -> tuple[tuple[str, ...], tuple[int, ...], bool]:
    """Return the texts and the token ids that end a sample, and whether the model's own end does not.

    Raises InvalidRequest naming `stop`.
    """
    if isinstance(given, list) and given and all(type(stop) is int for stop in given):
        if len(given) > limits.MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"stop has at most {limits.MAX_STOP_TOKEN_IDS} token ids", param="sampling_params.stop"
            )
        return (), limits.check_token_ids(given, vocab_size, "sampling_params.stop"), False
    return stop_strings(given), (), given == []


def _numbers(front: Front, body: SamplingBody, prompt: int) -> dict[str, Any]:
    """Return the checked numbers of a request with a prompt of so many tokens."""
    where = "sampling_params"
    for name in ("temperature", "top_p", "top_k"):
        limits.check(name, getattr(body, name), f"{where}.{name}")
    if body.seed is not None:
        limits.check("seed", body.seed, f"{where}.seed")
    if body.max_tokens is not None:
        limits.check("max_tokens", body.max_tokens, f"{where}.max_tokens")
    room = front.room(front.client.check_ready()) - prompt
    most = front.config.server.max_generation_tokens or room
    asked = max(min(room, most), 1) if body.max_tokens is None else body.max_tokens
    return {
        "max_tokens": front.max_tokens(prompt, asked, f"{where}.max_tokens", "prompt"),
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": max(body.top_k, 0),
        "seed": front.seed(body.seed),
    }
