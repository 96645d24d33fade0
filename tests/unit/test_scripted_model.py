"""The model that says given texts, run by mlx-lm without a server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_tandem.generation.reasoning.table import form_for
from mlx_tandem.generation.templates.environment import Refused, environment
from mlx_tandem.generation.tokenizer import Tokenizer
from mlx_tandem.generation.tools.table import knows_tools, parser_for
from tests import scripted_model
from tests.scripted_model import Script
from tests.tiny_families import module_of

HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>")
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
THOUGHT = "<|channel|>analysis<|message|>{0}<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
SAID = {
    "weather": ["<tool_call>\n{}\n</tool_call>", "It is sunny.", "It is sunny, too."],
    "x": "x" * 2000,
    "smile": "🙂🙂 – 🙂\n" * 9,
    "a call": THOUGHT.format("I call f.") + CALL,
    "another call": THOUGHT.format("I call f.") + CALL,
    "an answer": THOUGHT.format("x") + FINAL + "x",
    "another answer": THOUGHT.format("y") + FINAL + "x",
    'a "key"\n': "\x00\\",
    "nothing": "",
}


class Talker:
    """A scripted model in this process."""

    def __init__(self, folder: Path):
        config = json.loads((folder / "config.json").read_text())
        module = module_of("llama")
        self.model = module.Model(module.ModelArgs.from_dict(config))
        self.model.load_weights(str(folder / "model.safetensors"))
        self.ends = config["eos_token_id"]
        self.tokenizer = Tokenizer.load(folder)
        self.template = environment().from_string(self.tokenizer.config["chat_template"])

    def prompt(self, *messages: Mapping[str, Any], **values: Any) -> str:
        return self.template.render(messages=messages, add_generation_prompt=True, **values)

    def answer(self, *messages: Mapping[str, Any]) -> list[int]:
        ids = self.tokenizer.encode(self.prompt(*messages))
        cache = make_prompt_cache(self.model)
        said: list[int] = []
        feed = ids
        while not said or said[-1] not in self.ends:
            logits = self.model(mx.array([feed]), cache=cache)[0, -1]
            best = mx.argsort(logits)[-2:].tolist()
            assert logits[best[1]] - logits[best[0]] > 20, "the temperature changes nothing"
            feed = [best[1]]
            said += feed
        return said

    def text(self, *messages: Mapping[str, Any]) -> str:
        said = self.tokenizer.decode(self.answer(*messages), show_special=True)
        return said.removesuffix(scripted_model.END)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


RESULT = {"role": "tool", "content": "sunny"}
WARM = {"role": "tool", "content": "sunny, 21 degrees"}
SCRIPT = Script(SAID, heard={"degrees": "It is warm."}, special=HARMONY, ends=["<|call|>"])


@pytest.fixture(scope="module")
def talker(scripted_folder):
    return Talker(scripted_folder(SCRIPT))


@pytest.mark.parametrize(("seed", "longest"), [(0, 6), (1, 1), (2, 40)])
def test_every_text_is_said(scripted_folder, seed, longest):
    talker = Talker(scripted_folder(replace(SCRIPT, seed=seed, longest=longest)))
    for key, turns in SAID.items():
        for results, text in enumerate(scripted_model.listed(turns)):
            assert talker.text(user(f"Now {key}!"), *[RESULT] * results) == text
    assert talker.text(user("?")) == SCRIPT.otherwise


def test_which_text_is_said(talker):
    assistant = {"role": "assistant", "content": "weather"}
    first, second, last = SAID["weather"]
    weather = user("The weather, please.")
    assert talker.text(weather, assistant, RESULT, assistant, RESULT, RESULT) == last
    assert talker.text(weather, assistant, RESULT, user("Be brief.")) == second
    assert talker.text(weather, assistant, RESULT, user("The weather again.")) == first
    assert talker.text(weather, assistant, WARM) == "It is warm."
    assert talker.text(weather, assistant, WARM, user("Be brief.")) == "It is warm."
    assert talker.text(weather, assistant, WARM, assistant, RESULT) == last
    assert talker.text(weather, assistant, WARM, user("The weather again.")) == first
    assert talker.text(user("smile"), {"role": "system", "content": "Say nothing."}) == ""
    assert talker.text({"role": "user", "content": [{"type": "text", "text": "another answer"}]}).endswith("x")


def test_seeds_cut_differently(scripted_folder):
    cuts = set()
    for seed in range(3):
        talker = Talker(scripted_folder(Script({"smile": SAID["smile"]}, seed=seed)))
        cuts.add(tuple(len(talker.tokenizer.token_bytes(i)) for i in talker.answer(user("smile"))))
    assert len(cuts) == 3


def test_a_strict_template_refuses(scripted_folder):
    talker = Talker(scripted_folder(Script({}, strict=True, shown=5)))
    system, hello, answer = {"role": "system", "content": "Be brief."}, user("Hello!"), {"role": "assistant"}
    prompt = talker.prompt(system, hello, answer, RESULT, RESULT, answer, hello, tools=[{"name": "f"}])
    assert "Hello" in prompt and "Hello!" not in prompt and '"f"' not in prompt
    for wrong in ([hello, hello], [hello, system], [answer, hello], [hello, answer, answer]):
        with pytest.raises(Refused):
            talker.prompt(*wrong)


def test_signs_choose_the_parsers(scripted_folder):
    signs = "<tool_call>\n<function=f>\n</think>"
    template = Talker(scripted_folder(Script({}, signs=signs, opening="<think>"))).tokenizer.config["chat_template"]
    assert (parser_for(template), form_for(template), knows_tools(template)) == ("qwen3_coder", "think", True)
    prompt = environment().from_string(template).render(messages=[], tools=[{}], add_generation_prompt=True)
    assert signs in prompt
    assert prompt.endswith("<think>")
