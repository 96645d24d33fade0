"""`Engine`: a model with its adapters in the caller's process, with one thread for the engine and one for the front."""

from __future__ import annotations

import asyncio
import atexit
import difflib
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from msgspec import structs

from mlx_tandem import engine_main, limits
from mlx_tandem.api.calls import begin
from mlx_tandem.api.conversations import Conversation
from mlx_tandem.api.data import Data, ServedCodec
from mlx_tandem.api.generation import Adapters, ChatOptions, Completion, Generation, Tokens, is_one
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
from mlx_tandem.engine.client.process import EngineProcess, Launch
from mlx_tandem.engine.learning import BatchResult, LoraOptions, LossConfig, LossKind
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.front import Front
from mlx_tandem.strict_json import convert
from mlx_tandem.types import AdapterSource, EngineInfo, EngineStats

T = TypeVar("T")
_SERVER = ServerConfig(max_queue_size=1 << 30, max_registered_adapters=1 << 30, max_n=int(limits.PARAMETERS["n"].high))
"""Server settings without the limits that protect a server from its clients, since the caller owns the process."""


class Engine:
    """A model with its adapters. The constructor loads it; `close`, or the end of the `with` block, frees it.

    >>> with Engine() as engine:                                # the built-in model and its adapters
    ...     engine.chat("2 + 3", adapter="shout").text

    Every method may be called from any thread, and calls at the same time share batches. Errors are those of
    `mlx_tandem.errors`.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        **options: object,
    ) -> None:
        """Load a model and the folders of `adapters`, which are given by their names.

        `options` are fields of the engine's configuration, such as `dtype`, `max_num_seqs` or `num_blocks`. Raises
        TypeError for an unknown option, and the errors of loading.
        """
        if model is None:
            from mlx_tandem import demo

            model, adapters = demo.MODEL_PATH, demo.ADAPTER_PATHS if adapters is None else adapters
        engine = _engine_config(str(model), options)
        named = tuple((name, str(path)) for name, path in (adapters or {}).items())
        if named or engine.duty.trainer_rank:
            engine = structs.replace(engine, lora=structs.replace(engine.lora, prepare=True))
        self._front = Front(Config(engine, _SERVER, named), _thread_launch(engine))
        self._generation = Generation(self._front)
        self._trainers: OpenTrainers = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tandem-front", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        try:
            self._call(self._start)
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
        """Free the model. Running calls end with an error. A second call does nothing."""
        if self._loop.is_closed():
            return
        atexit.unregister(self.close)
        self._call(self._end)
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
        """Continue a prompt, or several prompts in one batch, and return the completions.

        `adapter` is one name for all prompts, or a list with a name for each; None is the base model. With `n`, the
        result is a list in which each prompt has n neighbouring completions.
        """
        completions = self._call(lambda: self._generation.generate(prompt, adapter, sampling))
        return completions[0] if is_one(prompt) and "n" not in sampling else completions

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        adapter: str | None = None,
        **options: Any,
    ) -> Completion:
        """Return the assistant's answer to a conversation. A text stands for one message of the user.

        `options` are the sampling arguments of `generate`, and those of the HTTP API about tools and thoughts: `tools`,
        `tool_choice`, `parallel_tool_calls`, `enable_thinking`, `reasoning_effort`,
        `thinking_token_budget` and `chat_template_kwargs`.
        """
        if "n" in options:
            raise InvalidRequest("chat gives one answer; use generate for several", param="n")
        own = {name: options.pop(name) for name in ChatOptions.__struct_fields__ if name in options}
        return self._call(lambda: self._generation.chat(messages, adapter, own, options))

    def conversation(self, *, adapter: str | None = None, **options: Any) -> Conversation:
        """Begin a conversation of several turns whose answers a trainer can learn from.

        `options` are those of `chat` about tools and thoughts.
        """
        known = set(ChatOptions.__struct_fields__)
        for name in options:
            if name not in known:
                raise InvalidRequest(f"a conversation has no option {name}", param=name, code="unknown_parameter")
        return Conversation(self._call, self._generation, adapter, options)

    def stream(
        self, prompt: str | Tokens | Sequence[Mapping[str, Any]], *, adapter: str | None = None, **sampling: Any
    ) -> Iterator[str]:
        """Yield the text of a continuation, or of the answer to messages, in pieces as they are generated.

        Leaving the loop cancels the request.
        """
        if "n" in sampling:
            raise InvalidRequest("a stream has one choice", param="n")
        pieces: SimpleQueue[str | BaseException | None] = SimpleQueue()
        task = begin(self._loop, lambda: self._generation.stream(prompt, adapter, sampling, pieces))
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            task.cancel()

    @overload
    def embed(self, prompt: str | Tokens, *, adapter: str | None = None, **options: Any) -> list[float]: ...

    @overload
    def embed(
        self, prompt: Sequence[str] | Sequence[Tokens], *, adapter: str | None = None, **options: Any
    ) -> list[list[float]]: ...

    def embed(
        self, prompt: str | Tokens | Sequence[str] | Sequence[Tokens], *, adapter: str | None = None, **options: Any
    ) -> list[float] | list[list[float]]:
        """Return the embedding of a prompt, or of several prompts in one batch.

        `options` are `pooling` ("mean" or "last"; the model's own by default), `normalize` (vectors of length 1, which
        is the default) and `dimensions` (how many of the first numbers are kept).
        """
        found = self._call(lambda: self._generation.embed(prompt, adapter, options))
        return found[0] if is_one(prompt) else found

    # -- adapters and state -------------------------------------------------------------------------------------

    def load_adapter(self, name: str, path: str | Path) -> str:
        """Load a folder as the current version of `name`, and return its label, name@version.

        Running requests keep their versions.
        """
        source = AdapterSource(os.path.abspath(path), follow_links=True)
        return self._call(lambda: self._front.models.load(name, source)).ref.label

    def unload_adapter(self, name: str) -> None:
        """Remove a name and all its versions. Running requests finish."""
        self._call(lambda: self._front.models.unload(name))

    @property
    def adapters(self) -> list[str]:
        """The label of each name's current version."""
        return [e.ref.label for e in self._front.models.registry.entries()]

    @property
    def info(self) -> EngineInfo:
        """The properties of the model and the device that the engine found at its start."""
        return self._front.client.check_ready()

    @property
    def stats(self) -> EngineStats:
        """The counters and gauges of the engine, which include all calls that have returned."""
        if not self._loop.is_closed():
            self._call(self._front.client.refresh)
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
        rslora: bool = False,
        plus_ratio: float = 1.0,
        dropout: float = 0.0,
        scores: bool = False,
        init_from: str | None = None,
        resume: str | Path | None = None,
    ) -> Trainer:
        """Open a trainer, which trains an adapter while requests run. Raises Conflict while one of that name is open.

        By default the adapter changes nothing at first, and has rank 16 and an alpha of twice the rank. With
        `init_from` it begins with the weights, rank and scale of that adapter; with `resume`, in the state that was
        saved in that folder. `targets` are last parts of module names, such as "q_proj"; none means all linear layers
        but the output head, which is "lm_head".

        `rslora` scales by alpha / sqrt(rank) instead of alpha / rank. `plus_ratio` is the ratio of B's learning rate to
        A's (LoRA+). `dropout` is the share of A's inputs that `forward_backward` leaves out at random; `forward` and
        what is published leave out none. `scores` adds a score head: the trainer's adapter is a reward model, which
        learns by `LossConfig("score")` alone.
        """
        options = convert({"rslora": rslora, "plus_ratio": plus_ratio, "dropout": dropout}, LoraOptions)
        return self._call(
            lambda: open_trainer(
                self._call, self._front, self._trainers, name, rank=rank, alpha=alpha, targets=targets, seed=seed,
                options=options, scores=scores, init_from=init_from, resume=resume,
            )
        )  # fmt: skip

    def forward_backward(
        self, data: Mapping[Trainer, Data], loss: LossKind | LossConfig = "cross_entropy", **switches: Any
    ) -> dict[Trainer, BatchResult]:
        """Run `Trainer.forward_backward` for several trainers at once, which then share batches."""
        return self._call(lambda: run_pass(self._front, data, loss, switches, forward_only=False))

    @property
    def codec(self) -> ServedCodec:
        """The model's tokenizer and template, with which `training.examples` turns examples into data."""
        return ServedCodec.of(self._front)

    # -- on the loop --------------------------------------------------------------------------------------------

    def _call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` on the front's loop and return its result. Raises EngineError after `close`."""
        future = begin(self._loop, work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # The caller pressed Ctrl-C during the wait.
            raise


def _engine_config(model: str, options: Mapping[str, object]) -> EngineConfig:
    """Return the configuration for these options, which are named like its fields in all sections."""
    sections = {
        "model": ModelConfig,
        "cache": CacheConfig,
        "scheduler": SchedulerConfig,
        "lora": LoraConfig,
        "duty": DutyConfig,
    }
    places = {field: (section, field) for section, struct in sections.items() for field in struct.__struct_fields__}
    del places["path"], places["backend"]
    # Options of the KV offload are named like those of the command line.
    places |= {f"ssd_{field}": ("disk", field) for field in DiskCacheConfig.__struct_fields__}
    places |= {"ssd": places.pop("ssd_enabled"), "ssd_cache_dir": places.pop("ssd_dir")}
    places["lora_backend"] = ("lora", "backend")
    places["deterministic"] = ("", "deterministic")
    tree: dict[str, Any] = {"model": {"path": model}}
    for name, value in options.items():
        if name not in places:
            near = difflib.get_close_matches(name, places, n=1)
            raise TypeError(f"Engine has no option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        section, field = places[name]
        (tree.setdefault(section, {}) if section else tree)[field] = value
    return convert(tree, EngineConfig)


class _EngineThread:
    """An engine on a thread of this process, which is the only thread that uses the device."""

    def __init__(self, sock: socket.socket, config: EngineConfig):
        self._status: int | None = None
        self._thread = threading.Thread(target=self._run, args=(sock, config), name="tandem-engine", daemon=True)
        self._thread.start()

    def _run(self, sock: socket.socket, config: EngineConfig) -> None:
        """Run the engine until it ends, and keep its exit status."""
        with closing(sock):
            self._status = engine_main.run(sock, config)

    def kill(self) -> None:
        """Do nothing: a thread cannot be ended from outside. It ends when it finds its socket closed."""

    def wait(self, timeout: float) -> int | None:
        """Wait at most `timeout` seconds and return the exit status; None if the engine still runs."""
        self._thread.join(timeout)
        return None if self._thread.is_alive() else self._status or 0

    def last_words(self) -> str:
        """Return an empty text. The engine reports errors in messages, and its thread cannot end without one."""
        return ""


def _thread_launch(config: EngineConfig) -> Launch:
    """Return a function that starts an engine on a thread and returns the front's end of its socket."""

    def launch() -> tuple[socket.socket, EngineProcess]:
        ours, theirs = socket.socketpair()
        return ours, _EngineThread(theirs, config)

    return launch
