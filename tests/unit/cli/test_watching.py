"""What `tandem learn watch` writes of a status: how far an update is, what was gained, and advice once."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_tandem.cli.watching import Lines, guard, headline

STATUS: dict[str, Any] = {
    "current_lora": "policy@3", "busy": True, "running": True, "recovering": 0, "updates": 2, "step": 2,
    "update_done": None, "update_left_s": None, "learning_rate": 3e-4, "buffered": 5, "accepted": 1, "compared": 40,
    "difference": 0.012, "gain": 0.0, "rollbacks": 0, "alarm": "", "reason": "", "advice": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "policy@3 · learning · 2 updates"),
        ({"update_done": 0.0}, "policy@3 · learning, 0% of an update · 2 updates"),
        ({"update_done": 0.43, "update_left_s": 12.4}, "learning, 43% of an update, 12 s left · "),
        ({"update_done": 0.43, "update_left_s": 1250.0}, "learning, 43% of an update, 21 min left · "),
        ({"busy": False}, "policy@3 · waiting · "),
        ({"busy": False, "running": False}, "policy@3 · stopped · "),
        ({"update_done": 0.5, "recovering": 7}, "policy@3 · recovering 7 updates · "),
    ],
)
def test_the_first_line_says_how_far_an_update_is(changes: dict[str, Any], says: str) -> None:
    assert says in headline(STATUS | changes)


@pytest.mark.parametrize(
    ("gain", "says"),
    [
        (0.0, "later ones got +0.012 on 40 prompts; gain: none is shown so far; 0 rollbacks"),
        (0.314, "gain: +0.314; 0"),
        (None, "on 40 prompts; 0 rollbacks"),
    ],
)
def test_a_difference_that_may_be_chance_is_not_called_a_gain(gain: float | None, says: str) -> None:
    assert says in guard(STATUS | {"gain": gain})


def test_advice_is_printed_again_when_it_says_something_else_and_not_for_other_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = Lines()
    for said in ("5 groups taught nothing, +0.1", "6 groups taught nothing, -2e-3", "ask for policy", "", "7 groups"):
        lines.show((STATUS | {"advice": said}, {}))
    assert capsys.readouterr().out.splitlines()[1:] == [
        "advice: 5 groups taught nothing, +0.1",
        "advice: ask for policy",
        "advice: 7 groups",
    ]
