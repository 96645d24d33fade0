"""Batches by the `openai` package, unmodified."""

from __future__ import annotations

import io
import json

import pytest
from msgspec.structs import replace

from mlx_tandem.config import BatchesConfig
from tests.clients import lazily
from tests.serving import demo_config, serving
from tests.waiting import until

openai = lazily.imported("openai")


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    config = replace(demo_config(), batches=BatchesConfig(dir=str(tmp_path_factory.mktemp("batches"))))
    with serving(config) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def run(client, endpoint, *bodies):
    """The batch of these bodies at its end, and the responses by the ids of the requests."""
    lines = [{"custom_id": str(i), "method": "POST", "url": endpoint, "body": body} for i, body in enumerate(bodies)]
    text = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("requests.jsonl", io.BytesIO(text)), purpose="batch")
    assert client.files.retrieve(file.id).filename == "requests.jsonl"
    assert client.files.content(file.id).content == text
    batch = client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"from": "tests"}
    )
    until(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed", "expired", "cancelled"))
    batch = client.batches.retrieve(batch.id)
    found = {}
    for id in filter(None, (batch.output_file_id, batch.error_file_id)):
        for each in map(json.loads, client.files.content(id).text.splitlines()):
            found[each["custom_id"]] = each["response"]["body"]
    return batch, found


def test_every_endpoint_and_an_adapter_for_each_line(client):
    question = [{"role": "user", "content": "What is 12 + 5?"}]
    names = ("tandem-demo", "shout", "nobody")
    chats = [{"model": name, "messages": question, "temperature": 0, "max_tokens": 16} for name in names]
    batch, found = run(client, "/v1/chat/completions", *chats)
    assert (batch.request_counts.completed, batch.request_counts.failed, batch.metadata) == (2, 1, {"from": "tests"})
    assert [found[id]["choices"][0]["message"]["content"] for id in "01"] == ["12 + 5 = 17.", "12 + 5 = 17!"]
    assert found["2"]["error"]["code"] == "model_not_found"
    assert batch.in_progress_at <= batch.completed_at
    for endpoint, body, member in (
        ("/v1/completions", {"model": "shout", "prompt": "hi", "max_tokens": 2}, "choices"),
        ("/v1/embeddings", {"model": "tandem-demo", "input": "hi"}, "data"),
        ("/v1/responses", {"model": "shout", "input": "hi", "max_output_tokens": 16}, "output"),
    ):
        batch, found = run(client, endpoint, body)
        assert batch.request_counts.completed == 1 and found["0"][member]


def test_lists_cancel_and_delete(client):
    batch, _ = run(client, "/v1/embeddings", {"input": "hi"}, {"input": "you"})
    assert [each.id for each in client.batches.list(limit=1).data] == [batch.id]
    assert len({each.id for each in client.files.list(purpose="batch", limit=1)}) > 1, "all pages"
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    assert client.files.delete(batch.output_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(batch.output_file_id)
