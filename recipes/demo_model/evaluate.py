"""Measures the held-out accuracy of the demo model, its adapters and its draft model; writes JSON.

    python -m recipes.demo_model.evaluate --model mlx_tandem/demo --json benchmarks/results/demo_model.json

Short chats are answered by real generation, greedy and sampled at temperature 1. After a long context the answer is
teacher-forced: every position's argmax equals the answer exactly if greedy generation writes it, and the product of
the probabilities is the chance that sampling writes it.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import data, styles, text
from .exchanges import Message
from .tools import make_tools
from .train import fast_blas

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx_lm.models.qwen3 import Model
    from tokenizers import Tokenizer

EXACT = tuple(name for name in data.MIX if name not in styles.OPEN_SKILLS)
"""Skills with one right answer."""
LONG_OUTPUT = ("count", "story", "repeat", "upper")
LONG_CONTEXT = (3300, 3900)
"""Tokens before the question in the long-context test."""


# --- held-out questions ---------------------------------------------------------------------------


def question(rng: random.Random, skill: str, history: int = 0) -> data.Conversation:
    """Return a chat whose last question is held out, after ``history`` characters of other turns."""
    tools = make_tools(rng) if skill in data.TOOL_SKILLS else None
    last = data.exchange(rng, skill, tools, held=True)
    return data.conversation(rng, turns=1, last=last, tools=tools, characters=history)


def questions(seed: int, skill: str, count: int) -> list[data.Conversation]:
    """Return short held-out chats: the question alone, or after a system prompt or tool list, as in training."""
    rng = random.Random(f"evaluate {seed} {skill}")
    return [question(rng, skill) for _ in range(count)]


def long_questions(tokenizer: Tokenizer, seed: int, skill: str, count: int) -> list[tuple[data.Conversation, int]]:
    """Return held-out chats with ``LONG_CONTEXT`` tokens before the answer, and that number."""
    rng = random.Random(f"evaluate long {seed} {skill}")
    found: list[tuple[data.Conversation, int]] = []
    characters = 9000
    while len(found) < count:
        chat = question(rng, skill, characters)
        tokens = len(text.encode(tokenizer, text.prompt_text(chat)))
        if tokens < LONG_CONTEXT[0]:
            characters += 200
        elif tokens > LONG_CONTEXT[1]:
            characters -= 200
        else:
            found.append((chat, tokens))
    return found


# --- model calls ----------------------------------------------------------------------------------


def generate(
    model: Model,
    prompts: list[list[int]],
    limit: int,
    temperature: float = 0.0,
    seed: int = 0,
    rows: int = 512,
) -> list[list[int]]:
    """Return the generated ids of each prompt, up to and without the end token; ``temperature`` 0 is greedy."""
    import mlx.core as mx
    from mlx_lm.models.cache import BatchKVCache

    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    answers: list[list[int]] = [[] for _ in prompts]
    key = mx.random.key(seed)
    for start in range(0, len(order), rows):
        chosen = order[start : start + rows]
        width = max(len(prompts[index]) for index in chosen)
        padding = [width - len(prompts[index]) for index in chosen]
        ids = mx.array([[0] * pad + prompts[index] for pad, index in zip(padding, chosen, strict=True)])
        cache: list[Any] = [BatchKVCache(padding) for _ in model.layers]
        done = mx.zeros(len(chosen), mx.bool_)
        steps: list[mx.array] = []
        for step in range(limit):
            hidden = model.model(ids, cache)[:, -1]
            logits = model.model.embed_tokens.as_linear(hidden).astype(mx.float32)
            if temperature:
                key, now = mx.random.split(key)
                token = mx.random.categorical(logits / temperature, key=now)
            else:
                token = mx.argmax(logits, axis=-1)
            steps.append(token)
            done = done | (token == text.IM_END) | (token == text.END_TEXT)
            ids = token[:, None]
            mx.eval(token, done)
            if step % 8 == 7 and bool(mx.all(done)):
                break
        columns: list[list[int]] = np.stack([np.array(token) for token in steps]).tolist()
        for row, index in enumerate(chosen):
            for column in columns:
                if column[row] in (text.IM_END, text.END_TEXT):
                    break
                answers[index].append(column[row])
    return answers


def forced(
    model: Model, rows: list[tuple[list[int], list[int]]], batch_tokens: int = 65536
) -> list[tuple[bool, float]]:
    """Return for each (prompt, answer) whether greedy generation would write the answer, and its probability in
    sampling.
    """
    import mlx.core as mx

    order = sorted(range(len(rows)), key=lambda index: len(rows[index][0]) + len(rows[index][1]))
    results: list[tuple[bool, float]] = [(False, 0.0)] * len(rows)
    while order:
        width = len(rows[order[-1]][0]) + len(rows[order[-1]][1])
        count = max(1, batch_tokens // width)
        chosen, order = order[-count:], order[:-count]
        full = [rows[index][0] + rows[index][1] for index in chosen]
        ids = mx.array([row + [0] * (width - len(row)) for row in full])
        logits = model(ids).astype(mx.float32)
        scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        picked = mx.take_along_axis(scores[:, :-1], ids[:, 1:, None], axis=-1)[..., 0]
        best = mx.argmax(scores[:, :-1], axis=-1) == ids[:, 1:]
        mx.eval(picked, best)
        for row, index in enumerate(chosen):
            start, stop = len(rows[index][0]) - 1, len(full[row]) - 1
            right = bool(mx.all(best[row, start:stop]))
            results[index] = right, float(mx.exp(mx.sum(picked[row, start:stop])))
    return results


# --- figures --------------------------------------------------------------------------------------


def rate(values: list[bool]) -> float:
    """Return the share of true values."""
    return round(sum(values) / len(values), 4)


def short_accuracy(
    model: Model,
    tokenizer: Tokenizer,
    chats: dict[str, list[data.Conversation]],
    style: str = "base",
    temperature: float = 0.0,
) -> dict[str, float]:
    """Return the share of right answers per skill, by real generation."""
    shares: dict[str, float] = {}
    for limit, group in (
        (110, [name for name in chats if name not in LONG_OUTPUT]),
        (190, [name for name in chats if name in LONG_OUTPUT]),
    ):
        flat = [(name, chat) for name in group for chat in chats[name]]
        if not flat:
            continue
        prompts = [text.encode(tokenizer, text.prompt_text(chat)) for _, chat in flat]
        answers = generate(model, prompts, limit, temperature, seed=1)
        marks: dict[str, list[bool]] = {name: [] for name in group}
        for (name, chat), ids in zip(flat, answers, strict=True):
            assert chat.last is not None
            written = tokenizer.decode(ids, skip_special_tokens=False)
            marks[name].append(styles.is_right(chat.last, written, style))
        shares |= {name: rate(values) for name, values in marks.items()}
    return {name: shares[name] for name in chats}


def forced_rows(
    tokenizer: Tokenizer, chats: list[data.Conversation], style: str = "base"
) -> list[tuple[list[int], list[int]]]:
    """Return the (prompt, answer) ids of chats."""
    rows = []
    for chat in chats:
        assert chat.last is not None
        answer = styles.styled(chat.last, style).answer
        if not chat.thinking:
            answer = {name: value for name, value in answer.items() if name != "reasoning_content"}
        prompt = text.encode(tokenizer, text.prompt_text(chat))
        rows.append((prompt, text.encode(tokenizer, styles.completion(answer) + "<|im_end|>")))
    return rows


def forced_accuracy(
    model: Model, tokenizer: Tokenizer, chats: dict[str, list[data.Conversation]], style: str = "base"
) -> dict[str, dict[str, float]]:
    """Return greedy and sampled accuracy per skill by teacher forcing, for skills with one right answer."""
    flat = [(name, row) for name in chats for row in forced_rows(tokenizer, chats[name], style)]
    results = forced(model, [row for _, row in flat])
    table: dict[str, dict[str, float]] = {}
    for name in chats:
        mine = [result for (owner, _), result in zip(flat, results, strict=True) if owner == name]
        chances = [chance for _, chance in mine]
        table[name] = {
            "greedy": rate([right for right, _ in mine]),
            "sampled": round(sum(chances) / len(chances), 4),
            "lowest_chance": round(min(chances), 4),
        }
    return table


def draft_agreement(
    base: Model, draft: Model, tokenizer: Tokenizer, chats: dict[str, list[data.Conversation]]
) -> dict[str, float]:
    """Return the share of the base's greedy tokens that are also the draft's greedy choice, per skill and over all."""
    import mlx.core as mx

    hits: dict[str, list[bool]] = {}
    for name, mine in chats.items():
        prompts = [text.encode(tokenizer, text.prompt_text(chat)) for chat in mine]
        answers = generate(base, prompts, 190 if name in LONG_OUTPUT else 110)
        hits[name] = []
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = [*prompt, *answer, text.IM_END]
            choice: list[int] = np.array(mx.argmax(draft(mx.array([ids[:-1]])), axis=-1)[0]).tolist()
            hits[name] += [
                guess == real for guess, real in zip(choice[len(prompt) - 1 :], ids[len(prompt) :], strict=True)
            ]
    shares = {name: rate(values) for name, values in hits.items()}
    return {"all": rate([hit for values in hits.values() for hit in values]), **shares}


def base_figures(
    args: argparse.Namespace, tokenizer: Tokenizer, chats: dict[str, list[data.Conversation]]
) -> dict[str, Any]:
    """Return the figures of the base model."""
    import mlx.core as mx

    from . import model

    base = model.load_model(args.model / "base")
    exact = {name: chats[name] for name in EXACT}
    greedy = short_accuracy(base, tokenizer, chats)
    sampled = short_accuracy(base, tokenizer, chats, temperature=1.0)
    long = {name: long_questions(tokenizer, args.seed, name, args.long_examples) for name in EXACT}
    counts = [count for found in long.values() for _, count in found]
    direct = {name: questions(args.seed + 1, name, args.examples) for name in ("sum", "reverse", "json", "tool")}
    for chat in (chat for mine in direct.values() for chat in mine):
        chat.thinking = False
    figures = {
        "parameters": model.parameter_count(base.parameters()),
        "short": {name: {"greedy": greedy[name], "sampled": sampled[name]} for name in chats},
        "short_forced": forced_accuracy(base, tokenizer, exact),
        "long_context": {
            "tokens_before": {
                "lowest": min(counts),
                "mean": round(sum(counts) / len(counts)),
                "highest": max(counts),
            },
            "skills": forced_accuracy(base, tokenizer, {name: [chat for chat, _ in long[name]] for name in long}),
        },
        "thinking_off": forced_accuracy(base, tokenizer, direct),
        "unasked_thinking": unasked_thinking(base, tokenizer, chats),
        "breakdown": breakdown(base, tokenizer, chats),
    }
    rounded = model.load_model(args.model / "base", mx.bfloat16)
    figures["bfloat16"] = short_accuracy(rounded, tokenizer, chats)
    return figures


def unasked_thinking(model: Model, tokenizer: Tokenizer, chats: dict[str, list[data.Conversation]]) -> dict[str, float]:
    """Return how often a question that asks for no thinking is answered with a think block.

    The figures are its mean probability in sampling, and the share of greedy answers.
    """
    think = text.encode(tokenizer, "<think>")
    asked = [chat for name in chats if name != "think" for chat in chats[name] if chat.thinking]
    results = forced(model, [(text.encode(tokenizer, text.prompt_text(chat)), think) for chat in asked])
    return {
        "questions": len(results),
        "sampled": round(sum(chance for _, chance in results) / len(results), 5),
        "greedy": rate([opens for opens, _ in results]),
    }


def breakdown(
    model: Model, tokenizer: Tokenizer, chats: dict[str, list[data.Conversation]]
) -> dict[str, dict[str, float]]:
    """Return the greedy accuracy of ``tool`` and ``upper`` by the number of tools offered, and by kind of text."""
    groups: dict[str, list[data.Conversation]] = {}
    for chat in chats["tool"]:
        groups.setdefault(f"tool, {len(chat.tools)} offered", []).append(chat)
    for chat in chats["upper"]:
        assert chat.last is not None
        plain = str(chat.last.short).replace(" ", "").isalpha() and len(str(chat.last.short).split()) <= 5
        groups.setdefault("upper, up to five words" if plain else "upper, sentences", []).append(chat)
    table = forced_accuracy(model, tokenizer, dict(sorted(groups.items())))
    return {name: {"greedy": row["greedy"], "questions": len(groups[name])} for name, row in table.items()}


def adapter_figures(
    args: argparse.Namespace, tokenizer: Tokenizer, chats: dict[str, list[data.Conversation]]
) -> dict[str, Any]:
    """Return the figures of the adapters."""
    from . import model

    figures: dict[str, Any] = {}
    for adapter in model.ADAPTERS:
        tuned = model.load_model(args.model / "base")
        model.load_adapter(tuned, args.model / "adapters" / adapter.name)
        taught = {name: mine for name, mine in chats.items() if adapter.name == "down" or name != "down"}
        long: dict[str, list[data.Conversation]] = {
            name: [chat for chat, _ in long_questions(tokenizer, args.seed + 2, name, args.long_examples)]
            for name in ("down", "sum", "reverse", "tool_result")
            if name in taught
        }
        figures[adapter.name] = {
            "format": adapter.format,
            "rank": adapter.rank,
            "scale": adapter.scale,
            "dtype": adapter.dtype,
            "parameters": model.parameter_count(tuned.trainable_parameters()),
            "greedy": short_accuracy(tuned, tokenizer, taught, adapter.name),
            "sampled": short_accuracy(tuned, tokenizer, taught, adapter.name, temperature=1.0),
            "long_context": {
                name: row["greedy"] for name, row in forced_accuracy(tuned, tokenizer, long, adapter.name).items()
            },
        }
    return figures


EXAMPLES = (
    "Hello! I am Ana.",
    "What is 12 + 5?",
    "Think, then answer: 347 + 285",
    "Sort: 5 3 9 1",
    "Sort down: 5 3 9 1",
    "Reverse: garden",
    "Say: this is a test",
    "Uppercase: the quick brown fox",
    "As JSON: Ana is 34 and lives in Oslo.",
    "What is the capital of France?",
    "Count from 3 to 30",
    "Tell me a short story about a fox.",
    "How do I paint a fence?",
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def example_prompts() -> dict[str, str]:
    """Return the rendered prompts of the model card's examples."""
    prompts = {
        asked: text.render([{"role": "user", "content": asked}], add_generation_prompt=True) for asked in EXAMPLES
    }
    asked = "What is the weather in Oslo?"
    turns: list[Message] = [{"role": "user", "content": asked}]
    prompts[f"{asked} (with get_weather)"] = text.render(turns, tools=[WEATHER], add_generation_prompt=True)
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    turns += [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny, 21 degrees"},
    ]
    prompts["... and its result: sunny, 21 degrees"] = text.render(turns, tools=[WEATHER], add_generation_prompt=True)
    return prompts


def example_answers(args: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, dict[str, str]]:
    """Return the greedy answers of the base and of each adapter."""
    from . import model

    prompts = example_prompts()
    ids = [text.encode(tokenizer, prompt) for prompt in prompts.values()]
    table: dict[str, dict[str, str]] = {asked: {} for asked in prompts}
    for name in ("base", *(adapter.name for adapter in model.ADAPTERS)):
        loaded = model.load_model(args.model / "base")
        if name != "base":
            model.load_adapter(loaded, args.model / "adapters" / name)
        for asked, answer in zip(prompts, generate(loaded, ids, 190), strict=True):
            table[asked][name] = tokenizer.decode(answer, skip_special_tokens=False)
    return table


def versions() -> dict[str, str]:
    """Return the library versions that matter; the name of MLX's back end package differs by platform."""
    found = {"python": platform.python_version()}
    for name in ("mlx", "mlx-lm", "tokenizers", "numpy"):
        found[name] = version(name)
    return found


def training_report(files: list[Path]) -> dict[str, Any]:
    """Return the reports of one training, which may have run in parts, as one."""
    reports = [json.loads(file.read_text()) for file in files]
    if not reports:
        return {}
    stages = {name: row for report in reports for name, row in report["stages"].items()}
    return {**reports[0], "stages": stages, "seconds": round(sum(report["seconds"] for report in reports), 1)}


def main(argv: list[str] | None = None) -> int:
    """Run the evaluation."""
    parser = argparse.ArgumentParser(prog="python -m recipes.demo_model.evaluate", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder with base/, draft/ and adapters/")
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--training", type=Path, nargs="*", default=[], help="training reports to quote")
    parser.add_argument("--machine", default=platform.platform(), help="how to name this machine")
    parser.add_argument("--command", default="", help="the training command, to be quoted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--examples", type=int, default=128, help="questions per skill")
    parser.add_argument("--long-examples", type=int, default=32, help="questions per skill after a long context")
    args = parser.parse_args(argv)
    fast_blas()
    import mlx.core as mx
    from tokenizers import Tokenizer

    from . import model

    start = time.perf_counter()
    tokenizer = Tokenizer.from_file(str(args.model / "base" / "tokenizer.json"))
    chats = {name: questions(args.seed, name, args.examples) for name in data.MIX}
    figures: dict[str, Any] = {
        "machine": args.machine,
        "device": str(mx.default_device()),
        "versions": versions(),
        "command": args.command,
        "seed": args.seed,
        "examples_per_skill": args.examples,
        "long_examples_per_skill": args.long_examples,
        "training": training_report(args.training),
        "base": base_figures(args, tokenizer, chats),
    }
    print("base", json.dumps(figures["base"]["short"]), flush=True)
    figures["adapters"] = adapter_figures(args, tokenizer, chats)
    print("adapters", {name: row["greedy"] for name, row in figures["adapters"].items()}, flush=True)
    draft = model.load_model(args.model / "draft")
    few = {name: mine[: max(4, args.examples // 4)] for name, mine in chats.items()}
    figures["draft"] = {
        "parameters": model.parameter_count(draft.parameters()),
        "agreement": draft_agreement(model.load_model(args.model / "base"), draft, tokenizer, few),
    }
    figures["answers"] = example_answers(args, tokenizer)
    figures["seconds"] = round(time.perf_counter() - start, 1)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
