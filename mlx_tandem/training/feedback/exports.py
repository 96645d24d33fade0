"""Reads what other programs export: feedback of Open WebUI, and stored completions in OpenAI's form.

Administrators of Open WebUI export a list of feedback as JSON. An entry has the rating, 1 or -1, in `data`, the id of
the rated message in `meta`, and the whole chat in `snapshot`: its messages with the ids of their parents. A message
that was edited has its text from before in `originalContent`. Answers to the same message are siblings: a rating of 1
prefers one to the others, as in Open WebUI's own ranking.

A stored completion is a `chat.completion` object; lists of them have one object a line, or the objects in `data`. Its
`metadata`, whose values are texts, may have a rating under `score`, `rating`, `thumb` or `feedback`. OpenAI hands out
the messages apart: an object may have them in `messages`. One with messages and no rating is an example of what to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.strict_json import decode
from mlx_tandem.training.feedback.opinions import ALL, Source

WORDS: Mapping[str, float] = {
    **dict.fromkeys(("up", "thumbs_up", "thumbsup", "good", "positive", "like", "true", "1", "1.0", "+1"), 1.0),
    **dict.fromkeys(("down", "thumbs_down", "thumbsdown", "bad", "negative", "dislike", "false", "0", "0.0"), 0.0),
    **dict.fromkeys(("-1", "-1.0"), 0.0),
}
"""What ratings in words mean; case does not matter."""

KEYS = ("score", "rating", "thumb", "feedback")
"""The keys of a stored completion's metadata under which a rating is looked for, in this order."""

_OPEN, _CLOSE = "<details", "</details>"
"""Tags around thoughts and calls of tools in Open WebUI's messages, which it does not send back to the model."""


FORMS = "feedback of Open WebUI (data, meta, snapshot) or chat.completion object"


class Told(Struct, frozen=True):
    """An entry of an export in plain texts. `messages` is the conversation before the answer; None: it has none."""

    id: str
    source: Source
    model: str
    messages: list[dict[str, Any]] | None
    answers: tuple[str, ...]
    choice: int = 0
    preferred: int = ALL
    score: float | None = None
    corrected: str = ""
    comment: str = ""
    metadata: dict[str, Any] = {}


class Unusable(Exception):
    """An entry says nothing that can be learned from; the message says why."""


def entries(body: bytes) -> list[dict[str, Any]]:
    """Return the entries of an export: a list, an object with a list in `data`, one object, or one object a line.

    Raises InvalidRequest.
    """
    try:
        value: Any = decode(body, Any)
    except InvalidRequest:
        lines = [line for line in body.splitlines() if line.strip()]
        if len(lines) < 2:
            raise
        value = [_line(line, i) for i, line in enumerate(lines, 1)]
    if isinstance(value, dict) and isinstance(value.get("data"), list) and value.get("object") == "list":
        value = value["data"]
    found = value if isinstance(value, list) else [value]
    if not 0 < len(found) <= limits.MAX_FEEDBACK:
        raise InvalidRequest(f"an export has 1 to {limits.MAX_FEEDBACK} entries, not {len(found)}")
    for i, entry in enumerate(found):
        if not isinstance(entry, dict):
            raise InvalidRequest(f"entry {i} is no JSON object", code="invalid_type")
    if not any(_is_stored_completion(entry) or _is_open_webui(entry) for entry in found):
        raise InvalidRequest(f"this is no export: no entry is {FORMS}")
    return found


def _is_stored_completion(entry: Mapping[str, Any]) -> bool:
    return entry.get("object") == "chat.completion"


def _is_open_webui(entry: Mapping[str, Any]) -> bool:
    return isinstance(entry.get("data"), dict) and isinstance(entry.get("meta"), dict)


def _line(line: bytes, number: int) -> Any:
    try:
        return decode(line, Any)
    except InvalidRequest as e:
        raise InvalidRequest(f"line {number}: {e.message}", code=e.code) from e


def told(entry: Mapping[str, Any]) -> Told:
    """Return what an entry says. Raises Unusable."""
    if _is_stored_completion(entry):
        return _stored_completion(entry)
    if _is_open_webui(entry):
        return _open_webui(entry)
    raise Unusable(f"it is no {FORMS}")


# -- Open WebUI -------------------------------------------------------------------------------------------------------


def _open_webui(entry: Mapping[str, Any]) -> Told:
    data, meta = entry["data"], entry["meta"]
    chat = _inner(entry, "snapshot", "chat", "chat")
    messages = _inner(chat, "history", "messages")
    message = messages.get(str(meta.get("message_id")))
    if not isinstance(message, dict):
        raise Unusable("its snapshot does not have the rated message; export the feedback with its snapshots")
    said, edited = _said(message, "originalContent"), _said(message, "content")
    score = WORDS.get(str(data.get("rating")))
    if score is None and not said:
        raise Unusable("it has no rating, and the answer was not edited")
    others = [_said(s, "originalContent") or _said(s, "content") for s in _siblings(messages, message)]
    others = [text for text in dict.fromkeys(others) if text and text != (said or edited)][:MOST_SIBLINGS]
    prefers = score == 1.0 and bool(others) and not said
    answer = said or edited
    if not answer:
        raise Unusable("the rated message is empty")
    return Told(
        id=_text(entry.get("id")) or str(meta.get("message_id")),
        source="open_webui",
        model=_text(data.get("model_id")) or _text(message.get("model")),
        messages=_before(messages, message, _text(_inner(chat, "params").get("system"))),
        answers=(answer, *others) if prefers else (answer,),
        choice=ALL if prefers else 0,
        preferred=0 if prefers else ALL,
        score=score if not said else None,
        corrected=edited if said else "",
        comment=_text(data.get("comment"))[: limits.MAX_COMMENT],
        metadata={k: v for k in ("reason", "tags") if (v := data.get(k)) not in (None, "", [])},
    )


def _inner(value: Any, *keys: str) -> Mapping[str, Any]:
    """Return the object at the end of a path of keys; an empty one where there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


MOST_SIBLINGS = 16
"""Other answers to the same message that a preference is learned against."""


def _siblings(messages: Mapping[str, Any], message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the other answers to the message that this one answers."""
    children = _inner(messages, _text(message.get("parentId"))).get("childrenIds")
    for id in children if isinstance(children, list) else ():
        other = messages.get(id) if isinstance(id, str) else None
        if isinstance(other, dict) and other is not message and other.get("role") == "assistant":
            yield other


def _before(messages: Mapping[str, Any], message: Mapping[str, Any], system: str) -> list[dict[str, Any]]:
    """Return the conversation up to a message, from its parents. Raises Unusable."""
    found: list[dict[str, Any]] = []
    seen: set[str] = set()
    id = _text(message.get("parentId"))
    while isinstance(at := messages.get(id), dict) and len(found) <= limits.MAX_MESSAGES:
        if id in seen:
            raise Unusable("the conversation is a loop: a message is among those before it")
        seen.add(id)
        if at.get("files"):
            raise Unusable("the conversation has files, whose content the export does not have")
        found.append({"role": _text(at.get("role")), "content": _said(at, "content")})
        id = _text(at.get("parentId"))
    if not found:
        raise Unusable("its snapshot does not have the question")
    if len(found) > limits.MAX_MESSAGES:
        raise Unusable(f"the conversation has over {limits.MAX_MESSAGES} messages")
    return [*([{"role": "system", "content": system}] if system else []), *reversed(found)]


def _said(message: Mapping[str, Any], key: str) -> str:
    """Return a text of a message without its details: what lies between _OPEN and the next _CLOSE."""
    text, kept, at = _text(message.get(key)), list[str](), 0
    while (begin := text.find(_OPEN, at)) >= 0 and (end := text.find(_CLOSE, begin)) >= 0:
        kept.append(text[at:begin])
        at = end + len(_CLOSE)
    return "".join([*kept, text[at:]]).strip()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


# -- stored completions -----------------------------------------------------------------------------------------------


def _stored_completion(entry: Mapping[str, Any]) -> Told:
    metadata = _inner(entry, "metadata")
    messages = entry.get("messages")
    answers = _choices(entry.get("choices"))
    if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        if messages[-1].get("role") == "assistant":  # Some list the answer after its question.
            messages = messages[:-1]
    else:
        messages = None
    id = _text(entry.get("id"))
    if not id or not answers:
        raise Unusable("it has no id, or no choice with a text")
    score = next((rating for key in KEYS if (rating := _rating(metadata.get(key))) is not None), None)
    return Told(
        id=id,
        source="stored_completion",
        model=_text(entry.get("model")),
        messages=messages,
        answers=answers,
        score=score,
        corrected=answers[0] if score is None else "",
        metadata=dict(metadata),
    )


def _choices(choices: Any) -> tuple[str, ...]:
    """Return the text of the first choice; () where it has none, or calls tools."""
    first = choices[0] if isinstance(choices, list) and choices else None
    message = _inner(first, "message")
    text = _text(message.get("content"))
    return (text,) if text and not message.get("tool_calls") else ()


def _rating(value: Any) -> float | None:
    """Return a rating as a score from 0 to 1; None where it is none."""
    said = str(value).strip().lower()
    if said in WORDS:
        return WORDS[said]
    try:
        number = float(said)
    except ValueError:
        return None
    return number if 0.0 <= number <= 1.0 else None
