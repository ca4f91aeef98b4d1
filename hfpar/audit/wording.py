"""Figures as people read them: the same in the page, the Markdown and the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from hfpar.audit.results import Comparison, Estimate, Level, Mode, RatioTest, Report, SetSummary

NOTHING = "–"
MINUS = "\N{MINUS SIGN}"

LEVEL_MARKS: dict[Level, str] = {"strong": "●", "some": "◐", "none": "○", "untested": "–"}
"""Shapes, so that nothing hangs on colour alone."""
GRADES = {
    "A": "from 40 % of the text or less, a tail of 15 words or more word for word",
    "B": "from 60 % or less, or a verbatim run of 20 tokens",
    "C": "only the right answer, from a part of the question",
}
SCORE_NAMES = {
    "loss": "mean loss",
    "zlib": "loss / zlib",
    "min_k": "Min-K 20 %",
    "min_k_plus_plus": "Min-K++ 20 %",
    "reference": "loss / reference",
}
SKIP_REASONS = {
    "short_tail": "tail too short",
    "no_cut": "no place to cut",
    "too_long": "longer than the context",
    "same_as_benchmark": "same tail as an item of a benchmark",
    "shared_tail": "another item ends the same",
}
DECIDING_RULE = (
    "The control with the largest p-value decides; a control that leaves more than half of the benchmark's tails "
    "without a counterpart is only heard where no other has power."
)
ORDER_MEANING = (
    "whether the file's own order is likelier than shuffled ones, which reading the file explains, or a file sorted by "
    "topic, source or difficulty"
)
SMALLEST_P_VALUE = 1e-95
"""What is smaller isn't told apart: p-values are worked out down to 1e-100, and Holm multiplies them."""
_P_VALUE_THRESHOLDS = (0.05, 0.001)
_EXACT_DIGITS = 17
"""That tell any two numbers apart."""


def percent(value: float | None) -> str:
    """A share: `12.4 %`, `0.43 %`, `> 99.9 %`; `0 %` and `100 %` only where it is exactly that."""
    if value is None:
        return NOTHING
    if value in (0.0, 1.0):
        return f"{100 * value:.0f} %"
    if 0 < value < 0.00005:
        return "< 0.01 %"
    if 0 < value < 0.00995:
        return f"{100 * value:.2f} %"
    text = f"{100 * value:.1f}"
    return "> 99.9 %" if text == "100.0" else f"{text} %"


def points(value: float | None) -> str:
    """A difference of shares: `+12.4 pp`."""
    if value is None:
        return NOTHING
    text = f"{100 * abs(value):.1f}"
    return f"{'' if text == '0.0' else '+' if value > 0 else MINUS}{text} pp"


def signed(value: float | None) -> str:
    """A change: `+0.31`."""
    if value is None:
        return NOTHING
    text = f"{abs(value):.2f}"
    return f"{'' if text == '0.00' else '+' if value > 0 else MINUS}{text}"


def interval(low: float | None, high: float | None, unit: str = "%") -> str:
    """An interval of shares or differences, in percent without its sign; of other numbers with `unit` empty."""
    if low is None or high is None:
        return ""
    if not unit:
        return f"[{low:.2f}, {high:.2f}]"
    return f"[{decimal(100 * low)}, {decimal(100 * high)}]"


def decimal(value: float) -> str:
    """A number with one digit after the point; what rounds to 0 has no sign."""
    text = f"{abs(value):.1f}"
    return f"{MINUS if value < 0 and text != '0.0' else ''}{text}"


def p_value(value: float | None, *thresholds: float) -> str:
    """A p-value: `0.031`, `4e-7`.

    Args:
        value: what is shown.
        thresholds: beside 0.05 and 0.001; digits are added until the rounded value is on the same side of each.
    """
    if value is None:
        return NOTHING
    if value < SMALLEST_P_VALUE:
        return f"< {SMALLEST_P_VALUE:g}"
    bounds = (*_P_VALUE_THRESHOLDS, *thresholds)
    fewest = 2 if value >= 0.001 else 1
    texts = (_rounded(value, digits) for digits in range(fewest, _EXACT_DIGITS + 1))
    return next(text for text in texts if all((float(text) <= t) == (value <= t) for t in bounds))


def _rounded(value: float, digits: int) -> str:
    if value >= 0.001:
        return f"{value:.{digits}g}"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def p_equals(value: float | None, *thresholds: float) -> str:
    """A p-value in a sentence: `p = 0.031`, `p < 1e-95`; arguments as of `p_value`."""
    if value is None:
        return NOTHING
    text = p_value(value, *thresholds)
    return f"p {text}" if text.startswith("<") else f"p = {text}"


def thresholds(report: Report) -> list[float]:
    """What the report's p-values are held against, beside the usual."""
    alpha = report.settings.get("alpha")
    return [float(alpha)] if isinstance(alpha, (int, float)) else []


def share(estimate: Estimate | None) -> str:
    """A share and how many that is: `12.4 % (62/500)`."""
    if estimate is None or estimate.value is None:
        return NOTHING
    counts = "" if estimate.hits is None else f" ({estimate.hits:,}/{estimate.total:,})"
    return percent(estimate.value) + counts


def control_share(estimate: Estimate | None) -> str:
    """As `share`; where the share is reweighted, so that the counts don't give it: `10/420, reweighted 48.4 %`."""
    if estimate is None or not is_reweighted(estimate):
        return share(estimate)
    return f"{estimate.hits:,}/{estimate.total:,}, reweighted {percent(estimate.value)}"


def is_reweighted(estimate: Estimate) -> bool:
    """Whether a share is another than its counts give."""
    if estimate.value is None or estimate.hits is None or not estimate.total:
        return False
    return percent(estimate.value) != percent(estimate.hits / estimate.total)


def ratio(value: float) -> str:
    """A ratio of the text: `40 %`."""
    return f"{100 * value:g} %"


def mode_name(mode: Mode) -> str:
    """How the model was asked."""
    return "bare prompt" if mode == "bare" else "chat template"


def benchmarks(report: Report) -> list[SetSummary]:
    """The sets that are benchmarks."""
    return [summary for summary in report.sets if summary.role == "benchmark"]


def controls(report: Report) -> list[SetSummary]:
    """The sets that are controls."""
    return [summary for summary in report.sets if summary.role == "control"]


def test_of(report: Report, comparison: Comparison) -> RatioTest | None:
    """The test that a comparison is part of."""
    for test in report.tests:
        if (test.benchmark, test.ratio, test.mode) == (
            comparison.benchmark,
            comparison.ratio,
            comparison.mode,
        ):
            return test
    return None


def has_chat(report: Report) -> bool:
    """Whether the chat template was probed too, so that rows have to say which of the two they mean."""
    return any(cut.mode == "chat" for summary in report.sets for cut in summary.cuts)


def summary_sentence(report: Report) -> str:
    """The run in a sentence: strong evidence for these, none at this power for those."""
    groups: dict[Level, list[str]] = {}
    for verdict in report.verdicts:
        groups.setdefault(verdict.level, []).append(verdict.benchmark)
    words: dict[Level, str] = {
        "strong": "strong evidence that items of {} were seen",
        "some": "some evidence that items of {} were seen",
        "none": "no evidence at this power for {}",
        "untested": "not tested: {}",
    }
    parts = [words[level].format(_listed(groups[level])) for level in words if level in groups]
    text = "; ".join(parts) or "no benchmark was audited"
    return text[0].upper() + text[1:] + "."


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def names_in_order(names: Iterable[str]) -> list[str]:
    """Names without repeats, as they first come."""
    return list(dict.fromkeys(names))
