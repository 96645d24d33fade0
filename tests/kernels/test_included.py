"""What kernels are made from lies in files, whatever becomes of these."""

from __future__ import annotations

from pathlib import Path

from mlx_tandem.model.kernels.dialect import Included

TEXT = "int f(int x) { return 3 * x; }\n"


def included(line: str) -> str:
    """What a compiler would find there."""
    head, name, _ = line.split('"')
    assert head == "#include "
    return Path(name).read_text(encoding="utf-8")


def test_a_line_stands_for_the_text(tmp_path: Path) -> None:
    folder = tmp_path / "with a space" / "sources"
    assert included(Included(TEXT, folder).line) == TEXT
    assert Included(TEXT, folder).line == Included(TEXT, folder).line != Included(TEXT * 2, folder).line
    assert [path.stat().st_mode & 0o77 for path in (folder, *folder.iterdir())] == [0] * 3


def test_what_somebody_changed_or_took_away_is_written_again(tmp_path: Path) -> None:
    one = Included(TEXT, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text("int f(int x) { return 4 * x; }\n", encoding="utf-8")
    assert included(Included(TEXT, tmp_path).line) == TEXT
    file.unlink()
    one.keep()
    assert included(one.line) == TEXT


def test_without_a_file_the_text_stands_there_itself(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    for folder in (tmp_path / "file", tmp_path / 'with "quotes"'):
        one = Included(TEXT, folder)
        one.keep()
        assert one.line == TEXT
