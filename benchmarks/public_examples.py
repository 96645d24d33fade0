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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partial import Results
from public.expressions import skip
from public.families import family_of, joined
from public.harmony import message, text_of, tokens_of
from public.language import Class, Module
from public.parsers import Answer, Family, StandIn, Stream, Tokens
from public.reader import Reader
from public.reasons import REASONS
from public.tests import Case, cases_of, run_case
from public.values import NotServed, OurArguments, Ours, Record, Skipped, Unknown, Unread, same

from mlx_tandem.cli.outputs import argument
from mlx_tandem.generation.reasoning.table import HARMONY

TIMINGS: tuple[dict[str, Any], ...] = tuple(
    {"held": held, "cut": cut} for cut in (False, True) for held in ("", "calls", "arguments")
)
"""When a streamed test gets the events of our parser. What is compared is what is said, not when."""

SHOWN = 300
"""Most characters of a text that are shown."""


@dataclass
class Outcome:
    """The outcome of one test."""

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
    only_thoughts: bool = False

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
        self.timing = TIMINGS[0]
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
            for self.timing in (*TIMINGS, TIMINGS[0]):
                outcome = self._run(module, case, where)
                if not self.failures:
                    break
            self.timing = TIMINGS[0]
            outcome.streamed = True
        outcome.failures = list(self.failures)
        for family, text, answer, others in self.heard:
            outcome.texts.append((text, answer))
            outcome.family = outcome.family or family.label
            outcome.only_thoughts = family.raw or family.calls == "none"
            if others is not None:
                outcome.failures.append(("pieces", others[0], next(each for each in others if each != others[0])))
        if outcome.state == "unread" and not self.made:
            return None
        if outcome.state == "agrees" and not self.heard:
            return None
        if outcome.state == "agrees" and not self.reader.asserted:
            outcome.state, outcome.why = "unread", "no assertion"
        if outcome.state in ("agrees", "unread") and outcome.failures and self.heard:
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
        except NotServed as error:
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
        if name == "model_validate" and args and isinstance(args[0], dict):
            return Record(what.path.rpartition(".")[0], dict(args[0]))
        if name == "validate_python" and args:
            return args[0]
        if name == "from_role_and_content":
            return message(*args)
        if name == "get_encoding":
            return Tokens()
        if name in ("MagicMock", "Mock", "SimpleNamespace"):
            return Record(name, dict(kwargs), open_ended=name != "SimpleNamespace")
        family = family_of(self.name, what.path, args, kwargs)
        if family is not None:
            return self._stand_in(family, args, kwargs)
        if "_parser:" in name or (
            name.endswith(("Parser", "Detector", "Adapter", "ParserEngine"))
            and ("parser" in what.path or "detector" in what.path)
        ):
            raise NotServed(what.path.rpartition("parser:")[2] or name)
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
                raise NotServed(f"DelegatingParser with {found!r}")
        family = joined(*parts)
        return None if family is None else self._stand_in(family, args, kwargs)

    def _stand_in(self, family: Family, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StandIn:
        """Return our parser in the place of theirs."""
        if kwargs.get("stream_reasoning") is False:
            raise Unread("an option of theirs, with which thoughts are not streamed")
        if self.name == "sglang" and family == Family("openai", HARMONY):
            kwargs = {**kwargs, "events": True}
        tools = kwargs.get("tools") or next((each for each in args if isinstance(each, list)), None)
        number = len(self.made)
        known = self.known[number] if number < len(self.known) else []
        made = StandIn(family, tools, kwargs, known, self.heard, **self.timing)
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

REPLACED: dict[str, Callable[..., Any]] = {
    "fix_tool_call_tokenization": lambda tokens, *args: tokens,
    "get_model_output_str": text_of,
    "get_model_output_tokens": tokens_of,
}
"""Functions of the tests that only concern tokens, and what is called in their place."""

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


def reason_of(outcome: Outcome) -> str:
    """Return the reason why a difference is accepted; empty if there is none."""
    return next((reason for start, reason in REASONS.items() if outcome.name.startswith(start)), "")


def table(outcomes: list[Outcome]) -> Iterator[str]:
    """Yield the lines of the table of families."""
    counts: dict[tuple[str, str], Counter[tuple[bool, str]]] = defaultdict(Counter)
    for each in outcomes:
        if each.family and each.state in ("agrees", "differs"):
            counts[each.project, each.family][each.streamed, each.state] += 1
    yield "| project | forms | whole: agree | streamed: agree |"
    yield "| --- | --- | --- | --- |"
    for (project, family), own in sorted(counts.items()):
        cells = [f"{own[way, 'agrees']} of {own[way, 'agrees'] + own[way, 'differs']}" for way in (False, True)]
        yield f"| {project} | {family} | {cells[0]} | {cells[1]} |"


def shares(outcomes: list[Outcome]) -> Iterator[str]:
    """Yield the lines with the shares of tests, and of their different texts, that agree."""
    read = [each for each in outcomes if each.state in ("agrees", "differs")]
    for project in sorted({each.project for each in outcomes}):
        for kind in ("calls", "thoughts"):
            for streamed in (False, True):
                own = [
                    each
                    for each in read
                    if (each.project, each.streamed) == (project, streamed)
                    and each.only_thoughts == (kind == "thoughts")
                ]
                agree = sum(each.state == "agrees" for each in own)
                reasons = sum(each.state == "differs" and bool(reason_of(each)) for each in own)
                yield (
                    f"{project}, {kind}, {'streamed' if streamed else 'whole'}: {agree} of {len(own)} tests agree "
                    f"({agree / max(len(own), 1):.3f}), {reasons} differ for a reason"
                )
        texts: dict[tuple[str, str], bool] = {}
        for each in (each for each in read if each.project == project):
            for text, _ in each.texts:
                key = each.family, text
                texts[key] = texts.get(key, True) and each.state == "agrees"
        agree = sum(texts.values())
        yield f"{project}: {agree} of {len(texts)} different texts agree ({agree / max(len(texts), 1):.3f})"


def left_out(outcomes: list[Outcome]) -> Iterator[str]:
    """Yield the lines about the tests that are not compared."""
    for project in sorted({each.project for each in outcomes}):
        own = [each for each in outcomes if each.project == project]
        states = Counter(each.state for each in own)
        yield f"{project}: {states['unread']} tests could not be read, {states['skipped']} are skipped by the project"
        others = Counter(each.why.rpartition(".")[2] for each in own if each.state == "other")
        names = ", ".join(f"{name} {count}" for name, count in others.most_common())
        yield f"{project}: {sum(others.values())} tests are about forms that are not served here: {names}"


def details(outcomes: list[Outcome]) -> Iterator[str]:
    """Yield the lines that list each difference."""
    for each in sorted(outcomes, key=lambda each: (each.family, each.name)):
        if each.state != "differs":
            continue
        reason = reason_of(each)
        yield f"\n- [{each.family}] {each.name}{' (streamed)' if each.streamed else ''}{reason and ': '}{reason}"
        for text, answer in each.texts[:4]:
            yield f"  - text {shown(text)}"
            yield f"    ours: thoughts {shown(answer.reasoning)}, text {shown(answer.content)}, {answer.calls}"
        for text, left, right in each.failures[:4]:
            yield f"  - fails: {text[:200]} — ours {shown(left)}, theirs {shown(right)}"


def main() -> None:
    """Compare, print the counts and each difference. The exit status is 1 if a difference has no reason."""
    parser = argparse.ArgumentParser(description="other projects' example texts through our parsers")
    parser.add_argument("--vllm", type=Path, help="a checkout of vLLM")
    parser.add_argument("--sglang", type=Path, help="a checkout of SGLang")
    parser.add_argument("--only", default="", help="only tests whose ids have this text")
    parser.add_argument("--unread", action="store_true", help="list the tests that could not be read")
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    outcomes: list[Outcome] = []
    for name, root in (("vllm", args.vllm), ("sglang", args.sglang)):
        if root is not None:
            outcomes += [each for each in Project(name, root).outcomes() if args.only in each.name]
    for part in (table, shares, left_out, details):
        print("\n".join(part(outcomes)))
    if args.unread:
        for each in outcomes:
            if each.state == "unread":
                print("unread", each.name, each.why)
    differing = [each for each in outcomes if each.state == "differs"]
    counts = Counter(f"{each.project}, {each.family}: {each.state}" for each in outcomes if each.family)
    Results(args.json_out).finish(
        counts=dict(sorted(counts.items())),
        summary=[*shares(outcomes), *left_out(outcomes)],
        differences={each.name: reason_of(each) for each in differing},
    )
    sys.exit(not all(map(reason_of, differing)))


if __name__ == "__main__":
    main()
