"""Options that name what a command writes: what cannot be written is refused before any work, and nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from mlx_tandem import demo, files
from mlx_tandem.cli import outputs
from mlx_tandem.cli.app import app
from tests.privileges import drop_privileges
from tests.unit.cli_tools import tandem

FILES = {  # an option that names an output file, and a command of it that would work for a long time
    "bench serve --json-out": "bench serve --url http://127.0.0.1:9 --json-out {}.json",
    "bench serve --plot": "bench serve --url http://127.0.0.1:9 --plot {}.svg",
    "bench engine --json-out": "bench engine --shape qwen3-8b --json-out {}.json",
    "bench engine --plot": "bench engine --shape qwen3-8b --plot {}.svg",
    "demo learn --plot": "demo learn --plot {}.svg",
    "train sft --json-out": "train sft lessons.jsonl --json-out {}.json",
    "train sft --plot": "train sft lessons.jsonl --plot {}.svg",
    "train sft --metrics-file": "train sft lessons.jsonl --metrics-file {}",
    "train reward --json-out": "train reward pairs.jsonl --json-out {}.json",
    "serve --metrics-file": "serve --port 0 --enable-rl-training --metrics-file {}",
    "train rl --metrics-file": "train rl --port 0 --metrics-file {}",
    "config init --out": "config init --out {}",
}
FOLDERS = {
    "serve --checkpoint-dir": "serve --port 0 --enable-rl-training --checkpoint-dir {}",
    "train rl --checkpoint-dir": "train rl --port 0 --checkpoint-dir {}",
    "serve --tinker-dir": "serve --port 0 --enable-tinker --tinker-dir {}",
    "train rl --tinker-dir": "train rl --port 0 --enable-tinker --tinker-dir {}",
    "serve --batch-dir": "serve --port 0 --batch-dir {}",
    "train rl --batch-dir": "train rl --port 0 --batch-dir {}",
    "serve --cluster-dir": "serve --port 0 --host 0.0.0.0 --api-key k --share-model --cluster-dir {}",
    "train rl --cluster-dir": "train rl --port 0 --connect-to localhost:1 --cluster-dir {}",
    "serve --ssd-cache-dir": "serve --port 0 --ssd-cache-dir {}",
    "train rl --ssd-cache-dir": "train rl --port 0 --ssd-cache-dir {}",
    "train sft --adapter-out": "train sft lessons.jsonl --adapter-out {}",
    "train reward --adapter-out": "train reward pairs.jsonl --adapter-out {}",
}
OF_OTHERS = ("config init", "config show", "service install")
"""Commands that have the options of `tandem serve` and use none of their files and folders."""

READ = {"adapter-root", "config", "valid", "init-from", "api-key-file", "validation-prompts", "ssl-certfile"}
READ |= {"ssl-keyfile", "chat-template", "generation-config", "cacert", "adapter", "model"}
READ |= {"draft-model-path", "environment-python", "keys", "distributed-hostfile", "distributed-ibv-devices"}
OTHERS = {  # a path of URLs, a socket that is bound first, folders that are read, and a copy of what is there
    "learn export --out",
    *("serve --root-path", "train rl --root-path", "serve --uds", "train rl --uds"),
    *(f"checkpoints {name} --checkpoint-dir" for name in ("ls", "export")),
    *(f"learn {name} --checkpoint-dir" for name in ("list", "show", "export")),
    *(f"cache {name} --ssd-cache-dir" for name in ("ls", "check", "clear")),
}


def options(command: Any, *words: str) -> Iterator[tuple[str, Any]]:
    """Yield every option of every command with the words that call the command."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from options(inner, *words, name)
    for param in command.params:
        if param.param_type_name == "option":
            yield " ".join(words), param


def test_every_option_that_names_a_file_is_known_here() -> None:
    """An option that a new command writes to has to be added to one of the tables above."""
    command = typer.main.get_command(app)
    served = {param.opts[0] for words, param in options(command) if words == "serve"}
    found = {
        f"{words} {param.opts[0]}"
        for words, param in options(command)
        if not (words in OF_OTHERS and param.opts[0] in served)
        and param.opts[0].removeprefix("--") not in READ
        and not param.hidden
        and re.search(r"\b(path|file|folder)\b", param.get_help_record(typer.Context(command))[0], re.IGNORECASE)
    }
    assert found == {*FILES, *FOLDERS, *OTHERS}


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    lines = [json.dumps({"prompt": f"Sort down: {n} 3", "completion": f"{n} 3"}) for n in range(4, 9)]
    (tmp_path / "lessons.jsonl").write_text("\n".join(lines))
    pairs = [json.dumps({"prompt": f"Sort down: {n} 3", "chosen": f"{n} 3", "rejected": "3"}) for n in range(4, 9)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(pairs))
    (tmp_path / "file").touch()
    for name in ("folder.json", "folder.svg", "folder"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "inside").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(words: str, flag: str) -> str:
    """The one line that a command ends with, which names the option."""
    done = tandem(*shlex.split(words))
    assert (done.returncode, done.stdout) == (1, ""), words
    (line,) = done.stderr.splitlines()
    assert line.startswith("tandem: ") and flag in line
    return line


@pytest.mark.parametrize("option", FILES)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(where: Path, option: str) -> None:
    before = sorted(where.rglob("*"))
    flag = option.split()[-1]
    assert re.search("file.*cannot be used", refused(FILES[option].format("file/new/result"), flag))
    assert "Is a directory" in refused(FILES[option].format("folder"), flag)
    assert "File name too long" in refused(FILES[option].format("n" * 245), flag)
    assert sorted(where.rglob("*")) == before


@pytest.mark.parametrize("option", FOLDERS)
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(where: Path, option: str) -> None:
    before = sorted(where.rglob("*"))
    said = refused(
        FOLDERS[option].format("file/new"), "file/new" if option.endswith("--adapter-out") else option.split()[-1]
    )
    assert "cannot be used" in said
    assert sorted(where.rglob("*")) == before


def test_what_is_written_at_once_is_refused_in_one_line(where: Path) -> None:
    adapter = demo.ADAPTER_PATHS["shout"]
    assert "cannot be written" in refused(f"adapters convert {adapter} file/new --to peft", "file/new")
    assert "not an empty folder" in refused(f"adapters convert {adapter} folder --to peft", "folder: ")
    assert "cannot be used" in refused(f"adapters merge {adapter} {demo.MODEL_PATH} file/new", "file/new")
    assert "not an empty folder" in refused(f"adapters merge {adapter} {demo.MODEL_PATH} folder", "folder: ")
    assert "in the format mlx-lm already" in refused(f"adapters convert {adapter} new --to mlx-lm", "--to")


@pytest.mark.skipif(sys.platform != "linux", reason="drops privileges by Linux's capabilities")
def test_permissions_are_checked(where: Path) -> None:
    """An ordinary user's process: a folder and a file that are not to be written, and one file that is."""
    closed = where / "closed"
    closed.mkdir()
    (closed / "mine.json").write_text("old")
    (where / "fixed.json").write_text("old")
    (where / "fixed.json").chmod(0o400)
    closed.chmod(0o500)
    code = (
        "import sys\nfrom pathlib import Path\nfrom mlx_tandem import files\nfrom mlx_tandem.cli import outputs\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        files.check_writable(Path(name))\n"
        "        outputs.write(Path(name), b'new')\n"
        "        print('written')\n"
        "    except files.StorageError as e:\n"
        "        print(e.message)\n"
    )
    names = ("closed/new.json", "closed/mine.json", "fixed.json")
    done = subprocess.run(
        [sys.executable, "-c", code, *names], capture_output=True, text=True, check=True, preexec_fn=drop_privileges
    )
    assert done.stdout.splitlines() == [
        f"closed/new.json cannot be used ({closed}): Permission denied",
        "written",
        "fixed.json cannot be used: Permission denied",
    ]
    assert (closed / "mine.json").read_text() == "new"


def test_a_result_replaces_the_old_one_whole_and_keeps_its_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    link.symlink_to(real)
    outputs.write(tmp_path / "new" / "a.json", b"a")
    mask = os.umask(0o077)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "new" / "a.json").stat().st_mode) == 0o666 & ~mask
    real.write_bytes(b"old")
    real.chmod(0o640)
    outputs.write(link, b"new")
    assert (real.read_bytes(), stat.S_IMODE(real.stat().st_mode), link.is_symlink()) == (b"new", 0o640, True)
    monkeypatch.setattr(files, "write_all", lambda *_: (_ for _ in ()).throw(OSError(28, os.strerror(28))))
    with pytest.raises(files.StorageError, match="No space left"):
        outputs.write(real, b"newer")
    assert real.read_bytes() == b"new"
    assert {p.name for p in tmp_path.iterdir()} == {"new", "real.json", "link.json"}


def test_a_pipe_gets_the_result(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        files.check_writable(pipe)
        outputs.write_json(pipe, {"a": "ü"})
        assert reader.stdout is not None
        assert json.load(reader.stdout) == {"a": "ü"}
    assert pipe.is_fifo()


@pytest.mark.parametrize("words", ["'{}' -c '{}' /dev/stdout | cat", "'{}' -c '{}' >(cat) | cat"])
def test_a_pipe_without_a_path_of_its_own_gets_the_result(words: str) -> None:
    """Linux shows where such a pipe leads as a name that no file has."""
    code = (
        "import sys; from pathlib import Path; from mlx_tandem import files; from mlx_tandem.cli import outputs; "
        "path = Path(sys.argv[1]); files.check_writable(path); outputs.write_json(path, [1])"
    )
    bash = ["bash", "-o", "pipefail", "-c", words.format(sys.executable, code)]
    done = subprocess.run(bash, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, json.loads(done.stdout)) == (0, "", [1])


@pytest.mark.skipif(sys.platform != "linux", reason="opens descriptors through /proc")
def test_a_removed_file_that_is_still_open_gets_the_result(tmp_path: Path) -> None:
    with (tmp_path / "removed").open("w+b") as file:
        (tmp_path / "removed").unlink()
        outputs.write_json(Path(f"/proc/self/fd/{file.fileno()}"), [1])
        assert json.load(file) == [1]
    assert not list(tmp_path.iterdir())


def test_a_socket_is_refused_before_the_work() -> None:
    """A file system's name of a socket cannot be opened, whoever may write to it."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{folder}/s")  # whose path has to be short
        with pytest.raises(files.StorageError, match=os.strerror(errno.ENXIO)):
            files.check_writable(Path(folder, "s"))


def test_every_console_of_standard_output_knows_a_closed_pipe() -> None:
    """Others of rich end the process with a status of 1."""
    cli = Path(files.__file__).parent / "cli"
    for file in cli.rglob("*.py"):
        made = re.findall(r"\bConsole\((.*)\)", file.read_text(encoding="utf-8"))
        assert file == cli / "console.py" or all("stderr=True" in words for words in made), file
