"""Choosing the parser that reads a model's answers: thoughts first, then tool calls in what is left."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from mlx_tandem.errors import InvalidRequest, ModelError
from mlx_tandem.generation.events import Said, TextDelta, ToolCallStart
from mlx_tandem.generation.grammar.constraint import Thought
from mlx_tandem.generation.parsers import MakeParser, Parser
from mlx_tandem.generation.reasoning.table import ALIASES as THOUGHT_ALIASES
from mlx_tandem.generation.reasoning.table import FORMS, HARMONY, form_for
from mlx_tandem.generation.reasoning.thoughts import ThoughtParser, Thoughts
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.generation.tools.calls import CallForm
from mlx_tandem.generation.tools.harmony import HarmonyParser
from mlx_tandem.generation.tools.offer import Tools
from mlx_tandem.generation.tools.table import ALIASES as CALL_ALIASES
from mlx_tandem.generation.tools.table import COMMENT, PARSERS, knows_tools, parser_for
from mlx_tandem.types import ThoughtBudget

AUTO, NONE = "auto", "none"

_SWITCHES = {
    "enable_thinking": re.compile(r"\benable_thinking\b"),
    "thinking": re.compile(r"""(?<![.\w"'])thinking(?=\s+(?:is|and|or)\b|\s*-?%})"""),
}
"""The variables with which chat templates switch thoughts on and off."""

_END_TOKENS = 32
"""Last tokens of a prompt in which the marker of a thought is looked for."""


class AnswerReading:
    """The forms of one model's thoughts and tool calls."""

    def __init__(self, tokenizer: Tokenizer, template: str, *, calls: str = AUTO, thoughts: str = AUTO):
        """Choose the forms by name, or with "auto" by the chat template. Raises ModelError for an unknown name."""
        self._tokenizer = tokenizer
        self.calls = _chosen(CALL_ALIASES.get(calls, calls), parser_for(template), PARSERS, "tool_call_parser")
        self.thoughts = _chosen(THOUGHT_ALIASES.get(thoughts, thoughts), form_for(template), FORMS, "reasoning_parser")
        self._knows_tools = knows_tools(template)
        self._parser = PARSERS.get(self.calls)
        code = COMMENT.sub("", template)
        self.switches = tuple(name for name, pattern in _SWITCHES.items() if pattern.search(code))
        """The template's variables that switch thoughts on and off."""
        self.knows_effort = "reasoning_effort" in code
        self.form: Thoughts | None = FORMS.get(self.thoughts)

    def check_tools(self, param: str = "tools") -> None:
        """Raise InvalidRequest naming `param` when the model cannot be offered tools."""
        if not self._knows_tools:
            raise InvalidRequest(
                "tool calling needs a chat template that knows tools; this model's does not",
                param=param,
                code="unsupported_parameter",
            )
        if self._parser is None:
            raise InvalidRequest(
                "tool calling needs a parser for the form of this model's calls; the server was started without one "
                "(--tool-call-parser)",
                param=param,
                code="unsupported_parameter",
            )

    @property
    def can_call(self) -> bool:
        """Whether the model can be offered tools."""
        return self._knows_tools and self._parser is not None

    @property
    def call_form(self) -> CallForm | None:
        """The text around the calls of the model. None if calls of this family cannot be enforced."""
        return None if self._parser is None else self._parser.form

    @property
    def call_opener(self) -> str:
        """The marker with which every call of the model begins; empty if there is none."""
        form, parser = self.call_form, self._parser
        markers = () if form is None or parser is None else parser.openers.texts
        return next((marker for marker in markers if form is not None and form.before.startswith(marker)), "")

    def is_opened(self, prompt: Sequence[int], continued: str | None = None) -> bool:
        """Return whether an answer to these token ids begins inside a thought.

        `continued` is the text of the message that the answer continues; None for a new message.
        """
        if self.form is None:
            return False
        if continued is not None:
            return continued.rfind(self.form.open) > continued.rfind(self.form.close)
        return self.form.is_opened(self._tokenizer.decode(prompt[-_END_TOKENS:], show_special=True))

    def thought(self, prompt: Sequence[int], *, opened: bool) -> Thought | None:
        """Return the thought that may come before an answer whose form is constrained; None if there is none.

        The prompt may have opened it, or have closed it already.
        """
        form = self.form
        if form is None or self.thoughts == HARMONY:
            return None
        if opened:
            return Thought(form.close)
        end = self._tokenizer.decode(prompt[-_END_TOKENS:], show_special=True).rstrip()
        return None if end.endswith(form.close) else Thought(form.close, form.open)

    def budget(self, tokens: int | None, *, opened: bool) -> ThoughtBudget | None:
        """Return the budget of a request's thoughts; None for no budget, and for a model without thoughts.

        Raises InvalidRequest for a model whose thoughts are not between tokens of their own.
        """
        form = self.form
        if tokens is None or form is None:
            return None
        encode, is_token = self._tokenizer.encode, self._tokenizer.is_token
        opening, close, closing = encode(form.open.rstrip()), encode(form.close), encode(form.closing)
        if not (closing and is_token(form.close) and opening[0] in self._tokenizer.added_tokens.values()):
            raise InvalidRequest(
                "thinking_token_budget needs a model whose thoughts begin and end with tokens of their own",
                param="thinking_token_budget",
                code="unsupported_parameter",
            )
        return ThoughtBudget(tokens, tuple(opening), tuple(close), tuple(closing), opened)

    def parser(self, tools: Tools | None, *, opened: bool = False) -> MakeParser | None:
        """Return what makes the parsers of a request's choices; None if all of their text is text.

        `opened` says whether the choices begin inside a thought.
        """
        form, calls = self.form, self._parser if tools is not None else None
        if self.thoughts == HARMONY or calls is HarmonyParser:
            return lambda choice: HarmonyParser(choice, tools or Tools())
        if form is None and calls is None:
            return None

        def make(choice: int) -> Parser:
            own = None if calls is None or tools is None else calls(choice, tools)
            if form is None:
                assert own is not None
                return own
            if calls is None or tools is None or own is None:
                return ThoughtParser(choice, form, opened=opened)
            return _InTurn(ThoughtParser(choice, form, opened=opened, calls=lambda: calls(choice, tools)), own)

        return make

    def shown(self, tools: Tools | None) -> frozenset[int]:
        """Return the special tokens that the parser of such a request has to see."""
        marks = () if self.form is None else self.form.marks
        parser = HarmonyParser if self.thoughts == HARMONY else None if tools is None else self._parser
        if parser is not None:
            marks = (*marks, *parser.openers.texts, *parser.closers, *parser.extra_markers)
        return self._tokenizer.specials_in(marks)


class _InTurn:
    """Two parsers in turn: the second one reads what is text to the first one."""

    def __init__(self, first: Parser, second: Parser):
        self._first = first
        self._second = second
        self._has_called = False  # whether a thought without an end has ended with a call, behind which all is read

    def push(self, text: str) -> list[Said]:
        """Return the events that the next piece of text completes."""
        return self._read(self._first.push(text))

    def flush(self, *, cut: bool = False) -> list[Said]:
        """Return the events for the text that was held back. No more text follows."""
        return [*self._read(self._first.flush(cut=cut)), *self._second.flush(cut=cut)]

    def _read(self, events: Iterable[Said]) -> list[Said]:
        """Return the events of the first parser, with those of the second one in place of text."""
        said: list[Said] = []
        for event in events:
            self._has_called |= isinstance(event, ToolCallStart)
            if isinstance(event, TextDelta) and not self._has_called:
                said += self._second.push(event.text)
            else:
                said.append(event)
        return said


def _chosen(asked: str, inferred: str, names: Collection[str], setting: str) -> str:
    """Return the name of the form that the setting asks for. Raises ModelError for a name that does not exist."""
    if asked != AUTO and asked != NONE and asked not in names:
        raise ModelError(f"{setting} must be one of auto, none, {', '.join(sorted(names))}", param=setting)
    return inferred if asked == AUTO else asked
