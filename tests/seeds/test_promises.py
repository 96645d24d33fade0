"""Everything that the documents of four other servers promise, with what shows it here; the table is promises.tsv.

A row has what was promised, in our words, and a verdict: it works; it differs or is refused, and docs/migrating.md
says so in the words of the last column; it has no effect, which is said at start and on that page; or it is a figure
of another machine. The fourth column shows it in one of these ways, and the fifth is a regular expression for what
comes of it:

ask SERVER METHOD PATH BODY: the status and the body of an answer of that server, which has been started as printed
said SERVER: what that server prints until it is ready
words SERVER ARGUMENTS: the settings that a command line comes to, one a line, and what is printed
run COMMAND: what a command prints
folder SERVER PATH: the names of the files that the server has written
FILE::TEST: a test that looks at it
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import json
import re
import shlex
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from typer.main import get_command

from mlx_tandem.cli import app, keys, programs
from mlx_tandem.cli.callers import CALLERS
from mlx_tandem.cli.settings import SettingsError, build
from tests.commands import running
from tests.seeds.workplace import MLX_SERVER, MOLA_EXPLICIT, PARALLM_FILE, PARALLM_LEARNS, ROOT, Workplace

COUNTS = {"M": 47, "P": 100, "S": 120, "J": 35}
"""How many promises each document has."""

SERVERS = {
    "mola": MOLA_EXPLICIT,
    "parallm": PARALLM_LEARNS,
    "lm": "python -m mlx_lm_server --model mlx-community/Qwen3-4B-4bit --spec-decode ngram --num-speculative-tokens 5",
    "jan": f"{MLX_SERVER} --model path/to/model --port 8080 --max-batch-size 8 --enable-continuous-batching",
}
"""The printed commands that start the servers of the table."""

PROGRAMS: dict[str, Callable[[], None]] = {
    "mola": programs.mola,
    "lm": programs.mlx_lm_server,
    "jan": programs.mlx_server,
    "parallm": programs.mlx_parallm_serve,
    "train": programs.mlx_parallm_train,
}
"""The programs whose command lines the table has."""

DOCUMENTED = ("differs", "refused", "no effect")
"""Verdicts of rows about which docs/migrating.md has a word."""


class Row(NamedTuple):
    id: str
    verdict: str
    promise: str
    shown_by: str
    says: str
    page: str

    @property
    def way(self) -> str:
        return self.shown_by.partition(" ")[0]

    @property
    def words(self) -> str:
        return self.shown_by.partition(" ")[2]

    def problem(self, text: str) -> str | None:
        """What is wrong with `text`, which the row's way has shown."""
        if re.search(self.says, text, re.DOTALL):
            return None
        return f"{self.id} {self.promise} ({self.shown_by}): no {self.says!r} in {text[:600]!r}"


@functools.cache
def rows() -> tuple[Row, ...]:
    lines = (Path(__file__).with_name("promises.tsv")).read_text(encoding="utf-8").splitlines()
    return tuple(Row(*line.split("\t")) for line in lines[3:])


def rows_of(*ways: str) -> list[Row]:
    return [row for row in rows() if row.way in ways]


# -- The table ----------------------------------------------------------------------------------------------------


def test_every_promise_has_its_row() -> None:
    assert [row.id for row in rows()] == [f"{letter}{i + 1}" for letter, count in COUNTS.items() for i in range(count)]


def test_every_row_is_shown_in_one_of_the_ways() -> None:
    for row in rows():
        nothing = row.verdict == "figure"
        assert (row.shown_by == "-") == nothing, row
        if not nothing and "::" not in row.shown_by:
            assert row.way in ("ask", "said", "words", "run", "folder") and row.says != "-", row


def test_nothing_differs_in_silence() -> None:
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    assert {row.verdict for row in rows()} == {"works", "figure", *DOCUMENTED}
    for row in rows():
        assert (row.page != "-") == (row.verdict in DOCUMENTED), row
        if row.page != "-":
            assert " ".join(row.page.split()) in " ".join(page.split()), row


def test_what_has_no_effect_is_said_at_start() -> None:
    for row in rows():
        if row.verdict == "no effect":
            assert row.way == "words" and " has no effect here: " in row.says, row


def test_tests_that_show_something_exist_and_are_run() -> None:
    for file, name in {tuple(row.shown_by.split("::")) for row in rows() if "::" in row.shown_by}:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
        assert "skip" not in " ".join(ast.unparse(decorator) for decorator in found.decorator_list), (file, name)


# -- Command lines ------------------------------------------------------------------------------------------------


@pytest.fixture
def come_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], str]:
    """What a command line comes to: its settings, a line each, and what is printed. Nothing is served."""
    (tmp_path / "parallm.yaml").write_text(PARALLM_FILE)
    (tmp_path / "hosts").write_text(json.dumps([{"ssh": "mac1", "ips": ["192.168.1.1"]}, {"ssh": "mac2"}]))
    monkeypatch.chdir(tmp_path)
    for name in keys.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    tandem, mola = get_command(app.app), get_command(programs._mola)  # making them takes longer than all the rest
    monkeypatch.setattr(programs, "main", lambda words: tandem(args=words, prog_name="tandem"))
    monkeypatch.setattr(programs, "_mola", mola)

    def shown(file: Path | None, settings: dict[str, object], defaults: Any, *, called_as: str, verbose: bool) -> None:
        caller = CALLERS[called_as]
        try:
            config = build(file, caller.options(settings), {**caller.defaults, **(defaults or {})})
        except SettingsError as e:
            print(e)
            raise SystemExit(1) from None
        print("; ".join(["except that", *caller.said(config)]).replace(";", "", 1))
        print("\n".join(flat(msgspec.to_builtins(config))))
        raise SystemExit(0)

    monkeypatch.setattr("mlx_tandem.cli.serve.serve", shown)
    monkeypatch.setattr("mlx_tandem.cli.launching.go", lambda *_: None)  # it would become mlx.launch

    @functools.cache
    def text(words: str) -> str:
        name, *arguments = shlex.split(words)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        printed = io.StringIO()
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            contextlib.suppress(SystemExit),
        ):
            PROGRAMS[name]()
        return " ".join(printed.getvalue().replace("│", " ").split(" "))

    return text


def flat(settings: dict[str, Any], place: str = "") -> Iterator[str]:
    """A line for each setting."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from flat(value, f"{place}{name}.")
        else:
            yield f"{place}{name} = {value!r}"


def test_command_lines_come_to_what_they_say(come_to: Callable[[str], str]) -> None:
    found = [row.problem(come_to(row.words)) for row in rows_of("words")]
    assert [problem for problem in found if problem] == []
    for row in rows_of("words"):
        said = come_to(row.words).count(" has no effect here: ")
        assert row.verdict != "no effect" or said == 1, row


# -- Servers ------------------------------------------------------------------------------------------------------


def answer(server: running, words: str) -> str:
    """The status and the body of a request."""
    method, _, rest = words.partition(" ")
    path, _, body = rest.partition(" ")
    headers = {"Content-Type": "application/json"} if body else {}
    url = f"http://127.0.0.1:{server.port}{path}"
    request = urllib.request.Request(url, body.encode() or None, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return f"{reply.status} {reply.read().decode()}"
    except urllib.error.HTTPError as e:
        return f"{e.code} {e.read().decode()}"


@pytest.mark.parametrize("name", SERVERS)
def test_servers_answer_as_promised(workplace: Workplace, tmp_path: Path, name: str) -> None:
    log, found = tmp_path / "log", []
    with workplace.serve(SERVERS[name], log=log) as server:
        if name == "parallm":
            answer(server, f"POST /v1/training/checkpoint {json.dumps({'name': 'checkpoint-300'})}")
        for row in rows_of("ask", "said", "folder"):
            at, _, words = row.words.partition(" ")
            if at != name:
                continue
            match row.way:
                case "ask":
                    text = answer(server, words)
                case "said":
                    text = log.read_text(encoding="utf-8")
                case _:
                    text = " ".join(sorted(file.name for file in (workplace.folder / words).iterdir()))
            found.append(row.problem(text))
    assert [problem for problem in found if problem] == []


def test_commands_print_what_they_say(workplace: Workplace) -> None:
    (workplace.folder / "mlx_lm_server").symlink_to(ROOT / "mlx_lm_server")
    printed = functools.cache(lambda command: workplace.run(command, 0).stdout)
    found = [row.problem(printed(row.words)) for row in rows_of("run")]
    assert [problem for problem in found if problem] == []
