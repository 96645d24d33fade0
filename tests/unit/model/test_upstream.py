"""What importing mlx-lm brings into the process, and leaves in it."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, sys
from mlx_tandem.model import build
loaded = [name for name in ("huggingface_hub", "transformers") if name in sys.modules]
from huggingface_hub import snapshot_download
from transformers import AutoTokenizer
print(json.dumps([loaded, snapshot_download.__module__, AutoTokenizer.__module__]))
"""


def test_an_engine_loads_no_transformers_and_whoever_wants_them_gets_the_real_ones() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    loaded, download, tokenizer = json.loads(done.stdout)
    assert loaded == []
    assert download.startswith("huggingface_hub.")
    assert tokenizer.startswith("transformers.")


def test_what_was_loaded_before_stays() -> None:
    program = """
import transformers
from mlx_tandem.model import upstream
import mlx_lm.tokenizer_utils
print(mlx_lm.tokenizer_utils.AutoTokenizer is transformers.AutoTokenizer)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
