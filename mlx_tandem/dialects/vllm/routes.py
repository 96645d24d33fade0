"""vLLM's own routes."""

from __future__ import annotations

from mlx_tandem.dialects.route import Route
from mlx_tandem.dialects.vllm.bodies import (
    DetokenizeBody,
    LoadBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
    TokenizeBody,
    UnloadBody,
)
from mlx_tandem.dialects.vllm.lora import load, unload
from mlx_tandem.dialects.vllm.pooling import plan_pooling
from mlx_tandem.dialects.vllm.scoring import plan_rerank, plan_score
from mlx_tandem.dialects.vllm.tokenize import detokenize, tokenize, tokenizer_info

ROUTES = (
    Route("POST", "/tokenize", tokenize, TokenizeBody, reads="texts", images=True),
    Route("POST", "/detokenize", detokenize, DetokenizeBody, reads="texts"),
    Route("GET", "/tokenizer_info", tokenizer_info),
    Route("POST", "/v1/load_lora_adapter", load, LoadBody),
    Route("POST", "/v1/unload_lora_adapter", unload, UnloadBody),
    Route("POST", "/pooling", plan_pooling, PoolingBody, reads="prompts"),
    *(Route("POST", f"{prefix}/score", plan_score, ScoreBody, reads="prompts") for prefix in ("", "/v1")),
    *(Route("POST", f"{prefix}/rerank", plan_rerank, RerankBody, reads="prompts") for prefix in ("", "/v1", "/v2")),
)
