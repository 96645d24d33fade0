"""What load balancers and dashboards read."""

from __future__ import annotations

import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlx_tandem.engine.messages import Occupancy, Output, Submit
from mlx_tandem.types import Delta
from tests.api.scripted import scripted_server

BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def test_the_states_of_a_pool_that_fills_up():
    """`degraded` begins at 72 % of the threshold."""
    with scripted_server(memory_pressure_threshold=0.5) as (client, peer, _):
        thread = threading.Thread(target=client.post, args=("/v1/chat/completions",), kwargs={"json": BODY})
        thread.start()
        request = peer.hear(Submit).request
        for used, state, code in (
            (359, "ok", 200),
            (360, "degraded", 200),
            (499, "degraded", 200),
            (500, "overloaded", 503),
            (1000, "overloaded", 503),
            (0, "ok", 200),
        ):
            peer.say(Occupancy(1, 0, used, 1000 - used))
            while (health := client.get("/health")).json()["utilization"] != used / 1000:
                pass
            assert (health.json()["status"], health.status_code) == (state, code)
            assert health.json()["threshold"] == 0.5
            ready = client.get("/readyz")
            assert (ready.json(), ready.status_code) == ({"status": state}, code)
            assert client.get("/livez").json() == {"status": "ok"}
        peer.say(Output([Delta(request.id, 0, (301,), None, "stop")]))
        thread.join()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("active_sequences", 3),
        ("queued_requests", 2),
        ("used_blocks", 10),
        ("free_blocks", 54),
        ("cache_hit_rate", 0),
        ("dist_fatal", 0),
        ("shutdown_clean", 1),
    ],
)
def test_gauges_under_the_names_of_mlx_lm_server(loaded, name, value):
    assert loaded[name] == value


@pytest.fixture(scope="module")
def loaded() -> dict[str, float]:
    with scripted_server() as (client, peer, _):
        peer.say(Occupancy(3, 2, 10, 54))
        while True:
            families = text_string_to_metric_families(client.get("/metrics").text)
            values = {s.name: s.value for f in families for s in f.samples}
            if values["used_blocks"]:
                return values
