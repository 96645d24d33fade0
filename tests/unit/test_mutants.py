"""The table of changes that `make mutants` makes, and how it makes them."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from scripts import mutants
from scripts.mutants import ROOT, Mutant, changed, survivors

TABLE = mutants.mutants()


def named(tests: str) -> bool:
    """Return whether a test that is named as pytest names it exists: a folder, a file, or a function of a file."""
    file, _, function = tests.partition("::")
    if not function:
        return (ROOT / file).exists()
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("mutant", TABLE, ids=[f"{Path(m.file).stem}-{i}" for i, m in enumerate(TABLE, 1)])
def test_a_change_of_the_table_can_be_made(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    after = changed(mutant, text)  # its line occurs once
    assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(text))
    assert mutant.file.startswith("mlx_tandem/")
    assert mutant.tests
    assert [tests for tests in mutant.tests if not named(tests)] == []


def test_the_table_has_no_change_twice() -> None:
    assert len({(m.file, m.before, m.after) for m in TABLE}) == len(TABLE) >= 60


def test_a_change_keeps_the_indentation_and_all_other_lines() -> None:
    text = "def f(a):\n    if a < 1:\n        g(a)\n    return a < 1\n"
    assert changed(Mutant("f.py", "if a < 1:", "if a <= 1:", ()), text) == text.replace("if a <", "if a <=")
    assert changed(Mutant("f.py", "g(a)", "", ()), text) == text.replace("g(a)", "pass")


@pytest.mark.parametrize("before", ["a < 1", "g(b)", "g(a)"])
def test_a_line_that_does_not_occur_exactly_once_is_refused(before: str) -> None:
    with pytest.raises(ValueError, match=r"^f\.py has the line .* [02] times$"):
        changed(Mutant("f.py", before, "h()", ()), "if a < 1:\n    g(a)\nelse:\n    g(a)\n")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one module with a test, in place of this one."""
    root = tmp_path / "repository"
    root.mkdir()
    (root / "most.py").write_text("def most(a, b):\n    if a > b:\n        return a\n    return b\n")
    (root / "test_most.py").write_text("from most import most\n\ndef test_most():\n    assert most(2, 1) == 2\n")
    (root / "test_wrong.py").write_text("def test_wrong():\n    assert False\n")
    subprocess.run(["git", "init", "-q", root], check=True)
    monkeypatch.setattr(mutants, "ROOT", root)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # loading them takes longer than these tests
    return root


def test_a_change_survives_if_the_tests_named_for_it_pass(repository: Path) -> None:
    before = (repository / "most.py").read_bytes()
    right = Mutant("most.py", "if a > b:", "if a >= b:", ("test_most.py",))
    wrong = Mutant("most.py", "if a > b:", "if a < b:", ("test_most.py",))
    assert list(survivors([wrong, right], 1)) == [(wrong, False), (right, True)]
    assert (repository / "most.py").read_bytes() == before


def test_tests_that_fail_without_a_change_say_nothing_about_it(repository: Path) -> None:
    with pytest.raises(SystemExit, match=r"fail without any change: test_wrong\.py$"):
        list(survivors([Mutant("most.py", "return a", "", ("test_wrong.py",))], 1))
