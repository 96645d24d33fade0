"""The routes of all dialects. Each dialect is a folder, and only this table refers to it."""

from __future__ import annotations

from mlx_tandem.dialects.adapters.routes import ROUTES as ADAPTERS
from mlx_tandem.dialects.openai.routes import ROUTES as OPENAI
from mlx_tandem.dialects.parallm.routes import ROUTES as PARALLM
from mlx_tandem.dialects.training.routes import ROUTES as TRAINING
from mlx_tandem.dialects.vllm.routes import ROUTES as VLLM

ROUTES = (*OPENAI, *VLLM, *PARALLM, *ADAPTERS, *TRAINING)
