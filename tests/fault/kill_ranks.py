"""Kill one of two ranks at random, many times, while streams run: `python -m tests.fault.kill_ranks --kills 50`.

Each time it checks that all streams end with a typed error, that another group serves within 30 seconds, that no
process of the old group stays and that none of its ports is held. It takes minutes, so it is run by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import threading
import time
from pathlib import Path

import httpx
from msgspec.structs import replace

from mlx_tandem.config import DutyConfig, ParallelConfig
from tests.parallel.test_serving import is_there
from tests.serving import RunningServer, demo_config, serving
from tests.streams import until_token
from tests.waiting import until

MOST_SECONDS = 30.0
TYPED = '"type":"server_error","param":null,"code":"engine_died"}}'


def streams(server: RunningServer, texts: list[str], begun: threading.Barrier) -> list[threading.Thread]:
    """Begin a stream for each party of the barrier but one."""

    def stream(model: str) -> None:
        message = {"role": "user", "content": "Tell me a short story about a fox."}
        body = {"model": model, "messages": [message], "max_tokens": 900, "ignore_eos": True, "stream": True}
        with (
            httpx.Client(base_url=server.url, timeout=60) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            lines = response.iter_lines()
            first = until_token(lines)
            begun.wait()
            texts.append(first + "".join(lines))

    models = ["base", "shout", "json", "down"] * begun.parties
    threads = [threading.Thread(target=stream, args=(model,)) for model in models[: begun.parties - 1]]
    for thread in threads:
        thread.start()
    return threads


def ports_of(pids: list[int]) -> set[int]:
    """The ports on which these processes listen."""
    inodes = set()
    for pid in pids:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


def is_free(port: int) -> bool:
    """Whether a program may listen on a port."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def kill_once(server: RunningServer, rng: random.Random) -> tuple[str, float, float]:
    """Kill a rank under load; return which, the seconds until all streams had ended, and those until another group
    served."""
    texts: list[str] = []
    begun = threading.Barrier(7)
    threads = streams(server, texts, begun)
    begun.wait()
    pids = [server.engine_pid(), *server.rank_pids()]
    assert len(pids) == 2
    ports = ports_of(pids)
    time.sleep(rng.random() * 0.2)  # the kill is to fall anywhere in a step
    which = rng.randrange(2)
    killed = time.monotonic()
    os.kill(pids[which], signal.SIGKILL)
    for thread in threads:
        thread.join(MOST_SECONDS)
        assert not thread.is_alive(), "a stream hangs"
    ended = time.monotonic() - killed
    assert len(texts) == 6 and all(text.endswith(TYPED) for text in texts), texts
    until(lambda: server.client.get("/health").status_code == 200)
    back = time.monotonic() - killed
    assert back < MOST_SECONDS, back
    until(lambda: not any(map(is_there, pids)))
    assert all(map(is_free, ports)), ports
    reply = server.chat("What is 17 + 25?", temperature=0, model="shout")
    assert reply.status_code == 200
    return ("first", "other")[which], ended, back


def main() -> None:
    """Kill as often as the command line says, and print what came of it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    config = demo_config()
    engine = replace(
        config.engine,
        parallel=ParallelConfig(ranks=2, mode="ring"),
        duty=DutyConfig(mode="inference_only"),
        lora=replace(config.engine.lora, prepare=True),
    )
    kills = []
    with serving(replace(config, engine=engine)) as server:
        for _ in range(options.kills):
            kills.append(kill_once(server, rng))
            print(*kills[-1], flush=True)
    ended, back = ([kill[i] for kill in kills] for i in (1, 2))
    result = {
        "kills": len(kills),
        "first": sum(kill[0] == "first" for kill in kills),
        "streams_end_s": [round(statistics.median(ended), 2), round(max(ended), 2)],
        "serves_again_s": [round(statistics.median(back), 2), round(max(back), 2)],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
