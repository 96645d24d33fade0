"""Contents in the form that a chat template reads: texts, lists of parts, or both."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from mlx_tandem import demo
from mlx_tandem.errors import ModelError
from mlx_tandem.generation.parts import IMAGE_MARK
from mlx_tandem.generation.templates.client import ChatTemplate
from mlx_tandem.generation.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(demo.MODEL_PATH)
IMAGE: dict[str, Any] = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}
TEXT = {"role": "assistant", "content": "b"}

LISTS = """{% for m in messages %}[{{ m.role }}]{% for part in m.content | selectattr('type', 'equalto', 'image') %}\
<image>{% endfor %}{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}\
{% endfor %}"""
TEXTS = "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% endfor %}"
PRINTS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
BOTH = """{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}\
{% for part in m.content %}{{ part.text if part.type == 'text' else '<image>' }}{% endfor %}{% endif %}{% endfor %}"""


def rendered(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    async def run() -> str:
        template = ChatTemplate(source, TOKENIZER)
        try:
            await template.check()
            return "".join(text for text, _ in await template.render(messages, options))
        finally:
            await template.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("source", "image"),
    [(LISTS, "<image>"), (BOTH, "<image>"), (TEXTS, f"{IMAGE_MARK}\n"), (PRINTS, f"{IMAGE_MARK}\n")],
    ids=["lists", "both", "texts", "prints"],
)
def test_every_template_prints_texts_and_images(source: str, image: str) -> None:
    assert rendered(source, [IMAGE, TEXT]) == f"[user]{image}a[assistant]b"
    assert rendered(source, [IMAGE, TEXT], continue_final_message=True) == f"[user]{image}a[assistant]b"
    turned = {"role": "user", "content": IMAGE["content"][::-1]}
    printed = f"{image}a" if source == LISTS else f"a{image}"
    assert rendered(source, [turned], continue_final_message=True) == f"[user]{printed}"


def test_a_template_in_the_file_of_a_processor(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "for texts"}))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "for images"}))
    found = ChatTemplate.load(tmp_path, TOKENIZER)
    assert found is not None and found.source == "for images"
    (tmp_path / "chat_template.jinja").write_text("newer")
    found = ChatTemplate.load(tmp_path, TOKENIZER)
    assert found is not None and found.source == "newer"


def test_a_file_of_a_processor_whose_template_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(ModelError, match=r"chat_template\.json"):
        ChatTemplate.load(tmp_path, TOKENIZER)
