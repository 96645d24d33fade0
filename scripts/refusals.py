"""Write docs/refusals.md: what becomes of every field of the request schemas that OpenAI and Anthropic publish.

python -m scripts.refusals

The fields are those of the request types in the installed packages `openai` and `anthropic`, nested ones too. Each is
sent to the server, with a value for every form that its type allows. NO_EFFECT below tells fields that do nothing from
those that are served; the pages of the dialects explain them.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Union

import httpx
import typing_extensions

from tests.serving import demo_config, serving

PAGE = Path(__file__).resolve().parents[1] / "docs" / "refusals.md"
USER = {"role": "user", "content": "hi"}
DEPTH = 5
"""Most levels of fields in fields. Deeper ones belong to JSON schemas of callers."""

Body = dict[str, Any]


class Api(typing.NamedTuple):
    """One route: its name, its path, the type of its request, and the least body to which a field is added."""

    name: str
    path: str
    kind: Any
    least: Mapping[str, Any]
    headers: Mapping[str, str] = {}


def apis() -> list[Api]:
    """Return the routes whose schemas OpenAI and Anthropic publish."""
    import anthropic.types as claude
    from openai.types import completion_create_params, embedding_create_params
    from openai.types.chat import completion_create_params as chat_params
    from openai.types.responses import response_create_params

    chat = {"model": "base", "messages": [USER], "max_tokens": 1}
    message = {"model": "base", "messages": [USER], "max_tokens": 1}
    count = {"model": "base", "messages": [USER]}
    text = {"model": "base", "prompt": "hi", "max_tokens": 1}
    response = {"model": "base", "input": "hi", "max_output_tokens": 1}
    asked = {"anthropic-version": "2023-06-01"}
    return [
        Api("Chats", "/v1/chat/completions", chat_params.CompletionCreateParamsNonStreaming, chat),
        Api("Completions", "/v1/completions", completion_create_params.CompletionCreateParamsNonStreaming, text),
        Api("Responses", "/v1/responses", response_create_params.ResponseCreateParamsNonStreaming, response),
        Api("Embeddings", "/v1/embeddings", embedding_create_params.EmbeddingCreateParams, {"input": "hi"}),
        Api("Messages", "/v1/messages", claude.message_create_params.MessageCreateParamsNonStreaming, message, asked),
        Api("Counting tokens", "/v1/messages/count_tokens", claude.MessageCountTokensParams, count, asked),
    ]


_CACHES = ("*prompt_cache_breakpoint", "prompt_cache_*", "safety_identifier", "service_tier")
_CLAUDE = ("*cache_control", "*citations", "speed", "user_profile_id", "workspace_id", "billing_policy", "service_tier")
_CLAUDE += ("diagnostics", "fallback_credit_token", "tools*.allowed_callers", "tools*.eager_input_streaming")
_CLAUDE += ("*tool_use].caller", "*.toolset_name", "tools*.type", "*.cache_control(ephemeral)", "*.citations[[]*")
_CLAUDE += ("tools*.defer_loading", "*.transformations")
NO_EFFECT: Mapping[str, tuple[str, ...]] = {
    "Chats": (
        *_CACHES,
        *("messages*.audio", "messages[[]assistant].refusal", "modalities", "store", "verbosity"),
        *("response_format*.description", "response_format*.name", "response_format*.strict"),
        *("stream_options.include_obfuscation",),
    ),
    "Completions": ("best_of", "stream_options.include_obfuscation", "suffix"),
    "Responses": (
        *_CACHES,
        *("background", "max_tool_calls", "truncation", "reasoning.[!e]*", "text.verbosity", "text.format*.[dn]*"),
        *(
            "text.format*.strict",
            "stream_options*",
            "input*.caller*",
            "input*.status",
            "input*.namespace",
            "input*.phase",
        ),
        *("input[[]reasoning].encrypted_content", "input[[]function_call].id", "input[[]function_call_output].[in]*"),
        *(
            "input[[]message].id",
            "input[[]message].status",
            "input[[]reasoning].id",
            "*tools*.allowed_callers",
            "*tools*.output_schema",
            "*tools*.defer_loading",
        ),
        *("*tools[[]namespace].description", "*.annotations", "*.annotations[[]*", "*.logprobs", "*.logprobs[[]*"),
        *("input[[]custom_tool_call].id", "input[[]custom_tool_call_output].id", "input[[]additional_tools].id"),
    ),
    "Embeddings": (),
    "Messages": _CLAUDE,
    "Counting tokens": _CLAUDE,
}
"""Patterns of the fields that are accepted and do nothing, by route. `[` stands for itself as `[[]`.

What is inside of such a field has no effect either, and no line of its own.
"""


# -- the types of the packages ---------------------------------------------------------------------------------------


@functools.cache  # to resolve the types takes long
def hints(kind: Any) -> dict[str, Any]:
    """Return the fields of a TypedDict with their types."""
    return typing.get_type_hints(kind)


REQUIRED = (typing.Required, typing_extensions.Required)


def is_object(kind: Any) -> bool:
    """Return whether a type is a TypedDict."""
    return typing_extensions.is_typeddict(kind)


def label(kind: Any) -> str:
    """Return how an object is told from others in the same place: by its type or its role."""
    found = hints(kind)
    for name in ("type", "role"):
        for form in forms(found.get(name, str)):
            if typing.get_origin(form) is Literal:
                return str(typing.get_args(form)[0])
    return ""


def forms(kind: Any) -> Iterator[Any]:
    """Yield the types that a union or an alias stands for."""
    if isinstance(kind, typing_extensions.TypeAliasType):
        kind = kind.__value__
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        for part in typing.get_args(kind):
            yield from forms(part)
    elif origin in (typing.Annotated, *REQUIRED):
        yield from forms(typing.get_args(kind)[0])
    elif kind is not type(None):
        yield kind


def samples(kind: Any) -> Iterator[Any]:
    """Yield a value for each form of a type that is no object and no list of objects."""
    for form in forms(kind):
        origin, args = typing.get_origin(form), typing.get_args(form)
        if origin is Literal:
            yield from args
        elif form in (str, int, float, bool):
            yield from {str: ["x"], int: [1, 2], float: [1.0], bool: [True, False]}[form]
        elif is_object(form):
            yield sample(form)
        elif origin in (dict, Mapping) or form is object or form is Any:
            yield {"x": next(samples(args[1]), "x")} if args else {}
        elif args:
            yield from ([value] for value in samples(args[0]))


def sample(kind: Any) -> Body:
    """Return the least value of an object: its required fields, and those without which it means nothing."""
    found = hints(kind)
    least = {name: best(name, found[name]) for name in sorted(required(kind))}
    if kind.__name__ == "ItemReference":
        least["id"] = STORED["id"]
    return least | ESSENTIAL.get(kind.__name__, {})


@functools.cache
def required(kind: Any) -> set[str]:
    """Return the fields that an object has to have. Annotations that are text hide them from `__required_keys__`."""
    found = typing_extensions.get_type_hints(kind, include_extras=True)
    told = {name for name, form in found.items() if typing.get_origin(form) in REQUIRED}
    return told | (set() if not kind.__total__ else set(found) - told)


PLAUSIBLE: Mapping[str, Any] = {
    "model": "base",
    "role": "user",
    "max_tokens": 1,
    "tools": [],
    "parameters": {"type": "object", "properties": {}},
    "input_schema": {"type": "object", "properties": {}},
    "arguments": "{}",
    "budget_tokens": 1024,
    "name": "x",
    "tool_use_id": "toolu_1",
    "logit_bias": {"5": 1},
}
"""Values that a field of this name needs in order to mean anything."""


FUNCTION = {"name": "x", "parameters": {"type": "object", "properties": {}}}
TOOL = {"name": "x", "input_schema": {"type": "object", "properties": {}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ESSENTIAL: Mapping[str, Body] = {
    "JSONSchema": {"schema": SCHEMA},
    "ResponseFormatTextJSONSchemaConfigParam": {"schema": SCHEMA},
    "ToolChoiceAllowedParam": {"tools": [{"type": "function", "name": "x"}]},
    "ResponseInputImageContentParam": {"image_url": "data:image/png;base64,aQ=="},
    "ResponseInputImageParam": {"image_url": "data:image/png;base64,aQ=="},
}
"""Fields of objects that the schemas do not require, by the name of the object's type."""

BESIDE: Mapping[tuple[str, str], Body] = {
    ("Chats", "stream_options"): {"stream": True},
    ("Chats", "top_logprobs"): {"logprobs": True},
    ("Chats", "tool_choice"): {"tools": [{"type": "function", "function": FUNCTION}]},
    ("Chats", "function_call"): {"functions": [FUNCTION]},
    ("Completions", "stream_options"): {"stream": True},
    ("Responses", "stream_options"): {"stream": True},
    ("Responses", "tool_choice"): {"tools": [{"type": "function", **FUNCTION}]},
    ("Messages", "tool_choice"): {"tools": [TOOL]},
    ("Counting tokens", "tool_choice"): {"tools": [TOOL]},
}
"""What a body needs beside a field, without which the field is an error."""


STORED: dict[str, str] = {}
"""The id of a response in the server's store, and of an item of its output."""


def best(name: str, kind: Any) -> Any:
    """Return a value for a field that has to be there."""
    allowed = [args for form in forms(kind) if typing.get_origin(form) is Literal for args in typing.get_args(form)]
    if allowed:
        return allowed[0]
    return PLAUSIBLE[name] if name in PLAUSIBLE else next(samples(kind), "x")


# -- what the server says --------------------------------------------------------------------------------------------


@dataclass
class Line:
    """One line of the page: a field, and the values of it that are accepted, left out and refused."""

    accepted: list[Any] = field(default_factory=list)
    left_out: list[Any] = field(default_factory=list)
    refused: list[Any] = field(default_factory=list)


Outcome = Literal["accepted", "left_out", "refused"]
"""What becomes of a value: the attribute of Line that has it."""

Build = Callable[[Any], Body]
"""Returns a whole body, given the value of one field."""


@dataclass
class Walk:
    """A walk through the fields of one route. `unnamed` has the answers that do not name the field."""

    api: Api
    client: httpx.Client
    lines: dict[str, Line] = field(default_factory=dict)
    unnamed: list[str] = field(default_factory=list)
    seen: set[tuple[str, Any]] = field(default_factory=set)

    def run(self) -> Walk:
        """Send every field."""
        for key, kind in sorted(hints(self.api.kind).items()):
            beside = BESIDE.get((self.api.name, key), {})
            self._field(
                kind, key, key, lambda value, key=key, beside=beside: {**self.api.least, **beside, key: value}, 0
            )
        return self

    def _field(self, kind: Any, key: str, name: str, build: Build, depth: int) -> None:
        """Send the values of one field, and look into those that are objects."""
        line = self.lines.setdefault(name, Line())
        known: Mapping[str, Any] = {**PLAUSIBLE, **{k: v for k, v in STORED.items() if k == name}}
        plain = [known[key]] if key in known else []
        for form in forms(kind):
            args = typing.get_args(form)
            is_list = bool(args) and typing.get_origin(form) not in (Literal, dict, Mapping)
            parts = list(forms(args[0])) if is_list else [form]
            for part in filter(is_object, parts):
                self._inside(part, name, build, depth, is_list=is_list)
            if key not in known:
                values = [value for part in parts if not is_object(part) for value in samples(part)]
                plain += [[value] for value in values] if is_list else values
        for value in plain:
            self._note(line, value, self._send(build(value), key))

    def _inside(self, kind: Any, name: str, build: Build, depth: int, *, is_list: bool) -> None:
        """Send an object, and its fields unless it is refused as a whole."""
        told = label(kind)
        inner = f"{name}[{told}]" if is_list else f"{name}({told})" if told else name
        if (inner, kind) in self.seen:
            return
        self.seen.add((inner, kind))
        least = sample(kind)
        whole = followed(told, (lambda value: build([value])) if is_list else build)
        outcome = self._send(whole(least), inner.rpartition(".")[2])
        for line in {inner, name}:
            self._note(self.lines.setdefault(line, Line()), told or "an object", outcome)
        if outcome != "accepted" or depth >= DEPTH or not has_effect(self.api, inner):
            return
        for key, form in sorted(hints(kind).items()):
            if key not in ("type", "role") or not told:
                self._field(form, key, f"{inner}.{key}", lambda value, key=key: whole({**least, key: value}), depth + 1)

    @staticmethod
    def _note(line: Line, value: Any, outcome: Outcome) -> None:
        """Keep the outcome of a value."""
        kept: list[Any] = getattr(line, outcome)
        if value not in kept:
            kept.append(value)

    def _send(self, body: Body, key: str) -> Outcome:
        """Return what the server does with a body. Refusals have to name the field."""
        reply = self.client.post(self.api.path, json=body, headers=dict(self.api.headers))
        if reply.status_code == 200:
            if self.api.path.endswith("/count_tokens"):  # It leaves out what messages leave out.
                body = {**body, "max_tokens": 1}
                reply = self.client.post("/v1/messages", json=body, headers=dict(self.api.headers))
            return "left_out" if "x-tandem-skipped" in reply.headers else "accepted"
        named = [part for part in re.split(r"[][()]", key) if part]
        if reply.status_code not in (400, 404) or not any(part in reply.text for part in named):
            self.unnamed.append(f"{self.api.path} {key} {body}: {reply.status_code} {reply.text[:300]}")
        return "refused"


def followed(told: str, build: Build) -> Build:
    """Return what builds bodies that go on behind an object of this type.

    Anthropic's calls need a result, and OpenAI's tools among the items a message.
    """
    if told not in ("tool_use", "additional_tools"):
        return build

    def made(value: Any) -> Body:
        body = build(value)
        if told == "additional_tools":
            return {**body, "input": [*body["input"], USER]}
        result = {"type": "tool_result", "tool_use_id": value.get("id", "x"), "content": "x"}
        return {**body, "messages": [*body["messages"], {"role": "user", "content": [result]}]}

    return made


# -- the page --------------------------------------------------------------------------------------------------------

HEAD = """\
# Refusals

This page lists every field of the request schemas that OpenAI and Anthropic publish, and what the server does with
it. A field that asks for something that the server cannot do gets a 400 that names the field. The fields that are
"accepted without effect" are labels, hints, and fields about a provider's caches, bills, storage and clients' own
records: no answer here depends on them. Tools that only OpenAI or Anthropic can run, and what they said in a
conversation that began there, are left out, and the reply's header `X-Tandem-Skipped` names them. null is accepted
wherever the schemas allow it. A field of an object that is refused or left out as a whole has no line of its own.

`make clients` writes this page: it sends each field to a server with the built-in model. `[x]` is an entry of a list
whose type or role is `x`, and `(x)` is an object of the type `x`.
"""


def has_effect(api: Api, name: str) -> bool:
    """Return whether a field that is accepted does anything."""
    return not any(fnmatch.fnmatchcase(name, pattern) for pattern in NO_EFFECT[api.name])


def said(api: Api, name: str, line: Line) -> str:
    """Return what becomes of a field."""
    if not line.accepted:
        return "left out" if line.left_out else "a 400"
    what = "served" if has_effect(api, name) else "accepted without effect"
    if line.left_out:
        what += f"; left out: {', '.join(f'`{json.dumps(value)}`' for value in line.left_out)}"
    refused = [value for value in line.refused if isinstance(value, str | bool | list)]
    if refused:
        what += f"; a 400: {', '.join(f'`{json.dumps(value)}`' for value in refused)}"
    elif line.refused:
        what += "; some values are a 400"
    return what


def page(walks: Iterable[Walk]) -> str:
    """Return the page."""
    lines = [HEAD, f"Schemas: `openai` {version('openai')}, `anthropic` {version('anthropic')}."]
    for walk in walks:
        lines += ["", f"## {walk.api.name}", "", f"`POST {walk.api.path}`", "", "| field | here |", "|---|---|"]
        lines += [f"| `{name}` | {said(walk.api, name, line)} |" for name, line in sorted(walk.lines.items())]
    return "\n".join(lines) + "\n"


def walked(client: httpx.Client) -> list[Walk]:
    """Return the walks through all routes of a server."""
    stored = client.post("/v1/responses", json={"model": "base", "input": "hi", "max_output_tokens": 1}).json()
    STORED["previous_response_id"] = stored["id"]
    STORED["id"] = stored["output"][0]["id"]
    return [Walk(api, client).run() for api in apis()]


def main() -> None:
    """Write the page."""
    with serving(demo_config()) as server:
        walks = walked(server.client)
    unnamed = [one for walk in walks for one in walk.unnamed]
    PAGE.write_text(page(walks), encoding="utf-8")
    print(f"{sum(len(walk.lines) for walk in walks)} fields; {len(unnamed)} answers name no field", *unnamed, sep="\n")
    sys.exit(bool(unnamed))


if __name__ == "__main__":
    main()
