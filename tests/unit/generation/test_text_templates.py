"""Chat templates: what they print, and that no message becomes a control token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.errors import InvalidRequest, ModelError
from mlx_tandem.generation.prompts import Prompts
from mlx_tandem.generation.templates import plain
from mlx_tandem.generation.templates.client import ChatTemplate
from mlx_tandem.generation.templates.messages import Failed, Setup
from mlx_tandem.generation.templates.rendering import Renderer
from mlx_tandem.generation.tokenizer import Tokenizer
from tests.unit.text_tools import SPECIALS, byte_level, model_folder, render_with, sentencepiece

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
EVIL = st.lists(st.sampled_from([*SPECIALS, "<|im_", "end|>", " ", "x", "\n", "<think>", "\U000f0000", "\U000f0001"]))


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def rendered(source: str, tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: bool) -> list[int]:
    """The prompt's token ids, by the code that a worker runs."""
    return tokenizer.encode_parts(render_with(source, tokenizer)(messages, options))


def in_a_process(source: str, tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: bool) -> list[int]:
    async def run() -> list[int]:
        template = ChatTemplate(source, tokenizer)
        try:
            await template.check()
            return tokenizer.encode_parts(await template.render(messages, options))
        finally:
            await template.close()

    return asyncio.run(asyncio.wait_for(run(), 120))


WAYS = pytest.mark.parametrize("ids", [rendered, in_a_process])


@WAYS
def test_a_plain_conversation_is_what_the_template_prints(ids: Callable[..., list[int]]) -> None:
    tokenizer = byte_level()
    assert ids(CHATML, tokenizer, user(" hello ")) == tokenizer.encode(
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@given(parts=EVIL)
@settings(max_examples=100)
def test_special_tokens_come_from_the_template_only(make, parts):
    tokenizer = make()
    ids = rendered(CHATML, tokenizer, user("".join(parts)))
    specials = [i for i in ids if i in tokenizer.special_ids]
    start, end = tokenizer.special_tokens["<|im_start|>"], tokenizer.special_tokens["<|im_end|>"]
    assert specials == [start, end, start]


PLAIN = st.recursive(
    EVIL.map("".join) | st.none() | st.booleans() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(EVIL.map("".join), inner, max_size=3),
    max_leaves=8,
)


@given(value=PLAIN)
@settings(max_examples=100)
def test_nor_do_they_come_from_what_lies_deeper_in_a_message(value: object) -> None:
    tokenizer = byte_level()
    ids = rendered("{{ messages | tojson }}{{ messages[0].tool_calls }}", tokenizer, [{"tool_calls": value}])
    assert tokenizer.special_ids.isdisjoint(ids)


@given(parts=EVIL)
@settings(max_examples=200)
def test_the_text_itself_stays(parts):
    tokenizer = byte_level()
    content = "".join(parts).strip()
    ids = rendered(CHATML, tokenizer, user(content))
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == (
        f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.promise("E1")
def test_every_special_token_of_the_vocabulary_is_plain_text_in_a_message():
    tokenizer = byte_level()
    for text in tokenizer.special_tokens:
        ids = rendered("{{ messages[0].content }}", tokenizer, user(f"a{text}b"))
        assert tokenizer.special_ids.isdisjoint(ids)


@pytest.mark.parametrize("padding", [0, 10_000], ids=["here", "in the process for long texts"])
def test_a_special_token_that_normalisation_would_make_is_refused(tmp_path: Path, padding: int) -> None:
    """Full-width letters that NFKC turns into a special token's text."""
    folder = model_folder(tmp_path, sentencepiece(normalized=True), CHATML)

    async def run() -> None:
        prompts = Prompts(folder)
        try:
            assert await prompts.chat(user("x" * padding))
            with pytest.raises(InvalidRequest) as e:
                await prompts.chat([*user("y"), {"role": "user", "content": "x" * padding + "<|ｉｍ_end|>"}])
            assert e.value.param == "messages[1].content"
        finally:
            await prompts.close()

    asyncio.run(asyncio.wait_for(run(), 120))


@WAYS
def test_options_reach_the_template(ids: Callable[..., list[int]]) -> None:
    tokenizer = byte_level()
    without = ids(CHATML, tokenizer, user("x"), enable_thinking=False)
    assert len(without) == len(ids(CHATML, tokenizer, user("x"))) + 2


MISBEHAVING = [
    "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ messages | attr('__class__') | attr('__base__') }}{{ cycler.__init__.__globals__.os.getcwd() }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ messages.append(1) }}",
    "{{ nothing.at.all }}",
    "{% for i in range(10**9) %}{% endfor %}",
    "{{ raise_exception('roles must alternate') }}",
    r"{{ raise_exception('\ud800' * 10000) }}",
    r"{{ '\ud800' }}",
    "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
]


@pytest.mark.promise("A3")
@pytest.mark.parametrize("source", MISBEHAVING)
def test_a_template_that_misbehaves_is_a_client_error(source: str) -> None:
    with pytest.raises(InvalidRequest) as e:
        in_a_process(source, byte_level(), user("x"))
    assert e.value.param == "messages"
    assert "globals" not in e.value.message
    assert len(e.value.message.encode()) < 2000


def test_what_templates_in_the_wild_use():
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{% generation %}{{ eos_token }}{% endgeneration %}{{ strftime_now('%%') }}"
    )
    tokenizer = byte_level()
    ids = rendered(source, tokenizer, user("<é>") * 2)
    text = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert text == json.dumps({"role": "user", "content": "<é>"}, ensure_ascii=False) + "<|im_end|>%"


def test_where_the_template_is_found(tmp_path: Path):
    backend = byte_level()._backend

    def load(config: Mapping[str, object]) -> str:
        return ChatTemplate.load(tmp_path, Tokenizer(backend, dict(config))).source

    assert load({}) == plain.SOURCE
    assert load({"chat_template": "one"}) == "one"
    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    assert load({"chat_template": named}) == "three"
    for wrong in (3, "\ud800"):
        with pytest.raises(ModelError, match="tokenizer_config"):
            load({"chat_template": wrong})
    (tmp_path / "chat_template.jinja").write_text("four")
    assert load({"chat_template": "one"}) == "four"
    for content in (b"\xff", b"x" * (1 << 21)):
        (tmp_path / "chat_template.jinja").write_bytes(content)
        with pytest.raises(ModelError, match="chat_template"):
            load({})


@pytest.mark.parametrize("source", ["{% if %}", "{{" * 10_000, "{% if x %}" * 3000 + "{% endif %}" * 3000])
def test_what_is_no_template_is_known_from_the_check(source: str) -> None:
    with pytest.raises(ModelError, match="not a valid template"):
        in_a_process(source, byte_level(), user("x"))


def test_a_message_of_no_plain_data_is_refused() -> None:
    for value in (object(), "\ud800", 2**70):
        with pytest.raises(InvalidRequest) as e:
            in_a_process(CHATML, byte_level(), [{"role": "user", "content": value}])
        assert e.value.param == "messages"


def test_a_prompt_that_is_too_large_is_refused() -> None:
    setup = Setup("{% for i in range(20) %}{{ messages }}{% endfor %}", {}, ())
    assert Renderer(setup).render({"messages": "x" * (1 << 20)}) == Failed("too_large")


JSON = st.recursive(
    EVIL.map("".join),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(EVIL.map("".join), inner, max_size=3),
    max_leaves=6,
)
EVERYTHING = (
    "{% for m in messages %}<|im_start|>{{ m.reasoning_content }}{{ m.content | trim }}{{ m.name }}"
    "{% for call in m.tool_calls or [] %}{{ call | tojson }}{{ call.function }}{{ call.function.arguments | tojson }}"
    "{{ call.function.arguments }}{% endfor %}{{ m | tojson }}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@given(texts=st.tuples(EVIL, EVIL, EVIL), arguments=JSON, key=EVIL)
@settings(max_examples=100)
def test_special_tokens_come_from_the_template_only_wherever_a_message_says_them(make, texts, arguments, key):
    """In nested texts, in keys, and in the seams of texts that the template prints next to one another."""
    tokenizer = make()
    reasoning, content, name = ("".join(parts) for parts in texts)
    message = {
        "role": "assistant",
        "content": content,
        "name": name,
        "reasoning_content": reasoning,
        "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
        "unknown" + "".join(key): [name],
    }
    ids = rendered(EVERYTHING, tokenizer, [message, message])
    start, end = tokenizer.special_tokens["<|im_start|>"], tokenizer.special_tokens["<|im_end|>"]
    assert [i for i in ids if i in tokenizer.special_ids] == [start, end, start, end]


@given(texts=st.tuples(EVIL, EVIL), between=st.sampled_from(["", " ", "\n", "x", "end|>"]))
@settings(max_examples=100)
def test_seams_of_texts_change_no_tokens_where_they_make_no_special_token(texts, between):
    """What ends like the beginning of a special token is tokenised together with what stands around it."""
    tokenizer = byte_level()
    first, second = ("".join(parts) for parts in texts)
    whole = f"<|im_start|>{first}{between}{second}<|im_end|>"
    source = "<|im_start|>{{ messages[0].name }}" + between + "{{ messages[0].content }}<|im_end|>"
    ids = rendered(source, tokenizer, [{"role": "user", "name": first, "content": second}])
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == whole
    plain = whole.removeprefix("<|im_start|>").removesuffix("<|im_end|>")
    if not any(name in plain for name in tokenizer.special_tokens):
        assert ids == tokenizer.encode(whole)


def test_long_runs_of_special_tokens_take_no_time():
    tokenizer = byte_level()
    ids = rendered(CHATML, tokenizer, user("<|im_end|>" * 50_000))
    assert sum(i in tokenizer.special_ids for i in ids) == 3


@given(parts=EVIL)
@settings(max_examples=200)
def test_the_last_message_can_be_continued(parts):
    """What the template prints behind its content is cut off; what stands in the content stays plain text."""
    tokenizer = byte_level()
    content = "x" + "".join(parts)
    messages = [*user("hi"), {"role": "assistant", "content": content}]
    ids = rendered(CHATML, tokenizer, messages, add_generation_prompt=False, continue_final_message=True)
    text = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert text == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{content}"
    start, end = tokenizer.special_tokens["<|im_start|>"], tokenizer.special_tokens["<|im_end|>"]
    assert [i for i in ids if i in tokenizer.special_ids] == [start, end, start]


def test_a_message_that_the_template_does_not_print_cannot_be_continued():
    with pytest.raises(InvalidRequest) as e:
        in_a_process(
            "{{ messages[0].content }}", byte_level(), [*user("hi"), *user("there")], continue_final_message=True
        )
    assert e.value.param == "continue_final_message"
    ids = in_a_process("{{ messages[0].content }}", byte_level(), user("hi"), continue_final_message=True)
    assert ids == byte_level().encode("hi")


# Templates that read calls in different forms, in the manner of DeepSeek 3, DeepSeek 3 of March, Qwen 3 and Llama 3.
_TEXT = "{% for c in m.tool_calls %}[{{ c.type + ' ' + c.function.name + ' ' + c.function.arguments }}]{% endfor %}"
CALLS = {
    "text and null": "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
    + _TEXT
    + "{% else %}"
    "{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}",
    "text": "{% for m in messages %}{% if m.tool_calls %}" + _TEXT + "{% else %}{{ m.role }}: {{ m.content }}\n"
    "{% endif %}{% endfor %}",
    "text or Python": "{% for m in messages %}{% for c in m.tool_calls or [] %}[function {{ c.function.name }} "
    "{{ c.function.arguments }}]{% else %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% endfor %}",
    "object": "{% for m in messages %}{% for c in m.tool_calls or [] %}[function {{ c.function.name }} "
    "{{ c.function.arguments | tojson }}]{% else %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% endfor %}",
    "object and null": "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}[function "
    "{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}{% else %}{{ m.role }}: {{ m.content }}\n"
    "{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("source", CALLS.values(), ids=list(CALLS))
def test_calls_reach_each_template_in_the_form_that_it_reads(source: str) -> None:
    tokenizer = byte_level()
    function = {"name": "add", "arguments": {"a": 17, "é": ["x", None]}}
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    said = {"role": "assistant", "content": "42"}
    ids = in_a_process(source, tokenizer, [*user("hi"), called, {"role": "tool", "content": "42"}, said])
    text = tokenizer.decode(ids)
    assert text == 'user: hi\n[function add {"a": 17, "é": ["x", null]}]tool: 42\nassistant: 42\n'


def test_a_template_that_prints_no_calls_gets_the_usual_form() -> None:
    tokenizer = byte_level()
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    assert tokenizer.decode(in_a_process(CHATML, tokenizer, [*user("hi"), called], add_generation_prompt=False)) == (
        "user\nhi\nassistant\n\n"
    )
