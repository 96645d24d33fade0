"""A dialogue with Atropos' trajectory API, which `run-api` of atroposlib 0.4.0 and this server have to lead alike.

`dialogue` says it to an API, and returns what was said and answered; `atropos_dialogue.json` has the answers of
`run-api`. `tests/clients/test_environments.py` asks it again where it is installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.atropos_api import Group, scored

RECORDED = Path(__file__).with_suffix(".json")
REGISTRATION = {
    "wandb_group": "g", "wandb_project": "p", "batch_size": 8, "max_token_len": 64, "checkpoint_dir": "x",
    "save_checkpoint_interval": 5, "starting_step": 3, "num_steps": 9,
}  # fmt: skip

Ask = Callable[[str, str, Any], tuple[int, Any]]
"""Sends a request, with a JSON body or None, and returns the status and the JSON or text of the reply."""


def group(size: int, env_id: int | None = None, mark: int = 0) -> Group:
    answers = [[5 + i, mark] for i in range(size)]
    return scored([3, 4], answers, [float(i % 2) for i in range(size)]) | {"env_id": env_id}


def environment(name: str, size: int = 4, share: float | None = None, weight: float = 1.0) -> dict[str, Any]:
    said = {"max_token_length": 64, "desired_name": name, "weight": weight, "group_size": size}
    return said | {"min_batch_allocation": share}


def dialogue(ask: Ask) -> list[list[Any]]:
    """Each request with its status and reply; of a registration's reply, the number is not looked at."""
    heard: list[list[Any]] = []

    def say(method: str, path: str, body: Any = None) -> None:
        status, reply = ask(method, path, body)
        if path == "/register" and status == 200:
            assert list(reply) == ["uuid"] and 0 <= reply["uuid"] < 1 << 128
            reply = {}
        heard.append([method, path, status, reply])

    say("GET", "/reset_data")  # run-api answers after it as if a trainer had registered once
    say("POST", "/register", REGISTRATION)
    say("POST", "/register", REGISTRATION | {"batch_size": 16})
    for path in ("/info", "/wandb_info", "/status"):
        say("GET", path)
    say("POST", "/register-env", environment("a"))
    say("GET", "/batch")
    for named in (environment("a"), environment("a", 2), environment("b", 8, weight=2.0)):
        say("POST", "/register-env", named)
    say("POST", "/scored_data", group(4, 0, 1))
    say("GET", "/latest_example")
    say("GET", "/status-env", {"env_id": 0})
    say("POST", "/scored_data_list", [group(2, 1, 2), group(2, 1, 3)])
    for env_id in range(3):
        say("GET", "/status-env", {"env_id": env_id})
    say("GET", "/status")
    say("GET", "/batch")
    say("GET", "/batch")
    say("GET", "/status")
    # Groups of another size than was announced wait for others that make it up.
    for size in (3, 2, 1):
        say("POST", "/scored_data", group(size, 0, 4))
    say("POST", "/scored_data_list", [group(3, 0, 5), group(2, 0, 6)])
    say("GET", "/status")
    say("POST", "/disconnect-env", {"env_id": 1})
    say("GET", "/status-env", {"env_id": 0})
    say("POST", "/scored_data", group(4, None, 7))
    say("GET", "/batch")
    # A share of each batch for one environment.
    say("POST", "/register-env", environment("c", 4, 0.5))
    for env_id in (0, 3):
        say("GET", "/status-env", {"env_id": env_id})
    say("POST", "/scored_data_list", [group(4, 0, 8), group(4, 0, 9), group(4, 0, 10)])
    say("GET", "/batch")
    say("POST", "/scored_data", group(4, 3, 11))
    for env_id in (0, 3):
        say("GET", "/status-env", {"env_id": env_id})
    say("GET", "/batch")
    say("GET", "/status")
    say("GET", "/reset_data")
    say("GET", "/status")
    return heard


def recorded() -> list[list[Any]]:
    found: list[list[Any]] = json.loads(RECORDED.read_text())
    return found
