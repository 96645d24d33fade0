"""The routes of responses. Each of them also exists without /v1, for clients whose base URL leaves it out."""

from __future__ import annotations

from mlx_tandem.dialects.responses.bodies import ItemsQuery, ResponseBody, RetrieveQuery
from mlx_tandem.dialects.responses.plans import plan_response
from mlx_tandem.dialects.responses.stored import delete, input_items, retrieve
from mlx_tandem.dialects.route import Route

ROUTES = tuple(
    route
    for prefix in ("/v1", "")
    for route in (
        Route(
            "POST", f"{prefix}/responses", plan_response, ResponseBody, reads="prompts", images=True, scope="inference"
        ),
        Route("GET", f"{prefix}/responses/{{response_id}}", retrieve, query=RetrieveQuery, scope="inference"),
        Route(
            "GET", f"{prefix}/responses/{{response_id}}/input_items", input_items, query=ItemsQuery, scope="inference"
        ),
        Route("DELETE", f"{prefix}/responses/{{response_id}}", delete, scope="inference"),
    )
)
