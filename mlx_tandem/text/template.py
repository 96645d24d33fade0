"""Chat templates: messages in, prompt token ids out. What a message says never becomes a control token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlx_tandem import small_files
from mlx_tandem.errors import InvalidRequest, ModelError
from mlx_tandem.text.tokenizer import Tokenizer

Message = Mapping[str, Any]


class ChatTemplate:
    """The template of a model folder, compiled once."""

    def __init__(self, source: str, tokenizer: Tokenizer, where: str = "chat_template"):
        self.source = source
        self._tokenizer = tokenizer
        try:
            self._template: Template = _environment().from_string(source)
        except Exception as e:  # beside the library's own those of Python's compiler: what it makes may be no program
            raise ModelError(f"{where} is not a valid template: {e}", param="chat_template") from e
        self._variables = tokenizer.special_texts()
        names = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, names))) if names else None

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """From `chat_template.jinja`, else `tokenizer_config.json`; None when the model has no template."""
        path = folder / "chat_template.jinja"
        raw = small_files.read(path)
        if raw is not None:
            try:
                return cls(raw.decode(), tokenizer, str(path))
            except UnicodeDecodeError as e:
                raise ModelError(f"{path} is not UTF-8", param=path.name) from e
        source = tokenizer.config.get("chat_template")
        if isinstance(source, list):  # several by name
            named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
            source = named.get("default")
        if source is None:
            return None
        if not isinstance(source, str):
            raise ModelError(
                "tokenizer_config.json: chat_template is neither text nor a list of named texts", param="chat_template"
            )
        return cls(source, tokenizer, str(folder / "tokenizer_config.json"))

    def encode(self, messages: Sequence[Message], options: Mapping[str, bool] | None = None) -> list[int]:
        """Prompt ids up to where the assistant speaks, unless `options` say otherwise. The ids of special tokens come
        from the template only."""
        shields = _Shields(self._specials, messages)
        text = self._render(shields.messages, options or {})
        if self._tokenizer.has_normalized_specials:
            self._refuse_hidden_specials(shields.messages)
        ids: list[int] = []
        for part, shielded in shields.split(text):
            ids += self._tokenizer.encode_plain(part) if shielded else self._tokenizer.encode(part)
        return ids

    def _render(self, messages: Sequence[Message], options: Mapping[str, bool]) -> str:
        given = {"tools": None, "documents": None, "add_generation_prompt": True, **options}
        try:
            return self._template.render(**self._variables, messages=messages, **given)
        except _Refused as e:
            raise InvalidRequest(f"the model's chat template refuses these messages: {e}", param="messages") from e
        except Exception as e:  # the template is the model folder's code: it may fail in any way
            raise InvalidRequest(
                "the model's chat template cannot be rendered with these messages", param="messages"
            ) from e

    def _refuse_hidden_specials(self, messages: Sequence[Message]) -> None:
        for i, message in enumerate(messages):
            if not self._tokenizer.special_ids.isdisjoint(self._tokenizer.encode(str(message.get("content") or ""))):
                raise InvalidRequest("the content spells a control token of the model", param=f"messages[{i}].content")


class _Shields:
    """Stands a private-use character in for each special token's text inside message values while they are rendered.

    Templates may trim, split or join what they print, so the text itself has to travel through them; a private-use
    character survives that, and what it stands for is then encoded with special tokens off.
    """

    def __init__(self, specials: re.Pattern[str] | None, messages: Sequence[Message]):
        self._text_of: dict[str, str] = {}
        self.messages = messages
        if specials is None or not any(specials.search(v) for m in messages for v in m.values() if isinstance(v, str)):
            return
        used = set().union(*(set(v) for m in messages for v in m.values() if isinstance(v, str)))
        free = (chr(c) for c in range(0xF0000, 0xFFFFE) if chr(c) not in used)
        character_of: dict[str, str] = {}

        def stand_in(match: re.Match[str]) -> str:
            text = match.group()
            if text not in character_of:
                character_of[text] = next(free)
            return character_of[text]

        self.messages = [
            {k: specials.sub(stand_in, v) if isinstance(v, str) else v for k, v in m.items()} for m in messages
        ]
        self._text_of = {c: t for t, c in character_of.items()}

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """The rendered text in parts, each with whether it came from a message and must stay plain."""
        if not self._text_of:
            yield text, False
            return
        for part in re.split(f"([{''.join(self._text_of)}]+)", text):
            if part:
                shielded = part[0] in self._text_of
                yield "".join(self._text_of[c] for c in part) if shielded else part, shielded


class _Refused(TemplateError):
    """What a template raises on purpose."""


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # jinja2's own filter escapes for HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's own text for trainers; for serving it is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
