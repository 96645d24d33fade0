"""The parts of batches without a server: forms, lines, and what is kept of them."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlx_tandem.dialects.batches import lines, multipart
from mlx_tandem.dialects.batches.records import Batch, FileRecord, LineOutcome
from mlx_tandem.dialects.batches.store import BatchStore
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.files import StorageError


def form(*parts: tuple[str, bytes], boundary: str = "b1") -> bytes:
    """Return a form of parts, each with its headers."""
    written = [f"--{boundary}\r\n{head}\r\n\r\n".encode() + content + b"\r\n" for head, content in parts]
    return b"".join(written) + f"--{boundary}--\r\n".encode()


NAMED = 'Content-Disposition: form-data; name="purpose"'
FILE = 'Content-Disposition: form-data; name="file"; filename="a b.jsonl"\r\nContent-Type: text/plain'


@given(st.binary(max_size=200))
@example(b"\r\n\r\n--b\r\n")
@example(b"")
def test_files_of_forms_come_back_as_they_were(content: bytes) -> None:
    boundary = "a-boundary-that-no-file-has"
    values, files = multipart.fields(form((NAMED, b"batch"), (FILE, content), boundary=boundary))
    assert (values, files) == ({"purpose": "batch"}, {"file": ("a b.jsonl", content)})


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "does not begin with a boundary"),
        (b'{"purpose": "batch"}', "does not begin with a boundary"),
        (form((NAMED, b"x"))[:-6], "ends before its last boundary"),
        (b"--b\r\n", "ends before its last boundary"),
        (form(*[(NAMED, b"x")] * 17), "over 16 parts"),
        (form((NAMED, b"x"), (NAMED, b"y")), "'purpose' twice"),
        (form((NAMED, b"x" * 1025)), "'purpose' has over 1024 bytes"),
        (form(("Content-Type: text/plain", b"x")), "has no name"),
        (form((NAMED + "\r\nX: " + "y" * 5000, b"x")), "no headers, or too long ones"),
        *(
            (
                form((f"Content-Disposition: form-data; name=file; filename*={encoding}''%ff", b"x")),
                "no usable encoding",
            )
            for encoding in ("idna", "punycode", "undefined")
        ),
    ],
)
def test_what_is_no_form_is_refused(body: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        multipart.fields(body)


def test_a_form_of_very_many_parts_takes_no_more_memory_than_it_is_long() -> None:
    body = b"--b\r\nxx" + b"\r\n--bxx" * 100_000
    tracemalloc.start()
    with pytest.raises(InvalidRequest, match="over 16 parts"):
        multipart.fields(body)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2 * len(body)


@given(st.binary(max_size=300))
@example(form((NAMED, b"x")).replace(b"name=", b"name*="))
@example(form(('Content-Disposition: form-data; name="a"; filename="\xff"', b"")))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    for sent in (body, b"--b\r\n" + body, form((NAMED, body)), form((body.decode("latin-1"), b""))):
        with contextlib.suppress(InvalidRequest):
            multipart.fields(sent)


def test_requests_are_found_at_their_places(tmp_path: Path) -> None:
    request = {"custom_id": "ä", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}}
    path = tmp_path / "in"
    texts = ["", json.dumps(request), "  ", json.dumps(request | {"custom_id": "b"}, ensure_ascii=False)]
    path.write_bytes("\r\n".join(texts).encode())
    places, problems = lines.checked(path, "/v1/embeddings")
    assert not problems
    assert [lines.read(lines.read_at(path, place)).custom_id for place in places] == ["ä", "b"]


def batch(id: str = "batch_1") -> Batch:
    return Batch(id, "/v1/embeddings", "file-1", "24h", 1.0, 2.0)


def test_an_outcome_is_kept_once_and_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    store.add_file(FileRecord("file-1", "in", "batch", 3, 1.0), b"abc")
    store.put(batch())
    store.add(batch(), [LineOutcome(1, True, b"one"), LineOutcome(0, False, b"zero")])
    store.add(batch(), [LineOutcome(1, False, b"again"), LineOutcome(2, True, b"two")])
    assert store.done("batch_1") == {0: False, 1: True, 2: True}
    assert store.used() == (1, 3 + 10)
    store.path("file-9").write_bytes(b"half")  # the process ended while it was written
    with pytest.raises(StorageError, match="in use by process"):
        BatchStore(tmp_path)
    store.close()
    store = BatchStore(tmp_path)
    assert not store.path("file-9").exists() and store.path("file-1").read_bytes() == b"abc"
    ended = batch()
    ended.enter("completed", 5.0)
    output, errors = (FileRecord(f"file-{n}", "out", "batch_output", 0, 5.0) for n in (2, 3))
    store.end(ended, output, errors)
    assert (ended.output, ended.errors) == ("file-2", "file-3")
    assert store.path("file-2").read_bytes() == b"one\ntwo\n" and store.path("file-3").read_bytes() == b"zero\n"
    assert store.used() == (3, 3 + 8 + 5)
    assert store.unfinished() == [] and store.batch("batch_1") == ended
    assert [record.id for record in store.files()] == ["file-3", "file-2", "file-1"]
    store.close()


def test_the_oldest_batches_that_have_ended_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_tandem.dialects.batches.store.MOST_BATCHES", 2)
    store = BatchStore(tmp_path)
    for number in range(4):
        each = batch(f"batch_{number}")
        if number:
            each.enter("cancelled", 5.0)
        store.put(each)
    assert [each.id for each in store.page(None, 10)] == ["batch_3", "batch_2", "batch_0"]
    assert [each.id for each in store.page("batch_3", 1)] == ["batch_2"]
    assert [each.id for each in store.unfinished()] == ["batch_0"]
    store.close()
