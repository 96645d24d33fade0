"""A server that learns from what is said of its answers, over HTTP."""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from mlx_tandem.cli import learning
from mlx_tandem.config import FeedbackConfig
from tests.api.learns import learning_config
from tests.serving import RunningServer, serving
from tests.waiting import until

QUESTION, RIGHT = "Sort down: 5 3 9 1", "9 5 3 1"


def answered(server: RunningServer, model: str, **fields: object) -> tuple[str, list[str]]:
    """The id of a reply and what its choices say."""
    reply = server.chat(QUESTION, model=model, **fields)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    return body["id"], [choice["message"]["content"] for choice in body["choices"]]


def test_corrections_and_preferences_change_what_the_adapter_says(tmp_path: Path) -> None:
    config = structs.replace(
        learning_config(tmp_path),
        feedback=FeedbackConfig(learn="policy", batch_size=3, epochs=6, learning_rate=3e-3),
    )
    with serving(learning.resolve(config, {}), tmp_path) as server:

        def status() -> dict[str, object]:
            found: dict[str, object] = server.client.get("/v1/training/status").json()
            return found

        say = server.client.post
        id, (wrong,) = answered(server, "policy", temperature=0)
        assert wrong != RIGHT
        of_base, _ = answered(server, "base", temperature=0)
        of_other, _ = answered(server, "shout", temperature=0)
        several, texts = answered(server, "policy", temperature=1, n=8, seed=3)
        best = texts.index(RIGHT)
        for body in (
            {"completion_id": id, "corrected": RIGHT},
            {"completion_id": of_base, "thumb": "down"},
            {"completion_id": of_other, "thumb": "down"},
            {"completion_id": several, "preferred": best},
        ):
            reply = say("/v1/feedback", json=body)
            assert reply.status_code == 200, reply.text
        until(lambda: status()["feedback"]["updates"] == 6)  # type: ignore[index]
        said = status()["feedback"]
        assert said == {
            "adapter": "policy", "state": said["state"], "updates": 6, "learned": 18, "replayed": 0, "error": "",
        }  # type: ignore[index]  # fmt: skip
        assert answered(server, "policy", temperature=0)[1] == [RIGHT]
        assert answered(server, "base", temperature=0)[1] == [wrong], "the base is as it was"
        listed = server.client.get("/v1/feedback").json()["data"]
        assert {each["completion_id"]: each["learned"] for each in listed} == {
            id: 6, of_base: 6, of_other: 0, several: 6,
        }  # fmt: skip
        report = server.client.get("/v1/training/history").json()["updates"][-1]
        assert (report["feedback"], report["trajectories"], report["outcome"]) == (3, 0, "published")
