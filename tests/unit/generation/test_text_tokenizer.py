from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from mlx_tandem.errors import InvalidRequest, ModelError
from mlx_tandem.generation.defaults import sampling_defaults
from mlx_tandem.generation.tokenizer import Tokenizer
from tests.unit.text_tools import SPECIALS, byte_level, sentencepiece


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = tokenizer.decoder()
    return [*map(decoder.push, ids), decoder.flush()]


@pytest.mark.promise("E4")
@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@given(data=st.data())
@settings(max_examples=300)
def test_deltas_of_any_tokens_equal_the_whole_decode(make, data):
    """Also for sequences that are no valid text: stray bytes, halves of characters, special tokens between them."""
    tokenizer = make()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24))
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@given(data=st.data())
@settings(max_examples=300)
def test_the_whole_decode_is_the_library_s(data):
    tokenizer = byte_level()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24))
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids, skip_special_tokens=True)


def test_the_space_before_a_first_word_is_kept():
    """A continuation starts inside a text; the library would strip it as if it began one."""
    tokenizer = sentencepiece()
    ids = tokenizer.encode(" the <think> é🦊")
    assert tokenizer.decode(ids) == " the <think> é🦊"


@pytest.mark.promise("E4")
@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@given(text=st.text(max_size=40))
@settings(max_examples=200)
def test_no_piece_shows_a_character_that_later_changes(make, text):
    tokenizer = make()
    ids = tokenizer.encode_plain(text)
    whole = tokenizer.decode(ids)
    shown = ""
    for piece in pieces(tokenizer, ids):
        shown += piece
        assert whole.startswith(shown)
    assert shown == whole


def test_a_character_of_several_tokens_comes_out_once_it_is_complete():
    tokenizer = byte_level()
    ids = tokenizer.encode("🦊")
    assert len(ids) > 1
    assert pieces(tokenizer, ids) == [""] * (len(ids) - 1) + ["🦊", ""]


def test_stray_bytes_are_not_held_back():
    tokenizer = byte_level()
    stray = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xe4")
    decoder = tokenizer.decoder()
    shown = "".join(decoder.push(stray) for _ in range(1000))
    assert len(shown) == 999


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@given(text=st.lists(st.sampled_from([*SPECIALS, "a", " ", "<|", "im_end", "|>", "<"]), max_size=8).map("".join))
@settings(max_examples=200)
def test_plain_encoding_has_no_special_token(make, text):
    tokenizer = make()
    assert tokenizer.special_ids.isdisjoint(tokenizer.encode_plain(text))


def test_token_bytes_join_to_the_text():
    tokenizer = byte_level()
    text = "naïve 👩‍👩‍👧 <think>x</think>"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    assert tokenizer.token_bytes(tokenizer.special_tokens["<|im_end|>"]) == b"<|im_end|>"
    assert tokenizer.token_bytes(10**6) == b""  # a padding row
    llama = sentencepiece()
    assert b"".join(map(llama.token_bytes, llama.encode("the é"))) == b"the \xc3\xa9"


def test_special_texts_come_in_both_spellings_of_the_configuration():
    assert byte_level().special_texts() == {"eos_token": "<|im_end|>"}


def test_a_folder_without_tokenizer_json_is_refused_by_its_name(tmp_path: Path):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)


def test_a_kind_of_decoder_that_is_not_known_is_refused():
    backend = Backend(models.WordLevel({"a": 0}))
    with pytest.raises(ModelError, match="none is not supported"):
        Tokenizer(backend)
    backend.decoder = decoders.Sequence([decoders.WordPiece(), decoders.Fuse()])
    with pytest.raises(ModelError, match="Fuse, WordPiece"):
        Tokenizer(backend)


@pytest.mark.parametrize("content", ["", "[]", "{}", "not json", '{"version": "1.0"}'])
def test_a_broken_tokenizer_file_is_a_model_error(tmp_path: Path, content: str):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_generation_config_gives_the_defaults(tmp_path: Path):
    assert sampling_defaults(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "top_p": 0, "eos_token_id": 1}')
    assert sampling_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}
    (tmp_path / "generation_config.json").write_text('{"temperature": NaN}')
    with pytest.raises(ModelError, match="temperature"):
        sampling_defaults(tmp_path)


def test_plain_text_never_becomes_a_special_token_by_merges_either() -> None:
    """In this vocabulary ordinary merges lead to the special token, too."""
    vocabulary = {"<": 0, "s": 1, ">": 2, "<s": 3, "<s>": 4, "a": 5, "!": 6}
    backend = Backend(models.BPE(vocabulary, [("<", "s"), ("<s", ">")]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<s>", "!"])
    made = Tokenizer(backend)
    assert made.special_ids == {4, 6}
    for text in ("<s>", "a<s>", "<s><s>a", "<s", "a<s>s>"):
        ids = made.encode_plain(text)
        assert not made.special_ids & set(ids)
        assert made.decode(ids) == text
        assert made.encode_parts([(text, True), ("<s>", False)]) == [*ids, 4]
        assert made.spells_special(text) == ("<s>" in text)
    with pytest.raises(InvalidRequest, match="a character that only a control token can stand for"):
        made.encode_plain("a!")


def test_a_parser_sees_the_special_tokens_that_it_asks_for_and_no_others() -> None:
    made = byte_level()
    first, *others = made.special_tokens.items()
    ids = made.encode("a") + [token for _, token in (first, *others)]
    for _ in range(2):
        assert "".join(pieces_of(made, ids, frozenset({first[1]}))) == "a" + first[0]
        assert "".join(pieces_of(made, ids, frozenset())) == "a"
        assert "".join(pieces_of(made, ids, made.special_ids)) == made.decode(ids, show_special=True)


def pieces_of(tokenizer: Tokenizer, ids: list[int], shown: frozenset[int]) -> list[str]:
    decoder = tokenizer.decoder(shown=shown)
    return [*map(decoder.push, ids), decoder.flush()]
