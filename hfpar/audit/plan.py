"""What an audit would cost and what it could find: no model is needed, and a tokenizer only for exact counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from hfpar.audit.endings import CommonEndings
from hfpar.audit.power import expected_detectable_share
from hfpar.audit.prefix import Cut, TailLimits, is_boundary
from hfpar.audit.results import CutResult, ItemResult, Mode, Role
from hfpar.audit.statistics import MIN_CONTROL_ITEMS
from hfpar.audit.summarize import SetInfo, cut_at
from hfpar.audit.tails import ProbedTails, match_tails
from hfpar.audit.text import count_words
from hfpar.data.benchmarks import Benchmark, BenchmarkItem

CONTROL_RATES = (0.0, 0.005, 0.01, 0.05)
"""How much of a control a model may complete by luck."""
CHARACTERS_PER_TOKEN = 3.5
"""Where no tokenizer says better."""
CutText = Callable[[str, float], Cut]
"""From a text and a ratio to where it is cut."""
CountTokens = Callable[[Sequence[str]], Sequence[int]]


@dataclass(frozen=True)
class SetPlan:
    """A set's size."""

    name: str
    role: Role
    num_items: int
    num_tokens: int
    """To be read once for every mode."""


@dataclass(frozen=True)
class ControlPlan:
    """A control beside a benchmark at one ratio."""

    control: str
    num_matched: int
    """Of the control's, those with counterparts in the benchmark."""
    num_benchmark_matched: int
    """Of the benchmark's, those with counterparts in the control."""
    detectable: dict[float, float | None]
    """By the rate at which the control is completed: the smallest share of matched tails completed from memory that is
    found 4 times in 5; None: not even all. Empty without power."""

    @property
    def has_power(self) -> bool:
        """Whether there'd be a p-value."""
        return self.num_matched >= MIN_CONTROL_ITEMS


@dataclass(frozen=True)
class RatioPlan:
    """A benchmark at one ratio."""

    benchmark: str
    ratio: float
    num_items: int
    num_tails: int
    """That would be probed."""
    skipped: dict[str, int]
    """By `SkipReason`."""
    controls: list[ControlPlan]


@dataclass(frozen=True)
class Plan:
    """All of it."""

    sets: list[SetPlan]
    ratios: list[RatioPlan]
    modes: list[Mode]
    num_tests: int
    """Over which Holm's adjustment goes."""
    alpha: float
    num_tokens: int
    """To read in all, once for every mode."""
    tokens_are_counted: bool
    """By a tokenizer; else they're guessed from the number of characters."""


def plain_cut(
    text: str, ratio: float, limits: TailLimits, fits: Callable[[int], bool] = lambda position: True
) -> Cut:
    """Where a text is cut without a tokenizer: nearly always where one would have it, too.

    Args:
        text: all of it.
        ratio: of its characters.
        limits: of its tail.
        fits: what else a position must be, beside the end of a word.
    """
    for position in range(int(ratio * len(text) + 1e-9), 0, -1):
        if is_boundary(text, position):
            words = count_words(text[position:])
            if words < limits.min_words or len(text[position:].strip()) < limits.min_chars:
                return Cut(ratio, skipped="short_tail")
            if fits(position):
                return Cut(ratio, position, 0, words)
    return Cut(ratio, skipped="no_cut")


def make_plan(
    sets: Sequence[tuple[SetInfo, Benchmark]],
    ratios: Sequence[float],
    cut_text: CutText,
    *,
    modes: Sequence[Mode] = ("bare",),
    count_tokens: CountTokens | None = None,
    alpha: float = 0.05,
) -> Plan:
    """Work out cost and power.

    Args:
        sets: Benchmarks and controls.
        ratios: As of the audit.
        cut_text: As the audit cuts; `plain_cut` without a tokenizer.
        modes: As of the audit.
        count_tokens: Of each text; None: guessed from its characters.
        alpha: Level of all tests together.
    """
    plans = [_set_plan(info, found, count_tokens) for info, found in sets]
    common = CommonEndings(sets)
    items = {
        info.name: [_unread(info.name, item, ratios, cut_text, common) for item in found.items]
        for info, found in sets
    }
    tails = ProbedTails(items)
    benchmarks = [info for info, _ in sets if info.role == "benchmark"]
    num_tests = len(benchmarks) * len(ratios) * len(modes)
    planned = []
    for info in benchmarks:
        for ratio in ratios:
            cuts = [cut for item in items[info.name] if (cut := cut_at(item, ratio, "bare")) is not None]
            skipped = Counter[str](cut.skipped for cut in cuts if cut.skipped is not None)
            controls = [
                _control_plan(info.name, control.name, ratio, tails, alpha / max(1, num_tests))
                for control, _ in sets
                if control.role == "control" and info.name in control.applies_to
            ]
            num_tails = len(cuts) - skipped.total()
            planned.append(RatioPlan(info.name, ratio, len(cuts), num_tails, dict(skipped), controls))
    num_tokens = sum(plan.num_tokens for plan in plans) * len(modes)
    return Plan(plans, planned, list(modes), num_tests, alpha, num_tokens, count_tokens is not None)


def _set_plan(info: SetInfo, found: Benchmark, count_tokens: CountTokens | None) -> SetPlan:
    texts = [item.question for item in found.items]
    if count_tokens is None:
        counts: Sequence[int] = [round(len(text) / CHARACTERS_PER_TOKEN) for text in texts]
    else:
        counts = count_tokens(texts)
    return SetPlan(info.name, info.role, len(texts), sum(counts))


def _unread(
    name: str, item: BenchmarkItem, ratios: Sequence[float], cut_text: CutText, common: CommonEndings
) -> ItemResult:
    """An item as it will be cut, nothing of it completed."""
    text = item.question.strip()
    cuts = [common.skip(cut_text(text, ratio), item, name) for ratio in ratios]
    return ItemResult(
        set=name,
        item_id=item.item_id,
        place=item.place,
        text=text,
        num_tokens=0,
        hits=[],
        longest_run=0,
        longest_run_span=[0, 0],
        logprobs={},
        cuts=[CutResult(cut.ratio, "bare", cut.skipped, cut.position, cut.tail_words) for cut in cuts],
        pair_id=item.pair_id,
        pair_set=item.pair_set,
        varies=item.varies,
    )


def _control_plan(benchmark: str, name: str, ratio: float, tails: ProbedTails, alpha: float) -> ControlPlan:
    strata = match_tails(*tails.pair(benchmark, [name], ratio, "bare"))
    num_matched = sum(stratum.control_total for stratum in strata)
    detectable = {}
    if num_matched >= MIN_CONTROL_ITEMS:
        detectable = {rate: expected_detectable_share(strata, rate, alpha) for rate in CONTROL_RATES}
    return ControlPlan(name, num_matched, sum(stratum.total for stratum in strata), detectable)


# For people


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print what it would cost and find as tables."""
    console = console or Console(highlight=False)
    console.print(_cost_table(plan))
    console.print(_power_table(plan))
    console.print(
        "On the right: the smallest share of a benchmark's tails completed from memory that is found 4 times in 5 "
        f"(alpha {plan.alpha:g} by Holm over {plan.num_tests} tests), by how many of the control a model completes by "
        f"luck; each control by itself. Fewer than {MIN_CONTROL_ITEMS} matching control tails test nothing."
    )


def _cost_table(plan: Plan) -> Table:
    about = "" if plan.tokens_are_counted else "about "
    table = _table("set", "role", "items", "tokens", title="what is read")
    for one in plan.sets:
        table.add_row(one.name, one.role, f"{one.num_items:,}", f"{about}{one.num_tokens:,}")
    modes = " and ".join(plan.modes)
    table.add_row(
        f"in all ({modes})", "", f"{sum(one.num_items for one in plan.sets):,}", f"{about}{plan.num_tokens:,}"
    )
    return table


def _power_table(plan: Plan) -> Table:
    heads = [f"luck {100 * rate:g} %" for rate in CONTROL_RATES]
    table = _table(
        "benchmark", "ratio", "tails", "skipped", "control", "matching", *heads, title="what could be found"
    )
    for one in plan.ratios:
        start = [
            one.benchmark,
            f"{100 * one.ratio:.0f} %",
            f"{one.num_tails:,}",
            f"{one.num_items - one.num_tails:,}",
        ]
        for control in one.controls:
            matching = f"{control.num_benchmark_matched:,} : {control.num_matched:,}"
            table.add_row(*start, control.control, matching, *_shares(control.detectable))
            start = [""] * len(start)
        if not one.controls:
            table.add_row(*start, "none", "", *["no test"] * len(heads))
    return table


def _shares(detectable: Mapping[float, float | None]) -> list[str]:
    if not detectable:
        return ["no power"] * len(CONTROL_RATES)
    return ["nothing" if share is None else f"{100 * share:.1f} %" for share in detectable.values()]


def _table(first: str, *others: str, title: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="left" if name in ("role", "control") else "right")
    return table
