"""A cache's folder without a server, and the commands for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mlx_tandem.cli.app import app
from mlx_tandem.files import StorageError
from mlx_tandem.kv.disk.folder import CacheFolder
from mlx_tandem.kv.disk.offline import clear, inspect
from tests.faulty import contents
from tests.unit.disk_tools import BASE, block, close, filled, payload, segments


def tandem(*words: str) -> Result:
    return CliRunner().invoke(app, ["cache", *words])


def test_inspect(tmp_path: Path) -> None:
    cache = segments(tmp_path, segment_bytes=800)
    for i in range(5):
        cache.append(block(i), payload(i))
    close(cache)
    before = contents(tmp_path)
    found = inspect(tmp_path, verify=True)
    assert [(s.number, s.records, s.damaged) for s in found] == [(1, 2, 0), (2, 2, 0), (3, 1, 0)]
    assert {s.base for s in found} == {BASE.hex()[:12]} and {s.created for s in found} == {1_000_000}
    assert sum(s.bytes for s in found) == sum(p.stat().st_size for p in tmp_path.glob("segment-*"))
    after = contents(tmp_path)
    assert {**before, ".lock": b""} == {**after, ".lock": b""}, "nothing is changed"


@pytest.mark.parametrize(
    ("at", "ls", "check"), [(-1, (2, 0), (2, 1)), (70, (0, 1), (0, 1)), (3, (0, 1), (0, 1)), (None, (1, 1), (1, 1))]
)
def test_damage(tmp_path: Path, at: int | None, ls: tuple[int, int], check: tuple[int, int]) -> None:
    file = filled(tmp_path, 2)
    data = bytearray(file.read_bytes())
    if at is None:
        del data[-1]
    else:
        data[at] ^= 1
    file.write_bytes(data)
    for verify, expected in ((False, ls), (True, check)):
        assert [(s.records, s.damaged) for s in inspect(tmp_path, verify)] == [expected]
    assert file.read_bytes() == data


def test_clear_removes_what_is_the_caches_own(tmp_path: Path) -> None:
    filled(tmp_path, 2)
    (tmp_path / "digests.json").write_text("{}")
    (tmp_path / "mine.txt").write_text("mine")
    assert clear(tmp_path) > 0
    assert {p.name for p in tmp_path.iterdir()} == {"mine.txt", ".lock"}
    with pytest.raises(StorageError):
        clear(tmp_path)


def test_clear_knows_other_formats(tmp_path: Path) -> None:
    filled(tmp_path, 2)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format":1', '"format":9'))
    with pytest.raises(StorageError, match="format 9"):
        inspect(tmp_path, verify=False)
    clear(tmp_path)
    filled(tmp_path, 1)


@pytest.mark.parametrize("foreign", ["", "x.txt"])
def test_what_is_no_cache_is_left_alone(tmp_path: Path, foreign: str) -> None:
    if foreign:
        (tmp_path / foreign).touch()
    for action in (lambda: inspect(tmp_path, verify=True), lambda: clear(tmp_path)):
        with pytest.raises(StorageError) as e:
            action()
        assert e.value.code == "foreign_folder"
    assert [p.name for p in tmp_path.iterdir()] == ([foreign] if foreign else [])


def test_the_commands(tmp_path: Path) -> None:
    where = ["--ssd-cache-dir", str(tmp_path)]
    file = filled(tmp_path, 2)
    listed = tandem("ls", *where)
    assert listed.exit_code == 0 and BASE.hex()[:12] in listed.stdout and "2 blocks" in listed.stdout
    assert "all as they were written" in tandem("check", *where).stdout
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    checked = tandem("check", *where)
    assert checked.exit_code == 1 and checked.stderr == "tandem: damaged: 1 in segment 1\n"
    assert tandem("clear", *where).stdout.startswith("removed 0.0 MB") and not file.exists()


def test_the_commands_refuse_in_one_line(tmp_path: Path) -> None:
    busy = CacheFolder(tmp_path / "busy")
    for words, said in (
        (["ls", "--ssd-cache-dir", str(tmp_path / "busy")], "is in use by process"),
        (["check", "--ssd-cache-dir", str(tmp_path)], "no KV cache"),
        (["clear", "--ssd-cache-dir", str(tmp_path / "none")], "there is no folder"),
    ):
        done = tandem(*words)
        assert done.exit_code == 1 and said in done.stderr and done.stderr.count("\n") == 1
    busy.close()
