"""Tinker's API without its SDK: what is refused, by its name, and harms nobody; order, leases and restarts."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from mlx_tandem import limits
from mlx_tandem.adapters.convert import inspect
from mlx_tandem.training.tinker.samplers import MOST_SNAPSHOTS
from tests.serving import RunningServer, serving
from tests.tinker_server import (
    PROTOBUF,
    SENTENCE,
    Client,
    datum,
    field,
    loss_of,
    pass_body,
    said,
    samples_of,
    tensor,
    tinker_config,
)
from tests.waiting import until

PROMPT: dict[str, Any] = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}


@pytest.fixture(scope="module")
def tinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving(tinker_config(tmp_path_factory.mktemp("api"), trainers=2, rank=8)) as running:
        yield running


@pytest.fixture
def client(tinker: RunningServer) -> Iterator[Client]:
    with Client(tinker) as made:
        yield made
        made.finish()


@pytest.fixture
def other(tinker: RunningServer) -> Iterator[Client]:
    """A client with another key."""
    with Client(tinker, "tml-b") as made:
        yield made


def sample(client: Client, sampler: str, number: int = 0, **more: Any) -> Any:
    params = {"max_tokens": 4} | more.pop("params", {})
    own: dict[str, Any] = {"sampling_session_id": sampler, "seq_id": number, "num_samples": 1, "prompt": PROMPT}
    return client.post("asample", **own | {"sampling_params": params} | more)


def gauges(server: RunningServer) -> dict[str, float]:
    """The metrics of Tinker's API, without their common beginning."""
    lines = (own.split() for own in server.client.get("/metrics").text.splitlines())
    return {name.removeprefix("tandem_tinker_"): float(own[0]) for name, *own in lines if name.startswith("tandem_ti")}


def test_metrics_show_what_clients_hold(tinker: RunningServer) -> None:
    with Client(tinker, "tml-c") as client:
        before = gauges(tinker)
        model, sampler = client.model(), client.sampler()
        client.loss(model)
        client.result(sample(client, sampler).json()["request_id"])
        number = next(client.numbers)
        client.done("save_weights", model_id=model, path="kept", seq_id=number)
        client.ok("optim_step", model_id=model, seq_id=number + 2, adam_params={})  # waits for the one before it
        now = gauges(tinker)
        grown = {name: now[name] - before[name] for name in now}
        assert [grown[name] for name in ("models", "samplers", "requests_waiting", "checkpoints")] == [1, 1, 1, 1]
        assert grown["results"] >= 4 and grown["result_bytes"] > 0 and grown["sessions_lost_total"] == 0
        assert now["sessions"] == before["sessions"] and 0 <= now["silent_seconds"] < 60
        client.finish()
        after = gauges(tinker)
        assert [after[name] - before[name] for name in ("sessions", "models", "requests_waiting")] == [-1, 0, 0]


# -- switched off, and keys ---------------------------------------------------------------------------------------


def test_it_is_switched_off_without_its_option(server: RunningServer) -> None:
    reply = server.client.post("/api/v1/client/config", json={"sdk_version": "0.38.0"})
    assert "--enable-tinker" in said(reply, 400) and reply.json()["error"]["code"] == "learning_disabled"
    assert server.client.get("/api/v1/nothing").json()["error"]["message"] == "there is no GET '/api/v1/nothing'"
    assert server.client.get("/api/nothing").json()["error"] == "there is no GET '/api/nothing'"


def test_what_one_key_has_another_one_does_not_see(client: Client, other: Client, tinker: RunningServer) -> None:
    model, sampler = client.model(), client.sampler()
    path = client.done("save_weights", model_id=model, path="mine", seq_id=next(client.numbers))["path"]
    request = sample(client, sampler).json()["request_id"]
    client.result(request)
    other.refused("session_heartbeat", 404, session_id=client.session)
    other.refused("create_model", 404, **other.asked_model() | {"session_id": client.session})
    other.refused("get_info", 404, model_id=model)
    other.refused("optim_step", 404, model_id=model, seq_id=2, adam_params={})
    other.refused("unload_model", 404, model_id=model)
    other.refused("retrieve_future", 404, request_id=request)
    other.refused("cancel_future", 404, request_id=request)
    other.refused("weights_info", 404, tinker_path=path)
    for name in ("save_weights", "save_weights_for_sampler"):
        other.refused(name, 404, model_id=model, path="theirs", seq_id=2)
    load = {"session_id": other.session, "model_seq_id": 1, "path": path, "optimizer": True}
    other.refused("load_weights", 404, **load)
    other.refused("create_sampling_session", 404, session_id=other.session, sampling_session_seq_id=1, model_path=path)
    assert said(sample(other, sampler), 404) and said(other.run(pass_body(SENTENCE, model=model, number=2)), 404)
    for gone in (f"samplers/{sampler}", f"sessions/{client.session}", f"training_runs/{model}/checkpoints"):
        assert other.http.get(f"/{gone}").status_code == 404
    assert other.http.delete(f"/training_runs/{model}/checkpoints/weights/mine").status_code == 404
    assert other.http.get("/training_runs").json()["training_runs"] == []
    assert other.http.get("/checkpoints").json()["checkpoints"] == []
    assert client.session not in other.http.get("/sessions").json()["sessions"]
    assert [own["checkpoint_id"] for own in client.http.get("/checkpoints").json()["checkpoints"]] == ["weights/mine"]
    assert client.loss(model) == client.loss(model)
    assert model not in tinker.client.get("/v1/models").text and client.session not in tinker.chat("x", model="y").text


# -- sequence numbers ---------------------------------------------------------------------------------------------


def test_a_request_that_comes_again_is_done_once(client: Client) -> None:
    model = client.model()
    before = client.loss(model)
    body = pass_body(SENTENCE, model=model, number=2)
    first, again = (client.run(body).json()["request_id"] for _ in range(2))
    assert first == again == client.run(body, packed=False).json()["request_id"]
    step = {"model_id": model, "seq_id": 3, "adam_params": {"learning_rate": 0.0}}
    norm = client.done("optim_step", **step)["metrics"]["grad_norm:mean"]
    assert client.ok("optim_step", **step)["request_id"] == client.ok("optim_step", **step)["request_id"]
    client.result(client.run(pass_body(SENTENCE, model=model, number=4)).json()["request_id"])
    once = client.done("optim_step", **step | {"seq_id": 5})["metrics"]["grad_norm:mean"]
    assert once == pytest.approx(norm, rel=1e-5)  # not twice as large
    other = pass_body(SENTENCE, SENTENCE, model=model, number=4)
    assert "seq_id 4 was used by another request" in said(client.run(other), 400)
    assert "seq_id 5 was used" in client.refused("save_weights", model_id=model, seq_id=5, path="x")
    assert "too far ahead" in client.refused("save_weights", model_id=model, seq_id=10**6, path="x")
    for wrong in (0, -1, None):
        client.refused("optim_step", model_id=model, seq_id=wrong, adam_params={})
    client.numbers = iter(range(6, 100))  # type: ignore[assignment]
    assert client.loss(model) == before


def test_requests_are_done_in_the_order_of_their_numbers(client: Client) -> None:
    model = client.model()
    before = client.loss(model)
    step = {"model_id": model, "seq_id": 4, "adam_params": {"learning_rate": 1e-2}}
    late = client.ok("optim_step", **step)["request_id"]
    after = client.run(pass_body(SENTENCE, model=model, number=5, forward_only=True)).json()["request_id"]
    second = client.run(pass_body(SENTENCE, model=model, number=3)).json()["request_id"]
    assert client.http.get("/sessions").status_code == 200  # nothing of it is done
    first = client.run(pass_body(SENTENCE, model=model, number=2)).json()["request_id"]
    assert loss_of(client.result(first)) == loss_of(client.result(second)) == before
    assert client.result(late)["metrics"]["grad_norm:mean"] > 0
    assert loss_of(client.result(after)) < before


def test_a_refused_request_keeps_no_later_one_waiting(client: Client) -> None:
    model = client.model()
    before = client.loss(model)
    wrong = pass_body(SENTENCE, model=model, number=2, loss="gspo")
    assert "gspo" in said(client.run(wrong), 400)
    assert "gspo" in said(client.run(wrong), 400)
    step = {"model_id": model, "seq_id": 3, "adam_params": {"learning_rate": 0.1}}
    failed = client.done("optim_step", **step)
    assert failed["category"] == "user" and "no step is taken" in failed["error"]
    client.numbers = iter(range(4, 100))  # type: ignore[assignment]
    client.refused("optim_step", model_id=model, seq_id=4, adam_params={"learning_rate": 100.0})
    next(client.numbers)
    assert client.loss(model) == before
    client.loss(model, forward_only=False)
    client.step(model)
    assert client.loss(model) < before


# -- wrong values -------------------------------------------------------------------------------------------------

LONG = [5] * 1024


@pytest.mark.parametrize(
    ("data", "more", "says"),
    [
        ([], {}, "data is empty"),
        ([SENTENCE] * (limits.MAX_TINKER_DATA + 1), {}, "data has over 4096 examples"),
        ([datum([], target_tokens=[])], {}, "model_input is empty"),
        ([datum([10])], {}, "target_tokens] is missing"),
        ([datum([10], target_tokens=tensor(np.zeros(1, "<f4")))], {}, "must be whole numbers"),
        ([datum([10, 11], target_tokens=[10])], {}, "has the shape [1]; model_input has 2 tokens"),
        ([datum([10], target_tokens=np.zeros((1, 200)))], {}, "has 200 tokens for each position"),
        ([datum([1024], target_tokens=[1])], {}, "1024 is not in the vocabulary"),
        ([datum([1], target_tokens=[-1])], {}, "-1 is not in the vocabulary"),
        ([datum([1], target_tokens=[2**62])], {}, "is not in the vocabulary"),
        ([datum(LONG, target_tokens=LONG)], {}, "maximum context length is 1024 tokens"),
        ([datum([1], target_tokens=[1], weights=[1, 2])], {}, "weights] has the shape [2]"),
        ([datum([1], target_tokens=[1], weights=[np.nan])], {}, "must be numbers between"),
        ([datum([1], target_tokens=[1], weights=[1e9])], {}, "must be numbers between"),
        ([datum([1], target_tokens=[1], mask=[1])], {}, "has 'mask', which cross_entropy does not read"),
        ([datum([1], target_tokens=[1], advantages=[1])], {"loss": "ppo"}, "[logprobs] is missing"),
        ([datum([1], target_tokens=np.zeros((1, 2)))], {"loss": "cispo"}, "one target token for each position"),
        ([SENTENCE], {"loss": "custom"}, "loss_fn 'custom' is not served here; there are cross_entropy,"),
        ([SENTENCE], {"loss": "\n\x1b[2J"}, "is not known"),
        ([SENTENCE], {"config": {"beta": 1.0}}, "loss_fn_config.beta is not a setting of cross_entropy"),
        ([SENTENCE], {"loss": "ppo", "config": {"clip_low_threshold": 1.5}}, "must be between 0 and 1"),
        ([SENTENCE], {"loss": "ppo", "config": {"clip_high_threshold": 0.5}}, "must be between 1 and"),
        ([SENTENCE], {"loss": "dro", "config": {"beta": float("nan")}}, "beta must be a number"),
    ],
)
def test_what_is_wrong_in_a_pass_is_named(client: Client, data: list[bytes], more: dict[str, Any], says: str) -> None:
    model = client.model()
    reply = client.run(pass_body(*data, model=model, number=1, **more))
    assert says in said(reply, 400)


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{}", {"content-type": "application/json"}, 415),
        (b"", {"content-type": PROTOBUF, "content-encoding": "gzip"}, 415),
        (b"\xff\xff", {"content-type": PROTOBUF}, 400),
        (b"not zstd", {"content-type": PROTOBUF, "content-encoding": "zstd"}, 400),
        (
            zstandard.ZstdCompressor().compress(bytes(limits.MAX_TINKER_UNPACKED + 1)),
            {"content-type": PROTOBUF, "content-encoding": "zstd"},
            413,
        ),
        (bytes(limits.MAX_PROGRAM_BODY + 1), {"content-type": PROTOBUF}, 413),
        (field(3, b"") * 500_000, {"content-type": PROTOBUF}, 400),
        (pass_body(SENTENCE, model="x" * 200), {"content-type": PROTOBUF}, 404),
        (pass_body(datum([1], w=tensor(np.zeros(3, "<f4"), shape=[1 << 40]))), {"content-type": PROTOBUF}, 400),
    ],
)
def test_bodies_that_are_none_are_refused(client: Client, content: bytes, headers: dict[str, str], status: int) -> None:
    said(client.http.post("/forward_backward", content=content, headers=headers), status)


@pytest.mark.parametrize(
    ("more", "says", "status"),
    [
        ({"base_model": "meta-llama/Llama-3.1-8B"}, "is not served here; 'tandem-demo' is", 404),
        ({"lora_config": None}, "lora_config with a rank is needed", 400),
        ({"lora_config": {"rank": 0}}, "lora_config with a rank is needed", 400),
        ({"lora_config": {"rank": 9}}, "rank is 9; models have at most 8 here", 400),
        ({"lora_config": {"rank": -1}}, "rank", 400),
        ({"lora_config": {"rank": "8"}}, "rank", 400),
        ({"lora_config": {"rank": 4, "dropout": 0.1}}, "lora_config.dropout is not a parameter here", 400),
        (
            {"lora_config": {"rank": 4, "train_mlp": False, "train_attn": False, "train_unembed": False}},
            "one of train_mlp, train_attn and train_unembed must be true",
            400,
        ),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "the optimizer 'dimuon' is not served here", 400),
        ({"user_metadata": {"a": "x" * 20_000}}, "user_metadata has over 16384 bytes", 400),
        ({"model_seq_id": -1}, "model_seq_id", 400),
        ({"quantize": True}, "quantize is not a parameter here", 400),
        ({"session_id": "0" * 32}, "there is no session", 404),
    ],
)
def test_what_is_wrong_in_a_model_is_named(client: Client, more: dict[str, Any], says: str, status: int) -> None:
    assert says in client.refused("create_model", status, **client.asked_model() | more)


def test_a_field_of_a_newer_sdk_that_asks_for_nothing_is_left_out(client: Client) -> None:
    asked = client.asked_model(newer=None, other=0)
    made = client.done("create_model", **asked | {"newer": None, "other": False, "third": []})
    assert made["model_id"].endswith(":train:0")
    params = {"max_tokens": 1, "newer": None}
    assert sample(client, client.sampler(), newer="", prompt=PROMPT | {"newer": {}}, params=params).status_code == 200


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"num_samples": 0}, "num_samples is 1 to 1024"),
        ({"num_samples": 10**9}, "num_samples is 1 to 1024"),
        ({"prompt": {"chunks": []}}, "prompt is empty"),
        ({"prompt": {"chunks": [{"type": "image", "data": "x"}]}}, "prompt.chunks[0] is no encoded_text"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [9999]}]}}, "prompt.chunks[0].tokens[0] = 9999"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1] * 1024}]}}, "maximum context length"),
        ({"params": {"max_tokens": 5000}}, "sampling_params.max_tokens"),
        ({"params": {"max_tokens": 0}}, "sampling_params.max_tokens must be an integer between 1"),
        ({"params": {"temperature": -1.0}}, "sampling_params.temperature must be"),
        ({"params": {"top_p": 1.5}}, "sampling_params.top_p must be"),
        ({"params": {"top_k": -2}}, "sampling_params.top_k must be"),
        ({"params": {"seed": 2**70}}, "seed"),
        ({"params": {"stop": [1.5]}}, "stop must be a string or a list of strings"),
        ({"params": {"stop": [""]}}, "each stop string has 1 to 256 characters"),
        ({"params": {"stop": [5000]}}, "stop[0] = 5000 is not in the vocabulary"),
        ({"params": {"stop": [1] * 65}}, "stop has at most 64 token ids"),
        ({"topk_prompt_logprobs": 21}, "topk_prompt_logprobs is 21; this server gives 20 at most"),
        ({"topk_sample_logprobs": -1}, "topk_sample_logprobs is at least 0"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n is 1 to"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "prompt_logprobs_last_n is 1 to"),
        ({"prompt_alt_tokens_k": 4}, "prompt_alt_tokens_k is not a parameter here"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64"}}, "target_prompt_logprobs is not a parameter here"),
        ({"record_stability_info": True}, "record_stability_info is not a parameter here"),
        ({"base_model": "base"}, "base_model belongs to create_sampling_session"),
        ({"seq_id": None}, "sampling_session_id and seq_id are needed"),
    ],
)
def test_what_is_wrong_in_a_sample_is_named(client: Client, more: dict[str, Any], says: str) -> None:
    assert says in said(sample(client, client.sampler(), **more), 400)


@pytest.mark.parametrize(
    "path",
    ["", "x", "tinker://", "tinker://a/b", "tinker://a/weights/../x", "tinker://../weights/x", "tinker://a/external/x"],
)
def test_paths_lead_nowhere_else(client: Client, path: str) -> None:
    load = {"session_id": client.session, "model_seq_id": 1, "path": path, "optimizer": True}
    assert client.post("load_weights", **load).status_code in (400, 404)
    assert client.post("weights_info", tinker_path=path).status_code in (400, 404)
    own = {"session_id": client.session, "sampling_session_seq_id": 3, "model_path": path}
    assert client.post("create_sampling_session", **own).status_code in (400, 404)


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "x" * 65, "a\x00", "ü"])
def test_names_of_checkpoints_are_names(client: Client, name: str) -> None:
    assert "path must be" in client.refused("save_weights", model_id=client.model(), seq_id=1, path=name)


# -- what there is room for ---------------------------------------------------------------------------------------


def test_no_more_models_than_there_is_room_for(client: Client, other: Client) -> None:
    first = client.model(0)
    client.model(1)
    assert "2 models are being trained" in other.refused("create_model", **other.asked_model())
    again = client.asked_model(0)
    assert client.ok("create_model", **again)["request_id"] == client.ok("create_model", **again)["request_id"]
    assert client.done("unload_model", model_id=first) == {"model_id": first, "type": "unload_model"}
    client.refused("get_info", 404, model_id=first)
    assert other.model()
    assert "was used in this session" in client.refused("create_model", **client.asked_model(0, rank=2))
    other.finish()
    other.refused("session_heartbeat", 410, session_id=other.session)
    assert client.model(5)


def test_what_a_session_is_done_with_is_given_back(client: Client, tinker: RunningServer) -> None:
    """Models that were unloaded or could not be opened, and unnamed snapshots that others have pushed out."""
    for number in range(3):
        gone = client.model(number)
        client.done("unload_model", model_id=gone)
    model = client.model(3)
    assert gauges(tinker)["models"] == 1
    listed = client.http.get(f"/sessions/{client.session}").json()
    assert listed["training_run_ids"] == [f"{client.session}:train:{number}" for number in range(4)]
    assert "was used" in client.refused("create_model", **client.asked_model(2, rank=2))
    before = gauges(tinker)["samplers"]
    made = [
        client.done(
            "save_weights_for_sampler", model_id=model, seq_id=next(client.numbers), sampling_session_seq_id=number
        )["sampling_session_id"]
        for number in range(MOST_SNAPSHOTS + 2)
    ]
    assert gauges(tinker)["samplers"] - before == MOST_SNAPSHOTS
    assert "save weights under a name" in said(sample(client, made[1]), 404)
    assert client.result(sample(client, made[2]).json()["request_id"])


def test_more_samples_than_run_at_once_are_all_different(client: Client) -> None:
    sampler = client.sampler()
    reply = sample(
        client, sampler, num_samples=70, params={"max_tokens": 12, "seed": 1, "temperature": 2.0, "stop": []}
    )
    assert len(reply.json()["sample_sequence_ids"]) == 70
    found = samples_of(client.result(reply.json()["request_id"]))
    assert len(found) == 70 and len(set(map(tuple, found))) > 60
    assert sample(client, sampler, num_samples=2).status_code == 400  # the number has been used


def test_what_is_done_is_listed_for_each_client_of_a_sampler(client: Client) -> None:
    sampler = client.sampler()
    assert client.ok("join_sampling_session", sampling_session_id=sampler)["client_counter"] == 1
    ids = [sample(client, sampler, number).json()["request_id"] for number in (0, 1, 1_000_000_000)]
    for request in ids:
        client.result(request)

    def listed(clone: int, cursor: int) -> Any:
        target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": clone}
        return client.ok(
            "retrieve_futures", target=target, prev_cursor=cursor, timeout=0, retrieved_request_ids=ids[:1]
        )

    found = listed(0, 0)
    assert {own["request_id"] for own in found["completions"]} == set(ids[:2])
    assert all(own["state"] == "finished" for own in found["completions"])
    assert listed(0, found["cursor"]) == {"completions": [], "cursor": found["cursor"]}
    assert [own["request_id"] for own in listed(1, 0)["completions"]] == ids[2:]
    client.refused("retrieve_future", 404, request_id=ids[0])  # its payload was given up


def test_only_samples_are_cancelled(client: Client) -> None:
    model = client.model()
    waits = client.ok("optim_step", model_id=model, seq_id=2, adam_params={})["request_id"]
    assert "only requests to samplers" in client.refused("cancel_future", request_id=waits)
    long = sample(client, client.sampler(), params={"max_tokens": 900, "stop": []}, num_samples=8).json()["request_id"]
    assert client.post("cancel_future", request_id=long).status_code == 204
    assert client.result(long) == {"error": "the request was cancelled", "category": "user"}
    assert client.post("cancel_future", request_id=long).status_code == 204


# -- leases, restarts ---------------------------------------------------------------------------------------------


def test_a_client_that_vanishes_gives_its_trainers_back(tmp_path: Path) -> None:
    config = tinker_config(tmp_path, trainers=1, lease_s=1.0)
    with serving(config) as running, Client(running) as gone, Client(running) as alive:
        model = gone.model()

        def created() -> bool:
            alive.ok("session_heartbeat", session_id=alive.session)
            return alive.post("create_model", **alive.asked_model()).status_code == 200

        until(created)
        assert gone.post("get_info", model_id=model).status_code == 404
        assert gone.post("session_heartbeat", session_id=gone.session).status_code == 410


def test_checkpoints_survive_the_engine_and_the_server(tmp_path: Path) -> None:
    config = tinker_config(tmp_path)
    with serving(config) as running, Client(running) as client:
        model = client.model()
        client.loss(model, forward_only=False)
        client.step(model)
        taught = client.loss(model)
        path = client.done("save_weights", model_id=model, path="a", seq_id=next(client.numbers))["path"]
        own = {"model_id": model, "path": "b", "seq_id": next(client.numbers)}
        sampler = client.sampler(0, model_path=client.done("save_weights_for_sampler", **own)["path"])
        before = samples_of(client.result(sample(client, sampler, params={"temperature": 0}).json()["request_id"]))
        os.kill(running.engine_pid(), signal.SIGKILL)
        until(lambda: running.client.get("/health").json()["engine_restarts"])
        until(lambda: client.http.get("/healthz").status_code == 200)
        failed = client.done("save_weights", model_id=model, path="c", seq_id=next(client.numbers))
        assert failed["category"] == "server" and "the engine has restarted" in failed["error"]
        again = samples_of(client.result(sample(client, sampler, 1, params={"temperature": 0}).json()["request_id"]))
        assert again == before
    folder = next((tmp_path / "tinker").glob("*/weights/a"))
    assert not inspect(folder).problems
    peft = json.loads((folder / "adapter_config.json").read_text())
    assert (peft["peft_type"], peft["r"], peft["lora_alpha"]) == ("LORA", 4, 32.0)
    assert "lm_head" in peft["target_modules"]
    with serving(config) as running, Client(running) as client:
        info = client.ok("weights_info", tinker_path=path)
        assert info == {
            "base_model": "base", "is_lora": True, "lora_rank": 4, "train_unembed": True, "train_mlp": True,
            "train_attn": True,
        }  # fmt: skip
        load = {"session_id": client.session, "model_seq_id": 0, "path": path, "optimizer": True}
        assert client.done("load_weights", **load)["model_id"] == f"{client.session}:train:0"
        assert client.loss(f"{client.session}:train:0") == taught
        # As versions of the SDK up to 0.33 resume: onto a model that was created before.
        client.numbers = iter(range(1, 100))  # type: ignore[assignment]
        older = client.model(1)
        load = {"model_id": older, "seq_id": next(client.numbers), "path": path, "optimizer": True}
        assert client.done("load_weights", **load) == {"path": path, "model_id": older, "type": "load_weights"}
        assert client.loss(older) == taught
        sampler = client.sampler(0, model_path=path.replace("weights/a", "sampler_weights/b"))
        assert (
            samples_of(client.result(sample(client, sampler, params={"temperature": 0}).json()["request_id"])) == before
        )
        damaged = next((tmp_path / "tinker").glob("*/weights/a/optimizer.safetensors"))
        damaged.write_bytes(damaged.read_bytes()[:-10])
        failed = client.done("load_weights", session_id=client.session, model_seq_id=2, path=path, optimizer=True)
        assert failed["category"] == "user"
        client.refused("get_info", 404, model_id=f"{client.session}:train:2")
