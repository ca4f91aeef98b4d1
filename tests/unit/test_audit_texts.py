"""Texts of an audit: how they're compared, where they're cut, and what one text scores."""

import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from hfpar.audit.prefix import TailLimits, TextTokenizer, find_cut, is_boundary
from hfpar.audit.scoring import edit_similarity, familiarity, hit_spans, longest_run, rouge_l
from hfpar.audit.text import Match, count_words, match, normalize
from hfpar.models.tiny import build_tiny_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("model")
    build_tiny_model(folder, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    return TextTokenizer(AutoTokenizer.from_pretrained(folder))


# Comparing


def test_normalize() -> None:
    assert normalize("  “A”\u00a0b –\n\tc’s  ﬁne\u200b ") == '"A" b - c\'s fine'
    assert normalize("e\u0301") == "é"


def test_count_words() -> None:
    assert count_words("two  words") == 2
    assert count_words("求和 of 3") == 4


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (" the  cat sat.", Match(True, True)),
        (" the  cat sat. On", Match(True, True)),
        (" the cat sat.", Match(False, True)),
        (" the  ca", Match(None, None)),
        ("", Match(None, None)),
        (" the cat", Match(False, None)),
        (" a", Match(False, False)),
        (" the  dog", Match(False, False)),
        ("\n", Match(False, None)),
        (" the  cat\ufffd", Match(None, None)),
    ],
)
def test_match(written: str, expected: Match) -> None:
    assert match(" the  cat sat.", written) == expected
    ended = match(" the  cat sat.", written, ended=True)
    assert ended == Match(expected.strict is True, expected.normalized is True)


def test_an_accent_may_follow_a_letter() -> None:
    assert match(" café now", " cafe") == Match(False, None)
    assert match(" café now", " caff") == Match(False, False)
    assert match(" café now", " cafe\u0301 now") == Match(False, True)


# Cutting


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("one two", "one"),
        ("so \\text{ cm} is", "so|so \\text{ cm}"),
        ("a\\ b c", "a\\ b"),
        ("has 10 000 men", "has|has 10 000"),
        ("has 10 men", "has|has 10"),
        ("求和 a", "求|求和"),
        ("the  end", "the"),
    ],
)
def test_boundaries(text: str, allowed: str) -> None:
    found = [text[:position] for position in range(1, len(text)) if is_boundary(text, position)]
    assert found == allowed.split("|")


def test_a_cut_is_the_last_boundary_whose_tokens_begin_the_text(tokenizer: TextTokenizer) -> None:
    words = "the a There 3 12,5 $x$ \\frac{1}{2} boxes of é naïve “quoted” A-B café.".split()
    rng = random.Random(0)
    for _ in range(60):
        text = rng.choice((" ", "  ", "\n")).join(rng.choice(words) for _ in range(30))
        tokenized = tokenizer([text])[0]
        for ratio in (0.2, 0.5, 0.6):
            cut = find_cut(tokenized, ratio, tokenizer, TailLimits(1, 1))
            prefix = text[: cut.position]
            assert cut.skipped is None and 0 < cut.position <= ratio * len(text)
            assert prefix == prefix.rstrip() and text[cut.position].isspace()
            ids = tokenizer.ids(prefix)
            assert ids == tokenized.input_ids[: cut.num_prefix_tokens]
            later = [
                position
                for position in range(cut.position + 1, int(ratio * len(text)) + 1)
                if is_boundary(text, position)
                and tokenizer.ids(text[:position])
                == tokenized.input_ids[: len(tokenizer.ids(text[:position]))]
            ]
            assert not later


class MergingTokenizer:
    """Reads the words "b c" as one token wherever they stand together, so that no cut may part them."""

    is_fast = True

    def __call__(self, texts: Any, **options: Any) -> Any:
        single = isinstance(texts, str)
        ids, offsets = [], []
        for text in [texts] if single else texts:
            pieces, position = [], 0
            while position < len(text):
                size = 3 if text.startswith("b c", position) else 1
                pieces.append((position, position + size))
                position += size
            ids.append([hash(text[start:end]) % 997 for start, end in pieces])
            offsets.append(pieces)
        result = type("Encoding", (), {})()
        result.input_ids = ids[0] if single else ids
        result.offset_mapping = offsets
        return result


def test_a_cut_moves_left_out_of_a_token() -> None:
    tokenizer = TextTokenizer(MergingTokenizer())
    text = "aa b c dd ee ff gg"
    assert is_boundary(text, 4)
    cut = find_cut(tokenizer([text])[0], 4.5 / len(text), tokenizer, TailLimits(1, 1))
    assert text[: cut.position] == "aa"


def test_tails_that_are_too_short(tokenizer: TextTokenizer) -> None:
    nine = "a b c d e f g h i and then some more characters at the end of it"
    tokenized = tokenizer([nine])[0]
    assert find_cut(tokenized, 0.42, tokenizer, TailLimits(8, 32)).tail_words == 8
    assert find_cut(tokenized, 0.42, tokenizer, TailLimits(9, 32)).skipped == "short_tail"
    assert find_cut(tokenized, 0.42, tokenizer, TailLimits(8, 60)).skipped == "short_tail"
    assert find_cut(tokenizer(["oneword"])[0], 0.5, tokenizer, TailLimits(1, 1)).skipped == "no_cut"


# Scores


def test_runs() -> None:
    spans = [(0, 1), (1, 3), (3, 4), (4, 8), (8, 9), (9, 10)]
    hits = [True, False, True, True, False, True]
    assert longest_run(spans, hits) == (2, (3, 8))
    assert hit_spans(spans, hits) == [[0, 1], [3, 8], [9, 10]]
    assert longest_run([], []) == (0, (0, 0)) and hit_spans([], []) == []


def test_familiarity() -> None:
    rng = np.random.default_rng(0)
    logprobs, mean = rng.normal(-3, 1, 23), rng.normal(-4, 1, 23)
    std = rng.uniform(0.5, 2, 23)
    found = familiarity("some text", logprobs, mean, std)
    lowest = sorted(logprobs)[:5]  # 20 % of 23
    standard = sorted((a - b) / c for a, b, c in zip(logprobs, mean, std, strict=True))[:5]
    expected = {
        "loss": sum(logprobs) / 23,
        "zlib": sum(logprobs) / len(zlib.compress(b"some text")),
        "min_k": sum(lowest) / 5,
        "min_k_plus_plus": sum(standard) / 5,
    }
    assert found == pytest.approx(expected, abs=1e-5)
    assert familiarity("x", logprobs[:0], None, None) == {}
    assert "min_k_plus_plus" not in familiarity("x", logprobs[:1], None, None)


@pytest.mark.parametrize(
    ("similarity", "reference", "written", "expected"),
    [
        (rouge_l, " the cat sat down", " the cat  sat down, and then", 0.75),  # "down," is another word
        (rouge_l, "a b c d", "a x c d", 0.75),
        (rouge_l, "a b c d", "a b", 2 * 2 / 6),
        (rouge_l, "a b", "", 0.0),
        (edit_similarity, "abcd", "abcd and more", 1.0),
        (edit_similarity, "abcd", "abxd", 0.75),
        (edit_similarity, "abcd", "", 0.0),
    ],
)
def test_similarities(
    similarity: Callable[[str, str], float], reference: str, written: str, expected: float
) -> None:
    assert similarity(reference, written) == pytest.approx(expected, abs=1e-6)


def test_slow_tokenizers_are_refused(tmp_path: Path) -> None:
    from hfpar.errors import ConfigError

    with pytest.raises(ConfigError, match=r"tokenizer in Python.*tokenizer\.json"):
        TextTokenizer(object())
