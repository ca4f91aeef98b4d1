"""What an audit finds, as plain data: the lines of `items.jsonl` and the tree of `report.json`.

Everything downstream (statistics, reports, comparisons) reads these and nothing else, so that a report can be made
again from its files without the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from hfpar.data.benchmarks import owner_of

SCHEMA_VERSION = 1

Role = Literal["benchmark", "control"]
Mode = Literal["bare", "chat"]
"""Whether the model was given the bare prefix, or the prefix as a user's message in its chat template."""
Grade = Literal["A", "B", "C"]
Level = Literal["strong", "some", "none", "untested"]
SkipReason = Literal["short_tail", "no_cut", "too_long", "same_as_benchmark", "shared_tail"]


# One line of items.jsonl


@dataclass(frozen=True)
class CutResult:
    """What the model did from one cut of an item's text."""

    ratio: float
    mode: Mode
    skipped: SkipReason | None = None
    """Why this cut wasn't probed; then nothing below it means anything."""
    cut: int = 0
    """Characters of the prefix; the tail is `text[cut:]`, its leading space included."""
    tail_words: int = 0
    tail_tokens: int = 0
    exact: bool = False
    """The greedy continuation begins with the tail, character by character."""
    exact_normalized: bool = False
    """The same after Unicode and white space are normalised."""
    matched_tokens: int = 0
    """Tokens of the tail before the first that the model would have written otherwise."""
    near_tie: bool = False
    """Another token was within `tie_tolerance` of the best where that could change the verdict."""
    settled_by: Literal["forward", "generation"] = "forward"
    written: str | None = None
    """What the model wrote: the whole continuation where it was generated, else up to the first divergence."""
    is_complete: bool = False
    """`written` is a whole continuation."""
    rouge_l: float | None = None
    edit_similarity: float | None = None
    answer: str | None = None
    """The answer found in a generated continuation."""
    answer_right: bool | None = None


@dataclass(frozen=True)
class ItemResult:
    """What was found about one item."""

    set: str
    """Of which `SetInfo.name`."""
    item_id: str
    place: str
    text: str
    num_tokens: int
    hits: list[list[int]]
    """`[start, end)` in characters of `text`: stretches whose tokens are each the model's first choice given the
    true text before them."""
    longest_run: int
    """Tokens in the longest such stretch."""
    longest_run_span: list[int]
    """`[start, end)` in characters of `text`."""
    logprobs: dict[str, float]
    """Scores by method, each the higher the more familiar: `loss` (mean log-probability of a token), `zlib`, `min_k`,
    `min_k_plus_plus`, and `reference` with a reference model."""
    cuts: list[CutResult]
    grade: Grade | None = None
    own_answer: str | None = None
    """What the model answered to the whole question, where that was asked."""
    own_answer_right: bool | None = None
    pair_id: str | None = None
    """Of a control: the item of the benchmark that it was made from."""
    pair_set: str | None = None
    """The name of that benchmark."""
    varies: str | None = None
    """Of a control: what it varies, where that is no item of the audit."""

    @property
    def owner(self) -> tuple[str, str]:
        """A set and an item of it: what varies an item belongs to that one."""
        return owner_of(self.set, self.item_id, self.pair_set, self.pair_id, self.varies)


# report.json


@dataclass(frozen=True)
class Estimate:
    """A share or a mean with its 95 % interval; all None where there is nothing to estimate it from."""

    value: float | None
    low: float | None
    high: float | None
    total: int
    hits: int | None = None
    """Of a share."""
    method: Literal["clopper-pearson", "stratified-wilson", "bootstrap"] = "clopper-pearson"


@dataclass(frozen=True)
class CutSummary:
    """One set at one ratio."""

    ratio: float
    mode: Mode
    exact: Estimate
    exact_normalized: Estimate
    matched_tokens: Estimate
    rouge_l: Estimate | None
    edit_similarity: Estimate | None
    answer: Estimate | None
    """Share of right answers reached from the prefix alone, of the items with a known answer."""
    skipped: dict[str, int]
    """By `SkipReason`."""
    num_near_ties: int
    num_settled_by_generation: int


@dataclass(frozen=True)
class SetSummary:
    """A benchmark or a control."""

    name: str
    role: Role
    kind: Literal["benchmark", "perturbed", "random_calculation", "file"]
    applies_to: list[str]
    """Of a control: the benchmarks it is held against."""
    source: str
    sha256: str
    num_items: int
    num_duplicates: int
    cuts: list[CutSummary]
    longest_run: Estimate
    longest_run_quantiles: dict[str, float]
    """`0.5`, `0.95` and `1` (the longest)."""
    loss: Estimate
    """Mean negative log-likelihood of a token, averaged over items."""
    own_answer: Estimate | None
    """Share of right answers to the whole questions, where they were asked."""
    grades: dict[str, int]


@dataclass(frozen=True)
class Stratum:
    """Items of a benchmark and of a control whose tails are about equally long."""

    low: int
    high: int
    """Words of the tails, both inclusive."""
    hits: int
    total: int
    control_hits: int
    control_total: int
    holds_numbers: bool | None = None
    """Whether the tails hold a number or a name that could as well be another, which makes them harder to guess; None:
    not told apart."""


@dataclass(frozen=True)
class Comparison:
    """Exact completions of a benchmark beside those of a control with tails of the same lengths."""

    benchmark: str
    control: str
    """A set's name, or `others` for several small ones together."""
    ratio: float
    mode: Mode
    rate: Estimate
    control_rate: Estimate
    """Reweighted to the benchmark's lengths where it is compared; its interval is of the unweighted rate."""
    difference: float | None
    low: float | None
    high: float | None
    """Newcombe's 95 % interval of the difference, stratified."""
    p_value: float | None
    """One-sided, exact and stratified; None: no power, see `note`."""
    strata: list[Stratum]
    num_unmatched: int
    """Items of the benchmark whose tails are longer or shorter than any control's."""
    note: str | None = None


@dataclass(frozen=True)
class RatioTest:
    """What counts for the verdict: the largest p-value over the controls heard, and Holm's over all of these."""

    benchmark: str
    ratio: float
    mode: Mode
    p_value: float | None
    p_holm: float | None
    deciding_control: str | None
    smallest_detectable_share: float | None
    """Share of the benchmark that the model must complete from memory for this test to find it 4 times in 5."""


@dataclass(frozen=True)
class Verdict:
    """A benchmark's, in words."""

    benchmark: str
    level: Level
    headline: str
    """Strong evidence, some evidence, no evidence at this power, not tested."""
    text: str
    """Two or three sentences with the figures."""
    p_holm: float | None
    smallest_detectable_share: float | None


@dataclass(frozen=True)
class ScoreComparison:
    """How well a log-probability tells a benchmark's items from a control's."""

    benchmark: str
    control: str
    method: str
    auc: float
    low: float
    high: float


@dataclass(frozen=True)
class OrderTest:
    """Whether the file's own order is likelier than shuffled ones."""

    benchmark: str
    num_shards: int
    num_permutations: int
    p_value: float | None
    note: str | None = None


@dataclass(frozen=True)
class Intrusion:
    """Whether perturbed questions are given the original's answers."""

    benchmark: str
    control: str
    num_pairs: int
    """Pairs whose right answers differ."""
    original_right: int
    perturbed_right: int
    p_accuracy: float | None
    """McNemar, exact, two-sided: originals are answered better than their perturbed copies, or worse."""
    original_answer_given: int
    """Perturbed questions that were given the original's answer."""
    perturbed_answer_given: int
    """Original questions that were given the perturbed copy's answer: what mere confusion does."""
    p_intrusion: float | None
    """McNemar, exact, one-sided: the former happens more often than the latter."""


@dataclass(frozen=True)
class ModelInfo:
    """What was audited."""

    name: str
    architecture: str
    num_parameters: int | None
    """None behind a server, as is what else it doesn't tell."""
    dtype: str | None
    sha256: str | None
    """Over the weight files, in order of name; None behind a server."""
    tokenizer_sha256: str | None
    base: str | None = None
    """Of an adapter."""
    quantization: str | None = None


@dataclass(frozen=True)
class Timing:
    """What it cost."""

    seconds: float
    probe_seconds: float
    num_tokens: int
    world_size: int


@dataclass(frozen=True)
class Report:
    """`report.json`."""

    schema_version: int
    hfpar_version: str
    created: str
    command: str
    settings: dict[str, Any]
    versions: dict[str, str]
    model: ModelInfo
    reference_model: ModelInfo | None
    method: str
    sets: list[SetSummary]
    comparisons: list[Comparison]
    tests: list[RatioTest]
    verdicts: list[Verdict]
    scores: list[ScoreComparison]
    orders: list[OrderTest]
    intrusions: list[Intrusion]
    limitations: list[str]
    timing: Timing
    warnings: list[str] = field(default_factory=list)


def cut_from_dict(data: Mapping[str, Any]) -> CutResult:
    """A cut as `items.jsonl` has it."""
    known = {item.name for item in fields(CutResult)}
    return CutResult(**{key: value for key, value in data.items() if key in known})


def item_from_dict(data: Mapping[str, Any]) -> ItemResult:
    """A line of `items.jsonl`; keys of later versions are left out."""
    known = {item.name for item in fields(ItemResult)}
    values = {key: value for key, value in data.items() if key in known}
    return ItemResult(**{**values, "cuts": [cut_from_dict(cut) for cut in data["cuts"]]})
