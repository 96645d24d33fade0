"""The routes for learning."""

from __future__ import annotations

from mlx_tandem.dialects.route import Route
from mlx_tandem.dialects.training import handlers
from mlx_tandem.dialects.training.bodies import (
    AdapterQuery,
    CheckpointBody,
    NoBody,
    RewardBody,
    RollbackBody,
    UpdateBody,
)

ROUTES = (
    Route("POST", "/v1/training/update", handlers.update, UpdateBody, AdapterQuery, status=202, scope="training"),
    Route("GET", "/v1/training/jobs/{id}", handlers.job, scope="training"),
    Route("GET", "/v1/trajectories/{id}", handlers.trajectory, scope="training"),
    Route("POST", "/v1/trajectories/{id}/reward", handlers.reward, RewardBody, scope="training"),
    Route("DELETE", "/v1/trajectories/{id}", handlers.forget, scope="training"),
    Route("GET", "/v1/training/status", handlers.status, query=AdapterQuery, scope="training"),
    Route("GET", "/v1/training/history", handlers.history, query=AdapterQuery, scope="training"),
    Route("POST", "/v1/training/start", handlers.start, NoBody, AdapterQuery, reads="steering", scope="training"),
    Route("POST", "/v1/training/stop", handlers.stop, NoBody, AdapterQuery, reads="steering", scope="training"),
    Route(
        "POST",
        "/v1/training/checkpoint",
        handlers.checkpoint,
        CheckpointBody,
        AdapterQuery,
        reads="steering",
        scope="training",
    ),
    Route(
        "POST",
        "/v1/training/rollback",
        handlers.rollback,
        RollbackBody,
        AdapterQuery,
        reads="steering",
        scope="training",
    ),
)
