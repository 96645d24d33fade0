"""The routes for rollouts. TRL's versions differ in the slash at the end of two of them."""

from __future__ import annotations

from mlx_tandem.dialects.rollouts import steering, trl
from mlx_tandem.dialects.rollouts.generate import GenerateBody, plan_generate
from mlx_tandem.dialects.rollouts.tokens import TokensBody, plan_tokens
from mlx_tandem.dialects.route import Route
from mlx_tandem.dialects.training.bodies import NoBody
from mlx_tandem.dialects.vllm.bodies import LoadBody

ROUTES = (
    Route("POST", "/inference/v1/generate", plan_tokens, TokensBody, reads="prompts", scope="inference"),
    Route("POST", "/generate", plan_generate, GenerateBody, reads="prompts", scope="inference"),
    Route("POST", "/generate/", trl.plan_generate, trl.TRLGenerateBody, reads="prompts", scope="inference"),
    Route("POST", "/chat/", trl.plan_chat, trl.TRLChatBody, reads="prompts", scope="inference"),
    Route("POST", "/get_sequence_logprobs/", trl.plan_sequences, trl.SequencesBody, reads="prompts", scope="inference"),
    Route("POST", "/load_lora_adapter", steering.load, LoadBody, scope="adapters"),
    Route("POST", "/pause", steering.pause, NoBody, steering.PauseQuery, reads="steering", scope="admin"),
    Route("POST", "/resume", steering.resume, NoBody, reads="steering", scope="admin"),
    Route("GET", "/is_paused", steering.is_paused, scope="any"),
    # Newer versions of TRL ask how weights are sent.
    Route("GET", "/server_info", steering.refuse_weights, scope="adapters"),
    *(Route("POST", path, steering.refuse_weights, scope="adapters") for path in steering.WEIGHT_ROUTES),
    *(
        route
        for end in ("", "/")
        for route in (
            Route("GET", f"/get_world_size{end}", steering.world_size, scope="any"),
            Route(
                "POST",
                f"/reset_prefix_cache{end}",
                steering.reset_prefix_cache,
                NoBody,
                reads="steering",
                scope="admin",
            ),
        )
    ),
)
