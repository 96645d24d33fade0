"""Completions that are scored and collected: what the request says, what its reply says, what the journal has then."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_tandem import limits
from mlx_tandem.training.trajectories import Trajectory
from tests import stored
from tests.api.learns import SORT, collect, learning_config, trajectories
from tests.serving import ROOT, RunningServer, serving
from tests.streams import data_of, until_token
from tests.waiting import until


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that collects and does not train."""
    with serving(learning_config(tmp_path_factory.mktemp("learns"), "inference_only")) as running:
        yield running


def collected(folder: Path) -> dict[str, Trajectory]:
    return stored.trajectories(folder / "checkpoints")


def events(text: str) -> list[dict]:
    lines = data_of(text)
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_every_choice_says_what_it_is_made_of(learner):
    before = learner.client.get("/v1/training/status").json()["trajectories_collected"]
    reply = learner.complete(
        [SORT, "Once there was"],
        model="policy",
        n=3,
        seed=1,
        collect_trajectory=True,
        scoring_function="contains",
        metadata={"answer": ["3", "e", "a", "1"]},
    ).json()
    choices = reply["choices"]
    assert [c["index"] for c in choices] == list(range(6))
    assert sum(len(c["token_ids"]) for c in choices) == reply["usage"]["completion_tokens"]
    for choice in choices:
        assert choice["versions"] == [1] * len(choice["token_ids"])
        words = re.findall(r"\w+", choice["text"])
        assert choice["score"] == sum(part in words for part in ["3", "e", "a", "1"]) / 4
        assert choice["logprobs"] is None and "prompt_token_ids" not in choice
    assert len({c["trajectory_id"] for c in choices}) == 6
    after = learner.client.get("/v1/training/status").json()["trajectories_collected"]
    assert after - before == 6


def test_scores_of_an_aliass_answers_count_in_its_ab_test(learner):
    arms = [{"adapter": "base", "weight": 1}, {"adapter": "policy@1", "weight": 1}]
    reply = learner.client.put("/v1/aliases/tried", json={"arms": arms, "ab_test": {"control": "base"}})
    assert reply.status_code == 200, reply.text
    asked = {"model": "tried", "scoring_function": "contains", "metadata": {"answer": ["3"]}}
    scores = []
    for n in (1, 2):
        reply = learner.complete(SORT, n=n, seed=1, temperature=1, **asked)
        scores += [sum(c["score"] for c in reply.json()["choices"]) / n]

    def counted():
        arms = learner.client.get("/v1/aliases/tried").json()["ab_test"]["arms"]
        return sum(arm["answers"] for arm in arms), sum(arm["answers"] * (arm["mean_score"] or 0) for arm in arms)

    until(lambda: counted()[0] == 2)
    assert counted()[1] == sum(scores), "the choices of an answer count together"
    feedback = {"completion_id": reply.json()["id"], "thumb": "up"}
    assert learner.client.post("/v1/feedback", json=feedback).status_code == 200
    assert counted()[0] == 2, "it has been scored"


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_says_the_same(learner, chat):
    fields = {
        "model": "policy",
        "n": 2,
        "seed": 3,
        "max_tokens": 12,
        "collect_trajectory": True,
        "scoring_function": {"contains": 0.5, "exact_match": 1.0},
        "metadata": {"answer": "3"},
    }

    def ask(**more: object):
        return learner.chat(SORT, **fields, **more) if chat else learner.complete(SORT, **fields, **more)

    whole = ask().json()["choices"]
    found = events(ask(stream=True, stream_options={"include_usage": True}).text)
    *_, outcomes, usage = found
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in whole)
    assert [c["index"] for c in outcomes["choices"]] == [0, 1]
    for choice, last in zip(whole, outcomes["choices"], strict=True):
        own = [c for e in found[:-2] for c in e["choices"] if c["index"] == choice["index"]]
        for field in ("token_ids", "versions"):
            assert [t for c in own for t in c.get(field, [])] == choice[field]
        assert last["score"] == choice["score"]
        assert last["trajectory_id"] != choice["trajectory_id"]
        assert own[-1]["finish_reason"] and last["finish_reason"] is None


def test_a_stop_string_ends_the_trajectory_where_it_ends_the_choice(learner):
    (long,) = collect(learner, n=1, max_tokens=16, ignore_eos=True)
    stop = long["text"][4:6]
    (short,) = collect(learner, n=1, max_tokens=16, ignore_eos=True, stop=stop)
    kept = short["token_ids"]
    assert 0 < len(kept) < 16 and kept == long["token_ids"][: len(kept)]
    assert len(short["versions"]) == len(kept)


def test_a_score_alone(learner):
    choices = collect(learner, collect_trajectory=False)
    assert all("trajectory_id" not in c and "token_ids" not in c and 0 <= c["score"] <= 1 for c in choices)


def test_token_ids_come_with_versions(learner):
    (choice,) = learner.complete(SORT, model="policy", return_token_ids=True).json()["choices"]
    assert choice["versions"] == [1] * len(choice["token_ids"])
    (choice,) = learner.complete(SORT, return_token_ids=True).json()["choices"]
    assert set(choice["versions"]) == {0}
    (choice,) = learner.complete(SORT, model="shout", return_token_ids=True).json()["choices"]
    assert set(choice["versions"]) == {1}


def test_logprobs_are_shown_only_when_asked_for(learner):
    choices = collect(learner, logprobs=2)
    assert all(len(c["logprobs"]["tokens"]) == len(c["token_ids"]) for c in choices)


def test_where_nothing_is_trained(learner):
    assert (
        learner.client.post("/v1/training/update", json={"trajectories": trajectories(), "wait": True}).status_code
        == 409
    )
    assert learner.client.post("/training/checkpoint").status_code == 409
    assert learner.client.get("/v1/training/status").json()["running"] is False


def leave(server: RunningServer) -> None:
    """Begin to read what would be collected, and close the connection."""
    fields = {"model": "policy", "prompt": SORT, "max_tokens": 200, "ignore_eos": True, "stream": True}
    fields |= {"collect_trajectory": True, "metadata": {"answer": "3"}}
    with server.client.stream("POST", "/v1/completions", json=fields) as reply:
        until_token(reply.iter_lines())


def test_what_is_collected_is_what_was_said(tmp_path):
    """A client that leaves leaves nothing."""
    config = learning_config(tmp_path, "inference_only", scoring_function="contains")
    metadata = {"answer": "3", "group": "mine", "more": [1, {"deep": None}]}
    with serving(config) as server:
        leave(server)
        scored = collect(server, temperature=0.7, top_p=0.9, logprobs=0, metadata={"answer": "3"})
        shared = [collect(server, n=1, metadata=metadata, seed=s)[0] for s in (1, 2)]
        waited = collect(server, scoring_function=None, metadata={"answer": "3"})
        prompt = server.client.post("/tokenize", json={"prompt": SORT}).json()["tokens"]
    found = collected(tmp_path)
    assert set(found) == {c["trajectory_id"] for c in (*scored, *shared, *waited)}
    assert all("score" not in c and found[c["trajectory_id"]].reward in (0.0, 1.0) for c in waited)
    for choice in scored:
        trajectory = found[choice["trajectory_id"]]
        assert trajectory.prompt == tuple(prompt)
        assert list(trajectory.tokens) == choice["token_ids"]
        assert list(trajectory.versions) == choice["versions"]
        assert (trajectory.reward, trajectory.temperature) == (choice["score"], 0.7)
        assert list(trajectory.model_logprobs) == pytest.approx(choice["logprobs"]["token_logprobs"])
        assert trajectory.logprobs != trajectory.model_logprobs and max(trajectory.logprobs) <= 0
        assert not trajectory.external and trajectory.created > 1.7e9
    assert len({found[c["trajectory_id"]].group for c in scored}) == 1
    first, second = (found[c["trajectory_id"]] for c in shared)
    assert first.group == second.group != found[scored[0]["trajectory_id"]].group
    assert first.metadata == metadata
    sizes = stored.sizes(tmp_path / "checkpoints")
    assert [sizes[c["trajectory_id"]] for c in scored] == [4] * 4
    assert [sizes[c["trajectory_id"]] for c in shared] == [0, 0]  # more may join them


def install(folder: Path, code: str) -> None:
    """A package whose reward function is called moody."""
    (folder / "moody.py").write_text(code, encoding="utf-8")
    about = folder / "moody-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: moody\nVersion: 1.0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text("[mlx_tandem.rewards]\nmoody = moody:moody\n", encoding="utf-8")


def test_what_has_no_score_is_not_collected(tmp_path):
    """Whatever a reward function does, the completion is served, and its siblings are a complete group without it.
    What waits for its score when the server ends is collected."""
    install(
        tmp_path,
        "import time\n"
        "def moody(sample, options):\n"
        "    time.sleep(sample.metadata.get('seconds', 0))\n"
        "    fine = sample.metadata['fine']\n"
        "    return 1.0 if (sample.completion if fine == 'said' else fine) else 1 / 0\n",
    )
    with serving(learning_config(tmp_path, "inference_only", scoring_function="moody"), tmp_path) as server:
        failed = collect(server, scoring_function="moody", metadata={"fine": False})
        assert all(c["text"] is not None and c["score"] is c["trajectory_id"] is None for c in failed)
        assert [c["dropped"] for c in failed] == ["no_score"] * 4
        scored = collect(server, scoring_function="moody", metadata={"fine": True})
        mixed = collect(server, scoring_function="moody", metadata={"fine": "said"}, n=8, temperature=2.0)
        some = {c["trajectory_id"] for c in mixed} - {None}
        assert 0 < len(some) < 8
        later = collect(server, scoring_function=None, metadata={"fine": False})
        assert all(c["trajectory_id"] for c in later)
        metrics = server.client.get("/metrics").text
        assert 'tandem_training_reward_failures_total{kind="raised"}' in metrics
        last = collect(server, scoring_function=None, n=2, metadata={"fine": True, "seconds": 0.5})
    assert set(collected(tmp_path)) == {c["trajectory_id"] for c in (*scored, *last)} | some
    assert {size for id, size in stored.sizes(tmp_path / "checkpoints").items() if id in some} == {len(some)}


@pytest.mark.parametrize("shown", [True, False])
def test_what_is_too_old_already_says_so(tmp_path, shown):
    """Here what the first version answers, two versions later; in the reply, the status, the metrics and the database.
    The base's answers are never too old: when they are learned from, their logprobs say how far away they are."""
    config = learning_config(tmp_path, max_staleness=1, scoring_function="contains")
    fields = {"scoring_function": "contains" if shown else None}
    with serving(config) as server:
        for text in ("Sort down: 1 2", "Sort down: 2 3"):
            post = {"trajectories": trajectories(text=text), "wait": True}
            assert server.client.post("/v1/training/update", json=post).json()["report"]["outcome"] == "published"
        before = server.client.get("/v1/training/status").json()
        assert (before["version"], before["dropped_stale"], before["advice"]) == (3, 0, "")
        named = {"answer": "3", "group": "mine"}  # so that they wait, whatever their rewards are
        fresh = collect(server, metadata=named, **fields) + collect(server, model="base", metadata=named, **fields)
        old = collect(server, model="policy@1", **fields)
        streamed = events(
            server.complete(
                SORT, model="policy@1", collect_trajectory=True, stream=True, metadata={"answer": "3"}, **fields
            ).text
        )
        assert all(c["trajectory_id"] and "dropped" not in c for c in fresh)
        for choice in [*old, *streamed[-1]["choices"]]:
            assert (choice["trajectory_id"], choice["dropped"]) == (None, "stale")
            assert ("score" in choice) is shown
        # Without a score in the reply they are collected in the background.
        until(lambda: server.client.get("/v1/training/status").json()["dropped_stale"] == 5)
        status = server.client.get("/v1/training/status").json()
        assert (status["buffered"], status["dropped_stale"]) == (8, 5)
        assert "5 trajectories were not learned from" in status["advice"] and "ask for policy" in status["advice"]
        metrics = server.client.get("/metrics").text
        assert 'tandem_training_trajectories_dropped_total{reason="stale"} 5.0' in metrics
        posted = trajectories()
        tokens = server.client.post("/tokenize", json={"prompt": posted[0]["completion"]}).json()["tokens"]
        posted[0] |= {"completion": None, "token_ids": tokens, "versions": [1] * len(tokens)}
        post = {"trajectories": [*posted, posted[1] | {"group": "alone"}], "wait": True}
        report = server.client.post("/v1/training/update", json=post).json()["report"]
        assert report["dropped_at"] == {"stale": [0], "equal_rewards": [4]} and report["trajectories"] == 3
    if shown:  # the journal does not say which
        with serving(config) as server:
            status = server.client.get("/v1/training/status").json()
            assert status["dropped_stale"] == 6 and status["advice"], "restarts do not forget"
    found = stored.states(tmp_path / "checkpoints")
    assert {id for id in found if found[id] == "waiting"} == {c["trajectory_id"] for c in fresh}
    assert sorted(found.values()) == ["learned"] * 11 + ["stale"] * 5 + ["waiting"] * 8


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"scoring_function": "gsm8k", "metadata": {}}, "metadata.answer"),
        ({"scoring_function": "gsm8k", "metadata": None}, "metadata.answer"),
        ({"scoring_function": "os.system"}, "scoring_function"),
        ({"scoring_function": {"contains": "x"}}, "scoring_function.contains"),
        ({"scoring_function": []}, "scoring_function"),
        ({"scoring_function": 3}, "scoring_function"),
        ({"scoring_function": None}, "scoring_function"),
        ({"temperature": 0}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"temperature": 0.001}, "temperature"),
        ({"max_tokens": 0, "echo": True}, "collect_trajectory"),
        ({"model": "shout"}, "collect_trajectory"),
        ({"collect_trajectory": "yes"}, "collect_trajectory"),
        ({"metadata": {"group": 3, "answer": "3"}}, "metadata.group"),
        ({"metadata": {"group": "", "answer": "3"}}, "metadata.group"),
        ({"metadata": {"group": "../x y", "answer": "3"}}, "metadata.group"),
        ({"metadata": {"answer": "3", "n": 2**63}}, "metadata.n"),
        ({"metadata": {"answer": "3", "x": "y" * limits.MAX_METADATA_BYTES}}, "metadata"),
        ({"metadata": {"answer": "3", "x": json.loads("[" * 40 + "]" * 40)}}, "metadata"),
        ({"swap_policy": "later"}, "swap_policy"),
        ({"swap_policy": "inflight_keep", "model": "policy@1"}, "swap_policy"),
        ({"swap_policy": "inflight_keep", "model": "shout"}, "swap_policy"),
        ({"swap_policy": "inflight_keep", "model": None}, "swap_policy"),
        ({"model": "shout", "lora_adapter": "policy"}, "lora_adapter"),
        ({"lora_adapter": "checkpoint-500"}, "lora_adapter"),
    ],
)  # fmt: skip
def test_fields_that_are_wrong(learner, fields, param):
    asked = {
        "model": "policy",
        "collect_trajectory": True,
        "scoring_function": "contains",
        "metadata": {"answer": "3"},
    } | fields
    if fields.get("model", "") == "shout" and "swap_policy" in fields:
        asked["collect_trajectory"] = False
    reply = learner.complete(SORT, **asked)
    assert reply.status_code in (400, 404), reply.text
    assert reply.json()["error"]["param"] == param


def test_numbers_that_json_has_no_word_for(learner):
    body = '{"prompt": "x", "metadata": {"a": [1e999]}}'
    reply = learner.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "metadata.a[0]")


def test_following_needs_no_more_than_the_name(learner):
    for name in ({"model": "policy"}, {"lora_adapter": "policy"}, {"lora_adapter": "policy", "model": "tandem-demo"}):
        (choice,) = collect(learner, n=1, swap_policy="inflight_keep", **({"model": None} | name))
        assert choice["versions"] == [1] * len(choice["token_ids"])


@pytest.mark.parametrize(
    "fields",
    [
        {"collect_trajectory": True},
        {"scoring_function": "gsm8k"},
        {"swap_policy": "inflight_keep"},
        {"collect_trajectory": True, "stream": True},
    ],
)
def test_a_server_that_does_not_learn_says_so(server, fields):
    for reply in (server.complete("hi", **fields), server.chat("hi", **fields)):
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (400, "learning_disabled")
        assert error["param"] == next(iter(fields)) and "--enable-rl-training" in error["message"]


def test_what_means_nothing_new_is_taken_everywhere(server):
    fields = {"collect_trajectory": False, "swap_policy": "pin", "metadata": {"a": 1, "b": [None, {"c": "d"}]}}
    plain = server.complete("hi", seed=1).json()["choices"]
    assert server.complete("hi", seed=1, **fields).json()["choices"] == plain


def test_lora_adapter_names_an_adapter_on_every_server(server):
    question = "What is 12 + 5?"

    def model(**fields: object) -> object:
        reply = server.chat(question, temperature=0, **fields).json()
        return reply.get("model", reply.get("error", {}).get("param"))

    assert model(lora_adapter="shout") == "shout@1"
    assert model(lora_adapter="shout@1", model="tandem-demo") == "shout@1"
    assert model(lora_adapter="shout", model="shout@1") == "shout@1"
    assert model(lora_adapter="shout", model="base") == "shout@1"
    assert model(lora_adapter="base") == "tandem-demo"
    assert model(lora_adapter="shout", model="json") == "lora_adapter"
    assert model(lora_adapter="nobody", model="tandem-demo") == "lora_adapter"
    assert model(lora_adapter="shout", model="nobody") == "model"


def test_a_server_that_does_not_learn_loads_nothing_of_it():
    heavy = (
        "mlx_tandem.training.online",
        "mlx_tandem.training.rewards",
        "mlx_tandem.training.live.learning",
        "re2",
        "numpy",
    )
    code = f"import sys, mlx_tandem.server.serve; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_thoughts_are_scored_with_the_answer(learner):
    """A thought before the answer does not keep reward functions from the answer."""
    choice = learner.chat(
        "Think, then answer: 347 + 285",
        temperature=0,
        max_tokens=120,
        scoring_function="contains",
        metadata={"answer": ["632"]},
    ).json()["choices"][0]
    assert choice["message"]["content"] == "347 + 285 = 632." and choice["score"] == 1.0


def test_a_forced_end_of_a_thought_is_not_learned_from(learner):
    response = learner.chat(
        "Think, then answer: 347 + 285",
        model="policy",
        thinking_token_budget=5,
        collect_trajectory=True,
        scoring_function="contains",
        metadata={"answer": ["632"]},
    )
    assert response.status_code == 400 and response.json()["error"]["param"] == "collect_trajectory"
