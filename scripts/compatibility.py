"""Write docs/compatibility.md from the outcomes of tests/clients, as `make clients` does.

python scripts/compatibility.py REPORT …   REPORT: by `pytest --junitxml`; later ones replace modules of earlier ones
"""

from __future__ import annotations

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

PAGE = Path(__file__).resolve().parents[1] / "docs" / "compatibility.md"

CLIENTS: Mapping[str, tuple[str, ...]] = {
    "test_anthropic": ("anthropic",),
    "test_instructor": ("instructor", "openai"),
    "test_langchain": ("langchain-openai",),
    "test_langchain_agent": ("langchain", "langchain-openai"),
    "test_litellm": ("litellm",),
    "test_lm_eval": ("lm-eval",),
    "test_ollama": ("ollama",),
    "test_openai": ("openai",),
    "test_openai_agents": ("openai-agents", "openai"),
    "test_openai_responses": ("openai",),
    "test_pydantic_ai": ("pydantic-ai-slim", "openai"),
}
"""The packages that each module of tests/clients tries."""

PROGRAMS: Mapping[str, tuple[str, str]] = {
    "aider": ("aider", "aider"),
    "claude code": ("Claude Code", "claude"),
    "cline": ("Cline CLI", "cline"),
    "codex": ("Codex CLI", "codex"),
    "continue": ("Continue CLI", "cn"),
    "open webui": ("Open WebUI", "open-webui"),
}
"""The programs that tests/clients/test_programs.py tries where they are installed: their names, and their commands."""

OWN = ("test_loopback", "test_refusals")
"""Modules of tests/clients that try no client."""

HEAD = """\
# Compatibility

Clients of others, run unmodified against a real server with the built-in model and its adapters. `make clients`
runs them (`tests/clients`) and writes this page from the outcomes. What each client has to be told is in
[Clients](clients.md).
"""


PROGRAMS_HEAD = """\
Programs chat, run a command or make an edit as they are told by prepared answers, with the real server between
(`tests/clients/test_programs.py`), on machines where they are installed.
"""


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
        return "pass" if "pass" in self.outcomes.values() else "not run"


def read(report: str) -> tuple[dict[str, Tried], str]:
    """Return what was tried by each module, and the date of the run, from the text of a report of pytest."""
    root = ET.fromstring(report)
    found: dict[str, Tried] = {}
    for case in root.iter("testcase"):
        module = case.get("classname", "").rpartition(".")[2]
        if module in OWN:
            continue
        kinds = {child.tag for child in case}
        if module == "test_programs":
            module = case.get("name", "").removeprefix("test_").replace("_", " ")
        outcome = "fail" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "pass"
        name = case.get("name", "").partition("[")[0].removeprefix("test_").replace("_", " ")
        found.setdefault(module, Tried()).add(name, outcome)
    suite = next(root.iter("testsuite"))
    return found, suite.get("timestamp", "")[:10]


def page(found: Mapping[str, Tried], date: str, versions: Mapping[str, str], machine: str) -> str:
    """Return the page. `versions` has the version of each package."""
    lines = [HEAD, f"Run on {date} with {machine}.", ""]
    lines += ["| client | version | date | what was tried | outcome |", "|---|---|---|---|---|"]
    for module in sorted(found.keys() & CLIENTS, key=lambda module: CLIENTS[module]):
        name, *others = CLIENTS[module]
        over = "".join(f", {other} {versions[other]}" for other in others)
        tried = found[module]
        said = "; ".join(tried.outcomes)
        lines.append(f"| `{name}` | {versions[name]}{over} | {date} | {said} | {tried.result} |")
    lines += ["", PROGRAMS_HEAD, "| program | version | date | outcome |", "|---|---|---|---|"]
    for key, (name, _) in PROGRAMS.items():
        lines.append(f"| {name} | {versions.get(name, '')} | {date} | {found.get(key, Tried()).result} |")
    return "\n".join(lines) + "\n"


def form_of(text: str) -> list[str]:
    """Return what is wrong with the form of the page; nothing for a page that `page` could have written."""
    rows = re.findall(
        r"^\| `([\w-]+)` \| (\S+)[^|]* \| (\d{4}-\d\d-\d\d) \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE
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
    versions = {name: version(name) for names in CLIENTS.values() for name in names}
    for name, command in PROGRAMS.values():
        if shutil.which(command):
            said = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
            versions[name] = (re.search(r"\d+\.\d+\S*", said) or [said.strip()])[0]
    machine = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    PAGE.write_text(page(found, date, versions, machine), encoding="utf-8")
    for module, tried in sorted(found.items()):
        print(f"{module}: {tried.result}")


if __name__ == "__main__":
    main()
