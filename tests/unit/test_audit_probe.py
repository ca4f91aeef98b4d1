"""The probe: one forward pass gives the verdicts of greedy generation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfpar.attention import interface
from hfpar.audit.forward import Forward, TokenScores, groups_of, prediction_scores
from hfpar.audit.generate import Generator, group_alike
from hfpar.audit.prefix import TailLimits, TextTokenizer, find_cut
from hfpar.audit.probe import PlannedItem, Probe, ProbeSettings
from hfpar.audit.results import ItemResult
from hfpar.data.benchmarks import BenchmarkItem
from hfpar.models.tiny import build_tiny_model
from hfpar.train.loss import LogitTransform

RATIOS = (0.2, 0.4, 0.6, 0.8)


def sentences(count: int) -> list[str]:
    """Texts that begin differently, and of which some words come twice."""
    rng = random.Random(0)
    words = "apples cards coins stamps shells cups keys toys boxes seeds pens books".split()
    return [
        f"Problem {number}: {rng.choice(words)} and {rng.choice(words)} cost {rng.randint(10, 99)}, but "
        f"{rng.choice(words)} cost {rng.randint(10, 99)}.  How many {rng.choice(words)} are {rng.randint(2, 9)} of "
        f"{rng.choice(words)}?"
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt the first texts by heart, the next ones half, and the last ones not at all."""
    folder = tmp_path_factory.mktemp("model")
    build_tiny_model(folder, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    texts = sentences(8) * 3 + sentences(14)[8:]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    torch.manual_seed(0)
    for _ in range(70):
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.generation_config.repetition_penalty = 30.0  # which the probe must not follow
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TextTokenizer:
    return TextTokenizer(AutoTokenizer.from_pretrained(folder))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    interface.register()
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="hfpar").eval()


@pytest.fixture(scope="module")
def planned(tokenizer: TextTokenizer) -> list[PlannedItem]:
    return plan(sentences(24), tokenizer)


def plan(texts: Sequence[str], tokenizer: TextTokenizer) -> list[PlannedItem]:
    return [
        PlannedItem(
            "made_up",
            BenchmarkItem(str(number), f"line {number}", tokenized.text, None, None),
            tokenized,
            [find_cut(tokenized, ratio, tokenizer, TailLimits(3, 8)) for ratio in RATIOS],
        )
        for number, tokenized in enumerate(tokenizer(texts))
    ]


def make_probe(model: Any, tokenizer: TextTokenizer, *, packs: bool = True, **settings: Any) -> Probe:
    ends = [tokenizer.tokenizer.eos_token_id]
    return Probe(
        Forward(model, packs=packs), Generator(model, ends[0], ends), tokenizer, ProbeSettings(**settings)
    )


def verdicts(results: Sequence[ItemResult]) -> list[tuple[Any, ...]]:
    return [
        (item.item_id, cut.mode, cut.ratio, cut.skipped, cut.exact, cut.exact_normalized, cut.matched_tokens)
        for item in results
        for cut in item.cuts
    ]


def test_scores_are_those_of_one_plain_pass_a_text(
    folder: Path, model: Any, planned: list[PlannedItem]
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    texts = [item.tokenized.input_ids for item in planned]
    for packs in (True, False):
        for ids, found in zip(texts, Forward(model, packs=packs)(texts), strict=True):
            with torch.inference_mode():
                logprobs = plain(input_ids=torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
            true = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            best, second = logprobs.topk(2, -1).values.unbind(1)
            mean = (logprobs.exp() * logprobs).sum(-1)
            std = ((logprobs.exp() * logprobs**2).sum(-1) - mean**2).sqrt()
            assert found.best[1:].tolist() == logprobs.argmax(-1).tolist()
            for mine, expected in (
                (found.logprob, true),
                (found.gap, best - true),
                (found.margin, best - second),
                (found.mean, mean),
                (found.std, std),
            ):
                np.testing.assert_allclose(mine[1:], expected.numpy(), rtol=1e-4, atol=1e-4)
            assert found.best[0] == -1 and np.isnan(found.logprob[0]) and not found.hits[0]
            assert found.hits[1:].tolist() == (logprobs.argmax(-1) == torch.tensor(ids[1:])).tolist()


def test_a_cpu_reads_texts_in_packs_that_its_caches_hold(
    model: Any, planned: list[PlannedItem], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [item.tokenized.input_ids for item in planned]
    together = Forward(model, packs=True)(texts)
    sizes: list[int] = []

    def counted(self: Any, args: Any, kwargs: dict[str, Any]) -> None:
        sizes.append(kwargs["input_ids"].numel())

    most = 3 * max(map(len, texts))
    monkeypatch.setattr("hfpar.audit.forward._CPU_STREAM_TOKENS", most)
    hook = model.model.register_forward_pre_hook(counted, with_kwargs=True)
    apart = Forward(model, packs=True)(texts)
    hook.remove()
    assert len(sizes) > 1 and sum(sizes) == sum(map(len, texts)) and max(sizes) <= most
    for one, other in zip(together, apart, strict=True):
        assert one.best.tolist() == other.best.tolist()
        np.testing.assert_allclose(one.logprob, other.logprob, atol=1e-5)


def test_texts_are_grouped_in_their_order() -> None:
    assert [list(group) for group in groups_of([3, 4, 3, 20, 1], 7)] == [[0, 1], [2], [3], [4]]
    assert [list(group) for group in groups_of([3, 4], None)] == [[0, 1]]
    assert groups_of([], 7) == []


def test_logits_are_transformed() -> None:
    logits = torch.tensor([[1.0, 3.0, -2.0]])
    scaled = prediction_scores(logits.clone(), torch.tensor([0]), LogitTransform(scale=0.5))
    capped = prediction_scores(logits.clone(), torch.tensor([0]), LogitTransform(softcap=2.0))
    assert scaled[0, 1].item() == pytest.approx((logits * 0.5).log_softmax(-1)[0, 0].item(), abs=1e-6)
    expected = (2 * torch.tanh(logits / 2)).log_softmax(-1)[0, 0].item()
    assert capped[0, 1].item() == pytest.approx(expected, abs=1e-6)


def test_forward_decides_as_generation_does(
    folder: Path, model: Any, tokenizer: TextTokenizer, planned: list[PlannedItem]
) -> None:
    by_forward = make_probe(model, tokenizer)(planned)
    by_generation = make_probe(model, tokenizer, method="generate", max_tokens_per_batch=300)(planned)
    assert verdicts(by_forward) == verdicts(by_generation)
    cuts = [cut for item in by_forward for cut in item.cuts]
    assert sum(cut.exact for cut in cuts) > 15 and sum(not cut.exact for cut in cuts) > 30
    assert any(0 < cut.matched_tokens < cut.tail_tokens for cut in cuts)
    assert sum(cut.settled_by == "generation" for cut in cuts) < len(cuts) / 2

    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    plain.generation_config.repetition_penalty = None
    for item, result in zip(planned, by_forward, strict=True):
        for cut in result.cuts:
            text = item.tokenized.text
            prompt = tokenizer.tokenizer(text[: cut.cut], return_tensors="pt")
            output = plain.generate(**prompt, do_sample=False, max_new_tokens=cut.tail_tokens + 4)
            written = tokenizer.tokenizer.decode(output[0])[cut.cut :]
            assert written.startswith(text[cut.cut :]) == cut.exact


def test_batches_dont_change_a_verdict(
    model: Any, tokenizer: TextTokenizer, planned: list[PlannedItem]
) -> None:
    probe = make_probe(model, tokenizer)
    together = probe(planned)
    alone = [probe([item])[0] for item in planned]
    unpacked = make_probe(model, tokenizer, packs=False)(planned)
    assert verdicts(together) == verdicts(alone) == verdicts(unpacked)
    for one, other in zip(together, alone, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, rel=1e-4, abs=1e-4)
        assert (one.hits, one.longest_run_span) == (other.hits, other.longest_run_span)


def test_hits_and_runs_lie_in_the_text(
    model: Any, tokenizer: TextTokenizer, planned: list[PlannedItem]
) -> None:
    known, unknown = make_probe(model, tokenizer)([planned[0], planned[-1]])
    start, end = known.longest_run_span
    assert known.longest_run > 20 and known.text[start:end].endswith("?")
    assert known.longest_run > unknown.longest_run
    assert known.logprobs["loss"] > unknown.logprobs["loss"]


# Ties


class FakeForward:
    """Scores that are given."""

    packs = True

    def __init__(self, scores: list[TokenScores]) -> None:
        self.scores = scores

    def __call__(self, texts: Sequence[Sequence[int]]) -> list[TokenScores]:
        return self.scores


class FakeGenerator:
    """Writes what it is given, and counts how often it is asked."""

    eos_token_ids: tuple[int, ...] = ()
    max_length = None

    def __init__(self, new_tokens: list[int]) -> None:
        self.new_tokens = new_tokens
        self.batches: list[int] = []

    def __call__(self, prompts: Any, most: Any, is_done: Any, *, tokens_per_batch: int) -> list[list[int]]:
        self.batches.append(len(prompts))
        return [self.new_tokens for _ in prompts]


def perfect_scores(ids: list[int]) -> TokenScores:
    size = len(ids)
    ones = np.ones(size, np.float32)
    return TokenScores(np.array([-1, *ids[1:]]), -ones, 0 * ones, ones, -ones, ones)


@pytest.mark.parametrize(
    ("place", "gap", "margin", "asked", "exact"),
    [
        (None, 0.0, 1.0, False, True),
        ("tail", 0.0, 5e-5, True, False),  # a hit that might not be one: generation says that it isn't
        ("tail", 5e-5, 5e-5, True, False),  # a miss that might be a hit
        ("tail", 2e-4, 2e-4, False, False),
        ("prefix", 0.0, 5e-5, False, True),
    ],
)
def test_near_ties_are_settled_by_generation(
    tokenizer: TextTokenizer, place: str | None, gap: float, margin: float, asked: bool, exact: bool
) -> None:
    item = plan(["one two three four five six seven eight nine ten eleven twelve"], tokenizer)[0]
    item = replace(item, cuts=[item.cuts[1]])
    ids, start = item.tokenized.input_ids, item.cuts[0].num_prefix_tokens
    scores = perfect_scores(ids)
    if place:
        position = start + 2 if place == "tail" else start - 1
        scores.gap[position], scores.margin[position] = gap, margin
        if gap:
            scores.best[position] = tokenizer.ids("Q")[0]
    generator = FakeGenerator(tokenizer.ids(" something else"))
    probe = Probe(FakeForward([scores]), generator, tokenizer, ProbeSettings())  # type: ignore[arg-type]
    [cut] = probe([item])[0].cuts
    assert (bool(generator.batches), cut.exact) == (asked, exact)
    assert cut.near_tie == asked and cut.settled_by == ("generation" if asked else "forward")


def test_another_spelling_of_the_same_text_is_exact(tokenizer: TextTokenizer) -> None:
    """The model prefers other tokens that spell the tail: only generation can tell."""
    item = plan(["one two three four five six seven eight nine ten eleven twelve"], tokenizer)[0]
    item = replace(item, cuts=[item.cuts[1]])
    ids, start = item.tokenized.input_ids, item.cuts[0].num_prefix_tokens
    scores = perfect_scores(ids)
    tail = item.tokenized.text[item.cuts[0].position :]
    pieces = [token for letter in tail for token in tokenizer.ids(letter)]
    scores.gap[start], scores.best[start] = 1.0, pieces[0]
    generator = FakeGenerator(pieces)
    probe = Probe(FakeForward([scores]), generator, tokenizer, ProbeSettings())  # type: ignore[arg-type]
    [cut] = probe([item])[0].cuts
    assert generator.batches == [1] and cut.exact and not cut.near_tie


def test_a_model_that_ends_has_not_completed(tokenizer: TextTokenizer) -> None:
    item = plan(["one two three four five six seven eight nine ten eleven twelve"], tokenizer)[0]
    item = replace(item, cuts=[item.cuts[1]])
    scores = perfect_scores(item.tokenized.input_ids)
    generator = FakeGenerator([])
    generator.eos_token_ids = (tokenizer.tokenizer.eos_token_id,)
    scores.gap[-1], scores.best[-1] = 1.0, tokenizer.tokenizer.eos_token_id
    probe = Probe(FakeForward([scores]), generator, tokenizer, ProbeSettings())  # type: ignore[arg-type]
    [cut] = probe([item])[0].cuts
    assert not generator.batches and not cut.exact and cut.matched_tokens == cut.tail_tokens - 1


# More of the model's own


def test_whole_continuations(model: Any, tokenizer: TextTokenizer, planned: list[PlannedItem]) -> None:
    known, unknown = make_probe(model, tokenizer, generate=True, max_new_tokens=60)([planned[0], planned[-1]])
    assert all(cut.is_complete and cut.written is not None for cut in known.cuts + unknown.cuts)
    first = known.cuts[1]
    assert first.exact and first.edit_similarity == 1.0
    assert first.rouge_l is not None and first.rouge_l > 0.9  # the last word may run on
    assert unknown.cuts[0].rouge_l is not None and unknown.cuts[0].rouge_l < 0.9


def test_the_chat_template_is_a_mode_of_its_own(
    model: Any, tokenizer: TextTokenizer, planned: list[PlannedItem]
) -> None:
    bare = make_probe(model, tokenizer)(planned)
    both = make_probe(model, tokenizer, chat_template=True)(planned)
    chat_by_generation = make_probe(model, tokenizer, chat_template=True, method="generate")(planned)
    assert verdicts(both) == verdicts(chat_by_generation)
    assert [one for one in verdicts(both) if one[1] == "bare"] == verdicts(bare)
    assert len(verdicts(both)) == 2 * len(verdicts(bare))
    assert sum(one[4] for one in verdicts(both) if one[1] == "chat") < sum(one[4] for one in verdicts(bare))


def test_batches_of_about_the_same_length() -> None:
    groups = group_alike([5, 100, 6, 7, 30, 200], 60)
    assert groups == [[5], [1], [4, 3], [2, 0]]
