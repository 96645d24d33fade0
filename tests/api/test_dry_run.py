"""`tandem serve --dry-run` as a user runs it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from mlx_tandem import demo
from tests import tiny_models
from tests.unit.cli_tools import tandem


def dry_run(*options: str) -> subprocess.CompletedProcess[str]:
    return tandem("serve", "--dry-run", *options)


def test_it_says_what_fits_and_ends() -> None:
    done = dry_run("--num-blocks", "1025", "--enable-rl-training")
    assert done.returncode == 0, done.stderr
    for part in ("weights", "activations", "learning", "KV pool", "adapter slots", "all"):
        assert re.search(rf"^{part} +[\d.,]+ [MG]B", done.stdout, re.M), part
    assert "1,025 blocks of 16 tokens" in done.stdout
    fits = dict(re.findall(r"^ *([\d,]+) +([\d,]+)$", done.stdout, re.M))
    assert fits == {"512": "32", "2,048": "8", "8,192": "2"}


def test_layers_with_a_window_have_a_pool_of_their_own(tmp_path: Path) -> None:
    folder = tiny_models.make(tmp_path / "model", "gemma3_text", max_position_embeddings=32768)
    done = dry_run(str(folder), "--num-blocks", "1025", "--max-chunk-tokens", "64", "--max-num-seqs", "40")
    assert "1,025 blocks of 16 tokens, 4,096 bytes each\n" in done.stdout
    assert "125 blocks of 16 tokens, 4,096 bytes each, for layers that see 16 tokens\n" in done.stdout
    fits = dict(re.findall(r"^ *([\d,]+) +([\d,]+)$", done.stdout, re.M))
    assert fits == {"512": "32", "2,048": "8", "8,192": "2", "16,384": "1"}


def test_a_shorter_sequence_is_a_setting() -> None:
    """By another server's name; the last length of the table is the longest that is served."""
    done = dry_run("--num-blocks", "1025", "--max-kv-size", "1000")
    fits = re.findall(r"^ *([\d,]+) +([\d,]+)$", done.stdout, re.M)
    assert fits == [("512", "32"), ("1,000", "16")]


def test_a_draft_model_is_counted_and_has_to_be_there() -> None:
    done = dry_run("--num-blocks", "1025", "--draft-model", str(demo.DRAFT_PATH))
    assert re.search(r"^draft model's KV +33\.6 MB", done.stdout, re.M), done.stdout
    for options, wrong in (
        ((), "--draft-model-path"),
        (("--draft-model-path", "nowhere"), "draft model folder nowhere"),
    ):
        done = dry_run("--spec-decode", "draft", *options)
        assert done.returncode == 1 and wrong in done.stderr


def test_what_does_not_fit_is_one_line_and_status_1() -> None:
    done = dry_run("--num-blocks", "2000000000")
    assert done.returncode == 1 and not done.stdout
    assert re.fullmatch(r"tandem: the device has .* weights 16\.4 MB, .* 2000000000 blocks .*\n", done.stderr)
