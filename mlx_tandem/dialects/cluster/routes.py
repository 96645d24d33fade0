"""The routes of a leader, and the status of each of several machines."""

from __future__ import annotations

from mlx_tandem.dialects.cluster import handlers as h
from mlx_tandem.dialects.route import BROWSER, Route
from mlx_tandem.training.cluster.wire import PATH

BYTES = ("application/octet-stream",)

ROUTES = (
    Route("GET", f"{PATH}/status", h.status, scope="metrics"),
    Route("GET", f"{PATH}/base", h.base, scope="admin"),
    Route("GET", f"{PATH}/versions", h.versions, query=h.FeedQuery, scope="admin"),
    Route("POST", f"{PATH}/versions", h.publish, reads="bytes", media=BYTES, scope="admin"),
    Route("POST", f"{PATH}/contributions", h.contribute, reads="bytes", media=BYTES, scope="admin"),
    Route("GET", f"{PATH}/files/{{sha256}}", h.read, query=h.ReadQuery, scope="admin"),
    Route("PUT", f"{PATH}/files/{{sha256}}", h.write, query=h.WriteQuery, reads="bytes", media=BYTES, scope="admin"),
    Route("GET", f"{PATH}/trajectories", h.refuse_browser, header=BROWSER, scope="admin"),
    Route("GET", f"{PATH}/trajectories", h.take, query=h.TakeQuery, scope="admin"),
    Route("POST", f"{PATH}/trajectories", h.collect, reads="bytes", media=BYTES, scope="admin"),
)
