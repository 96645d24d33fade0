"""What the front reads of a model folder, and templates: each is taken, or refused by its file and field.

What was taken encodes and decodes any text, or refuses it by the parameter it came in.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from mlx_tandem.errors import InvalidRequest, ModelError
from mlx_tandem.generation.defaults import sampling_defaults
from mlx_tandem.generation.templates.client import ChatTemplate
from mlx_tandem.generation.templates.messages import Failed, Setup
from mlx_tandem.generation.templates.rendering import Renderer, said
from mlx_tandem.generation.tokenizer import Tokenizer
from tests.fuzz import templates, tokenizers
from tests.fuzz.folders import Case
from tests.fuzz.judge import Tally, judge, named
from tests.texts import is_safe
from tests.unit.text_tools import byte_level, sentencepiece

CASES = 500
TEMPLATES = 3000
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
        render(folder, template, tokenizer, rng)


def render(folder: Path, template: ChatTemplate, tokenizer: Tokenizer, rng: Random) -> None:
    """Encode conversations by the code that a template's worker process runs, in this one."""
    encode = compiled(folder, template, tokenizer)
    for _ in range(2):
        conversation = templates.messages(rng)
        _allow_refusal(lambda conversation=conversation: encode(conversation, enable_thinking=True))


def compiled(folder: Path, template: ChatTemplate, tokenizer: Tokenizer) -> Callable[..., list[int]]:
    """Return what makes token ids of a conversation. Raises ModelError for a text that is no template."""
    try:
        setup = Setup(template.source, tokenizer.special_texts(), tuple(tokenizer.special_tokens))
        renderer = Renderer(setup)
    except Exception as e:  # what the worker says of it, the client says like this
        where = folder / tokenizers.TEMPLATE
        raise ModelError(f"{where} is not a valid template: {said(e)}", param="chat_template") from e

    def encode(messages: list[dict[str, object]], **options: bool) -> list[int]:
        answer = renderer.render({"messages": messages, "add_generation_prompt": True, **options})
        if isinstance(answer, Failed):
            raise InvalidRequest(f"the model's chat template: {answer.kind} {answer.detail}", param="messages")
        return tokenizer.encode_parts(answer.parts)

    return encode


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
            tokenizer = rng.choice((byte_level, sentencepiece))()
            template = ChatTemplate.load(folder, tokenizer)
            assert template is not None
            render(folder, template, tokenizer, rng)

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
            tokenizer = Tokenizer.load(folder)
            template = ChatTemplate.load(folder, tokenizer)
            assert template is not None
            assert compiled(folder, template, tokenizer)([{"role": "user", "content": "hello"}])


def test_a_refusal_at_start_is_one_of_a_model_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        Tokenizer.load(tmp_path)
