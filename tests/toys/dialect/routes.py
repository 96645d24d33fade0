"""The toy dialect's one route and its body."""

from __future__ import annotations

from msgspec import Struct

from mlx_tandem.dialects.plan import Plan
from mlx_tandem.dialects.route import ErrorForm, Route
from mlx_tandem.generation.front import Front
from mlx_tandem.generation.prompted import Prompted
from mlx_tandem.types import SamplingParams
from tests.toys.dialect.renderer import ToyRenderer, error_line


class ToyBody(Struct, forbid_unknown_fields=True):
    """A text to go on with."""

    after: str
    stream: bool = False


async def go_on(front: Front, body: ToyBody) -> Plan:
    """Return the plan of a reply of at most eight tokens, which the base model draws."""
    prompt = await front.text_prompt(body.after, "after")
    prompted = Prompted([prompt], [None], SamplingParams(max_tokens=8), parser=front.parser)
    return Plan(prompted, await front.models.select(None), ToyRenderer(), body.stream)


ROUTES = (Route("POST", "/toy", go_on, ToyBody, reads="prompts", errors=ErrorForm(error_line, {}), scope="inference"),)
