"""The routes of files and batches."""

from __future__ import annotations

from mlx_tandem.dialects.batches import handlers
from mlx_tandem.dialects.batches.bodies import BatchBody, BatchesQuery, FilesQuery, NoBody
from mlx_tandem.dialects.route import FORM, Route

ROUTES = (
    Route("POST", "/v1/files", handlers.upload, reads="bytes", media=(FORM,), wakes=False),
    Route("GET", "/v1/files", handlers.files, query=FilesQuery),
    Route("GET", "/v1/files/{file_id}", handlers.file),
    Route("DELETE", "/v1/files/{file_id}", handlers.remove),
    Route("GET", "/v1/files/{file_id}/content", handlers.content),
    Route("POST", "/v1/batches", handlers.create, BatchBody, wakes=False),
    Route("GET", "/v1/batches", handlers.batches, query=BatchesQuery),
    Route("GET", "/v1/batches/{batch_id}", handlers.batch),
    Route("POST", "/v1/batches/{batch_id}/cancel", handlers.cancel, NoBody, reads="steering", wakes=False),
)
