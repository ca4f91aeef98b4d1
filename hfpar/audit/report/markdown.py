"""`report.md`: what can be pasted into a pull request or a model card."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hfpar.audit import wording
from hfpar.audit.report.page import facts, score_table
from hfpar.audit.report.storage import in_order
from hfpar.audit.results import Report

_SPECIAL = str.maketrans({character: f"\\{character}" for character in "\\`*_[]<>|#$~"})


def make_markdown(report: Report) -> str:
    """The report in GitHub's Markdown."""
    report = in_order(report)
    parts = [
        f"# Contamination audit: {markdown_text(report.model.name)}",
        markdown_text(wording.summary_sentence(report)),
        *(f"> **Warning.** {markdown_text(warning)}" for warning in report.warnings),
        *_verdicts(report),
        *_comparisons(report),
        *_exact(report),
        *_scores(report),
        *_others(report),
        "## What this audit cannot show",
        "\n".join(f"- {markdown_text(text)}" for text in report.limitations)
        or "- Nothing was said about it.",
        "## How it was made",
        _code(report.command),
        markdown_table(
            ["what", "value"], [[markdown_text(name), markdown_text(value)] for name, value in facts(report)]
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _verdicts(report: Report) -> list[str]:
    parts = ["## Verdicts"]
    rows = []
    for verdict in report.verdicts:
        summary = next((item for item in report.sets if item.name == verdict.benchmark), None)
        grades = [str(summary.grades.get(grade, 0)) if summary else "" for grade in wording.GRADES]
        rows.append(
            [
                f"**{markdown_text(verdict.benchmark)}**",
                f"{wording.LEVEL_MARKS[verdict.level]} {markdown_text(verdict.headline)}",
                wording.p_value(verdict.p_holm, *wording.thresholds(report)),
                *grades,
                wording.percent(verdict.smallest_detectable_share),
            ]
        )
    if not rows:
        return [*parts, "No benchmark was audited."]
    headings = ["benchmark", "verdict", "p, Holm", *wording.GRADES, "smallest detectable share"]
    parts.append(markdown_table(headings, rows, numbers=range(2, 7)))
    parts += [f"**{markdown_text(item.benchmark)}.** {markdown_text(item.text)}" for item in report.verdicts]
    meanings = "; ".join(f"{grade}: {meaning}" for grade, meaning in wording.GRADES.items())
    return [*parts, f"Grades of items: {meanings}."]


def _comparisons(report: Report) -> list[str]:
    if not report.comparisons:
        return []
    rows, bounds = [], wording.thresholds(report)
    for item in report.comparisons:
        test = wording.test_of(report, item)
        decides = test is not None and test.deciding_control == item.control
        rows.append(
            [
                markdown_text(item.benchmark),
                wording.ratio(item.ratio),
                wording.mode_name(item.mode),
                markdown_text(item.control) + (" ◆" if decides else ""),
                wording.share(item.rate),
                wording.control_share(item.control_rate),
                f"{wording.points(item.difference)} {markdown_text(wording.interval(item.low, item.high))}".strip(),
                "no power" if item.p_value is None else wording.p_value(item.p_value, *bounds),
                wording.p_value(test.p_holm, *bounds) if decides and test is not None else "",
            ]
        )
    headings = ["benchmark", "given", "prompt", "control", "exact", "control's", "difference", "p", "p, Holm"]
    return [
        "## Excess over controls",
        markdown_table(headings, rows, numbers=(1, *range(4, 9))),
        "Exact completions beside those of controls with tails of the same length: difference with Newcombe's 95 % "
        f"interval, exact stratified one-sided p. {wording.DECIDING_RULE} The one that decides is marked ◆; its p is "
        "corrected by Holm over all tests of the run.",
    ]


def _exact(report: Report) -> list[str]:
    rows = []
    for summary in report.sets:
        for cut in summary.cuts:
            quantiles = summary.longest_run_quantiles
            rows.append(
                [
                    markdown_text(summary.name) + (" (control)" if summary.role == "control" else ""),
                    wording.ratio(cut.ratio),
                    wording.mode_name(cut.mode),
                    wording.share(cut.exact_normalized),
                    markdown_text(wording.interval(cut.exact_normalized.low, cut.exact_normalized.high)),
                    wording.percent(cut.exact.value),
                    wording.percent(cut.answer.value) if cut.answer else wording.NOTHING,
                    f"{quantiles.get('0.5', 0):g} / {quantiles.get('1', 0):g}",
                    f"{sum(cut.skipped.values()):,}",
                ]
            )
    headings = [
        "set",
        "given",
        "prompt",
        "word for word",
        "95 %",
        "strictly",
        "answer reached",
        "longest run, median / most",
        "skipped",
    ]
    return ["## Exact match", markdown_table(headings, rows, numbers=(1, *range(3, 9)))] if rows else []


def _scores(report: Report) -> list[str]:
    table = score_table(report)
    if not table["rows"]:
        return []
    methods = table["methods"]
    rows = [
        [
            *map(markdown_text, names),
            *(
                f"{scores[method].auc:.2f} "
                f"{markdown_text(wording.interval(scores[method].low, scores[method].high, ''))}"
                if method in scores
                else wording.NOTHING
                for method in methods
            ),
        ]
        for names, scores in table["rows"].items()
    ]
    headings = ["benchmark", "control", *(wording.SCORE_NAMES.get(method, method) for method in methods)]
    return [
        "## Log-probabilities (confounded by distribution)",
        markdown_table(headings, rows, numbers=range(2, len(headings))),
        "Area under the ROC curve with DeLong's 95 % interval; 0.5 is chance. A benchmark that merely reads "
        "differently from its control moves these too: they count for no verdict.",
    ]


def _others(report: Report) -> list[str]:
    parts = []
    if report.intrusions:
        rows = [
            [
                markdown_text(item.benchmark),
                markdown_text(item.control),
                *(f"{number:,}" for number in (item.num_pairs, item.original_right, item.perturbed_right)),
                wording.p_value(item.p_accuracy),
                f"{item.original_answer_given:,}",
                f"{item.perturbed_answer_given:,}",
                wording.p_value(item.p_intrusion),
            ]
            for item in report.intrusions
        ]
        headings = [
            "benchmark",
            "control",
            "pairs",
            "originals right",
            "perturbed right",
            "p",
            "original's answer to the perturbed",
            "the reverse",
            "p",
        ]
        parts += ["## Intrusion", markdown_table(headings, rows, numbers=range(2, 9))]
    if report.orders:
        rows = [
            [
                markdown_text(item.benchmark),
                str(item.num_shards),
                str(item.num_permutations),
                wording.p_value(item.p_value),
                markdown_text(item.note or ""),
            ]
            for item in report.orders
        ]
        headings = ["benchmark", "shards", "permutations of each", "p", "note"]
        parts += ["## Order of the file", markdown_table(headings, rows, numbers=range(1, 4))]
        parts.append(f"The test asks {wording.ORDER_MEANING}.")
    return parts


def markdown_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()
) -> str:
    """A table; `numbers` are the columns that are set to the right."""
    right = set(numbers)
    rule = ["---:" if column in right else "---" for column in range(len(headings))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [headings, rule, *rows])


def markdown_text(text: str) -> str:
    """As it stands, on one line, whatever Markdown would make of it."""
    return " ".join(text.translate(_SPECIAL).split())


def _code(text: str) -> str:
    longest = max((len(run) for run in _backticks(text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _backticks(text: str) -> list[str]:
    return [run for run in "".join(c if c == "`" else " " for c in text).split() if run]
