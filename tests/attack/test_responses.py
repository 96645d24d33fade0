"""Small bodies that ask for much of what the server has stored."""

from __future__ import annotations

import re
from pathlib import Path

from tests.serving import RunningServer


def peak(server: RunningServer) -> int:
    """The most bytes that the front has had in memory."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


def test_many_references_to_one_item(server: RunningServer) -> None:
    """The item is decoded once, without its logprobs, and only if all that the body refers to is not too much."""
    asked = {"input": "Count.", "max_output_tokens": 200, "temperature": 2.0, "top_logprobs": 5}
    item = server.client.post("/v1/responses", json=asked).json()["output"][0]
    before = peak(server)
    for count in (1000, 4096):
        references = [{"type": "item_reference", "id": item["id"]}] * count
        reply = server.client.post("/v1/responses", json={"input": references, "max_output_tokens": 1})
        assert reply.status_code in (400, 413), reply.text
        assert reply.json()["error"]["code"] in ("context_length_exceeded", "too_large")
    assert peak(server) - before < 50 << 20
