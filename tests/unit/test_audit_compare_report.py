"""Checkpoints compared, as files and on a terminal."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hfpar.audit import wording
from hfpar.audit.paired import compare_checkpoints
from hfpar.audit.report import (
    compare_charts,
    print_comparison,
    write_comparison,
)
from hfpar.audit.report.compare import make_compare_page, summarize_changes
from tests.made_up_audit import Page, make_run  # noqa: TID251


@pytest.fixture(scope="module")
def run():
    return make_run()


def learn(items, name, numbers, is_right=True):
    """The same items where these of one set are completed, or no longer are."""
    changed = []
    for item in items:
        if item.set == name and int(item.item_id) in numbers:
            cuts = [
                replace(
                    cut, exact=is_right, exact_normalized=is_right, skipped=None, written=item.text[cut.cut :]
                )
                for cut in item.cuts
            ]
            item = replace(
                item, cuts=cuts, logprobs={"loss": item.logprobs["loss"] + (0.5 if is_right else -0.5)}
            )
        changed.append(item)
    return changed


def by_set(items):
    return {
        name: [item for item in items if item.set == name] for name in dict.fromkeys(one.set for one in items)
    }


def make_comparison_of_checkpoints(modes=("bare",), labels=("base", "step-100", "step-200")):
    _, first = make_run(benchmarks=(("orchard", 60, 0.1), ("brookside", 40, 0.0)), controls=(), modes=modes)
    second = learn(first, "orchard", range(12))
    third = learn(second, "orchard", range(10, 30))
    third = learn(third, "orchard", range(3), is_right=False)
    return compare_checkpoints(dict(zip(labels, map(by_set, (first, second, third)), strict=True)))


@pytest.fixture(scope="module")
def comparison():
    return make_comparison_of_checkpoints()


def test_a_comparison_makes_whole_files(tmp_path, comparison, run):
    write_comparison(tmp_path, comparison, {"base": run[0]}, "python eval/contamination.py --compare a b c")
    names = ["compare.html", "compare.json", "compare.md", "trajectory.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert (tmp_path / "trajectory.png").read_bytes()[:4] == b"\x89PNG"
    data = json.loads((tmp_path / "compare.json").read_text())
    assert data["checkpoints"] == ["base", "step-100", "step-200"] and data["schema_version"] == 1
    assert data["rates"][1]["newly_completed"] == comparison.rates[1].newly_completed
    text = (tmp_path / "compare.html").read_text()
    page = Page(text)
    assert not page.open and "script" not in page.tags and "default-src 'none'" in text
    assert "--compare a b c" in page.text and "ab" * 32 in page.text
    rate = max(comparison.rates, key=lambda rate: rate.difference or 0.0)
    shown = wording.points(rate.difference)
    assert rate.newly_completed and shown in page.text and shown in (tmp_path / "compare.md").read_text()
    assert (
        f"{wording.percent(rate.first_rate.value)} → {wording.percent(rate.second_rate.value)}" in page.text
    )
    assert "None" not in page.text and "nan" not in page.text.lower().split()


def test_the_trajectory_lies_where_its_figures_say(comparison):
    charts_found = compare_charts.trajectory_charts(comparison)
    assert [chart.title for chart in charts_found] == ["orchard", "brookside"]
    chart = charts_found[0]
    bottom, top = chart.y_ticks[0].at, chart.y_ticks[-1].at
    full = float(chart.y_ticks[-1].label.rstrip(" %")) / 100
    assert [tick.label for tick in chart.x_ticks] == ["base", "step-100", "step-200"]
    for series, ratio in zip(chart.series, (0.4, 0.6), strict=True):
        points = [point for point in comparison.trajectory if (point.set, point.ratio) == ("orchard", ratio)]
        for shown, point in zip(series.points, points, strict=True):
            assert shown.y == pytest.approx(bottom + (top - bottom) * point.rate.value / full, abs=0.02)
            assert shown.high >= top - 0.01


def test_long_names_of_checkpoints_are_numbered_under_the_axis():
    labels = [f"runs/a-long-name/checkpoint-{number}" for number in range(3)]
    assert compare_charts.tick_labels(labels) == ["1", "2", "3"]
    assert compare_charts.tick_labels(["base", "tuned"]) == ["base", "tuned"]
    page = Page(make_compare_page(make_comparison_of_checkpoints(("bare", "chat"), labels)))
    assert "The numbers under the axis" in page.text and not page.open
    assert "chat template" in page.text


def test_the_terminal_compares(comparison):
    console = Console(record=True, width=120, force_terminal=True, file=io.StringIO(), highlight=False)
    print_comparison(comparison, Path("runs/compare"), console)
    text = console.export_text()
    rate = comparison.rates[0]
    row = next(line for line in text.splitlines() if "step-100" in line and "40 %" in line)
    assert wording.share(rate.second_rate) in row and str(rate.only_second) in row.split()
    assert "report: runs/compare/compare.html" in text
    assert summarize_changes(comparison) in " ".join(text.split())


def test_the_summary_takes_the_clearest_change_of_the_last_checkpoint(comparison):
    last = [rate for rate in comparison.rates if rate.second == "step-200" and rate.set == "orchard"]
    best = min(last, key=lambda rate: rate.p_holm)
    text = summarize_changes(comparison)
    assert text.startswith(
        f"orchard: {wording.points(best.difference)} from {wording.ratio(best.ratio)} of the text"
    )
    assert wording.p_equals(best.p_holm) in text and "brookside: no item changed" in text
    # However clear a change on the way was.
    sooner = [replace(rate, p_holm=1e-30) if rate.second == "step-100" else rate for rate in comparison.rates]
    assert summarize_changes(replace(comparison, rates=sooner)) == text


@pytest.mark.parametrize(("p_value", "said"), [(0.05028, "p = 0.0503"), (1e-98, "p < 1e-95")])
def test_p_values_of_changes_are_english_and_not_rounded_across_the_level(comparison, p_value, said):
    rates = [replace(rate, p_value=p_value, p_holm=p_value) for rate in comparison.rates]
    changed = replace(comparison, rates=rates)
    assert said in summarize_changes(changed)
    assert Page(make_compare_page(changed)).text.count(said) > len(rates)  # each row, and the summary
