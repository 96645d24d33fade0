"""Families of mlx-lm that are refused by name, because the check at start would miss or not explain the fault.

The check compares a few short prompts. Some families are right for these and wrong for longer ones, some fail only in
a compiled step, and one ends the process. Others would be refused with an error of mlx-lm that says little.
"""

from __future__ import annotations

_SPARSE = "each of its positions chooses which earlier ones it sees (sparse attention), which the paged cache cannot do"

UNSERVED = {
    "afm7": "its last layers compute their positions from the number of keys in the cache, which is padded in a batch",
    "dbrx": "its code waits in the middle of a step for the experts that were chosen, so no step can be compiled",
    "deepseek_v32": _SPARSE,
    "deepseek_v41": "its layers cache groups of positions that are compressed into one",
    "glm_moe_dsa": _SPARSE,
    "gpt_bigcode": "its code takes one position for all rows of a batch, whose positions differ",
    "llama4": "its layers see chunks of positions, and its code takes one position for all rows of a batch",
    "minimax_m3_vl": _SPARSE,
    "phi3small": "mlx-lm's code for its block-sparse attention ends the process with an invalid memory access",
}
"""The reason why a family is not served, by `model_type`."""
