"""The benchmarks and controls of an audit, and their texts made ready to be probed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hfpar.audit.controls import RANDOM_CALCULATION, perturbed_copies, random_calculation
from hfpar.audit.endings import CommonEndings
from hfpar.audit.prefix import Cut, TailLimits, TextTokenizer, find_cut
from hfpar.audit.probe import PlannedItem
from hfpar.audit.summarize import SetInfo
from hfpar.config.audit_schema import AuditConfig
from hfpar.config.audit_validate import DEFAULT_RATIOS
from hfpar.config.validate import names_in
from hfpar.data.benchmarks import Benchmark, load_benchmarks, load_control
from hfpar.errors import ConfigError


@dataclass(frozen=True)
class AuditSet:
    """A benchmark or a control."""

    info: SetInfo
    benchmark: Benchmark

    @property
    def name(self) -> str:
        """Its name in the report."""
        return self.info.name


def load_sets(config: AuditConfig) -> list[AuditSet]:
    """Load the benchmarks, and load or make their controls.

    Raises:
        DataError: one can't be read.
    """
    benchmarks = [
        spread(benchmark, config.max_items)
        for benchmark in load_benchmarks(names_in(config.benchmarks), config.benchmark_files or {})
    ]
    names = tuple(benchmark.name for benchmark in benchmarks)
    sets = [AuditSet(_info(benchmark, "benchmark"), benchmark) for benchmark in benchmarks]
    builtin = names_in(config.builtin_controls)
    if "perturbed" in builtin:
        for benchmark in benchmarks:
            copies = perturbed_copies(benchmark, config.num_control_items, config.seed)
            sets.append(AuditSet(_info(copies, "perturbed", (benchmark.name,)), copies))
    if "random_calculation" in builtin:
        made = random_calculation(config.num_control_items, config.seed)
        sets.append(AuditSet(_info(made, RANDOM_CALCULATION, names), made))
    for name, path in (config.controls or {}).items():
        sets.append(_file_control(name, path, benchmarks, config.max_items))
    _check_names(sets)
    return [one for one in sets if one.benchmark.items]


def _check_names(sets: Sequence[AuditSet]) -> None:
    """A second set of a name would take the first one's place: in a run's lines, and in the report.

    Raises:
        ConfigError: two have the same.
    """
    counts = Counter(one.name for one in sets)
    for one in sets:
        if counts[one.name] > 1:
            which = ", ".join(other.benchmark.source for other in sets if other.name == one.name)
            key = (
                "controls"
                if any(o.name == one.name and o.info.kind == "file" for o in sets)
                else "benchmarks"
            )
            raise ConfigError(
                f"{key}: {one.name} is the name of two sets ({which}); give one of them another"
            )


def _file_control(name: str, path: str, benchmarks: Sequence[Benchmark], max_items: int | None) -> AuditSet:
    owner, _, own_name = name.rpartition("/")
    names = [benchmark.name for benchmark in benchmarks]
    if owner and owner not in names:
        raise ConfigError(
            f"controls: {name}; {owner} is no benchmark of this audit, which has {', '.join(names)}"
        )
    held_against = (owner,) if owner else tuple(names)
    chosen = [benchmark for benchmark in benchmarks if benchmark.name in held_against]
    control = spread(load_control(own_name, path, chosen), max_items)
    return AuditSet(_info(control, "file", held_against), control)


def spread(benchmark: Benchmark, most: int | None) -> Benchmark:
    """So many of its items, spread evenly over its file; of a control first those that vary an item of a benchmark."""
    total = len(benchmark.items)
    if most is None or total <= most:
        return benchmark
    paired = [place for place, item in enumerate(benchmark.items) if item.pair_id is not None]
    others = [place for place, item in enumerate(benchmark.items) if item.pair_id is None]
    places = _evenly(paired, most, take_turns=True) if paired else []
    places += _evenly(others, most - len(places))
    kept = tuple(benchmark.items[place] for place in sorted(places))
    return replace(benchmark, items=kept, source=f"{benchmark.source}, {most} of {total} items")


def _evenly(places: Sequence[int], most: int, *, take_turns: bool = False) -> list[int]:
    """One out of each of `most` even parts: its first, or, as copies of a kind may return in each, the next in turn."""
    most = min(most, len(places))
    bounds = [part * len(places) // most for part in range(most + 1)] if most else [0]
    return [
        places[begin + (part % (end - begin) if take_turns else 0)]
        for part, (begin, end) in enumerate(pairwise(bounds))
    ]


def _info(benchmark: Benchmark, kind: str, applies_to: tuple[str, ...] = ()) -> SetInfo:
    return SetInfo(
        name=benchmark.name,
        role="benchmark" if kind == "benchmark" else "control",
        kind=kind,  # type: ignore[arg-type]
        source=benchmark.source,
        sha256=benchmark.sha256,
        num_duplicates=benchmark.num_duplicates,
        applies_to=applies_to,
    )


# Texts


def ratios_of(config: AuditConfig) -> list[float]:
    """Where texts are cut, from small to large."""
    return sorted(config.ratios or DEFAULT_RATIOS)


def limits_of(config: AuditConfig) -> TailLimits:
    """Which tails are too short to be probed."""
    return TailLimits(config.min_tail_words, config.min_tail_chars)


def plan_items(
    sets: Sequence[AuditSet],
    tokenizer: TextTokenizer,
    ratios: Sequence[float],
    limits: TailLimits,
    max_length: int | None,
) -> list[PlannedItem]:
    """Tokenize and cut every text.

    Args:
        sets: benchmarks and controls.
        tokenizer: the model's.
        ratios: where to cut.
        limits: of tails.
        max_length: most tokens that the model reads.
    """
    common = CommonEndings((one.info, one.benchmark) for one in sets)
    planned = []
    for one in sets:
        texts = [item.question.strip() for item in one.benchmark.items]
        for item, tokenized in zip(one.benchmark.items, tokenizer(texts), strict=True):
            if max_length is not None and len(tokenized.input_ids) > max_length:
                cuts = [Cut(ratio, skipped="too_long") for ratio in ratios]
            else:
                cuts = [find_cut(tokenized, ratio, tokenizer, limits) for ratio in ratios]
            cuts = [common.skip(cut, item, one.name) for cut in cuts]
            planned.append(PlannedItem(one.name, item, tokenized, cuts))
    return planned
