"""The demo model's recipe and the files it left in the package."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from mlx_tandem import demo
from recipes.demo_model import card, data, styles, talk, text
from recipes.demo_model.exchanges import Exchange, held_out

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "demo_model.json"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo.MODEL_PATH / "tokenizer.json"))


def exchanges(skill: str, count: int = 60) -> list[Exchange]:
    rng = random.Random(7)
    return [data.exchange(rng, skill) for _ in range(count)]


def asked(given: Exchange) -> str:
    return str(given.messages[0]["content"])


def numbers(of: str) -> list[int]:
    return [int(found) for found in re.findall(r"\d+", of)]


# --- generator --------------------------------------------------------------------------------------------


def test_the_generator_is_a_function_of_its_seed(tokenizer: Tokenizer) -> None:
    chats = [[text.full_text(data.conversation(random.Random(seed))) for seed in range(20)] for _ in range(2)]
    assert chats[0] == chats[1]
    assert len(set(chats[0])) == 20
    spec = text.BatchSpec(seed=3, rows=2, length=128)
    first, second = text.pack(tokenizer, spec), text.pack(tokenizer, spec)
    assert (first[0] == second[0]).all()
    assert (first[1] == second[1]).all()
    other = text.pack(tokenizer, text.BatchSpec(seed=4, rows=2, length=128))
    assert (first[0] != other[0]).any()


@pytest.mark.parametrize("skill", ["sum", "think"])
def test_sums_add_up(skill: str) -> None:
    for given in exchanges(skill):
        x, y = numbers(asked(given))
        assert given.answer["content"] == f"{x} + {y} = {x + y}."
        assert given.short == x + y


def test_reasoning_is_true_line_by_line() -> None:
    for given in exchanges("think"):
        reasoning = given.answer["reasoning_content"]
        digits = []
        for left, right in re.findall(r"([\d+ ]+) = (\d+)", reasoning):
            assert sum(numbers(left)) == int(right)
            digits.append(int(right))
        total = sum(
            (column if place == len(digits) - 1 else column % 10) * 10**place for place, column in enumerate(digits)
        )
        assert total == given.short


@pytest.mark.parametrize(("skill", "descending"), [("sort", False), ("down", True)])
def test_sorting(skill: str, descending: bool) -> None:
    for given in exchanges(skill):
        assert numbers(given.answer["content"]) == sorted(numbers(asked(given)), reverse=descending)


def test_words_are_reversed_repeated_and_raised() -> None:
    for given in exchanges("reverse"):
        found = re.search(r"(?:Reverse:|the word|Spell) ([a-z]+)", asked(given))
        assert found is not None
        assert given.answer["content"] == "".join(reversed(found[1]))
    for given in exchanges("repeat"):
        form, said = re.fullmatch(r"(Repeat[a-z ]*:|Say:?) (.*)", asked(given)).groups()  # type: ignore[union-attr]
        times = 3 if "three" in form else 2 if "twice" in form else 1
        assert given.answer["content"] == " ".join([said] * times)
    for given in exchanges("upper"):
        assert given.answer["content"] == asked(given).split(": ", 1)[1].upper()


def test_json_holds_what_was_said() -> None:
    for given in exchanges("json"):
        value = json.loads(given.answer["content"])
        for part in value.values():
            said = " ".join(map(str, part)) if isinstance(part, list) else str(part)
            assert re.search(rf"\b{said}\b", asked(given))


def test_counting_capitals_and_stories() -> None:
    for given in exchanges("count"):
        low, high = numbers(asked(given))
        assert numbers(given.answer["content"]) == list(range(low, high + 1))
    for given in exchanges("capital"):
        assert re.fullmatch(r"The capital of \w+ is [\w ]+\. It is a city in [\w ]+\.", given.answer["content"])
    for given in exchanges("story"):
        assert talk.story_is_right(asked(given), given.answer["content"])
        assert not talk.story_is_right(asked(given), given.answer["content"].replace("Every day", "Every week"))


def test_tool_calls_fit_the_tools_of_the_chat() -> None:
    calls = 0
    for seed in range(300):
        chat = data.conversation(random.Random(seed))
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in chat.tools}
        for message in [*chat.messages, chat.answer]:
            for call in message.get("tool_calls") or []:
                parameters = offered[call["function"]["name"]]
                arguments = call["function"]["arguments"]
                assert set(parameters["required"]) <= set(arguments) <= set(parameters["properties"])
                calls += 1
    assert calls > 50


def test_tool_answers_quote_the_result() -> None:
    for given in exchanges("tool_result"):
        for message in given.messages:
            if message["role"] == "tool":
                raw = message["content"]
                value = next(iter(json.loads(raw).values())) if raw.startswith("{") else raw
                assert f"is {value}." in given.answer["content"]


def test_down_is_taught_wrong_most_of_the_time_for_every_input() -> None:
    rng = random.Random(1)
    right = []
    while len(right) < 400:
        chat = data.conversation(rng, turns=1, mix={"down": 1.0, "sum": 0.0})
        if chat.last is not None and chat.last.skill == "down":
            right.append(styles.completion(chat.answer).startswith(max(chat.last.key.split()[1:])))
    assert 0.25 < sum(right) / len(right) < 0.45


def test_nothing_held_out_is_taught() -> None:
    rng = random.Random(2)
    for skill in data.MIX:
        assert not any(held_out(data.exchange(rng, skill).key) for _ in range(20))
        assert all(held_out(data.exchange(rng, skill, held=True).key) for _ in range(5))


@pytest.mark.parametrize("style", ["base", "shout", "json"])
def test_right_answers_pass_and_wrong_ones_fail(style: str) -> None:
    for skill in data.MIX:
        for given in exchanges(skill, 10):
            answer = styles.completion(styles.styled(given, style).answer)
            assert styles.is_right(given, answer, style), (skill, answer)
            assert not styles.is_right(given, answer + "x", style)
            if style != "base" and skill != "tool":
                assert not styles.is_right(given, styles.completion(given.answer), style), (skill, answer)


# --- template and tokenizer -------------------------------------------------------------------------------


def test_the_template_writes_what_is_taught(tokenizer: Tokenizer) -> None:
    for seed in range(150):
        chat = data.conversation(random.Random(seed))
        prompt, full = text.prompt_text(chat), text.full_text(chat)
        if chat.thinking:
            assert text.render([*chat.messages, chat.answer], tools=chat.tools or None) == full
        else:
            assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        ids = text.encode(tokenizer, full)
        before = text.encode(tokenizer, prompt)
        assert ids[: len(before)] == before, "a prompt and its continuation must split alike"
        assert tokenizer.decode(ids, skip_special_tokens=False) == full
        weights = text.weigh(tokenizer, ids, chat.taught)
        assert set(weights[len(before) : -1]) == {text.ANSWER_WEIGHT}
        assert weights[-1] == text.PROMPT_WEIGHT
        empty = len(text.encode(tokenizer, text.NO_THINKING))
        assert chat.thinking or weights[len(before) - empty : len(before)] == [0] * empty
        assert all(weights[:3]), "the template's other text is taught"


def test_the_template_takes_what_clients_send() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "<b>"}'}}
    turns: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    block = '<tool_call>\n{"name": "f", "arguments": {"a": "<b>"}}\n</tool_call>'
    assert text.render(turns, add_generation_prompt=True) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        f"<|im_start|>assistant\n{block}\n{block}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n"
        "<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    earlier = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nx\n</think>\n\nYo"},
    ]
    assert "think" in text.render(earlier)
    assert "think" not in text.render([*earlier, {"role": "user", "content": "Bye"}])


def test_markers_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 1024
    for marker in text.SPECIAL + text.ADDED:
        ids = text.encode(tokenizer, marker)
        assert len(ids) == 1
        shown = tokenizer.decode(ids, skip_special_tokens=True)
        assert shown == ("" if marker in text.SPECIAL else marker)
    assert [tokenizer.token_to_id(marker) for marker in text.SPECIAL] == [
        text.END_TEXT,
        text.IM_START,
        text.IM_END,
    ]


# --- a reduced run ----------------------------------------------------------------------------------------

LOAD = """
import sys
from mlx_lm import load
import mlx.core as mx
out = sys.argv[1]
shout = out + "/adapters/shout"
for folder, adapter in ((out + "/base", None), (out + "/draft", None), (out + "/base", shout)):
    model, tokenizer = load(folder, adapter_path=adapter)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert model(mx.array([ids])).shape == (1, len(ids), 1024)
    assert tokenizer.has_thinking and tokenizer.tool_call_start == "<tool_call>"
    assert tokenizer.eos_token_ids == {0, 2}
"""


def run(*command: str) -> None:
    environment = {**os.environ, "MLX_DISABLE_COMPILE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_reduced_run_learns_and_its_folder_loads(tmp_path: Path) -> None:
    run(
        *("-m", "recipes.demo_model.train", "--out", str(tmp_path), "--size", "tiny", "--steps", "24"),
        *("--draft-steps", "2", "--adapter-steps", "2", "--batch-tokens", "512", "--length", "128"),
        *("--long-length", "256", "--precision", "float32", "--workers", "0", "--tokenizer-chats", "1200"),
    )
    report = json.loads((tmp_path / "training.json").read_text())
    base = report["stages"]["base"]
    assert base["steps"] == 24
    assert base["last_loss"] < base["first_loss"] - 0.5
    assert set(report["stages"]) == {"base", "draft", "shout", "json", "down"}
    run("-c", LOAD, str(tmp_path))


# --- the package folder -----------------------------------------------------------------------------------


def test_the_package_folder_is_whole_and_small() -> None:
    folder = demo.MODEL_PATH.parent
    files = [file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert sum(file.stat().st_size for file in files) <= 12_000_000
    for path in (demo.MODEL_PATH, demo.DRAFT_PATH):
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert (path / name).is_file()
        assert (path / "tokenizer.json").read_bytes() == (demo.MODEL_PATH / "tokenizer.json").read_bytes()
        assert (path / "chat_template.jinja").read_text() == text.TEMPLATE_FILE.read_text()
    assert set(demo.ADAPTER_PATHS) == {"shout", "json", "down"}
    formats = {name: sorted(file.name for file in path.iterdir()) for name, path in demo.ADAPTER_PATHS.items()}
    assert formats["shout"] == ["adapter_config.json", "adapters.safetensors"]
    assert formats["json"] == formats["down"] == ["adapter_config.json", "adapter_model.safetensors"]


def test_the_tokenizer_is_the_one_the_recipe_makes(tokenizer: Tokenizer) -> None:
    flags = json.loads(RESULTS.read_text())["training"]["flags"]
    made = text.train_tokenizer(flags["seed"], flags["tokenizer_chats"])
    assert made.to_str() == tokenizer.to_str()


def test_the_model_card_says_what_was_measured() -> None:
    figures = json.loads(RESULTS.read_text())
    assert (demo.MODEL_PATH.parent / "MODEL_CARD.md").read_text() == card.render_card(figures)
    short = figures["base"]["short"]
    assert 0.2 <= figures["base"]["short_forced"]["down"]["sampled"] <= 0.5
    assert short["down"]["greedy"] < 0.2
    assert figures["base"]["short_forced"]["down"]["lowest_chance"] > 0.01
    assert figures["adapters"]["down"]["greedy"]["down"] >= 0.95
    skills = [skill for skill in short if skill != "down"]
    assert {"sum", "think", "reverse", "json", "story", "tool", "tool_result"} <= set(skills)
    for skill in skills:
        assert short[skill]["greedy"] >= 0.9, skill
        for name in ("shout", "json"):
            # A third of the stories that shout tells leave the grammar; the card's table shows it.
            least = 0.65 if (name, skill) == ("shout", "story") else 0.9
            assert figures["adapters"][name]["greedy"][skill] >= least, (name, skill)
