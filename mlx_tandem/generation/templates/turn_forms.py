"""The order of turns that a chat template accepts, which is found by rendering conversations.

Clients send system messages anywhere, several messages of one role after another, and results of tools without their
calls. Many templates refuse some of these or leave them out. Only what a template does not accept is changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from mlx_tandem.generation.parts import Part
from mlx_tandem.generation.templates.call_forms import FUNCTION, call_of
from mlx_tandem.generation.tool_history import Message, calls_of, with_ids, with_results

BETWEEN = "\n\n"
"""The text between messages that become one."""

THOUGHTS = ("reasoning_content", "thinking")
"""The fields of thoughts, which are joined like contents."""

TAGS: Mapping[str, str] = {"system": "system", "tool": "tool_result"}
"""The tags that mark a message of each role as such where it becomes text of the user."""

_EMPTY: Message = {"role": "user", "content": ""}


class TurnForm(NamedTuple):
    """The turns that a template accepts. The default accepts everything.

    systems: where system messages may stand: anywhere, several at the beginning, one at the beginning, or nowhere.
    alternates: turns of the user and of the assistant have to alternate, the user's first; calls may stand between.
    filler: the text of the turns that are inserted so that roles alternate.
    needs_user: there has to be a turn of the user.
    calls: how many calls of tools a message may have, if the template prints calls at all.
    early_results: results of tools may stand where no call is before them.
    ids: whether calls and results may be without ids; whether these have to be short.
    """

    systems: Literal["anywhere", "beginning", "first", "nowhere"] = "anywhere"
    alternates: bool = False
    filler: str = ""
    needs_user: bool = False
    calls: Literal["many", "one", "none"] = "many"
    early_results: bool = True
    ids: Literal["any", "given", "short"] = "any"

    def messages(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the conversation in this form. Every text of it stays, and they keep their order."""
        if self == TurnForm() or not messages:
            return messages
        if self.ids != "any":
            messages = with_ids(messages, short=self.ids == "short")
        turns = self._in_roles(_apart(messages) if self.calls == "one" else messages)
        if self.alternates:
            turns = self._alternating(turns)
        elif self.needs_user and all(turn["role"] != "user" for turn in turns):
            turns.insert(_beginning(turns), _EMPTY)
        return turns

    def _in_roles(self, messages: Iterable[Message]) -> list[Message]:
        """Return the messages. A message whose role the template does not accept at that place gets another role.

        A later system message is text of the user, or of the result that it follows: many templates leave out thoughts
        of the steps before the user's last turn.
        """
        turns: list[list[Message]] = []  # each with the messages that are joined
        is_opening, has_called = self.systems != "anywhere", False
        for message in messages:
            role = message["role"]
            is_opening = is_opening and role == "system"
            if role == "system" and self.systems != "anywhere":
                follows = turns[-1][0]["role"] if turns else ""
                if is_opening and follows and self.systems != "beginning":
                    turns[-1].append(message)
                elif not is_opening and follows == "tool":
                    turns[-1].append({**_of_user(message), "role": "tool"})
                    continue
                else:
                    turns.append([message if is_opening else _of_user(message)])
            else:
                is_early = role == "tool" and not (self.early_results or has_called)
                turns.append([_of_user(message) if is_early else message])
            has_called = self._calls(message) or (role == "tool" and has_called)
        made = [_joined(turn) for turn in turns]
        if self.systems == "nowhere" and made[0]["role"] == "system":
            made[0] = _of_user(made[0])
        return made

    def _alternating(self, messages: Iterable[Message]) -> list[Message]:
        """Return the messages with turns of one role joined, or with turns of the other role between them."""
        turns: list[list[Message]] = []  # each with the messages that are joined
        last = ""  # the role that counts; messages with calls, and their results, do not count
        for message in messages:
            role = message["role"]
            counts = role == "user" or (role == "assistant" and not self._calls(message))
            if counts and turns and turns[-1][0]["role"] == role and not self._calls(turns[-1][0]):
                turns[-1].append(message)
                continue
            if not last and role not in ("system", "user"):
                turns.append([_EMPTY])
                last = "user"
            if counts and role == last:
                turns.append([{"role": "assistant", "content": self.filler} if role == "user" else _EMPTY])
            turns.append([message])
            last = role if counts else last
        return [_joined(turn) for turn in (turns if last else [*turns, [_EMPTY]])]

    def _calls(self, message: Message) -> bool:
        """Return whether the template prints calls of this message."""
        return self.calls != "none" and bool(message.get("tool_calls"))


def _apart(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages with each call in a message of its own, which its result follows."""
    for message, own, surplus in with_results(messages):
        if not own:
            yield message
        for call, result in zip(calls_of(message), own, strict=True):
            yield {**message, "tool_calls": [call]}
            message = {"role": message["role"], "content": ""}
            if result is not None:
                yield result
        yield from surplus


def _beginning(messages: Sequence[Message]) -> int:
    """Return the number of system messages at the beginning."""
    return next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))


def _of_user(message: Message) -> Message:
    """Return a message as one of the user, in whose text tags say whose it is."""
    tag = TAGS[message["role"]]
    content = message["content"]
    if isinstance(content, str):
        return {"role": "user", "content": f"<{tag}>\n{content}\n</{tag}>"}
    ends = ({"type": "text", "text": f"<{tag}>\n"}, {"type": "text", "text": f"\n</{tag}>"})
    return {"role": "user", "content": [ends[0], *content, ends[1]]}


def _joined(messages: Sequence[Message]) -> Message:
    """Return messages of one role as one."""
    if len(messages) == 1:
        return messages[0]
    made = {key: value for message in messages for key, value in message.items()}
    made["content"] = _contents([message["content"] for message in messages if message["content"]])
    for name in THOUGHTS:
        if thoughts := [message[name] for message in messages if message.get(name)]:
            made[name] = BETWEEN.join(thoughts)
    return made


def _contents(contents: Sequence[Any]) -> Any:
    """Return contents, which are texts or lists of parts, as one."""
    if all(isinstance(content, str) for content in contents):
        return BETWEEN.join(contents)
    parts: list[Any] = []
    for content in contents:
        parts += [{"type": "text", "text": BETWEEN}] if parts else []
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


class Probe(NamedTuple):
    """A conversation that shows what a template accepts, and values of `TurnForm` to try, the usual ones first."""

    conversation: Sequence[Message]
    values: Sequence[Mapping[str, Any]]

    @property
    def has_calls(self) -> bool:
        """Whether there are calls of tools in the conversation."""
        return any(map(calls_of, self.conversation))


def probes(calls: bool) -> Iterator[Probe]:
    """Yield the probes by which the form is found, in their order.

    `calls` says whether the template prints tool calls.
    """
    if calls:
        asked = _conversation("user call result assistant user call result assistant user")
        asked = [_without_id(m) if i < 3 else _with_long_id(m) for i, m in enumerate(asked)]
        yield Probe(asked, tuple({"ids": ids} for ids in ("any", "given", "short")))
        asked = _conversation("user calls assistant user")
        yield Probe(asked, ({"calls": "many"}, {"calls": "one"}))
    roles = "assistant user user assistant assistant user" + " call result user" * calls
    kinds = ({"alternates": False}, {"alternates": True}, {"alternates": True, "filler": "OK."})
    yield Probe(_conversation(roles), kinds)
    asked = _conversation("system system user assistant system user system assistant user")
    yield Probe(asked, tuple({"systems": kind} for kind in ("anywhere", "beginning", "first", "nowhere")))
    yield Probe(_conversation("system"), ({"needs_user": False}, {"needs_user": True}))
    asked = _conversation("user result user assistant user")
    yield Probe(asked, ({"early_results": True}, {"early_results": False}))


def prints_all(parts: Sequence[Part], conversation: Sequence[Message]) -> bool:
    """Return whether a rendering shows each text of a conversation once, and those behind the beginning in order."""
    text = "".join(text for text, _ in parts)
    said = [[*_texts(message)] for message in conversation]
    behind = [text.find(word) for words in said[_beginning(conversation) :] for word in words]
    return all(text.count(word) == 1 for words in said for word in words) and behind == sorted(behind)


def _conversation(roles: str) -> list[Message]:
    """Return a conversation of turns of these roles, each of which says something else."""
    made: list[Message] = []
    for i, kind in enumerate(roles.split()):
        word = f"tandem_{i}"
        if kind in ("call", "calls"):
            words = [word] if kind == "call" else [f"{word}_first", f"{word}_second"]
            calls = [call_of(f"call{i:03}{k:02}", {"tandem_key": said}) for k, said in enumerate(words)]
            made.append({"role": "assistant", "content": "", "tool_calls": calls})
        elif kind == "result":
            id = f"call{i - 1:03}00"
            made.append({"role": "tool", "name": FUNCTION["name"], "tool_call_id": id, "content": word})
        else:
            made.append({"role": kind, "content": word})
    return made


def _without_id(message: Message) -> Message:
    """Return a message whose call or result has no id."""
    made = {key: value for key, value in message.items() if key != "tool_call_id"}
    calls = [{key: value for key, value in call.items() if key != "id"} for call in calls_of(message)]
    return made | ({"tool_calls": calls} if calls else {})


def _with_long_id(message: Message) -> Message:
    """Return a message whose call or result has an id in the form of other servers."""
    id = {"id": "call_0123456789-abcdef"}
    made = {**message, "tool_call_id": id["id"]} if message["role"] == "tool" else {**message}
    calls = [call | id for call in calls_of(message)]
    return made | ({"tool_calls": calls} if calls else {})


def _texts(message: Message) -> Iterator[str]:
    """Yield what a message of such a conversation says."""
    if message["content"]:
        yield message["content"]
    for call in calls_of(message):
        yield call["function"]["arguments"]["tandem_key"]
