"""The routes for adapters and aliases."""

from __future__ import annotations

from mlx_tandem.dialects.adapters import handlers
from mlx_tandem.dialects.adapters.bodies import AdapterBody, AliasBody
from mlx_tandem.dialects.route import Route

ROUTES = (
    Route("GET", "/v1/adapters", handlers.listing, scope="any"),
    Route("POST", "/v1/adapters", handlers.load, AdapterBody, scope="adapters"),
    Route("GET", "/v1/adapters/{name}", handlers.one, scope="any"),
    Route("DELETE", "/v1/adapters/{name}", handlers.unload, scope="adapters"),
    Route("GET", "/v1/aliases", handlers.aliases, scope="any"),
    Route("GET", "/v1/aliases/{name}", handlers.one_alias, scope="any"),
    Route("PUT", "/v1/aliases/{name}", handlers.put_alias, AliasBody, scope="adapters"),
    Route("DELETE", "/v1/aliases/{name}", handlers.remove_alias, scope="adapters"),
)
