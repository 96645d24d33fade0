"""The routes for adapters and aliases."""

from __future__ import annotations

from mlx_tandem.dialects.adapters import handlers
from mlx_tandem.dialects.adapters.bodies import AdapterBody, AliasBody
from mlx_tandem.dialects.route import Route

ROUTES = (
    Route("GET", "/v1/adapters", handlers.listing),
    Route("POST", "/v1/adapters", handlers.load, AdapterBody),
    Route("GET", "/v1/adapters/{name}", handlers.one),
    Route("DELETE", "/v1/adapters/{name}", handlers.unload),
    Route("GET", "/v1/aliases", handlers.aliases),
    Route("GET", "/v1/aliases/{name}", handlers.one_alias),
    Route("PUT", "/v1/aliases/{name}", handlers.put_alias, AliasBody),
    Route("DELETE", "/v1/aliases/{name}", handlers.remove_alias),
)
