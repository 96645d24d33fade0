"""Embeddings over HTTP and in Python."""

from __future__ import annotations

import base64
from array import array
from pathlib import Path

import numpy as np
import pytest

from mlx_tandem.errors import ModelError
from mlx_tandem.generation.embeddings import default_pooling

TEXTS = ["What is 12 + 5?", "The capital of France is Paris.", "Once there was a fox."]


def embed(server, **body) -> np.ndarray:
    reply = server.client.post("/v1/embeddings", json=body)
    assert reply.status_code == 200, reply.text
    data = reply.json()["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    return np.array([one["embedding"] for one in data])


def test_a_batch_gives_what_single_texts_give(server) -> None:
    together = embed(server, input=TEXTS)
    assert together.shape == (3, 256)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-5)
    for text, vector in zip(TEXTS, together, strict=True):
        np.testing.assert_allclose(embed(server, input=text)[0], vector, atol=2e-3)


def test_model_and_usage(server) -> None:
    reply = server.client.post("/v1/embeddings", json={"input": TEXTS, "model": "shout"}).json()
    tokens = sum(server.client.post("/tokenize", json={"prompt": text}).json()["count"] for text in TEXTS)
    assert reply["model"] == "shout@1"
    assert reply["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert np.abs(np.array(reply["data"][0]["embedding"]) - embed(server, input=TEXTS[0])[0]).max() > 0.01


def test_token_ids_base64_and_dimensions(server) -> None:
    ids = server.client.post("/tokenize", json={"prompt": TEXTS[0]}).json()["tokens"]
    whole = embed(server, input=TEXTS[0], normalize=False)[0]
    np.testing.assert_allclose(embed(server, input=[ids], normalize=False)[0], whole, atol=1e-6)
    reply = server.client.post("/v1/embeddings", json={"input": ids, "encoding_format": "base64", "dimensions": 8})
    cut = np.array(array("f", base64.b64decode(reply.json()["data"][0]["embedding"])))
    np.testing.assert_allclose(cut, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-5)


def test_the_last_token_sees_everything_before_it(server) -> None:
    one, other = embed(server, input=["1 fox", "2 fox"], pooling="last")
    assert np.abs(one - other).max() > 1e-3
    cut = embed(server, input="1 fox", pooling="last", truncate_prompt_tokens=1)[0]
    assert np.abs(cut - one).max() > 1e-3


def test_the_end_of_a_prompt_is_kept_and_of_a_text_for_ollama_its_beginning(server) -> None:
    ids = server.client.post("/tokenize", json={"prompt": TEXTS[1]}).json()["tokens"]
    last = embed(server, input=[ids[-3:]])[0]
    np.testing.assert_allclose(embed(server, input=[ids], truncate_prompt_tokens=3)[0], last, atol=2e-3)
    long = " ".join(map(str, range(700)))
    ids = server.client.post("/tokenize", json={"prompt": long}).json()["tokens"]
    assert len(ids) > 1023
    cut = server.client.post("/api/embed", json={"model": "base", "input": long}).json()
    np.testing.assert_allclose(cut["embeddings"][0], embed(server, input=[ids[:1023]])[0], atol=2e-3)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [5000]}, "input"),
        ({"input": "a", "dimensions": 257}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "pooling": "cls"}, "pooling"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "colour": 1}, "colour"),
        ({"input": "word " * 9000}, "input"),
    ],
)
def test_refusals(server, body, param) -> None:
    reply = server.client.post("/v1/embeddings", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_the_pooling_of_a_model_folder(tmp_path: Path) -> None:
    assert default_pooling(tmp_path) == "mean"
    folder = tmp_path / "1_Pooling"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text('{"pooling_mode_lasttoken": true, "pooling_mode_mean_tokens": false}')
    assert default_pooling(tmp_path) == "last"
    file.write_text('{"pooling_mode_mean_tokens": true}')
    assert default_pooling(tmp_path) == "mean"
    file.write_text('{"pooling_mode_cls_token": true}')
    with pytest.raises(ModelError, match="pooling_mode_cls_token"):
        default_pooling(tmp_path)
