"""Texts that are long, many, or the worst that a tokenizer can be given: the front's memory and other requests do not
notice."""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import process_time

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from mlx_tandem import demo, limits
from mlx_tandem.errors import InvalidRequest, TooLarge
from mlx_tandem.generation.prompts import Prompts
from mlx_tandem.generation.text_admission import PLACES
from mlx_tandem.generation.tokenizer import Tokenizer
from tests.serving import RunningServer, demo_config, serving
from tests.unit.text_tools import byte_level, model_folder, sentencepiece
from tests.waiting import until

MB = 1_000_000
REFUSED = "7 " * 50_000
"""A text for which there is no room beside long ones, and that is tokenised in milliseconds where there is."""
WORST = {
    "one letter": "a",
    "spaces": " ",
    "newlines": "\n",
    "digits": "7",
    "zero-width": "\u200b",
    "joiners": "👩\u200d",
    "combining marks": "\u0301",
    "one long word": "qzxj",
    "unknown": "中",
    "what normalisation enlarges": "\ufdfa",
    "control tokens": "<|im_end|>",
    "almost control tokens": "<|im_",
    "words": "hello ",
}


# -- one server -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Iterator[RunningServer]:
    with serving(demo_config(max_request_bytes=16 * MB)) as server:
        yield server


def resident(pid: int) -> int:
    """Bytes that the process has had in memory at most, or where the system does not say that, has now."""
    status = Path(f"/proc/{pid}/status")
    if status.exists():
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        assert found
        return int(found[1]) * 1024
    out = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True).stdout
    return int(out) * 1024


def test_many_long_texts_at_once_take_little_memory(served: RunningServer) -> None:
    body = {"prompt": "7 " * (MB // 4), "return_token_strs": True}
    with ThreadPoolExecutor(10) as threads:
        replies = [threads.submit(served.client.post, "/tokenize", json=body, timeout=120) for _ in range(8)]
        beside = 0
        while beside < 10 and not all(r.done() for r in replies):
            assert served.client.get("/livez").status_code == 200
            assert served.chat("What is 17 + 25?", max_tokens=4).status_code == 200
            beside += 1
        done = [r.result() for r in replies]
    assert beside > 1
    answered = [r.json()["count"] for r in done if r.status_code == 200]
    assert len(answered) >= PLACES and len(set(answered)) == 1 and answered[0] > MB // 4
    # On a machine that has much else to do, the last ones may wait for too long.
    assert all(r.status_code == 503 and "retry-after" in r.headers for r in done if r.status_code != 200)
    assert resident(served.process.pid) < 300 * MB


@pytest.mark.timeout(400)  # texts are tokenised at a low priority, behind whatever else runs
def test_too_many_are_refused_and_told_when_to_come_again(served: RunningServer) -> None:
    """Bodies whose clients are slow to send them count, too."""
    address = (served.client.base_url.host, served.client.base_url.port)
    size = limits.MAX_WAITING_TEXT // 8 - 8192  # which leaves room for short ones
    head = (
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n{" % size
    )
    waiting = []
    try:
        waiting = [socket.create_connection(address) for _ in range(8)]
        for sock in waiting:
            sock.sendall(head)
        asked = {"prompt": REFUSED, "prompts": 1}  # where there is room for it, it is a 400 and no work
        while (refused := served.client.post("/tokenize", json=asked)).status_code == 400:
            answered, _, _ = select.select(waiting, [], [], 0)
            for sock in answered:  # refused, since texts of earlier tests had not gone yet
                waiting.remove(sock)
                sock.close()
                waiting.append(socket.create_connection(address))
                waiting[-1].sendall(head)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        assert served.client.post("/tokenize", json={"prompt": "short"}).status_code == 200
        assert served.chat("What is 17 + 25?", max_tokens=4).status_code == 200
    finally:
        for sock in waiting:
            sock.close()
    until(lambda: served.client.post("/tokenize", json=asked).status_code != 429)
    metrics = served.client.get("/metrics").text
    found = re.search(r'^tandem_refused_total\{reason="waiting_text"\} (\d+)', metrics, re.MULTILINE)
    assert found and int(found[1]) > 0


def test_replies_that_nobody_reads_hold_their_places_and_no_more(served: RunningServer) -> None:
    """Short texts, other routes and prompts need none."""
    address = (served.client.base_url.host, served.client.base_url.port)
    body = b'{"return_token_strs": true, "prompt": "%b"}' % (b"7 " * (MB // 4))
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    deaf = []
    try:
        for _ in range(PLACES + 2):
            sock = socket.create_connection(address)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(head % len(body) + body)
            deaf.append(sock)
        begun: set[socket.socket] = set()  # bodies may arrive in another order
        while len(begun) < PLACES:
            begun |= {*select.select([sock for sock in deaf if sock not in begun], [], [], 60)[0]}
        assert served.client.post("/tokenize", json={"prompt": "short"}).status_code == 200
        error = served.complete("7 " * 10_000).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert all(sock.recv(15, socket.MSG_PEEK) == b"HTTP/1.1 200 OK" for sock in begun)
        assert select.select([sock for sock in deaf if sock not in begun], [], [], 0) == ([], [], [])
    finally:
        for sock in deaf:
            sock.close()
    assert served.client.post("/tokenize", json={"prompt": "7 " * (MB // 4)}, timeout=60).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "x" * (6 * MB)}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * (6 * MB)}]}, "messages"),
        ("/detokenize", {"tokens": [1000] * (2 * MB)}, "tokens"),
        ("/v1/completions", {"prompt": "x" * (6 * MB)}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "x" * (6 * MB)]}, "prompt[1]"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * (6 * MB)}]}, "messages"),
    ],
)
def test_a_text_that_is_too_large_is_refused_before_it_is_tokenised(
    served: RunningServer, path: str, body: dict[str, object], param: str
) -> None:
    reply = served.client.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (413, param)


def worker(served: RunningServer) -> int:
    listed = subprocess.run(["ps", "-wweo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    (pid,) = [
        int(pid)
        for pid, parent, args in rows
        if int(parent) == served.process.pid and "generation.tokenizing.worker" in args
    ]
    return pid


@pytest.mark.promise("FLT-07")
def test_a_killed_process_costs_nothing(served: RunningServer) -> None:
    expected = served.client.post("/tokenize", json={"prompt": "7 " * 10_000}).json()
    before = worker(served)
    os.kill(before, signal.SIGKILL)
    assert served.client.post("/tokenize", json={"prompt": "7 " * 10_000}).json() == expected
    assert worker(served) != before


@pytest.mark.promise("E7")
@pytest.mark.parametrize("name", WORST)
def test_a_long_text_of_the_worst_is_answered(served: RunningServer, name: str) -> None:
    text = WORST[name] * (MB // 4 // len(WORST[name].encode()))
    reply = served.client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}, timeout=60)
    assert reply.status_code == 200, reply.text
    assert reply.json()["count"] == len(reply.json()["tokens"])
    assert served.client.post("/detokenize", json={"tokens": reply.json()["tokens"]}, timeout=60).status_code in (
        200,
        413,
    )


# -- tokenizers -----------------------------------------------------------------------------------------------------


def made(model: object, normalizer: object = None, pre_tokenizer: object = None, special: object = None) -> Tokenizer:
    backend = Backend(model)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    if special is not None:
        backend.add_special_tokens([special])
    return Tokenizer(backend)


def bpe() -> models.BPE:
    vocab = {c: i for i, c in enumerate(("<unk>", *map(chr, range(33, 127)), " ", "▁", "aa", "aaaa", "▁▁", "qz"))}
    merges = [("a", "a"), ("aa", "aa"), ("▁", "▁"), ("q", "z")]
    return models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True)


WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KINDS: dict[str, Callable[[], Tokenizer]] = {
    "the built-in model's": lambda: Tokenizer.load(demo.MODEL_PATH),
    "byte level": byte_level,
    "byte fallback": sentencepiece,
    "normalised control tokens": lambda: sentencepiece(normalized=True),
    "one word": lambda: made(bpe()),
    "replaced spaces": lambda: made(
        bpe(), normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ),
    "metaspace": lambda: made(bpe(), normalizers.NFKC(), pre_tokenizers.Metaspace()),
    "words": lambda: made(bpe(), normalizers.NFC(), pre_tokenizers.Split(Regex(WORDS), "isolated")),
    "unigram": lambda: made(
        models.Unigram([("<unk>", 0.0), ("a", -1.0), ("aa", -1.5), ("▁", -2.0), ("q", -3.0), ("qz", -3.0)], 0, False),
        normalizers.NFKC(),
        pre_tokenizers.Metaspace(),
    ),
    "greedy control tokens": lambda: made(
        bpe(), special=AddedToken("<|im_end|>", lstrip=True, rstrip=True, special=True)
    ),
}


@pytest.mark.promise("E7")
@pytest.mark.parametrize("kind", KINDS)
def test_time_grows_as_the_text_does(kind: str) -> None:
    """Eight times the text may take four times as long again; what is quadratic takes eight times as long again."""
    tokenizer = KINDS[kind]()
    for name, unit in WORST.items():
        assert grows_as_the_text(tokenizer, unit), name


def test_what_grows_faster_is_seen() -> None:
    assert not grows_as_the_text(made(QUADRATIC), "a", 300)


def grows_as_the_text(tokenizer: Tokenizer, unit: str, size: int = 16_000) -> bool:
    text = unit * (size // len(unit.encode()))

    def seconds(text: str) -> float:
        began = process_time()
        tokenizer.encode(text)
        return process_time() - began

    # What disturbs a measurement makes it longer: a time that is too long is taken once more.
    most = 8 * 4 * seconds(text) + 0.05
    return seconds(text * 8) < most or seconds(text * 8) < most


def with_prompts(folder: Path, use: Callable[[Prompts], Awaitable[None]]) -> None:
    async def run() -> None:
        prompts = Prompts(folder)
        try:
            await use(prompts)
        finally:
            await prompts.close()

    asyncio.run(asyncio.wait_for(run(), 120))


QUADRATIC = models.WordPiece(
    {"[UNK]": 0, "a": 1, "##a": 2, "##b": 3}, unk_token="[UNK]", max_input_chars_per_word=1 << 30
)


@pytest.mark.parametrize(
    ("tokenizer", "text", "why"),
    [
        (lambda: made(QUADRATIC), "a" * 200_000, "takes too long to tokenise"),
        (lambda: made(bpe(), normalizers.NFKC()), "\ufdfa" * 500_000, "cannot be tokenised within 512 MB of memory"),
    ],
    ids=["time", "memory"],
)
def test_what_takes_too_much_is_refused_alone(
    tmp_path: Path, tokenizer: Callable[[], Tokenizer], text: str, why: str
) -> None:
    folder = model_folder(tmp_path, tokenizer(), "{{ messages[0].content }}")

    async def use(prompts: Prompts) -> None:
        fair = "a " * 5000
        expected = list(await prompts.text(fair, "prompt"))
        found = await asyncio.gather(
            prompts.text(fair, "prompt"),
            prompts.text(text, "prompt[3]"),
            prompts.chat([{"role": "user", "content": text}]),
            prompts.text(fair, "prompt"),
            return_exceptions=True,
        )
        errors = [e for e in found if isinstance(e, InvalidRequest)]
        assert [(e.param, e.message) for e in errors] == [(p, f"{p} {why}") for p in ("prompt[3]", "messages")]
        assert [list(ids) for ids in found if not isinstance(ids, BaseException)] == [expected] * 2

    with_prompts(folder, use)


def test_a_text_over_the_cap_never_reaches_the_process(tmp_path: Path) -> None:
    async def use(prompts: Prompts) -> None:
        with pytest.raises(TooLarge) as e:
            await prompts.text("x" * (limits.MAX_TEXT_BYTES + (2 << 20)), "prompt")
        assert e.value.param == "prompt"
        assert prompts._long._pool._workers[0]._child is None

    with_prompts(model_folder(tmp_path, byte_level()), use)
