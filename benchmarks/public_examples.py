"""Read the texts with which vLLM and SGLang test their parsers, and compare what our parsers make of them.

    python benchmarks/public_examples.py --vllm DIR --sglang DIR --json-out FILE

The folders are checkouts of the two projects, of which the tests and the lists of names are needed. A test is followed
by its syntax tree (`public/reader.py`), with our parser in the place of theirs; no line of theirs is handed to Python.
A test agrees with us if all of its assertions hold; names and argument values are compared, and texts without white
space at their ends. Each whole text is also read in single characters and in pieces of 3 to 7 characters.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from public.expressions import skip
from public.families import family_of, joined
from public.language import Class, Module
from public.parsers import Answer, Family, StandIn, Stream, Tokens
from public.reader import Reader
from public.reasons import REASONS
from public.tests import Case, cases_of, run_case
from public.values import OurArguments, Ours, Record, Skipped, Unknown, Unread, same

SHOWN = 300
"""Most characters of a text that are shown."""


class OtherFamily(Unread):
    """A test is about a form that is not served here. The text names it."""


@dataclass
class Outcome:
    """What came of one test."""

    project: str
    file: str
    test: str
    state: str
    """agrees, differs, unread, skipped or other"""
    family: str = ""
    why: str = ""
    streamed: bool = False
    texts: list[tuple[str, Answer]] = field(default_factory=list)
    failures: list[tuple[str, Any, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The id of the test."""
        return f"{self.project}:{self.file}::{self.test}"


class Project:
    """The tests of one project."""

    def __init__(self, name: str, root: Path):
        self.name = name
        self.root = root
        self.made: list[StandIn] = []
        self.held = False
        self.known: list[list[Stream]] = []
        self.heard: list[Any] = []
        self.failures: list[tuple[str, Any, Any]] = []
        own = {"vllm": root / "vllm", "sglang": root / "python" / "sglang"}[name]
        tests = {"vllm": root / "tests", "sglang": root / "test"}[name]
        self.reader = Reader({name: own, tests.name: tests}, self.call, self._fail, REPLACED, self._made_from)
        self.tests = tests

    def _fail(self, text: str, left: Any, right: Any) -> None:
        """Note an assertion that does not hold."""
        self.failures.append((text, left, right))

    def files(self) -> Iterator[Path]:
        """Yield the files with tests of parsers."""
        for path in sorted(self.tests.rglob("test_*.py")):
            parts = path.relative_to(self.tests).as_posix()
            if any(part in parts for part in PLACES[self.name]):
                yield path

    def outcomes(self) -> Iterator[Outcome]:
        """Yield what comes of each test."""
        for path in self.files():
            where = path.relative_to(self.root).as_posix()
            dotted = ".".join((self.tests.name, *path.relative_to(self.tests).with_suffix("").parts))
            module = self.reader.load(path, dotted)
            cases = cases_of(self.reader, module)
            while True:
                self.known = []
                try:
                    case = next(cases)
                except StopIteration:
                    break
                except Exception as error:
                    yield Outcome(self.name, where, "parameters", "unread", why=repr(error))
                    break
                outcome = self._outcome(module, case, where)
                if outcome is not None:
                    yield outcome
        if self.name == "vllm":
            yield from self._samples()

    def _samples(self) -> Iterator[Outcome]:
        """Yield what comes of the samples that vLLM replays through all parsers of its engine."""
        builder = self.reader.module("tests.parser.engine.trace_builder")
        build = builder.names.get("build_samples") if builder is not None else None
        if build is None:
            return
        for name, family in SAMPLES.items():
            self.reader.begin()
            try:
                samples = list(build(name))
            except Unread as error:
                yield Outcome(self.name, "tests/parser/engine/trace_builder.py", name, "unread", why=str(error))
                continue
            for sample in samples:
                yield self._sample(name, family, sample)

    def _sample(self, name: str, family: Family, sample: Any) -> Outcome:
        """Return what comes of one sample."""
        outcome = Outcome(self.name, "tests/parser/engine/trace_builder.py", f"{name}[{sample.get('id')}]", "agrees")
        outcome.family = family.label
        kwargs = {"chat_template_kwargs": sample.get("chat_template_kwargs")}
        text = "".join(text for _, text in sample.get("tokens"))
        heard: list[Any] = []
        answer = StandIn(family, sample.get("tools"), kwargs, [], heard).whole(text)
        outcome.texts.append((text, answer))
        calls = [{"name": call, "arguments": OurArguments(arguments)} for call, arguments in answer.calls]
        found = {"reasoning": Ours(answer.reasoning), "content": Ours(answer.content), "tool_calls": calls}
        for part, ours in found.items():
            theirs = sample.get(f"expected_{part}")
            if part == "tool_calls" and theirs is not None:
                theirs = [{**each, "arguments": json.dumps(each.get("arguments", {}))} for each in theirs]
            if theirs is not None and not same(ours, theirs):
                outcome.failures.append((part, ours, theirs))
        if heard[0][3] is not None:
            outcome.failures.append(("pieces", heard[0][3], None))
        outcome.state = "differs" if outcome.failures else "agrees"
        return outcome

    def _outcome(self, module: Module, case: Case, where: str) -> Outcome | None:
        """Return what comes of a test; None if it gives no text to a parser."""
        outcome = self._run(module, case, where)
        if any(each.streams for each in self.made):
            self.known = [each.streams for each in self.made]
            for self.held in (False, True):
                outcome = self._run(module, case, where)
                if not self.failures:
                    break
            self.held = False
            outcome.streamed = True
        outcome.failures = list(self.failures)
        for family, text, answer, others in self.heard:
            outcome.texts.append((text, answer))
            outcome.family = outcome.family or family.label
            if others is not None:
                outcome.failures.append(("pieces", others[0], next(each for each in others if each != others[0])))
        if outcome.state == "unread" and not self.made:
            return None
        if outcome.state == "agrees" and not self.heard:
            return None
        if outcome.state == "agrees" and not self.reader.asserted:
            outcome.state, outcome.why = "unread", "no assertion"
        if outcome.state in ("agrees", "unread") and outcome.failures:
            outcome.state = "differs"
        return outcome

    def _run(self, module: Module, case: Case, where: str) -> Outcome:
        """Follow a test once."""
        self.made, self.heard, self.failures = [], [], []
        outcome = Outcome(self.name, where, case.name, "agrees")
        try:
            run_case(self.reader, module, case)
        except Skipped:
            outcome.state, outcome.why = "skipped", "skipped"
        except OtherFamily as error:
            outcome.state, outcome.why = "other", str(error)
        except Unread as error:
            outcome.state, outcome.why = "unread", str(error)
        except (AssertionError, AttributeError, IndexError, KeyError, StopIteration, TypeError, ValueError) as error:
            read = not isinstance(error, TypeError) or "NoneType" in str(error)
            if read and (self.heard or any(each.streams for each in self.made)):
                self.failures.append((repr(error), None, None))
            else:
                outcome.state, outcome.why = "unread", repr(error)
        return outcome

    def call(self, what: Unknown, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a call of something outside the tests means."""
        name = what.name
        if what.path in ("pytest.skip", "unittest.SkipTest"):
            skip(*args)
        if what.path == "pytest.param":
            return Record("pytest.param", kwargs, args)
        if what.path == "pytest.fail":
            self._fail("fail", args[0] if args else "", None)
            return None
        if name in ("get_tokenizer", "from_pretrained", "cached_get_tokenizer"):
            return Tokens()
        if name == "ensure_json":
            return args[0]
        if name == "detokenize_incrementally":
            ids = kwargs["all_input_ids"]
            return [ids[-1].text], ids[-1].text, 0, 0
        if name in ("get_tool_parser", "get_reasoning_parser"):
            return Unknown(f"{self.name}.{'tool' if 'tool' in name else 'reasoning'}_parser:{args[0]}", self.call)
        if name == "get_parser" and self.name == "vllm":
            calls, thoughts = (kwargs.get(f"{each}_parser_name") or "" for each in ("tool", "reasoning"))
            return Unknown(f"vllm.combined_parser:{calls}+{thoughts}", self.call)
        if name in ("MagicMock", "Mock", "SimpleNamespace"):
            return Record(name, dict(kwargs), open_ended=name != "SimpleNamespace")
        family = family_of(self.name, what.path, args, kwargs)
        if family is not None:
            return self._stand_in(family, args, kwargs)
        if "_parser:" in name or (
            name.endswith(("Parser", "Detector", "Adapter", "ParserEngine"))
            and ("parser" in what.path or "detector" in what.path)
        ):
            raise OtherFamily(what.path.rpartition("parser:")[2] or name)
        if name[:1].isupper():
            return Record(what.path, _fields(name, args, kwargs), args)
        return Unknown(f"{what.path}()", self.call)

    def _made_from(self, made_of: Class, base: Unknown, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return our parser for a class that joins two of their parsers; None for another class."""
        if base.name != "DelegatingParser":
            return None
        parts: list[Family | None] = []
        for name in ("tool_parser_cls", "reasoning_parser_cls"):
            found = next((each.scope.names[name] for each in made_of.order if name in each.scope.names), None)
            parts.append(family_of(self.name, found.path, (), {}) if isinstance(found, Unknown) else None)
            if parts[-1] is None and found is not None:
                raise OtherFamily(f"DelegatingParser with {found!r}")
        family = joined(*parts)
        return None if family is None else self._stand_in(family, args, kwargs)

    def _stand_in(self, family: Family, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StandIn:
        """Return our parser in the place of theirs."""
        tools = kwargs.get("tools") or next((each for each in args if isinstance(each, list)), None)
        number = len(self.made)
        known = self.known[number] if number < len(self.known) else []
        made = StandIn(family, tools, kwargs, known, self.heard, held=self.held)
        self.made.append(made)
        return made


SAMPLES = {
    "deepseek_v32": Family("deepseek_v32", "think"),
    "gemma4": Family("gemma4", "gemma4"),
    "glm47_moe": Family("glm45", "think", opened=True),
    "granite": Family("granite", "granite"),
    "kimi_k2": Family("kimi_k2", "kimi_k2", opened=True),
    "minimax_m2": Family("minimax_m2", "think", opened=True),
    "qwen3": Family("qwen3_coder", "think", opened=True),
    "seed_oss": Family("seed_oss", "seed_oss", opened=True),
}
"""Our forms for the parsers of vLLM's engine for which it builds samples."""

PLACES = {
    "vllm": ("tool_parsers/", "tool_use/", "reasoning/", "parser/"),
    "sglang": ("function_call", "reasoning_parser", "parser/"),
}
"""The parts of paths by which files with tests of parsers are known."""

REPLACED = {"fix_tool_call_tokenization": lambda tokens, *args: tokens}
"""Functions of the tests that only concern token ids, and what is called in their place."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "ToolCall": {"type": "function", "id": None},
    "DeltaMessage": {"content": None, "reasoning": None, "tool_calls": []},
}
"""The fields that records of outside have if they are not given."""


def _fields(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a record of outside."""
    made = {**_DEFAULTS.get(name, {}), **kwargs}
    if isinstance(made.get("function"), dict):
        made["function"] = Record("function", dict(made["function"]))
    return made


def shown(value: Any) -> str:
    """Return a value as a report shows it."""
    text = repr(str(value)) if isinstance(value, Ours) else repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}"


def report(outcomes: list[Outcome]) -> list[str]:
    """Return the lines of the report."""
    lines: list[str] = []
    tables: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for each in outcomes:
        if each.family and each.state in ("agrees", "differs"):
            mode = "streamed" if each.streamed else "whole"
            tables[each.project, each.family][f"{mode} {each.state}"] += 1
    lines.append("| project | family | whole: agree of | streamed: agree of |\n| --- | --- | --- | --- |")
    for (project, family), counts in sorted(tables.items()):
        cells = [
            f"{counts[f'{mode} agrees']} of {counts[f'{mode} agrees'] + counts[f'{mode} differs']}"
            for mode in ("whole", "streamed")
        ]
        lines.append(f"| {project} | {family} | {cells[0]} | {cells[1]} |")
    for project in sorted({each.project for each in outcomes}):
        own = [each for each in outcomes if each.project == project]
        states = Counter(each.state for each in own)
        for streamed in (False, True):
            counts = Counter(each.state for each in own if each.streamed == streamed)
            total = counts["agrees"] + counts["differs"]
            lines.append(
                f"{project}, {'streamed' if streamed else 'whole'}: {counts['agrees']} of {total} agree "
                f"({counts['agrees'] / max(total, 1):.3f})"
            )
        lines.append(f"{project}: not read {states['unread']}, skipped by the project {states['skipped']}")
        others = Counter(each.why for each in own if each.state == "other")
        lines.append(f"{project}: forms that are not served here {sum(others.values())}: {dict(others.most_common())}")
    return lines


def details(outcomes: list[Outcome]) -> list[str]:
    """Return the lines that list each difference."""
    lines: list[str] = []
    for each in sorted(outcomes, key=lambda each: (each.family, each.name)):
        if each.state != "differs":
            continue
        reason = REASONS.get(each.name) or REASONS.get(each.name.partition("[")[0], "")
        lines.append(f"\n- [{each.family}] {each.name}{' (streamed)' if each.streamed else ''} {reason}")
        for text, answer in each.texts[:4]:
            lines.append(f"  - text {shown(text)}")
            lines.append(f"    ours: thoughts {shown(answer.reasoning)}, text {shown(answer.content)}, {answer.calls}")
        for text, left, right in each.failures[:4]:
            lines.append(f"  - fails: {text[:200]} — ours {shown(left)}, theirs {shown(right)}")
    return lines


def main() -> None:
    """Compare, print the counts and each difference. The exit status is 1 if a difference has no reason."""
    parser = argparse.ArgumentParser(description="other projects' example texts through our parsers")
    parser.add_argument("--vllm", type=Path, help="a checkout of vLLM")
    parser.add_argument("--sglang", type=Path, help="a checkout of SGLang")
    parser.add_argument("--only", default="", help="only tests whose ids have this text")
    parser.add_argument("--unread", action="store_true", help="list the tests that could not be read")
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    outcomes: list[Outcome] = []
    for name, root in (("vllm", args.vllm), ("sglang", args.sglang)):
        if root is not None:
            outcomes += [each for each in Project(name, root).outcomes() if args.only in each.name]
    print("\n".join([*report(outcomes), *details(outcomes)]))
    if args.unread:
        for each in outcomes:
            if each.state == "unread":
                print("unread", each.name, each.why)
    differing = [each for each in outcomes if each.state == "differs"]
    if args.json_out:
        found = {
            "counts": Counter(f"{each.project} {each.family} {each.state}" for each in outcomes if each.family),
            "differences": {each.name: REASONS.get(each.name, "") for each in differing},
        }
        args.json_out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    sys.exit(any(each.name not in REASONS for each in differing))


if __name__ == "__main__":
    main()
