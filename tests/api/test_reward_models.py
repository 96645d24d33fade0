"""Reward models over HTTP: scores, scoring functions, and what is refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from mlx_tandem.config import RewardSpec
from tests import reward_models
from tests.api.learns import SORT, collect, learning_config
from tests.serving import RunningServer, serving
from tests.waiting import until

TASTE = {"function": "reward_model", "options": {"model": "taste"}}
END = 2  # the token that ends the built-in model's answers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reward")


@pytest.fixture(scope="module")
def learning(folder: Path) -> Iterator[RunningServer]:
    """A server that learns, with a reward model as its scoring function."""
    reward_models.make(folder / "taste")
    rewards = {"mine": (RewardSpec("reward_model", 2.0, {"model": "taste"}),)}
    config = learning_config(folder, rewards=rewards, scoring_function="mine")
    adapters = (*config.adapters, ("taste", str(folder / "taste")))
    with serving(structs.replace(config, adapters=adapters, adapter_root=str(folder))) as server:
        yield server


def score(server: RunningServer, **body: Any) -> list[float]:
    reply = server.client.post("/pooling", json={"model": "taste"} | body)
    assert reply.status_code == 200, reply.text
    data = reply.json()["data"]
    assert [(one["index"], one["object"]) for one in data] == [(i, "pooling") for i in range(len(data))]
    return [one["data"][0] for one in data]


def refusal(reply: Any, status: int = 400) -> tuple[str, str]:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    return error["param"], error["message"]


def test_a_score_is_the_head_s_product_with_the_last_hidden_state(learning: RunningServer, folder: Path) -> None:
    texts = ["Sort down: 3 1 2", "The capital of France is Paris."]
    body = {"input": texts, "model": "taste", "pooling": "last", "normalize": False}
    hidden = [one["embedding"] for one in learning.client.post("/v1/embeddings", json=body).json()["data"]]
    g = np.random.default_rng(0)
    for _ in range(2):
        g.standard_normal((256, 2)), g.standard_normal((2, 256))
    wanted = np.array(hidden) @ g.standard_normal(256).astype(np.float32)
    assert score(learning, input=texts) == pytest.approx(wanted.tolist(), rel=1e-3, abs=1e-2)
    reply = learning.client.post("/pooling", json={"model": "taste", "input": texts}).json()
    assert reply["model"] == "taste@1" and reply["usage"]["prompt_tokens"] > 10


def test_a_conversation_is_scored_at_the_end_of_its_last_answer(learning: RunningServer) -> None:
    messages = [{"role": "user", "content": SORT}, {"role": "assistant", "content": "3 2 1"}]
    asked = learning.client.post("/tokenize", json={"messages": messages[:1]}).json()["tokens"]
    said = learning.client.post("/tokenize", json={"prompt": "3 2 1", "add_special_tokens": False}).json()["tokens"]
    assert score(learning, messages=messages) == pytest.approx(score(learning, input=[[*asked, *said, END]]), abs=1e-2)


def test_a_reward_model_scores_answers_as_a_function(learning: RunningServer) -> None:
    """Also where the answer was cut off, and in a sum with other functions."""
    fields = {"return_token_ids": True, "collect_trajectory": False, "max_tokens": 3, "model": "policy"}
    asked = {"messages": [{"role": "user", "content": SORT}]}
    prompt = learning.client.post("/tokenize", json=asked).json()["tokens"]
    length = {"function": "length", "weight": 0.5, "options": {"max": 1000}}
    for scoring, weight, more in (
        ([TASTE], 1.0, 0.0),
        ("mine", 2.0, 0.0),
        ([TASTE | {"weight": -3.0}, length], -3.0, 0.5),
    ):
        choices = collect(learning, prompt, scoring_function=scoring, **fields)
        assert any(c["finish_reason"] == "length" for c in choices)
        texts = [[*prompt, *c["token_ids"], *([] if c["token_ids"][-1] == END else [END])] for c in choices]
        wanted = [weight * s + more for s in score(learning, input=texts)]
        assert [c["score"] for c in choices] == pytest.approx(wanted, abs=2e-2)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/completions", "/v1/perplexity"]
)
def test_a_reward_model_answers_nobody(learning: RunningServer, path: str) -> None:
    said = {"prompt": SORT} if path == "/v1/completions" else {"text": SORT} if "perplexity" in path else {}
    said = said or {"messages": [{"role": "user", "content": SORT}]}
    limit = {} if path == "/v1/perplexity" or path == "/api/chat" else {"max_tokens": 4}
    reply = learning.client.post(path, json={"model": "taste"} | said | limit)
    assert reply.status_code == 400 and "is a reward model" in reply.text


@pytest.mark.parametrize(
    ("scoring", "says"),
    [
        ("reward_model", "options"),
        ([{"function": "reward_model", "options": {"model": "nobody"}}], "'nobody' is not loaded"),
        ([{"function": "reward_model", "options": {"model": "shout"}}], "'shout' is no reward model"),
        ([{"function": "reward_model", "options": {"model": "/etc/passwd"}}], "is not loaded"),
        ([{"function": "reward_model", "options": {"model": "taste", "path": "x"}}], "path"),
    ],
)
def test_what_cannot_score_is_refused_before_anything_is_generated(
    learning: RunningServer, scoring: Any, says: str
) -> None:
    body = {"prompt": SORT, "model": "policy", "scoring_function": scoring, "max_tokens": 4}
    param, message = refusal(learning.client.post("/v1/completions", json=body))
    assert param == "scoring_function" and says in message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "shout", "input": "a"}, "model"),
        ({"model": "base", "input": "a"}, "model"),
        ({}, "input"),
        ({"input": "a", "messages": []}, "input"),
        ({"input": "a", "tools": []}, "tools"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"input": "a", "use_activation": True}, "use_activation"),
    ],
)
def test_refusals_of_pooling_name_the_field(learning: RunningServer, body: dict[str, Any], param: str) -> None:
    assert refusal(learning.client.post("/pooling", json={"model": "taste"} | body))[0] == param


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (np.full((1, 256), np.nan, np.float32), "holds NaN"),
        (np.zeros((2, 256), np.float32), "has shape [2, 256]"),
        (np.zeros((1, 255), np.float32), "has 255 numbers; the served model's hidden states have 256"),
    ],
    ids=["not finite", "two labels", "of another model"],
)
def test_a_wrong_head_is_refused_by_its_tensor(
    learning: RunningServer, folder: Path, request: pytest.FixtureRequest, head: Any, says: str
) -> None:
    name = request.node.callspec.id.replace(" ", "-")
    reward_models.make(folder / name, head=head)
    _, message = refusal(learning.client.post("/v1/adapters", json={"name": name}))
    assert reward_models.HEAD in message and says in message


def test_a_server_goes_on_learning_by_a_reward_model_after_the_engine_and_itself_were_ended(folder: Path) -> None:
    reward_models.make(folder / "again" / "taste")
    rewards = {"mine": (RewardSpec("reward_model", 1.0, {"model": "taste"}),)}
    config = learning_config(folder / "again", rewards=rewards, scoring_function="mine", update_frequency=4)
    config = structs.replace(config, adapters=(("taste", str(folder / "again" / "taste")),))
    scores = []
    for updates in (1, 3):
        with serving(config) as server:
            for at in range(updates, updates + 2):
                choices = collect(server, scoring_function=None, max_tokens=6)
                assert all(c["trajectory_id"] for c in choices)
                until(lambda at=at: server.client.get("/v1/training/status").json()["updates"] >= at)
                scores.append(score(server, input=SORT))
                if at == updates:
                    os.kill(server.engine_pid(), signal.SIGKILL)
                    until(lambda: server.client.get("/health").json()["engine_restarts"] == 1)
                    until(lambda: server.client.get("/health").status_code == 200)
    assert [s for (s,) in scores] == pytest.approx([scores[0][0]] * 4, abs=2e-2)
