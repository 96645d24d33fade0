"""Hub ids: what is fetched, what never is, and what is said when nothing can be. The hub's client is the real one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_tandem import demo
from mlx_tandem.cli import hub
from tests.fake_hub import COMMIT, Hub, fake_hub

CODE = {"modeling_x.py", "pytorch_model.bin", "model.pt", "notes.md", "original/model.safetensors"}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model beside files that are never wanted."""
    folder = tmp_path_factory.mktemp("repository")
    for file in demo.MODEL_PATH.iterdir():
        (folder / file.name).symlink_to(file)
    for name in CODE:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("raise SystemExit('this ran')")
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Hub]:
    with fake_hub({"org/tiny": repository}) as running:
        yield running


def find(env: dict[str, str], text: str) -> subprocess.CompletedProcess[str]:
    """`hub.find` in a process of its own: the client reads its environment once."""
    code = (
        "import sys; from mlx_tandem.cli import hub\n"
        "try: found = hub.find(sys.argv[1], 'model'); print(found.folder); print(found.id)\n"
        "except hub.HubError as e: sys.exit(f'said: {e}')"
    )
    return subprocess.run([sys.executable, "-c", code, text], capture_output=True, text=True, check=False, env=env)


def test_only_data_is_fetched_and_then_nothing_more(server: Hub, tmp_path: Path) -> None:
    env = server.environment(tmp_path, HF_TOKEN="hf_mine")
    done = find(env, "org/tiny")
    assert done.returncode == 0, done.stderr
    folder, name = done.stdout.splitlines()
    wanted = {f.name for f in demo.MODEL_PATH.iterdir() if f.suffix in (".json", ".safetensors", ".jinja", ".txt")}
    assert {f.name for f in Path(folder).iterdir()} == wanted == server.files_asked()
    assert (Path(folder) / "config.json").read_bytes() == (demo.MODEL_PATH / "config.json").read_bytes()
    assert name == "org/tiny"
    assert str(tmp_path) in folder
    assert server.tokens == {"Bearer hf_mine"}
    assert "Fetching" in done.stderr or "Download" in done.stderr

    server.asked.clear()
    assert find(env | {"HF_HUB_OFFLINE": "1"}, "org/tiny").stdout.splitlines() == [folder, name]
    assert find(env | {"HF_ENDPOINT": "http://127.0.0.1:9"}, "org/tiny").stdout.splitlines() == [folder, name]
    assert not server.asked
    assert find(env, "org/tiny").returncode == 0
    assert not server.files_asked()


def test_a_part_of_a_model_is_not_served(server: Hub, tmp_path: Path) -> None:
    env = server.environment(tmp_path)
    folder = Path(find(env, "org/tiny").stdout.splitlines()[0])
    (folder / "model.safetensors").unlink()
    assert "of org/tiny only a part was fetched earlier" in find(env | {"HF_HUB_OFFLINE": "1"}, "org/tiny").stderr
    assert find(env, "org/tiny").returncode == 0
    assert (folder / "model.safetensors").exists()


@pytest.mark.parametrize("revision", ["v2", COMMIT])
def test_a_revision(server: Hub, tmp_path: Path, revision: str) -> None:
    done = find(server.environment(tmp_path), f"org/tiny@{revision}")
    assert done.stdout.splitlines()[1:] == ["org/tiny"], done.stderr


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        ("org/none", {}, "has no org/none that can be read without HF_TOKEN"),
        ("org/none", {"HF_TOKEN": "hf_mine"}, "has no org/none that can be read with this HF_TOKEN"),
        ("org/gated", {}, "/org/gated asks for terms to be accepted"),
        ("org/tiny@v3", {}, "/org/tiny has no revision 'v3'"),
        ("org/tiny", {"HF_HUB_OFFLINE": "1"}, "org/tiny is not on this machine and HF_HUB_OFFLINE is set"),
        (
            "org/tiny",
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            "org/tiny is not on this machine and http://127.0.0.1:9 can",
        ),
        ("org/a--b", {}, "there is no model folder org/a--b, and "),
        ("./org/tiny", {}, "there is no model folder ./org/tiny"),
        ("../tiny", {}, "there is no model folder ../tiny"),
        ("tiny", {}, "there is no model folder tiny"),
    ],
)
def test_what_cannot_be_fetched_is_one_clear_line(
    server: Hub, tmp_path: Path, text: str, more: dict[str, str], said: str
) -> None:
    done = find(server.environment(tmp_path, **more), text)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("said: ")]
    assert said in line
    assert "Traceback" not in done.stderr


def test_a_folder_is_never_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert hub.find("org/tiny", "model") == hub.Found(Path("org/tiny"), "")


def test_nothing_is_fetched_once_it_is_closed(server: Hub, tmp_path: Path) -> None:
    code = (
        "from mlx_tandem.cli import hub\nhub.find('org/tiny', 'model'); hub.close()\n"
        "try: hub.find('org/other', 'model')\nexcept hub.HubError as e: print(e)"
    )
    env = server.environment(tmp_path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert "HF_HUB_OFFLINE is set" in done.stdout, done.stderr
