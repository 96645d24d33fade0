"""Change single lines of the package, one at a time, and see whether the tests notice: `make mutants`.

    python scripts/mutants.py [--only WORD] [--jobs N] [--json-out FILE]

`tests/mutants.toml` names each change: the file, its line before and after, and the tests that must fail. Changes are
made in copies of the repository. A change that no test notices has to have a reason in the table (`survives`), for
instance that it changes nothing but speed. The script fails if another one survives, and if one with a reason does not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "mutants.toml"

MOST_SECONDS = 300
"""Seconds after which a run of tests counts as failed: a change may make a loop endless."""


@dataclass(frozen=True)
class Mutant:
    """A change of one line.

    Attributes:
        file: The file, relative to the root.
        before: The line without its indentation. It occurs in the file once.
        after: What takes its place. It may be empty.
        tests: Arguments for pytest, of tests that fail with this change.
        survives: Why no test notices it, or an empty text.
    """

    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    survives: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.before} → {self.after or '(nothing)'}"


def mutants(table: Path = TABLE) -> list[Mutant]:
    """Return the changes of the table."""
    rows = tomllib.loads(table.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def changed(mutant: Mutant, text: str) -> str:
    """Return a file's text with the change. Raise ValueError if its line does not occur exactly once."""
    lines = text.split("\n")
    found = [i for i, line in enumerate(lines) if line.strip() == mutant.before]
    if len(found) != 1:
        raise ValueError(f"{mutant.file} has the line {mutant.before!r} {len(found)} times")
    line = lines[found[0]]
    indentation = line[: len(line) - len(line.lstrip())]
    lines[found[0]] = indentation + (mutant.after or "pass")
    return "\n".join(lines)


def copy_of_the_repository(folder: Path) -> Path:
    """Copy the files that git knows, and those that it does not ignore, into a new folder."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def passes(copy: Path, tests: tuple[str, ...]) -> bool:
    """Return whether tests pass in a copy of the repository."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def survivors(chosen: list[Mutant], jobs: int) -> Iterator[tuple[Mutant, bool]]:
    """Yield each change with whether it survived, in the order of the table.

    Raise SystemExit if tests fail without any change.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-mutants-") as scratch:
        copies: SimpleQueue[Path] = SimpleQueue()
        for i in range(jobs):
            copies.put(copy_of_the_repository(Path(scratch) / str(i)))

        def unchanged(tests: tuple[str, ...]) -> bool:
            copy = copies.get()
            try:
                return passes(copy, tests)
            finally:
                copies.put(copy)

        def survives(mutant: Mutant) -> bool:
            copy = copies.get()
            file = copy / mutant.file
            text = file.read_text(encoding="utf-8")
            try:
                file.write_text(changed(mutant, text), encoding="utf-8")
                return passes(copy, mutant.tests)
            finally:
                file.write_text(text, encoding="utf-8")
                copies.put(copy)

        with ThreadPoolExecutor(jobs) as pool:
            distinct = list(dict.fromkeys(mutant.tests for mutant in chosen))
            for tests, passed in zip(distinct, pool.map(unchanged, distinct), strict=True):
                if not passed:
                    raise SystemExit(f"these tests fail without any change: {' '.join(tests)}")
            yield from zip(chosen, pool.map(survives, chosen), strict=True)


def main() -> None:
    """Run the changes of the table and say which survive."""
    parser = argparse.ArgumentParser(description="change single lines and see whether the tests notice")
    parser.add_argument("--only", default="", help="only the changes of files whose path contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="changes at a time")
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    chosen = [mutant for mutant in mutants() if args.only in mutant.file]
    if not chosen:
        raise SystemExit(f"no file of the table has {args.only!r} in its path")
    rows = []
    unlike = 0
    for mutant, survived in survivors(chosen, args.jobs):
        said = "survives" if survived else "caught"
        if survived != bool(mutant.survives):
            said += ", unlike the table says"
            unlike += 1
        print(f"{said}: {mutant}", flush=True)
        rows.append(asdict(mutant) | {"caught": not survived})
    caught = sum(row["caught"] for row in rows)
    print(f"{caught} of {len(rows)} changes are caught")
    if args.json_out:
        args.json_out.write_text(json.dumps({"caught": caught, "of": len(rows), "mutants": rows}, indent=1) + "\n")
    if unlike:
        raise SystemExit(f"{unlike} changes are caught or survive unlike the table says")


if __name__ == "__main__":
    main()
