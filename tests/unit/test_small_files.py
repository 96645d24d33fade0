"""Small files of folders that others have made: read within exact bounds, or refused by their names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_tandem.errors import ModelError
from mlx_tandem.limits import MAX_JSON_DEPTH
from mlx_tandem.small_files import MOST_BYTES, levels, parse, read, read_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
)


def nested(depth: int, wrap: str) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"k": value} if wrap == "{" else [value]
    return value


@given(VALUES)
def test_json_is_read_as_it_is(value: Any) -> None:
    assert parse(json.dumps(value).encode()) == value


@given(VALUES)
def test_levels_are_the_values_by_their_depth(value: Any) -> None:
    def at(value: Any, depth: int) -> list[Any]:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return [value] if depth == 0 else [found for v in inner for found in at(v, depth - 1)]

    found = list(levels(value))
    assert found == [at(value, depth) for depth in range(len(found))]
    assert not at(value, len(found))


@pytest.mark.parametrize("wrap", ["{", "["])
def test_the_deepest_json_that_is_read(wrap: str) -> None:
    """The whole value is the first level, a list as well as an object; the innermost number is the last one."""
    deepest = nested(MAX_JSON_DEPTH - 1 - (wrap == "["), wrap)
    assert parse(json.dumps(deepest).encode()) == deepest
    deeper = nested(MAX_JSON_DEPTH - (wrap == "["), wrap)
    with pytest.raises(ValueError, match="k is nested too deeply" if wrap == "{" else "it is nested too deeply"):
        parse(json.dumps(deeper).encode())
    with pytest.raises(ValueError, match="b is nested too deeply"):
        parse(json.dumps({"a": 1, "b": deeper}).encode())


@pytest.mark.parametrize("raw", [b"{", b"\xff", b'{"a": 1} 2', b"[" * 100_000, b"9" * 5000])
def test_what_is_no_json_is_refused_by_the_file(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(raw)
    with pytest.raises(ModelError) as refused:
        read_object(path)
    assert (refused.value.message.startswith(f"{path} is not JSON: "), refused.value.param) == (True, "config.json")


def test_only_an_object_is_an_object(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[1]")
    with pytest.raises(ModelError, match=r"config\.json does not hold a JSON object"):
        read_object(path)
    path.write_text('{"a": [1]}')
    assert read_object(path) == {"a": [1]}
    assert read_object(tmp_path / "other.json") is None


def test_the_largest_file_that_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.touch()
    os.truncate(path, MOST_BYTES)
    assert read(path) == bytes(MOST_BYTES)
    os.truncate(path, MOST_BYTES + 1)
    with pytest.raises(ModelError, match=f"is larger than {MOST_BYTES} bytes"):
        read(path)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    """A pipe that nobody writes to would block who opens it."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(ModelError, match="is not a regular file") as refused:
            read(tmp_path / name)
        assert refused.value.param == name
    with pytest.raises(ModelError, match="cannot be read: Not a directory"):
        read(Path("/dev/null/x"))
