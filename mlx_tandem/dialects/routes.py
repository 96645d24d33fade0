"""The routes of all dialects. Each dialect is a folder, and only this table refers to it."""

from __future__ import annotations

from mlx_tandem.dialects.adapters.routes import ROUTES as ADAPTERS
from mlx_tandem.dialects.anthropic.routes import ROUTES as ANTHROPIC
from mlx_tandem.dialects.atropos.routes import ROUTES as ATROPOS
from mlx_tandem.dialects.batches.routes import ROUTES as BATCHES
from mlx_tandem.dialects.cluster.routes import ROUTES as CLUSTER
from mlx_tandem.dialects.feedback.routes import ROUTES as FEEDBACK
from mlx_tandem.dialects.ollama.routes import ROUTES as OLLAMA
from mlx_tandem.dialects.openai.routes import ROUTES as OPENAI
from mlx_tandem.dialects.parallm.routes import ROUTES as PARALLM
from mlx_tandem.dialects.responses.routes import ROUTES as RESPONSES
from mlx_tandem.dialects.rollouts.routes import ROUTES as ROLLOUTS
from mlx_tandem.dialects.tinker.routes import ROUTES as TINKER
from mlx_tandem.dialects.training.routes import ROUTES as TRAINING
from mlx_tandem.dialects.vllm.routes import ROUTES as VLLM

ROUTES = (
    *(*ANTHROPIC, *OPENAI, *RESPONSES, *OLLAMA, *VLLM, *ROLLOUTS, *PARALLM, *ADAPTERS),
    *(*BATCHES, *TRAINING, *FEEDBACK, *CLUSTER, *TINKER, *ATROPOS),
)
