"""Write docs/compatibility.md from the outcomes of tests/clients, as `make clients` does.

python -m scripts.compatibility REPORT …   REPORT: by `pytest --junitxml`; later ones replace modules of earlier ones
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from tests.clients import node

PAGE = Path(__file__).resolve().parents[1] / "docs" / "compatibility.md"

CLIENTS: Mapping[str, tuple[str, ...]] = {
    "test_ai_sdk": ("ai", "@ai-sdk/openai-compatible"),
    "test_anthropic": ("anthropic",),
    "test_anthropic_npm": ("@anthropic-ai/sdk",),
    "test_instructor": ("instructor", "openai"),
    "test_langchain": ("langchain-openai",),
    "test_langchain_agent": ("langchain", "langchain-openai"),
    "test_litellm": ("litellm",),
    "test_lm_eval": ("lm-eval",),
    "test_ollama": ("ollama",),
    "test_openai": ("openai",),
    "test_openai_agents": ("openai-agents", "openai"),
    "test_openai_batches": ("openai",),
    "test_openai_responses": ("openai",),
    "test_pydantic_ai": ("pydantic-ai-slim", "openai"),
    "test_tinker": ("tinker",),
    "test_renderers": ("renderers", "openai"),
}
"""The packages that each module of tests/clients tries: of PyPI, or of NPM."""

NPM = json.loads((node.FOLDER / "package.json").read_text(encoding="utf-8"))["dependencies"]
"""The versions of the packages for Node."""

PROGRAMS: Mapping[str, tuple[str, str]] = {
    "aider": ("aider", "aider"),
    "claude code": ("Claude Code", "claude"),
    "cline": ("Cline CLI", "cline"),
    "codex": ("Codex CLI", "codex"),
    "continue": ("Continue CLI", "cn"),
    "open webui": ("Open WebUI", "open-webui"),
}
"""The programs that tests/clients/test_programs.py tries where they are installed: their names, and their commands.

The name of a test begins with the key of its program.
"""

OWN = ("test_environments", "test_jan", "test_keepalives", "test_loopback", "test_refusals", "test_tinker_cookbook")
"""Modules of tests/clients that run no client, or several at once."""

HEAD = """\
# Compatibility

Clients of others, run unmodified against a real server with the built-in model and its adapters. `make clients`
runs them (`tests/clients`) and writes this page from the outcomes. What each client has to be told is in
[Clients](clients.md).
"""


PROGRAMS_HEAD = """\
Programs chat, run a command or make an edit as they are told (`tests/clients/test_programs.py`), on machines where they
are installed. Claude Code and Codex talk to a model with a strict chat template that says a script; for the others the
engine says prepared answers behind the real server. A row keeps its date while its program is not run.
"""


NOT_RUN = "not run"


@dataclass
class Tried:
    """What was tried with one module's client: the outcome of each thing, by its name."""

    outcomes: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, outcome: str) -> None:
        """Add an outcome. Of several with the same name, which differ in their parameters, the worst counts."""
        order = ("pass", "skipped", "fail")
        self.outcomes[name] = max(outcome, self.outcomes.get(name, "pass"), key=order.index)

    @property
    def result(self) -> str:
        """The outcome of everything."""
        failed = [name for name, outcome in self.outcomes.items() if outcome == "fail"]
        if failed:
            return f"**fail**: {', '.join(failed)}"
        return "pass" if "pass" in self.outcomes.values() else NOT_RUN


def read(report: str) -> tuple[dict[str, Tried], str]:
    """Return what was tried by each module, and the date of the run, from the text of a report of pytest."""
    root = ET.fromstring(report)
    found: dict[str, Tried] = {}
    for case in root.iter("testcase"):
        module = case.get("classname", "").rpartition(".")[2]
        if module in OWN:
            continue
        kinds = {child.tag for child in case}
        outcome = "fail" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "pass"
        name, _, parameters = case.get("name", "").removeprefix("test_").replace("_", " ").partition("[")
        if module == "test_programs":
            module = next(key for key in PROGRAMS if name.startswith(key))
            name = name.removeprefix(module).strip() or parameters.removesuffix("]") or "a round"
        found.setdefault(module, Tried()).add(name, outcome)
    suite = next(root.iter("testsuite"))
    return found, suite.get("timestamp", "")[:10]


def page(found: Mapping[str, Tried], date: str, versions: Mapping[str, str], machine: str, before: str = "") -> str:
    """Return the page. `versions` has the version of each package. Programs that were not run keep their rows of the
    page `before`.
    """
    lines = [HEAD, f"Run on {date} with {machine}.", ""]
    lines += ["| client | version | date | what was tried | outcome |", "|---|---|---|---|---|"]
    for module in sorted(found.keys() & CLIENTS, key=lambda module: CLIENTS[module]):
        name, *others = CLIENTS[module]
        over = "".join(f", {other} {versions[other]}" for other in others)
        tried = found[module]
        said = "; ".join(tried.outcomes)
        lines.append(f"| `{name}` | {versions[name]}{over} | {date} | {said} | {tried.result} |")
    lines += ["", PROGRAMS_HEAD, "| program | version | date | what was tried | outcome |", "|---|---|---|---|---|"]
    for key, (name, _) in PROGRAMS.items():
        tried = found.get(key, Tried())
        row = f"| {name} | {versions.get(name, '')} | {date} | {'; '.join(tried.outcomes)} | {tried.result} |"
        kept = re.search(rf"^\| {name} \|.*$", before, re.MULTILINE) if tried.result == NOT_RUN else None
        lines.append(kept[0] if kept else row)
    return "\n".join(lines) + "\n"


def form_of(text: str) -> list[str]:
    """Return what is wrong with the form of the page; nothing for a page that `page` could have written."""
    rows = re.findall(
        r"^\| `([\w@/-]+)` \| (\S+)[^|]* \| (\d{4}-\d\d-\d\d) \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE
    )
    wrong = [] if text.startswith(HEAD) else ["the beginning is another one"]
    listed = [row[0] for row in rows]
    wrong += [f"{names[0]} is missing" for names in CLIENTS.values() if names[0] not in listed]
    wrong += [f"{row[0]}: {row[4]}" for row in rows if row[4] != "pass"]
    wrong += [f"{name} is missing" for name, _ in PROGRAMS.values() if f"\n| {name} | " not in text]
    return wrong


def main() -> None:
    """Write the page."""
    found: dict[str, Tried] = {}
    date = ""
    for path in sys.argv[1:]:
        more, date = read(Path(path).read_text(encoding="utf-8"))
        found |= more
    versions = {name: NPM.get(name) or version(name) for names in CLIENTS.values() for name in names}
    environment = os.environ | {"PATH": node.path()}
    for name, command in PROGRAMS.values():
        if program := shutil.which(command, path=node.path()):
            said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, env=environment)
            versions[name] = (re.search(r"\d+\.\d+\S*", said.stdout) or [said.stdout.strip()])[0]
    machine = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    before = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page(found, date, versions, machine, before), encoding="utf-8")
    for module, tried in sorted(found.items()):
        print(f"{module}: {tried.result}")


if __name__ == "__main__":
    main()
