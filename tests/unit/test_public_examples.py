"""The comparison with other projects' tests, on a project of a few tests that is written here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

TESTS = """
import json
from unittest.mock import MagicMock

import pytest

from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser
from vllm.tool_parsers.new_tool_parser import NewToolParser
from vllm.reasoning import ReasoningParserManager

START = "<tool_call>"


def call(name, **given):
    return START + json.dumps({"name": name, "arguments": given}) + "</tool_call>"


@pytest.fixture
def parser():
    return Hermes2ProToolParser(MagicMock())


class TestWhole:
    @pytest.mark.parametrize("city", ["Oslo", pytest.param("Bergen", id="west")])
    def test_agrees(self, parser, city):
        found = parser.extract_tool_calls("Yes. " + call("weather", city=city), None)
        assert found.tools_called and found.content == "Yes."
        assert [json.loads(each.function.arguments) for each in found.tool_calls] == [{"city": city}]

    def test_differs(self, parser):
        found = parser.extract_tool_calls(call("weather", city="Oslo"), None)
        assert found.tool_calls[0].function.name == "forecast"


def streamed(parser, pieces):
    before = ""
    for piece in pieces:
        yield parser.extract_tool_calls_streaming(before, before + piece, piece, [], [], [], None)
        before += piece


def test_streamed(parser):
    text, arguments = "", ""
    for delta in streamed(parser, ["Yes", "<tool", call("weather", city="Oslo")[5:], "No<"]):
        if delta is None:
            continue
        text += delta.content or ""
        for each in delta.tool_calls:
            arguments += each.function.arguments or ""
    assert text == "YesNo<"
    assert json.loads(arguments) == {"city": "Oslo"}


def test_thoughts():
    parser = ReasoningParserManager.get_reasoning_parser("deepseek_r1")(MagicMock())
    assert parser.extract_reasoning("so</think>Yes", None) == ("so", "Yes")


def test_other():
    assert NewToolParser(MagicMock()).extract_tool_calls("", None)


def test_unread(parser):
    found = parser.extract_tool_calls("Yes", None)
    open("ran", "w").write(found.content)
    assert found.content == "Yes"
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script writes, and `code`, its exit status."""
    root = tmp_path_factory.mktemp("other")
    (root / "tests" / "tool_parsers").mkdir(parents=True)
    (root / "tests" / "tool_parsers" / "test_own.py").write_text(dedent(TESTS))
    script = [sys.executable, str(ROOT / "benchmarks" / "public_examples.py"), "--vllm", str(root), "--unread"]
    ended = subprocess.run(
        [*script, "--json-out", str(root / "found.json")], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert not ended.stderr
    assert not (root / "ran").exists(), "nothing of a test runs"
    return {"code": ended.returncode, "out": ended.stdout, **json.loads((root / "found.json").read_text())}


def test_tests_whose_assertions_hold_agree(found: dict[str, Any]) -> None:
    assert found["counts"]["vllm, hermes: agrees"] == 3
    assert found["counts"]["vllm, deepseek_r1: agrees"] == 1


def test_a_difference_is_listed_with_both_sides(found: dict[str, Any]) -> None:
    assert found["differences"] == {"vllm:tests/tool_parsers/test_own.py::TestWhole::test_differs": ""}
    assert "ours 'weather', theirs 'forecast'" in found["out"]
    assert found["code"] == 1, "a difference without a reason"


def test_what_is_not_compared_is_counted(found: dict[str, Any]) -> None:
    assert "vllm: 1 tests could not be read, 0 are skipped by the project" in found["summary"]
    assert "vllm: 1 tests are about forms that are not served here: NewToolParser 1" in found["summary"]
    assert "::test_unread the name open" in found["out"]
