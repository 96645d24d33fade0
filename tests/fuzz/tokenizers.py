"""The files of a model folder that the front reads, with something wrong in them: tokenizer, templates, defaults."""

from __future__ import annotations

import json
from functools import cache
from random import Random
from typing import Any

from tests.fuzz import templates, values
from tests.fuzz.folders import Case
from tests.unit.text_tools import byte_level, sentencepiece

TOKENIZER, CONFIG, TEMPLATE, DEFAULTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
FILES = (TOKENIZER, CONFIG, TEMPLATE, DEFAULTS)

_REGEXES = ("", "(", "[", "\\p{Nope}", "a{99999}", "(?<!a*)b", "\\", "(?i)x", "\\p{L}+|\\s+", "^$", ".", "\ud800")
_TYPES = ("BPE", "WordPiece", "WordLevel", "Unigram", "ByteLevel", "Metaspace", "Sequence", "Replace", "Fuse", "Strip")


@cache
def _text(kind: str) -> str:
    return (byte_level() if kind == "bytes" else sentencepiece())._backend.to_str()


def valid(rng: Random) -> Case:
    """The front's part of a model folder that is right."""
    config: dict[str, Any] = {
        "eos_token": {"content": "<|im_end|>", "lstrip": False},
        "bos_token": None,
        "pad_token": "<|endoftext|>",
        "added_tokens_decoder": {"400": {"content": "<|im_start|>", "special": True}},
        "additional_special_tokens": ["<|im_start|>"],
        "model_max_length": 1e30,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if rng.random() < 0.5:
        config["chat_template"] = rng.choice((templates.CHATML, [{"name": "default", "template": templates.CHATML}]))
    defaults = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "eos_token_id": [1, 2], "transformers_version": "5"}
    return Case(
        {
            TOKENIZER: _text(rng.choice(("bytes", "pieces"))).encode(),
            CONFIG: json.dumps(config).encode(),
            TEMPLATE: templates.CHATML.encode(),
            DEFAULTS: json.dumps(defaults).encode(),
        }
    )


def broken(rng: Random) -> Case:
    """A folder with one thing wrong, or a few."""
    case = valid(rng)
    if rng.random() < 0.3:  # then the one in the configuration counts
        case.files[TEMPLATE] = "nothing"
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choice((TOKENIZER, TOKENIZER, TOKENIZER, CONFIG, CONFIG, DEFAULTS, TEMPLATE))
        if not isinstance(case.files[name], bytes):
            continue
        what = rng.random()
        if what < 0.8 and name != TEMPLATE:
            _change(rng, case, name)
        elif what < 0.93:
            case.spoil(rng, name)
        else:
            case.replace(rng, name)
    return case


def _change(rng: Random, case: Case, name: str) -> None:
    try:
        tree = case.json(name)
    except (ValueError, RecursionError):
        return
    if not isinstance(tree, dict):
        return
    if name == TOKENIZER and rng.random() < 0.5:
        case.put(name, _changed_tokenizer(rng, tree))
        return
    tree, names = values.changed(rng, tree)
    # What the library says of its file is about lines and columns, if about any place.
    case.put(name, tree, *(() if name == TOKENIZER else names))


def _changed_tokenizer(rng: Random, tree: dict[str, Any]) -> dict[str, Any]:
    """One thing of what makes up a tokenizer."""
    tokens, model = tree.get("added_tokens"), tree.get("model")
    added = rng.choice(tokens) if isinstance(tokens, list) and tokens and isinstance(tokens[0], dict) else {}
    vocab = model.get("vocab") if isinstance(model, dict) else None
    match rng.randrange(11):
        case 0:
            added["id"] = rng.choice((0, 1, 5, 399, 10**6, 2**31, 2**32 - 1, 2**32, -1, 1.5))
        case 1:
            added["content"] = rng.choice(("", " ", "a", "\ud800", "\n", "x" * 1000, "<|im_end|>", "🦊"))
        case 2:
            for flag in ("special", "normalized", "lstrip", "rstrip", "single_word"):
                added[flag] = rng.random() < 0.5
        case 3:
            kind = rng.choice(("normalizer", "pre_tokenizer", "decoder", "post_processor", "model"))
            tree[kind] = {"type": rng.choice(_TYPES), "decoders": [], "normalizers": [], "pretokenizers": []}
        case 4:
            pattern = {rng.choice(("Regex", "String")): rng.choice(_REGEXES)}
            behavior = rng.choice(("Isolated", "Removed", "MergedWithNext", "Contiguous"))
            tree["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": False}
        case 5:
            pattern = {rng.choice(("Regex", "String")): rng.choice(_REGEXES)}
            tree["normalizer"] = {"type": "Replace", "pattern": pattern, "content": rng.choice(("", "a", "<|im_end|>"))}
        case 6 if isinstance(vocab, dict) and vocab:
            vocab[rng.choice(list(vocab))] = rng.choice((0, 7, 10**6, 2**32 - 1, 2**32, -1, None))
        case 7 if isinstance(vocab, dict) and vocab:
            for token in rng.sample(sorted(vocab), min(len(vocab), rng.choice((1, 50, 300)))):
                del vocab[token]
        case 8 if isinstance(model, dict):
            model["merges"] = rng.choice(
                ([], ["a b"], [["a", "b"]], [["h", "e"]], ["a"], [[]], "a b", [["\ud800", "x"]])
            )
        case 9:
            tree["truncation"] = {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 5}
        case _:
            single = [{"SpecialToken": {"id": "nope", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
            tree["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}
    return tree
