"""Generating for the Python API: prompts and sampling arguments in, completions out, on the front's loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Annotated, Any

from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest, renamed
from mlx_tandem.generation.adapters.model_names import Selection
from mlx_tandem.generation.answers import Answers
from mlx_tandem.generation.chat_constraints import chat_constraint
from mlx_tandem.generation.chats import Chat, ChatRequest, Effort, Thinking
from mlx_tandem.generation.continued_chats import Kept, continued
from mlx_tandem.generation.embeddings import EmbeddingOptions, embedding_request, vectors
from mlx_tandem.generation.events import TextDelta
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.grammar.fields import constraint_of
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.generation.sampling import Sampling, choices, sampling_params, text_options
from mlx_tandem.generation.tools.offer import tools_of
from mlx_tandem.strict_json import convert
from mlx_tandem.types import FinishReason, Pooling, SamplingParams, TokenLogprob

Tokens = Sequence[int]
"""A prompt as token ids."""

Adapters = str | None | Sequence[str | None]
"""The adapter of all prompts, or a list with that of each prompt. None is the base model."""


@dataclass(frozen=True)
class FunctionCall:
    """A call of a tool that the model asks for. `arguments` is JSON as the model has written it."""

    id: str
    name: str
    arguments: str


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
    reasoning: str = ""  # the thoughts before the answer to a conversation, which `text` leaves out
    tool_calls: tuple[FunctionCall, ...] = ()  # calls of the offered tools, which `text` leaves out


class ApiSampling(Sampling, kw_only=True, forbid_unknown_fields=True):
    """The keyword arguments of `generate`, `chat` and `stream`. Names and ranges are those of the HTTP API."""

    logprobs: Annotated[int, limits.bounds("logprobs")] | None = None  # number of alternatives besides the token


class ApiEmbedding(Struct, kw_only=True, forbid_unknown_fields=True):
    """The keyword arguments of `embed`."""

    pooling: Pooling | None = None
    normalize: bool = True
    dimensions: Annotated[int, limits.bounds("dimensions")] | None = None


class ChatOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """The keyword arguments of `chat` about tools and thoughts. Names and values are those of the HTTP API."""

    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Annotated[int, limits.bounds("thinking_token_budget")] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


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
        options: dict[str, Any],
        sampling: dict[str, Any],
    ) -> Completion:
        """Return the answer to a conversation. `options` are those of ChatOptions. Raises InvalidRequest, NotFound."""
        chat = await _chat(self._front, messages, options)
        return (await self._complete([chat.prompt], await self._select(adapter), sampling, chat))[0]

    async def go_on(
        self,
        messages: Sequence[Mapping[str, Any]],
        adapter: str | None,
        options: dict[str, Any],
        sampling: dict[str, Any],
        kept: Kept | None,
        check: Callable[[SamplingParams], None],
    ) -> tuple[list[int], Prompted, Completion]:
        """Return a conversation as the template writes it, the request after the tokens that are kept, and the answer.

        `check` raises InvalidRequest for parameters that the answer may not be drawn with. Raises InvalidRequest and
        NotFound, and Conflict for a conversation that does not go on after its last answer.
        """
        asked = _chat_request(messages, options)
        chat = await asked.chat(self._front)
        if chat.images:
            raise InvalidRequest("a conversation that is trained on holds text only", param="messages")
        prompt = chat.prompt if kept is None else await continued(self._front, asked, chat.prompt, kept)
        prompted = await _prompted(self._front, [prompt], await self._select(adapter), sampling, chat)
        check(prompted.params)
        return chat.prompt, prompted, _completion(prompted, await self._front.answers(prompted), 0)

    async def embed(
        self,
        prompt: str | Tokens | Sequence[str] | Sequence[Tokens],
        adapter: str | None,
        options: dict[str, Any],
    ) -> list[list[float]]:
        """Return the embedding of each prompt. Raises InvalidRequest and NotFound."""
        wanted = convert(options, ApiEmbedding)
        prompts = [await self._tokens(p) for p in ([prompt] if is_one(prompt) else prompt)]
        front = self._front
        for tokens in prompts:
            front.max_tokens(len(tokens), 1, "max_tokens", "prompt")
        (model,) = await self._select(adapter)
        form = EmbeddingOptions(wanted.pooling or front.pooling, wanted.normalize, wanted.dimensions)
        prompted = embedding_request(front.client.check_ready(), prompts, model.ref, form)
        return [vector.tolist() for vector in vectors(await front.answers(prompted), form)] if prompts else []

    async def _tokens(self, prompt: Any) -> list[int]:
        """Return the token ids of a text, or a checked list of token ids. Raises InvalidRequest."""
        if isinstance(prompt, str):
            return await self._front.text_prompt(prompt, "prompt")
        if not prompt:
            raise InvalidRequest("the prompt is empty", param="prompt")
        return list(limits.check_token_ids(prompt, self._front.client.check_ready().vocab_size, "prompt"))

    async def _complete(
        self,
        prompts: list[list[int]],
        models: list[Selection],
        sampling: dict[str, Any],
        chat: Chat | None = None,
    ) -> list[Completion]:
        """Return the completions of the prompts, each under its model. `chat` is the conversation, if it is one."""
        prompted = await _prompted(self._front, prompts, models, sampling, chat)
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
            front, chat = self._front, None
            if not is_one(prompt) and prompt and isinstance(prompt[0], Mapping):
                chat = await _chat(front, prompt, {})
            tokens = await self._tokens(prompt) if chat is None else chat.prompt
            prompted = await _prompted(front, [tokens], await self._select(adapter), sampling, chat)
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


async def _chat(front: Front, messages: Any, options: dict[str, Any]) -> Chat:
    """Return a conversation as a prompt. A text is one message of the user. Raises InvalidRequest."""
    return await _chat_request(messages, options).chat(front)


def _chat_request(messages: Any, options: dict[str, Any]) -> ChatRequest:
    """Return a conversation with everything that decides how it is rendered. Raises InvalidRequest."""
    given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    asked = convert(options, ChatOptions)
    return ChatRequest(
        convert({"messages": given}, Conversation).messages,
        tools_of(asked.tools, asked.tool_choice, asked.parallel_tool_calls),
        Thinking(asked.enable_thinking, asked.reasoning_effort, asked.thinking_token_budget),
        asked.chat_template_kwargs or {},
    )


async def _prompted(
    front: Front,
    prompts: list[list[int]],
    models: list[Selection],
    sampling: dict[str, Any],
    chat: Chat | None = None,
) -> Prompted:
    """Return the checked request for these prompts, each under its model. Raises InvalidRequest."""
    body = convert({name: _plain(value) for name, value in sampling.items()}, ApiSampling)
    constraint = constraint_of(body)
    if chat is not None:
        constraint = chat_constraint(front, chat, constraint)
    n = choices(front, body)
    params = sampling_params(front, body, max(map(len, prompts)), "prompt", logprobs=body.logprobs)
    if chat is not None:
        params = chat.params(params)
    text = text_options(body)
    return Prompted(
        prompts,
        [model.ref for model in models],
        params,
        n,
        text if chat is None else chat.text(text),
        parser=None if chat is None else chat.parser,
        most_calls=None if chat is None else chat.most_calls,
        images=() if chat is None else chat.images,
        priority=body.priority or 0,
        grammar=None if constraint is None else await front.constraints.grammar(constraint),
        speculate=body.speculation is not False,
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
        reasoning=answer.reasoning,
        tool_calls=tuple(FunctionCall(call.id, call.name, "".join(call.pieces)) for call in answer.calls),
    )


def is_one(prompt: Any) -> bool:
    """Return whether `prompt` is one prompt, a text or a list of token ids. Raises InvalidRequest for other types."""
    if not isinstance(prompt, Sequence):
        raise InvalidRequest(f"prompt must be a text or a list, not {type(prompt).__name__}", param="prompt")
    return isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int))
