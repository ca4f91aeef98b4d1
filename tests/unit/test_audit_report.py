"""What an audit found, as files and on a terminal."""

import base64
import hashlib
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hfpar.audit import wording
from hfpar.audit.limitations import limitations
from hfpar.audit.report import (
    charts,
    print_report,
    read_report,
    write_report,
)
from hfpar.audit.report.figures import draw_forest, draw_ratios
from hfpar.audit.report.markdown import make_markdown
from hfpar.audit.report.page import embedded, make_page
from hfpar.audit.report.storage import in_order, write_file, write_report_json, write_text
from hfpar.audit.summarize import SetInfo
from hfpar.errors import ConfigError
from tests.made_up_audit import Page, make_run  # noqa: TID251


@pytest.fixture(scope="module")
def run():
    return make_run()


# report.json


def test_a_report_is_read_as_it_was_written(tmp_path, run):
    report, _ = run
    write_report_json(tmp_path / "report.json", report)
    assert read_report(tmp_path) == in_order(report)
    assert read_report(tmp_path / "report.json") == in_order(report)


def test_json_is_the_same_whatever_the_order_and_has_no_nan(tmp_path, run):
    report, _ = run
    write_report_json(tmp_path / "a.json", report)
    turned = replace(
        report,
        comparisons=report.comparisons[::-1],
        tests=report.tests[::-1],
        verdicts=report.verdicts[::-1],
        versions=dict(reversed(report.versions.items())),
    )
    write_report_json(tmp_path / "b.json", turned)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()

    odd = replace(report, settings={"nan": math.nan, "more": (math.inf, 1.5)})
    write_report_json(tmp_path / "c.json", odd)
    assert json.loads((tmp_path / "c.json").read_text())["settings"] == {"nan": None, "more": [None, 1.5]}


def change(data, path, value):
    *parents, last = path
    for key in parents:
        data = data[key]
    if value is None:
        del data[last]
    else:
        data[last] = value


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["schema_version"], 99, "schema_version 99; this hfpar reads 1"),
        (["schema_version"], None, "no schema_version"),
        (["verdicts", 0, "level"], "clean", 'verdicts[0].level is "clean", not one of strong, some, none'),
        (["verdicts", 1, "text"], None, "verdicts[1].text is missing"),
        (["timing", "seconds"], "long", 'timing.seconds is "long", not a number'),
        (
            ["sets", 0, "cuts", 1, "exact", "total"],
            1.5,
            "sets[0].cuts[1].exact.total is 1.5, not a whole number",
        ),
        (["sets"], {}, "sets is {}, not a list"),
        (["model"], [], "model is [], not an object"),
        (["versions"], [], "versions is [], not an object"),
        (["sets", 0, "grades", "A"], True, "sets[0].grades.A is true, not a whole number"),
    ],
)
def test_a_bad_report_is_one_line_that_says_where(tmp_path, path, value, said, run):
    report, _ = run
    file = tmp_path / "report.json"
    write_report_json(file, report)
    data = json.loads(file.read_text())
    change(data, path, value)
    file.write_text(json.dumps(data))
    with pytest.raises(ConfigError) as error:
        read_report(tmp_path)
    assert said in str(error.value) and str(file) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [None, "{", "[]", '"text"', "\x00\x01"])
def test_what_is_no_report_is_one_line(tmp_path, content):
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    with pytest.raises(ConfigError) as error:
        read_report(tmp_path)
    assert "report.json" in str(error.value) and "\n" not in str(error.value)


def test_keys_of_later_versions_are_left_out(tmp_path, run):
    report, _ = run
    write_report_json(tmp_path / "report.json", report)
    data = json.loads((tmp_path / "report.json").read_text())
    data["later"] = 1
    data["model"]["later"] = {"more": 2}
    (tmp_path / "report.json").write_text(json.dumps(data))
    assert read_report(tmp_path) == in_order(report)


def test_a_full_disk_is_one_line_and_leaves_what_was_there(tmp_path):
    path = tmp_path / "report.md"
    path.write_text("before")

    def write(partial):
        partial.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match=r"report\.md can't be written \(No space left on device\)"):
        write_file(path, write)
    assert [item.name for item in tmp_path.iterdir()] == ["report.md"]
    assert path.read_text() == "before"


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    report, items = make_run(benchmarks=(("orchard", 3, 0.5),), controls=())
    with pytest.raises(ConfigError, match="can't be written"):
        write_report(tmp_path / "file" / "run", report, items)


# The page


HOSTILE = "</script><script>bad()</script><!-- $\\frac{1}{2}$ {{ 7 * 7 }} {% if %} &amp; "
HOSTILE += "\u2028 \U0001f600 \ud800 <b>bold</b>"


def hostile_run():
    report, items = make_run(benchmarks=(("orchard", 5, 0.5),))
    items[0] = replace(items[0], text=HOSTILE, item_id=HOSTILE, hits=[[0, 12]], place=HOSTILE)
    sets = [replace(report.sets[0], source=HOSTILE), *report.sets[1:]]
    verdicts = [replace(report.verdicts[0], text=HOSTILE)]
    model = replace(report.model, name=HOSTILE)
    changes = {"limitations": [HOSTILE], "warnings": [HOSTILE], "command": HOSTILE}
    return replace(report, sets=sets, verdicts=verdicts, model=model, **changes), items


def test_a_page_needs_no_network_and_its_script_is_the_only_one_allowed(run):
    report, items = run
    text = make_page(report, items)
    page = Page(text)
    assert not page.open and text.startswith("<!doctype html>")
    assert all(link.startswith("#") for link in page.links)
    assert "@import" not in text and "url(" not in text and "http-equiv" in text
    assert "https://" not in text and text.count("http://") == text.count("http://www.w3.org/2000/svg")
    digest = base64.b64encode(hashlib.sha256(page.scripts[-1].encode()).digest()).decode()
    assert (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text
    )


def test_texts_cannot_become_markup(tmp_path):
    report, items = hostile_run()
    write_text(tmp_path / "report.html", make_page(report, items))
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not page.open
    assert page.tags.count("script") == 2 and "b" in page.tags and "<b>bold" not in text
    assert "<" not in page.scripts[0] and "bad()" not in page.scripts[-1] and "{{ 7 * 7 }}" in page.text
    item = json.loads(page.scripts[0])["items"][0]
    whole = HOSTILE.replace("\ud800", "\ufffd")
    assert item["text"] == whole and item["item_id"] == whole and item["hits"] == [[0, 12]]


def test_half_a_surrogate_pair_is_replaced_so_that_every_item_has_an_address():
    found = json.loads(embedded({"item_id": "a\ud800b", "text": "\udfff\U0001f600<"}))
    assert found == {"item_id": "a\ufffdb", "text": "\ufffd\U0001f600<"}


def test_the_items_in_a_page_are_whole():
    report, items = make_run(modes=("bare", "chat"))
    found = json.loads(Page(make_page(report, items)).scripts[0])["items"]
    assert len(found) == len(items)
    by_key = {(item["set"], item["item_id"]): item for item in found}
    for item in items:
        shown = by_key[item.set, item.item_id]
        assert shown["text"] == item.text and shown.get("grade") == item.grade
        for cut, kept in zip(item.cuts, shown["cuts"], strict=True):
            assert (kept["ratio"], kept["mode"], kept.get("exact", False)) == (cut.ratio, cut.mode, cut.exact)
            # The tail itself isn't there twice.
            assert kept.get("written") == (None if cut.exact else cut.written)


def test_controls_beyond_a_limit_are_left_out_of_the_page_and_it_says_so(monkeypatch, run):
    monkeypatch.setattr("hfpar.audit.report.page.MOST_CONTROL_ITEMS", 20)
    report, items = run
    page = Page(make_page(report, items))
    found = json.loads(page.scripts[0])["items"]
    control = [item for item in found if item["set"] == "calculations"]
    assert len(control) == 20 and sum(item["set"] == "orchard" for item in found) == 300
    runs = sorted((item.longest_run for item in items if item.set == "calculations"), reverse=True)
    assert min(item["longest_run"] for item in control) == runs[19]
    assert "440 items of controls with shorter runs are left out" in page.text


def test_a_page_says_what_was_found(run):
    report, items = run
    page = Page(make_page(report, items))
    assert "Strong evidence" in page.text and "No evidence at this power" in page.text
    assert report.verdicts[0].text in page.text
    assert report.command in page.text and "ab" * 32 in page.text
    assert all(text in page.text for text in report.limitations)
    assert "Confounded by distribution" in page.text
    assert wording.points(report.comparisons[0].difference) in page.text
    assert wording.p_value(report.verdicts[0].p_holm) in page.text


SMALL = (("small", 40, 0.0, ("orchard", "brookside")),)


@pytest.mark.parametrize(
    "options",
    [
        {"benchmarks": (), "controls": ()},
        {"benchmarks": (("orchard", 0, 0.0),), "controls": ()},
        {"benchmarks": (("orchard", 1, 1.0),), "controls": (), "ratios": (0.5,)},
        {
            "benchmarks": (("orchard", 30, 0.3),),
            "controls": SMALL,
            "modes": ("bare", "chat"),
            "ratios": (0.2, 0.6),
        },
        {"benchmarks": tuple((f"bench {number}", 20, number / 5) for number in range(6)), "controls": ()},
    ],
)
def test_any_run_makes_whole_files(tmp_path, options):
    report, items = make_run(**options)
    write_report(tmp_path, report, items)
    names = ["forest.png", "ratios.png", "report.html", "report.json", "report.md"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert not Page((tmp_path / "report.html").read_text()).open
    assert all((tmp_path / name).read_bytes()[:4] == b"\x89PNG" for name in names[:2])
    if report.comparisons:
        assert read_report(tmp_path) == in_order(report)
    for name in ("report.html", "report.md"):
        text = re.sub(r"<script.*", "", (tmp_path / name).read_text(), flags=re.DOTALL)
        assert "None" not in text and "nan" not in text.lower().split() and "undefined" not in text
    record(report)


def test_a_control_without_power_has_no_p_value(tmp_path):
    report, items = make_run(controls=SMALL)
    page = Page(make_page(report, items))
    assert "no power: fewer than 200 items of controls" in page.text and "Not tested" in page.text
    assert not re.search(r"p [=<] ", page.text.split("Exact match")[1].split("Longest runs")[0])
    assert "no power" in record(report) and "no power" in make_markdown(report)


# Where things lie


def test_the_forest_lies_where_its_figures_say(run):
    report, _ = run
    found = charts.forest(report)
    rows = [row for _, _, rows in found.groups for row in rows]
    assert [name for name, _, _ in found.groups] == ["orchard", "brookside"]
    scale = {tick.label: tick.at for tick in found.ticks}
    zero, ten = scale["0"], scale["+10"]
    assert found.zero == zero
    for row in rows:
        per_point = (ten - zero) / 10
        assert row.marks.point == pytest.approx(zero + 100 * row.comparison.difference * per_point, abs=0.01)
        assert row.marks.low == pytest.approx(zero + 100 * row.comparison.low * per_point, abs=0.01)
        assert row.marks.low + row.marks.width == pytest.approx(
            zero + 100 * row.comparison.high * per_point, abs=0.01
        )
        assert 0 <= row.marks.low and row.marks.low + row.marks.width <= 100
    deciding = {
        (row.comparison.benchmark, row.comparison.ratio): row.comparison.control
        for row in rows
        if row.is_deciding
    }
    assert deciding == {(test.benchmark, test.ratio): test.deciding_control for test in report.tests}


def test_the_pictures_axes_hold_every_interval():
    shares = (0.0, 0.9, 0.3, 0.2)
    report, _ = make_run(tuple((f"bench {n}", 20, share) for n, share in enumerate(shares)), controls=())
    figure = draw_ratios(report)
    highest = max(cut.exact.high for item in report.sets for cut in item.cuts)
    assert len(figure.axes) == 6 and highest > 0.9
    assert all(axes.get_ylim() == pytest.approx((0, 1.05 * highest)) for axes in figure.axes)


def test_a_comparison_without_a_difference_has_a_row_and_no_marks(run):
    report, items = run
    empty = replace(
        report.comparisons[0], difference=None, low=None, high=None, p_value=None, note="no tail as long"
    )
    report = replace(report, comparisons=[empty])
    ((_, _, (row,)),) = charts.forest(report).groups
    assert row.marks is None
    assert "no tail as long" in Page(make_page(report, items)).text
    assert draw_forest(report).axes


def test_runs_fall_at_their_lengths():
    report, items = make_run(benchmarks=(("orchard", 4, 0.0),), controls=())
    items = [replace(item, longest_run=run) for item, run in zip(items, (2, 2, 5, 50), strict=True)]
    (chart,) = charts.run_charts(report, items)
    corners = [tuple(map(float, part.split())) for part in chart.series[0].path[1:].split("L")]
    at = {tick.label: tick.at for tick in chart.x_ticks}
    top, bottom = chart.y_ticks[0].at, chart.y_ticks[-1].at
    assert chart.y_ticks[-1].label == "10 %"

    def height(share):
        return top + (bottom - top) * -math.log10(share)

    expected = [
        (at["1"], top),
        (at["2"], top),
        (at["2"], height(0.5)),
        (at["5"], height(0.5)),
        (at["5"], height(0.25)),
        (at["50"], height(0.25)),
        (at["50"], bottom),
    ]
    assert corners == [pytest.approx(corner, abs=0.02) for corner in expected]
    assert chart.marker == at["20"]


def test_a_map_has_a_cell_for_each_item_in_the_order_of_the_file():
    _, items = make_run(benchmarks=(("orchard", 150, 0.3),), controls=())
    found = charts.item_map(items)
    cells = {}
    for grade, path in found["paths"].items():
        for x, y in re.findall(r"M(\d+) (\d+)h8v8h-8z", path):
            cells[int(y) // 10 * found["columns"] + int(x) // 10] = grade
    assert [cells[number] for number in range(150)] == [item.grade or "none" for item in items]


# Words


def test_no_summary_calls_anything_clean(run):
    report, _ = run
    levels = [
        replace(report.verdicts[0], benchmark=level, level=level)
        for level in ("strong", "some", "none", "untested")
    ]
    text = wording.summary_sentence(replace(report, verdicts=levels))
    assert text == (
        "Strong evidence that items of strong were seen; some evidence that items of some were seen; "
        "no evidence at this power for none; not tested: untested."
    )


def test_markdown_keeps_texts_in_their_cells(run):
    report, _ = run
    report = replace(report, limitations=["a | b <b>c</b>\n- d"], command="run ```x```")
    text = make_markdown(report)
    assert "- a \\| b \\<b\\>c\\</b\\> - d" in text
    assert "````text\nrun ```x```\n````" in text
    for table in re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def text_of_all(report, items):
    """What people read: Markdown, the page, the terminal; the page's apostrophes as the others'."""
    page = Page(make_page(report, items)).text.replace("’", "'")
    return [make_markdown(report), page, record(report, 200)]


def test_a_p_value_just_above_alpha_is_not_rounded_to_it_anywhere(run):
    report, items = run
    report = replace(report, settings={**report.settings, "alpha": 0.01})
    p_value, p_holm = 0.01003, 0.010004
    report = replace(
        report,
        comparisons=[replace(item, p_value=p_value) for item in report.comparisons],
        tests=[replace(item, p_value=p_value, p_holm=p_holm) for item in report.tests],
        verdicts=[replace(item, p_holm=p_holm) for item in report.verdicts],
    )
    assert wording.thresholds(report) == [0.01]
    for text in text_of_all(report, items):
        assert "0.01003" in text and "0.010004" in text
        assert not re.search(r"(?<![\d.])0\.01(?!\d)", text.rsplit("How it was made", 1)[0])
    annotated = [text.get_text() for text in draw_forest(report).axes[0].texts]
    assert annotated == ["p = 0.01003"] * len(report.comparisons)


def test_a_p_value_too_small_to_tell_is_said_to_be_less(run):
    report, items = run
    report = replace(report, comparisons=[replace(item, p_value=1e-99) for item in report.comparisons])
    assert "p < 1e-95" in Page(make_page(report, items)).text
    assert {text.get_text() for text in draw_forest(report).axes[0].texts} == {"p < 1e-95"}


def test_a_reweighted_share_of_a_control_is_not_put_beside_counts_that_give_another(run):
    report, items = run
    first = report.comparisons[0]
    odd = replace(first, control_rate=replace(first.control_rate, value=0.484, hits=10, total=420))
    report = replace(report, comparisons=[odd, *report.comparisons[1:]])
    for text in text_of_all(report, items):
        assert "10/420, reweighted 48.4 %" in text and "48.4 % (10/420)" not in text
    other = report.comparisons[1].control_rate
    assert all(wording.share(other) in text for text in text_of_all(report, items))


def test_the_rule_that_chooses_the_deciding_control_is_whole(run):
    markdown, page, _ = text_of_all(*run)
    assert wording.DECIDING_RULE in markdown and wording.DECIDING_RULE in page
    assert "more than half of the benchmark's tails" in wording.DECIDING_RULE


def test_the_order_of_a_file_has_two_explanations(run):
    for text in text_of_all(*run)[:2]:
        assert "which reading the file explains, or a file sorted by topic, source or difficulty" in text
        assert "only reading" not in text


def test_every_reason_of_skipping_has_words_in_the_page(run):
    report, items = run
    cut = replace(report.sets[0].cuts[0], skipped={"shared_tail": 3, "short_tail": 1})
    first = replace(report.sets[0], cuts=[cut, *report.sets[0].cuts[1:]])
    text = make_page(replace(report, sets=[first, *report.sets[1:]]), items)
    assert 'title="another item ends the same: 3, tail too short: 1"' in text
    data, script = Page(text).scripts
    assert json.loads(data)["skipWords"] == wording.SKIP_REASONS and "data.skipWords[cut.skipped]" in script


# What it cannot show


def limits(sets, items, **others):
    infos = [
        SetInfo(name, "benchmark" if kind == "benchmark" else "control", kind, "", "") for name, kind in sets
    ]
    found = {name: [item for item in items if item.set == name] for name, _ in sets}
    return limitations(infos, found, [], [], **others)


def test_a_sorted_file_is_a_limitation_of_the_test_of_its_order():
    _, items = make_run()
    sets = [("orchard", "benchmark")]
    (more,) = set(limits(sets, items, has_orders=True)) - set(limits(sets, items))
    assert "sorted by topic, source or difficulty" in more and "can't tell the two apart" in more


@pytest.mark.parametrize("kind", ["perturbed", "file"])
def test_several_variants_are_told_of_whatever_the_control_is(kind):
    _, items = make_run(benchmarks=(("orchard", 5, 0.0),), controls=(("variants", 4, 0.0, ("orchard",)),))
    sets = [("orchard", "benchmark"), ("variants", kind)]

    def said(pairs):
        paired = [
            replace(item, pair_set=pairs[int(item.item_id)][0], pair_id=pairs[int(item.item_id)][1])
            if item.set == "variants"
            else item
            for item in items
        ]
        return [text for text in limits(sets, paired) if "several variants" in text]

    assert said([("orchard", str(number // 2)) for number in range(4)]) == [
        "Some items have several variants in a control, which are not independent of each other; where they vary "
        "fewer than half as many items as the benchmark has, one of each is compared."
    ]
    assert not said([("orchard", str(number)) for number in range(4)])
    # Items of two benchmarks that have the same ids are different items.
    assert not said([("orchard", "0"), ("orchard", "1"), ("brookside", "0"), ("brookside", "1")])
    assert not said([(None, None)] * 4)


def test_endings_that_several_items_share_have_a_sentence_of_their_own():
    _, items = make_run(benchmarks=(("orchard", 300, 0.0),), controls=(), ratios=(0.4,))
    items = [
        replace(item, cuts=[replace(item.cuts[0], skipped="shared_tail" if number < 7 else None)])
        for number, item in enumerate(items)
    ]
    found = [text for text in limits([("orchard", "benchmark")], items) if text.startswith("orchard: ")]
    assert found == [
        "orchard: at 40 %, 7 of 300 items end as another one does; completing such an ending says nothing of the "
        "item, so they are not tested there."
    ]


# The terminal


def record(report, width=100):
    console = Console(record=True, width=width, force_terminal=True, file=io.StringIO(), highlight=False)
    print_report(report, Path("runs/audit"), console)
    return console.export_text()


def test_the_terminal_shows_verdicts_tables_and_the_way_to_the_report(run):
    report, _ = run
    text = record(report)
    assert "orchard  ● Strong evidence" in text and "brookside  ○ No evidence at this power" in text
    assert "A 50, B 8, C 6, of 300" in text
    assert "report: runs/audit/report.html" in text
    assert max(map(len, text.splitlines())) <= 100
    row = next(line for line in text.splitlines() if "calculations" in line)
    assert "17.2 % (50/291)" in row and "+17.2 pp" in row


def test_the_terminal_takes_names_as_they_are(run):
    report, _ = run
    comparisons = [replace(item, control="[b]kites[/b]") for item in report.comparisons]
    report = replace(report, model=replace(report.model, name="[red]heron[/red]"), comparisons=comparisons)
    assert "[red]heron[/red]" in record(report) and "[b]kites[/b]" in record(report)
