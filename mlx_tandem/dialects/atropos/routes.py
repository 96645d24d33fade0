"""The routes of Atropos' trajectory API."""

from __future__ import annotations

from mlx_tandem.dialects.atropos import handlers
from mlx_tandem.dialects.route import BROWSER, Route
from mlx_tandem.training.atropos.hub import EnvironmentBody, Registration

JSON = ("application/json",)
"""The content type of groups, which may be compressed."""

ROUTES = (
    Route("POST", "/register", handlers.register, Registration, scope="training"),
    Route("POST", "/register-env", handlers.register_env, EnvironmentBody, scope="training"),
    Route("POST", "/disconnect-env", handlers.disconnect_env, handlers.EnvironmentId, scope="training"),
    Route("GET", "/wandb_info", handlers.wandb_info, scope="training"),
    Route("GET", "/info", handlers.info, scope="training"),
    Route("GET", "/batch", handlers.refuse_browser, header=BROWSER, scope="training"),
    Route("GET", "/batch", handlers.batch, scope="training"),
    Route("GET", "/status", handlers.status, scope="training"),
    Route("GET", "/status-env", handlers.status_env, handlers.EnvironmentId, scope="training"),
    Route("POST", "/scored_data", handlers.scored_data, reads="bytes", media=JSON, scope="training"),
    Route("POST", "/scored_data_list", handlers.scored_data_list, reads="bytes", media=JSON, scope="training"),
    Route("GET", "/latest_example", handlers.latest_example, scope="training"),
    Route("GET", "/reset_data", handlers.refuse_browser, header=BROWSER, scope="training"),
    Route("GET", "/reset_data", handlers.reset_data, scope="training"),
)
