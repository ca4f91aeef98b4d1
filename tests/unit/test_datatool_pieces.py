"""Tokens as text: whole characters, whatever the tokens are, and nothing lost."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hfpar.datatool.pieces import Piece, decode, to_pieces
from hfpar.datatool.show import bracketed_text, colored_text, visible


@pytest.fixture(scope="module")
def of_bytes():
    """Every byte is a token."""
    special = ["<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: number for number, token in enumerate(special + alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def of_words():
    """As SentencePiece: words begin with a mark for the space, other characters are bytes."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁hello", "▁world", "▁"]
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens([AddedToken("<s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", unk_token="<unk>")


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_bytes_of_a_character_stand_together(of_bytes):
    text = "aé🚂b"
    tokens = ids(of_bytes, text)
    assert len(tokens) == 1 + 2 + 4 + 1
    pieces = to_pieces(tokens, [False] * 3 + [True] * 5, of_bytes)
    assert pieces == [
        Piece("a", False, False),
        Piece("é", False, False),
        Piece("🚂", True, False),
        Piece("b", True, False),
    ]


def test_special_tokens_stand_alone_and_the_first_is_never_trained(of_bytes):
    tokens = ids(of_bytes, "<s>é</s>")
    assert to_pieces(tokens, [True] * 4, of_bytes) == [
        Piece("<s>", False, True),
        Piece("é", True, False),
        Piece("</s>", True, True),
    ]


def test_what_a_cut_left_of_a_character_doesn_t_take_its_neighbours_along(of_bytes):
    train = ids(of_bytes, "🚂")
    tokens = [*train[2:], *ids(of_bytes, "ab</s>"), *train[:2]]
    pieces = to_pieces(tokens, [False, False, True, False, False, True, True], of_bytes)
    assert [(piece.text.strip("\ufffd"), piece.trained) for piece in pieces] == [
        ("", False),
        ("a", True),
        ("b", False),
        ("</s>", False),
        ("", True),
    ]


def test_replacement_characters_of_the_text_itself(of_bytes):
    text = "\ufffd" * 12 + "ok"
    tokens = ids(of_bytes, text)
    pieces = to_pieces(tokens, [False] * 36 + [True] * 2, of_bytes)
    assert pieces == [
        Piece("\ufffd" * 12, False, False),
        Piece("o", True, False),
        Piece("k", True, False),
    ]


def test_spaces_between_words_are_kept(of_words):
    tokens = [1, *(of_words.convert_tokens_to_ids(token) for token in ("▁hello", "▁world", "▁"))]
    tokens += [2 + byte for byte in "é".encode()]
    pieces = to_pieces(tokens, [False, False, True, True, True, True], of_words)
    assert "".join(piece.text for piece in pieces) == decode(of_words, tokens)
    assert [piece.text for piece in pieces if piece.trained] == [" world", " ", "é"]


@pytest.mark.parametrize("text", ["plain", "né à Œuvre 🚂🚃\n\n日本語", "<s>x</s></s>", " two  spaces ", ""])
def test_pieces_are_the_tokenizer_s_own_decoding(of_bytes, text):
    tokens = ids(of_bytes, text)
    pieces = to_pieces(tokens, [True] * len(tokens), of_bytes)
    assert "".join(piece.text for piece in pieces) == decode(of_bytes, tokens) == text


PIECES = [
    Piece("<s>", False, True),
    Piece("ask\n", False, False),
    Piece("ans", True, False),
    Piece("wer", True, False),
    Piece("</s>", True, True),
    Piece("\n", False, False),
]


def test_brackets_enclose_what_is_trained():
    assert bracketed_text(PIECES).plain == "<s>ask\n⟦answer</s>⟧\n"
    assert bracketed_text(PIECES[:4]).plain == "<s>ask\n⟦answer⟧"
    assert bracketed_text([]).plain == ""


def test_colours_lie_on_what_is_trained():
    text = colored_text(PIECES)
    assert text.plain == "<s>ask\nanswer</s>\n"
    assert [(text.plain[span.start : span.end], span.style) for span in text.spans] == [
        ("<s>", "#1f8a9e"),
        ("answer", "#ffffff on #17633a"),
        ("</s>", "#9be7f5 on #17633a"),
    ]


def test_control_characters_are_shown_and_not_obeyed():
    assert visible("a\x1b[31m\tb\nc\x00\x7f\r") == "a␛[31m\tb\nc␀␡␍"
