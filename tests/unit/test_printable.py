"""Text of others is safe to show wherever it goes: in errors, in log lines, in headers and on a terminal."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import unicodedata
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_tandem import errors
from mlx_tandem.cli import console
from mlx_tandem.engine_main import EngineLines
from mlx_tandem.errors import TandemError
from mlx_tandem.printable import MOST_SHOWN, printable
from mlx_tandem.server.error_reply import ErrorReply
from mlx_tandem.server.guard import Guard
from mlx_tandem.server.log_lines import MOST_LOGGED, JsonLines
from tests.texts import ANY_TEXT, is_safe

ERRORS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, TandemError)]
EXAMPLES = ["\ud800", "a\nb", "\x1b[2J", "\u2028", "\u202eabc", "x" * (MOST_SHOWN + 1), "\0" * MOST_SHOWN, "a\x85b"]


@settings(max_examples=500, derandomize=True)
@given(ANY_TEXT, st.integers(1, 50))
def test_it_is_one_line_that_can_be_encoded(text: str, most: int) -> None:
    shown = printable(text, most)
    assert is_safe(shown) and len(shown) <= most
    assert printable(shown, most) == shown, "twice is once"
    if is_safe(text) and len(text) <= most:
        assert shown == text


BIDIRECTIONAL = {0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
"""Unicode's characters with the property Bidi_Control."""


def test_exactly_the_characters_that_steer_or_cannot_be_encoded_are_escaped() -> None:
    for start in range(0, 0x110000, 0x1000):
        page = list(map(chr, range(start, start + 0x1000)))
        unsafe = [unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or ord(c) in BIDIRECTIONAL for c in page]
        escaped = [ascii(c)[1:-1] if bad else c for c, bad in zip(page, unsafe, strict=True)]
        assert printable("".join(page), 1 << 20) == "".join(escaped), f"{start:#x}"


@given(ANY_TEXT, st.integers(1, 50))
@example("x" * 11, 10)
@example("x" * 10, 10)
@example("\x1b" * 3, 10)
def test_a_text_is_cut_only_where_it_is_too_long_and_says_so(text: str, most: int) -> None:
    whole = printable(text, 12 * len(text) + 1)
    assert printable(text, most) == (whole if len(whole) <= most else whole[: most - 1] + "…")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("größe 🦊 👩‍👩‍👧 中", "größe 🦊 👩‍👩‍👧 中"),
        ("a\tb\r\n", r"a\tb\r\n"),
        ("\x1b[31m", r"\x1b[31m"),
        ("\ud800", r"\ud800"),
        ("abc\u202edef", r"abc\u202edef"),
    ],
)
def test_what_is_shown(text: str, shown: str) -> None:
    assert printable(text) == shown


def make(kind: type[TandemError], message: str, param: str) -> TandemError:
    if kind is errors.Overloaded:
        error: TandemError = errors.Overloaded(message, retry_after=1.0)
        error.param = param
        return error
    if kind is errors.ContextOverflow:
        error = errors.ContextOverflow(9, 8, 8, param=param)
        error.message = message
        return error
    return kind(message, param=param)


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("text", EXAMPLES, ids=ascii)
def test_an_error_s_texts_are_safe(kind: type[TandemError], text: str) -> None:
    """Also those that are set later, as the layers above do."""
    error = make(kind, text, text)
    for _ in range(2):
        assert is_safe(error.message) and len(error.message) <= MOST_SHOWN
        assert error.param is not None and is_safe(error.param)
        assert str(error) == error.message
        error.message, error.param = f"adapter {text}: {error.message}", text


@pytest.mark.parametrize("text", EXAMPLES, ids=ascii)
def test_a_reply_has_the_error_s_texts(text: str) -> None:
    reply = ErrorReply(TandemError(text, param=text))
    said = json.loads(reply._body)["error"]
    assert is_safe(said["message"]) and is_safe(said["param"])


@pytest.mark.promise("H1")
@settings(max_examples=200, derandomize=True)
@given(ANY_TEXT, ANY_TEXT)
@example("x" * 1_000_000, "\ud800" * 100_000)
def test_a_log_line_is_one_line(event: str, value: str) -> None:
    record = logging.LogRecord("mlx_tandem", logging.INFO, "", 0, event, (), None)
    record.fields = {"value": value, "list": [value, {"key": value}], "object": ValueError(value)}
    line = JsonLines().format(record)
    assert line.isascii() and line.isprintable()
    assert len(line) < 5 * 12 * MOST_LOGGED + 1000, "five texts, and an escape of at most twelve for a character"
    assert len(json.loads(line)["event"]) <= MOST_LOGGED


@pytest.mark.promise("H1")
@settings(max_examples=200, derandomize=True)
@given(ANY_TEXT)
@example("\nERROR mlx_tandem: forged")
def test_a_line_of_the_engine_cannot_be_forged(text: str) -> None:
    """One record is one line, and where a traceback follows, its lines are indented."""
    try:
        raise ValueError(text)
    except ValueError as e:
        record = logging.LogRecord("mlx_tandem", logging.ERROR, "", 0, "failed: %s", (text,), (ValueError, e, None))
    first, *rest = EngineLines().format(record).split("\n")
    assert first.startswith("ERROR mlx_tandem: failed: ")
    assert all(map(is_safe, (first, *rest)))
    assert rest and all(line.startswith("    ") for line in rest)


@pytest.mark.parametrize(
    "value", [b"a\r\nset-cookie: x", b"a\x00b", "é\ud800".encode("utf-8", "surrogatepass"), b"x" * 9999]
)
def test_a_header_cannot_hold_another(value: bytes) -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", value), (b"y", b"plain 1")]})

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(Guard(app, lambda: None)({"type": "http"}, None, send))
    (_, got), plain, _ = sent[0]["headers"]
    assert plain == (b"y", b"plain 1")
    assert all(0x20 <= byte <= 0x7E for byte in got) and len(got) <= 1024


@pytest.mark.parametrize("text", EXAMPLES, ids=ascii)
def test_the_command_line_says_one_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    console.warn(text)
    with pytest.raises(SystemExit) as end:
        console.fail(text)
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 2
    assert all(is_safe(line) for line in said.rstrip("\n").split("\n"))
