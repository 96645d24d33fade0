"""MLX ParaLLM's routes."""

from __future__ import annotations

from mlx_tandem.dialects.parallm.perplexity import PerplexityBody, plan_perplexity
from mlx_tandem.dialects.route import PLAIN, Route
from mlx_tandem.dialects.training import handlers as training
from mlx_tandem.dialects.training.bodies import AdapterQuery, CheckpointBody, SwitchBody

ROUTES = (
    Route("POST", "/v1/perplexity", plan_perplexity, PerplexityBody, reads="prompts", scope="inference"),
    Route(
        "POST",
        "/training/checkpoint",
        training.checkpoint,
        CheckpointBody,
        AdapterQuery,
        reads="steering",
        media=PLAIN,
        scope="training",
    ),
    Route(
        "POST",
        "/model/switch-lora",
        training.switch,
        SwitchBody,
        AdapterQuery,
        reads="steering",
        media=PLAIN,
        scope="training",
    ),
    Route("GET", "/debug/training", training.debug, query=AdapterQuery, scope="training"),
)
