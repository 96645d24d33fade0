"""The routes for feedback."""

from __future__ import annotations

from mlx_tandem.dialects.feedback import handlers
from mlx_tandem.dialects.feedback.bodies import FeedbackBody, ListQuery
from mlx_tandem.dialects.route import Route

ROUTES = (
    Route("POST", "/v1/feedback", handlers.give, FeedbackBody, scope="inference"),
    Route("GET", "/v1/feedback", handlers.listed, query=ListQuery, scope="training"),
    Route("POST", "/v1/feedback/import", handlers.take_export, reads="bytes", media=handlers.EXPORTS, scope="training"),
)
"""The route for exports has a body of its own form, since exports are lists, or have one object a line."""
