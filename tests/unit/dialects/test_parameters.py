"""The table of parameters: complete, true to what is served, and the one that the documentation shows."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm import server as mlx_lm_server
from msgspec.structs import fields

from mlx_tandem.dialects.openai.accept import accepting, rules
from mlx_tandem.dialects.openai.bodies import ChatBody
from mlx_tandem.dialects.openai.parameters import BODIES, BOTH, CHAT, PARAMETERS, SCHEMAS, Route
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.strict_json import decode

ROOT = Path(__file__).resolve().parents[3]
NAMES = {p.name for p in PARAMETERS}
SERVED = {f.name for body in BODIES.values() for f in fields(body)}


def test_what_only_this_project_knows_has_no_row() -> None:
    own = {"lora_adapter", "collect_trajectory", "scoring_function", "swap_policy", "enable_thinking", "speculation"}
    own |= {"trajectory_id"}
    assert own == SERVED - NAMES


def test_each_row_is_sound() -> None:
    for row in PARAMETERS:
        assert row.schemas and set(row.schemas) <= set(SCHEMAS), row
        assert row.instead in SERVED | {""} and set(row.idle_without) <= NAMES, row
    twice = [p.name for p in PARAMETERS if [q.name for q in PARAMETERS].count(p.name) > 1]
    assert all(p.only != BOTH for p in PARAMETERS if p.name in twice)
    for route in BOTH:
        assert rules(route).keys() == NAMES


def names(schema: Any) -> set[str]:
    """The keys of a TypedDict of the `openai` package."""
    return set().union(*(vars(base).get("__annotations__", {}) for base in (schema, *schema.__orig_bases__)))


def test_every_parameter_of_openai_is_there() -> None:
    # Here and not above: it takes a second, and runs of other tests collect this module too.
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    known = {p.name for p in PARAMETERS if "O" in p.schemas}
    for module in (completion_create_params, chat_create_params):
        theirs = names(module.CompletionCreateParamsBase) | names(module.CompletionCreateParamsNonStreaming)
        assert len(theirs) > 15
        assert theirs <= known, theirs - known


def test_every_parameter_of_mlx_lm_is_there() -> None:
    source = inspect.getsource(mlx_lm_server.APIHandler)
    theirs = set(re.findall(r'body(?:\.get\(|\[)\s*"(\w+)"', source))
    assert len(theirs) > 20
    assert theirs == {p.name for p in PARAMETERS if "M" in p.schemas}


def test_what_litellm_knows_of_openai_is_there() -> None:
    constants = pytest.importorskip("litellm.constants", reason="the extra `clients` is not installed")
    own = {  # consumed by the client, or of others' routes
        "additional_drop_params", "allowed_openai_params", "api_version", "context_management", "custom_llm_provider",
        "deployment_id", "drop_params", "extra_headers", "max_retries", "thinking", "base_url", "api_base", "api_key",
        "include_server_side_tool_invocations",
    }  # fmt: skip
    theirs = set(constants.DEFAULT_CHAT_COMPLETION_PARAM_VALUES) - own
    assert theirs <= NAMES, theirs - NAMES


def test_the_documentation_shows_the_table() -> None:
    check = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "parameter_table.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stderr


VALUES = st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "none", "x", 0.5, [], ["text"], {}])


@given(
    body=st.dictionaries(st.sampled_from(sorted(NAMES)) | st.text(max_size=3), VALUES, max_size=6), chat=st.booleans()
)
def test_a_body_keeps_what_matters_whatever_the_order_of_its_keys(body: dict[str, Any], chat: bool) -> None:
    route: Route = "chat" if chat else "completions"
    accept, table = accepting(route), rules(route)

    def outcome(given: dict[str, Any]) -> Any:
        try:
            return accept(given)
        except InvalidRequest as e:
            return e.message, str(e.param)

    kept = outcome(body)
    assert outcome(dict(reversed(body.items()))) == kept
    if isinstance(kept, dict):
        assert all(body[name] == value for name, value in kept.items())
        assert not {name for name, value in kept.items() if name in table and value is None}
        assert not {name for name in kept if name in table and route not in table[name].served}
        assert {name for name in body if name not in table} <= kept.keys()
    else:
        assert route not in table[kept[1]].served and body[kept[1]] is not None


def test_a_body_that_is_no_object_is_refused_by_its_type() -> None:
    assert CHAT == ("chat",)
    for text in (b"[]", b"3", b'"x"', b"null"):
        with pytest.raises(InvalidRequest, match="the body must be of type object"):
            decode(text, ChatBody, accepting("chat"))
