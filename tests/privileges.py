"""Programs that run as an ordinary user's do, though the tests may be root's: limits and permissions hold for them."""

from __future__ import annotations

import ctypes
import sys

PR_CAPBSET_DROP = 24
CAPABILITIES = (1, 2, 24)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_SYS_RESOURCE


def drop_privileges() -> None:
    """For `preexec_fn` of a subprocess: what it executes has none of what lets root pass permissions and limits."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        for capability in CAPABILITIES:
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails for whoever has none, which is right, too
