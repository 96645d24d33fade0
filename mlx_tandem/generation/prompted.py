"""Checked requests whose prompts are token ids, ready for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from mlx_tandem.engine.client import EngineClient
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.caller import CALLER
from mlx_tandem.generation.output import TextOptions
from mlx_tandem.generation.parsers import MakeParser
from mlx_tandem.types import AdapterRef, Grammar, Image, Pooling, Request, SamplingParams

CLIENT: ContextVar[int] = ContextVar("client", default=0)
"""The client whose request is being handled; clients take turns where their requests wait."""

OWNER: ContextVar[str] = ContextVar("owner", default="")
"""The owner of what the request makes: a digest of its key. On a server that asks for a key it is empty."""


BACKGROUND: ContextVar[bool] = ContextVar("background", default=False)
"""Whether the request is of the lowest class of service: it runs in learning's share of the device."""


@dataclass(frozen=True)
class Prompted:
    """A checked request to generate. Choice i of prompt k has the number k * n + i."""

    prompts: Sequence[Sequence[int]]
    adapters: Sequence[AdapterRef | None]  # of each prompt; None: the base model
    params: SamplingParams
    n: int = 1  # choices of each prompt
    text: TextOptions = field(default_factory=TextOptions)
    parser: MakeParser | None = None  # None: no parser looks for reasoning and tool calls in the text
    most_calls: int | None = None  # number of tool calls that end a choice; None: any number may follow
    version: int | None = None  # the pinned version, named for each token; None: the caller wants no versions
    running_usage: bool = False  # a Usage event comes before each event that counts tokens
    priority: int = 0
    follow: bool = False  # the request continues under newer versions of the adapter when they are published
    background: bool = False  # the request runs in learning's share of the device
    pooling: Pooling | None = None  # the prompts' hidden states are wanted, pooled like this
    grammar: Grammar | None = None  # what each choice must match; None: any text
    speculate: bool = True  # drafts may be verified for the request
    prediction: tuple[int, ...] = ()  # tokens that the answers may contain
    images: tuple[Image, ...] = ()  # of the only prompt

    def __post_init__(self) -> None:
        """Raise InvalidRequest for a reward model that is asked to generate.

        Raise Forbidden for a priority that would put the requests of one tenant before those of all others.
        """
        if self.priority < 0:
            CALLER.get().check_scope("admin", "a priority under 0")
        for adapter in self.adapters if self.pooling is None else ():
            if adapter is not None and adapter.scores:
                raise InvalidRequest(
                    f"{adapter.label} is a reward model: it scores answers, by POST /pooling and as the scoring "
                    "function reward_model, and generates none",
                    param="model",
                )

    @property
    def choices(self) -> int:
        """The number of choices of all prompts."""
        return len(self.prompts) * self.n

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def array_bytes(self) -> int:
        """The bytes of the arrays of all images."""
        return sum(len(image.arrays) for image in self.images)

    def requests(self, client: EngineClient) -> list[Request]:
        """Return the engine's requests, one for each prompt, with new ids."""
        return [
            Request(
                id=id,
                prompt=tuple(prompt),
                params=self.params,
                adapter=adapter,
                n=self.n,
                priority=self.priority,
                follow=self.follow,
                background=self.background or BACKGROUND.get(),
                pooling=self.pooling,
                grammar=self.grammar,
                speculate=self.speculate,
                prediction=self.prediction,
                images=self.images,
                client=CLIENT.get(),
            )
            for id, prompt, adapter in zip(client.next_ids(len(self.prompts)), self.prompts, self.adapters, strict=True)
        ]
