"""Which part of a weight a tensor-parallel rank keeps: every rank is asked, no processes."""

import itertools
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hfpar.models.cuts import (
    Cut,
    cut_evenly,
    cut_heads,
    cut_of,
    cut_vocabulary,
    cuts_of,
    join_cuts,
    note_cut,
)

SIZES = (5, 4, 3)
"""Of the dimensions that aren't cut."""


def fused_qkv(dim: int) -> Cut:
    """4 query heads, 2 key-value heads of 2 rows, on two ranks."""
    return join_cuts([cut_evenly(dim, size, 2) for size in (8, 4, 4)])


def cuts_along(dim: int) -> dict[str, Cut]:
    return {
        "evenly": cut_evenly(dim, 12, 4),
        "one rank": cut_evenly(dim, 3, 1),
        "two sections": cut_evenly(dim, 24, 4, sections=2),
        "three sections": cut_evenly(dim, 18, 2, sections=3),
        "heads": cut_heads(dim, 16, 4, 2),
        "a copy each": cut_heads(dim, 6, 2, 4),
        "one head on all": cut_heads(dim, 3, 1, 4),
        "vocabulary": cut_vocabulary(dim, 12, 4),
        "vocabulary that doesn't divide": cut_vocabulary(dim, 11, 4),
        "a rank without words": cut_vocabulary(dim, 9, 4),
        "two ranks without words": cut_vocabulary(dim, 2, 4),
        "q, k and v": fused_qkv(dim),
    }


CASES = {f"{name}, dim {dim}": cut for dim in range(3) for name, cut in cuts_along(dim).items()}


def shape_of(cut: Cut) -> tuple[int, ...]:
    return (*SIZES[: cut.dim], cut.size, *SIZES[cut.dim + 1 :])


def whole_of(cut: Cut) -> Tensor:
    """No value twice, and no zero."""
    shape = shape_of(cut)
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)


def row_slices(num_rows: int) -> list[slice]:
    """All that an engine could leave a process of a part's rows."""
    return [slice(None)] + [
        slice(start, stop) for start, stop in itertools.combinations_with_replacement(range(num_rows + 1), 2)
    ]


@pytest.mark.parametrize(
    ("cut", "indices"),
    [
        (cut_evenly(0, 8, 4), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (cut_evenly(0, 8, 2, sections=2), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (cut_heads(0, 8, 4, 2), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (cut_heads(0, 4, 2, 4), [[0, 1], [0, 1], [2, 3], [2, 3]]),
        (cut_vocabulary(0, 7, 3), [[0, 1, 2], [3, 4, 5], [6, None, None]]),
        (cut_vocabulary(0, 5, 4), [[0, 1], [2, 3], [4, None], [None, None]]),
        (fused_qkv(0), [[0, 1, 2, 3, 8, 9, 12, 13], [4, 5, 6, 7, 10, 11, 14, 15]]),
    ],
)
def test_what_each_rank_keeps(cut: Cut, indices: list[list[int | None]]) -> None:
    whole = torch.arange(1, cut.size + 1)
    for rank, expected in enumerate(indices):
        assert cut.take(whole, rank).tolist() == [0 if index is None else index + 1 for index in expected]


def test_only_shared_heads_have_copies() -> None:
    assert [cut_heads(0, 8, 8, tp_size).copies for tp_size in (1, 2, 4, 8)] == [1, 1, 1, 1]
    assert [cut_heads(0, 8, 2, tp_size).copies for tp_size in (1, 2, 4, 8)] == [1, 1, 2, 4]
    assert cut_evenly(0, 8, 4).copies == cut_vocabulary(0, 7, 4).copies == 1


@pytest.mark.parametrize("name", CASES)
def test_parts_make_the_whole_again(name: str) -> None:
    cut = CASES[name]
    whole = whole_of(cut)
    parts = [cut.take(whole, rank) for rank in range(len(cut.ranges))]
    local_shape = cut.local_shape(whole.shape)
    assert {tuple(part.shape) for part in parts} == {local_shape}
    assert cut.whole_shape(local_shape) == tuple(whole.shape)
    assert cut.assemble(parts).equal(whole)
    # What stands beyond a rank's own words doesn't get into it.
    for part, ranges in zip(parts, cut.ranges, strict=True):
        kept = sum(last - first for first, last in ranges)
        padding = part.narrow(cut.dim, kept, cut.local_size - kept)
        assert not padding.any()
        padding.fill_(7.0)
    assert cut.assemble(parts).equal(whole)


@pytest.mark.parametrize("name", CASES)
def test_rows_of_a_part_as_engines_leave_them(name: str, tmp_path: Path) -> None:
    """From a tensor and from a file, which gives its bytes slice by slice."""
    cut = CASES[name]
    whole = whole_of(cut)
    save_file({"weight": whole}, tmp_path / "file")
    with safe_open(tmp_path / "file", "pt") as file:
        stored = file.get_slice("weight")
        for rank in range(len(cut.ranges)):
            part = cut.take(whole, rank)
            for rows in row_slices(part.shape[0]):
                assert cut.take(whole, rank, rows).equal(part[rows])
                assert cut.take(stored, rank, rows).equal(part[rows])


@pytest.mark.parametrize("name", CASES)
def test_a_part_does_not_share_memory_with_the_whole(name: str) -> None:
    cut = CASES[name]
    whole = whole_of(cut)
    for rank in range(len(cut.ranges)):
        cut.take(whole, rank).zero_()
    assert whole.equal(whole_of(cut))


def test_a_part_keeps_the_dtype_also_where_it_is_all_padding() -> None:
    whole = torch.ones(2, 3, dtype=torch.bfloat16)
    parts = [cut_vocabulary(0, 2, 4).take(whole, rank) for rank in range(4)]
    assert {part.dtype for part in parts} == {torch.bfloat16}


def test_sizes_that_leave_a_rest_are_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="10 in 1 x 4 parts"):
        cut_evenly(0, 10, 4)
    with pytest.raises(AssertionError, match="18 in 3 x 4 parts"):
        cut_evenly(0, 18, 4, sections=3)
    with pytest.raises(AssertionError, match="3 heads on 4 ranks"):
        cut_heads(0, 12, 3, 4)


def test_notes_are_found_by_every_name_of_a_module() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(2, 4))
    model.append(model[0])
    cut = cut_evenly(0, 4, 2)
    note_cut(model[0], "weight", cut)
    assert cut_of(model[0], "weight") == cut
    assert cut_of(model[0], "bias") is None and cut_of(model[1], "weight") is None
    assert cuts_of(model[0]) == {"weight": cut}
    # A module that hangs in two places has one of its names in `named_parameters`.
    names = cuts_of(model).keys() & {name for name, _ in model.named_parameters()}
    assert names == {"0.weight"}
