"""Calls and results of earlier turns, as clients send them back: broken arguments, results in any order."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.generation.messages import chat_messages, image_sources
from mlx_tandem.generation.tool_history import NO_RESULT, arguments_object, in_call_order, with_missing_results
from mlx_tandem.isolation.frames import encode

USER = {"role": "user", "content": "Go."}


def call(*ids: str | None, name: str = "f") -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": f"{name}{i}", "arguments": "{}"}} for i in range(len(ids))]
    given = [made if id is None else made | {"id": id} for made, id in zip(calls, ids, strict=True)]
    return {"role": "assistant", "content": None, "tool_calls": given}


def result(id: str | None, content: str, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, **({} if id is None else {"tool_call_id": id}), **more}


def told(*messages: dict[str, Any]) -> list[str]:
    """What a template is given to print, in its order."""
    made = with_missing_results(chat_messages([USER, *messages]))
    return [message["content"] or message["role"] for message in made[1:]]


# -- arguments


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (None, {}),
        ("", {}),
        (" \n", {}),
        ("null", {}),
        ('""', {}),
        ('"{\\"city\\": \\"Oslo\\"}"', {"city": "Oslo"}),
        ({"city": None}, {"city": None}),
        ('{"city": "Os', {"city": "Os"}),
        ('{"city": "Os\\', {"city": "Os"}),
        ('{"city": "C:\\\\', {"city": "C:\\"}),
        ('{"city": "Os\\u00', {"city": "Os"}),
        ('{"city": "Os\\ud83d', {"city": "Os"}),
        ('{"city": "Os\\ud83d\\ude', {"city": "Os"}),
        ('{"city": "Oslo"', {"city": "Oslo"}),
        ('{"city": "Oslo", ', {"city": "Oslo"}),
        ('{"city": "Oslo", "da', {"city": "Oslo"}),
        ('{"city": "Oslo", "days": ', {"city": "Oslo"}),
        ('{"city": "Oslo", "days": tr', {"city": "Oslo"}),
        ('{"city": "Oslo", "days": 1.', {"city": "Oslo"}),
        ('{"days": [1, {"of": "Ma', {"days": [1, {"of": "Ma"}]}),
        ('{"days": [1, {"o', {"days": [1, {}]}),
        ('{"text": "one\ntwo', {"text": "one\ntwo"}),
        ("{", {}),
        ("[1, 2]", {"arguments": [1, 2]}),
        ([1, 2], {"arguments": [1, 2]}),
        ("3", {"arguments": 3}),
        (False, {"arguments": False}),
        ("Oslo", {"arguments": "Oslo"}),
        ("{city: Oslo}", {"arguments": "{city: Oslo}"}),
        ('{"a": 1}}', {"arguments": '{"a": 1}}'}),
        ('{"a": 1 "b": 2', {"arguments": '{"a": 1 "b": 2'}),
        ('{"n": 99999999999999999999, "m": 1e999, "k": NaN}', {"n": "99999999999999999999", "m": "1e999", "k": "NaN"}),
        ('{"half": "\\ud83d"}', {"arguments": '{"half": "\\ud83d"}'}),
    ],
)
def test_arguments_become_an_object(given: Any, read: dict[str, Any]) -> None:
    assert arguments_object(given) == read


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=10,
)


def is_begun(part: Any, whole: Any) -> bool:
    """Whether a value may be what came of another one that was cut off."""
    if isinstance(part, dict) and isinstance(whole, dict):
        pairs = list(zip(part.items(), whole.items(), strict=False))
        same = all(a == b for a, b in pairs[:-1])
        return len(part) <= len(whole) and same and all(a[0] == b[0] and is_begun(a[1], b[1]) for a, b in pairs[-1:])
    if isinstance(part, list) and isinstance(whole, list):
        same = part[:-1] == whole[: max(len(part) - 1, 0)]
        return len(part) <= len(whole) and same and all(map(is_begun, part[-1:], whole[len(part) - 1 : len(part)]))
    if isinstance(part, str) and isinstance(whole, str):
        return whole.startswith(part)
    return type(part) is type(whole)  # a number may be cut in its digits


@given(value=st.dictionaries(st.text(max_size=6), VALUES, max_size=4), ascii=st.booleans(), data=st.data())
@settings(max_examples=300, deadline=None)
def test_arguments_that_were_cut_off_keep_what_came_of_them(value: dict[str, Any], ascii: bool, data: Any) -> None:
    text = json.dumps(value, ensure_ascii=ascii)
    assert arguments_object(text) == value
    read = arguments_object(text[: data.draw(st.integers(1, len(text)))])
    assert is_begun(read, value) and encode(read)


@pytest.mark.promise("E12")
@given(text=st.text(alphabet='{}[]",:\\u0d8 1aé\n', max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_arguments_become_an_object_that_can_be_sent_on(text: str) -> None:
    read = arguments_object(text)
    assert isinstance(read, dict) and encode(read)


def test_long_and_deep_arguments_are_read_in_one_pass() -> None:
    for text in ('{"a": "' + "x" * 2_000_000, '{"a":' * 100_000, '{"a": [' + "1, " * 40_000, '{"' + "\\" * 1_000_000):
        assert isinstance(arguments_object(text), dict)


@pytest.mark.parametrize("form", ["call", "function_call", "nothing"])
def test_every_form_of_a_call_has_arguments_that_are_an_object(form: str) -> None:
    function: dict[str, Any] = {"name": "f"} if form == "nothing" else {"name": "f", "arguments": '{"a": "b'}
    key = (
        {"function_call": function} if form == "function_call" else {"tool_calls": [{"id": "1", "function": function}]}
    )
    _, made = chat_messages([USER, {"role": "assistant", **key}])
    assert made["tool_calls"][0]["function"]["arguments"] == ({} if form == "nothing" else {"a": "b"})


# -- results


@given(order=st.permutations(range(4)))
def test_results_come_in_the_order_of_their_calls(order: list[int]) -> None:
    results = [result(f"c{i}", f"r{i}") for i in range(4)]
    sent = [call("c0", "c1", "c2", "c3"), *(results[i] for i in order), {"role": "user", "content": "So?"}]
    assert told(*sent) == ["assistant", "r0", "r1", "r2", "r3", "So?"]


def test_turns_with_the_same_ids_do_not_mix() -> None:
    turn = [call("a", "b"), result("b", "2"), result("a", "1")]
    again = [call("b", "a"), result("a", "4"), result("b", "3"), {"role": "assistant", "content": "Done."}]
    assert told(*turn, *again) == ["assistant", "1", "2", "assistant", "3", "4", "Done."]


@pytest.mark.parametrize(
    ("sent", "printed"),
    [
        ([call("a", "b"), result("b", "2")], ["assistant", NO_RESULT, "2"]),
        ([call("a", "b"), result("a", "1")], ["assistant", "1"]),
        ([call("a", "b"), {"role": "user", "content": "Stop."}], ["assistant", "Stop."]),
        ([call("a", "b", "c"), result("c", "3")], ["assistant", NO_RESULT, NO_RESULT, "3"]),
        ([call("a"), result("a", "1"), result("a", "again")], ["assistant", "1", "again"]),
        ([call("a", "b"), result("a", "1"), result("a", "again"), result("b", "2")], ["assistant", "1", "2", "again"]),
        ([call("a", "b"), result("x", "2?"), result("a", "1")], ["assistant", "1", "2?"]),
        ([call("a", "a"), result("a", "1"), result("a", "2")], ["assistant", "1", "2"]),
        ([call(None, None), result(None, "2", name="f1"), result(None, "1", name="f0")], ["assistant", "1", "2"]),
        ([call(None, None), result(None, "1"), result(None, "2")], ["assistant", "1", "2"]),
        ([call("a"), {"role": "user", "content": "Wait."}, result("a", "1")], ["assistant", "1", "Wait."]),
        ([call("a"), {"role": "user", "content": "Wait."}, result("x", "?")], ["assistant", "Wait.", "?"]),
        ([result("a", "1"), call("a"), {"role": "assistant", "content": "So."}], ["1", "assistant", "So."]),
        ([call("a"), result("a", "1"), {"role": "assistant", "content": "So."}, result("a", "late")],
         ["assistant", "1", "So.", "late"]),
    ],
)  # fmt: skip
def test_results_that_are_missing_surplus_or_elsewhere(sent: list[dict[str, Any]], printed: list[str]) -> None:
    assert told(*sent) == printed


def test_a_result_has_the_name_of_its_call() -> None:
    sent = [call("a", "b"), result("x", "2"), result("a", "1"), {"role": "assistant", "content": "."}, result("b", "3")]
    made = chat_messages([USER, *sent])
    assert [message.get("name") for message in made if message["role"] == "tool"] == ["f0", "f1", "f1"]


def test_a_tool_may_return_nothing() -> None:
    assert told(call("a"), {"role": "tool", "tool_call_id": "a"}, USER) == ["assistant", "tool", "Go."]


def test_images_are_looked_for_in_the_order_of_the_messages_that_are_printed() -> None:
    def shown(url: str) -> list[dict[str, Any]]:
        return [{"type": "image_url", "image_url": {"url": url}}]

    sent = [
        *(USER, call("a", "b"), result("b", "2"), {"role": "user", "content": shown("one")}, result("a", "1")),
        {"role": "user", "content": shown("two")},
    ]
    assert in_call_order(sent) == [0, 1, 4, 2, 3, 5]
    assert [source.field for source in image_sources(sent, {})] == [
        f"messages[{i}].content[0].image_url" for i in (3, 5)
    ]
