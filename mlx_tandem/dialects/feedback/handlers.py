"""The handlers of the routes for feedback."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from mlx_tandem import limits
from mlx_tandem.dialects.feedback.bodies import FeedbackBody, ListQuery
from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.openai.collect import check_metadata
from mlx_tandem.dialects.route import Received
from mlx_tandem.errors import InvalidRequest, UnsupportedMedia
from mlx_tandem.generation.caller import CALLER
from mlx_tandem.training.feedback import exports, texts
from mlx_tandem.training.feedback.exports import Told, Unusable
from mlx_tandem.training.feedback.opinions import ALL, Feedback, Stored

EXPORTS = ("application/json", "application/jsonl", "application/x-ndjson")
"""Content types of exports."""

SAYS = ("thumb", "score", "preferred", "corrected", "comment")
"""The fields of which a feedback has at least one."""


async def give(front: ServerFront, body: FeedbackBody) -> dict[str, Any]:
    """Keep what somebody says of a completion, in place of what was said of the same choice before.

    Raises NotFound for a completion that is not remembered, Forbidden for a key from which nothing may be learned,
    InvalidRequest, and StorageError.
    """
    CALLER.get().check_learning()
    _check(body)
    found = front.completions.get(body.completion_id, "completion_id", CALLER.get().sees)
    for name in ("choice", "preferred"):
        if (number := getattr(body, name)) is not None and number >= len(found.choices):
            raise InvalidRequest(f"{name} is {number}, but the choices are 0 to {len(found.choices) - 1}", param=name)
    choice = body.preferred if body.preferred is not None else body.choice or 0
    prompt, answer = texts.remembered(found, choice)
    answers, preferred = ((answer,), ALL) if body.preferred is None else texts.siblings(found, choice)
    if body.preferred is not None and len(answers) < 2:
        raise InvalidRequest(
            "preferred needs several choices of one prompt; this completion has one", param="preferred"
        )
    corrected: texts.Tokens = ()
    if body.corrected is not None:
        corrected = await texts.correction_of(front, answer, body.corrected, "corrected")
        texts.check_room(front, prompt, [corrected], "corrected")
    feedback = Feedback(
        completion=found.id,
        choice=choice if body.preferred is None else ALL,
        source="api",
        created=time.time(),
        adapter="" if found.adapter is None else found.adapter.name,
        version=0 if found.adapter is None else found.adapter.version,
        prompt=prompt,
        answers=answers,
        score=body.score if body.thumb is None else float(body.thumb == "up"),
        preferred=preferred,
        corrected=corrected,
        comment=body.comment or "",
        metadata=body.metadata or {},
    )
    await _keep(front, [feedback])
    return _described(front, feedback)


def _check(body: FeedbackBody) -> None:
    """Raise InvalidRequest unless the body says something of a completion, and nothing twice."""
    if all(getattr(body, name) is None for name in SAYS):
        raise InvalidRequest(f"one of {', '.join(SAYS)} is required", param="thumb", code="missing_required_parameter")
    if body.score is not None:
        limits.check("feedback_score", body.score, "score")
    for one, other in (("thumb", "score"), ("preferred", "choice"), ("preferred", "corrected"), ("preferred", "thumb")):
        if getattr(body, one) is not None and getattr(body, other) is not None:
            raise InvalidRequest(f"give either {one} or {other}", param=other)
    if body.preferred is not None and body.score is not None:
        raise InvalidRequest("give either preferred or score", param="score")
    if body.corrected is not None and not body.corrected.strip():
        raise InvalidRequest("corrected is empty", param="corrected")
    if body.comment is not None and len(body.comment) > limits.MAX_COMMENT:
        raise InvalidRequest(f"comment has over {limits.MAX_COMMENT} characters", param="comment")
    check_metadata(body.metadata)


async def listed(front: ServerFront, query: ListQuery) -> dict[str, Any]:
    """Return a page of the feedback in the store. Raises StorageError."""
    page = await front.feedback.page(query.after, query.limit + 1, newest_first=query.order == "desc")
    shown = page[: query.limit]
    return {
        "object": "list",
        "data": await asyncio.to_thread(lambda: [_listed(front, each) for each in shown]),
        "first_id": shown[0].number if shown else None,
        "last_id": shown[-1].number if shown else None,
        "has_more": len(page) > len(shown),
    }


async def take_export(front: ServerFront, body: Received) -> dict[str, Any]:
    """Keep the feedback of an export, and say of each entry what has become of it.

    Raises InvalidRequest for what is no export, and StorageError.
    """
    if body.media not in EXPORTS or body.encoding != "identity":
        raise UnsupportedMedia(f"Content-Type must be one of {', '.join(EXPORTS)}, without a Content-Encoding")
    found = await asyncio.to_thread(_told, body.content)
    kept: list[Feedback] = []
    results: list[dict[str, Any]] = []
    for i, (id, told) in enumerate(found):
        try:
            if isinstance(told, Unusable):
                raise told
            kept.append(await _of_export(front, told, f"entry {i}"))
            results.append({"id": id, "status": "stored"})
        except (Unusable, InvalidRequest) as e:
            results.append({"id": id, "status": "skipped", "reason": str(e)})
    if kept:
        await _keep(front, kept)
    return {"object": "list", "data": results, "stored": len(kept), "skipped": len(found) - len(kept)}


def _told(body: bytes) -> list[tuple[str | None, Told | Unusable]]:
    """Return the id of each entry of an export, and what it says, or why it says nothing. Raises InvalidRequest."""
    found: list[tuple[str | None, Told | Unusable]] = []
    for entry in exports.entries(body):
        named = entry.get("id")
        id = named[:128] if isinstance(named, str) else None
        try:
            found.append((id, exports.told(entry)))
        except Unusable as e:
            found.append((id, e))
    return found


async def _of_export(front: ServerFront, told: Told, where: str) -> Feedback:
    """Return an entry of an export as feedback. Raises Unusable and InvalidRequest."""
    adapter, version = _answered_by(front, told.model)
    if told.messages is None and front.completions.knows(told.id):
        if told.score is None:
            raise Unusable("its metadata has no rating under score, rating, thumb or feedback")
        found = front.completions.get(told.id, "id")
        prompt, answer = texts.remembered(found, 0)
        answers: tuple[texts.Tokens, ...] = (answer,)
        adapter, version = ("", 0) if found.adapter is None else (found.adapter.name, found.adapter.version)
    elif told.messages is None:
        raise Unusable("it has no messages, and no completion of this id is remembered here")
    else:
        prompt = await texts.prompt_of(front, told.messages, where)
        answers = tuple([await texts.answer_of(front, text, where) for text in told.answers])
    corrected: texts.Tokens = await texts.answer_of(front, told.corrected, where) if told.corrected else ()
    texts.check_room(front, prompt, [*answers, corrected], where)
    return Feedback(
        completion=told.id[:256],
        choice=told.choice,
        source=told.source,
        created=time.time(),
        adapter=adapter,
        version=version,
        prompt=prompt,
        answers=answers,
        score=told.score,
        preferred=told.preferred,
        corrected=corrected,
        comment=told.comment,
        metadata=check_metadata(told.metadata),
    )


def _answered_by(front: ServerFront, model: str) -> tuple[str, int]:
    """Return the adapter and version that a name in an export stands for; "" and 0 for the base and without a name."""
    if not model or model in front.models.base_names:
        return "", 0
    name, _, number = model.partition("@")
    return name[:64], int(number) if number.isascii() and number.isdigit() and len(number) < 12 else 0


async def _keep(front: ServerFront, feedback: list[Feedback]) -> None:
    """Keep feedback, and count its scores in A/B tests of aliases. Raises StorageError."""
    await front.feedback.add(feedback)
    for each in feedback:
        if each.score is not None and front.completions.knows(each.completion):
            judged = front.completions.get(each.completion, "id").judged
            if judged is not None:
                await front.ab_tests.count(judged, [each.score])
    if front.teacher is not None:
        front.teacher.wake()


def _listed(front: ServerFront, stored: Stored) -> dict[str, Any]:
    return {"number": stored.number} | _described(front, stored.feedback) | {"learned": stored.learned}


def _described(front: ServerFront, feedback: Feedback) -> dict[str, Any]:
    """Return feedback for clients."""
    decode = front.tokenizer.decode
    return {
        "object": "feedback",
        "completion_id": feedback.completion,
        "choice": None if feedback.choice == ALL else feedback.choice,
        "source": feedback.source,
        "created": int(feedback.created),
        "model": feedback.adapter or front.models.id,
        "version": feedback.version,
        "score": feedback.score,
        "preferred": None if feedback.preferred == ALL else feedback.preferred,
        "answers": [decode(answer) for answer in feedback.answers],
        "corrected": decode(feedback.corrected) if feedback.corrected else None,
        "comment": feedback.comment or None,
        "metadata": feedback.metadata,
    }
