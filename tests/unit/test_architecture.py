"""Rules about the source itself that an import linter cannot express, and the map in ARCHITECTURE.md."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatch
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


@pytest.mark.promise("A1", "A6")
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


MOST_LINES, MOST_ARGUMENTS, MOST_METHODS = 60, 8, 25
"""Limits of a function without its docstring, of a constructor besides `self`, and of a class."""

OPTIONS = "each of its parameters is an option of the command line, with its help"
LARGE: dict[str, str] = {
    "mlx_tandem/cli/bench/commands.py: bench_engine": OPTIONS,
    "mlx_tandem/cli/bench/commands.py: bench_serve": OPTIONS,
    "mlx_tandem/cli/reward.py: reward": OPTIONS,
    "mlx_tandem/cli/sft.py: sft": OPTIONS,
}
"""What may be larger, and why."""


def docstring_of(node: ast.AST) -> ast.Expr | None:
    body = getattr(node, "body", None)
    first = body[0] if isinstance(body, list) and body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return first
    return None


def large(source: str, name: str = "m.py") -> Iterator[str]:
    """Yield what in `source` is over a limit: `file: function`, `file: class`, or `file: class()` for its arguments."""

    def lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
        about = docstring_of(node)
        spoken = 0 if about is None else (about.end_lineno or 0) - about.lineno + 1
        return (node.end_lineno or 0) - node.lineno + 1 - spoken

    def walk(node: ast.AST, place: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                methods = [n for n in child.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
                if len(methods) > MOST_METHODS:
                    yield f"{name}: {place}{child.name}"
                yield from walk(child, f"{place}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                if lines(child) > MOST_LINES:
                    yield f"{name}: {place}{child.name}"
                arguments = len(child.args.posonlyargs) + len(child.args.args) + len(child.args.kwonlyargs) - 1
                if child.name == "__init__" and arguments > MOST_ARGUMENTS:
                    yield f"{name}: {place.removesuffix('.')}()"
                yield from walk(child, f"{place}{child.name}.")
            else:
                yield from walk(child, place)

    yield from walk(ast.parse(source), "")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f():\n" + "    x = 1\n" * 60, "m.py: f"),
        ('def f():\n    """A.\n\n    B.\n    """\n' + "    x = 1\n" * 59, ""),
        ("class C:\n    async def f(self):\n" + "        x = 1\n" * 60, "m.py: C.f"),
        ("class C:\n" + "".join(f"    def f{i}(self): ...\n" for i in range(26)), "m.py: C"),
        ("class C:\n    def __init__(self, a, b, c, d, e, f, *, g, h, i): ...\n", "m.py: C()"),
        ("class C:\n    def __init__(self, a, b, c, d, e, f, *, g, h): ...\n", ""),
    ],
)
def test_what_is_large_is_found(source: str, found: str) -> None:
    assert list(large(source)) == [found] * bool(found)


def test_functions_constructors_and_classes_are_small() -> None:
    found = {w for f in SOURCES for w in large(f.read_text(encoding="utf-8"), f.relative_to(ROOT).as_posix())}
    assert found - LARGE.keys() == set(), "too large"
    assert LARGE.keys() - found == set(), "no longer large: take it out of the list"


DEVICES = {"cpu", "cuda", "metal"}
"""The names of the devices."""

ASKS = {"is_cpu", "is_cuda", "is_metal", "default_device"}
"""Names of functions that say which device there is."""

MAY_ASK: dict[str, str] = {
    "mlx_tandem/cli/doctor/device.py": "it tells people that MLX has not found the GPU of their machine",
    "mlx_tandem/model/kernels/dialect.py": "it makes the text of a kernel for the device that it is told",
    "mlx_tandem/model/ops/attention/division.py": "it divides a kernel's work for the device that it is told",
}
"""The modules outside of model/backend/ that ask which device there is, and why. There may be four."""


def questions(source: str) -> Iterator[str]:
    """Yield what in `source` asks which device there is: a device's name that is compared or matched, a table by
    device, a function that says it, or the answers of one device by themselves."""

    def names(node: ast.AST) -> bool:
        return any(isinstance(n, ast.Constant) and n.value in DEVICES for n in ast.walk(node))

    for node in ast.walk(ast.parse(source)):
        compares = isinstance(node, ast.Compare | ast.MatchValue) and names(node)
        tabulates = isinstance(node, ast.Dict) and sum(names(key) for key in node.keys if key is not None) > 1
        asks = isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node).rpartition(".")[2] in ASKS
        finds = isinstance(node, ast.Attribute) and ast.unparse(node) in ("mx.metal", "mx.cuda", "mx.DeviceType")
        takes = isinstance(node, ast.ImportFrom) and (node.module or "").endswith(
            tuple(f"backend.{d}" for d in DEVICES)
        )
        if compares or tabulates or asks or finds or takes:
            yield ast.unparse(node)


@pytest.mark.parametrize(
    "source",
    [
        "device.is_cpu()",
        "from x import is_cuda; is_cuda()",
        "mx.default_device() == mx.gpu",
        "mx.metal.is_available()",
        "kind() == 'cpu'",
        "'cuda' in available()",
        "SIZES = {'cpu': 1, 'cuda': 2}",
        "match kind():\n    case 'metal': pass",
        "from mlx_tandem.model.backend.cuda import CUDA",
    ],
)
def test_questions_about_the_device_are_found(source: str) -> None:
    assert list(questions(source))
    assert not list(questions("backend.current().steps.one_at_a_time; x: Literal['cpu', 'cuda']; f('cuda')"))


def test_only_the_back_end_knows_which_device_there_is() -> None:
    """Everybody else asks it what they need to know (`model/backend/base.py`)."""
    outside = {f.relative_to(ROOT).as_posix(): f for f in SOURCES if "/model/backend/" not in f.as_posix()}
    asking = {name: found for name, f in outside.items() if (found := list(questions(f.read_text(encoding="utf-8"))))}
    assert {name: found for name, found in asking.items() if name not in MAY_ASK} == {}
    assert asking.keys() == MAY_ASK.keys() and len(MAY_ASK) <= 4


def test_learning_dispatches_its_work_in_one_place() -> None:
    """Where it also takes its share of the cores, on which an update's bits depend."""
    files = [f for f in SOURCES if "/training/device/" in f.as_posix()]
    assert [f.name for f in files if re.search(r"\bmx\.(async_)?eval\(", f.read_text("utf-8"))] == ["slices.py"]


DANGLING = re.compile(
    r"(Also|And|As|At|Beside|Both|But|By|Each|Either|Every|For|From|How|If|In|It|Its|Neither|Nobody|None|Nor|Nothing|Of|"
    r"On|Only|Or|Over|So|That|Their|Them|These|They|This|Those|To|Under|Until|Up|Were|What|When|Where|Whether|Which|"
    r"While|Who|Whoever|Why|With|Without)\b"
)
"""First words that are no verbs: a docstring of a function says what the function does."""


def dangling(source: str) -> Iterator[str]:
    """Yield the functions whose docstring begins with such a word; properties are named by noun phrases."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_property = any("property" in ast.unparse(d) for d in node.decorator_list)
            if not is_property and DANGLING.match(ast.get_docstring(node) or ""):
                yield node.name


@pytest.mark.parametrize("text", ["Of the pool.", "As `f`.", "That of a mask.", "What it is.", "Whether it is."])
def test_docstrings_that_begin_in_the_middle_are_found(text: str) -> None:
    assert list(dangling(f"def f(): '''{text}'''")) == ["f"]
    assert not list(dangling(f"@property\ndef f(self): '''{text}'''"))
    assert not list(dangling(f"def f(): '''Return {text}'''"))


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    later = [p for p in settings["tool"]["ruff"]["lint"]["per-file-ignores"] if p.startswith("mlx_tandem/")]
    found = [
        f"{f.relative_to(ROOT)}: {name}"
        for f in SOURCES
        if not any(fnmatch(f.relative_to(ROOT).as_posix(), pattern) for pattern in later)
        for name in dangling(f.read_text(encoding="utf-8"))
    ]
    assert not found


def test_pages_that_the_source_names_are_there() -> None:
    cited = {
        (f.relative_to(ROOT).as_posix(), page)
        for f in SOURCES
        for page in re.findall(r"\bdocs/[\w/-]+\.md", f.read_text(encoding="utf-8"))
    }
    assert cited and not [(file, page) for file, page in sorted(cited) if not (ROOT / page).is_file()]


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
