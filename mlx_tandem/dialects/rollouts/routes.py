"""The routes for rollouts. TRL's versions differ in the slash at the end of two of them."""

from __future__ import annotations

from mlx_tandem.dialects.rollouts import steering, trl
from mlx_tandem.dialects.rollouts.generate import GenerateBody, plan_generate
from mlx_tandem.dialects.rollouts.tokens import TokensBody, plan_tokens
from mlx_tandem.dialects.route import Route
from mlx_tandem.dialects.training.bodies import NoBody
from mlx_tandem.dialects.vllm.bodies import LoadBody

ROUTES = (
    Route("POST", "/inference/v1/generate", plan_tokens, TokensBody, reads="prompts"),
    Route("POST", "/generate", plan_generate, GenerateBody, reads="prompts"),
    Route("POST", "/generate/", trl.plan_generate, trl.TRLGenerateBody, reads="prompts"),
    Route("POST", "/chat/", trl.plan_chat, trl.TRLChatBody, reads="prompts"),
    Route("POST", "/get_sequence_logprobs/", trl.plan_sequences, trl.SequencesBody, reads="prompts"),
    Route("POST", "/load_lora_adapter", steering.load, LoadBody),
    Route("POST", "/pause", steering.pause, NoBody, steering.PauseQuery, reads="steering"),
    Route("POST", "/resume", steering.resume, NoBody, reads="steering"),
    Route("GET", "/is_paused", steering.is_paused),
    Route("GET", "/server_info", steering.refuse_weights),  # newer versions of TRL ask how weights are sent
    *(Route("POST", path, steering.refuse_weights) for path in steering.WEIGHT_ROUTES),
    *(
        route
        for end in ("", "/")
        for route in (
            Route("GET", f"/get_world_size{end}", steering.world_size),
            Route("POST", f"/reset_prefix_cache{end}", steering.reset_prefix_cache, NoBody, reads="steering"),
        )
    ),
)
