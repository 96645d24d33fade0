"""Our parsers in the place of the parsers that the tests of other projects call."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from mlx_tandem.generation.answer_reading import AnswerReading
from mlx_tandem.generation.events import ReasoningDelta, Said, TextDelta, ToolCallArguments, ToolCallStart
from mlx_tandem.generation.parsers import Parser
from mlx_tandem.generation.reasoning.table import HARMONY
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.generation.tools.offer import Function, Tools
from public.values import OurArguments, Ours, Record, Unknown, Unread

SWITCHED = ("deepseek_r1", "kimi_k2", "seed_oss", "think")
"""The forms whose thoughts a prompt opens when the request asks for them."""

TOKEN = 4
"""Characters of a token of the tokenizer that stands in for others."""


@dataclass(frozen=True)
class Family:
    """The forms that one of their parsers reads, by our names.

    `opened` says that the model's prompt opens a thought unless the request switches thoughts off. With `raw`, calls
    end thoughts and are left in the text.
    """

    calls: str = "none"
    thoughts: str = "none"
    opened: bool = False
    raw: bool = False

    @property
    def label(self) -> str:
        """The name in reports."""
        return " and ".join(name for name in (self.calls, self.thoughts)[self.raw :] if name != "none")


@dataclass
class Answer:
    """The outcome of our parser for a text."""

    reasoning: str = ""
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)

    def add(self, events: Iterable[Said]) -> None:
        """Take in events."""
        for event in events:
            match event:
                case TextDelta():
                    self.content += event.text
                case ReasoningDelta():
                    self.reasoning += event.text
                case ToolCallStart():
                    self.calls.append([event.name, ""])
                case ToolCallArguments():
                    self.calls[event.call][1] += event.arguments


@dataclass
class Stream:
    """One text that a test gives in pieces."""

    pieces: list[str] = field(default_factory=list)
    finished: bool = False
    """Whether the test itself ends the text, or begins in its middle."""


class Token(int):
    """A token of the tokenizer that stands in for others; it knows its text."""

    text: str

    def __new__(cls, number: int, text: str) -> Token:
        """Return a token."""
        made = super().__new__(cls, number)
        made.text = text
        return made


class Tokens:
    """A tokenizer that cuts texts every TOKEN characters."""

    eos_token_id = 0

    def public_attribute(self, name: str) -> Any:
        """Return an attribute for a test."""
        known = {
            "encode": self.encode,
            "decode": self.decode,
            "tokenize": lambda text, **kwargs: [each.text for each in self.encode(text)],
            "get_vocab": lambda: self,
            "vocab": self,
            "get": lambda token, default=None: Token(_number(token), token),
            "convert_ids_to_tokens": lambda ids, **kwargs: [getattr(each, "text", "") for each in ids],
            "convert_tokens_to_ids": lambda token: self.ids(token),
            "convert_tokens_to_string": lambda tokens: "".join(tokens),
        }
        if name not in known:
            return Unknown(f"tokenizer.{name}")
        return known[name]

    def ids(self, given: Any) -> Any:
        """Return the id of a token, or those of several."""
        return Token(_number(given), given) if isinstance(given, str) else [self.ids(each) for each in given]

    def __contains__(self, token: object) -> bool:
        return True

    def __getitem__(self, token: str) -> Token:
        return Token(_number(token), token)

    def encode(self, text: str, **kwargs: Any) -> list[Token]:
        """Return a text's tokens."""
        return [Token(_number(each), each) for each in pieces_of(text, (TOKEN,))]

    def decode(self, ids: Any, **kwargs: Any) -> str:
        """Return the text of tokens."""
        return "".join(each.text for each in (ids if isinstance(ids, list | tuple) else [ids]))


def _number(text: str) -> int:
    """Return a number for a token's text."""
    return sum(ord(char) * (i + 1) for i, char in enumerate(text)) % 100_000


def pieces_of(text: str, sizes: tuple[int, ...]) -> list[str]:
    """Return a text in pieces of these sizes in turn."""
    made: list[str] = []
    at = 0
    while at < len(text):
        size = sizes[len(made) % len(sizes)]
        made.append(text[at : at + size])
        at += size
    return made


def offered(given: Any, text: str) -> Tools:
    """Return the tools of a request; every word of the text is the name of one if the request has none."""
    functions: dict[str, Function] = {}
    for tool in given if isinstance(given, list | tuple) else []:
        function = _part(tool, "function") or tool
        name, parameters = _part(function, "name"), _part(function, "parameters")
        if isinstance(name, str):
            functions[str(name)] = Function(str(name), parameters=parameters if isinstance(parameters, dict) else None)
    if not functions:
        words = {*re.findall(r"[\w.\-:/]+", text), *re.findall(r"[\w.\-]+", text), *re.findall(r"\w+", text)}
        functions = {word: Function(word) for word in sorted(words) if not word[0].isdigit()}
    return Tools(functions)


def _part(owner: Any, name: str) -> Any:
    """Return a field of a record or an object."""
    return owner.get(name) if isinstance(owner, Record | dict) else None


class RawParser:
    """A parser of thoughts that leaves the first call, and all behind it, in the text."""

    def __init__(self, parser: Parser):
        self._parser = parser
        self._text = ""
        self._reasoning = ""
        self._called = False

    def push(self, text: str) -> list[Said]:
        """Return the events that the next piece of text completes."""
        self._text += text
        return [TextDelta(0, text)] if self._called and text else self._read(self._parser.push(text))

    def flush(self, *, cut: bool = False) -> list[Said]:
        """Return the events for the text that was held back."""
        return [] if self._called else self._read(self._parser.flush(cut=cut))

    def _read(self, events: Iterable[Said]) -> list[Said]:
        """Return events with the text of a call in place of the call."""
        said: list[Said] = []
        for event in events:
            if isinstance(event, ToolCallStart):
                self._called = True
                thought = self._reasoning.strip()
                return [*said, TextDelta(0, self._text[self._text.find(thought) + len(thought) :])]
            if isinstance(event, ReasoningDelta):
                self._reasoning += event.text
            said.append(event)
        return said


class OwnParser:
    """One of our parsers, which reads texts as a whole or in pieces.

    `tools` and `kwargs` are those that a parser of theirs was made with. `known` has the texts that an earlier reading
    of the same test has given in pieces, so that the last piece is known; `heard` hears of every text and what was
    said of it. With `held`, a streamed call, or only its arguments, is given to the test as a whole; with `cut`, a text
    that the test itself does not end has no end.
    """

    def __init__(
        self,
        family: Family,
        tools: Any,
        kwargs: dict[str, Any],
        known: list[Stream],
        heard: list[Any],
        *,
        held: str = "",
        cut: bool = False,
    ):
        self.family = family
        self.held = held
        self.silent = False
        self.cut = cut
        self._waiting: list[Said] = []
        self.tools = tools
        self.kwargs = kwargs
        self.known = known
        self.heard = heard
        self.streams: list[Stream] = []
        self.fields: dict[str, Any] = {}
        self._parser: Parser | None = None
        self._answer = Answer()

    def _opened(self, text: str) -> bool:
        """Return whether a prompt is taken to have opened a thought."""
        form = AnswerReading(cast(Tokenizer, None), "", calls="none", thoughts=self.family.thoughts).form
        if form is None:
            return False
        if self.kwargs.get("continue_final_message"):
            continued = str(self.kwargs.get("previous_content") or "")
            return continued.rfind(form.open) > continued.rfind(form.close)
        given = self.kwargs.get("chat_template_kwargs") or {}
        switches = [given.get(name) for name in ("enable_thinking", "thinking") if isinstance(given, dict)]
        if False in switches:
            return False
        switched = True in switches and self.family.thoughts in SWITCHED
        if self.kwargs.get("force_reasoning") or switched or self.family.opened:
            return True
        first = min((at for at in (text.find(each) for each in form.opens) if at >= 0), default=len(text))
        return form.always_opened or any(0 <= text.find(each) < first for each in form.closes)

    def _make(self, text: str, tools: Any) -> Parser | None:
        """Return our parser for a text; None if all of it is content."""
        reading = AnswerReading(cast(Tokenizer, None), "", calls=self.family.calls, thoughts=self.family.thoughts)
        if isinstance(self.tools, list | tuple) and self.tools:
            tools = self.tools
        offer = offered(tools, text) if self.family.calls != "none" and not self.silent else None
        make = reading.parser(offer, opened=self.family.thoughts != HARMONY and self._opened(text))
        made = make(0) if make is not None else None
        thoughts = getattr(made, "_first", None)
        return RawParser(thoughts) if self.family.raw and thoughts is not None else made

    def whole(self, text: str, tools: Any = None) -> Answer:
        """Return what our parser makes of a text. Raises Unread for something that is no text."""
        if not isinstance(text, str):
            raise Unread("a text that is not in the test sources")
        text = str(text)
        found = [self._read(pieces, text, tools) for pieces in ([text], [*text], pieces_of(text, (3, 7, 4, 6, 5)))]
        alike = all(each == found[0] for each in found)
        self.heard.append((self.family, text, found[0], None if alike else found))
        return found[0]

    def _read(self, pieces: list[str], text: str, tools: Any) -> Answer:
        """Return what our parser makes of a text in these pieces."""
        answer, parser = Answer(), self._make(text, tools)
        for piece in pieces:
            answer.add(parser.push(piece) if parser is not None else (TextDelta(0, piece),))
        answer.add(parser.flush() if parser is not None else ())
        return answer

    def push(self, text: str, tools: Any, *, ended: bool = False) -> list[Said]:
        """Return the events for the next piece of a streamed text."""
        if not isinstance(text, str):
            raise Unread("a piece that is not in the test sources")
        if not self.streams:
            self.begin(tools)
        stream = self.streams[-1]
        stream.pieces.append(str(text))
        number = len(self.streams) - 1
        known = self.known[number] if number < len(self.known) else None
        events = list(self._parser.push(str(text)) if self._parser is not None else self._plain(text))
        if ended:
            stream.finished = True
        if ended or (known is not None and not known.finished and len(stream.pieces) == len(known.pieces)):
            events += self._end(flushed=ended or not self.cut)
        self._answer.add(events)
        return self._timed(events, last=self._parser is None)

    def _timed(self, events: list[Said], *, last: bool) -> list[Said]:
        """Return the events that a test gets now, by `held`."""
        if not self.held:
            return events
        self._waiting += events
        end = len(self._waiting)
        if not last and end and isinstance(self._waiting[-1], ToolCallStart | ToolCallArguments):
            call = self._waiting[-1].call
            kinds = ToolCallArguments if self.held == "arguments" else ToolCallStart | ToolCallArguments
            own = (i for i, each in enumerate(self._waiting) if isinstance(each, kinds) and each.call == call)
            end = next(own, end)
        given, self._waiting = self._waiting[:end], self._waiting[end:]
        return given

    def _plain(self, text: str) -> list[Said]:
        """Return the events of a text in which nothing is looked for."""
        return [TextDelta(0, str(text))] if text else []

    def begin(self, tools: Any) -> None:
        """Begin another streamed text."""
        number = len(self.streams)
        self.streams.append(Stream())
        text = "".join(self.known[number].pieces) if number < len(self.known) else ""
        self._parser = self._make(text, tools)
        self._answer = Answer()

    def _end(self, *, flushed: bool = True) -> list[Said]:
        """Return the events of the end of a streamed text."""
        events = list(self._parser.flush()) if self._parser is not None and flushed else []
        self._parser = None
        stream = self.streams[-1]
        self.heard.append((self.family, "".join(stream.pieces), self._answer, None))
        return events

    def finished(self) -> list[Said]:
        """Return the events of the end of a text, if it has not ended yet."""
        if not self.streams:
            return []
        self.streams[-1].finished = True
        return self._timed(self._end(), last=True)

    def take(self, request: Any) -> None:
        """Take in a request's choices. Raises Unread for a call that the request forces: no form is written then."""
        choice = _part(request, "tool_choice")
        self.silent = choice == "none"
        if choice == "required" or isinstance(choice, dict) or (isinstance(choice, Record) and not choice.open_ended):
            raise Unread("a call that the request forces")
        given = _part(request, "chat_template_kwargs")
        if isinstance(given, dict):
            self.kwargs = {**self.kwargs, "chat_template_kwargs": given}

    def _thoughts_only(self) -> OwnParser:
        """Return this parser without calls, unless calls and thoughts are one form."""
        if self.family.thoughts in ("none", HARMONY):
            return self
        return OwnParser(replace(self.family, raw=True), None, self.kwargs, [], self.heard)


class StandIn(OwnParser):
    """One of our parsers with the methods of theirs."""

    def public_attribute(self, name: str) -> Any:
        """Return an attribute for a test."""
        methods = {
            "extract_tool_calls": self.extract_tool_calls,
            "extract_tool_calls_streaming": self.extract_streaming,
            "extract_reasoning": self.extract_reasoning,
            "extract_reasoning_content": self.extract_reasoning,
            "extract_reasoning_streaming": self.extract_reasoning_streaming,
            "extract_reasoning_content_streaming": self.extract_reasoning_streaming,
            "parse": self.events if "events" in self.kwargs else self.parse,
            "parse_delta": self.parse_delta,
            "detect_and_parse": self.detect_and_parse,
            "parse_streaming_increment": self.increment,
            "parse_non_stream": self.parse_non_stream,
            "parse_stream_chunk": self.parse_stream_chunk,
            "finish": self.finish,
            "finish_streaming": self.finish_delta,
            "adjust_request": lambda request: request,
            "set_prompt_token_ids": lambda *args: None,
        }
        if name in methods:
            return methods[name]
        if name == "parser_engine_config":
            raise AttributeError(name)
        if name in ("model_tokenizer", "vocab", "tokenizer"):
            return Tokens()
        return Unknown(f"parser.{name}")

    def extract_tool_calls(self, model_output: str, request: Any = None, **kwargs: Any) -> Record:
        """Return vLLM's description of the calls in a whole text."""
        self.take(request)
        answer = self.whole(model_output, _part(request, "tools"))
        calls = [_call(name, arguments) for name, arguments in answer.calls]
        content = Ours(answer.content) if answer.content.strip() else None
        return Record(
            "ExtractedToolCallInformation", {"tools_called": bool(calls), "tool_calls": calls, "content": content}
        )

    def extract_reasoning_streaming(self, *args: Any, **kwargs: Any) -> Record | None:
        """Return vLLM's description of what the next piece of a text completes, with calls as text."""
        if self.family.thoughts not in ("none", HARMONY):
            self.family = replace(self.family, raw=True)
        return self.extract_streaming(*args, **kwargs)

    def extract_streaming(self, *args: Any, **kwargs: Any) -> Record | None:
        """Return vLLM's description of what the next piece of a text completes."""
        names = ("previous_text", "current_text", "delta_text")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        request = given.get("request", args[-1] if args else None)
        self.take(request)
        tools = _part(request, "tools")
        text, begins = given["delta_text"], given.get("previous_text") == "" != given.get("current_text")
        if not self.streams or (begins and any(self.streams[-1].pieces)):
            self.begin(tools)
            if given.get("previous_text") and self._parser is not None:
                self._parser.push(given["previous_text"])
                self.streams[-1].finished = True
        return self._delta(self.push(text, tools))

    def _delta(self, events: list[Said]) -> Record | None:
        """Return vLLM's description of events."""
        content = "".join(event.text for event in events if isinstance(event, TextDelta))
        reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
        calls: dict[int, Record] = {}
        for event in events:
            if isinstance(event, ToolCallStart):
                function = Record("DeltaFunctionCall", {"name": event.name, "arguments": OurArguments("")})
                calls[event.call] = Record(
                    "DeltaToolCall",
                    {"index": event.call, "id": Unknown("id"), "type": "function", "function": function},
                )
            elif isinstance(event, ToolCallArguments):
                own = calls.setdefault(event.call, _more(event.call))
                function = own.fields["function"]
                function.fields["arguments"] = OurArguments((function.fields["arguments"] or "") + event.arguments)
        if not (content or reasoning or calls):
            return None
        fields = {
            "content": Ours(content) if content else None,
            "reasoning": Ours(reasoning) if reasoning else None,
            "reasoning_content": Ours(reasoning) if reasoning else None,
            "tool_calls": list(calls.values()),
        }
        return Record("DeltaMessage", fields)

    def extract_reasoning(self, model_output: str, request: Any = None, **kwargs: Any) -> tuple[Any, Any]:
        """Return the reasoning and the content of a whole text as vLLM does."""
        self.take(request)
        answer = self._thoughts_only().whole(model_output)
        return Ours(answer.reasoning), Ours(answer.content)

    def parse(self, text: str, request: Any = None, **kwargs: Any) -> tuple[Any, Any, Any]:
        """Return the reasoning, content and calls of a whole text as vLLM does."""
        self.take(request)
        ids = kwargs.get("model_output_token_ids")
        if not text and isinstance(ids, list):
            text = Tokens().decode(ids)
        answer = self.whole(text, _part(request, "tools"))
        calls = [
            Record("FunctionCall", {"name": name, "arguments": OurArguments(given)}) for name, given in answer.calls
        ]
        return Ours(answer.reasoning), Ours(answer.content), calls or None

    def parse_delta(self, delta_text: str, *args: Any, finished: bool = False, **kwargs: Any) -> Record | None:
        """Return vLLM's description of what the next piece of a text completes."""
        request = kwargs.get("request", args[1] if len(args) > 1 else None)
        self.take(request)
        ids = kwargs.get("delta_token_ids", args[0] if args else None)
        if not delta_text and self.family.thoughts == HARMONY and isinstance(ids, list):
            delta_text = Tokens().decode(ids)
        return self._delta(self.push(delta_text, _part(request, "tools"), ended=finished))

    def finish_delta(self, *args: Any, **kwargs: Any) -> Record | None:
        """Return vLLM's description of what the end of a text completes."""
        return self._delta(self.finished())

    def detect_and_parse(self, text: str, tools: Any = None) -> Record:
        """Return SGLang's description of a whole text."""
        answer = self.whole(text, tools)
        names = [_part(_part(tool, "function"), "name") for tool in tools or []]
        items = [_item(names.index(name) if name in names else -1, name, arguments) for name, arguments in answer.calls]
        return _result(answer.content, answer.reasoning, items)

    def increment(self, new_text: str, tools: Any = None) -> Record:
        """Return SGLang's description of what the next piece of a text completes."""
        return self._increment(self.push(new_text, tools))

    def _increment(self, events: list[Said]) -> Record:
        """Return SGLang's description of events."""
        items: list[Record] = []
        calls: dict[int, Record] = {}
        content = "".join(event.text for event in events if isinstance(event, TextDelta))
        reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
        for event in events:
            if isinstance(event, ToolCallStart):
                items.append(_item(event.call, event.name, ""))
                calls[event.call] = items[-1]
            elif isinstance(event, ToolCallArguments):
                if event.call not in calls:
                    items.append(_item(event.call, None, ""))
                    calls[event.call] = items[-1]
                fields = calls[event.call].fields
                fields["parameters"] = OurArguments(fields["parameters"] + event.arguments)
        return _result(content, reasoning, items)

    def finish(self, *args: Any) -> Record:
        """Return SGLang's description of what the end of a text completes."""
        return self._increment(self.finished())

    def events(self, chunk: str) -> list[Record]:
        """Return the events with which SGLang describes what the next piece of a text completes."""
        made: list[Record] = []
        for event in self.push(chunk, None):
            match event:
                case TextDelta():
                    made.append(Record("Event", {"event_type": "normal", "content": Ours(event.text)}))
                case ReasoningDelta():
                    made.append(Record("Event", {"event_type": "reasoning", "content": Ours(event.text)}))
                case ToolCallArguments():
                    made.append(Record("Event", {"event_type": "tool_call", "content": OurArguments(event.arguments)}))
        return made

    def parse_non_stream(self, full_text: str) -> tuple[Any, Any]:
        """Return the two parts of a whole text as SGLang does: reasoning and content, or content and calls."""
        found = self.detect_and_parse(full_text, self.tools)
        return self._pair(found)

    def parse_stream_chunk(self, chunk_text: str) -> tuple[Any, Any]:
        """Return the two parts of the next piece of a text as SGLang does."""
        return self._pair(self.increment(chunk_text, self.tools))

    def _pair(self, found: Record) -> tuple[Any, Any]:
        """Return the two parts of a description as SGLang does."""
        if self.family.calls == "none" or self.family.raw:
            return found.fields["reasoning_text"], found.fields["normal_text"]
        return found.fields["normal_text"], found.fields["calls"]


def _call(name: str, arguments: str) -> Record:
    """Return a whole call in vLLM's form."""
    function = Record("FunctionCall", {"name": name, "arguments": OurArguments(arguments)})
    return Record("ToolCall", {"id": Unknown("id"), "type": "function", "function": function})


def _more(call: int) -> Record:
    """Return a later piece of a call in vLLM's form."""
    function = Record("DeltaFunctionCall", {"name": None, "arguments": None})
    return Record("DeltaToolCall", {"index": call, "id": None, "type": None, "function": function})


def _item(index: int, name: str | None, arguments: str) -> Record:
    """Return a call, or a piece of one, in SGLang's form."""
    return Record("ToolCallItem", {"tool_index": index, "name": name, "parameters": OurArguments(arguments)})


def _result(content: str, reasoning: str, items: list[Record]) -> Record:
    """Return a description in SGLang's form."""
    return Record(
        "StreamingParseResult", {"normal_text": Ours(content), "reasoning_text": Ours(reasoning), "calls": items}
    )
