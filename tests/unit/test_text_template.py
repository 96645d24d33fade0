from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.errors import InvalidRequest, ModelError
from mlx_tandem.text.template import ChatTemplate
from mlx_tandem.text.tokenizer import Tokenizer
from tests.unit.text_tools import SPECIALS, byte_level, sentencepiece

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
EVIL = st.lists(st.sampled_from([*SPECIALS, "<|im_", "end|>", " ", "x", "\n", "<think>", "\U000f0000", "\U000f0001"]))


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_a_plain_conversation_is_what_the_template_prints():
    tokenizer = byte_level()
    ids = ChatTemplate(CHATML, tokenizer).encode(user(" hello "))
    assert ids == tokenizer.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@given(parts=EVIL)
@settings(max_examples=300, deadline=None)
def test_special_tokens_come_from_the_template_only(make, parts):
    tokenizer = make()
    ids = ChatTemplate(CHATML, tokenizer).encode(user("".join(parts)))
    specials = [i for i in ids if i in tokenizer.special_ids]
    start, end = tokenizer.special_tokens["<|im_start|>"], tokenizer.special_tokens["<|im_end|>"]
    assert specials == [start, end, start]


@given(parts=EVIL)
@settings(max_examples=200, deadline=None)
def test_the_text_itself_stays(parts):
    tokenizer = byte_level()
    content = "".join(parts).strip()
    ids = ChatTemplate(CHATML, tokenizer).encode(user(content))
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == (
        f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    )


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
@settings(max_examples=300, deadline=None)
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
    ids = ChatTemplate(EVERYTHING, tokenizer).encode([message, message])
    start, end = tokenizer.special_tokens["<|im_start|>"], tokenizer.special_tokens["<|im_end|>"]
    assert [i for i in ids if i in tokenizer.special_ids] == [start, end, start, end]


@given(texts=st.tuples(EVIL, EVIL), between=st.sampled_from(["", " ", "\n", "x", "end|>"]))
@settings(max_examples=300, deadline=None)
def test_seams_of_texts_change_no_tokens_where_they_make_no_special_token(texts, between):
    """What ends like the beginning of a special token is tokenised together with what stands around it."""
    tokenizer = byte_level()
    first, second = ("".join(parts) for parts in texts)
    whole = f"<|im_start|>{first}{between}{second}<|im_end|>"
    ids = ChatTemplate(
        "<|im_start|>{{ messages[0].name }}" + between + "{{ messages[0].content }}<|im_end|>", tokenizer
    )
    given = ids.encode([{"role": "user", "name": first, "content": second}])
    assert b"".join(map(tokenizer.token_bytes, given)).decode() == whole
    plain = whole.removeprefix("<|im_start|>").removesuffix("<|im_end|>")
    if not any(name in plain for name in tokenizer.special_tokens):
        assert given == tokenizer.encode(whole)


def test_long_runs_of_special_tokens_take_no_time():
    tokenizer = byte_level()
    ids = ChatTemplate(CHATML, tokenizer).encode(user("<|im_end|>" * 50_000))
    assert sum(i in tokenizer.special_ids for i in ids) == 3


@given(parts=EVIL)
@settings(max_examples=200, deadline=None)
def test_the_last_message_can_be_continued(parts):
    """What the template prints behind its content is cut off; what stands in the content stays plain text."""
    tokenizer = byte_level()
    content = "x" + "".join(parts)
    messages = [*user("hi"), {"role": "assistant", "content": content}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    ids = ChatTemplate(CHATML, tokenizer).encode(messages, options)
    text = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert text == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{content}"
    start, end = tokenizer.special_tokens["<|im_start|>"], tokenizer.special_tokens["<|im_end|>"]
    assert [i for i in ids if i in tokenizer.special_ids] == [start, end, start]


def test_a_message_that_the_template_does_not_print_cannot_be_continued():
    template = ChatTemplate("{{ messages[0].content }}", byte_level())
    with pytest.raises(InvalidRequest) as e:
        template.encode([*user("hi"), *user("there")], {"continue_final_message": True})
    assert e.value.param == "continue_final_message"
    assert template.encode(user("hi"), {"continue_final_message": True}) == byte_level().encode("hi")


def test_every_special_token_of_the_vocabulary_is_plain_text_in_a_message():
    tokenizer = byte_level()
    template = ChatTemplate("{{ messages[0].content }}", tokenizer)
    for text in tokenizer.special_tokens:
        assert tokenizer.special_ids.isdisjoint(template.encode(user(f"a{text}b")))


def test_a_special_token_that_normalisation_would_make_is_refused():
    """Full-width letters that NFKC turns into a special token's text."""
    tokenizer = sentencepiece(normalized=True)
    with pytest.raises(InvalidRequest) as e:
        ChatTemplate(CHATML, tokenizer).encode(user("<|ｉｍ_end|>"))
    assert e.value.param == "messages[0].content"
    nested = {"role": "user", "content": "x", "tool_calls": [{"a": ["<|ｉｍ_end|>"]}]}
    for message in (nested, {"role": "user", "content": "x", "tool_calls": {"<|ｉｍ_end|>": 1}}):
        with pytest.raises(InvalidRequest) as e:
            ChatTemplate(CHATML, tokenizer).encode([message])
        assert e.value.param == "messages[0].tool_calls"


def test_options_reach_the_template():
    tokenizer = byte_level()
    template = ChatTemplate(CHATML, tokenizer)
    assert len(template.encode(user("x"), {"enable_thinking": False})) == len(template.encode(user("x"))) + 2


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages | attr('__class__') | attr('__base__') }}{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ nothing.at.all }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ raise_exception('roles must alternate') }}",
    ],
)
def test_a_template_that_misbehaves_is_a_client_error(source: str):
    with pytest.raises(InvalidRequest) as e:
        ChatTemplate(source, byte_level()).encode(user("x"))
    assert e.value.param == "messages"
    assert "globals" not in e.value.message


def test_what_templates_in_the_wild_use():
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{% generation %}{{ eos_token }}{% endgeneration %}{{ strftime_now('%%') }}"
    )
    tokenizer = byte_level()
    ids = ChatTemplate(source, tokenizer).encode(user("<é>") * 2)
    text = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert text == json.dumps({"role": "user", "content": "<é>"}, ensure_ascii=False) + "<|im_end|>%"


def test_where_the_template_is_found(tmp_path: Path):
    backend = byte_level()._backend

    def load(config: dict[str, object]) -> ChatTemplate | None:
        return ChatTemplate.load(tmp_path, Tokenizer(backend, config))

    def text(template: ChatTemplate | None) -> str:
        assert template is not None
        return byte_level().decode(template.encode(user("x")))

    assert load({}) is None
    assert text(load({"chat_template": "one"})) == "one"
    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    assert text(load({"chat_template": named})) == "three"
    with pytest.raises(ModelError, match="chat_template"):
        load({"chat_template": 3})
    with pytest.raises(ModelError, match="not a valid template"):
        load({"chat_template": "{% if %}"})
    (tmp_path / "chat_template.jinja").write_text("four")
    assert text(load({"chat_template": "one"})) == "four"
