"""`tandem train reward`: from a file of preferences to a reward model that is served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_tandem import Engine
from mlx_tandem.adapters.convert import inspect
from mlx_tandem.cli import main
from mlx_tandem.errors import InvalidRequest, ModelError


def pairs(folder: Path, count: int = 24) -> None:
    """Write pairs in which the answer in capitals is the better one."""
    words = ("fox", "dog", "cat", "sun", "sea", "hat", "bee", "oak")
    asked = [f"{words[i % 8]} {words[i // 8]}" for i in range(count)]
    lines = [{"prompt": f"Say {text}", "chosen": text.upper(), "rejected": text} for text in asked]
    (folder / "taste.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_the_command_trains_what_ranks_held_out_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is a PEFT adapter with a score head, continues where it was stopped, and is refused as a generator."""
    pairs(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = "train reward taste.jsonl --rank 4 --lr 3e-3 --epochs 2 --targets q_proj,v_proj --valid-share 0.25".split()
    with pytest.raises(SystemExit) as ended:
        main([*words, "--json-out", "out.json"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "out.json").read_text())
    manifest = json.loads((tmp_path / "taste-adapter" / "manifest.json").read_text())
    assert manifest["kind"] == "reward" and manifest["held_out_accuracy"] >= 0.9
    assert found["evaluations"][0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert f"held-out pairs ranked right: {manifest['held_out_accuracy']:.1%}" in said and "nats per pair" in said
    made = inspect(tmp_path / "taste-adapter")
    assert (made.score_head, made.targets, made.problems) == (True, ("self_attn.q_proj", "self_attn.v_proj"), ())
    with Engine(adapters={"taste": tmp_path / "taste-adapter"}, num_blocks=64, max_num_seqs=2) as engine:
        with pytest.raises(InvalidRequest, match="taste@1 is a reward model"):
            engine.chat("Say fox", adapter="taste", max_tokens=4)
        with pytest.raises(ModelError, match="cannot learn to generate"):
            engine.trainer("other", init_from="taste")
        again = engine.trainer("again", scores=True, init_from="taste", targets=("q_proj", "v_proj"))
        assert again.info.rank == 4


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"prompt": "a", "completion": "b"}, "chosen is missing"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "rejected"),
    ],
)
def test_a_wrong_line_is_said_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: object, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mlx_tandem.cli.finetune.Engine", lambda *_, **options: pytest.fail("the model is loaded"))
    pairs(tmp_path, 2)
    with (tmp_path / "taste.jsonl").open("a") as file:
        file.write(json.dumps(line))
    with pytest.raises(SystemExit):
        main(["train", "reward", "taste.jsonl"])
    printed = capsys.readouterr().err
    assert "taste.jsonl, line 3" in printed and says in printed
