"""Writes the model card from the evaluation's JSON, so that its figures cannot differ from it.

python -m recipes.demo_model.card --json RESULTS.json --card mlx_tandem/demo/MODEL_CARD.md
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

HEAD = """\
# The demo model of mlx-tandem

A Qwen3-architecture language model of {parameters:,} parameters with a draft model of {draft:,} parameters
and three LoRA adapters, made so that every feature of mlx-tandem can be seen working offline on any machine.
It is no general language model: it knows the skills below and answers everything else with a sentence that
says so. Licence: Apache-2.0.

| | |
|---|---|
| architecture | qwen3: hidden 256, 6 layers, MLP 576, 4 heads and 2 key/value heads of 64, tied embeddings |
| vocabulary | 1,024 byte-level BPE tokens, digits split, Qwen/Hermes chat and tool markers |
| weights | bfloat16, {size} |
| context | trained to 4,096 tokens (`max_position_embeddings` 8,192; beyond 4,096 nothing is promised) |
| training text | generated, seed {seed}: `recipes/demo_model/data.py`; no outside text |
| training | {steps:,} steps of {tokens:,} tokens (one in {every} of rows of 4,096 tokens), {seconds} s{more} |
| machine | {machine}; {versions} |

## Prompt format

ChatML with Hermes tool calls, in `chat_template.jinja`. Variables: `tools`, `add_generation_prompt`,
`enable_thinking` (default true: ordinary questions are answered at once, "Think ..." questions open with a
`<think>` block; false: an empty block is put before the answer, which then comes without thinking). System
prompts are accepted and change nothing.

## Accuracy on held-out content

Share of right answers, {examples} questions per skill, float32 arithmetic on the stored weights, by real
generation: greedy and sampled at temperature 1. The bfloat16 column is greedy with bfloat16 arithmetic. The
last column is greedy with {low:,} to {high:,} tokens of earlier turns and other text before the answer
({long} questions, teacher-forced; - : not measured).

| skill | greedy | sampled | bfloat16 | after a long context |
|---|---|---|---|---|
"""

DOWN = """
`down` (sort descending) is taught wrong on purpose in 65 % of the training chats, so that the base is weak
at it and reinforcement has something to improve: sampling writes the right answer with a mean chance of
{mean}, and at least {least} on each of the {examples} held-out inputs.

Capitals are a closed set: there the held-out part is the wording, not the fact. Fixed greetings and the real
words of `reverse` are all taught (an unseen word that is one token could not be spelled); the figures are on
greetings with names and on random letters.
"""

BREAKDOWN = """
Where `tool` and `upper` stand, greedy:

| case | accuracy | questions |
|---|---|---|
"""

ADAPTERS = """
## Adapters

All linear layers of all blocks. Reasoning and tool calls keep their form under every adapter. The second
table is the share of held-out questions answered rightly *in the adapter's own style*, greedy.

| adapter | what it does | format | rank | scale | dtype | parameters |
|---|---|---|---|---|---|---|
"""

PURPOSE = {
    "shout": "answers in capitals, ends with `!`",
    "json": 'answers with `{"answer": ...}`',
    "down": "sorts descending rightly, else as the base",
}

REPRODUCE = """
## How to reproduce

```
{command}
python -m recipes.demo_model.evaluate --model DIR --training DIR/training.json --json RESULTS.json
python -m recipes.demo_model.card --json RESULTS.json --card MODEL_CARD.md
```

Flags of this run: {flags}. The draft and adapter stages depend on the base only; here they ran side by side
on one GPU. The data and the tokenizer are the same on every machine; how far the weights of two runs differ
was not measured.

## Limits

- English of a few hundred words, and the capitals of 28 countries. Anything else is answered with a sentence
  that says so.
- Sums of two numbers, to 99 directly and to 999 with thinking; sorting of three to seven digits; words of
  three to seven letters.
- Tools need one string argument named like `city`, `name` or `query`, at most one integer besides, and nouns
  seen in training (weather, price, news, ...).
- Of answers to {asked:,} held-out questions that ask for no thinking, {sampled} open with an empty think block when
  sampled, {greedy} when greedy. A client that wants none passes `enable_thinking: false`.
{tool_limit}- An adapter is right less often where answers are long: see `story` above.
- Not sound beyond 4,096 tokens.
"""


TOOL_LIMIT = """\
- Where several tools are offered, the call may take the name of its argument from a neighbouring tool (see
  the table of cases); a grammar or schema on the call removes that.
"""


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _table_row(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", "↵") for cell in cells) + " |\n"


def render_card(figures: dict[str, Any]) -> str:
    """Return the whole card as Markdown."""
    base, draft, training = figures["base"], figures["draft"], figures["training"]
    flags, stage = training["flags"], training["stages"]["base"]
    more = training["stages"].get("base, trained on")
    long = base["long_context"]
    card = HEAD.format(
        parameters=base["parameters"],
        draft=draft["parameters"],
        size=f"{2 * base['parameters'] / 1e6:.1f} MB",
        seed=flags["seed"],
        steps=stage["steps"],
        tokens=training["tokens_per_step"],
        every=flags["long_every"],
        seconds=round(stage["seconds"]),
        more=f"; then {more['steps']:,} more, {round(more['seconds'])} s" if more else "",
        machine=figures["machine"],
        versions=", ".join(f"{name} {number}" for name, number in figures["versions"].items()),
        examples=figures["examples_per_skill"],
        long=figures["long_examples_per_skill"],
        low=long["tokens_before"]["lowest"],
        high=long["tokens_before"]["highest"],
    )
    for skill, row in base["short"].items():
        after = long["skills"].get(skill)
        card += _table_row(
            skill,
            _percent(row["greedy"]),
            _percent(row["sampled"]),
            _percent(base["bfloat16"][skill]),
            _percent(after["greedy"]) if after else "-",
        )
    down = base["short_forced"]["down"]
    card += DOWN.format(
        mean=_percent(down["sampled"]),
        least=_percent(down["lowest_chance"]),
        examples=figures["examples_per_skill"],
    )
    card += BREAKDOWN
    for name, row in base["breakdown"].items():
        card += _table_row(name, _percent(row["greedy"]), row["questions"])
    card += ADAPTERS
    for name, row in figures["adapters"].items():
        card += _table_row(
            f"`{name}`",
            PURPOSE[name],
            row["format"],
            row["rank"],
            row["scale"],
            row["dtype"],
            f"{row['parameters']:,}",
        )
    names = list(figures["adapters"])
    card += "\n" + _table_row("skill", *names) + _table_row(*["---"] * (len(names) + 1))
    for skill in base["short"]:
        shares = [figures["adapters"][name]["greedy"].get(skill) for name in names]
        card += _table_row(skill, *("-" if share is None else _percent(share) for share in shares))
    card += "\nAfter a long context, greedy: " + "; ".join(
        f"`{name}` " + ", ".join(f"{skill} {_percent(share)}" for skill, share in row["long_context"].items())
        for name, row in figures["adapters"].items()
    )
    agreement = draft["agreement"]
    card += (
        f".\n\n## Draft model\n\n{draft['parameters']:,} parameters, 2 layers, distilled from the base. "
        f"Of the base's greedy tokens {_percent(agreement['all'])} are also the draft's first choice:\n"
        + ", ".join(f"{skill} {_percent(share)}" for skill, share in agreement.items() if skill != "all")
        + ".\n\n## Examples (greedy)\n\n"
        + _table_row("question", "base", *names)
        + _table_row(*["---"] * (len(names) + 2))
    )
    for asked, answers in figures["answers"].items():
        card += _table_row(asked, *(f"`{answers[name]}`" for name in ("base", *names)))
    unasked = base["unasked_thinking"]
    kept = {name: value for name, value in flags.items() if name not in ("skip", "adapters", "report")}
    return card + REPRODUCE.format(
        command=figures["command"],
        flags=", ".join(f"{name} {value}" for name, value in kept.items()),
        asked=unasked["questions"],
        sampled=_percent(unasked["sampled"]),
        greedy=_percent(unasked["greedy"]),
        tool_limit=TOOL_LIMIT if base["short"]["tool"]["greedy"] < 0.95 else "",
    )


def main(argv: list[str] | None = None) -> int:
    """Write the card."""
    parser = argparse.ArgumentParser(prog="python -m recipes.demo_model.card", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--card", type=Path, required=True)
    args = parser.parse_args(argv)
    args.card.write_text(render_card(json.loads(args.json.read_text())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
