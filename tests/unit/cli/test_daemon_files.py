"""The files by which servers in the background are found."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from mlx_tandem.cli.daemon import Detached, State, _file, _write


def test_a_server_that_ends_leaves_the_file_of_the_next_one_on_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    first = State(pid=1, born="1", port=8000, argv=(), cwd="/", log="", key_variable=None)
    following = replace(first, pid=2, born="2")
    for own, is_left in ((first, True), (following, False)):
        _write(following)
        Detached(-1, None, tmp_path / "log", None, state=own).end()
        assert _file(8000).exists() == is_left
