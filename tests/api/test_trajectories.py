"""Trajectories over HTTP: several turns under one id, on the tokens that were drawn, and rewards that come later."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_tandem.training.trajectories import Trajectory
from tests import stored
from tests.api.learns import SORT, learning_config
from tests.serving import RunningServer, serving

TOOL = {
    "type": "function",
    "function": {"name": "get_score", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
ASKED = [{"role": "user", "content": "What is the score in Oslo?"}]
FOLDER: list[Path] = []


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that collects and does not train."""
    folder = tmp_path_factory.mktemp("learns")
    FOLDER.append(folder)
    with serving(learning_config(folder, "inference_only")) as running:
        yield running


def collected(id: str) -> Trajectory:
    """What the database of the running server has."""
    return stored.trajectories(FOLDER[-1] / "checkpoints")[id]


def ask(server: RunningServer, messages: list[dict[str, Any]], **fields: Any) -> Any:
    """The body of a reply to a chat."""
    body = {"model": "policy", "messages": messages, "tools": [TOOL], "max_tokens": 40, "seed": 1, "temperature": 0.9}
    return server.client.post("/v1/chat/completions", json=body | fields)


def begun(server: RunningServer, messages: list[dict[str, Any]] | None = None, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a request whose rewards come later."""
    reply = ask(server, messages or ASKED, collect_trajectory=True, scoring_function="later", **fields)
    assert reply.status_code == 200, reply.text
    choices: list[dict[str, Any]] = reply.json()["choices"]
    return choices


def after(choice: dict[str, Any], *new: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation as a client goes on with it."""
    calls = choice["message"].get("tool_calls")
    result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "5 3 9 1"} if calls else None
    return [*ASKED, choice["message"], *([result] if result else []), *new]


def test_turns_are_one_trajectory_and_what_tools_say_has_no_weight(learner):
    choices = begun(learner, n=2)
    ids = [choice["trajectory_id"] for choice in choices]
    assert len(set(ids)) == 2 and "score" not in choices[0]
    first = choices[0]
    second = ask(learner, after(first, {"role": "user", "content": SORT}), trajectory_id=ids[0]).json()
    (choice,) = second["choices"]
    assert choice["trajectory_id"] == ids[0]
    third = ask(
        learner,
        [*after(first, {"role": "user", "content": SORT}), choice["message"], {"role": "user", "content": "Again"}],
        trajectory_id=ids[0],
    ).json()
    known = learner.client.get(f"/v1/trajectories/{ids[0]}").json()
    said = [first["token_ids"], choice["token_ids"], third["choices"][0]["token_ids"]]
    assert known["answers"] == 3 and known["trained_tokens"] == sum(map(len, said))
    assert known["tokens"] == third["usage"]["total_tokens"]
    reply = learner.client.post(f"/v1/trajectories/{ids[0]}/reward", json={"turn_rewards": [0.25, 0, 1]})
    assert reply.json() == {"trajectory_id": ids[0], "status": "collected"}
    t = collected(ids[0])
    assert [list(t.tokens[turn]) for turn in t.turns] == said
    whole = list(t.prompt + t.tokens)
    assert len(whole) == known["tokens"] and len(t.mask) == len(t.logprobs) == len(t.versions) == len(t.tokens)
    assert (t.reward, t.turn_rewards, t.temperature) == (1.25, (0.25, 0.0, 1.0), 0.9)
    assert all((lp < 0) <= own for lp, own in zip(t.model_logprobs, t.mask, strict=True))
    between = learner.client.post("/detokenize", json={"tokens": list(t.tokens[t.turns[0].stop : t.turns[1].start])})
    assert "5 3 9 1" in between.json()["prompt"] and SORT in between.json()["prompt"]
    assert learner.client.delete(f"/v1/trajectories/{ids[1]}").json()["deleted"]


def test_kept_tokens_stay_where_rendering_would_change_them(learner):
    """An answer that was cut off has no end, and a template that is given its text would write one."""
    (choice,) = begun(learner, max_tokens=3, tools=None, top_p=0.95)
    assert choice["finish_reason"] == "length"
    id = choice["trajectory_id"]
    messages = [*ASKED, choice["message"], {"role": "user", "content": SORT}]
    reply = ask(learner, messages, trajectory_id=id, tools=None, top_p=0.95)
    assert reply.status_code == 200, reply.text
    learner.client.post(f"/v1/trajectories/{id}/reward", json={"reward": 1})
    t = collected(id)
    assert list(t.tokens[:3]) == choice["token_ids"]
    assert (t.truncation.top_p, t.finish_reason) == (0.95, reply.json()["choices"][0]["finish_reason"])
    given = learner.client.post("/detokenize", json={"tokens": list(t.tokens[3 : t.turns[1].start])}).json()["prompt"]
    assert given == f"<|im_end|>\n<|im_start|>user\n{SORT}<|im_end|>\n<|im_start|>assistant\n"


def test_thoughts_are_kept_where_the_template_drops_them(learner):
    asked = [{"role": "user", "content": "Think, then answer: 34 + 28"}]
    choices = begun(learner, asked, n=2, max_tokens=100, tools=None)
    whole = choices[0]["message"]
    assert whole["reasoning_content"]
    short = {"role": "assistant", "content": choices[1]["message"]["content"]}
    for choice, sent in zip(choices, (whole, short), strict=True):
        messages = [*asked, sent, {"role": "user", "content": SORT}]
        reply = ask(learner, messages, tools=None, trajectory_id=choice["trajectory_id"], max_tokens=1)
        assert reply.status_code == 200, reply.text
        prompt = learner.client.post("/tokenize", json={"messages": asked}).json()["count"]
        new = f"\n<|im_start|>user\n{SORT}<|im_end|>\n<|im_start|>assistant\n"
        said = learner.client.post("/tokenize", json={"prompt": new, "add_special_tokens": False}).json()["count"]
        assert reply.json()["usage"]["prompt_tokens"] == prompt + len(choice["token_ids"]) + said


def test_prompts_of_token_ids_go_on_after_the_same_tokens(learner):
    fields = {"model": "policy", "seed": 1, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
    prompt = learner.client.post("/tokenize", json={"prompt": SORT}).json()["tokens"]
    (choice,) = learner.complete(prompt, collect_trajectory=True, scoring_function="later", **fields).json()["choices"]
    id, so_far = choice["trajectory_id"], prompt + choice["token_ids"]
    wrong = learner.complete([*so_far[:-1], 5, 6], trajectory_id=id, **fields)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (409, "conversation_changed")
    assert learner.complete(so_far, trajectory_id=id, **fields).status_code == 409, "nothing is new"
    scored = learner.complete(
        [*so_far, 201], trajectory_id=id, scoring_function="contains", metadata={"answer": "3"}, **fields
    ).json()["choices"][0]
    assert scored["trajectory_id"] == id and scored["score"] in (0.0, 1.0)
    t = collected(id)
    assert t.tokens == (*choice["token_ids"], 201, *scored["token_ids"]) and t.reward == scored["score"]
    assert t.mask == (1,) * 4 + (0,) + (1,) * 4


def test_a_stream_goes_on_with_a_trajectory(learner):
    (choice,) = begun(learner)
    id = choice["trajectory_id"]
    text = ask(learner, after(choice), trajectory_id=id, stream=True).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert [c["trajectory_id"] for e in events for c in e["choices"] if "trajectory_id" in c] == [id]
    assert learner.client.get(f"/v1/trajectories/{id}").json()["answers"] == 2


def test_a_conversation_that_was_changed_is_refused_and_nothing_is_lost(learner):
    (choice,) = begun(learner, tools=None, max_tokens=8)
    id, said = choice["trajectory_id"], choice["message"]
    new = {"role": "user", "content": SORT}
    for messages, more in (
        (ASKED, {}),
        ([*ASKED, new], {}),
        ([*ASKED, {"role": "user", "content": "x"}, new], {}),
        ([*ASKED, said | {"content": "Something else"}, new], {}),
        ([{"role": "user", "content": "Another question"}, said, new], {}),
        ([*ASKED, said, new], {"tools": [TOOL]}),
    ):
        reply = ask(learner, messages, trajectory_id=id, **({"tools": None} | more))
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "conversation_changed"), messages
    assert learner.client.get(f"/v1/trajectories/{id}").json()["answers"] == 1
    assert ask(learner, [*ASKED, said, new], trajectory_id=id, tools=None).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"n": 2}, "n"),
        ({"collect_trajectory": False}, "collect_trajectory"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"model": "shout"}, "trajectory_id"),
        ({"trajectory_id": 5}, "trajectory_id"),
        ({"trajectory_id": None, "scoring_function": "later"}, "scoring_function"),
    ],
)
def test_what_cannot_go_on_is_refused_by_name(learner, fields, param):
    (choice,) = begun(learner, tools=None, max_tokens=4)
    messages = [*ASKED, choice["message"], {"role": "user", "content": SORT}]
    body = {"trajectory_id": choice["trajectory_id"], "tools": None} | fields
    reply = ask(learner, messages, **body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_rewards_are_taken_once_and_for_what_is_there(learner):
    (choice,) = begun(learner, tools=None, max_tokens=4)
    path = f"/v1/trajectories/{choice['trajectory_id']}"
    for body, param in (
        ({}, "reward"),
        ({"reward": 1e9}, "reward"),
        ({"reward": "good"}, "reward"),
        ({"turn_rewards": [1, 2]}, "turn_rewards"),
        ({"turn_rewards": [None]}, "turn_rewards[0]"),
        ({"rewards": 1}, "rewards"),
    ):
        reply = learner.client.post(f"{path}/reward", json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert learner.client.post(f"{path}/reward", json={"reward": 0.5}).json()["status"] == "collected"
    for method, where in (("POST", f"{path}/reward"), ("GET", path), ("DELETE", path)):
        body = {"reward": 0.5} if method == "POST" else None
        reply = learner.client.request(method, where, json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "trajectory_closed")
        reply = learner.client.request(method, where.replace(choice["trajectory_id"], "traj-0"), json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "trajectory_not_found")
    reply = ask(learner, after(choice), trajectory_id="traj-0")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "trajectory_not_found")


def test_the_status_counts_what_waits_for_a_reward(learner):
    before = learner.client.get("/v1/training/status").json()
    (choice,) = begun(learner, tools=None, max_tokens=4)
    learner.client.delete(f"/v1/trajectories/{choice['trajectory_id']}")
    begun(learner, tools=None, max_tokens=4)
    status = learner.client.get("/v1/training/status").json()
    assert status["open_trajectories"] == before["open_trajectories"] + 1
    assert status["dropped_no_reward"] == before["dropped_no_reward"] + 1
