"""What every way in shares: which model a request means, its limits, its prompt, its submission.

No web framework here: the HTTP dialects and the Python API both stand on this.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mlx_tandem import limits
from mlx_tandem.adapters.registry import Entry, Registry
from mlx_tandem.config import Config
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.engine.messages import Progress
from mlx_tandem.engine.process import Launch
from mlx_tandem.errors import Conflict, EngineError, InvalidRequest, NotFound, Overloaded, TandemError
from mlx_tandem.server.log import log
from mlx_tandem.server.metrics import Metrics
from mlx_tandem.text.defaults import sampling_defaults
from mlx_tandem.text.template import ChatTemplate, Message
from mlx_tandem.text.tokenizer import Tokenizer
from mlx_tandem.types import AdapterRef, EngineInfo

LONG_TEXT = 8192
"""Characters from which on text is tokenised on another thread, so that streams do not wait for it."""

BASE = "base"
"""Always selects the base model, whatever it is called."""


class Front:
    """The serving half that is not the engine: one per server, on one event loop."""

    def __init__(
        self, config: Config, launch: Launch, *, on_progress: Callable[[Progress], None] | None = None
    ) -> None:
        folder = Path(config.engine.model.path)
        if not folder.is_dir():
            raise NotFound(f"the model folder {folder} does not exist", param="model")
        self.config = config
        self.tokenizer = Tokenizer.load(folder)
        self.template = ChatTemplate.load(folder, self.tokenizer)
        self.defaults = sampling_defaults(folder)
        self.registry = Registry()
        self.metrics = Metrics()
        names = config.server.served_model_names
        self.model_id = names[0] if names else folder.resolve().name
        self._base_names = {BASE, folder.resolve().name, config.engine.model.path, *names}
        self.client = EngineClient(
            launch,
            stall_seconds=config.engine.stall_seconds,
            on_ready=self._restore_adapters,
            on_progress=on_progress,
        )
        self.started = time.time()
        self.open_requests = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._endings: deque[float] = deque(maxlen=64)
        self._changes = asyncio.Lock()  # loads and removals, one at a time
        self._adapters_loaded = False

    # -- models -------------------------------------------------------------------------------------------------

    async def select(self, model: str | None, user: str | None = None) -> Entry | None:
        """The adapter version that `model` selects, None for the base. Raises NotFound (`model_not_found`).

        `user` keeps a caller on one arm of an alias. An adapter that was never used is read from its folder first.
        """
        if model is None or model in self._base_names:
            return None
        return self.registry.entry(model)

    def label(self, adapter: AdapterRef | None) -> str:
        return self.model_id if adapter is None else adapter.label

    async def load_adapter(self, name: str, path: str) -> Entry:
        """Read a folder and make it the current version of `name`; requests that run keep theirs."""
        self.registry.check(name)
        if name in self._base_names:
            raise Conflict(f"{name!r} is the name of the base model", param="name")
        self.client.check_ready()
        async with self._changes:
            return await self._load(name, path)

    async def _load(self, name: str, path: str) -> Entry:
        path = os.path.abspath(path)
        info = await self.client.load_adapter(path)
        ref = self.registry.publish(name, path, info)
        log("adapter loaded", adapter=ref.label, digest=ref.digest, rank=info.rank, bytes=info.nbytes)
        return self.registry.entry(ref.label)

    async def unload_adapter(self, name: str) -> list[AdapterRef]:
        """Forget a name and all its versions. Requests that run are finished."""
        async with self._changes:
            refs = self.registry.remove(name)
            for digest in {r.digest for r in refs}:
                if not self.registry.held(digest):
                    try:
                        await self.client.unload_adapter(digest)
                    except EngineError as e:  # it is gone, and with it the adapter
                        log("adapter not unloaded", digest=digest, error=e.message)
        log("adapter removed", adapter=name, versions=len(refs))
        return refs

    async def _restore_adapters(self) -> None:
        """Bring a fresh engine to where the registry is; at the first start, load what the configuration names."""
        if not self._adapters_loaded:
            for name, path in self.config.adapters:
                await self._load(self.registry.check(name), path)
            self._adapters_loaded = True
            return
        done: set[str] = set()
        for current in self.registry.entries():
            for entry in self.registry.versions(current.name):
                if entry.ref.digest in done:
                    continue
                done.add(entry.ref.digest)
                try:
                    info = await self.client.load_adapter(entry.path)
                except EngineError:
                    raise
                except TandemError as e:
                    log("adapter not restored", adapter=entry.ref.label, error=e.message)
                    continue
                if info.digest != entry.ref.digest:
                    log("adapter not restored", adapter=entry.ref.label, error="the folder's content has changed")

    # -- prompts ------------------------------------------------------------------------------------------------

    async def chat_prompt(self, messages: Sequence[Message], options: dict[str, bool]) -> list[int]:
        """Token ids of a conversation, up to where the assistant speaks."""
        template = self.template
        if template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        if sum(len(m["content"]) for m in messages) < LONG_TEXT:
            ids = template.encode(messages, options)
        else:
            ids = await asyncio.to_thread(template.encode, messages, options)
        return self._in_vocabulary(ids, "messages")

    async def text_prompt(self, text: str, param: str) -> list[int]:
        """Token ids of a raw prompt. Here the text of a special token is meant as that token."""
        if len(text) < LONG_TEXT:
            ids = self.tokenizer.encode(text, add_special_tokens=True)
        else:
            ids = await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=True)
        return self._in_vocabulary(ids, param)

    def _in_vocabulary(self, ids: list[int], param: str) -> list[int]:
        if not ids:
            raise InvalidRequest(f"{param} gives an empty prompt", param=param)
        if max(ids) >= self.client.check_ready().vocab_size:
            raise InvalidRequest(f"{param} holds text that this model has no token for", param=param)
        return ids

    def room(self, info: EngineInfo) -> int:
        """Tokens that one request may have, prompt and output together; one block of the pool is the device's own."""
        return min(info.max_model_len, (info.num_blocks - 1) * info.block_size)

    def max_tokens(self, prompt: int, asked: int | None, param: str, prompt_param: str) -> int:
        """Output tokens of a request: what was asked, else the default or what is left.

        Asking for more than fits is an error, as with OpenAI, and not a silent cut.
        """
        room = self.room(self.client.check_ready())
        if prompt >= room:
            raise InvalidRequest(
                f"the prompt has {prompt} tokens; prompt and output together may have {room}",
                param=prompt_param,
                code="context_length_exceeded",
            )
        if asked is None:
            return min(self.config.server.default_max_tokens, room - prompt)
        if prompt + asked > room:
            raise InvalidRequest(
                f"the prompt has {prompt} tokens and {param} is {asked}; together they may have {room}",
                param=param,
                code="context_length_exceeded",
            )
        return asked

    @staticmethod
    def seed(value: object) -> int:
        return secrets.randbits(63) if value is None else int(limits.check("seed", value))

    # -- admission ----------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raises unless a request would be admitted now: refusing is cheap only before its body is worked on."""
        self.client.check_ready()
        self._check_places(1)

    def _check_places(self, count: int) -> None:
        if self.open_requests + count > self.config.server.max_queue_size:
            raise Overloaded("the server has as many requests as it takes", retry_after=self._retry_after(count))

    @contextmanager
    def admitted(self, count: int) -> Iterator[None]:
        """Holds `count` places among the open requests. Raises Overloaded when there are not as many left."""
        self._check_places(count)
        self.open_requests += count
        self._idle.clear()
        try:
            yield
        finally:
            self.open_requests -= count
            self._endings.append(time.monotonic())
            if not self.open_requests:
                self._idle.set()

    async def idle(self) -> None:
        """Returns when no request is open."""
        await self._idle.wait()

    def _retry_after(self, count: int) -> float:
        """Seconds until about `count` of the open requests will have ended, at the recent rate."""
        if len(self._endings) < 2:
            return 1.0
        rate = (len(self._endings) - 1) / max(time.monotonic() - self._endings[0], 1e-3)
        return count / rate
