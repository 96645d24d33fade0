"""Turns in any order under templates that can take some orders only."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.generation.messages import chat_messages
from mlx_tandem.generation.templates.client import ChatTemplate
from mlx_tandem.generation.templates.turn_forms import TurnForm
from tests.unit.generation import family_templates as families
from tests.unit.text_tools import byte_level, template_here

FORMS = {
    "TOLERANT": TurnForm(),
    "SYSTEM_FIRST": TurnForm("first", needs_user=True),
    "ALTERNATING": TurnForm("first", alternates=True, filler="OK."),
    "SYSTEM_LATE": TurnForm("first", alternates=True, ids="short"),
    "NO_SYSTEM": TurnForm("nowhere", alternates=True, calls="none", early_results=False),
    "SYSTEM_IN_USER": TurnForm("first", alternates=True, calls="none", early_results=False),
    "ONE_CALL": TurnForm(calls="one"),
    "SILENT": TurnForm("first", calls="one", early_results=False),
    "GATHERING": TurnForm("beginning", ids="given"),
}


@cache
def template(family: str) -> ChatTemplate:
    return template_here(getattr(families, family), byte_level())


def rendered(family: str, messages: Sequence[Any], **options: Any) -> str:
    options = {"add_generation_prompt": False, **options}
    parts = asyncio.run(template(family).render(chat_messages(messages, images=True), options))
    return "".join(text for text, _ in parts)


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(*ids: str, **more: Any) -> dict[str, Any]:
    calls = [{"id": id, "type": "function", "function": {"name": f"f_{id}", "arguments": {"say": id}}} for id in ids]
    return said("assistant", "", tool_calls=calls, **more)


def result(id: str, content: str) -> dict[str, Any]:
    return said("tool", content, tool_call_id=id)


@pytest.mark.parametrize(("family", "form"), FORMS.items(), ids=list(FORMS))
def test_what_each_family_can_take_is_found(family: str, form: TurnForm) -> None:
    assert template(family)._turns == form


# -- any sequence of turns

KINDS = ["system", "developer", "user", "assistant", "call", "calls", "unanswered", "result"]
SEQUENCES = st.lists(st.sampled_from(KINDS), min_size=1, max_size=12)


def groups(kinds: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Turns, each with what belongs to it: a call with its result. Every text is a word of its own."""
    made: list[list[dict[str, Any]]] = []
    for i, kind in enumerate(kinds):
        word = f"word{i:02}"
        ids = {"call": [word], "unanswered": [word], "calls": [f"{word}a", f"{word}b"]}.get(kind, [])
        if kind == "result":
            made.append([result(f"lost{word}", word)])
        elif ids:
            answers = [result(id, f"r{id}") for id in ids] if kind != "unanswered" else []
            made.append([call(*ids), *reversed(answers)])
        else:
            made.append([said(kind, word)])
    return made


def words(conversation: Sequence[dict[str, Any]]) -> list[str]:
    return [message["content"] for message in conversation if message["content"]]


@pytest.mark.promise("E12")
@pytest.mark.parametrize("family", list(FORMS))
@given(kinds=SEQUENCES)
@settings(max_examples=40, deadline=None)
def test_every_text_of_any_conversation_is_printed_once_and_in_order(family: str, kinds: list[str]) -> None:
    own = [*groups(kinds), [said("user", "last")]]
    conversation = [message for group in own for message in group]
    text = rendered(family, conversation)
    ordered = chat_messages(conversation)
    for word in words(ordered):
        assert len(re.findall(rf"\b{word}\b", text)) == 1
    beginning = next(i for i, message in enumerate(ordered) if message["role"] != "system")
    turns = [
        message for message in ordered[beginning:] if message["role"] != "tool" or "lost" in message["tool_call_id"]
    ]
    places = [re.search(rf"\b{word}\b", text).start() for word in words(turns)]  # type: ignore[union-attr]
    assert places == sorted(places)
    results = [word for word in words(ordered) if word.startswith("r")]
    places = [text.index(word) for word in results]
    assert places == sorted(places)
    if template(family)._turns.calls != "none":
        for message in ordered:
            for made in message.get("tool_calls", ()):
                assert text.count(f"f_{made['id']}") >= 1


@pytest.mark.parametrize("family", [family for family in FORMS if family != "SYSTEM_LATE"])
@given(kinds=SEQUENCES, data=st.data())
@settings(max_examples=30, deadline=None)
def test_another_turn_changes_nothing_before_it(family: str, kinds: list[str], data: st.DataObject) -> None:
    if family == "SYSTEM_FIRST":
        kinds = ["user", *kinds]  # A conversation without a user's turn gets one until there is one.
    own = groups(kinds)
    count = data.draw(st.integers(1, len(own)))
    before = [message for group in own[:count] for message in group]
    whole = rendered(family, [message for group in own for message in group])
    text = rendered(family, before)
    spoken = [*words(chat_messages(before)), *(f"f_{c['id']}" for m in before for c in m.get("tool_calls", ()))]
    end = max(text.rfind(word) + len(word) for word in spoken)
    assert whole[:end] == text[:end]


@pytest.mark.parametrize("family", [family for family in FORMS if family != "SYSTEM_LATE"])
@given(
    kinds=SEQUENCES, answer=st.sampled_from(["assistant", "call"]), new=st.sampled_from(["user", "system", "developer"])
)
@settings(max_examples=20, deadline=None)
def test_what_follows_an_answer_comes_behind_all_of_it(family: str, kinds: list[str], answer: str, new: str) -> None:
    """Conversations that are learned from go on behind the tokens of the answer."""
    *before, (said_last, *results) = groups(["user", *kinds, answer])
    through = [message for group in before for message in group] + [said_last]
    assert rendered(family, [*through, *results, said(new, "next")]).startswith(rendered(family, through))


# -- what it looks like


def test_a_tolerant_template_gets_everything_as_it_is() -> None:
    conversation = [said(role, role[0]) for role in ("system", "user", "user", "system", "assistant", "assistant")]
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in conversation)
    assert rendered("TOLERANT", conversation) == turns


def test_system_messages_are_joined_at_the_beginning_and_marked_later() -> None:
    conversation = [
        *(said("system", "Be kind."), said("developer", "Be brief."), said("user", "Hi.")),
        *(said("developer", "Speak French."), said("assistant", "Salut."), said("system", "Now German.")),
    ]
    assert rendered("SYSTEM_FIRST", conversation) == (
        "<|im_start|>system\nBe kind.\n\nBe brief.<|im_end|>\n<|im_start|>user\nHi.<|im_end|>\n"
        "<|im_start|>user\n<system>\nSpeak French.\n</system><|im_end|>\n<|im_start|>assistant\nSalut.<|im_end|>\n"
        "<|im_start|>user\n<system>\nNow German.\n</system><|im_end|>\n"
    )
    assert rendered("ALTERNATING", conversation) == (
        "[SYSTEM]Be kind.\n\nBe brief.[/SYSTEM][INST]Hi.\n\n<system>\nSpeak French.\n</system>[/INST]"
        "Salut.<|im_end|>[INST]<system>\nNow German.\n</system>[/INST]"
    )
    assert rendered("NO_SYSTEM", conversation[:3], add_generation_prompt=True) == (
        "<|im_start|>user\n<system>\nBe kind.\n\nBe brief.\n</system>\n\nHi.<|im_end|>\n<|im_start|>model\n"
    )


def test_a_template_that_gathers_system_messages_gets_later_ones_in_their_place() -> None:
    conversation = [said("system", "a"), said("system", "b"), said("user", "c"), said("system", "d")]
    assert rendered("GATHERING", conversation) == "a\n\nb<user>c<user><system>\nd\n</system>"


def test_a_system_message_behind_a_result_does_not_end_the_steps_of_an_answer() -> None:
    """Templates leave out the thoughts before the last turn of the user, and a prompt that changes is read again."""
    source = (
        "{% set ns = namespace(asked=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.asked = loop.index %}{% endif %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('not here') }}{% endif %}"
        "{% endfor %}{% for m in messages %}[{{ m.role }}]"
        "{% if loop.index > ns.asked and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    )
    made = template_here(source, byte_level())
    steps = [said("user", "Go."), call("x", reasoning_content="Hm."), result("x", "3")]

    def text(*more: dict[str, Any]) -> str:
        parts = asyncio.run(made.render(chat_messages([*steps, *more]), {}))
        return "".join(text for text, _ in parts)

    assert text(said("system", "Hurry."), said("developer", "Now.")) == (
        text() + "\n\n<system>\nHurry.\n</system>\n\n<system>\nNow.\n</system>"
    )
    assert "Hm." in text() and "Hm." not in text(said("user", "And?"))


def test_turns_alternate_around_calls() -> None:
    conversation = [
        said("assistant", "Hello!"),
        said("user", "Add."),
        call("x"),
        result("x", "3"),
        said("user", "And?"),
    ]
    assert rendered("ALTERNATING", conversation) == (
        '[INST][/INST]Hello!<|im_end|>[INST]Add.[/INST][call f_x {"say": "x"}]<|im_end|>[RESULT]3[/RESULT]'
        "OK.<|im_end|>[INST]And?[/INST]"
    )


def test_thoughts_stay_when_answers_are_joined_and_calls_stay_apart() -> None:
    sent = [said("user", "Hi."), *(said("assistant", text, reasoning_content=text * 2) for text in "ab"), call("x")]
    _, made, called = TurnForm(alternates=True).messages(chat_messages(sent))
    assert (made["content"], made["reasoning_content"], made["thinking"]) == ("a\n\nb", "aa\n\nbb", "aa\n\nbb")
    assert called["tool_calls"][0]["id"] == "x", "many templates leave out the text beside calls"


def test_calls_and_results_have_the_ids_that_a_template_wants() -> None:
    plain = [{"function": {"name": name, "arguments": "{}"}} for name in ("f", "g")]
    conversation = [
        *(said("user", "Go."), said("assistant", "", tool_calls=plain)),
        *(said("tool", "two", name="g"), said("tool", "one", name="f")),
        *(
            call("toolu_0123456789"),
            result("toolu_0123456789", "three"),
            call("Ab3456789"),
            result("Ab3456789", "four"),
        ),
    ]
    text = rendered("SYSTEM_LATE", conversation)
    ids = re.findall(r"\[([a-zA-Z0-9]{9})\]", text)
    assert (ids[0], ids[1], ids[3]) == ("call00001", "call00002", "Ab3456789")
    assert re.findall(r"\[RESULT (.{9})\](\w+)", text) == list(zip(ids, ("one", "two", "three", "four"), strict=True))
    text = rendered("GATHERING", conversation)
    assert re.findall(r"\((\w+)\)", text) == ["call00001", "call00002", "toolu_0123456789", "Ab3456789"]


@pytest.mark.parametrize("family", list(FORMS))
def test_a_conversation_without_a_question_is_rendered(family: str) -> None:
    for roles in ("system", "assistant", "system assistant", "system developer", "developer assistant assistant"):
        text = rendered(family, [said(role, f"word{i}") for i, role in enumerate(roles.split())])
        assert family == "SYSTEM_LATE" or text.count("word") == len(roles.split())


def test_what_is_said_beside_parallel_calls_is_said_once() -> None:
    sent = chat_messages([said("user", "Go."), call("a", "b", reasoning_content="Hm.") | {"content": "Well."}])
    _, first, second = TurnForm(calls="one").messages(sent)
    assert (first["content"], first["reasoning_content"]) == ("Well.", "Hm.")
    assert second["content"] == "" and "reasoning_content" not in second


def test_many_long_turns_are_joined_in_one_pass() -> None:
    (made,) = TurnForm(alternates=True).messages([said("user", "x" * 4000) for _ in range(4096)])
    assert len(made["content"]) == 4096 * 4002 - 2


@pytest.mark.parametrize("family", ["ONE_CALL", "SILENT"])
def test_parallel_calls_are_told_one_after_another(family: str) -> None:
    conversation = [said("user", "Go."), call("a", "b", "c"), result("c", "three"), result("a", "one")]
    text = rendered(family, conversation)
    places = [text.index(word) for word in ("f_a", "one", "f_b", "No result.", "f_c", "three")]
    assert places == sorted(places)


def test_images_keep_their_places_in_joined_turns() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    words = {"type": "text", "text": "this?"}
    conversation = [said("user", "What is"), said("system", "Look."), said("user", [picture, words])]
    assert rendered("ALTERNATING", [*conversation, said("user", "Well?")]) == (
        "[INST]What is\n\n<system>\nLook.\n</system>\n\n[IMG]this?\n\nWell?[/INST]"
    )


@pytest.mark.parametrize("family", list(FORMS))
def test_the_last_message_is_continued_whatever_it_joins(family: str) -> None:
    conversation = [said("system", "s"), said("user", "Hi."), said("assistant", "One,"), said("assistant", "two,")]
    text = rendered(family, conversation, continue_final_message=True)
    assert text.endswith("two,") and text.count("One,") == 1
    if family != "SYSTEM_LATE":
        assert rendered(family, [*conversation[:3], said("assistant", "two, three.")]).startswith(text)


def test_a_template_whose_form_cannot_be_told_gets_what_was_sent() -> None:
    for source in ("{{ messages[0].content }}", "{{ raise_exception('no') }}", "fixed"):
        made = template_here(source, byte_level())
        assert made._turns == TurnForm(calls="none")
        conversation = [said("user", "a"), said("system", "b"), said("user", "c")]
        assert made._turns.messages(conversation) == conversation
