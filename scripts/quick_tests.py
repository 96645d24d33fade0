"""Print the tests that concern a change at hand, for `make quick`: those of what differs from the branch `main`.

python scripts/quick_tests.py

The tests under tests/unit mirror the package. A change in `mlx_tandem/kv/` concerns all of `tests/unit/kv`, one in
`mlx_tandem/files.py` concerns `tests/unit/test_files.py`, and a test that differs concerns itself. A change of an
operation, a room of `mlx_tandem/model/ops`, concerns the tests of its kernels, too. The rules about the sources are
always among them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path, PurePath

ROOT = Path(__file__).resolve().parents[1]
ALWAYS = "tests/unit/test_architecture.py"


def changed() -> list[str]:
    """Return the files that differ from where this branch left `main`, new ones included."""
    base = _git("merge-base", "HEAD", "main")
    return [*_git("diff", "--name-only", *base), *_git("ls-files", "--others", "--exclude-standard")]


def concerned(files: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return the folders and files of tests that concern `files`, as far as they exist under `root`."""
    found = {ALWAYS}
    for file in map(PurePath, files):
        if file.parts[0] == "mlx_tandem" and file.suffix == ".py":
            parts = file.parts[1:]
            found.add(f"tests/unit/{parts[0] if len(parts) > 1 else f'test_{parts[0]}'}")
            if parts[:2] == ("model", "ops"):
                tests = (root / "tests" / "kernels").glob(f"test_{PurePath(parts[2]).stem}*.py")
                found.update(str(test.relative_to(root)) for test in tests)
            elif parts[:2] == ("model", "kernels"):
                found.add("tests/kernels")
        elif file.parts[0] == "tests" and file.name.startswith("test_"):
            found.add(str(file))
    return sorted(name for name in found if (root / name).exists())


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


if __name__ == "__main__":
    print(*concerned(changed()))
