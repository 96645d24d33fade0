"""The command `tandem doctor`: runs the checks, prints the report, and ends with the status that it implies."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mlx_tandem.cli.doctor.result import Check


def examine(checks: Sequence[Check], as_json: bool, as_block: bool = False) -> int:
    """Print the report of some checks on standard output; return the exit status, 1 if one has failed.

    With `as_json` it is JSON; with `as_block` it is Markdown that an issue shows folded. Markdown ends with the
    verdict.
    """
    import json

    from mlx_tandem.cli.bench.machine import describe
    from mlx_tandem.cli.doctor import isolate, report

    def tell(check: Check, seconds: float) -> None:
        if not seconds:
            print(f"tandem: checking {check.name}", file=sys.stderr, flush=True)

    found = report.data("tandem doctor", describe(), isolate.run(checks, tell))
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        text = report.markdown(found)
        print(report.folded(text) if as_block else text)
    return 0 if found["well"] else 1
