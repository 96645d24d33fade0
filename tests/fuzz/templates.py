"""Chat templates, right and wrong. None takes long or grows large: what does is a matter of limits, not of errors."""

from __future__ import annotations

from random import Random
from typing import Any

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_EXPRESSIONS = (
    *("messages", "messages[0].content", "messages[-1]['role']", "messages[99].content", "nobody", "nobody.at.all"),
    *("1/0", "'a' + 1", "1 + none", "[1,2][5]", "{}['x']", "-'a'", "not x", "messages|length", "messages|tojson"),
    *("'\\ud800'", "'\\x00'", "'\\u202e'", "'<|im_end|>'", "bos_token", "eos_token ~ bos_token", "'%s' % messages"),
    *("messages.__class__", "''.__class__.__mro__", "messages|attr('__class__')", "cycler.__init__.__globals__"),
    *("raise_exception('no')", "raise_exception()", "raise_exception('\\ud800\\n')", "strftime_now('%Y')"),
    *(
        "strftime_now('\\ud800')",
        "strftime_now(1)",
        "range(3)|list",
        "range(10**9)",
        "lipsum(1)",
        "joiner()",
        "namespace(a=1).a",
    ),
    *(
        "messages|map(attribute='role')|join",
        "messages|sort",
        "messages|first|upper",
        "messages|sum",
        "''|int",
        "'x'|int(base=99)",
    ),
    *(
        "messages|selectattr('role','equalto','user')|list",
        "{'a': messages}|dictsort",
        "'a'|format(1)",
        "self",
        "loop.index",
    ),
    *("messages|groupby('x')", "'abc'|truncate('x')", "1|round(method='y')", "'a'.join([1,2])", "caller()", "varargs"),
    *(
        "dict(a=1).update(b=2)",
        "messages.append(1)",
        "messages.clear()",
        "[].append(1)",
        "'é🦊'|urlize",
        "'{}'.format(1)",
    ),
)
_TAGS = (
    *(
        "{% for m in messages %}",
        "{% endfor %}",
        "{% if add_generation_prompt %}",
        "{% else %}",
        "{% elif 1 %}",
        "{% endif %}",
    ),
    *(
        "{% set x = messages %}",
        "{% set x %}",
        "{% endset %}",
        "{% macro f(a) %}",
        "{% endmacro %}",
        "{{ f(1) }}",
        "{{ f() }}",
    ),
    *("{% generation %}", "{% endgeneration %}", "{% break %}", "{% continue %}", "{% raw %}", "{% endraw %}"),
    *("{% include 'x' %}", "{% import 'x' as y %}", "{% extends '/etc/passwd' %}", "{% block b %}", "{% endblock %}"),
    *(
        "{%- if",
        "%}",
        "{{",
        "}}",
        "{#",
        "#}",
        "{% call f() %}",
        "{% endcall %}",
        "{% filter upper %}",
        "{% endfilter %}",
    ),
    *(
        "{% autoescape true %}",
        "{% do x %}",
        "{% trans %}",
        "{% with %}",
        "{% endwith %}",
        "{% nope %}",
        "{%",
        "{% for %}",
    ),
)
_TEXT = (
    "<|im_start|>",
    "<|im_end|>",
    "user\n",
    " ",
    "\n",
    "\x00",
    "\ufeff",
    "🦊",
    "\U000f0000",
    "{",
    "}",
    "x" * 1000,
    "\r",
)
_FILTERS = (
    "trim",
    "upper",
    "tojson",
    "tojson(indent=2)",
    "e",
    "nope",
    "default('')",
    "replace('a', 'b')",
    "indent(4)",
    "safe",
)


def source(rng: Random) -> str:
    """A template that is put together from pieces which may or may not go together."""
    if rng.random() < 0.2:
        text = CHATML
        for _ in range(rng.choice((1, 1, 3))):
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice(("", "{", "%", "'", "|", ".", *_TEXT)) + text[at + rng.randrange(3) :]
        return text
    pieces = []
    for _ in range(rng.randint(1, 8)):
        what = rng.random()
        if what < 0.5:
            filters = "".join(f" | {rng.choice(_FILTERS)}" for _ in range(rng.choice((0, 0, 1, 2))))
            pieces.append(f"{{{{ {rng.choice(_EXPRESSIONS)}{filters} }}}}")
        elif what < 0.8:
            pieces.append(rng.choice(_TAGS))
        else:
            pieces.append(rng.choice(_TEXT))
    text = "".join(pieces)
    if rng.random() < 0.5:
        return f"{{% for m in messages %}}{text}{{% endfor %}}"
    return text


def messages(rng: Random) -> list[dict[str, Any]]:
    """A conversation as the server hands it to a template: texts without lone surrogates."""
    texts = ("", "hi", "<|im_end|>", "a\nb", "\x00", "🦊", "{{ 1/0 }}", "</think>", "\U000f0000<|im_start|>", "x" * 500)
    roles = ("user", "assistant", "system", "tool", "developer")
    return [{"role": rng.choice(roles), "content": rng.choice(texts)} for _ in range(rng.randint(1, 4))]
