"""The file of named keys: what it may say, how it is read again, and what the keys' limits count."""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mlx_tandem.errors import Forbidden, InvalidRequest, Overloaded, TandemError, TooLarge
from mlx_tandem.generation.caller import Caller, KeyLimits, Use
from mlx_tandem.server.keyring import LOOK_SECONDS, MOST_BYTES, Keyring, parse
from mlx_tandem.server.keys import MAX_KEY


class Clock:
    """A clock that stands still until a test moves it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


SHA = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("a-key", "b-key")}
FILE = f"""
- name: a
  sha256: {SHA["a-key"]}
- name: b
  key: b-key
  scopes: [inference, admin]
  tenant: team
  limits: {{requests: 2, learning: false}}
  expires: 2027-01-31
"""


def keyring(path: Path, text: str = FILE, **more: Any) -> Keyring:
    path.write_text(text)
    path.chmod(0o600)
    return Keyring("", str(path), **more)


def found(ring: Keyring, *keys: bytes) -> str | None:
    caller, _ = ring.find(keys)
    return None if caller is None else caller.name


def test_what_a_file_says(tmp_path: Path) -> None:
    ring = keyring(tmp_path / "keys", now=lambda: 0.0)
    a, b = ring.callers
    assert (a.name, a.tenant, a.scopes, a.limits) == ("a", "a", {"inference"}, KeyLimits())
    assert (b.name, b.tenant, b.scopes) == ("b", "team", {"inference", "admin"})
    assert b.limits == KeyLimits(requests=2, learning=False)
    assert found(ring, b"a-key") == "a" and found(ring, b"b-key") == "b"
    as_json = f'[{{"name": "a", "sha256": "{SHA["a-key"]}"}}]'
    assert [placed.entry for placed in parse(as_json).entries] == [parse(FILE).entries[0].entry]


@pytest.mark.parametrize(
    "key",
    [b"", b"a-ke", b"a-key ", b" a-key", b"A-KEY", b"a-keya-key", b"a-key\0", b"a-key\xe9", "clé".encode(), b"\xff",
     SHA["a-key"].encode(), bytes.fromhex(SHA["a-key"]), b"a", b"x" * (MAX_KEY + 1), b"a-key" + b" " * (1 << 20)],
)  # fmt: skip
def test_what_is_nearly_a_key_is_none(tmp_path: Path, key: bytes) -> None:
    assert found(keyring(tmp_path / "keys", now=lambda: 0.0), key) is None


def test_keys_of_different_callers_stand_for_nobody(tmp_path: Path) -> None:
    ring = keyring(tmp_path / "keys", now=lambda: 0.0)
    assert found(ring, b"a-key", b"b-key") is None, "whose limits would count?"
    assert found(ring, b"a-key", b"a-key") == found(ring, b"other", b"a-key") == "a"


def test_a_key_ends_when_it_says(tmp_path: Path) -> None:
    now = [1801353599.0]  # a second before 2027-01-31
    ring = keyring(tmp_path / "keys", now=lambda: now[0])
    assert found(ring, b"b-key") == "b"
    now[0] += 1
    assert ring.find([b"b-key"]) == (None, True)
    assert ring.find([b"other"]) == (None, False)
    assert ring.find([b"b-key", b"a-key"])[1] is False


def test_the_single_key_has_all_scopes_beside_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(FILE)
    ring = Keyring("own", str(path))
    caller, _ = ring.find([b"own"])
    assert caller is not None and caller.name == "" and len(caller.scopes) == 5 and caller.limits == KeyLimits()
    assert Keyring("", "").is_open and not ring.is_open
    path.write_text("")
    assert not Keyring("", str(path)).is_open, "an empty file lets nobody in"


A = f"- name: a\n  sha256: {SHA['a-key']}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- name: [", "line 2: this is not YAML"),
        ("a: 1", "must be a list of keys"),
        ("just words", "must be a list of keys"),
        (A + "- 7", "line 3: an entry must hold fields by name"),
        (A + "- name: b\n  sha256: beef", "line 3, key 'b': sha256 must be 64 hexadecimal digits"),
        (A + "- name: b\n", "line 3, key 'b': sha256 must be given, or key in its place"),
        (A + "  key: a-key\n", "key 'a': sha256 must be given, or key in its place"),
        (A + "- name: a\n  key: x\n", "line 3, key 'a': another key has the name 'a'"),
        (A + "- name: b\n  key: a-key\n", "line 3, key 'b': another entry has the same key"),
        (A + "  scopes: [all]\n", "key 'a': scopes[0] must be one of 'adapters', 'admin'"),
        (A + "  scopes: []\n", "scopes must name at least one scope"),
        (A + "  scope: [admin]\n", "scope is not a parameter here"),
        (A + "  limits: {requests: -1}\n", "limits.requests must be an integer between 0 and 1000000"),
        (A + "  limits: {request: 1}\n", "limits.request is not a parameter here"),
        (A + "  tenant: a b\n", "tenant must be 1 to 64 letters"),
        (A + "  expires: soon\n", "expires must be a date or a time such as"),
        (A + "  name: c\n", "name is given twice"),
        ("- name: 'a b'\n  key: x\n", "name must be 1 to 64 letters"),
        ("- name: b\n  key: two words\n", "printable ASCII"),
        ("- !!python/object/apply:os.system [ls]\n", "line 1: this is not YAML"),
        ("[" * 500_000, "values are nested over 8 deep"),
        ("- {name: a, key: x, expires: 2027-99-99}", "not YAML"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_named_by_line_and_field(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        keyring(tmp_path / "keys", text)
    assert said in refused.value.message and str(tmp_path / "keys") in refused.value.message
    assert "a-key" not in refused.value.message, "no key is quoted"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read: No such file"):
        Keyring("", str(tmp_path / "none"))
    with pytest.raises(InvalidRequest, match="is not UTF-8"):
        (tmp_path / "bytes").write_bytes(b"\xff")
        Keyring("", str(tmp_path / "bytes"))
    with pytest.raises(InvalidRequest, match="has more than"):
        keyring(tmp_path / "keys", "#" * (MOST_BYTES + 1))


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, True), (0o604, True)])
def test_a_file_that_others_can_read_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    (tmp_path / "keys").write_text(FILE)
    (tmp_path / "keys").chmod(mode)
    with caplog.at_level(logging.WARNING, "mlx_tandem"):
        Keyring("", str(tmp_path / "keys"))
    assert ("can be read by others" in caplog.text) == warned


NOW = 1_790_000_000.0


def change(path: Path, text: str, when: float = NOW - 1) -> None:
    path.write_text(text)
    os.utime(path, (when, when))


def test_a_changed_file_counts_within_a_second(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong one is logged once, and the keys that were known stay; so they do when the file is gone."""
    clock, path = Clock(), tmp_path / "keys"
    ring = keyring(path, clock=clock, now=lambda: NOW)
    caller, _ = ring.find([b"a-key"])
    assert caller is not None
    with caller.request():
        change(path, A.replace("- name: a", "- name: a\n  limits: {requests: 1}") + "- name: c\n  key: c-key\n")
        assert found(ring, b"c-key") is None, "the file is not looked at more often than that"
        clock.now += LOOK_SECONDS
        assert found(ring, b"c-key") == "c" and found(ring, b"b-key") is None
        again, _ = ring.find([b"a-key"])
        assert again is not None and again.limits.requests == 1
        with pytest.raises(Overloaded):
            again.check_request()  # what is open goes on under the name
    with caplog.at_level(logging.ERROR, "mlx_tandem"):
        for text in ("- name: a\n  sha256: beef\n", None):
            path.unlink() if text is None else change(path, text)
            for _ in range(3):
                clock.now += LOOK_SECONDS
                assert found(ring, b"c-key") == "c"
    reasons = [record.__dict__["fields"]["reason"] for record in caplog.records]
    assert len(reasons) == 2 and "line 1, key 'a': sha256 must be" in reasons[0] and "No such file" in reasons[1]
    change(path, "", NOW - 0.1)
    clock.now += LOOK_SECONDS
    assert found(ring, b"c-key") == "c", "whoever writes it may have more to write"
    change(path, "")
    clock.now += LOOK_SECONDS
    assert found(ring, b"c-key") is None and not ring.is_open


# -- limits ---------------------------------------------------------------------------------------------------------


def caller(clock: Clock, **limits: Any) -> Caller:
    return Caller("ci", "team", frozenset(("inference",)), KeyLimits(**limits), Use(clock))


def wait(refused: pytest.ExceptionInfo[TandemError], limit: str) -> float:
    assert f"'ci' (its limit {limit})" in refused.value.message and refused.value.retry_after is not None
    return refused.value.retry_after


def test_a_key_that_is_gone_from_the_file_is_unknown_by_its_name(tmp_path: Path) -> None:
    """Batches ask for keys by their names, also while nobody sends a request."""
    clock = Clock()
    ring = keyring(tmp_path / "keys", clock=clock, now=lambda: 0.0)
    assert ring.named("b") is not None
    (tmp_path / "keys").write_text(FILE[: FILE.index("- name: b")])
    os.utime(tmp_path / "keys", (1, 1))
    clock.now += LOOK_SECONDS
    assert ring.named("b") is None and ring.named("a") is not None


def test_retry_after_is_when_the_minute_has_room() -> None:
    clock = Clock()
    ci = caller(clock, requests_per_minute=3)
    for second in (0.2, 0.4, 30.0):
        clock.now = second
        ci.check_request()
        with ci.request():
            pass
    clock.now = 40.0
    with pytest.raises(Overloaded) as refused:
        ci.check_request()
    seconds = wait(refused, "requests_per_minute")
    assert seconds == pytest.approx(20.4)
    clock.now += seconds - 0.01
    with pytest.raises(Overloaded):
        ci.check_request()
    clock.now += 0.02
    ci.check_request()
    assert ci.use.refused == {"requests_per_minute": 2}


def test_retry_after_of_open_requests_is_how_fast_they_end() -> None:
    clock = Clock()
    ci = caller(clock, requests=2)
    for _ in range(5):
        with ci.request(), ci.request():
            clock.now += 4.0
    with ci.request(), ci.request(), pytest.raises(Overloaded) as refused:
        ci.check_request()
    assert wait(refused, "requests") == pytest.approx(2.0, rel=0.2)
    ci.check_request()


def test_retry_after_of_tokens_is_how_fast_they_end() -> None:
    clock = Clock()
    ci = caller(clock, queued_tokens=1000)
    with ExitStack() as stack:
        stack.enter_context(ci.tokens(600))
        clock.now += 6.0
        with pytest.raises(Overloaded) as refused, ci.tokens(500):
            pass
        assert wait(refused, "queued_tokens") == pytest.approx(1.0, rel=0.01)  # 100 tokens, if 600 end in six seconds
        clock.now += 6.0
    with ci.tokens(900), pytest.raises(Overloaded) as refused, ci.tokens(500):
        pass
    assert wait(refused, "queued_tokens") == pytest.approx(400 * 12 / 600, rel=0.01)
    with pytest.raises(TooLarge, match="up to 1001 tokens"), ci.tokens(1001):
        pass
    assert ci.use.open_tokens == 0


def test_uploads_have_room_within_a_minute() -> None:
    clock = Clock()
    ci = caller(clock, upload_bytes_per_minute=1000)
    ci.upload(900)
    clock.now += 10
    with pytest.raises(Overloaded) as refused:
        ci.upload(101)
    assert wait(refused, "upload_bytes_per_minute") == pytest.approx(50)
    ci.upload(100)
    with pytest.raises(TooLarge, match="1001 bytes"):
        ci.upload(1001)
    clock.now += 50
    ci.upload(101)


def test_what_a_key_may_not_do_is_named() -> None:
    ci = caller(Clock(), learning=False)
    ci.check_scope("inference", "POST /x")
    with pytest.raises(Forbidden, match="the key 'ci' lacks the scope admin, which POST /pause needs"):
        ci.check_scope("admin", "POST /pause")
    with pytest.raises(Forbidden, match="nothing may be learned from requests of the key 'ci'"):
        ci.check_learning()
    Caller().check_learning()
