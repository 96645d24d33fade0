"""The engine process is killed under load, with the built-in model."""

from __future__ import annotations

import os
import signal
import threading
import time

import httpx
import pytest

from tests.serving import demo_config, serving
from tests.streams import until_token

pytestmark = pytest.mark.restarts


@pytest.mark.promise("FLT-11")
def test_kill_9_under_load():
    """Every stream ends with a typed error, health says 503 and recovers by itself, adapters included."""
    with serving(demo_config()) as server:
        texts: list[str] = []
        begun = threading.Barrier(9)

        def stream(model: str) -> None:
            body = {
                "model": model,
                "messages": [{"role": "user", "content": "Tell me a short story about a fox."}],
                "max_tokens": 900,
                "ignore_eos": True,
                "stream": True,
            }
            with (
                httpx.Client(base_url=server.url, timeout=60) as client,
                client.stream("POST", "/v1/chat/completions", json=body) as response,
            ):
                lines = response.iter_lines()
                first = until_token(lines)
                begun.wait()
                texts.append(first + "".join(lines))

        threads = [threading.Thread(target=stream, args=(m,)) for m in ("base", "shout", "json", "down") * 2]
        for t in threads:
            t.start()
        begun.wait()
        killed = time.monotonic()
        os.kill(server.engine_pid(), signal.SIGKILL)
        for t in threads:
            t.join()
        ended = time.monotonic() - killed
        assert len(texts) == 8
        for text in texts:
            assert text.endswith('"type":"server_error","param":null,"code":"engine_died"}}')
            assert "[DONE]" not in text
        statuses = set()
        while (health := server.client.get("/health")).status_code != 200:
            statuses.add(health.json()["status"])
            refused = server.chat("hi")
            assert refused.status_code in (200, 503)
        recovered = time.monotonic() - killed
        assert statuses == {"restarting"}
        assert health.json()["engine_restarts"] == 1
        # The promise of the product, not a speed: 5 s to tell, 30 s to be back.
        assert ended < 5
        assert recovered < 30
        reply = server.chat("What is 12 + 5?", model="shout", temperature=0)
        assert reply.json()["choices"][0]["message"]["content"] == "12 + 5 = 17!"
        assert server.client.get("/v1/engine/metrics").json()["open_requests"] == 0


@pytest.mark.parametrize("breakage", ["model", "adapter"])
def test_a_folder_that_cannot_be_loaded_ends_the_start(tmp_path, breakage):
    from mlx_tandem import demo

    config = demo_config()
    if breakage == "model":
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            (tmp_path / name).write_bytes((demo.MODEL_PATH / name).read_bytes())
        config = demo_config(tmp_path)
    else:
        import msgspec

        config = msgspec.structs.replace(config, adapters=(("broken", str(tmp_path)),))
    with pytest.raises(RuntimeError, match="exit status 1"), serving(config):
        pass
