"""What every way in shares: which model a request means, its limits, its prompt, its submission.

No web framework here: the HTTP dialects and the Python API both stand on this.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_tandem import limits
from mlx_tandem.config import Config
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.engine.messages import Progress
from mlx_tandem.engine.process import Launch
from mlx_tandem.errors import InvalidRequest, NotFound
from mlx_tandem.server.admission import Admission
from mlx_tandem.server.fingerprint import Fingerprints
from mlx_tandem.server.metrics import Metrics
from mlx_tandem.server.models import Models
from mlx_tandem.text.defaults import generation_folder, sampling_defaults
from mlx_tandem.text.template import ChatTemplate, Message, texts
from mlx_tandem.text.tokenizer import Tokenizer
from mlx_tandem.types import EngineInfo

if TYPE_CHECKING:
    from mlx_tandem.server.learning import Learning

LONG_TEXT = 8192
"""Characters from which on text is tokenised on another thread, so that streams do not wait for it."""


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
        given = config.server.chat_template
        self.template = (
            ChatTemplate.given(given, self.tokenizer) if given else ChatTemplate.load(folder, self.tokenizer)
        )
        source = generation_folder(config.server.generation_config, folder)
        self.defaults = {} if source is None else sampling_defaults(source)
        self._seeds = None if config.server.seed is None else random.Random(config.server.seed)
        self.metrics = Metrics()
        self.client = EngineClient(
            launch,
            stall_seconds=config.engine.stall_seconds,
            on_ready=self._bring_up,
            on_progress=on_progress,
        )
        self.models = Models(config, self.client)
        self.fingerprints = Fingerprints(self)
        self.started = time.time()
        self.admission = Admission(config.server, self.client)
        self.learning: Learning | None = None
        if config.rl_training.enabled:
            from mlx_tandem.server.learning import Learning

            self.learning = Learning(self)

    async def _bring_up(self) -> None:
        """An engine is ready and knows nothing yet."""
        if self.learning is not None:
            await self.learning.read_checkpoints()  # adapters that are loaded now may not take their names
        await self.models.bring_up()
        if self.learning is not None:
            await self.learning.bring_up()

    async def close(self) -> None:
        """Ends what the server does beside requests."""
        if self.learning is not None:
            await self.learning.close()

    def check_learning(self, what: str, param: str | None = None) -> Learning:
        """What learns here; InvalidRequest (`learning_disabled`) on a server where nothing does."""
        if self.learning is None:
            raise InvalidRequest(
                f"{what} needs a server that learns: start it with --enable-rl-training",
                param=param,
                code="learning_disabled",
            )
        return self.learning

    # -- prompts ------------------------------------------------------------------------------------------------

    async def chat_prompt(self, messages: Sequence[Message], options: dict[str, bool]) -> list[int]:
        """Return the token ids of a conversation up to where the assistant speaks, unless `options` say otherwise."""
        template = self.template
        if template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        if sum(map(len, texts(list(messages)))) < LONG_TEXT:
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
        """Tokens that one request may have, prompt and output together."""
        return info.max_model_len

    def max_tokens(self, prompt: int, asked: int | None, param: str, prompt_param: str) -> int:
        """Output tokens of a request: what was asked, else the default or what is left.

        Asking for more than fits is an error, as with OpenAI, and not a silent cut.
        """
        server = self.config.server
        room = self.room(self.client.check_ready())
        most = min(server.max_prompt_tokens or room, room - 1)
        if prompt > most:
            raise InvalidRequest(
                f"the prompt has {prompt} tokens; {most} are allowed, and {room} with the output",
                param=prompt_param,
                code="context_length_exceeded",
            )
        most = min(server.max_generation_tokens or room, room - prompt)
        if asked is None:
            return min(server.default_max_tokens, most)
        if asked > most:
            raise InvalidRequest(
                f"the prompt has {prompt} tokens and {param} is {asked}; {most} are allowed here",
                param=param,
                code="context_length_exceeded",
            )
        return asked

    def seed(self, value: object) -> int:
        """Return the checked `seed` of a request, or one for a request that brings none."""
        if value is not None:
            return int(limits.check("seed", value))
        return secrets.randbits(63) if self._seeds is None else self._seeds.getrandbits(63)

    # -- admission ----------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raises unless a request would be admitted now: refusing is cheap only before its body is worked on."""
        self.admission.check()
