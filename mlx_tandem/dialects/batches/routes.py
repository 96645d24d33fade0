"""The routes of files and batches."""

from __future__ import annotations

from mlx_tandem.dialects.batches import handlers
from mlx_tandem.dialects.batches.bodies import BatchBody, BatchesQuery, FilesQuery
from mlx_tandem.dialects.route import FORM, Route
from mlx_tandem.dialects.training.bodies import NoBody

ROUTES = (
    Route("POST", "/v1/files", handlers.upload, reads="bytes", media=(FORM,), wakes=False, scope="inference"),
    Route("GET", "/v1/files", handlers.files, query=FilesQuery, scope="inference"),
    Route("GET", "/v1/files/{file_id}", handlers.file, scope="inference"),
    Route("DELETE", "/v1/files/{file_id}", handlers.remove, scope="inference"),
    Route("GET", "/v1/files/{file_id}/content", handlers.content, scope="inference"),
    Route("POST", "/v1/batches", handlers.create, BatchBody, wakes=False, scope="inference"),
    Route("GET", "/v1/batches", handlers.batches, query=BatchesQuery, scope="inference"),
    Route("GET", "/v1/batches/{batch_id}", handlers.batch, scope="inference"),
    Route(
        "POST",
        "/v1/batches/{batch_id}/cancel",
        handlers.cancel,
        NoBody,
        reads="steering",
        wakes=False,
        scope="inference",
    ),
)
