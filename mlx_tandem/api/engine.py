"""`Engine`: a model with its adapters in the caller's process, the engine on one thread and the front on another."""

from __future__ import annotations

import asyncio
import atexit
import difflib
import os
import socket
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Annotated, Any, Self, TypeVar, overload

from msgspec import Struct

from mlx_tandem import limits, worker
from mlx_tandem.api.data import Data, ServedCodec
from mlx_tandem.api.trainer import OpenTrainers, Trainer, open_trainer, run_pass
from mlx_tandem.config import (
    CacheConfig,
    Config,
    DiskCacheConfig,
    DutyConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)
from mlx_tandem.decode import convert
from mlx_tandem.engine.learning import BatchResult, LossConfig, LossKind
from mlx_tandem.engine.process import EngineProcess, Launch
from mlx_tandem.errors import EngineError, InvalidRequest, renamed
from mlx_tandem.generation.answers import Answers
from mlx_tandem.generation.events import TextDelta
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.messages import chat_messages
from mlx_tandem.generation.model_names import Selection
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.generation.sampling import Sampling, choices, sampling_params, text_options
from mlx_tandem.types import (
    AdapterSource,
    EngineInfo,
    EngineStats,
    FinishReason,
    TokenLogprob,
)

T = TypeVar("T")
Tokens = Sequence[int]
_SERVER = ServerConfig(max_queue_size=1 << 30, max_registered_adapters=1 << 30, max_n=int(limits.PARAMETERS["n"].high))
"""Limits that protect a server from its clients are off: the caller owns the process."""
Adapters = str | None | Sequence[str | None]
"""The adapter of all prompts, or a list with that of each; None is the base model."""


@dataclass(frozen=True)
class Completion:
    """One choice. `token_ids` are all tokens that were given, the one that ended it included; `text` is without it."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason
    adapter: str | None  # name@version, None: the base model
    prompt_tokens: int
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # of the prompt's tokens from the second on
    cached_tokens: int = 0  # of the prompt's, those that did not have to be computed


class ApiSampling(Sampling, kw_only=True, forbid_unknown_fields=True):
    """The keyword arguments of `generate`, `chat` and `stream`; names and ranges are those of the HTTP API."""

    logprobs: Annotated[int, limits.bounds("logprobs")] | None = None  # 0: the sampled token's; k: also the k likeliest


class Conversation(Struct):
    """The argument of `chat`."""

    messages: list[dict[str, Any]]


class Engine:
    """A model with its adapters, loaded on entering or constructing and freed by `close` or the end of the block.

    >>> with Engine() as engine:                                # the built-in model and its adapters
    ...     engine.chat("2 + 3", adapter="shout").text

    Every method may be called from any thread; calls made at the same time share batches. `options` are fields of
    the engine's configuration, such as `dtype`, `max_num_seqs` or `num_blocks`. Errors are those of
    `mlx_tandem.errors`.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        **options: object,
    ) -> None:
        if model is None:
            from mlx_tandem import demo

            model, adapters = demo.MODEL_PATH, demo.ADAPTER_PATHS if adapters is None else adapters
        engine = _engine_config(str(model), options)
        named = tuple((name, str(path)) for name, path in (adapters or {}).items())
        self._front = Front(Config(engine, _SERVER, named), _thread_launch(engine))
        self._trainers: OpenTrainers = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tandem-front", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        try:
            self._call(self._start())
        except BaseException:
            self.close()
            raise

    async def _start(self) -> None:
        await self._front.start()
        await self._front.client.wait_ready()

    async def _end(self) -> None:
        await self._front.close()
        await self._front.client.close()

    def close(self) -> None:
        """Free the model. What still runs ends with an error; a second call does nothing."""
        if self._loop.is_closed():
            return
        atexit.unregister(self.close)
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- generating ---------------------------------------------------------------------------------------------

    @overload
    def generate(self, prompt: str | Tokens, *, adapter: str | None = None, **sampling: Any) -> Completion: ...

    @overload
    def generate(
        self, prompt: Sequence[str] | Sequence[Tokens], *, adapter: Adapters = None, **sampling: Any
    ) -> list[Completion]: ...

    def generate(
        self, prompt: str | Tokens | Sequence[str] | Sequence[Tokens], *, adapter: Adapters = None, **sampling: Any
    ) -> Completion | list[Completion]:
        """Continue a prompt, or each of several in one batch. `adapter` is one name for all of them, or a list of as
        many names as there are prompts, None for the base model. With `n`, every prompt has n neighbouring results."""
        completions = self._call(self._generate(prompt, adapter, sampling))
        return completions[0] if _is_one(prompt) and "n" not in sampling else completions

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        adapter: str | None = None,
        enable_thinking: bool | None = None,
        **sampling: Any,
    ) -> Completion:
        """Return the assistant's answer to a conversation; a text stands for one message of the user."""
        if "n" in sampling:
            raise InvalidRequest("chat gives one answer; use generate for several", param="n")
        return self._call(self._chat(messages, adapter, enable_thinking, sampling))

    def stream(
        self, prompt: str | Tokens | Sequence[Mapping[str, Any]], *, adapter: str | None = None, **sampling: Any
    ) -> Iterator[str]:
        """Yield the text of a continuation, or of the answer to messages, as it comes. Leaving the loop cancels it."""
        if "n" in sampling:
            raise InvalidRequest("a stream has one choice", param="n")
        pieces: SimpleQueue[str | BaseException | None] = SimpleQueue()
        task = asyncio.run_coroutine_threadsafe(self._stream(prompt, adapter, sampling, pieces), self._loop)
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            task.cancel()

    # -- adapters and state -------------------------------------------------------------------------------------

    def load_adapter(self, name: str, path: str | Path) -> str:
        """Make a folder the current version of `name`, beside what runs; return its label, name@version."""
        source = AdapterSource(os.path.abspath(path), follow_links=True)
        return self._call(self._front.models.load(name, source)).ref.label

    def unload_adapter(self, name: str) -> None:
        """Forget a name and all its versions; requests that run are finished."""
        self._call(self._front.models.unload(name))

    @property
    def adapters(self) -> list[str]:
        """Return the labels of the current version of every name."""
        return [e.ref.label for e in self._front.models.registry.entries()]

    @property
    def info(self) -> EngineInfo:
        """Return what the engine found at its start."""
        return self._front.client.check_ready()

    @property
    def stats(self) -> EngineStats:
        """Return the counters and gauges of the last heartbeat."""
        return self._front.client.stats

    # -- learning -----------------------------------------------------------------------------------------------

    def trainer(
        self,
        name: str,
        *,
        rank: int | None = None,
        alpha: float | None = None,
        targets: Sequence[str] = (),
        seed: int = 0,
        init_from: str | None = None,
        resume: str | Path | None = None,
    ) -> Trainer:
        """Return an adapter to be trained beside what is served. Raises Conflict while a trainer of that name is open.

        It begins as one that changes nothing, of rank 16 with alpha twice the rank; or with the weights, rank and scale
        of the adapter `init_from`; or where the one in the folder `resume` was saved. `targets` are last parts of
        module names, such as "q_proj"; none: every linear layer.
        """
        opening = open_trainer(
            self._call, self._front, self._trainers, name, rank=rank, alpha=alpha, targets=targets, seed=seed,
            init_from=init_from, resume=resume,
        )  # fmt: skip
        return self._call(opening)

    def forward_backward(
        self, data: Mapping[Trainer, Data], loss: LossKind | LossConfig = "cross_entropy", **switches: Any
    ) -> dict[Trainer, BatchResult]:
        """`Trainer.forward_backward` of several at once, which share batches."""
        return self._call(run_pass(self._front, data, loss, switches, forward_only=False))

    @property
    def codec(self) -> ServedCodec:
        """Return what writes text as this model's token ids, so that `training.examples` can make data of examples."""
        return ServedCodec.of(self._front)

    # -- on the loop --------------------------------------------------------------------------------------------

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise EngineError("this engine was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C while waiting
            raise

    async def _generate(
        self,
        prompt: str | Tokens | Sequence[str] | Sequence[Tokens],
        adapter: Adapters,
        sampling: dict[str, Any],
    ) -> list[Completion]:
        prompts = [await self._tokens(p) for p in ([prompt] if _is_one(prompt) else prompt)]
        names: Sequence[Any] = [adapter] * len(prompts)
        if isinstance(adapter, Sequence) and not isinstance(adapter, str):
            if _is_one(prompt):
                raise InvalidRequest("one prompt has one adapter, not a list of them", param="adapter")
            names = adapter
        if len(names) != len(prompts):
            raise InvalidRequest(f"adapter has {len(names)} names for {len(prompts)} prompts", param="adapter")
        models = await self._select(*names)
        return await self._complete(prompts, models, sampling) if prompts else []

    async def _select(self, *adapters: Any) -> list[Selection]:
        """Return what each name stands for now; a name that is there twice is one version."""
        if not all(adapter is None or isinstance(adapter, str) for adapter in adapters):
            raise InvalidRequest("an adapter is given by its name; None is the base model", param="adapter")
        with renamed(model="adapter"):
            chosen = {name: await self._front.models.select(name) for name in dict.fromkeys(adapters)}
        return [chosen[name] for name in adapters]

    async def _chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        adapter: str | None,
        enable_thinking: bool | None,
        sampling: dict[str, Any],
    ) -> Completion:
        options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        prompt = await self._front.chat_prompt(_messages(messages), options)
        return (await self._complete([prompt], await self._select(adapter), sampling))[0]

    async def _tokens(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return await self._front.text_prompt(prompt, "prompt")
        if not prompt:
            raise InvalidRequest("the prompt is empty", param="prompt")
        return list(limits.check_token_ids(prompt, self._front.client.check_ready().vocab_size, "prompt"))

    async def _complete(
        self, prompts: list[list[int]], models: list[Selection], sampling: dict[str, Any]
    ) -> list[Completion]:
        """Return the completions of each prompt under the model of each."""
        prompted = _prompted(self._front, prompts, models, sampling)
        answers = await self._front.answers(prompted)
        return [_completion(prompted, answers, i) for i in range(prompted.choices)]

    async def _stream(
        self,
        prompt: str | Tokens | Sequence[Mapping[str, Any]],
        adapter: str | None,
        sampling: dict[str, Any],
        pieces: SimpleQueue[str | BaseException | None],
    ) -> None:
        try:
            if not _is_one(prompt) and prompt and isinstance(prompt[0], Mapping):
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
    """Return choice number `i`. Raises EngineError when it has not ended."""
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


def _is_one(prompt: Any) -> bool:
    """Return whether this is a text or one list of token ids, not several of them. Raises InvalidRequest."""
    if not isinstance(prompt, Sequence):
        raise InvalidRequest(f"prompt must be a text or a list, not {type(prompt).__name__}", param="prompt")
    return isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int))


def _messages(given: Any) -> list[Mapping[str, Any]]:
    """Return a conversation as the template takes it; a text is one message of the user. Raises InvalidRequest."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return chat_messages(convert({"messages": given}, Conversation).messages)


def _engine_config(model: str, options: Mapping[str, object]) -> EngineConfig:
    """Return the configuration. Options have the names of its fields, whatever section they are in."""
    sections = {
        "model": ModelConfig,
        "cache": CacheConfig,
        "scheduler": SchedulerConfig,
        "lora": LoraConfig,
        "duty": DutyConfig,
    }
    places = {field: (section, field) for section, struct in sections.items() for field in struct.__struct_fields__}
    del places["path"], places["backend"]
    # Those of the disk tier by the names of their command line options.
    places |= {f"ssd_{field}": ("disk", field) for field in DiskCacheConfig.__struct_fields__}
    places |= {"ssd": places.pop("ssd_enabled"), "ssd_cache_dir": places.pop("ssd_dir")}
    places["lora_backend"] = ("lora", "backend")
    tree: dict[str, Any] = {"model": {"path": model}}
    for name, value in options.items():
        if name not in places:
            near = difflib.get_close_matches(name, places, n=1)
            raise TypeError(f"Engine has no option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        section, field = places[name]
        tree.setdefault(section, {})[field] = value
    return convert(tree, EngineConfig)


class _EngineThread:
    """The engine on a thread of this process: one thread owns the device here, too."""

    def __init__(self, sock: socket.socket, config: EngineConfig):
        self._status: int | None = None
        self._thread = threading.Thread(target=self._run, args=(sock, config), name="tandem-engine", daemon=True)
        self._thread.start()

    def _run(self, sock: socket.socket, config: EngineConfig) -> None:
        with closing(sock):
            self._status = worker.run(sock, config)

    def kill(self) -> None:
        """A thread cannot be ended from outside; it ends by itself when it finds its socket closed."""

    def wait(self, timeout: float) -> int | None:
        self._thread.join(timeout)
        return None if self._thread.is_alive() else self._status or 0

    def last_words(self) -> str:
        """Return nothing: what is wrong is said in a message, and a thread cannot end without it."""
        return ""


def _thread_launch(config: EngineConfig) -> Launch:
    def launch() -> tuple[socket.socket, EngineProcess]:
        ours, theirs = socket.socketpair()
        return ours, _EngineThread(theirs, config)

    return launch
