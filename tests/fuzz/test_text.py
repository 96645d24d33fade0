"""What the front reads of a model folder, and templates: each is taken, or refused by its file and field.

What was taken encodes and decodes any text, or refuses it by the parameter it came in.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from mlx_tandem.errors import InvalidRequest, ModelError
from mlx_tandem.text.defaults import sampling_defaults
from mlx_tandem.text.template import ChatTemplate
from mlx_tandem.text.tokenizer import Tokenizer
from tests.fuzz import templates, tokenizers
from tests.fuzz.folders import Case
from tests.fuzz.judge import Tally, judge, named
from tests.texts import is_safe
from tests.unit.text_tools import byte_level, sentencepiece

CASES = 1000
TEMPLATES = 2000
SAID = ("", "hello world", "<|im_end|>", "é🦊\x00", " a  b ", "\U000f0000", "x" * 300)


def use(folder: Path, rng: Random) -> None:
    """Read a folder as a server does at its start, and do with it what requests do."""
    tokenizer = Tokenizer.load(folder)
    template = ChatTemplate.load(folder, tokenizer)
    assert all(isinstance(value, int | float) for value in sampling_defaults(folder).values())
    for text in SAID:
        for encode in (tokenizer.encode, tokenizer.encode_plain):
            _allow_refusal(lambda encode=encode, text=text: tokenizer.decode(encode(text)))
        _allow_refusal(lambda text=text: tokenizer.encode(text, add_special_tokens=True))
    for token in (*range(20), *range(395, 410), 10**6, 2**31 - 1):
        assert isinstance(tokenizer.token_bytes(token), bytes)
        tokenizer.piece(token)
    if template is not None:
        render(template, rng)


def render(template: ChatTemplate, rng: Random) -> None:
    """Encode conversations; what the template cannot do is refused by `messages`."""
    for _ in range(2):
        conversation = templates.messages(rng)
        _allow_refusal(lambda conversation=conversation: template.encode(conversation, {"enable_thinking": True}))


def _allow_refusal(do: Callable[[], object]) -> None:
    try:
        do()
    except InvalidRequest as e:
        if not is_safe(e.message):
            raise AssertionError(ascii(e.message)) from e


@pytest.mark.parametrize("part", range(4))
def test_a_tokenizer_is_read_or_refused_by_its_file_and_field(part: int, tmp_path: Path) -> None:
    tally = Tally()
    for seed in range(part * CASES, (part + 1) * CASES):
        rng = Random(f"tokenizer {seed}")
        case = tokenizers.broken(rng)
        with named("tokenizer", seed, case):
            folder = case.write(tmp_path / "model")
            judge(tally, case, tokenizers.FILES, lambda folder=folder, rng=rng: use(folder, rng))
    assert tally.cases == CASES
    assert tally.accepted > CASES / 5, tally.refused
    assert all(tally.refused[name] > CASES / 100 for name in tokenizers.FILES), tally.refused


@pytest.mark.parametrize("part", range(2))
def test_a_template_is_taken_or_refused(part: int, tmp_path: Path) -> None:
    tally = Tally()
    for seed in range(part * TEMPLATES, (part + 1) * TEMPLATES):
        rng = Random(f"template {seed}")
        text = templates.source(rng)
        case = Case({tokenizers.TEMPLATE: text.encode()})
        folder = case.write(tmp_path / "model")

        def read(folder: Path = folder, rng: Random = rng) -> None:
            template = ChatTemplate.load(folder, rng.choice((byte_level, sentencepiece))())
            assert template is not None
            render(template, rng)

        with named(f"template {text!a}", seed, case):
            judge(tally, case, [tokenizers.TEMPLATE], read)
    assert tally.cases == TEMPLATES
    assert tally.accepted > TEMPLATES / 5 and tally.refused.total() > TEMPLATES / 5


def test_what_nobody_has_broken_is_read(tmp_path: Path) -> None:
    for seed in range(20):
        rng = Random(f"valid {seed}")
        case = tokenizers.valid(rng)
        with named("valid tokenizer", seed, case):
            folder = case.write(tmp_path / "model")
            use(folder, rng)
            template = ChatTemplate.load(folder, Tokenizer.load(folder))
            assert template is not None and template.encode([{"role": "user", "content": "hello"}])


def test_a_refusal_at_start_is_one_of_a_model_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        Tokenizer.load(tmp_path)
