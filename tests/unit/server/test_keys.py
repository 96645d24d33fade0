"""The API key: where it is read from, which keys can be used, and which addresses need one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_tandem.config import ServerConfig
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.server.keys import MAX_KEY, check_exposure, is_loopback, read_key


def test_a_key_of_the_settings_counts_before_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    assert read_key("own", str(file)) == "own"
    assert read_key("", str(file)) == "from-file"
    assert read_key("", "") == ""


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (b"abc", "abc"),
        (b"  abc \r\nsecond\n", "abc"),
        (b"x" * MAX_KEY + b"\n", "x" * MAX_KEY),
        (b"!~", "!~"),
        (b"", None),
        (b"\nabc\n", None),
        (b"a b\n", None),
        (b"a\x7f\n", None),
        ("é".encode(), None),
        (b"x" * (MAX_KEY + 1), None),
        (b"x" * (MAX_KEY + 1) + b"\n", None),
    ],
)
def test_the_first_line_of_a_file_is_the_key(content: bytes, key: str | None, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    file.chmod(0o600)
    if key is not None:
        assert read_key("", str(file)) == key
        return
    with pytest.raises(InvalidRequest) as refused:
        read_key("", str(file))
    assert refused.value.param == "api_key_file"
    assert not content.strip() or content.decode("latin-1").strip() not in refused.value.message, "no key is quoted"


@pytest.mark.parametrize("key", ["x" * (MAX_KEY + 1), "a b", "a\n", "é"])
def test_a_key_that_cannot_be_used_is_not_quoted(key: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_key(key, "")
    assert refused.value.param == "api_key"
    assert key not in refused.value.message
    assert read_key("x" * MAX_KEY, "") == "x" * MAX_KEY


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700, 0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o644])
def test_a_file_that_others_can_use_is_told_of(mode: int, tmp_path: Path) -> None:
    file, told = tmp_path / "key", []
    file.write_text("abc")
    file.chmod(mode)
    read_key("", str(file), lambda *seen: told.append(seen))
    assert told == ([(file, mode)] if mode % 0o100 else [])


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read: No such file or directory") as refused:
        read_key("", str(tmp_path / "key"))
    assert refused.value.param == "api_key_file"


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        *((host, True) for host in ("localhost", "127.0.0.1", "127.1.2.3", "::1")),
        *((host, False) for host in ("", "0.0.0.0", "::", "192.168.0.1", "example.org", "localhost.example", "::2")),
    ],
)
def test_addresses_that_other_machines_reach_need_a_key(host: str, is_ours: bool) -> None:
    def refused(**server: Any) -> bool:
        try:
            check_exposure(ServerConfig(host=host, **server))
        except InvalidRequest as e:
            return e.param == "api_key"
        return False

    assert is_loopback(host) == is_ours
    assert refused() == (not is_ours)
    for fine in ({"api_key": "x"}, {"api_key_file": "x"}, {"uds": "/x"}):
        assert not refused(**fine)
