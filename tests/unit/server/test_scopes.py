"""The scope of every route, in one table for reviewers, and that no route is without one."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.applications import Starlette

from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.route import Route
from mlx_tandem.generation.caller import SCOPES
from mlx_tandem.server.app import DialectRoute, create_app
from tests.serving import demo_config

TABLE = {
    "public": """
        GET /health
        GET /health/
        GET /readyz
        GET /livez
        GET /liveness
    """,
    "any": """
        GET /v1/models
        GET /v1/models/{model:path}
        GET /models
        GET /models/{model:path}
        GET /api/tags
        GET /api/ps
        POST /api/show
        GET /api/version
        GET /tokenizer_info
        GET /is_paused
        GET /get_world_size
        GET /get_world_size/
        GET /v1/adapters
        GET /v1/adapters/{name}
        GET /v1/aliases
        GET /v1/aliases/{name}
        GET /version
        GET /openapi.json
    """,
    "inference": """
        POST /v1/messages
        POST /v1/messages/count_tokens
        POST /v1/chat/completions
        POST /v1/completions
        POST /v1/embeddings
        POST /chat/completions
        POST /completions
        POST /embeddings
        POST /v1/responses
        GET /v1/responses/{response_id}
        GET /v1/responses/{response_id}/input_items
        DELETE /v1/responses/{response_id}
        POST /responses
        GET /responses/{response_id}
        GET /responses/{response_id}/input_items
        DELETE /responses/{response_id}
        POST /api/chat
        POST /api/generate
        POST /api/embed
        POST /api/embeddings
        POST /tokenize
        POST /detokenize
        POST /pooling
        POST /score
        POST /v1/score
        POST /rerank
        POST /v1/rerank
        POST /v2/rerank
        POST /inference/v1/generate
        POST /generate
        POST /generate/
        POST /chat/
        POST /get_sequence_logprobs/
        POST /v1/perplexity
        POST /v1/feedback
        POST /v1/files
        GET /v1/files
        GET /v1/files/{file_id}
        DELETE /v1/files/{file_id}
        GET /v1/files/{file_id}/content
        POST /v1/batches
        GET /v1/batches
        GET /v1/batches/{batch_id}
        POST /v1/batches/{batch_id}/cancel
    """,
    "adapters": """
        POST /v1/load_lora_adapter
        POST /v1/unload_lora_adapter
        POST /load_lora_adapter
        GET /server_info
        POST /update_weights
        POST /init_broadcaster
        POST /init_weight_transfer_engine
        POST /start_weight_update
        POST /finish_weight_update
        POST /init_communicator/
        POST /update_named_param/
        POST /batch_update_named_params/
        POST /close_communicator/
        POST /v1/adapters
        DELETE /v1/adapters/{name}
        PUT /v1/aliases/{name}
        DELETE /v1/aliases/{name}
    """,
    "training": """
        POST /training/checkpoint
        POST /model/switch-lora
        GET /debug/training
        POST /v1/training/update
        GET /v1/training/jobs/{id}
        GET /v1/trajectories/{id}
        POST /v1/trajectories/{id}/reward
        DELETE /v1/trajectories/{id}
        GET /v1/training/status
        GET /v1/training/history
        POST /v1/training/start
        POST /v1/training/stop
        POST /v1/training/checkpoint
        POST /v1/training/rollback
        GET /v1/feedback
        POST /v1/feedback/import
        POST /api/v1/client/config
        POST /api/v1/client/dynamic_config
        POST /api/v1/telemetry
        GET /api/v1/healthz
        GET /api/v1/get_server_capabilities
        POST /api/v1/create_session
        POST /api/v1/session_heartbeat
        POST /api/v1/sessions/{id}/finish
        GET /api/v1/sessions/{id}
        GET /api/v1/sessions
        POST /api/v1/create_model
        POST /api/v1/load_weights
        POST /api/v1/get_info
        POST /api/v1/unload_model
        POST /api/v1/forward_backward
        POST /api/v1/optim_step
        POST /api/v1/save_weights
        POST /api/v1/save_weights_for_sampler
        POST /api/v1/create_sampling_session
        GET /api/v1/samplers/{id}
        POST /api/v1/join_sampling_session
        POST /api/v1/asample
        POST /api/v1/retrieve_future
        POST /api/v1/retrieve_futures
        POST /api/v1/cancel_future
        POST /api/v1/weights_info
        GET /api/v1/training_runs
        GET /api/v1/training_runs/{id}
        GET /api/v1/training_runs/{id}/checkpoints
        DELETE /api/v1/training_runs/{id}/checkpoints/{kind}/{name}
        PUT /api/v1/training_runs/{id}/checkpoints/{kind}/{name}/ttl
        POST /api/v1/training_runs/{id}/checkpoints/{kind}/{name}/publish
        DELETE /api/v1/training_runs/{id}/checkpoints/{kind}/{name}/publish
        GET /api/v1/checkpoints
        POST /register
        POST /register-env
        POST /disconnect-env
        GET /wandb_info
        GET /info
        GET /batch
        GET /status
        GET /status-env
        POST /scored_data
        POST /scored_data_list
        GET /latest_example
        GET /reset_data
    """,
    "metrics": """
        GET /v1/cluster/status
        GET /v1/overview
        GET /v1/engine/metrics
        GET /debug/metrics
        GET /v1/cache/stats
        GET /v1/spec_decode/metrics
        GET /metrics
    """,
    "admin": """
        POST /pause
        POST /resume
        POST /reset_prefix_cache
        POST /reset_prefix_cache/
        GET /v1/cluster/base
        GET /v1/cluster/versions
        POST /v1/cluster/versions
        POST /v1/cluster/contributions
        GET /v1/cluster/files/{sha256}
        PUT /v1/cluster/files/{sha256}
        GET /v1/cluster/trajectories
        POST /v1/cluster/trajectories
    """,
}
"""The routes by the scope that a key needs. public: no key is needed. any: every key may ask."""


@pytest.fixture(scope="module")
def app() -> Starlette:
    def launch() -> Any:
        raise AssertionError("nothing is started here")

    return create_app(ServerFront(demo_config(), launch))


def test_every_route_has_the_scope_of_the_table(app: Starlette) -> None:
    found: dict[str, set[str]] = {}
    for route in app.routes:
        assert isinstance(route, DialectRoute), f"{route} is not made of a Route, which declares a scope"
        assert route.methods is not None and route.key_scope is not None
        found.setdefault(route.key_scope, set()).update(f"{m} {route.path}" for m in route.methods if m != "HEAD")
    assert found == {
        scope: {line.strip() for line in lines.split("\n") if line.strip()} for scope, lines in TABLE.items()
    }
    assert set(found) == {*SCOPES, "any", "public"}


@pytest.mark.parametrize("fields", [{}, {"scope": None}, {"scope": ""}, {"scope": "everything"}])
def test_a_route_without_a_scope_cannot_be_made(fields: Any) -> None:
    with pytest.raises(TypeError, match=r'Route\("GET", "/new", …\) declares no scope: write scope= with one of'):
        Route("GET", "/new", print, **fields)
