"""`tandem key`: makes, lists and revokes the keys of a file."""

from __future__ import annotations

import hashlib
import json
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlx_tandem.cli import named_keys
from mlx_tandem.cli.settings import build
from mlx_tandem.server.keyring import Keyring, parse
from tests.unit.cli_tools import tandem

HEAD = """# keys of the lab
- name: "first"  # the oldest
  key: first-key

# of the robots
- name: robot
  key: robot-key
  scopes:
    - inference
    - metrics
"""


def key(file: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return tandem("key", *words, "--keys", str(file))


def names(file: Path) -> list[str]:
    return [placed.entry.name for placed in parse(file.read_text()).entries]


def test_a_new_key_is_printed_once_and_opens(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    words = ("--scopes", "inference,metrics", "--tenant", "lab", "--limit", "requests=2", "--limit", "learning=false")
    done = key(file, "new", "ci", *words, "--expires", "2999-01-31")
    made = done.stdout.strip()
    assert made.startswith("tk-") and len(made) > 40 and made not in done.stderr
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert made not in file.read_text() and hashlib.sha256(made.encode()).hexdigest() in file.read_text()
    caller, _ = Keyring("", str(file)).find([made.encode()])
    assert caller is not None
    assert (caller.name, caller.tenant, caller.scopes) == ("ci", "lab", {"inference", "metrics"})
    assert (caller.limits.requests, caller.limits.learning) == (2, False)
    assert key(file, "new", "other").stdout.strip() != made
    assert names(file) == ["ci", "other"]


@pytest.mark.parametrize("text", [HEAD, HEAD.rstrip("\n"), json.dumps([{"name": "robot", "key": "robot-key"}])])
def test_what_is_written_stays(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    before = [placed.entry for placed in parse(text).entries]
    assert key(file, "new", "null").returncode == 0  # a name that YAML has another meaning for
    assert names(file)[-1] == "null" and [placed.entry for placed in parse(file.read_text()).entries][:-1] == before
    assert key(file, "revoke", "null").returncode == 0
    assert [placed.entry for placed in parse(file.read_text()).entries] == before
    if "#" in text:
        assert file.read_text().rstrip("\n") == text.rstrip("\n")
    assert key(file, "revoke", "robot").returncode == 0
    assert "robot" not in names(file)
    assert text.startswith("[") or file.read_text().startswith('# keys of the lab\n- name: "first"  # the oldest\n')


def test_a_form_that_cannot_be_changed_is_left_to_an_editor(tmp_path: Path) -> None:
    file, text = tmp_path / "keys.yaml", "---\n-\n  name: a\n  key: x\n...\n"
    file.write_text(text)
    for words in (("revoke", "a"), ("new", "b")):
        done = key(file, *words)
        assert done.returncode == 1 and "cannot change" in done.stderr
        assert file.read_text() == text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("new", "robot"), "has a key 'robot' already"),
        (("new", "a b"), "name must be 1 to 64 letters"),
        (("new", "x", "--scopes", "all"), "scopes[0] must be one of"),
        (("new", "x", "--limit", "speed=3"), "limits.speed is not a parameter"),
        (("new", "x", "--limit", "requests"), "a limit is NAME=NUMBER"),
        (("new", "x", "--limit", "requests=-1"), "limits.requests must be an integer between 0"),
        (("new", "x", "--expires", "soon"), "expires must be a date"),
        (("revoke", "x"), "has no key 'x'; it has first, robot"),
    ],
)
def test_what_cannot_be_done_changes_nothing(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(HEAD)
    done = key(file, *words)
    assert done.returncode == 1 and said in done.stderr
    assert file.read_text() == HEAD


def test_a_file_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in key(tmp_path / "none", "list").stderr
    assert "cannot be written" in key(tmp_path, "new", "x").stderr
    (tmp_path / "wrong").write_text("- name: x\n")
    for words in (("list",), ("new", "y"), ("revoke", "x")):
        done = key(tmp_path / "wrong", *words)
        assert done.returncode == 1 and "line 1, key 'x': sha256 must be given" in done.stderr


def test_the_list(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(HEAD + "  expires: 2001-02-03\n")
    shown = key(file, "list").stdout
    assert "robot" in shown and "inference, metrics" in shown and "2001-02-03 (expired)" in shown
    assert "robot-key" not in shown
    assert json.loads(key(file, "list", "--json").stdout)[0] == {
        "name": "first", "tenant": "first", "scopes": ["inference"], "limits": {}, "expires": None,
    }  # fmt: skip
    file.write_text("")
    assert "has no key" in key(file, "list").stdout


def test_commands_at_once_lose_no_key(tmp_path: Path) -> None:
    file, wanted = tmp_path / "keys.yaml", [f"k{n}" for n in range(6)]
    with ThreadPoolExecutor(len(wanted)) as threads:
        list(threads.map(lambda name: named_keys.new(name, file), wanted))
    assert sorted(names(file)) == wanted


def test_the_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys.yaml"
    monkeypatch.setenv("TANDEM_KEYS_FILE", str(file))
    assert tandem("key", "new", "ci").returncode == 0 and names(file) == ["ci"]
    assert build(None, {}).server.keys_file == str(file)
    assert build(None, {"keys": "other"}).server.keys_file == "other"
    assert build(None, {"keys": ""}).server.keys_file == ""
