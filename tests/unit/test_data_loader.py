"""The plan of an epoch: equal steps for equal global batches, every sample once, even ranks, exact resume."""

from __future__ import annotations

import collections
import math
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hfpar.data.loader import StepLoader
from hfpar.data.plan import EpochPlan, draw_samples, num_draws, plan_epoch
from hfpar.data.stream import Sample, TokenStream, build_stream
from hfpar.errors import ConfigError


def plan(
    lengths: Sequence[int] | np.ndarray,
    dp_size: int = 1,
    accumulation: int = 1,
    batch_size: int | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    epoch: int = 0,
    sources: list[tuple[int, float]] | None = None,
) -> EpochPlan:
    return plan_epoch(
        lengths,
        seed=seed,
        epoch=epoch,
        dp_size=dp_size,
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=batch_size,
        max_tokens_per_batch=max_tokens,
        sources=sources,
    )


def step_samples(batch_plan: EpochPlan) -> list[list[int]]:
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


def sizes(batch_plan: EpochPlan) -> list[list[list[int]]]:
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
        first = plan(lengths, 2, 2, **mode).steps
        assert plan(lengths, 2, 2, **mode).steps == first
        assert plan(lengths, 2, 2, **mode, epoch=1).steps != first
        assert plan(lengths, 2, 2, **mode, seed=1).steps != first
        assert plan(lengths, 2, 2, **mode, epoch=1).num_steps == len(first)


def test_the_order_is_the_same_on_every_machine() -> None:
    # Ranks plan by themselves, and a resumed run may do so with another version of numpy.
    assert plan([5] * 10, batch_size=5, seed=42, epoch=3).steps == [[[[1, 6, 3, 4, 5]]], [[[9, 2, 8, 0, 7]]]]
    packed = plan([9, 8, 5, 4, 3, 2, 2, 1, 1, 1], 2, max_tokens=10, seed=42, epoch=3)
    assert packed.steps == [[[[2, 4, 6], [3, 8, 7]]], [[[0, 9], [1, 5]]]]
    drawn = draw_samples([(4, 0.5), (3, 2.0), (5, 1.4)], seed=42, epoch=1).tolist()
    assert drawn == [0, 2, 4, 5, 6, 4, 5, 6, 7, 8, 9, 10, 11, 9, 10]


def test_a_step_is_dealt_when_it_is_asked_for() -> None:
    batch_plan = plan(random_lengths(50), 2, 2, max_tokens=64)
    assert [batch_plan.step(k) for k in range(batch_plan.num_steps)] == batch_plan.steps
    for number in (-1, batch_plan.num_steps):
        with pytest.raises(IndexError, match=f"step {number} of an epoch of {batch_plan.num_steps} steps"):
            batch_plan.step(number)
    assert (plan([10] * 7, 2, 2, max_tokens=10).num_last, plan([10] * 8, 2, 2, max_tokens=10).num_last) == (
        3,
        4,
    )
    assert plan([], max_tokens=64).num_steps == plan([], batch_size=2).num_steps == 0


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


def test_heavy_micro_batches_of_all_ranks_meet() -> None:
    lengths = random_lengths(240)
    for step in plan(lengths, 2, 4, batch_size=3).steps:
        for rank in range(2):
            work = [sum(lengths[i] * (lengths[i] + 4096) for i in micro[rank]) for micro in step]
            assert work == sorted(work, reverse=True)


def lognormal(num: int, median: float, sigma: float) -> np.ndarray:
    lengths = np.random.default_rng(0).lognormal(math.log(median), sigma, num)
    return np.clip(lengths.astype(np.int64), 1, 8192)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize(("median", "sigma"), [(400, 0.5), (400, 1.0), (400, 1.5), (1500, 1.0)])
def test_ranks_have_the_same_attention_work(median: float, sigma: float, accumulation: int) -> None:
    lengths = lognormal(60_000, median, sigma)
    batch_plan = plan(lengths, 8, accumulation, max_tokens=8192)
    uneven = []
    for step in batch_plan.steps[:-1]:
        work = [sum(int(lengths[i]) ** 2 for micro in step for i in micro[rank]) for rank in range(8)]
        uneven.append(max(work) / statistics.mean(work))
    assert len(uneven) > 80
    assert statistics.median(uneven) < 1.03


def test_most_steps_have_documents_of_all_lengths() -> None:
    lengths = lognormal(60_000, 400, 1.0)
    means = []
    for step in step_samples(plan(lengths, 8, 1, max_tokens=8192))[:-1]:
        sizes = lengths[step]
        means.append(float((sizes * np.log2(sizes)).sum() / sizes.sum()))
    # 1.4 for packs of best fit decreasing, sorted by work
    assert statistics.stdev(means) < 0.8


def test_steps_come_in_random_order_and_the_last_is_of_any_work() -> None:
    lengths = random_lengths(400)
    epochs = [step_samples(plan(lengths, 1, 4, max_tokens=64, epoch=epoch)) for epoch in range(40)]
    assert plan(lengths, 1, 4, max_tokens=64).num_last < 4
    work = [[sum(lengths[index] ** 2 for index in step) for step in steps] for steps in epochs]
    assert {len(steps) for steps in epochs} == {len(epochs[0])}
    num_first = [sum(steps[:5]) / sum(steps[:-1]) for steps in work]
    assert statistics.mean(num_first) == pytest.approx(5 / (len(epochs[0]) - 1), rel=0.1)
    last = [max(lengths[index] for index in steps[-1]) for steps in epochs]
    assert min(last) < 30 and max(last) == 64


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


def loader(samples: Sequence[Sample], **changes: Any) -> StepLoader:
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

    interrupted = loader(samples, dp_rank=dp_rank, **mode)
    interrupted.epoch = 1
    steps = iter(interrupted)
    next(steps), next(steps)
    assert (interrupted.epoch, interrupted.step) == (1, 2)
    resumed = loader(samples, dp_rank=dp_rank, **mode)
    resumed.epoch, resumed.step = interrupted.epoch, interrupted.step
    assert as_lists(list(resumed)) == epochs[1][2:]
    assert as_lists(list(resumed)) == epochs[2]


def test_other_samples_have_another_fingerprint() -> None:
    samples = make_samples(9)
    mine = loader(samples).fingerprint
    assert loader(samples, dp_rank=1, dp_size=2, seed=5).fingerprint == mine
    assert loader(samples[::-1]).fingerprint != mine
    assert loader(samples[:-1]).fingerprint != mine
    assert loader(samples, sources=[(9, 1)]).fingerprint == mine
    others = [[(9, 2.0)], [(9, 0.5)], [(4, 1.0), (5, 1.0)], [(5, 1.0), (4, 1.0)]]
    assert len({mine, *(loader(samples, sources=sources).fingerprint for sources in others)}) == 5


class Store(Sequence[Sample]):
    """Samples with their lengths beside them; notes which are read."""

    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples
        self.lengths = np.array([len(sample.input_ids) for sample in samples])
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: Any) -> Any:
        self.read.append(index)
        return self.samples[index]


def test_samples_are_read_when_their_step_comes() -> None:
    samples = make_samples(20)
    for mode in ({}, {"per_device_train_batch_size": None, "max_tokens_per_batch": 64}):
        store = Store(samples)
        rank = loader(store, **mode)
        assert rank.fingerprint == loader(samples, **mode).fingerprint
        assert rank.padding_saved == loader(samples, **mode).padding_saved
        assert rank.num_steps(0) == loader(samples, **mode).num_steps(0)
        assert store.read == []
        next(iter(rank))
        assert store.read == [index for micro_batch in rank.plan(0).step(0) for index in micro_batch[0]]
    given = loader(samples, lengths=[1] * 20, per_device_train_batch_size=None, max_tokens_per_batch=10)
    assert given.num_steps(0) == 1  # two packs


def test_whole_weights_repeat_every_sample() -> None:
    sources = [(3, 2.0), (2, 1.0), (0, 1.0), (4, 3.0)]
    drawn = sorted(draw_samples(sources, seed=0, epoch=5).tolist())
    assert drawn == [0, 0, 1, 1, 2, 2, 3, 4, *sorted([5, 6, 7, 8] * 3)]
    for mode in ({"batch_size": 3}, {"max_tokens": 64}):
        steps = step_samples(plan(random_lengths(9), 2, 1, **mode, sources=sources))
        assert sorted(index for step in steps for index in step) == drawn


@pytest.mark.parametrize(
    ("count", "weight"), [(10, 0.3), (10, 0.25), (7, 1.4), (5, 2.5), (3, 0.01), (4, 0.9)]
)
def test_parts_of_a_source_take_turns(count: int, weight: float) -> None:
    times = collections.Counter(dict.fromkeys(range(2, 2 + count), 0))
    for epoch in range(23):
        drawn = draw_samples([(2, 1.0), (count, weight)], seed=1, epoch=epoch).tolist()
        assert drawn[:2] == [0, 1]
        assert len(drawn) - 2 == num_draws(count, weight)
        times.update(drawn[2:])
        assert set(times) == set(range(2, 2 + count))
        assert max(times.values()) - min(times.values()) <= 1


def test_number_of_draws() -> None:
    cases = [(10, 0.3), (10, 1.26), (10, 2.0), (3, 0.01), (0, 0.5), (7, 1.0)]
    assert [num_draws(count, weight) for count, weight in cases] == [3, 13, 20, 1, 0, 7]
    for weight in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="not a number above 0"):
            num_draws(3, weight)
    with pytest.raises(ValueError, match=r"sources \[\(3, 1.0\)\] for 4 samples"):
        plan([5] * 4, batch_size=1, sources=[(3, 1.0)])


def test_parts_are_drawn_by_seed() -> None:
    drawn = [draw_samples([(20, 0.5)], seed=seed, epoch=0).tolist() for seed in (0, 1)]
    assert sorted(drawn[0]) != sorted(drawn[1])
    assert sorted(drawn[0]) != list(range(10))


def test_total_steps() -> None:
    samples = make_samples(33)
    padded = loader(samples)  # 8 samples a step
    assert [padded.total_steps(epochs) for epochs in (0.2, 1, 1.0, 1.2, 2.1, 3)] == [1, 5, 5, 6, 11, 15]
    assert loader(make_samples(80)).total_steps(2.1) == 21  # not 22 for a rounding error
    assert loader(samples, sources=[(20, 0.5), (13, 2.0)]).total_steps(2) == 2 * math.ceil(36 / 8)
    packed = {"dp_size": 1, "gradient_accumulation_steps": 1, "per_device_train_batch_size": None}
    # Of ten samples drawn, more are long in one epoch than in the next.
    samples = [Sample([1] * length, [1] * length) for length in [10] * 10 + [5] * 10]
    mixed = loader(samples, **packed, max_tokens_per_batch=10, seed=1, sources=[(20, 0.5)])
    per_epoch = [mixed.num_steps(epoch) for epoch in range(4)]
    assert per_epoch == [8, 7, 8, 7]
    assert per_epoch == [mixed.plan(epoch).num_steps for epoch in range(4)]
    assert mixed.total_steps(3) == sum(per_epoch[:3])
    assert mixed.total_steps(1.2) == 8 + 2
    assert mixed.total_steps(0.5) == math.ceil(per_epoch[0] / 2)


def test_a_million_samples_are_planned_in_seconds() -> None:
    lengths = lognormal(1_000_000, 400, 1.0)
    start = time.process_time()
    rank = loader(
        Store([]),
        dp_size=8,
        per_device_train_batch_size=None,
        max_tokens_per_batch=8192,
        lengths=lengths,
        sources=[(1_000_000, 1.0)],
    )
    rank.plan(0).step(0), rank.num_steps(0), rank.fingerprint, rank.padding_saved  # noqa: B018
    assert time.process_time() - start < 6  # 0.9 on an idle core


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
