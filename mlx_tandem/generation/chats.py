"""Conversations with tools and thoughts: the prompt, and how its answers are read. All dialects and the Python API use
this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from msgspec import structs

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.grammar.constraint import Thought
from mlx_tandem.generation.messages import Source, chat_messages, image_sources
from mlx_tandem.generation.output import TextOptions
from mlx_tandem.generation.parsers import MakeParser
from mlx_tandem.generation.tokenizer import TEXT_SPECIALS
from mlx_tandem.generation.tokenizing.listing import Listing
from mlx_tandem.generation.tools.offer import Tools
from mlx_tandem.strict_json import check_nested
from mlx_tandem.types import Image, SamplingParams, ThoughtBudget

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

OWN_VARIABLES = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", *TEXT_SPECIALS)
)
"""Variables of chat templates that the server sets itself."""


@dataclass(frozen=True)
class Thinking:
    """The wishes of a request about thoughts: whether there are any, how thorough they are, and their most tokens."""

    enabled: bool | None = None
    effort: Effort | None = None
    budget: int | None = None


@dataclass(frozen=True)
class Chat:
    """A conversation as token ids, and the parser that reads its answers."""

    prompt: list[int]
    parser: MakeParser | None
    tools: Tools | None
    shown: frozenset[int]  # special tokens that the parser has to see
    budget: ThoughtBudget | None = None
    thought: Thought | None = None  # that may come before an answer with a constraint
    images: tuple[Image, ...] = ()
    stops: tuple[str, ...] = ()  # texts that end an answer, besides those of the request

    @property
    def most_calls(self) -> int | None:
        """The number of tool calls after which an answer ends; None if any number may follow."""
        return 1 if self.tools is not None and not self.tools.parallel else None

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the budget of the thoughts. Raises InvalidRequest if nothing could end them."""
        if self.budget is None:
            return params
        if params.allowed_token_ids and not set(self.budget.closing) <= set(params.allowed_token_ids):
            raise InvalidRequest(
                "allowed_token_ids leaves out tokens that end a thought, which thinking_token_budget needs",
                param="thinking_token_budget",
            )
        return structs.replace(params, thoughts=self.budget)

    def text(self, options: TextOptions) -> TextOptions:
        """Return the options for turning tokens into the text that the parser reads."""
        ends = frozenset(self.stops).difference(options.stops)
        return replace(options, shown=self.shown, stops=(*options.stops, *ends), ends=ends)


@dataclass(frozen=True)
class ChatRequest:
    """A conversation as a client sends it. `variables` are those of the chat template that the client sets."""

    messages: Sequence[Any]
    tools: Tools | None = None
    thinking: Thinking = Thinking()
    variables: Mapping[str, Any] = field(default_factory=dict)
    adds_prompt: bool = True  # the prompt ends with the beginning of an answer
    continues: bool = False  # the answer continues the last message
    fields: Mapping[str, str] = field(default_factory=dict)  # the request's names of images' fields, by OpenAI's names

    async def chat(self, front: Front, *, cut: bool = False) -> Chat:
        """Return the conversation as a prompt. `cut` is that of `Front.chat_prompt`. Raises InvalidRequest."""
        messages, options = self.prepared(front)
        prompt, images = await front.chat_prompt(messages, options, self.images, cut=cut)
        if front.parser is not None:
            return Chat(prompt, front.parser, self.tools, frozenset(), images=images)
        opened = front.reading.is_opened(prompt, messages[-1]["content"] if self.continues else None)
        parser = front.reading.parser(self.tools, opened=opened)
        budget = front.reading.budget(self.thinking.budget, opened=opened)
        shown, thought = front.reading.shown(self.tools), front.reading.thought(prompt, opened=opened)
        return Chat(prompt, parser, self.tools, shown, budget, thought, images, front.prompts.template.stops)

    async def listing(self, front: Front, *, pieces: bool = False) -> Listing:
        """Return the token ids of the prompt as JSON, with their pieces of the vocabulary if `pieces` is set."""
        messages, options = self.prepared(front)
        return await front.chat_listing(messages, options, self.images, pieces=pieces)

    @property
    def images(self) -> list[Source]:
        """The images and videos of the messages, which `prepared` has checked."""
        return image_sources(self.messages, self.fields)

    def prepared(self, front: Front) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the messages and the other values of the chat template's variables. Raises InvalidRequest."""
        options: dict[str, Any] = _switches(front, self.thinking) | check_variables(self.variables)
        if self.tools is not None:
            if front.parser is None:
                front.reading.check_tools()
            options["tools"] = self.tools.for_template
        options["add_generation_prompt"] = self.adds_prompt
        if self.continues:
            options["continue_final_message"] = True
        messages = chat_messages(self.messages, images=True)
        if self.images:
            front.images.check(self.images, front.client.check_ready().vision)
        return messages, options


def check_variables(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a chat template that a client sets. Raises InvalidRequest naming the variable."""
    where = "chat_template_kwargs"
    if len(given) > limits.MAX_TEMPLATE_VARIABLES:
        raise InvalidRequest(f"{where} has at most {limits.MAX_TEMPLATE_VARIABLES} variables", param=where)
    check_nested(dict(given), where, depth=limits.MAX_MESSAGE_DEPTH, values=limits.MAX_MESSAGE_VALUES)
    for name, value in given.items():
        field = f"{where}.{ascii(name[:64])[1:-1]}"
        if not name.isidentifier() or name.startswith("_") or name in OWN_VARIABLES:
            raise InvalidRequest(f"{field} is no variable that a request may set", param=field)
        if name in ("enable_thinking", "thinking") and value is not None and not isinstance(value, bool):
            raise InvalidRequest(f"{field} must be true or false", param=field, code="invalid_type")
    return {name: value for name, value in given.items() if value is not None}


def _switches(front: Front, thinking: Thinking) -> dict[str, Any]:
    """Return the template's variables for the wishes of a request about thoughts.

    Raises InvalidRequest for a model that thinks and whose template cannot switch that off.
    """
    reading, enabled, effort = front.reading, thinking.enabled, thinking.effort
    if effort is not None and reading.knows_effort and (effort != "none" or not reading.switches):
        return {"reasoning_effort": effort} | dict.fromkeys(reading.switches, enabled is not False)
    if enabled is None and effort is not None:
        enabled = effort != "none"
    if enabled is False and not reading.switches and reading.form is not None:
        param = "enable_thinking" if thinking.enabled is False else "reasoning_effort"
        raise InvalidRequest(f"{param}: this model's chat template cannot switch its thoughts off", param=param)
    return {} if enabled is None else dict.fromkeys(reading.switches, enabled)
