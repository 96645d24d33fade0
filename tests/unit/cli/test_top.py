"""The picture of `tandem top` from what a server says: rates, loads, and states in which there is no engine."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from mlx_tandem.cli.top import AdapterLoad, Look, _loads, _rate, drawn


def counters(requests: int, tokens: int, open_requests: int) -> dict[str, Any]:
    return {"requests": requests, "generated_tokens": tokens, "open": open_requests}


def metrics(tokens: int, open_requests: int, finished: int, **adapters: dict[str, Any]) -> dict[str, Any]:
    return {
        "generated_tokens": tokens,
        "open_requests": open_requests,
        "finished": {"stop": finished, "length": 0},
        "adapters": {f"{name}@1": each for name, each in adapters.items()},
    }


def test_what_is_of_no_adapter_is_of_the_base_and_the_busiest_is_first() -> None:
    loads = _loads(metrics(190, 4, 3, a=counters(2, 60, 1), b=counters(0, 0, 0)))
    assert list(loads) == ["base", "a@1", "b@1"]
    assert loads == {"base": AdapterLoad(3, 5, 130), "a@1": AdapterLoad(1, 2, 60), "b@1": AdapterLoad(0, 0, 0)}


def test_a_counter_that_began_again_has_no_rate() -> None:
    assert _rate({"n": 105}, {"n": 100}, "n", 2.0) == 2.5
    assert _rate({"n": 5}, {"n": 100}, "n", 1.0) == 0.0
    assert _rate({"n": 5}, {}, "n", 1.0) == 0.0


def shown(health: dict[str, Any], columns: int = 40) -> list[str]:
    console = Console(width=columns, markup=False)
    with console.capture() as captured:
        console.print(drawn(Look("http://x:1", health), console))
    return captured.get().splitlines()


def test_a_server_without_an_engine_says_why() -> None:
    starting = {"model": "m", "status": "starting", "progress": {"stage": "reading weights", "left_s": 12.3}}
    assert shown(starting) == ["http://x:1 · m · starting", "starting  reading weights, 12 s left"]
    failed = {"model": "m", "status": "shutting_down", "error": "it broke"}
    assert shown(failed) == ["http://x:1 · m · shutting down", "error     it broke"]
    assert max(map(len, shown(failed | {"error": "it broke " * 9}))) <= 40
