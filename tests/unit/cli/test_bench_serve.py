"""`tandem bench serve` on a real server: what is sent, what is counted, and what is checked."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mlx_tandem.cli.bench import plot
from mlx_tandem.cli.bench.client import Client, run_loop
from mlx_tandem.cli.bench.figures import figures, overheads
from mlx_tandem.cli.bench.serve import measure
from mlx_tandem.cli.bench.stream import Stream
from mlx_tandem.cli.bench.workloads import MODES, SAMPLING, Load, phases, with_baselines, zipf
from tests.serving import RunningServer, demo_config, serving
from tests.unit.cli_tools import tandem, tandem_process

KEY = "a-key-of-this-test"
NAMES = ("a", "b", "c", "d", "e")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(demo_config(api_key=KEY)) as running:
        yield running


def bench(url: str, *args: str) -> subprocess.CompletedProcess[str]:
    return tandem("bench", "serve", "--url", url, "--repeats", "1", *args)


# --- what is sent ------------------------------------------------------------------------------------------------


def chosen(mode: str, n: int, **load: Any) -> list[str | None]:
    choose = MODES[mode](NAMES, Load("", **load))
    return [choose() for _ in range(n)]


def test_choices() -> None:
    assert chosen("base", 2) == [None, None]
    assert chosen("same", 3) == ["a"] * 3
    assert chosen("mixed", 6) == [*NAMES, "a"]
    skew = chosen("skew", 40)
    assert Counter(skew) == {"a": 32, "b": 2, "c": 2, "d": 2, "e": 2}
    assert all(Counter(skew[i : i + 5])["a"] == 4 for i in range(36))  # evenly: in every five neighbours


def test_zipf_is_a_law_and_a_fixed_sequence() -> None:
    def drawn(exponent: float, seed: int = 0) -> list[str | None]:
        choose = zipf(NAMES, exponent, seed)
        return [choose() for _ in range(20_000)]

    counts = Counter(drawn(1.0))
    weights = [1 / (k + 1) for k in range(5)]
    for name, weight in zip(NAMES, weights, strict=True):
        assert counts[name] / 20_000 == pytest.approx(weight / sum(weights), abs=0.01)
    assert drawn(1.0) == drawn(1.0) != drawn(1.0, seed=1)
    assert Counter(drawn(0.0))["e"] == pytest.approx(4000, abs=200)


def test_a_mode_comes_with_what_it_is_compared_with() -> None:
    modes = with_baselines(["base", "long-decode-mixed", "same"])
    assert modes == ("base", "long-decode-same", "long-decode-mixed", "same")
    (phase,) = phases(Load("", modes=with_baselines(["skew", "long-decode-mixed"]), concurrency=(4,)), NAMES)
    lengths = {w.name: (w.prompt_tokens, w.max_tokens) for w in phase.workloads}
    assert lengths == {
        "same": (64, 64),
        "skew": (64, 64),
        "long-decode-same": (16, 256),
        "long-decode-mixed": (16, 256),
    }
    rows = [{"concurrency": 4, "skew/same": 0.9, "long-decode-mixed/long-decode-same": 0.78, "same/base": 0.5}]
    assert overheads(rows) == {(4, "skew"): -10.0, (4, "long-decode-mixed"): -22.0}


def test_sampling_is_mixed_unless_it_is_greedy(server: RunningServer) -> None:
    async def sent(load: Load) -> set[tuple[float, float]]:
        client = await Client.open(load)
        (phase,) = phases(load, ())
        done = await client.round(phase.workloads[0], phase.concurrency)
        client.close()
        assert done.figures()["errors"] == 0
        return {(s.body["temperature"], s.body["top_p"]) for s in done.sent}

    load = Load(server.url, concurrency=(2,), num_requests=12, max_tokens=2, api_key=KEY)
    assert run_loop(sent(load)) == set(SAMPLING)
    assert run_loop(sent(replace(load, sampling="greedy"))) == {(0.0, 1.0)}


# --- on a real server --------------------------------------------------------------------------------------------


def test_all_modes_with_validation(server: RunningServer, tmp_path: Path) -> None:
    out = tmp_path / "new" / "bench.json"
    done = bench(
        *(server.url, "--api-key", KEY, "--mode", "base,mixed,skew,zipf,long-decode-mixed", "--concurrency", "4"),
        *("--num-requests", "3", "--max-tokens", "4", "--routed-validation", "--json-out", str(out)),
    )
    assert done.returncode == 0, done.stderr
    assert KEY not in out.read_text() + done.stdout
    result = json.loads(out.read_text())
    rows = {row["mode"]: row["rounds"][0] for row in result["results"]}
    assert list(rows) == ["base", "same", "mixed", "skew", "zipf", "long-decode-same", "long-decode-mixed"]
    for mode, row in rows.items():
        assert (row["requests"], row["errors"], row["refused"]) == (3, 0, 0)
        assert row["tokens"] == 3 * (16 if "long" in mode else 4)
        assert row["prompt_tokens"] == pytest.approx(16 if "long" in mode else 64, rel=0.4)
    assert result["validation"]["checked"] == result["validation"]["answers"] == 21
    assert result["validation"]["different"] == 0
    assert result["validation"]["compared"] == "text and token ids"
    assert result["validation"]["adapters"] == 4
    assert "21 of 21 answers" in done.stdout and "skew" in done.stdout
    lines = done.stderr.splitlines()
    assert max(map(len, lines)) <= 80
    assert [bool(re.search(r"tok/s  about \d+:\d\d left$", line)) for line in lines[:7]] == [True] * 6 + [False]
    assert lines[7] == "asking again for 21 of 21 answers, one at a time"
    assert [re.sub("about .*", "", line) for line in lines[8:]] == [
        *(f"asked again: {n} of 21, 0 different, " for n in (3, 5, 7, 9, 11, 13, 15, 17, 19)),
        "asked again: 21 of 21, 0 different, done",
    ]


def test_without_the_key(server: RunningServer) -> None:
    done = tandem_process("bench", "serve", "--url", server.url, "--num-requests", "2")
    assert done.returncode == 1 and "401" in done.stderr and "Traceback" not in done.stderr


def test_jans_profile(tmp_path: Path) -> None:
    out = tmp_path / "jan.json"
    key = tmp_path / "key"
    key.write_text(KEY + "\n")
    with fake(lambda n: (200, {}, "x"), key=KEY) as url:
        done = bench(
            *(url, "--api-key-file", str(key), "--profile", "jan", "--num-requests", "1", "--prompt-tokens", "8"),
            *("--json-out", str(out), "--endpoint", "chat", "--repeats", "1"),
        )
    assert done.returncode == 0, done.stderr
    rows = [(r["concurrency"], r["mode"], r["rounds"][0]["tokens"]) for r in json.loads(out.read_text())["results"]]
    assert rows == [
        *((1, "temp=0.7, 50 tokens", 50), (1, "temp=0.7, 100 tokens", 100), (1, "temp=0.1, 50 tokens", 50)),
        *((n, "temp=0.7, 50 tokens", 50) for n in (2, 4, 8)),
    ]


def test_an_open_loop_holds_back_what_is_over_the_limit(server: RunningServer) -> None:
    load = Load(server.url, concurrency=(2,), rate=10_000.0, num_requests=50, max_tokens=8, repeats=1, api_key=KEY)
    (row,) = measure(load)["results"]
    done = row["rounds"][0]
    assert done["held_back"] > 0 and done["errors"] == 0
    assert done["requests"] + done["held_back"] == 50


# --- servers that do not behave ----------------------------------------------------------------------------------


@contextmanager
def fake(answer: Callable[[int], tuple[int, dict[str, str], str]], key: str = "") -> Iterator[str]:
    """A server that gives the n-th request what `answer` says: status, headers, text; and by its own count as many
    tokens as were asked for. `key`: what every request has to bring."""
    numbers = itertools.count()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply(200, {}, b"{}")

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, headers, text = answer(next(numbers))
            if key and self.headers["Authorization"] != f"Bearer {key}":
                status = 401
            choice = {"index": 0, "text": text}
            usage = {"prompt_tokens": 128, "completion_tokens": asked["max_tokens"]}
            body = json.dumps({"choices": [choice], "usage": usage})
            if asked["stream"] and status == 200:
                body = f"data: {body}\n\ndata: [DONE]\n\n"
            self.reply(status, headers, body.encode())

        def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def test_another_answer_alone_is_a_failure() -> None:
    with fake(lambda n: (200, {}, f"answer {n}")) as url:
        done = bench(
            url, "--concurrency", "2", "--num-requests", "3", "--routed-validation", "--validation-sample", "2"
        )
    assert done.returncode == 1
    assert "2 of 2 answers differ" in done.stderr
    assert "2 of 3 answers, 1 models, 2 different" in done.stdout and "'alone': 'answer" in done.stdout


def test_refusals_are_counted_apart() -> None:
    def answer(n: int) -> tuple[int, dict[str, str], str]:
        return [(200, {}, "x"), (429, {"Retry-After": str(n)}, "x"), (503, {}, "x"), (500, {}, "x")][n % 4]

    with fake(answer) as url:
        load = Load(url, concurrency=(1,), num_requests=12, repeats=2)
        (row,) = measure(load)["results"]  # one request to calibrate and one to warm up come before the rounds
    first = row["rounds"][0]
    assert (first["requests"], first["errors"], first["error_kinds"], first["refused"]) == (12, 3, {"500": 3}, 6)
    assert first["refusals"]["statuses"] == {"429": 3, "503": 3}
    assert first["refusals"]["without_retry_after"] == 3
    assert first["refusals"]["retry_after_s"]["max"] - first["refusals"]["retry_after_s"]["min"] == 8
    assert row["median"]["refused"] == 6


def test_a_stream_keeps_text_and_token_ids_if_asked() -> None:
    events = [
        {"choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"content": "Grü"}, "token_ids": [1]}]},
        {"choices": [{"delta": {"content": "ß"}, "token_ids": [2, 3]}]},
        {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 3}},
    ]
    body = b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events) + b"data: [DONE]\n\n"
    stream = Stream(keep=True)
    for i in range(0, len(body), 11):
        stream(body[i : i + 11])
    stream.finish(200)
    assert stream.answer() == ("Grüß", [1, 2, 3])
    assert figures([stream])["tokens"] == 3


# --- pictures ----------------------------------------------------------------------------------------------------


def test_a_plot_without_the_library_says_so_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = tandem("bench", "serve", "--url", "http://127.0.0.1:1", "--plot", "x.svg")
    assert (done.returncode, done.stderr) == (1, "tandem: --plot needs matplotlib: pip install matplotlib\n")
    done = tandem("bench", "serve", "--url", "http://127.0.0.1:1", "--plot", "x.pdf")
    assert done.returncode == 2 and ".png" in done.stderr


def test_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with fake(lambda n: (200, {}, "x")) as url:
        load = Load(url, modes=("base", "same"), adapters=("a",), concurrency=(1, 2), num_requests=2, repeats=1)
        result = measure(load)
    for name, head in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        plot.plot(result, tmp_path / "new" / name)
        assert (tmp_path / "new" / name).read_bytes().startswith(head)
