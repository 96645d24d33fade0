"""The routes by which trainers' environments sample: they draw what `/v1/completions` draws with the same seed."""

from __future__ import annotations

import base64
import json
import signal
import threading

import numpy as np
import pytest

from mlx_tandem import demo
from mlx_tandem.generation.tokenizer import Tokenizer
from tests.api.test_prompt_logprobs import plain
from tests.serving import demo_config, serving
from tests.waiting import until

TOKENIZER = Tokenizer.load(demo.MODEL_PATH)
TEXT = "Once there was a fox"
IDS = TOKENIZER.encode(TEXT)
TEMPERATURE = 0.7
DRAW = {"max_tokens": 6, "temperature": TEMPERATURE, "seed": 5}
TOLERANCE = 2e-4


def post(server, path, body, status=200):
    response = server.client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json() if status == 200 else response.json()["error"]


def drawn(server, n=1, **fields) -> list[dict]:
    """What `/v1/completions` draws."""
    return server.complete(IDS, n=n, return_token_ids=True, **(DRAW | fields)).json()["choices"]


def logprobs_at(ids: list[int], temperature: float, adapter: str | None = None) -> list[float]:
    """The logprobs of a completion under the whole distribution at this temperature, by a plain forward."""
    scaled = plain(IDS + ids, adapter) / temperature
    exact = scaled - np.logaddexp.reduce(scaled, -1, keepdims=True)
    return [float(exact[len(IDS) - 1 + i, token]) for i, token in enumerate(ids)]


def near(said: list[float], exact: list[float]) -> bool:
    return bool(np.allclose(said, exact, atol=TOLERANCE))


# --- /inference/v1/generate ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [None, "shout"])
def test_token_ids_come_back_with_the_logprobs_that_they_were_drawn_with(server, adapter):
    body = {"token_ids": IDS, "model": adapter, "request_id": "own", "return_token_ids": True}
    reply = post(server, "/inference/v1/generate", body | {"sampling_params": DRAW | {"n": 2, "logprobs": 1}})
    assert (reply["request_id"], reply["prompt_token_ids"], reply["prompt_logprobs"]) == ("own", IDS, None)
    for choice, other in zip(reply["choices"], drawn(server, 2, model=adapter), strict=True):
        assert choice["token_ids"] == other["token_ids"]
        assert choice["finish_reason"] == other["finish_reason"]
        content = choice["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [f"token_id:{t}" for t in choice["token_ids"]]
        assert near([e["logprob"] for e in content], logprobs_at(choice["token_ids"], TEMPERATURE, adapter))
        assert all(len(entry["top_logprobs"]) == 1 for entry in content)
    assert reply["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in reply["choices"])


def test_a_greedy_token_has_the_model_s_logprob(server):
    sampling = {"max_tokens": 4, "temperature": 0, "logprobs": 0, "prompt_logprobs": 1}
    reply = post(server, "/inference/v1/generate", {"token_ids": IDS, "sampling_params": sampling})
    (choice,) = reply["choices"]
    assert near([e["logprob"] for e in choice["logprobs"]["content"]], logprobs_at(choice["token_ids"], 1.0))
    assert len(reply["prompt_logprobs"]) == len(IDS)
    assert str(IDS[1]) in reply["prompt_logprobs"][1]


def test_its_stream_has_the_same_tokens(server):
    body = {"token_ids": IDS, "stream": True, "stream_options": {"include_usage": True}}
    body["sampling_params"] = DRAW | {"n": 2, "logprobs": 0}
    text = server.client.post("/inference/v1/generate", json=body).text
    *lines, done = [line for line in text.splitlines() if line.startswith("data: ")]
    assert done == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert events[-1]["choices"] == [] and events[-1]["usage"]["prompt_tokens"] == len(IDS)
    found: dict[int, list[int]] = {0: [], 1: []}
    for choice in (c for event in events for c in event["choices"]):
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
        found[choice["index"]] += choice["token_ids"]
    assert list(found.values()) == [c["token_ids"] for c in drawn(server, 2)]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1024]}, "token_ids"),
        ({"token_ids": [3] * 2000}, "token_ids"),
        ({"features": {}}, "features"),
        ({"kv_transfer_params": {"x": 1}}, "kv_transfer_params"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"max_tokens": "x"}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"n": 99}}, "sampling_params.n"),
        ({"sampling_params": {"stop_token_ids": [1024]}}, "sampling_params.stop_token_ids"),
        ({"sampling_params": {"best_of": 2}}, "sampling_params.best_of"),
        ({"sampling_params": {"prompt_logprobs": 1}, "stream": True}, "sampling_params.prompt_logprobs"),
    ],
)
def test_what_is_refused_is_named(server, change, param):
    body = {"token_ids": IDS, "sampling_params": {"max_tokens": 1}} | change
    assert post(server, "/inference/v1/generate", body, 400)["param"].startswith(param)


def test_what_trainers_send_along_is_accepted(server):
    sampling = DRAW | {"output_kind": 2, "detokenize": False, "skip_special_tokens": False}
    sampling |= {"routed_experts_prompt_start": 3, "stop_token_ids": [2]}
    body = {"token_ids": IDS, "sampling_params": sampling, "cache_salt": "7", "priority": 1}
    assert post(server, "/inference/v1/generate", body)["choices"][0]["logprobs"] is None


# --- /generate -----------------------------------------------------------------------------------------------------


def test_generate_answers_vllm_s_shape(server):
    body = {"prompt": {"prompt_token_ids": IDS}, "logprobs": 0, "n": 2} | DRAW
    reply = post(server, "/generate", body)
    others = drawn(server, 2)
    assert reply["token_ids"] == [c["token_ids"] for c in others]
    assert reply["text"] == [c["text"] for c in others]
    assert reply["finish_reasons"] == [c["finish_reason"] for c in others]
    assert (reply["prompt"], reply["prompt_token_ids"]) == (TEXT, IDS)
    for said, ids in zip(reply["logprobs"], reply["token_ids"], strict=True):
        assert [int(next(iter(entry))) for (entry,) in said] == ids
        assert near([next(iter(entry.values())) for (entry,) in said], logprobs_at(ids, TEMPERATURE))
    assert post(server, "/generate", {"prompt": TEXT} | DRAW)["token_ids"] == [drawn(server)[0]["token_ids"]]


def test_generate_scores_a_prompt_in_vllm_s_shape(server):
    body = {"prompt": {"prompt_token_ids": IDS}, "prompt_logprobs": 2, "n": 1, "temperature": 0, "max_tokens": 1}
    first, *scores = post(server, "/generate", body)["prompt_logprobs"]
    assert first is None and len(scores) == len(IDS) - 1
    for score, token, exact in zip(scores, IDS[1:], plain(IDS), strict=False):
        assert next(iter(score)) == str(token)
        assert len(score) in (2, 3)
        assert near(list(score.values()), [float(exact[int(t)]) for t in score])


def test_generate_answers_sglang_s_shape(server):
    sampling = {"max_new_tokens": 6, "temperature": TEMPERATURE, "sampling_seed": 5}
    body = {"input_ids": IDS, "sampling_params": sampling | {"n": 2}, "return_logprob": True}
    replies = post(server, "/generate", body | {"return_text_in_logprobs": False})
    for reply, other in zip(replies, drawn(server, 2), strict=True):
        meta = reply["meta_info"]
        assert [t for _, t, _ in meta["output_token_logprobs"]] == other["token_ids"] == reply["output_ids"]
        assert near([p for p, _, _ in meta["output_token_logprobs"]], logprobs_at(other["token_ids"], TEMPERATURE))
        assert all(text is None for _, _, text in meta["output_token_logprobs"])
        assert meta["finish_reason"]["type"] == other["finish_reason"]
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(IDS), len(other["token_ids"]))
        assert reply["text"] == other["text"]
    one = post(server, "/generate", {"text": TEXT, "sampling_params": sampling, "lora_path": "shout"})
    assert one["output_ids"] == drawn(server, model="shout")[0]["token_ids"]
    assert one["meta_info"]["weight_version"].startswith("shout@")
    (listed,) = post(server, "/generate", {"input_ids": [IDS], "sampling_params": sampling})
    assert listed["output_ids"] == drawn(server)[0]["token_ids"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": TEXT, "input_ids": IDS}, "input_ids"),
        ({"text": TEXT, "input_ids": IDS}, "text"),
        ({"input_ids": IDS, "temperature": 1}, "temperature"),
        ({"prompt": {"prompt_token_ids": [1024]}}, "prompt.prompt_token_ids"),
        ({"prompt": TEXT, "stream": True}, "stream"),
        ({"input_ids": IDS, "sampling_params": {"max_new_tokens": 5000}}, "sampling_params.max_new_tokens"),
        ({"input_ids": IDS, "sampling_params": {"regex": "("}}, "sampling_params.regex"),
        ({"input_ids": IDS, "sampling_params": {"custom_params": 1}}, "sampling_params.custom_params"),
        ({"input_ids": IDS, "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
    ],
)
def test_generate_names_what_it_refuses(server, body, param):
    assert post(server, "/generate", body, 400)["param"] == param


def test_the_adapter_is_named_where_it_is_unknown(server):
    body = {"input_ids": IDS, "lora_path": "nobody"}
    assert post(server, "/generate", body, 404)["param"] == "lora_path"


# --- TRL -----------------------------------------------------------------------------------------------------------


def test_trl_s_generate(server):
    sampling = {"n": 2, "max_tokens": 6, "temperature": TEMPERATURE, "generation_kwargs": {"seed": 5}}
    reply = post(server, "/generate/", {"prompts": [IDS, IDS[:3]], "logprobs": 0} | sampling)
    assert reply["prompt_ids"] == [IDS, IDS[:3]]
    assert reply["completion_ids"][:2] == [c["token_ids"] for c in drawn(server, 2)]
    assert len(reply["completion_ids"]) == 4
    assert reply["logprob_token_ids"] == [[[t] for t in ids] for ids in reply["completion_ids"]]
    ids = reply["completion_ids"][0]
    assert near([p for (p,) in reply["logprobs"][0]], logprobs_at(ids, TEMPERATURE))
    more = post(server, "/generate/", {"prompts": [TEXT], "logprobs": 3} | sampling)
    assert more["completion_ids"] == reply["completion_ids"][:2]
    for best, best_ids, token in zip(more["logprobs"][0], more["logprob_token_ids"][0], ids, strict=True):
        assert best == sorted(best, reverse=True) and token in best_ids and len(best) in (3, 4)
    bare = post(server, "/generate/", {"prompts": [TEXT], "logprobs": None})
    assert bare["logprobs"] is None is bare["logprob_token_ids"]
    assert len(bare["completion_ids"][0]) <= 16


def test_trl_s_chat(server):
    messages = [{"role": "user", "content": "Sort up: 3 1 2"}]
    reply = post(server, "/chat/", {"messages": [messages, messages], "temperature": 0})
    asked = server.client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert reply["prompt_ids"] == [asked, asked]
    whole = server.chat("Sort up: 3 1 2", temperature=0, return_token_ids=True).json()["choices"][0]
    assert reply["completion_ids"] == [whole["token_ids"]] * 2


def test_trl_s_sequence_logprobs(server):
    sequences, lengths = [IDS, IDS[:4]], [2, 3]
    body = {"sequences": sequences, "prompt_lengths": lengths, "top_logprobs": 2}
    reply = post(server, "/get_sequence_logprobs/", body)
    binary = post(server, "/get_sequence_logprobs/", body | {"response_format": "binary"})
    shape = tuple(binary["shape"])
    assert shape == (2, len(IDS) - 2, 2) and binary["completion_lengths"] == [len(IDS) - 2, 1]

    def array(name, kind, last):
        return np.frombuffer(base64.b64decode(binary[name]), kind).reshape((*shape[:2], last))

    best, best_ids = array("logprobs_b64", np.float32, 2), array("token_ids_b64", np.int32, 2)
    own, own_ids = array("actual_logprobs_b64", np.float32, 1), array("actual_token_ids_b64", np.int32, 1)
    for i, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        exact = plain(sequence)
        for t, token in enumerate(sequence[length:]):
            ids, values = reply["logprob_token_ids"][i][t], reply["logprobs"][i][t]
            assert near(values, [float(exact[length + t - 1, j]) for j in ids]) and token in ids
            assert list(best_ids[i, t]) == ids[:2] and near(list(best[i, t]), values[:2])
            assert (own_ids[i, t, 0], near([own[i, t, 0]], [exact[length + t - 1, token]])) == (token, True)
    assert np.isneginf(best[1, 1:]).all()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate/", {"prompts": []}, "prompts"),
        ("/generate/", {"prompts": [TEXT], "structured_outputs_regex": "("}, "structured_outputs_regex"),
        ("/generate/", {"prompts": [TEXT], "images": [["x"]]}, "images"),
        ("/chat/", {"messages": []}, "messages"),
        ("/get_sequence_logprobs/", {"sequences": [IDS], "prompt_lengths": [], "top_logprobs": 1}, "prompt_lengths"),
        ("/get_sequence_logprobs/", {"sequences": [IDS], "prompt_lengths": [0], "top_logprobs": 1}, "prompt_lengths"),
        ("/get_sequence_logprobs/", {"sequences": [IDS], "prompt_lengths": [1]}, "top_logprobs"),
        (
            "/get_sequence_logprobs/",
            {"sequences": [IDS], "prompt_lengths": [1], "top_logprobs": 1, "temperature": 2},
            "temperature",
        ),
    ],
)
def test_trl_s_routes_name_what_they_refuse(server, path, body, param):
    assert post(server, path, body, 400)["param"].startswith(param)


def test_weights_are_not_pushed_and_the_error_says_what_to_do(server):
    for path in ("/init_communicator/", "/update_named_param/", "/update_weights", "/init_broadcaster"):
        error = post(server, path, {}, 400)
        assert error["code"] == "weights_not_supported" and "POST /load_lora_adapter" in error["message"]
    for end in ("", "/"):
        assert server.client.get(f"/get_world_size{end}").json() == {"world_size": 1}
        assert post(server, f"/reset_prefix_cache{end}", {}) == {"status": "ok"}
    for path in ("/health/", "/liveness"):
        assert server.client.get(path).json()["status"] == "ok"


# --- pausing and publishing ----------------------------------------------------------------------------------------


def test_a_pause_holds_new_requests_and_a_swap_meanwhile_answers_them(server):
    folders = {name: str(path) for name, path in demo.ADAPTER_PATHS.items()}
    load = {"lora_name": "swapped", "lora_path": folders["shout"]}
    assert post(server, "/load_lora_adapter", load) == {"status": "ok"}
    paused = server.client.post("/pause", params={"mode": "wait", "clear_cache": "false"})
    assert paused.json() == {"status": "paused"} and server.client.get("/is_paused").json() == {"is_paused": True}
    replies: list[dict] = []
    body = {"token_ids": IDS, "model": "swapped", "sampling_params": {"max_tokens": 6, "temperature": 0}}

    def ask() -> None:
        replies.append(post(server, "/inference/v1/generate", body))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        until(lambda: server.client.get("/v1/engine/metrics").json()["held_requests"] == 1)
        assert not replies
        load["lora_path"] = folders["json"]
        assert post(server, "/load_lora_adapter", load) == {"status": "ok"}
    finally:
        assert post(server, "/resume", {}) == {"status": "resumed"}
        thread.join()
    assert server.client.get("/is_paused").json() == {"is_paused": False}
    exact = drawn(server, model="json", temperature=0)[0]["token_ids"]
    assert replies[0]["choices"][0]["token_ids"] == exact
    server.client.post("/v1/unload_lora_adapter", json={"lora_name": "swapped"})


def test_what_waits_is_refused_when_the_server_ends():
    with serving(demo_config()) as server:
        server.client.post("/pause", params={"mode": "keep", "clear_cache": "false"})  # as prime-rl does
        statuses: list[int] = []
        thread = threading.Thread(target=lambda: statuses.append(server.complete("Once").status_code))
        thread.start()
        until(lambda: server.client.get("/v1/engine/metrics").json()["held_requests"] == 1)
        server.process.send_signal(signal.SIGTERM)
        thread.join()
        assert statuses == [503]


def test_a_pause_cannot_abort(server):
    response = server.client.post("/pause", params={"mode": "abort"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "mode")
    assert server.client.get("/is_paused").json() == {"is_paused": False}
