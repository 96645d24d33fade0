"""The common base of the HTTP dialects and the Python API: the model's prompts, names, limits and engine client."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mlx_tandem.config import Config
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.engine.client.process import Launch
from mlx_tandem.engine.client.start_times import KeptTimes, StartProgress
from mlx_tandem.engine.client.stream import Stream
from mlx_tandem.errors import ContextOverflow, InvalidRequest, NotFound
from mlx_tandem.generation.adapters.model_names import Models
from mlx_tandem.generation.answer_reading import AnswerReading
from mlx_tandem.generation.answers import Answers, collect
from mlx_tandem.generation.assembler import Assembler
from mlx_tandem.generation.defaults import generation_folder, sampling_defaults
from mlx_tandem.generation.embeddings import default_pooling
from mlx_tandem.generation.fingerprint import Fingerprints
from mlx_tandem.generation.grammar.client import Constraints
from mlx_tandem.generation.messages import Source
from mlx_tandem.generation.metrics import Metrics
from mlx_tandem.generation.parsers import MakeParser
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.generation.prompts import LONG_TEXT, Prompts
from mlx_tandem.generation.request_admission import RequestAdmission
from mlx_tandem.generation.reranking import Reranker, reranker_of
from mlx_tandem.generation.text_admission import TextAdmission
from mlx_tandem.generation.tokenizing.listing import Listing, listing
from mlx_tandem.generation.tool_history import Message
from mlx_tandem.generation.vision.client import Images
from mlx_tandem.generation.vision.placing import with_runs, with_texts
from mlx_tandem.log import log
from mlx_tandem.types import EngineInfo, Image

T = TypeVar("T")


class Front:
    """Everything on the serving side but the engine. A server or Python engine has one front, on one event loop."""

    def __init__(
        self,
        config: Config,
        launch: Launch,
        *,
        on_progress: Callable[[StartProgress], None] | None = None,
        times: KeptTimes | None = None,
    ) -> None:
        """Load the tokenizer and the chat template. Raises NotFound and ModelError; the engine is started later."""
        folder = Path(config.engine.model.path)
        if not folder.is_dir():
            raise NotFound(f"the model folder {folder} does not exist", param="model")
        self.config = config
        server = config.server
        self.prompts = Prompts(folder, template=server.chat_template, template_seconds=server.chat_template_timeout_s)
        self.tokenizer = self.prompts.tokenizer
        self.reading = AnswerReading(
            self.tokenizer,
            self.prompts.template.source,
            calls=server.tool_call_parser,
            thoughts=server.reasoning_parser,
        )
        source = generation_folder(server.generation_config, folder)
        self.defaults = {} if source is None else sampling_defaults(source)
        self.pooling = default_pooling(folder)
        """The pooling of embeddings where a request does not name one."""
        self.reranker: Reranker | None = reranker_of(server.reranker, folder, self.tokenizer)
        """What scores documents for a query; None for a model that is no reranker."""
        self.images = Images(folder, server.allow_image_hosts)
        """What turns the images of requests into arrays."""
        self._seeds = None if server.seed is None else random.Random(server.seed)
        self.metrics = Metrics()
        self.client = EngineClient(
            launch,
            stall_seconds=config.engine.stall_seconds,
            on_ready=self.bring_up,
            on_progress=on_progress,
            times=times,
        )
        self.constraints = Constraints(folder, self.client.check_ready)
        self.models = Models(config, self.client)
        self.fingerprints = Fingerprints(config, self.client, self.prompts, self.defaults)
        self.started = time.time()
        self.request_admission = RequestAdmission(config.server, self.client)
        self.text_admission = TextAdmission(self.request_admission.refused)
        self.parser: MakeParser | None = None
        """Makes the parser for the answers to all chats, instead of those that `reading` chooses."""
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def reads_images(self) -> bool:
        """Whether requests may hold images. It is False while the engine is not ready."""
        info = self.client.info
        return info is not None and not self.images.refusal(info.vision)

    async def start(self) -> None:
        """Check the chat template, then start the engine. Raises ModelError when the template does not work."""
        self._loop = asyncio.get_running_loop()
        await self.prompts.check()
        if self.prompts.template.is_plain:
            event = "this model has no chat template: before each message of a chat stands its role, as in 'User: '"
            log(event, logging.WARNING, instead="--chat-template")
        await self.client.start()

    async def bring_up(self) -> None:
        """Tell a new engine about the adapters."""
        await self.models.bring_up()

    async def close(self) -> None:
        """End the worker processes."""
        await self.prompts.close()
        await self.images.close()
        if self.reranker is not None:
            await self.reranker.template.close()
        await self.constraints.close()

    def from_thread(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the front's loop and return its result. Only other threads may call this."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # -- prompts ------------------------------------------------------------------------------------------------

    async def chat_prompt(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Any],
        images: Sequence[Source] = (),
        *,
        cut: bool = False,
    ) -> tuple[list[int], tuple[Image, ...]]:
        """Return a conversation's token ids and images; the beginning of the answer follows unless `options` say no.

        With `cut` the caller shortens the prompt itself, so it may be longer than the context. Raises InvalidRequest.
        """
        ids, placed = await self._chat_ids(messages, options, images)
        return self._fitting(ids, "messages", cut), placed

    async def chat_listing(
        self, messages: Sequence[Message], options: Mapping[str, Any], images: Sequence[Source], *, pieces: bool
    ) -> Listing:
        """Return the token ids of a conversation as JSON, with their pieces of the vocabulary if `pieces` is set."""
        if images:
            ids, _ = await self._chat_ids(messages, options, images)
            return listing(self.tokenizer, ids, pieces=pieces)
        parts = await self.prompts.rendered(messages, options)
        return await self.prompts.listing(parts, "messages", begins=False, pieces=pieces)

    async def _chat_ids(
        self, messages: Sequence[Message], options: Mapping[str, Any], images: Sequence[Source]
    ) -> tuple[Sequence[int], tuple[Image, ...]]:
        """Return the token ids of a conversation, and its images with their places among these."""
        if not images:
            return await self.prompts.chat(messages, options), ()
        vision = self.client.check_ready().vision
        assert vision is not None
        made = await self.images.made(images)
        texts = ["".join(piece.text for piece in own) for own in made]
        parts = with_texts(await self.prompts.rendered(messages, options), self.images.places, texts)
        return with_runs(await self.prompts.tokens(parts, "messages"), vision.tokens, [p for own in made for p in own])

    async def text_prompt(self, text: str, param: str, *, total: int | None = None, cut: bool = False) -> list[int]:
        """Return the token ids of a raw prompt, in which the text of a special token means that token.

        `total` is the number of characters of all prompts of the request. `cut` is that of `chat_prompt`. Raises
        InvalidRequest naming `param`.
        """
        return self._fitting(await self.prompts.text(text, param, total=total), param, cut)

    def tokens_of(self, text: str, param: str, *, begins: bool = True) -> Sequence[int]:
        """Return the token ids of `text`, as `prompts.text` does. Only threads other than the loop's may call this."""
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode(text, add_special_tokens=begins)
        return self.from_thread(self.prompts.text(text, param, begins=begins))

    def _fitting(self, ids: Sequence[int], param: str, cut: bool) -> list[int]:
        """Return `ids` as a list. Raises InvalidRequest naming `param` for a prompt that is empty or too long."""
        if not ids:
            raise InvalidRequest(f"{param} gives an empty prompt", param=param)
        if not cut:
            self._check_length(len(ids), param)
        if max(ids) >= self.client.check_ready().vocab_size:
            raise InvalidRequest(f"{param} holds text that this model has no token for", param=param)
        return list(ids)

    def _check_length(self, prompt: int, param: str) -> None:
        """Raise InvalidRequest naming `param` for a prompt of too many tokens."""
        room, most = self.room(self.client.check_ready()), self.longest_prompt()
        if prompt > most:
            raise ContextOverflow(prompt, most, room, param=param)

    def longest_prompt(self) -> int:
        """Return how many tokens a prompt may have; at least one token of output follows it."""
        room = self.room(self.client.check_ready())
        return min(self.config.server.max_prompt_tokens or room, room - 1)

    def room(self, info: EngineInfo) -> int:
        """Return how many tokens one request may have, prompt and output together."""
        return info.max_model_len

    def max_tokens(self, prompt: int, asked: int | None, param: str, prompt_param: str) -> int:
        """Return the limit of output tokens: `asked`, or else the default as far as it fits.

        Raises InvalidRequest naming `param` when `asked` does not fit, as OpenAI does, instead of shortening silently.
        """
        self._check_length(prompt, prompt_param)
        server = self.config.server
        room = self.room(self.client.check_ready())
        most = min(server.max_generation_tokens or room, room - prompt)
        if asked is None:
            return min(server.default_max_tokens, most)
        if asked > most:
            says = f"{param} is {asked}, and {most} are allowed here"
            if prompt + asked > room:
                says = (
                    f"This model's maximum context length is {room} tokens. However, you requested {prompt + asked} "
                    f"tokens ({prompt} in the messages, {asked} in the completion), and {param} may be {most} here. "
                    "Please reduce the length of the messages or completion."
                )
            raise InvalidRequest(says, param=param, code="context_length_exceeded")
        return asked

    def seed(self, asked: int | None) -> int:
        """Return the seed of a request: `asked`, or else a random one."""
        if asked is not None:
            return asked
        return secrets.randbits(63) if self._seeds is None else self._seeds.getrandbits(63)

    def assembler(self, prompted: Prompted, stream: Stream) -> Assembler:
        """Return a new assembler, which turns the deltas of this submission of `prompted` into events."""
        return Assembler(prompted, stream, self.tokenizer, self.client.check_ready().eos_token_ids)

    async def answers(self, prompted: Prompted) -> Answers:
        """Generate `prompted` and return all of its answers. Cancelling the call cancels the work in the engine."""
        async with self.client.submit(*prompted.requests(self.client)) as stream:
            answers = Answers(len(prompted.prompts), prompted.choices)
            return await collect(self.assembler(prompted, stream), stream, answers)

    # -- admission ----------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise unless a request would be admitted now. Callers check before they parse the body, as that is cheap."""
        self.request_admission.check()
