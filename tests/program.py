"""The program behind `tests.serving`: `python -m tests.program CONFIG` serves on a free port and says which.

It imports nothing of the tests, whose libraries would make each start slower.
"""

from __future__ import annotations

import logging
import sys

import msgspec

from mlx_tandem.config import Config
from mlx_tandem.server.serve import run

if __name__ == "__main__":
    config = msgspec.json.decode(sys.argv[1], type=Config)
    level = logging.DEBUG if "-v" in sys.argv else logging.INFO
    sys.exit(run(config, on_ready=lambda front, port: print(f"port {port}", flush=True), log_level=level))
