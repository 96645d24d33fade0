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
    Route("POST", "/tokenize", tokenize, TokenizeBody, reads="texts", images=True, scope="inference"),
    Route("POST", "/detokenize", detokenize, DetokenizeBody, reads="texts", scope="inference"),
    Route("GET", "/tokenizer_info", tokenizer_info, scope="any"),
    Route("POST", "/v1/load_lora_adapter", load, LoadBody, scope="adapters"),
    Route("POST", "/v1/unload_lora_adapter", unload, UnloadBody, scope="adapters"),
    Route("POST", "/pooling", plan_pooling, PoolingBody, reads="prompts", scope="inference"),
    *(
        Route("POST", f"{prefix}/score", plan_score, ScoreBody, reads="prompts", scope="inference")
        for prefix in ("", "/v1")
    ),
    *(
        Route("POST", f"{prefix}/rerank", plan_rerank, RerankBody, reads="prompts", scope="inference")
        for prefix in ("", "/v1", "/v2")
    ),
)
