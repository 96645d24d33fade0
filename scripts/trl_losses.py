"""Computes losses and their gradients with TRL's own code, for a test to compare ours with.

    python -m venv ./trl && ./trl/bin/pip install trl==1.16.0 transformers==5.23.0 peft torch
    ./trl/bin/python scripts/trl_losses.py > tests/unit/training/trl_losses.json

`GRPOTrainer._compute_loss` is called with logprobs that are given, in float64, in place of a model's. Nothing of this
project is imported.
"""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from trl import GRPOTrainer

LONGEST = 16
"""`max_completion_length`, which dr_grpo divides by."""

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "grpo, asymmetric": {"loss_type": "grpo", "epsilon_high": 0.28},
    "grpo, reference": {"loss_type": "grpo", "beta": 0.3},
    "grpo, sampler": {"loss_type": "grpo", "sampler": True},
    "grpo, divergence": {"loss_type": "grpo", "off_policy_mask_threshold": 0.02},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dapo, sampler, reference": {"loss_type": "dapo", "sampler": True, "beta": 0.3},
    "gspo": {"loss_type": "grpo", "level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "gspo, wide": {"loss_type": "grpo", "level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "cispo, sampler": {"loss_type": "cispo", "epsilon_high": 1.2, "sampler": True},
}
"""By name: what differs from the defaults of this file."""

MOST = 1.3
"""Where the ratio of old policy and sampler is truncated."""


def drawn(seed: int) -> dict[str, Any]:
    """Return logprobs of four completions under the new, the old, the sampling and a reference policy, with masks."""
    rng = random.Random(seed)
    lengths = [6, 3, 1, 5]
    width = max(lengths)

    def table(near: list[list[float]] | None, by: float) -> list[list[float]]:
        return [
            [-3 * rng.random() if near is None else near[i][t] + by * (rng.random() - 0.5) for t in range(width)]
            for i in range(len(lengths))
        ]

    new = table(None, 0)
    old = table(new, 0.8)
    mask = [[int(t < n and not (n == 6 and t in (2, 3))) for t in range(width)] for n in lengths]
    return {
        "new": new,
        "old": old,
        "sampled": table(old, 0.8),
        "reference": table(new, 1.0),
        "mask": mask,  # of the first completion two tokens are a tool's
        "advantages": [1.2, -0.7, 0.0, -0.5],
    }


def computed(case: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """Return TRL's loss for this case, and its gradient by the new policy's logprobs."""
    new = torch.tensor(data["new"], dtype=torch.float64, requires_grad=True)
    old, sampled, reference = (
        torch.tensor(data[name], dtype=torch.float64) for name in ("old", "sampled", "reference")
    )
    mask = torch.tensor(data["mask"])
    told = {"beta": 0.0, "epsilon": 0.2, "level": "token", "sampler": False, "off_policy_mask_threshold": None} | case
    trainer = SimpleNamespace(
        args=SimpleNamespace(
            delta=None, use_bias_correction_kl=False, steps_per_generation=1, gradient_accumulation_steps=1
        ),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
        ),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=told["off_policy_mask_threshold"],
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        importance_sampling_level=told["level"],
        beta=told["beta"],
        loss_type=told["loss_type"],
        epsilon_low=told["epsilon"],
        epsilon_high=told.get("epsilon_high", told["epsilon"]),
        use_vllm=told["sampler"],
        vllm_importance_sampling_correction=told["sampler"],
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **k: (new, torch.zeros_like(new), None),
    )
    tokens = torch.zeros(new.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": tokens[:, :1],
        "prompt_mask": torch.ones(new.shape[0], 1),
        "completion_ids": tokens,
        "completion_mask": torch.ones_like(mask),
        "tool_mask": mask,
        "advantages": torch.tensor(data["advantages"], dtype=torch.float64),
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    if told["sampler"]:
        inputs["importance_sampling_ratio"] = torch.exp(old - sampled).clamp(max=MOST)
        inputs["sampling_per_token_logps"] = sampled
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    (gradient,) = torch.autograd.grad(loss, new)
    return {"case": case, "loss": loss.item(), "gradient": gradient.tolist()}


def main() -> None:
    """Write everything to standard output."""
    data = drawn(7)
    found = {
        "command": "python scripts/trl_losses.py",
        "versions": {name: version(name) for name in ("trl", "torch", "transformers")},
        "longest": LONGEST,
        "most": MOST,
        "data": data,
        "losses": {name: computed(case, data) for name, case in CASES.items()},
    }
    json.dump(found, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
