"""The file of settings: how large it may be, and which texts it may hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_tandem.cli.settings import SettingsError, build
from mlx_tandem.limits import MAX_CONFIG_BYTES


def built(tmp_path: Path, text: str) -> object:
    file = tmp_path / "tandem.yaml"
    file.write_text(text)
    return build(file, {})


def test_the_largest_file(tmp_path: Path) -> None:
    text = "server: {port: 9}\n#"
    built(tmp_path, text + "x" * (MAX_CONFIG_BYTES - len(text)))
    with pytest.raises(SettingsError, match=f"is larger than {MAX_CONFIG_BYTES} bytes"):
        built(tmp_path, text + "x" * (MAX_CONFIG_BYTES - len(text) + 1))


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("server.host", 'server: {host: "a\\nb"}'),
        ("server.served_model_names", 'server: {served_model_names: ["a", "b\\tc"]}'),
        ("server.root_path", 'server: {root_path: "/a\\x1b"}'),
        ("rl_training.metrics_file", 'rl_training: {metrics_file: "a\\nb"}'),
        ("rl_training.scoring_function", 'rl_training: {scoring_function: "a\\u202eb"}'),
        ("checkpointing.checkpoint_dir", 'checkpointing: {checkpoint_dir: "a\\x07"}'),
        ("adapters.a", 'adapters: {a: "b\\nc"}'),
        ("adapter_root", 'adapter_root: "a\\x85b"'),
        ("disk.dir", 'disk: {dir: "a\\nb"}'),
    ],
)
def test_a_text_with_control_characters_is_refused_by_its_place(place: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as refused:
        built(tmp_path, text)
    assert str(refused.value) == f"'{place}' must be UTF-8 text without control characters"


def test_patterns_and_schemas_of_rewards_may_have_lines(tmp_path: Path) -> None:
    text = 'rl_training: {rewards: {mine: [{function: regex, options: {pattern: "a\\nb"}}]}}'
    config = built(tmp_path, text)
    (part,) = config.rl_training.rewards["mine"]  # type: ignore[attr-defined]
    assert part.options == {"pattern": "a\nb"}
