"""Numbers end in JSON under a grammar, whatever a model would like to write, and nothing else is cut short."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer as Backend

from mlx_tandem import demo
from mlx_tandem.engine.grammars.compiling import open_tokenizer
from mlx_tandem.engine.grammars.digits import MOST_DIGITS, DigitLimitedGrammars, Digits
from mlx_tandem.engine.masks import Place, allows
from mlx_tandem.generation.grammar.constraint import Constraint, Pattern, Rules, Schema
from mlx_tandem.generation.grammar.lark import grammar_of
from mlx_tandem.types import Grammar, Request, SamplingParams
from tests.engine.workloads import mask_at

END, VOCAB = 2, 1024
TOKENIZER = open_tokenizer(Path(demo.MODEL_PATH), VOCAB, (END,))
BACKEND = Backend.from_file(str(Path(demo.MODEL_PATH) / "tokenizer.json"))
TEXTS = [TOKENIZER.decode_bytes([token]) for token in range(VOCAB)]
DIGITS = [token for token, text in enumerate(TEXTS) if text[:1].isdigit()]
PROMPT = tuple(BACKEND.encode("7" * 100).ids)


def form(value: Any) -> Schema:
    return Schema(json.dumps(value).encode())


def written(constrained: Any, wanted: list[int], most: int, said: str = "", seed: int = 0) -> tuple[str, bool]:
    """What comes of a model that takes the first of `wanted` that may follow, else any token; and whether it ended."""
    grammars, random = DigitLimitedGrammars(lambda: TOKENIZER, VOCAB, lambda: None), Random(seed)
    text = grammar_of(Constraint(constrained, "field"), {})
    request = Request(1, PROMPT, SamplingParams(max_tokens=most), grammar=Grammar(text.encode(), "field"))
    while not grammars.hold(request):
        while not list(grammars.poll()):
            pass
    output = list(BACKEND.encode(said).ids)
    try:
        for _ in range(most):
            mask = mask_at(grammars, Place(request, 0, [*PROMPT, *output]))
            assert any(mask)
            free = [token for token in range(VOCAB) if allows(mask, token)]
            token = next((token for token in wanted if allows(mask, token)), random.choice(free))
            if token == END:
                return BACKEND.decode(output, skip_special_tokens=False), True
            output.append(token)
        return BACKEND.decode(output, skip_special_tokens=False), False
    finally:
        grammars.close()


NUMBERS: list[Any] = [
    {"type": "number"},
    {"type": "integer"},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": -3.5},
    {"type": "integer", "maximum": -17},
    {"type": "integer", "multipleOf": 7},
    {"type": ["null", "number"]},
    {"anyOf": [{"type": "number"}, {"type": "boolean"}]},
    {"$ref": "#/$defs/n", "$defs": {"n": {"type": "number"}}},
]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("schema", NUMBERS, ids=str)
def test_a_number_ends_although_the_model_wants_digits_only(schema: Any, seed: int) -> None:
    wanted = list(DIGITS)
    Random(seed).shuffle(wanted)
    text, ended = written(form(schema), wanted, 6 * MOST_DIGITS, seed=seed)
    assert ended, text
    assert max(map(len, re.findall("[0-9]+", text))) < MOST_DIGITS + 8
    assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


@pytest.mark.parametrize("schema", [{}, {"type": "object"}, {"type": "object", "properties": {"a": {}}}], ids=str)
def test_numbers_in_free_json_end(schema: Any) -> None:
    then = [token for byte in (b".", b",", b"]", b"}") for token, text in enumerate(TEXTS) if text == byte]
    text, ended = written(form(schema), [*DIGITS, *then], 3 * MOST_DIGITS, said='{"a": ["", ' if schema else "")
    assert max(map(len, re.findall("[0-9]+", text))) < MOST_DIGITS + 8
    assert ended == (schema == {})


LONG = "3" * (3 * MOST_DIGITS)


@pytest.mark.parametrize(
    ("constrained", "said", "text"),
    [
        (form({"type": "string"}), '"', None),
        (form({"type": "object"}), '{"', None),
        (form({"type": "string", "pattern": "^[0-9]{200}$"}), "", '"' + "0" * 200 + '"'),
        (Pattern("[0-9]{200}"), "", "0" * 200),
        (Rules('start: "n" /[0-9]{200}/'), "n", "n" + "0" * 200),
    ],
    ids=["string", "key", "pattern", "regex", "grammar"],
)
def test_other_digits_are_as_many_as_the_model_wants(constrained: Any, said: str, text: str | None) -> None:
    zero = [token for token, own in enumerate(TEXTS) if own == b"0"]
    found, ended = written(constrained, zero, 220, said=said)
    assert (found == said + "0" * 220 and not ended) if text is None else (found == text and ended)


def test_a_constant_of_many_digits_can_be_written() -> None:
    text, ended = written(Rules(f'start: "{LONG}" %json {{"type": "null"}}'), DIGITS, 4 * MOST_DIGITS)
    assert text == f"{LONG}null" and ended


def test_every_double_and_long_integers_can_be_written() -> None:
    digits = Digits(TOKENIZER)
    random = Random(5)
    doubles = [repr(random.uniform(-1, 1) * 10.0 ** random.randint(-300, 300)) for _ in range(50)]
    for text in (*doubles, "5e-324", "1.7976931348623157e+308", str(2**256 - 1), str(-(2**63))):
        tokens = BACKEND.encode(text).ids
        assert not any(digits.is_at_limit(tokens[:end], 0) for end in range(len(tokens)))
