"""Clients, unmodified, over streams that the server fills while nothing is drawn: they see the answer alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlx_tandem.engine.messages import Accepted, Output, Submit
from mlx_tandem.server.stream_reply import StreamReply
from mlx_tandem.types import Delta
from tests.api.plain import TOKENIZER
from tests.api.scripted import Peer, scripted_server
from tests.clients import lazily
from tests.waiting import until

anthropic = lazily.imported("anthropic")
litellm = lazily.imported("litellm")
ollama = lazily.imported("ollama")
openai = lazily.imported("openai")

HELLO = [{"role": "user", "content": "hi"}]
FILLS: list[int] = []
"""One for each time that a stream was filled."""


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Peer]]:
    with pytest.MonkeyPatch.context() as patch:
        fill = StreamReply._fill

        async def counted(self: StreamReply, send: Any) -> None:
            await fill(self, send)
            FILLS.append(1)

        patch.setattr(StreamReply, "_fill", counted)
        with scripted_server(stream_keepalive_s=0.01) as (client, peer, _):
            yield str(client.base_url).rstrip("/"), peer


def completions(url: str) -> Iterator[str]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        for chunk in client.completions.create(model="base", prompt="hi", stream=True):
            yield chunk.choices[0].text


def chat(url: str) -> Iterator[str]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        for chunk in client.chat.completions.create(model="base", messages=HELLO, stream=True):
            yield chunk.choices[0].delta.content or ""


def responses(url: str) -> Iterator[str]:
    with (
        openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client,
        client.responses.stream(model="base", input="hi") as stream,
    ):
        for event in stream:
            if event.type == "response.output_text.delta":
                yield event.delta
        assert stream.get_final_response().usage.input_tokens_details.cached_tokens == 1


def messages(url: str) -> Iterator[str]:
    with (
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client,
        client.messages.stream(model="base", messages=HELLO, max_tokens=20) as stream,
    ):
        yield from stream.text_stream
        usage = stream.get_final_message().usage
        assert usage.cache_read_input_tokens == 1, "the last event corrects the first"


def ollama_chat(url: str) -> Iterator[str]:
    for part in ollama.Client(host=url).chat(model="base", messages=HELLO, stream=True):
        yield part.message.content or ""


def through_litellm(model: str, path: str) -> Callable[[str], Iterator[str]]:
    def ask(url: str) -> Iterator[str]:
        stream = litellm.completion(
            model=model, api_base=url + path, api_key="none", messages=HELLO, stream=True, max_tokens=20, num_retries=0
        )
        for chunk in stream:
            yield chunk.choices[0].delta.content or ""

    return ask


CLIENTS = {
    "openai completions": completions,
    "openai chat": chat,
    "openai responses": responses,
    "anthropic": messages,
    "ollama": ollama_chat,
    "litellm openai": through_litellm("openai/base", "/v1"),
    "litellm anthropic": through_litellm("anthropic/base", ""),
    "litellm ollama": through_litellm("ollama_chat/base", ""),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # litellm leaves connections open
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_sees_nothing_of_what_fills_a_stream(served: tuple[str, Peer], client: str) -> None:
    """Two pieces come. The silence before each is filled three times, where the dialect has something for that."""
    url, peer = served
    said: list[str] = []
    asking = threading.Thread(target=lambda: said.extend(CLIENTS[client](url)))
    asking.start()
    request = peer.hear(Submit).request.id
    peer.say(Accepted(request))
    for text, finish in (("one two", None), (" three", "stop")):
        enough = len(FILLS) + 3
        until(lambda: len(FILLS) >= enough)  # noqa: B023
        tokens = tuple(TOKENIZER.encode_plain(text))
        peer.say(Output([Delta(request, 0, tokens, finish=finish, cached=1)]))  # type: ignore[arg-type]
    asking.join()
    assert [piece for piece in said if piece] == ["one two", " three"]
