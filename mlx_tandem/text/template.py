"""Chat templates: messages in, prompt token ids out. What a message says never becomes a control token."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlx_tandem import jsonfile, limits
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
        self._beginnings = frozenset(name[:end] for name in names for end in range(1, len(name)))

    @classmethod
    def given(cls, given: str, tokenizer: Tokenizer) -> ChatTemplate:
        """Return the template in the file that `given` names, or the one that `given` is: then it has a brace or a line
        break. Raises ModelError."""
        if not os.path.isfile(given):
            if not set("{}\n") & set(given):
                raise ModelError(f"there is no file {given} for --chat-template", param="chat_template")
            return cls(given, tokenizer, "the text of --chat-template")
        try:
            with open(given, encoding="utf-8") as file:
                text = file.read(limits.MAX_CONFIG_BYTES + 1)
        except (OSError, UnicodeDecodeError) as e:
            reason = "is not UTF-8" if isinstance(e, UnicodeDecodeError) else f"cannot be read: {e.strerror}"
            raise ModelError(f"{given} {reason}", param="chat_template") from e
        if len(text) > limits.MAX_CONFIG_BYTES:
            raise ModelError(f"{given} is longer than {limits.MAX_CONFIG_BYTES} characters", param="chat_template")
        return cls(text, tokenizer, given)

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """From `chat_template.jinja`, else `tokenizer_config.json`; None when the model has no template."""
        path = folder / "chat_template.jinja"
        raw = jsonfile.read(path)
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
        """Return the prompt's ids up to where the assistant speaks, unless `options` say otherwise. With the option
        `continue_final_message`, which the template does not see, they end with the last message's content. The ids of
        special tokens come from the template only."""
        given = dict(options or {})
        continues = given.pop("continue_final_message", False)
        shields = _Shields(self._specials, self._beginnings, messages, continues=continues)
        text = self._render(shields.messages, given)
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
            for key, value in message.items():
                encoded = (self._tokenizer.encode(text) for text in texts({key: value}))
                if not all(map(self._tokenizer.special_ids.isdisjoint, encoded)):
                    param = f"messages[{i}].{ascii(key[:64])[1:-1]}"
                    raise InvalidRequest(f"{param} spells a control token of the model", param=param)


def texts(value: Any) -> Iterator[str]:
    """Yield every text in a message or in a part of one, and the keys of its objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner)


def _changed(value: Any, of_key: Callable[[str], str], of_text: Callable[[str], str]) -> Any:
    """Return `value` with each key and each other text in it changed."""
    if isinstance(value, str):
        return of_text(value)
    if isinstance(value, Mapping):
        return {of_key(key): _changed(inner, of_key, of_text) for key, inner in value.items()}
    return [_changed(inner, of_key, of_text) for inner in value] if isinstance(value, list) else value


class _Shields:
    """Stands a private-use character in for each special token's text inside messages while they are rendered.

    Templates may trim, split or join what they print, so the text itself has to travel through them; a private-use
    character survives that, and what it stands for is then encoded with special tokens off. A text may also end with
    the beginning of a special token, which the next text that the template prints would complete: another character
    stands in for that, and is encoded so only where this happens.
    """

    def __init__(
        self,
        specials: re.Pattern[str] | None,
        beginnings: Collection[str],
        messages: Sequence[Message],
        *,
        continues: bool,
    ):
        """`beginnings`: of special tokens. `continues`: the text ends with the last message's content."""
        self._specials = specials
        self._beginnings = beginnings
        self._longest = max(map(len, beginnings), default=0)
        self._free = _free_characters(messages)
        self._of_special: dict[str, str] = {}  # the characters, by what they stand for
        self._of_beginning: dict[str, str] = {}
        self.messages: list[Message] = [
            # Roles are none of the caller's words.
            {self._shield(k): v if k == "role" else _changed(v, self._shield, self._shield_all) for k, v in m.items()}
            for m in messages
        ]
        self._end = next(self._free) if continues else ""
        if continues:
            last = self.messages[-1]
            self.messages[-1] = {**last, "content": last["content"] + self._end}

    def split(self, text: str) -> list[tuple[str, bool]]:
        """Return the rendered text in parts, each with whether it came from a message and must stay plain."""
        if self._end:
            text, found, _ = text.rpartition(self._end)
            if not found:
                raise InvalidRequest(
                    "the model's chat template does not print the last message, so it cannot be continued",
                    param="continue_final_message",
                )
            text = text.replace(self._end, "")
        specials = {c: t for t, c in self._of_special.items()}
        beginnings = {c: t for t, c in self._of_beginning.items()}
        characters = "".join([*specials, *beginnings])
        parts: list[tuple[str, bool]] = []
        ahead = ""  # what follows and is not plain
        for part in reversed(re.split(f"([{characters}])", text) if characters else [text]):
            piece = specials.get(part) or beginnings.get(part) or part
            plain = part in specials or (part in beginnings and self._makes_special(piece, ahead))
            ahead = "" if plain else (piece[: self._longest] + ahead)[: self._longest]
            if piece:
                parts.append((piece, plain))
        return [("".join(p for p, _ in group), plain) for plain, group in groupby(parts[::-1], key=itemgetter(1))]

    def _makes_special(self, beginning: str, ahead: str) -> bool:
        """Return whether a special token begins in `beginning` when `ahead` follows it."""
        assert self._specials is not None
        match = self._specials.search(beginning + ahead)
        return match is not None and match.start() < len(beginning)

    def _shield(self, text: str) -> str:
        """Return the text without that of special tokens."""
        if self._specials is None:
            return text
        return self._specials.sub(lambda match: self._character(self._of_special, match.group()), text)

    def _shield_all(self, text: str) -> str:
        """Return the text without that of special tokens, and without the beginning of one at its end."""
        text = self._shield(text)
        kept = text.rstrip()  # templates trim
        for n in range(min(self._longest, len(kept)), 0, -1):
            if kept[-n:] in self._beginnings:
                return kept[:-n] + self._character(self._of_beginning, kept[-n:]) + text[len(kept) :]
        return text

    def _character(self, known: dict[str, str], text: str) -> str:
        if text not in known:
            known[text] = next(self._free)
        return known[text]


def _free_characters(messages: Sequence[Message]) -> Iterator[str]:
    """Yield private-use characters that no message has. They are looked for when the first one is needed."""
    used = set().union(*map(set, texts(list(messages))))
    yield from (c for c in map(chr, range(0xF0000, 0xFFFFE)) if c not in used)


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
