"""Writing calls as each family's models do, from plain names and arguments, and the mistakes that they make."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Call = tuple[str, Mapping[str, Any]]


def raw(value: Any) -> str:
    """A value between tags: a text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_object(call: Call, arguments: str = "arguments") -> str:
    return json.dumps({"name": call[0], arguments: call[1]}, ensure_ascii=False)


def pythonic(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{key}={value!r}' for key, value in call[1].items())})"


def gemma(mark: str) -> Callable[[Call], str]:
    def literal(value: Any) -> str:
        if isinstance(value, str):
            return f"{mark}{value}{mark}"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{literal(inner)}" for key, inner in value.items()) + "}"
        return f"[{','.join(map(literal, value))}]" if isinstance(value, list) else json.dumps(value)

    return lambda call: f"call:{call[0]}{literal(call[1])}"


def tagged(outer: str, form: str, frame: str = "\n") -> Callable[[Call], str]:
    """Tags with the form's names. `frame` stands at both ends of a value."""
    function, parameter = {
        "function": ("<function={}>", "<parameter={}>"),
        "invoke": ('<invoke name="{}">', '<parameter name="{}">'),
        "dsml": ('<｜DSML｜invoke name="{}">', '<｜DSML｜parameter name="{}" string="{}">'),
    }[form]
    prefix = "｜DSML｜" if form == "dsml" else ""
    end = "function" if form == "function" else "invoke"

    def written(call: Call) -> str:
        inner = "".join(
            f"{parameter.format(key, 'true' if isinstance(value, str) else 'false')}{frame}{raw(value)}{frame}"
            f"</{prefix}parameter>\n"
            for key, value in call[1].items()
        )
        return outer.format(f"\n{function.format(call[0])}\n{inner}</{prefix}{end}>\n")

    return written


def glm(call: Call) -> str:
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{raw(v)}</arg_value>\n" for key, v in call[1].items())
    return f"<tool_call>{call[0]}\n{pairs}</tool_call>"


def each(write: Callable[[Call], str], between: str = "\n") -> Callable[[Sequence[Call]], str]:
    return lambda calls: between.join(map(write, calls))


def around(before: str, inner: Callable[[Sequence[Call]], str], after: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: before + inner(calls) + after


def in_list(before: str, after: str, arguments: str = "arguments") -> Callable[[Sequence[Call]], str]:
    return around(f"{before}[", each(lambda call: as_object(call, arguments), ", "), f"]{after}")


_SEP, _BEGIN, _END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"


def kimi(call: Call) -> str:
    arguments = json.dumps(call[1], ensure_ascii=False)
    return f"<|tool_call_begin|>functions.{call[0]}:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def deepseek(call: Call) -> str:
    return f"{_BEGIN}function{_SEP}{call[0]}\n```json\n{json.dumps(call[1], ensure_ascii=False)}\n```{_END}"


def deepseek31(call: Call) -> str:
    return f"{_BEGIN}{call[0]}{_SEP}{json.dumps(call[1], ensure_ascii=False)}{_END}"


def harmony(call: Call) -> str:
    arguments = json.dumps(call[1], ensure_ascii=False)
    header = f"<|start|>assistant<|channel|>commentary to=functions.{call[0]} <|constrain|>json<|message|>"
    return f"{header}{arguments}<|call|>"


SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")

WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    "hermes": each(lambda call: f"<tool_call>\n{as_object(call)}\n</tool_call>"),
    "qwen3_coder": each(tagged("<tool_call>{}</tool_call>", "function")),
    "seed_oss": each(tagged("<seed:tool_call>{}</seed:tool_call>", "function", frame="")),
    "minimax_m2": around("<minimax:tool_call>", each(tagged("{}", "invoke", frame=""), ""), "</minimax:tool_call>"),
    "deepseek_v32": around(
        "<｜DSML｜function_calls>", each(tagged("{}", "dsml", frame=""), ""), "</｜DSML｜function_calls>"
    ),
    "glm45": each(glm),
    "kimi_k2": around("<|tool_calls_section_begin|>", each(kimi, ""), "<|tool_calls_section_end|>"),
    "deepseek_v3": around(SECTION[0], each(deepseek), SECTION[1]),
    "deepseek_v31": around(SECTION[0], each(deepseek31, ""), SECTION[1]),
    "mistral": in_list("[TOOL_CALLS] ", ""),
    "mistral_args": each(
        lambda call: f"[TOOL_CALLS]{call[0]}[ARGS]{json.dumps(call[1], ensure_ascii=False)}", between=""
    ),
    "llama3_json": each(lambda call: as_object(call, "parameters"), "; "),
    "pythonic": around("[", each(pythonic, ", "), "]"),
    "lfm2": around("<|tool_call_start|>[", each(pythonic, ", "), "]<|tool_call_end|>"),
    "gemma4": each(lambda call: f"<|tool_call>{gemma('<|' + chr(34) + '|>')(call)}<tool_call|>", ""),
    "functiongemma": each(lambda call: f"<start_function_call>{gemma('<escape>')(call)}<end_function_call>", ""),
    "granite": in_list("<|tool_call|>", ""),
    "openai": each(harmony, ""),
}
"""How each family writes its calls."""

ENDS = {
    "hermes": ("}\n</tool_call>", "\n</tool_call>"),
    "qwen3_coder": ("\n</tool_call>", "</function>\n</tool_call>", "\n</parameter>\n</function>\n</tool_call>"),
    "seed_oss": ("\n</seed:tool_call>", "</function>\n</seed:tool_call>"),
    "minimax_m2": ("</minimax:tool_call>", "</invoke>\n</minimax:tool_call>"),
    "deepseek_v32": ("</｜DSML｜function_calls>", "</｜DSML｜invoke>\n</｜DSML｜function_calls>"),
    "glm45": ("</tool_call>", "</arg_value>\n</tool_call>"),
    "kimi_k2": ("<|tool_calls_section_end|>", "<|tool_call_end|><|tool_calls_section_end|>"),
    "deepseek_v3": (SECTION[1], f"\n```{_END}{SECTION[1]}"),
    "deepseek_v31": (SECTION[1], _END + SECTION[1], "}" + _END + SECTION[1]),
    "mistral": ("]", "}]", "}}]"),
    "mistral_args": ("}",),
    "llama3_json": ("}", "}}"),
    "pythonic": ("]", ")]"),
    "lfm2": ("<|tool_call_end|>", "]<|tool_call_end|>", ")]<|tool_call_end|>"),
    "gemma4": ("<tool_call|>", "}<tool_call|>"),
    "functiongemma": ("<end_function_call>", "}<end_function_call>"),
    "granite": ("]", "}]", "}}]"),
    "openai": ("<|call|>", "}<|call|>"),
}
"""Ends of a call that models leave out."""

MARKUP = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"),
    "seed_oss": ("<seed:tool_call>", "</seed:tool_call>", "<function=", "</function>", "</parameter>"),
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>", "<invoke name=", "</invoke>", "</parameter>"),
    "deepseek_v32": ("<｜DSML｜function_calls>", "</｜DSML｜invoke>", "</｜DSML｜parameter>"),
    "glm45": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    "deepseek_v3": (*SECTION, _BEGIN, _SEP, _END, "```json"),
    "deepseek_v31": (*SECTION, _BEGIN, _SEP, _END),
    "mistral": ("[TOOL_CALLS]",),
    "mistral_args": ("[TOOL_CALLS]", "[ARGS]"),
    "llama3_json": ("<|python_tag|>", '{"name": "'),
    "pythonic": ("<|python_start|>", "<|python_end|>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "granite": ("<|tool_call|>",),
    "openai": ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"),
}
"""Markers of each family."""
