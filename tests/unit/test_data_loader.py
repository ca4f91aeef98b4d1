"""The plan of an epoch: equal steps for equal global batches, every sample once, even ranks, exact resume."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from hfpar.data.loader import BatchPlan, StepLoader, plan_epoch
from hfpar.data.stream import Sample, TokenStream, build_stream
from hfpar.errors import ConfigError


def plan(
    lengths: list[int],
    dp_size: int = 1,
    accumulation: int = 1,
    batch_size: int | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    epoch: int = 0,
) -> BatchPlan:
    return plan_epoch(
        lengths,
        seed=seed,
        epoch=epoch,
        dp_size=dp_size,
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=batch_size,
        max_tokens_per_batch=max_tokens,
    )


def step_samples(batch_plan: BatchPlan) -> list[list[int]]:
    """The samples of each step, in ascending order."""
    return [sorted(i for micro in step for rank in micro for i in rank) for step in batch_plan.steps]


def random_lengths(num: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [min(64, max(1, int(rng.lognormvariate(2.5, 1)))) for _ in range(num)]


@pytest.mark.parametrize("num", [1, 7, 16, 61])
def test_padded_steps_depend_on_the_global_batch_only(num: int) -> None:
    lengths = random_lengths(num)
    expected = step_samples(plan(lengths, batch_size=8))
    assert [len(step) for step in expected] == [8] * (num // 8) + [num % 8] * (num % 8 > 0)
    for dp_size, batch_size, accumulation in [
        (2, 4, 1),
        (4, 2, 1),
        (1, 4, 2),
        (1, 1, 8),
        (2, 2, 2),
        (4, 1, 2),
    ]:
        cut = plan(lengths, dp_size, accumulation, batch_size)
        assert step_samples(cut) == expected


@pytest.mark.parametrize("num", [1, 7, 61, 200])
def test_packed_steps_depend_on_packs_per_step_only(num: int) -> None:
    lengths = random_lengths(num)
    expected = step_samples(plan(lengths, 1, 4, max_tokens=64))
    for dp_size, accumulation in [(2, 2), (4, 1)]:
        assert step_samples(plan(lengths, dp_size, accumulation, max_tokens=64)) == expected


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("mode", [{"batch_size": 2}, {"max_tokens": 64}])
def test_every_sample_once_within_its_bounds(dp_size: int, accumulation: int, mode: dict[str, int]) -> None:
    for num in (1, 5, 10, 47):
        lengths = random_lengths(num)
        batch_plan = plan(lengths, dp_size, accumulation, **mode)
        assert sorted(index for step in step_samples(batch_plan) for index in step) == list(range(num))
        for step in batch_plan.steps:
            assert 1 <= len(step) <= accumulation
            for micro_batch in step:
                assert len(micro_batch) == dp_size
                assert any(micro_batch)
                for indices in micro_batch:
                    assert len(indices) <= mode.get("batch_size", num)
                    assert sum(lengths[index] for index in indices) <= mode.get("max_tokens", 10**6)
        for step in batch_plan.steps[:-1]:
            assert len(step) == accumulation
            assert all(indices for micro_batch in step for indices in micro_batch)


def sizes(batch_plan: BatchPlan) -> list[list[list[int]]]:
    return [[[len(rank) for rank in micro] for micro in step] for step in batch_plan.steps]


def test_last_window_of_ten_samples_accumulated_by_four() -> None:
    assert sizes(plan([5] * 10, 1, 4, 1)) == [[[1]] * 4, [[1]] * 4, [[1]] * 2]
    assert sizes(plan([5] * 10, 2, 4, 1)) == [[[1, 1]] * 4, [[1, 1]]]
    assert sizes(plan([5] * 10, 2, 2, 2)) == [[[2, 2]] * 2, [[1, 1]]]
    assert sizes(plan([5] * 3, 2, 4, 1)) == [[[1, 1], [1, 0]]]
    assert sizes(plan([5] * 7, 4, 1, 8)) == [[[2, 2, 2, 1]]]


def test_seven_packs_on_two_ranks() -> None:
    # Each sample fills a pack of its own.
    assert sizes(plan([10] * 7, 2, 1, max_tokens=10)) == [[[1, 1]]] * 3 + [[[1, 0]]]
    assert sizes(plan([10] * 7, 2, 2, max_tokens=10)) == [[[1, 1]] * 2, [[1, 1], [1, 0]]]


def test_more_ranks_than_samples() -> None:
    assert sizes(plan([5, 5], 4, 2, 3)) == [[[1, 1, 0, 0]]]


def test_epochs_and_seeds_change_the_order_and_equal_ones_repeat_it() -> None:
    lengths = random_lengths(100)
    for mode in ({"batch_size": 4}, {"max_tokens": 64}):
        first = plan(lengths, 2, 2, **mode)
        assert plan(lengths, 2, 2, **mode) == first
        assert plan(lengths, 2, 2, **mode, epoch=1) != first
        assert plan(lengths, 2, 2, **mode, seed=1) != first
        assert len(plan(lengths, 2, 2, **mode, epoch=1).steps) == len(first.steps)


@pytest.mark.parametrize(("accumulation", "mode"), [(1, {"batch_size": 16}), (4, {"max_tokens": 4096})])
def test_work_of_ranks_is_similar_in_every_step(accumulation: int, mode: dict[str, int]) -> None:
    rng = random.Random(0)
    lengths = [min(2048, max(8, int(rng.lognormvariate(5, 0.8)))) for _ in range(2000)]
    steps = plan(lengths, 4, accumulation, **mode).steps[:-1]
    assert len(steps) > 5
    for step in steps:
        work = [
            sum(lengths[i] * (lengths[i] + 4096) for micro in step for i in micro[rank]) for rank in range(4)
        ]
        assert max(work) <= 1.15 * sum(work) / 4


def test_packs_come_in_random_order() -> None:
    # Packing goes from the longest sample to the shortest; training must not.
    lengths = random_lengths(400)
    longest = [max(lengths[index] for index in step) for step in step_samples(plan(lengths, max_tokens=64))]
    half = len(longest) // 2
    assert abs(sum(longest[:half]) - sum(longest[half : 2 * half])) < 0.2 * sum(longest)


def test_exactly_one_size_must_be_set() -> None:
    for mode in ({}, {"batch_size": 2, "max_tokens": 64}):
        with pytest.raises(ValueError, match="exactly one"):
            plan([5], **mode)


def test_sample_over_the_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_tokens_per_batch: 10 is less"):
        plan([5, 11], max_tokens=10)


def make_samples(num: int) -> list[Sample]:
    return [
        Sample([index + 1] * length, [index + 1] * length) for index, length in enumerate(random_lengths(num))
    ]


def loader(samples: list[Sample], **changes: Any) -> StepLoader:
    arguments: dict[str, Any] = {
        "seed": 0,
        "dp_size": 2,
        "dp_rank": 0,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "max_tokens_per_batch": None,
        "pad_token_id": 0,
    }
    return StepLoader(samples, **(arguments | changes))


def as_lists(steps: list[list[TokenStream]]) -> list[list[tuple[list[int], list[int]]]]:
    return [[(s.input_ids[0].tolist(), s.cu_seqlens.tolist()) for s in step] for step in steps]


@pytest.mark.parametrize(
    "mode", [{}, {"per_device_train_batch_size": None, "max_tokens_per_batch": 64}], ids=["padded", "packed"]
)
@pytest.mark.parametrize("dp_rank", [0, 1])
def test_resume_gives_the_same_remaining_steps(mode: dict[str, Any], dp_rank: int) -> None:
    samples = make_samples(33)
    whole = loader(samples, dp_rank=dp_rank, **mode)
    epochs = [as_lists(list(whole)) for _ in range(3)]
    assert epochs[0] != epochs[1]
    assert (whole.epoch, whole.step) == (3, 0)
    assert whole.num_steps(0) == whole.num_steps(2) == len(epochs[0])

    interrupted = loader(samples, dp_rank=dp_rank, start_epoch=1, **mode)
    steps = iter(interrupted)
    next(steps), next(steps)
    assert (interrupted.epoch, interrupted.step) == (1, 2)
    resumed = loader(
        samples, dp_rank=dp_rank, start_epoch=interrupted.epoch, start_step=interrupted.step, **mode
    )
    assert as_lists(list(resumed)) == epochs[1][2:]
    assert as_lists(list(resumed)) == epochs[2]


def test_other_samples_have_another_fingerprint() -> None:
    samples = make_samples(9)
    mine = loader(samples).fingerprint
    assert loader(samples, dp_rank=1, dp_size=2, seed=5).fingerprint == mine
    assert loader(samples[::-1]).fingerprint != mine
    assert loader(samples[:-1]).fingerprint != mine


def test_streams_hold_the_planned_samples() -> None:
    samples = make_samples(9)
    for mode in ({}, {"per_device_train_batch_size": None, "max_tokens_per_batch": 64}):
        for dp_rank in (0, 1):
            rank = loader(samples, dp_rank=dp_rank, **mode)
            planned = rank.plan(0).steps
            for step, micro_batches in zip(planned, rank, strict=True):
                for micro_batch, stream in zip(step, micro_batches, strict=True):
                    expected = build_stream([samples[index] for index in micro_batch[dp_rank]])
                    assert torch.equal(stream.input_ids, expected.input_ids)
                    assert torch.equal(stream.labels, expected.labels)
                    assert torch.equal(stream.cu_seqlens, expected.cu_seqlens)


def test_padding_saved() -> None:
    samples = [Sample([1] * length, [1] * length) for length in (2, 6, 4, 4)]
    assert loader(samples, dp_size=1, per_device_train_batch_size=4).padding_saved == pytest.approx(8 / 24)
    assert loader(samples, dp_size=1, per_device_train_batch_size=1).padding_saved == 0.0


def test_padding_saved_by_packing_is_measured_against_batches_of_random_order() -> None:
    lengths = [4, 20] * 50
    samples = [Sample([1] * length, [1] * length) for length in lengths]
    packed = {"dp_size": 1, "per_device_train_batch_size": None, "max_tokens_per_batch": 24}
    saved = loader(samples, **packed).padding_saved  # two samples a pack
    # Of random pairs about half are unequal: they pad 16 of 40 tokens; the others nothing.
    assert 0.2 < saved < 0.35
    assert loader([samples[0]] * 12, **packed).padding_saved == 0.0
