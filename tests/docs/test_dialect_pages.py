"""The pages of the dialects say what becomes of every field of their bodies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec import Struct

from mlx_tandem.dialects.anthropic.bodies import MessagesBody
from mlx_tandem.dialects.ollama.bodies import ChatBody, GenerateBody, Options
from mlx_tandem.dialects.responses.bodies import ResponseBody
from mlx_tandem.dialects.rollouts import generate
from mlx_tandem.dialects.rollouts.sampling import TokenSampling
from mlx_tandem.dialects.rollouts.tokens import TokensBody
from mlx_tandem.dialects.tinker import bodies as tinker

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "kind"),
    [
        ("anthropic.md", MessagesBody),
        ("ollama.md", ChatBody),
        ("ollama.md", GenerateBody),
        ("ollama.md", Options),
        ("responses.md", ResponseBody),
        *(
            ("tinker.md", kind)
            for kind in (
                tinker.SessionBody,
                tinker.ModelBody,
                tinker.LoraBody,
                tinker.StepBody,
                tinker.AdamBody,
                tinker.SaveBody,
                tinker.SaveSamplerBody,
                tinker.LoadBody,
                tinker.SamplerBody,
                tinker.SampleBody,
                tinker.SamplingBody,
            )
        ),
        ("environments.md", TokensBody),
        ("environments.md", generate.GenerateBody),
        ("environments.md", generate.SGLangSampling),
    ],
)
def test_every_field_is_in_a_table(page: str, kind: type[Struct]) -> None:
    rows = [line for line in (DOCS / page).read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    # The parameters that these routes share with others are on the page of those.
    shared = TokenSampling.__struct_fields__ if issubclass(kind, TokenSampling) else ()
    assert set(kind.__struct_fields__) - set(shared) <= named
