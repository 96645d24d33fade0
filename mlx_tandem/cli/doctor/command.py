"""The command `tandem doctor`: run the checks, print the report, end with what it says."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mlx_tandem.cli.doctor.result import Check


def examine(checks: Sequence[Check], as_json: bool) -> int:
    """Print the report of some checks on standard output; the exit status, 1 when one has failed."""
    import json

    from mlx_tandem.cli.bench.machine import describe
    from mlx_tandem.cli.doctor import isolate, report

    def tell(name: str) -> None:
        print(f"tandem: checking {name}", file=sys.stderr, flush=True)

    found = report.data(describe(), isolate.run(checks, tell))
    print(json.dumps(found, indent=2, ensure_ascii=False) if as_json else report.markdown(found))
    return 0 if found["well"] else 1
