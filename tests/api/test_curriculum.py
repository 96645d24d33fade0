"""The curriculum over HTTP: of prompts that were asked once, those whose answers differ are answered most often."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.api.learns import collect, learning_config
from tests.serving import RunningServer, serving
from tests.unit.cli_tools import tandem
from tests.waiting import until

KNOWN = ["1 2 3", "4 1 6", "7 2 9", "5 0 2", "8 3 6", "9 1 4", "2 6 7", "3 9 1", "6 4 8"]
"""Digits that the base always sorts right upwards."""

UNSURE = ["4 7 1", "9 2 5 3", "6 8 2 1"]
"""Digits that it sorts right downwards about half the time."""

SIZE, MORE = 8, 12
"""Answers of a group, and groups after the first one of each prompt."""


def status(server: RunningServer) -> dict[str, Any]:
    found: dict[str, Any] = server.client.get("/v1/training/status").json()
    return found


def ask(server: RunningServer, digits: str, *, down: bool) -> None:
    answer = " ".join(sorted(digits.split(), reverse=down))
    prompt = f"<|im_start|>user\nSort{' down' if down else ''}: {digits}<|im_end|>\n<|im_start|>assistant\n"
    metadata = {"answer": answer, "kind": "unsure" if down else "known"}
    collect(server, prompt, n=1, max_tokens=16, scoring_function="exact_match", metadata=metadata)


def test_prompts_whose_answers_differ_are_answered_most_often(tmp_path: Path) -> None:
    settings = {"group_size": SIZE, "update_frequency": 2 * SIZE, "learning_rate": 1e-9}
    with serving(learning_config(tmp_path, **settings)) as server:
        server.client.post("/v1/training/stop")
        for digits in KNOWN:
            ask(server, digits, down=False)
        for digits in UNSURE:
            ask(server, digits, down=True)
        asked = len(KNOWN) + len(UNSURE)
        assert status(server)["recorded_prompts"]["prompts"] == asked
        server.client.post("/v1/training/start")
        until(lambda: status(server)["siblings_drawn"] >= SIZE * (asked + MORE))
        server.client.post("/v1/training/stop")
        found = status(server)["recorded_prompts"]
        assert (found["new"], found["solved"]) == (0, len(KNOWN)), found
        metrics = server.client.get("/metrics").text
        assert f'tandem_training_recorded_prompts{{kind="solved"}} {len(KNOWN)}.0' in metrics
    exported = tandem("learn", "export", "--checkpoint-dir", str(tmp_path / "checkpoints")).stdout
    lines = map(json.loads, exported.splitlines())
    drawn = sorted((line for line in lines if line["group"].startswith("again-")), key=lambda line: line["created"])
    kinds = list(dict.fromkeys((line["group"], line["metadata"]["kind"]) for line in drawn))[: asked + MORE]
    first, later = (Counter(kind for _, kind in part) for part in (kinds[:asked], kinds[asked:]))
    assert first == {"known": len(KNOWN), "unsure": len(UNSURE)}, "each was tried once"
    assert later["unsure"] > MORE / 2, "in turn it would be a quarter"
