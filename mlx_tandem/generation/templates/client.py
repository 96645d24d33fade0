"""The client of the processes that render the chat template of a model folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_tandem import small_files
from mlx_tandem.errors import InvalidRequest, ModelError
from mlx_tandem.generation.parts import Part
from mlx_tandem.generation.templates import plain
from mlx_tandem.generation.templates.call_forms import CONVERSATION, FORMS, TOOLS, CallForm, prints_call
from mlx_tandem.generation.templates.contents import GREETING, ContentForm, form_of, in_form
from mlx_tandem.generation.templates.messages import Failed, Rendered, Setup, decode_answer
from mlx_tandem.generation.templates.turn_forms import TurnForm, prints_all, probes
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.generation.tool_history import Message, with_missing_results
from mlx_tandem.isolation.frames import encode
from mlx_tandem.isolation.pool import Bounds, WorkerPool
from mlx_tandem.isolation.process import Lost, LostKind, Program
from mlx_tandem.limits import MAX_TEMPLATE_BYTES, MAX_TEMPLATE_MEMORY, MAX_TEMPLATE_OUTPUT, MAX_WAITING_TEXT

FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
"""The files that may have a folder's template. The second one is written for models that read images."""

WORKERS = 2
"""Number of processes. When a conversation costs one of them, the other still renders those of other callers."""

BOUNDS = Bounds(items=1024, bytes=MAX_WAITING_TEXT, seconds=30.0)
"""Limits of the queue in front of the processes."""

ROOM = 1 << 20
"""Bytes that an answer may have besides the rendered text, for the boundaries of its parts."""

LOST: Mapping[LostKind, str] = {
    "timeout": "takes more than {seconds:g} s of CPU time",
    "memory": "needs more than {megabytes} MB of memory",
    "died": "ends its process",
}
"""The words of errors for each way in which a process can be lost."""


class ChatTemplate:
    """A chat template that renders conversations in worker processes, which it starts on first use.

    It belongs to one event loop. A template is code from a model folder, so it runs in a sandbox, and the kernel limits
    its time and memory.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        *,
        seconds: float = 1.0,
        where: str = "chat_template",
        stops: tuple[str, ...] = (),
    ):
        """Prepare the processes. A conversation may take `seconds` of CPU time. `where` names the file in errors.

        `stops` are texts that end an answer.
        """
        self.source = source
        self.stops = stops
        self._where = where
        self._limits = {"seconds": seconds, "megabytes": MAX_TEMPLATE_MEMORY >> 20}
        try:
            setup = encode(Setup(source, tokenizer.special_texts(), tuple(tokenizer.special_tokens)))
        except UnicodeEncodeError as e:
            raise ModelError(f"{where} holds half a surrogate pair", param="chat_template") from e
        program = Program(
            "mlx_tandem.generation.templates.worker",
            (str(seconds), str(MAX_TEMPLATE_MEMORY)),
            decode_answer,
            MAX_TEMPLATE_OUTPUT + ROOM,
            setup,
        )
        self._pool = WorkerPool("chat templates", program, WORKERS, BOUNDS)
        self._turns = TurnForm()
        self._calls = CallForm()
        self._contents: ContentForm = "any"

    @classmethod
    def given(cls, given: str, tokenizer: Tokenizer, *, seconds: float = 1.0) -> ChatTemplate:
        """Return the template in the file `given`, or the template that `given` itself is.

        Raises ModelError when there is no such file and `given` has neither a brace nor a line break.
        """
        path = Path(given)
        if os.path.isfile(given):
            return cls(_decoded(path, small_files.read(path) or b""), tokenizer, seconds=seconds, where=given)
        if not set("{}\n") & set(given):
            raise ModelError(f"there is no file {given} for --chat-template", param="chat_template")
        return cls(given, tokenizer, seconds=seconds, where="the text of --chat-template")

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer, *, seconds: float = 1.0) -> ChatTemplate:
        """Return the template in the first of FILES that exists, or the plain template if none does.

        Raises ModelError naming the file. Only `check` finds out whether the template works.
        """
        path = folder / FILES[0]
        if (raw := small_files.read(path)) is not None:
            source: Any = _decoded(path, raw)
        elif (object := small_files.read_object(path := folder / FILES[1])) is not None:
            source = object.get("chat_template")
        else:
            path = folder / FILES[2]
            source = tokenizer.config.get("chat_template")
            if isinstance(source, list):  # Several templates with names.
                named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
                source = named.get("default")
        if source is None:
            begins = tokenizer.encode("a", add_special_tokens=True) != tokenizer.encode("a", add_special_tokens=False)
            source = plain.BEGINNING * begins + plain.SOURCE
            return cls(source, tokenizer, seconds=seconds, where="the plain template", stops=plain.STOPS)
        if not isinstance(source, str):
            problem = "chat_template is neither text nor a list of named texts"
            raise ModelError(f"{path}: {problem}", param="chat_template")
        return cls(source, tokenizer, seconds=seconds, where=str(path))

    @property
    def is_plain(self) -> bool:
        """Whether it is the plain template, because the model has none."""
        return self.stops == plain.STOPS

    async def check(self) -> None:
        """Find the forms in which the template reads contents, calls and turns, before it renders conversations.

        Raises ModelError when the text is not a valid template, or when rendering a greeting exceeds the limits.

        The template may refuse the greeting or fail at it, since it may be made for other conversations.
        """
        answer = await self._pool.ask(encode(_values([GREETING], {})))
        if isinstance(answer, Lost):
            raise ModelError(f"{self._where}: the chat template {self._lost(answer.kind)}", param="chat_template")
        if isinstance(answer, Failed) and answer.kind == "syntax":
            raise ModelError(f"{self._where} is not a valid template: {answer.detail}", param="chat_template")
        self._contents = await self._content_form()
        calls = await self._call_form()
        self._calls = calls or CallForm()
        # A template that is made for conversations with tools may fail without them.
        tools = not isinstance(answer, Rendered)
        self._turns = await self._turn_form(TurnForm(calls="none" if calls is None else "many"), tools=tools)

    async def render(self, messages: Sequence[Message], options: Mapping[str, Any] | None = None) -> list[Part]:
        """Return the text of a prompt with the beginning of the answer, unless `options` say otherwise.

        Raises InvalidRequest naming `messages` when the template refuses them, fails at them, or exceeds its limits.
        """
        try:
            item = encode(_values(self._formed(self._turns.messages(with_missing_results(messages))), options or {}))
        except (TypeError, ValueError, OverflowError, RecursionError) as e:  # Half a surrogate pair is a ValueError.
            raise InvalidRequest("messages hold a value that is no plain data", param="messages") from e
        answer = await self._pool.ask(item)
        if isinstance(answer, Rendered):
            return answer.parts
        if isinstance(answer, Failed) and answer.kind == "unprinted":
            raise InvalidRequest(
                "the model's chat template does not print the last message, so it cannot be continued",
                param="continue_final_message",
            )
        raise InvalidRequest(f"the model's chat template {self._why(answer)}", param="messages")

    async def close(self) -> None:
        """End the processes."""
        await self._pool.close()

    def _formed(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the conversation with its calls and contents in the forms that the template reads."""
        messages = self._calls.messages(messages)
        return messages if self._contents == "any" else [in_form(message, self._contents) for message in messages]

    async def _content_form(self) -> ContentForm:
        """Return the form in which the template reads contents."""
        asked = (GREETING, in_form(GREETING, "list"))
        answers = [await self._pool.ask(encode(_values([message], {}))) for message in asked]
        as_text, as_list = (answer.parts if isinstance(answer, Rendered) else None for answer in answers)
        return form_of(as_text, as_list)

    async def _call_form(self) -> CallForm | None:
        """Return the first form in which the template prints a call; None if it prints none."""
        for form in FORMS:
            self._calls = form
            parts = await self._parts(CONVERSATION, tools=True)
            if parts is not None and prints_call(parts):
                return form
        return None

    async def _turn_form(self, form: TurnForm, *, tools: bool) -> TurnForm:
        """Return `form` with the first values for each probe with which the template shows all of a conversation.

        A probe for which there are no such values changes nothing. `tools` says whether the template always gets
        tools.
        """
        for probe in probes(form.calls != "none"):
            for values in probe.values:
                asked = form._replace(**values)
                messages = asked.messages(probe.conversation)
                parts = await self._parts(messages, tools=tools or probe.has_calls)
                if parts is not None and prints_all(parts, probe.conversation):
                    form = asked
                    break
        return form

    async def _parts(self, messages: Sequence[Message], *, tools: bool) -> list[Part] | None:
        """Return the text of a conversation that is rendered to find a form; None if there is none."""
        options = {"tools": TOOLS} if tools else {}
        answer = await self._pool.ask(encode(_values(self._formed(messages), options)))
        return answer.parts if isinstance(answer, Rendered) else None

    def _why(self, answer: Failed | Lost) -> str:
        """Return the end of an error message, which explains why there is no prompt."""
        if isinstance(answer, Lost):
            return f"{self._lost(answer.kind)} with these messages"
        if answer.kind == "refused":
            return f"refuses these messages: {answer.detail}"
        if answer.kind == "too_large":
            return f"makes more than {MAX_TEMPLATE_OUTPUT} bytes of these messages"
        return "cannot be rendered with these messages"

    def _lost(self, kind: LostKind) -> str:
        return LOST[kind].format(**self._limits)


def _values(messages: Sequence[Message], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the template's variables."""
    return {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True, **options}


def _decoded(path: Path, raw: bytes) -> str:
    """Return the text of a template's file. Raises ModelError naming it."""
    if len(raw) > MAX_TEMPLATE_BYTES:
        raise ModelError(f"{path} is larger than {MAX_TEMPLATE_BYTES} bytes", param=path.name)
    try:
        return raw.decode()
    except UnicodeDecodeError as e:
        raise ModelError(f"{path} is not UTF-8", param=path.name) from e
