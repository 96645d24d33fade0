"""Settings of a server that change what requests are given: seeds, sampling defaults, template, logprobs, usage."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from mlx_tandem import demo
from mlx_tandem.config import Config, EngineConfig, ModelConfig, ServerConfig
from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.engine.messages import Output, Submit
from mlx_tandem.errors import InvalidRequest, ModelError
from mlx_tandem.types import Delta, Request
from tests.api.scripted import Peer, scripted_server

CHAT = [{"role": "user", "content": "hi"}]


def never() -> NoReturn:
    raise AssertionError("no engine is started here")


def front(model: Path = demo.MODEL_PATH, **server: Any) -> ServerFront:
    return ServerFront(Config(EngineConfig(ModelConfig(str(model))), ServerConfig(**server)), never)


def asked(client: Any, peer: Peer, path: str = "/v1/completions", **body: Any) -> tuple[Request, Any]:
    """What the engine is asked for by a completion, and its reply."""
    replies: list[Any] = []
    own = {"prompt": [300], "max_tokens": 4} if path == "/v1/completions" else {}
    thread = threading.Thread(target=lambda: replies.append(client.post(path, json=own | body)))
    thread.start()
    request = peer.hear(Submit).request
    peer.say(Output([Delta(request.id, 0, (301,), None, "stop")]))
    thread.join()
    return request, replies[0]


# --- --seed --------------------------------------------------------------------------------------------------------


def test_a_seed_makes_the_same_requests_in_the_same_order_draw_alike() -> None:
    def seeds(**server: Any) -> list[int]:
        with scripted_server(**server) as (client, peer, _):
            return [asked(client, peer)[0].params.seed for _ in range(4)]

    one, again, other, chance = seeds(seed=5), seeds(seed=5), seeds(seed=6), seeds()
    assert one == again
    assert len({*one, *other, *chance}) == 12, "requests draw apart from each other, whatever the server's seed"


def test_a_request_s_own_seed_counts_and_uses_none_up() -> None:
    with scripted_server(seed=5) as (client, peer, _):
        seeds = [asked(client, peer, **body)[0].params.seed for body in ({}, {"seed": 9}, {}, {"seed": 9})]
    assert (seeds[1], seeds[3]) == (9, 9)
    with scripted_server(seed=5) as (client, peer, _):
        assert [asked(client, peer)[0].params.seed for _ in range(2)] == [seeds[0], seeds[2]]


# --- --generation-config -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that recommends sampling values, and another folder that recommends others."""
    root = tmp_path_factory.mktemp("folders")
    shutil.copytree(demo.MODEL_PATH, root / "model")
    (root / "model" / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "top_k": 7}))
    (root / "other").mkdir()
    (root / "other" / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_p": 0.75}))
    return root


@pytest.mark.parametrize(
    ("setting", "defaults"),
    [
        ("auto", {"temperature": 0.25, "top_k": 7}),
        ("vllm", {}),
        ("none", {}),
        ("other", {"temperature": 0.5, "top_p": 0.75}),
    ],
)
def test_where_sampling_defaults_come_from(folders: Path, setting: str, defaults: dict[str, float]) -> None:
    given = str(folders / setting) if setting == "other" else setting
    assert front(folders / "model", generation_config=given).defaults == defaults


def test_sampling_defaults_reach_the_engine(folders: Path) -> None:
    with scripted_server(generation_config=str(folders / "other")) as (client, peer, _):
        params = asked(client, peer)[0].params
        assert (params.temperature, params.top_p) == (0.5, 0.75)
        params = asked(client, peer, temperature=1.5)[0].params
        assert (params.temperature, params.top_p) == (1.5, 0.75)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/inference/v1/generate", {"token_ids": [300], "sampling_params": {"max_tokens": 4}}),
        ("/generate", {"prompt": {"prompt_token_ids": [300]}, "max_tokens": 4}),
        ("/generate", {"input_ids": [300], "sampling_params": {"max_new_tokens": 4}}),
        ("/generate/", {"prompts": [[300]], "max_tokens": 4}),
    ],
)
def test_trainers_draw_from_the_whole_distribution_whatever_the_folder_says(
    folders: Path, path: str, body: dict[str, Any]
) -> None:
    with scripted_server(generation_config=str(folders / "other")) as (client, peer, _):
        params = asked(client, peer, path, **body)[0].params
        assert (params.temperature, params.top_p) == (1.0, 1.0)


@pytest.mark.parametrize("wrong", ["nowhere", "."])
def test_a_folder_without_sampling_defaults_is_refused(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(ModelError, match=r"no generation_config.json in the folder .* of --generation-config"):
        front(generation_config=str(tmp_path / wrong))


def test_sampling_defaults_out_of_range_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 9}')
    with pytest.raises(ModelError, match=r"generation_config\.json: temperature must be a number between"):
        front(generation_config=str(tmp_path))


# --- --chat-template -----------------------------------------------------------------------------------------------

SHORT = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"


@pytest.mark.parametrize("as_file", [True, False])
def test_a_chat_template_of_the_operator(tmp_path: Path, as_file: bool) -> None:
    (tmp_path / "short.jinja").write_text(SHORT)
    given = str(tmp_path / "short.jinja") if as_file else SHORT
    with scripted_server(chat_template=given) as (client, _, _):
        body = {"messages": [*CHAT, {"role": "assistant", "content": "ho"}]}
        tokens = client.post("/tokenize", json=body).json()["tokens"]
        text = client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
        assert text == "user=hi;assistant=ho;"
        assert client.get("/tokenizer_info").json()["chat_template"] == SHORT
        reply = client.post("/v1/chat/completions", json={"messages": CHAT, "chat_template": SHORT})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "chat_template"), "from the operator only"


def test_a_template_of_the_operator_can_do_no_more_than_a_model_s() -> None:
    prompts = front(chat_template="{{ messages.__class__.__mro__ }}{{ ''.__class__ }}").prompts

    async def ask() -> None:
        try:
            with pytest.raises(InvalidRequest, match="cannot be rendered"):
                await prompts.chat(CHAT)
        finally:
            await prompts.close()

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("nowhere.jinja", "there is no file nowhere.jinja for --chat-template"),
        ("{% if %}", "the text of --chat-template is not a valid template"),
        ("x" * 5000, "there is no file x+"),
    ],
)
def test_a_chat_template_that_cannot_be_used(given: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        asyncio.run(start(given))


async def start(chat_template: str) -> None:
    """Do what a start does with a chat template."""
    prompts = front(chat_template=chat_template).prompts
    try:
        await prompts.check()
    finally:
        await prompts.close()


def test_files_that_are_no_chat_template(tmp_path: Path) -> None:
    for name, content, says in (
        ("bytes", b"\xff\xfe", "is not UTF-8"),
        ("huge", b"x" * ((1 << 20) + 1), "is larger than"),
        ("broken", b"{% for %}", "broken is not a valid template"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelError, match=says):
            asyncio.run(start(str(tmp_path / name)))


@pytest.mark.parametrize("words", [("--chat-template", "nowhere"), ("--generation-config", "nowhere")])
def test_what_is_wrong_with_them_is_one_line_and_status_1(words: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "mlx_tandem", "serve", "--port", "0", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert words[0] in line


# --- --max-logprobs ------------------------------------------------------------------------------------------------


def test_no_request_gets_more_logprobs_than_the_server_gives() -> None:
    with scripted_server(max_logprobs=2) as (client, peer, _):
        for path, body, param in (
            ("/v1/completions", {"prompt": [300], "logprobs": 3}, "logprobs"),
            ("/v1/completions", {"prompt": [300], "prompt_logprobs": 3}, "prompt_logprobs"),
            ("/v1/completions", {"prompt": [300], "echo": True, "logprobs": 3}, "logprobs"),
            ("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 3}, "top_logprobs"),
            ("/v1/chat/completions", {"messages": CHAT, "prompt_logprobs": 20}, "prompt_logprobs"),
        ):
            error = client.post(path, json=body).json()["error"]
            assert (error["param"], error["code"]) == (param, "invalid_value")
            assert error["message"].endswith("; this server gives 2 at most")
        request, _ = asked(client, peer, prompt_logprobs=2)
        assert request.params.prompt_logprobs == 2


def test_none_at_all_still_gives_the_drawn_token_s() -> None:
    with scripted_server(max_logprobs=0) as (client, _, _):
        body = {"messages": CHAT, "logprobs": True, "top_logprobs": 1}
        assert client.post("/v1/chat/completions", json=body).status_code == 400
    assert front(max_logprobs=0).config.server.max_logprobs == 0


# --- --enable-force-include-usage ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
@pytest.mark.parametrize("forced", [True, False])
def test_streams_end_with_usage_where_the_server_says_so(forced: bool, options: dict[str, bool] | None) -> None:
    with scripted_server(force_include_usage=forced) as (client, peer, _):
        body = {"stream": True} | ({"stream_options": options} if options else {})
        _, reply = asked(client, peer, **body)
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        wanted = forced or bool(options and options["include_usage"])
        assert ("usage" in events[0]) == wanted
        assert (events[-1]["choices"] == []) == wanted
        if wanted:
            assert events[-1]["usage"]["completion_tokens"] == 1
        assert reply.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("most", "size", "status"), [(4096, 16 << 20, 400), (4096, (16 << 20) + 1, 413), (17 << 20, (16 << 20) + 1, 400)]
)
def test_what_programs_send_may_be_larger_than_requests(most: int, size: int, status: int) -> None:
    """16 MiB or `max_request_bytes` if that is more; what is taken here is no export of feedback."""
    with scripted_server(max_request_bytes=most) as (client, _, _):
        head = {"content-type": "application/json"}
        assert client.post("/v1/feedback/import", content=b"x" * size, headers=head).status_code == status
        too_large = client.post("/v1/completions", content=b"x" * (most + 1), headers=head)
        assert too_large.status_code == 413
