"""Generating for the Python API: prompts and sampling arguments in, completions out, on the front's loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Annotated, Any

from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.decode import convert
from mlx_tandem.errors import InvalidRequest, renamed
from mlx_tandem.generation.answers import Answers
from mlx_tandem.generation.events import TextDelta
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.messages import chat_messages
from mlx_tandem.generation.model_names import Selection
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.generation.sampling import Sampling, choices, sampling_params, text_options
from mlx_tandem.types import FinishReason, TokenLogprob

Tokens = Sequence[int]
"""A prompt as token ids."""

Adapters = str | None | Sequence[str | None]
"""The adapter of all prompts, or a list with that of each prompt. None is the base model."""


@dataclass(frozen=True)
class Completion:
    """One generated choice. `token_ids` has all of its tokens. `text` leaves out the token that ended it."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason
    adapter: str | None  # name@version; None: the base model
    prompt_tokens: int
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # those of the prompt's tokens from the second on
    cached_tokens: int = 0  # number of the prompt's tokens that did not have to be computed


class ApiSampling(Sampling, kw_only=True, forbid_unknown_fields=True):
    """The keyword arguments of `generate`, `chat` and `stream`. Names and ranges are those of the HTTP API."""

    logprobs: Annotated[int, limits.bounds("logprobs")] | None = None  # number of alternatives besides the token


class Conversation(Struct):
    """The messages of a conversation, for checking their types."""

    messages: list[dict[str, Any]]


class Generation:
    """The generating side of one engine. All of its methods run on the front's loop."""

    def __init__(self, front: Front):
        self._front = front

    async def generate(
        self,
        prompt: str | Tokens | Sequence[str] | Sequence[Tokens],
        adapter: Adapters,
        sampling: dict[str, Any],
    ) -> list[Completion]:
        """Return the completions of a prompt or of several. Raises InvalidRequest and NotFound."""
        prompts = [await self._tokens(p) for p in ([prompt] if is_one(prompt) else prompt)]
        names: Sequence[Any] = [adapter] * len(prompts)
        if isinstance(adapter, Sequence) and not isinstance(adapter, str):
            if is_one(prompt):
                raise InvalidRequest("one prompt has one adapter, not a list of them", param="adapter")
            names = adapter
        if len(names) != len(prompts):
            raise InvalidRequest(f"adapter has {len(names)} names for {len(prompts)} prompts", param="adapter")
        models = await self._select(*names)
        return await self._complete(prompts, models, sampling) if prompts else []

    async def _select(self, *adapters: Any) -> list[Selection]:
        """Return the model of each name. A name that occurs twice gets the same version both times."""
        if not all(adapter is None or isinstance(adapter, str) for adapter in adapters):
            raise InvalidRequest("an adapter is given by its name; None is the base model", param="adapter")
        with renamed(model="adapter"):
            chosen = {name: await self._front.models.select(name) for name in dict.fromkeys(adapters)}
        return [chosen[name] for name in adapters]

    async def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        adapter: str | None,
        enable_thinking: bool | None,
        sampling: dict[str, Any],
    ) -> Completion:
        """Return the answer to a conversation. Raises InvalidRequest and NotFound."""
        options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        prompt = await self._front.chat_prompt(_messages(messages), options)
        return (await self._complete([prompt], await self._select(adapter), sampling))[0]

    async def _tokens(self, prompt: Any) -> list[int]:
        """Return the token ids of a text, or a checked list of token ids. Raises InvalidRequest."""
        if isinstance(prompt, str):
            return await self._front.text_prompt(prompt, "prompt")
        if not prompt:
            raise InvalidRequest("the prompt is empty", param="prompt")
        return list(limits.check_token_ids(prompt, self._front.client.check_ready().vocab_size, "prompt"))

    async def _complete(
        self, prompts: list[list[int]], models: list[Selection], sampling: dict[str, Any]
    ) -> list[Completion]:
        """Return the completions of the prompts, each under its model."""
        prompted = _prompted(self._front, prompts, models, sampling)
        answers = await self._front.answers(prompted)
        return [_completion(prompted, answers, i) for i in range(prompted.choices)]

    async def stream(
        self,
        prompt: str | Tokens | Sequence[Mapping[str, Any]],
        adapter: str | None,
        sampling: dict[str, Any],
        pieces: SimpleQueue[str | BaseException | None],
    ) -> None:
        """Put the text of a continuation or an answer into `pieces`, then None at its end, or the error that ended it.

        The queue gets one piece for each batch of deltas that has text.
        """
        try:
            if not is_one(prompt) and prompt and isinstance(prompt[0], Mapping):
                tokens = await self._front.chat_prompt(_messages(prompt), {})
            else:
                tokens = await self._tokens(prompt)
            front = self._front
            prompted = _prompted(front, [tokens], await self._select(adapter), sampling)
            async with front.client.submit(*prompted.requests(front.client)) as stream:
                assembler = front.assembler(prompted, stream)
                async for deltas in stream:
                    text = "".join([event.text for event in assembler.push(deltas) if isinstance(event, TextDelta)])
                    if text:
                        pieces.put(text)
            pieces.put(None)
        except BaseException as e:
            pieces.put(e)
            raise


def _prompted(front: Front, prompts: list[list[int]], models: list[Selection], sampling: dict[str, Any]) -> Prompted:
    """Return the checked request for these prompts, each under its model. Raises InvalidRequest."""
    body = convert({name: _plain(value) for name, value in sampling.items()}, ApiSampling)
    n = choices(front, body)
    params = sampling_params(front, body, max(map(len, prompts)), "prompt", logprobs=body.logprobs)
    return Prompted(
        prompts, [model.ref for model in models], params, n, text_options(body), priority=body.priority or 0
    )


def _plain(value: Any) -> Any:
    """Return numbers of types derived from Python's, such as NumPy's float64, as Python's own."""
    if isinstance(value, float):
        return float(value)
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _completion(prompted: Prompted, answers: Answers, i: int) -> Completion:
    """Return choice number `i` as a completion. Raises EngineError when the choice has not ended."""
    k, answer = i // prompted.n, answers.choices[i]
    adapter, params, prompt = prompted.adapters[k], prompted.params, answers.prompts[k]
    return Completion(
        text=answer.text,
        token_ids=tuple(answer.tokens),
        logprobs=tuple(answer.logprobs) if params.logprobs is not None else None,
        finish_reason=answer.reason,
        adapter=adapter.label if adapter else None,
        prompt_tokens=len(prompted.prompts[k]),
        prompt_logprobs=prompt.logprobs if params.prompt_logprobs is not None else None,
        cached_tokens=prompt.cached,
    )


def is_one(prompt: Any) -> bool:
    """Return whether `prompt` is one prompt, a text or a list of token ids. Raises InvalidRequest for other types."""
    if not isinstance(prompt, Sequence):
        raise InvalidRequest(f"prompt must be a text or a list, not {type(prompt).__name__}", param="prompt")
    return isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int))


def _messages(given: Any) -> list[Mapping[str, Any]]:
    """Return a conversation in the template's form. A text is one message of the user. Raises InvalidRequest."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return chat_messages(convert({"messages": given}, Conversation).messages)
