"""The token stream: exact layouts, and padded batches that unpad to the very same stream."""

from __future__ import annotations

import random

import pytest
import torch

from hfpar.data.stream import (
    IGNORE_INDEX,
    PaddedBatch,
    Sample,
    TokenStream,
    build_stream,
    pad_batch,
    shift_labels,
    unpad_batch,
)

EOS = 2


def assert_same(actual: TokenStream, expected: TokenStream) -> None:
    for name in ("input_ids", "position_ids", "cu_seqlens", "labels"):
        left, right = getattr(actual, name), getattr(expected, name)
        assert left.dtype == right.dtype, name
        assert torch.equal(left, right), name
    assert actual.num_label_tokens == expected.num_label_tokens
    assert actual.max_seqlen == expected.max_seqlen


def test_labels_are_shifted_inside_each_document() -> None:
    samples = [Sample([5, 6, 7], [-100, 6, 7]), Sample([8, 9], [8, 9])]
    stream = build_stream(samples)
    assert stream.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert stream.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert stream.cu_seqlens.tolist() == [0, 3, 5]
    # Position 2 ends its document, so the labelled first token of the next one is nobody's target.
    assert stream.labels.tolist() == [[6, 7, -100, 9, -100]]
    assert stream.num_label_tokens == 3
    assert stream.max_seqlen == 3
    assert (stream.input_ids.dtype, stream.cu_seqlens.dtype) == (torch.int64, torch.int32)


def test_no_samples_give_one_token_without_label() -> None:
    stream = build_stream([])
    assert stream.input_ids.tolist() == [[0]]
    assert stream.position_ids.tolist() == [[0]]
    assert stream.cu_seqlens.tolist() == [0, 1]
    assert stream.labels.tolist() == [[-100]]
    assert stream.num_label_tokens == 0
    assert_same(unpad_batch(pad_batch([], pad_token_id=EOS)), stream)
    assert_same(unpad_batch(pad_batch([Sample([], [])], pad_token_id=EOS)), stream)
    assert_same(build_stream([Sample([], [])]), stream)


def test_pad_batch_pads_right_without_labels() -> None:
    batch = pad_batch([Sample([4], [4]), Sample([5, EOS, 6], [-100, EOS, 6])], pad_token_id=EOS)
    assert batch.input_ids.tolist() == [[4, EOS, EOS], [5, EOS, 6]]
    assert batch.attention_mask.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert batch.labels.tolist() == [[4, -100, -100], [-100, EOS, 6]]


@pytest.mark.parametrize(
    "samples",
    [
        [Sample([5, 6, EOS], [-100, 6, EOS]), Sample([7, EOS], [7, EOS])],
        [Sample([EOS, EOS, EOS], [EOS, EOS, EOS]), Sample([EOS], [EOS]), Sample([EOS, 9], [-100, 9])],
        [Sample([], []), Sample([3], [3]), Sample([], []), Sample([4, 5], [4, 5]), Sample([], [])],
        [Sample([3], [3])],
    ],
    ids=["pad is eos", "text of pad tokens", "empty rows", "one token"],
)
def test_unpad_equals_build_stream(samples: list[Sample]) -> None:
    assert_same(unpad_batch(pad_batch(samples, pad_token_id=EOS)), build_stream(samples))


def test_unpad_equals_build_stream_on_random_samples() -> None:
    rng = random.Random(0)
    for _ in range(50):
        samples = []
        for _ in range(rng.randint(0, 6)):
            input_ids = [rng.randint(0, 4) for _ in range(rng.choice([0, 1, 2, 5, 9]))]
            samples.append(Sample(input_ids, [rng.choice([token, -100]) for token in input_ids]))
        assert_same(unpad_batch(pad_batch(samples, pad_token_id=EOS)), build_stream(samples))


def test_final_eos_keeps_its_label_when_pad_is_eos() -> None:
    stream = unpad_batch(pad_batch([Sample([5, EOS], [-100, EOS]), Sample([5] * 4, [5] * 4)], EOS))
    assert stream.labels[0, 0] == EOS


def test_labels_left_at_padding_are_not_learnt() -> None:
    batch = PaddedBatch(
        input_ids=torch.tensor([[5, 6, 0]]),
        attention_mask=torch.tensor([[1, 1, 0]]),
        labels=torch.tensor([[5, 6, 0]]),
    )
    assert unpad_batch(batch).labels.tolist() == [[6, -100]]


def test_shift_labels_keeps_leading_dimensions() -> None:
    labels = torch.tensor([[[1, 2, 3]], [[4, 5, IGNORE_INDEX]]])
    assert shift_labels(labels).tolist() == [[[2, 3, -100]], [[5, -100, -100]]]
    assert shift_labels(torch.empty(2, 0, dtype=torch.long)).shape == (2, 0)


def test_to_keeps_everything() -> None:
    stream = build_stream([Sample([5, 6], [5, 6])])
    assert_same(stream.to("cpu"), stream)


def test_sample_needs_a_label_for_every_token() -> None:
    with pytest.raises(ValueError, match="3 input_ids but 2 labels"):
        Sample([1, 2, 3], [1, 2])
