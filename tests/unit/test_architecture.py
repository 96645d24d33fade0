"""Rules about the source itself that an import linter cannot express, and the map in ARCHITECTURE.md."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "mlx_tandem").rglob("*.py"))
MODULES = {"pickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "torch"}
CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
CALLS |= {"importlib.util.spec_from_file_location", "spec_from_file_location", "runpy.run_path", "run_path"}
LOADERS = {"transformers", "AutoTokenizer", "AutoConfig", "AutoModel", "AutoModelForCausalLM", "load_tokenizer"}
"""What builds a model or a tokenizer from a folder and may run the folder's code for it."""
TRUST = re.compile(r"trust.?remote.?code", re.IGNORECASE)
TRUST_MAY_BE_NAMED = {  # where it is read and means nothing, or is refused
    "mlx_tandem/adapters/formats/mlx_lm.py": "warmup",
    "mlx_tandem/cli/flags.py": "--trust-remote-code",
}


def findings(source: str) -> Iterator[str]:
    """What in `source` could run code that came as data."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"import {a.name}" for a in node.names if a.name.split(".")[0] in MODULES | LOADERS)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in MODULES | LOADERS:
                yield f"from {node.module}"
            yield from (f"import {a.name}" for a in node.names if a.name in LOADERS)
        elif isinstance(node, ast.Attribute) and (node.attr in LOADERS or TRUST.fullmatch(node.attr)):
            yield f".{node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and TRUST.search(node.value):
            yield f"{node.value!r}"
        elif isinstance(node, ast.Call):
            if (name := ast.unparse(node.func)) in CALLS:
                yield f"{name}()"
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle" and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                ):
                    yield f"{keyword.arg}="
                if TRUST.fullmatch(keyword.arg or ""):
                    yield f"{keyword.arg}="


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from torch import load",
        "eval(text)",
        "exec(text)",
        "compile(text, 'x', 'exec')",
        "yaml.load(text)",
        "torch.load(file)",
        "np.load(file, allow_pickle=True)",
        "load(folder, trust_remote_code=flag)",
        "load(folder, **{'trust_remote_code': True})",
        "config.trust_remote_code = True",
        "from transformers import AutoTokenizer",
        "from mlx_lm.utils import load_tokenizer",
        "mlx_lm.utils.load_tokenizer(folder)",
        "importlib.util.spec_from_file_location('m', folder)",
    ],
)
def test_the_search_finds(source: str) -> None:
    assert list(findings(source))


@pytest.mark.parametrize("source", ["mx.eval(x)", "re.compile(p)", "yaml.safe_load(t)", "load(f, allow_pickle=False)"])
def test_the_search_lets_pass(source: str) -> None:
    assert not list(findings(source))


def test_nothing_runs_code_from_data() -> None:
    found = [
        f"{name}: {what}"
        for f in SOURCES
        for what in findings(f.read_text(encoding="utf-8"))
        if TRUST_MAY_BE_NAMED.get(name := f.relative_to(ROOT).as_posix(), "nowhere") not in what
    ]
    assert not found


def imports_of(file: Path, modules: Collection[str]) -> set[str]:
    """The modules that a file imports anywhere: inside of functions and for types only, too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{a.name}" for a in node.names]
            found |= {name if name in modules else node.module for name in names}
    return found & set(modules)


def circles(imports: Mapping[str, set[str]]) -> set[str]:
    """The modules that are on a circle of imports, by leaving out what imports or is imported by none of the rest."""
    rest = {module: set(others) - {module} for module, others in imports.items()}
    while True:
        reached = set().union(*rest.values())
        gone = {module for module, others in rest.items() if not others or module not in reached}
        if not gone:
            return set(rest)
        rest = {module: others - gone for module, others in rest.items() if module not in gone}


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set(), "f": {"e"}}) == {"a", "b", "c"}
    assert not circles({"a": {"b"}, "b": {"c"}, "c": set()})


def test_no_module_imports_itself_through_others() -> None:
    modules = {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in SOURCES}
    # The package hands out `Engine` and others when somebody first asks for them.
    imports = {m: imports_of(f, modules) - {"mlx_tandem"} for m, f in modules.items()}
    assert not circles(imports)


def test_modules_can_be_read_in_one_sitting() -> None:
    long = {
        str(f.relative_to(ROOT)): n for f in SOURCES if (n := len(f.read_text(encoding="utf-8").splitlines())) > 600
    }
    assert not long


def test_the_map_of_modules_is_that_of_the_tree() -> None:
    check = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "module_map.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stderr


PLATFORMS = ["macos", "cpu", "cuda12", "cuda13"]


def pins(lock: str) -> dict[str, set[str]]:
    """The versions of each package in a lock; there are several where they differ between Python versions."""
    found: dict[str, set[str]] = {}
    for package, version in re.findall(r"^([a-z0-9-]+)==(\S+)", lock, re.MULTILINE):
        found.setdefault(package, set()).add(version)
    return found


@pytest.mark.parametrize("name", [*PLATFORMS, "clients"])
def test_the_lock_pins_every_dependency_and_names_no_host(name: str) -> None:
    lock = (ROOT / "locks" / f"{name}.txt").read_text(encoding="utf-8")
    assert not re.search(r"://|^--|\s@\s|^#", lock, re.MULTILINE)
    pinned = pins(lock)
    assert lock.count("\n    --hash=sha256:") >= len(pinned)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = ["dev", name] if name in PLATFORMS else [name]
    for requirement in [*project["dependencies"], *(r for extra in wanted for r in extras.get(extra, ()))]:
        package = re.split(r"[\[<>=]", requirement)[0].lower()
        assert package in pinned, requirement
    assert "torch" not in pinned


@pytest.mark.parametrize("name", PLATFORMS)
def test_the_clients_change_no_version_of_what_is_installed(name: str) -> None:
    platform, clients = (pins((ROOT / "locks" / f"{n}.txt").read_text(encoding="utf-8")) for n in (name, "clients"))
    shared = platform.keys() & clients.keys()
    assert len(shared) > 50
    assert {p: clients[p] for p in shared} == {p: platform[p] for p in shared}
