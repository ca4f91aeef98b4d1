"""Does the audit find what is known to be there, and nothing else? Models that were made to have seen a benchmark.

    python benchmarks/planted_contamination.py --math500 MATH500.jsonl --gsm8k_train TRAIN.jsonl --json planted.json

Tiny Llama models are trained from scratch on texts of GSM8K's train split, each document padded, none packed. Half of
MATH-500, drawn by the seed, is planted among them: every item in one of four formats, 1, 4, 16 or 32 times.

- **verbatim**: question and solution as they are in the file.
- **question only**.
- **reformatted**: the question after "Problem:", with other spacing in formulas and between sentences.
- **numbers changed**: the question with other numbers and names. Its copies are no copies; a miss is what is expected.

The other half is held out. Null models have seen GSM8K alone. Each model is audited as a user would do it, by
`run_audit` with the controls that hfpar makes; the reference model is a null model that trained on other texts in
another order. What is reported of a method is how well its score tells planted items from the same models' held-out
ones (AUC; recall where 1 % of the held-out items are taken for planted), since these differ in nothing else.

Verdicts that should be "no evidence" come from null models on MATH-500 and on random draws of 200 of its items, and,
which is harder, from planted models on their held-out halves, whose controls are copies of the same half. Draws of one
model share its items and its controls: their share of false alarms is an average, not an independent sample. Since
such models complete nothing by chance, a third kind of draw splits what a planted model makes of MATH-500 at random:
100 items as the benchmark, the others, planted ones among them, as its control.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import multiprocessing
import random
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from planted_figures import show, summarize  # noqa: E402
from planted_models import Sizes, deal, make_documents, train_model, train_tokenizer  # noqa: E402
from rich.console import Console  # noqa: E402

from hfpar.accelerator import Launch, LaunchDefaults  # noqa: E402
from hfpar.audit.conclude import compare, conclude, test_ratios  # noqa: E402
from hfpar.audit.results import ItemResult, Report, item_from_dict  # noqa: E402
from hfpar.audit.run import run_audit  # noqa: E402
from hfpar.audit.summarize import SetInfo, cut_at, is_hit  # noqa: E402
from hfpar.audit.tails import last_change  # noqa: E402
from hfpar.config.audit_schema import AuditConfig  # noqa: E402
from hfpar.config.engine import DDPSettings  # noqa: E402
from hfpar.data.benchmarks import BenchmarkItem, load_benchmark  # noqa: E402

DATA = ROOT.parent / "shared" / "data"


# Audits


@dataclass(frozen=True)
class Audited:
    """What an audit found."""

    report: Report
    items: dict[str, list[ItemResult]]
    """By set, the benchmark first."""

    @property
    def benchmark(self) -> str:
        """Its name."""
        return next(one.name for one in self.report.sets if one.role == "benchmark")

    @property
    def infos(self) -> list[SetInfo]:
        """The sets, as statistics take them."""
        return [
            SetInfo(
                one.name,
                one.role,
                one.kind,
                one.source,
                one.sha256,
                one.num_duplicates,
                tuple(one.applies_to),
            )
            for one in self.report.sets
        ]


def audit(
    model: Path, items: Sequence[BenchmarkItem], folder: Path, reference: Path | None = None
) -> Audited:
    """Audit as `eval/contamination.py` does, in this process, with items for the whole of MATH-500."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "items.jsonl"
    rows = [
        {"unique_id": one.item_id, "problem": one.question, "answer": one.answer, "solution": one.solution}
        for one in items
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = AuditConfig(
        model_name_or_path=str(model),
        reference_model=None if reference is None else str(reference),
        benchmarks="math500",
        benchmark_files={"math500": str(path)},
        output_dir=str(folder / "audit"),
        overwrite=True,
    )
    launch = Launch(0, 0, 1, 1, DDPSettings(), LaunchDefaults())
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        report = run_audit(config, launch)
    found: dict[str, list[ItemResult]] = {one.name: [] for one in report.sets}
    for line in (folder / "audit" / "items.jsonl").read_text(encoding="utf-8").splitlines():
        item = item_from_dict(json.loads(line))
        found[item.set].append(item)
    return Audited(report, found)


def scores_of(item: ItemResult) -> dict[str, float]:
    """By method, the higher the more suspect; a tail that wasn't probed counts as not completed."""
    cuts = {ratio: cut_at(item, ratio, "bare") for ratio in (0.4, 0.6)}
    return {
        **{
            f"exact {100 * ratio:.0f} %": float(cut is not None and is_hit(cut))
            for ratio, cut in cuts.items()
        },
        "longest run": float(item.longest_run),
        "grade A or B": float(item.grade in ("A", "B")),
        **item.logprobs,
    }


# Verdicts that should be none


def false_alarms(audited: Audited, size: int, num_draws: int, seed: int) -> tuple[int, int]:
    """Verdicts of some evidence or more, of random parts of the benchmark, and how many were drawn."""
    name, rng = audited.benchmark, random.Random(f"draws:{seed}")
    whole = audited.items[name]
    if not any(is_hit(cut) for item in whole for cut in item.cuts):
        return 0, num_draws  # where nothing is completed every p-value is 1
    remembered = functools.cache(last_change)  # of a text: what takes most of a comparison's time
    with unittest.mock.patch("hfpar.audit.tails.last_change", remembered):
        levels = [_level(audited, rng.sample(whole, min(size, len(whole)))) for _ in range(num_draws)]
    return sum(level in ("some", "strong") for level in levels), num_draws


def _level(audited: Audited, drawn: Sequence[ItemResult]) -> str:
    items = {**audited.items, audited.benchmark: drawn}
    comparisons = compare(audited.infos, items)
    return conclude(audited.infos, items, comparisons, test_ratios(comparisons))[0].level


def split_alarms(audited: Audited, size: int, num_draws: int, seed: int) -> tuple[int, int]:
    """The same of random splits of the benchmark itself: some items for the benchmark, the others for its control.

    Planted items are completed on both sides alike, so that there is nothing to find, and chance has something to play
    with: where hardly anything is completed, as in the other draws, no test could give a false alarm.
    """
    name, rng = audited.benchmark, random.Random(f"splits:{seed}")
    own = next(info for info in audited.infos if info.name == name)
    infos = [own, SetInfo("others", "control", "file", own.source, own.sha256, applies_to=(name,))]
    remembered = functools.cache(last_change)
    alarms = 0
    with unittest.mock.patch("hfpar.audit.tails.last_change", remembered):
        for _ in range(num_draws):
            drawn = rng.sample(audited.items[name], len(audited.items[name]))
            items = {name: drawn[:size], "others": drawn[size:]}
            comparisons = compare(infos, items)
            verdict = conclude(infos, items, comparisons, test_ratios(comparisons))[0]
            assert verdict.level != "untested", verdict.text
            alarms += verdict.level in ("some", "strong")
    return alarms, num_draws


# One model after another


@dataclass(frozen=True)
class Job:
    """One model: what it is trained on, and how it is audited."""

    seed: int
    is_null: bool
    sizes: Sizes
    math500: str
    gsm8k_train: str
    folder: Path
    num_draws: int
    references: int

    @property
    def model(self) -> Path:
        """Its folder."""
        return self.folder / f"{'null' if self.is_null else 'planted'}-{self.seed}"


def train(job: Job) -> dict[str, Any]:
    """Train the job's model, unless that was done before."""
    path = job.model / "training.json"
    if path.is_file():
        return dict(json.loads(path.read_text(encoding="utf-8")))
    torch.set_num_threads(1)
    rows = load_benchmark("gsm8k_train", {"gsm8k_train": job.gsm8k_train}).items
    texts = [f"{row.question}\n{row.answer}" for row in rows]
    tokenizer = train_tokenizer(texts, job.sizes.vocab_size)
    number = job.seed + 1000 * job.is_null
    filler = random.Random(f"filler:{number}").sample(texts, min(job.sizes.num_texts, len(texts)))
    planted = []
    if not job.is_null:
        planted = deal(load_benchmark("math500", {"math500": job.math500}).items, job.seed)[0]
    found = train_model(make_documents(filler, planted, job.seed), tokenizer, job.sizes, number, job.model)
    path.write_text(json.dumps(found) + "\n", encoding="utf-8")
    return found


def measure(job: Job) -> dict[str, Any]:
    """Audit the job's model, unless that was done before."""
    path = job.model / "measured.json"
    if path.is_file():
        return dict(json.loads(path.read_text(encoding="utf-8")))
    result = _measure(job)
    path.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return result


def _measure(job: Job) -> dict[str, Any]:
    torch.set_num_threads(1)
    items = load_benchmark("math500", {"math500": job.math500}).items
    other = (job.seed + 1) % job.references if job.is_null else job.seed % job.references
    whole = audit(job.model, items, job.model / "whole", job.folder / f"null-{other}")
    found = {item.item_id: item for item in whole.items[whole.benchmark]}
    result: dict[str, Any] = {
        "model": job.model.name,
        "level": whole.report.verdicts[0].level,
        "verdict": whole.report.verdicts[0].text,
        "smallest_detectable_share": whole.report.verdicts[0].smallest_detectable_share,
        "control_grades": sum(
            item.grade in ("A", "B")
            for name in whole.items
            if name != whole.benchmark
            for item in whole.items[name]
        ),
    }
    if job.is_null:
        result["held_out"] = [as_row(found[item.item_id]) for item in items]
        result["alarms"] = false_alarms(whole, 200, job.num_draws, job.seed)
        return result
    planted, held_out = deal(items, job.seed)
    result["planted"] = [
        {**as_row(found[one.item.item_id]), "copies": one.copies, "format": one.format} for one in planted
    ]
    result["held_out"] = [as_row(found[item.item_id]) for item in held_out]
    half = audit(job.model, held_out, job.model / "held_out")
    result["held_out_level"] = half.report.verdicts[0].level
    result["held_out_verdict"] = half.report.verdicts[0].text
    result["alarms"] = false_alarms(half, 125, job.num_draws, job.seed)
    result["splits"] = split_alarms(whole, 100, job.num_draws, job.seed)
    return result


def as_row(item: ItemResult) -> dict[str, Any]:
    """What is kept of an item."""
    probed = [cut.ratio for cut in item.cuts if cut.skipped is None]
    return {"item_id": item.item_id, "grade": item.grade, "probed": probed, "scores": scores_of(item)}


def in_processes(console: Console, what: Any, jobs: Sequence[Job], processes: int) -> list[dict[str, Any]]:
    """Do each job, several at a time, and say how each went."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        results = []
        for job, result in zip(jobs, pool.map(what, jobs), strict=True):
            plain = {key: value for key, value in result.items() if key not in ("planted", "held_out")}
            console.print(f"{job.model.name}: {plain}")
            results.append(result)
    return results


def main(argv: Sequence[str] | None = None) -> None:
    """Train, audit, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--math500", default=str(DATA / "math500.jsonl"))
    parser.add_argument("--gsm8k_train", default=str(DATA / "gsm8k_train.jsonl"))
    parser.add_argument("--seeds", type=int, default=3, help="models with planted items")
    parser.add_argument("--nulls", type=int, default=4, help="models without; at least 2")
    parser.add_argument("--draws", type=int, default=100, help="random parts of a benchmark, for each model")
    parser.add_argument(
        "--texts",
        type=int,
        default=Sizes.num_texts,
        help="of GSM8K, for each model",
    )
    parser.add_argument("--processes", type=int, default=2, help="models at a time, of one thread each")
    parser.add_argument("--quick", action="store_true", help="1 planted model, 2 null models, 20 draws")
    parser.add_argument(
        "--keep", type=Path, help="keep models and audits in this folder; what is there already is used"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    if args.quick:
        args.seeds, args.nulls, args.draws = 1, 2, 20
    console, begin = Console(width=None if sys.stdout.isatty() else 160), time.monotonic()
    sizes = replace(Sizes(), num_texts=args.texts)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        fixed = (sizes, args.math500, args.gsm8k_train, folder, args.draws, args.nulls)
        nulls = [Job(seed, True, *fixed) for seed in range(args.nulls)]
        planted = [Job(seed, False, *fixed) for seed in range(args.seeds)]
        trained = in_processes(console, train, [*planted, *nulls], args.processes)
        measured = in_processes(console, measure, [*planted, *nulls], args.processes)
    figures = summarize(measured[: args.seeds], measured[args.seeds :])
    show(console, figures)
    minutes = (time.monotonic() - begin) / 60
    console.print(f"{minutes:.0f} minutes")
    if args.json:
        text = json.dumps(
            {"sizes": asdict(sizes), "minutes": minutes, "trained": trained, **figures, "models": measured},
            indent=1,
        )
        args.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
