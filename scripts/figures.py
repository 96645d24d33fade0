"""Write the figures in README.md: tables made of the committed files under benchmarks/results, and nothing else.

python scripts/figures.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures: make figures -->\n", "<!-- end of figures -->\n"


def figures() -> str:
    """All tables; what was not measured yet has none."""
    parts = [
        *(peers(name, _read(name)) for name in _names("peers*.json")),
        *(engine(name, _read(name)) for name in _names("engine-*.json")),
        *(adapters(name, _read(name)) for name in _names("adapters-*.json")),
        *(long_prompt(name, _read(name)) for name in _names("long_prompt*.json")),
    ]
    return "\n".join(parts) if parts else "No figures are committed yet.\n"


def peers(name: str, result: dict[str, Any]) -> str:
    text = f"**Servers beside each other**, streamed events per second, {_where(result)} ([data]({_link(name)})).\n\n"
    for shape, content in result["shapes"].items():
        servers = list(content["rounds"])
        text += _head(f"{shape} model, at once", *servers, *(f"tandem / {s}" for s in servers[1:]))
        for row in content["ratios"]:
            level = row["concurrency"]
            at = {r["server"]: r["median"] for r in content["results"] if r["concurrency"] == level}
            cells = [f"{at[s]['events_per_s']:,.0f}" for s in servers]
            text += _row(str(level), *cells, *(f"{row[f'tandem/{s}']:.2f}" for s in servers[1:]))
        text += "\n"
    return text


def engine(name: str, result: dict[str, Any]) -> str:
    text = (
        f"**The engine without HTTP, {result['model']} model**, decoded tokens per second beside mlx-lm's "
        f"BatchGenerator, a different sampler per row, {_where(result)} ([data]({_link(name)})).\n\n"
    ) + _head("batch", "tandem", "BatchGenerator", "ratio")
    for row in result["results"]:
        sides = (f"{row[side]['decode_tokens_per_s']:,.0f}" for side in ("tandem", "batch_generator"))
        text += _row(str(row["batch"]), *sides, f"{row['ratio']['decode']:.2f}")
    return text


def adapters(name: str, result: dict[str, Any]) -> str:
    text = (
        f"**What adapters cost, {result['shape']} model**, {len(result['load']['adapters'])} adapters of rank "
        f"{result['rank']} on all linears, tokens per second over HTTP, {_where(result)} ([data]({_link(name)})).\n\n"
    ) + _head("at once", "base", "one adapter", "mixed", "mixed / one", "one / base", "mixed / base")
    for row in result["ratios"]:
        level = row["concurrency"]
        at = {r["mode"]: r["median"]["tokens_per_s"] for r in result["results"] if r["concurrency"] == level}
        ratios = (f"{row[key]:.2f}" for key in ("mixed/same", "same/base", "mixed/base"))
        text += _row(str(level), *(f"{at[mode]:,.0f}" for mode in ("base", "same", "mixed")), *ratios)
    return text


def long_prompt(name: str, result: dict[str, Any]) -> str:
    text = (
        f"**A long prompt beside {result['streams']} running streams, {result['shape']} model**, 99th percentile of "
        f"their inter-token time, {_where(result)} ([data]({_link(name)})).\n\n"
    ) + _head("prompt", "undisturbed", "meanwhile", "ratio", "first token of the prompt")
    for row in result["results"]:
        text += _row(
            f"{row['prompt_tokens']:,} tokens",
            f"{row['undisturbed_p99_ms']:.1f} ms",
            f"{row['meanwhile_p99_ms']:.1f} ms",
            f"{row['p99_ratio']:.2f}",
            f"{row['ttft_ms'] / 1e3:.2f} s",
        )
    return text


def _names(pattern: str) -> list[str]:
    return sorted(f.name for f in RESULTS.glob(pattern))


def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return content


def _link(name: str) -> str:
    return (RESULTS / name).relative_to(ROOT).as_posix()


def _where(result: dict[str, Any]) -> str:
    machine = result["machine"]
    kernels = result.get("environment", {}).get("OPENBLAS_CORETYPE")
    blas = f", OpenBLAS held to its {kernels} kernels" if kernels else ""
    return f"{machine['cores']} cores of {machine['cpu']}{blas}, {result['time'][:10]}"


def _head(*cells: str) -> str:
    return _row(*cells) + "|" + "---:|" * len(cells) + "\n"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |\n"


def rewritten(page: str) -> str:
    """The page with today's figures in it."""
    before, found, rest = page.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found or not found_end:
        raise ValueError(f"{PAGE.name} has no place for the figures: {BEGIN.strip()} … {END.strip()}")
    return f"{before}{BEGIN}\n{figures()}\n{END}{after}"


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    new = rewritten(page)
    if "--check" in sys.argv:
        sys.exit(
            0 if page == new else f"{PAGE.name}: the figures are not those of benchmarks/results; run make figures"
        )
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
