"""Ask for answers under hundreds of JSON schemas at temperature 1, and check each answer with another library.

    python benchmarks/schemas.py --json-out benchmarks/results/schemas.json

The schemas are those of `tests/json_schemas.py`. A schema is either refused before anything is computed, or every
answer that has ended must be valid under it. An answer may be cut off by its limit of tokens; the share of those that
have ended is reported.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
from partial import Results, stop_cleanly

from mlx_tandem.api.engine import Engine
from mlx_tandem.api.generation import Completion
from mlx_tandem.cli.outputs import argument
from mlx_tandem.errors import InvalidRequest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.json_schemas import Schema, supported

PROMPT = "Answer with JSON."


def main() -> None:
    """Run the benchmark. The exit status is 1 if an answer was not valid."""
    parser = argparse.ArgumentParser(description="answers under JSON schemas, checked")
    parser.add_argument("--model", help="a model's folder; by default the demo model")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--at-once", type=int, default=6, help="schemas whose answers are computed at once")
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    stop_cleanly()
    results = Results(args.json_out, model=args.model or "demo", samples=args.samples, max_tokens=args.max_tokens)
    counts: dict[str, Counter[str]] = {}
    wrong: list[dict[str, Any]] = []
    with (
        Engine(args.model, max_num_seqs=args.at_once * args.samples) as engine,
        ThreadPoolExecutor(args.at_once) as pool,
    ):
        schemas = supported()
        for (name, schema), found in zip(
            schemas, pool.map(lambda s: answers(engine, s[1], args), schemas), strict=True
        ):
            own = counts.setdefault(name, Counter())
            own["schemas"] += 1
            if isinstance(found, InvalidRequest):
                own["refused"] += 1
                continue
            own["answers"] += len(found)
            for answer in found:
                own["finished"] += answer.finish_reason == "stop"
                if answer.finish_reason == "stop" and (why := problem(answer.text, schema)):
                    own["invalid"] += 1
                    wrong.append({"schema": schema, "text": answer.text, "why": why})
            results.add(categories={name: dict(own) for name, own in counts.items()}, wrong=wrong)
    total = sum(counts.values(), Counter())
    results.finish(total=dict(total), finished_share=round(total["finished"] / max(total["answers"], 1), 4))
    print(json.dumps(dict(total)))
    sys.exit(bool(wrong))


def answers(engine: Engine, schema: Schema, args: argparse.Namespace) -> list[Completion] | InvalidRequest:
    """Return the answers under a schema, or why it is refused."""
    try:
        return engine.generate([PROMPT] * args.samples, guided_json=schema, temperature=1.0, max_tokens=args.max_tokens)
    except InvalidRequest as e:
        return e


def problem(text: str, schema: Schema) -> str:
    """Return why a text is not valid under a schema; empty if it is."""
    try:
        value = json.loads(text)
    except ValueError as e:
        return str(e)
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    errors = kind(schema, format_checker=kind.FORMAT_CHECKER).iter_errors(value)
    return "; ".join(error.message for error in errors)


if __name__ == "__main__":
    main()
