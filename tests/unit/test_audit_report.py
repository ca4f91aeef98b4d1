"""What an audit found, as files and on a terminal."""

import base64
import hashlib
import io
import json
import math
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from hfpar.audit import wording
from hfpar.audit.paired import compare_checkpoints
from hfpar.audit.report import (
    charts,
    compare_charts,
    print_comparison,
    print_report,
    read_report,
    write_comparison,
    write_report,
)
from hfpar.audit.report.compare import make_compare_page, summarize_changes
from hfpar.audit.report.figures import draw_forest, draw_ratios
from hfpar.audit.report.markdown import make_markdown
from hfpar.audit.report.page import embedded, make_page
from hfpar.audit.report.storage import in_order, write_file, write_report_json, write_text
from hfpar.audit.results import (
    SCHEMA_VERSION,
    Comparison,
    CutResult,
    CutSummary,
    Estimate,
    Intrusion,
    ItemResult,
    ModelInfo,
    OrderTest,
    RatioTest,
    Report,
    ScoreComparison,
    SetSummary,
    Stratum,
    Timing,
    Verdict,
)
from hfpar.errors import ConfigError

# A made-up run

NAMES = ["Ottilie", "Bram", "Ngozi", "Ravi", "Saoirse", "Itzel", "Leif", "Tomoko"]
THINGS = ["lanterns", "pinecones", "copper bells", "paper kites", "clay jugs", "maps", "blue marbles"]
SENTENCES = [
    "{name} packs {a} {thing} into crates of {b} and carries {c} crates across the footbridge each morning.",
    "On the way back, {c} {thing} roll into the brook, and {name} trades the wet ones for {a} new ones.",
    "Let $f(x) = {a}x^{{{b}}} - \\frac{{{c}}}{{x + {b}}}$ for every real $x$ other than $-{b}$.",
    "A hexagonal garden with sides of {b} paces is fenced with {thing}, one for every {c} paces of hedge.",
    "The matrix $\\begin{{pmatrix}} {a} & {b} \\\\ {c} & 1 \\end{{pmatrix}}$ sends the point $P$ to its own shadow.",
    "{name} notes in the margin that exactly $\\binom{{{a}}}{{{b}}}$ of the {thing} were painted twice.",
]
QUESTIONS = [
    "How many {thing} does {name} have by the evening of the {b}th day?",
    "Find the smallest positive integer $n$ for which $f(n)$ is a multiple of ${c}$.",
    "What fraction of the {thing} is left? Give your answer as a reduced fraction.",
]
TOKENS = re.compile(r"\s?\w+|\s?[^\w\s]|\s+")


def make_text(rng):
    values = {"name": rng.choice(NAMES), "thing": rng.choice(THINGS)}
    values |= {name: rng.randint(2, 97) for name in "abc"}
    parts = [*rng.sample(SENTENCES, rng.randint(2, 4)), rng.choice(QUESTIONS)]
    return " ".join(part.format(**values) for part in parts)


def runs_of(tokens, right):
    """Stretches of tokens that were the model's first choice, in characters."""
    spans, start, place = [], None, 0
    for token, is_right in zip(tokens, right, strict=True):
        if is_right and start is None:
            start = place
        if not is_right and start is not None:
            spans.append([start, place])
            start = None
        place += len(token)
    return spans + ([[start, place]] if start is not None else [])


def make_cut(text, tokens, right, ratio, mode, rng):
    target = int(len(text) * ratio)
    cut = text.rfind(" ", 0, target + 1)
    if rng.random() < 0.03:
        return CutResult(ratio, mode, skipped="short_tail")
    place, first = 0, 0
    while place < cut:
        place += len(tokens[first])
        first += 1
    tail = right[first:]
    matched = next((number for number, is_right in enumerate(tail) if not is_right), len(tail))
    exact = matched == len(tail)
    written = text[cut:] if exact else "".join(tokens[first : first + matched]) + " twelve more than before."
    return CutResult(
        ratio,
        mode,
        cut=cut,
        tail_words=len(text[cut:].split()),
        tail_tokens=len(tail),
        exact=exact,
        exact_normalized=exact,
        matched_tokens=matched,
        written=written,
        is_complete=exact,
        rouge_l=matched / max(len(tail), 1),
        answer="42" if exact else "17",
        answer_right=exact,
    )


def make_item(name, number, seen, ratios, modes, rng):
    text = make_text(rng)
    tokens = TOKENS.findall(text)
    is_seen = rng.random() < seen
    right = [rng.random() < (0.997 if is_seen else 0.45) for _ in tokens]
    hits = runs_of(tokens, right)
    longest = max(hits, key=lambda span: span[1] - span[0], default=[0, 0])
    cuts = [make_cut(text, tokens, right, ratio, mode, rng) for mode in modes for ratio in ratios]
    run = len(TOKENS.findall(text[slice(*longest)]))
    exact = [cut.ratio for cut in cuts if cut.exact]
    grade = "A" if exact and min(exact) <= 0.4 else "B" if exact or run >= 20 else None
    return ItemResult(
        set=name,
        item_id=str(number),
        place=f"{name}.jsonl:{number + 1}",
        text=text,
        num_tokens=len(tokens),
        hits=hits,
        longest_run=run,
        longest_run_span=longest,
        logprobs={"loss": -rng.uniform(0.1, 0.5) if is_seen else -rng.uniform(1.2, 2.9), "min_k": -5.25},
        cuts=cuts,
        grade=grade or ("C" if rng.random() < 0.02 else None),
    )


def share(hits, total):
    if not total:
        return Estimate(None, None, None, 0, 0)
    rate = hits / total
    margin = 1.96 * math.sqrt((rate * (1 - rate) + 1 / total) / total)
    return Estimate(rate, max(0.0, rate - margin), min(1.0, rate + margin), total, hits)


def mean(values):
    values = list(values)
    if not values:
        return Estimate(None, None, None, 0, method="bootstrap")
    middle = sum(values) / len(values)
    return Estimate(middle, 0.9 * middle, 1.1 * middle, len(values), method="bootstrap")


def make_set(name, items, ratios, modes, applies_to=()):
    cuts = []
    for mode in modes:
        for ratio in ratios:
            mine = [cut for item in items for cut in item.cuts if (cut.mode, cut.ratio) == (mode, ratio)]
            kept = [cut for cut in mine if not cut.skipped]
            exact = share(sum(cut.exact for cut in kept), len(kept))
            skipped = {"short_tail": len(mine) - len(kept), "no_cut": 0}
            words = mean(float(cut.matched_tokens) for cut in kept)
            rouge = mean(cut.rouge_l for cut in kept)
            cuts.append(CutSummary(ratio, mode, exact, exact, words, rouge, None, exact, skipped, 2, 1))
    runs = sorted(item.longest_run for item in items) or [0]
    quantiles = {str(q): float(runs[int(q * (len(runs) - 1))]) for q in (0.5, 0.95, 1)}
    return SetSummary(
        name=name,
        role="control" if applies_to else "benchmark",
        kind="perturbed" if applies_to else "benchmark",
        applies_to=list(applies_to),
        source=f"data/{name}.jsonl",
        sha256="5f" * 32,
        num_items=len(items),
        num_duplicates=0,
        cuts=cuts,
        longest_run=mean(float(run) for run in runs),
        longest_run_quantiles=quantiles,
        loss=mean(-item.logprobs["loss"] for item in items),
        own_answer=None,
        grades={grade: sum(item.grade == grade for item in items) for grade in "ABC"},
    )


def make_comparison(benchmark, control, position):
    rate, other = benchmark.cuts[position].exact, control.cuts[position].exact
    if rate.value is None or other.value is None:
        return None
    difference = rate.value - other.value
    margin = 1.96 * math.sqrt(0.25 / rate.total + 0.25 / other.total) * (0.3 + abs(difference))
    p = 0.5 * math.erfc(max(difference, 0) / margin * 1.96 / math.sqrt(2)) or 1e-300
    powerless = other.total < 200
    return Comparison(
        benchmark.name,
        control.name,
        benchmark.cuts[position].ratio,
        benchmark.cuts[position].mode,
        rate,
        other,
        difference,
        difference - margin,
        difference + margin,
        None if powerless else p,
        [Stratum(8, 14, rate.hits or 0, rate.total, other.hits or 0, other.total)],
        3,
        "no power: fewer than 200 items of controls" if powerless else None,
    )


def make_verdict(summary, tests):
    mine = [test for test in tests if test.benchmark == summary.name]
    p = min((test.p_holm for test in mine if test.p_holm is not None), default=None)
    level = "untested" if p is None else "strong" if p <= 0.001 else "some" if p <= 0.05 else "none"
    headline = {
        "strong": "Strong evidence",
        "some": "Some evidence",
        "none": "No evidence at this power",
        "untested": "Not tested",
    }[level]
    rate = summary.cuts[0].exact if summary.cuts else share(0, 0)
    text = (
        f"From the first part of a problem the model wrote the rest word for word in {rate.hits} of {rate.total} "
        "cases. Had it completed 1.8 % of the benchmark from memory, this run would have found it 4 times in 5."
    )
    return Verdict(summary.name, level, headline, text, p, 0.018 if p is not None else None)


def make_run(
    benchmarks=(("orchard", 300, 0.25), ("brookside", 240, 0.0)),
    controls=(
        ("orchard perturbed", 260, 0.0, ("orchard",)),
        ("calculations", 220, 0.0, ("orchard", "brookside")),
    ),
    ratios=(0.4, 0.6),
    modes=("bare",),
    seed=0,
):
    """A report and its items; each benchmark with its size and the share of it that was seen."""
    rng = random.Random(seed)
    items, sets = [], []
    for name, count, seen, *applies_to in [*benchmarks, *controls]:
        mine = [make_item(name, number, seen, ratios, modes, rng) for number in range(count)]
        items += mine
        sets.append(make_set(name, mine, ratios, modes, *applies_to))
    comparisons = []
    for summary in sets:
        for control in sets:
            if summary.name in control.applies_to:
                found = [make_comparison(summary, control, place) for place in range(len(summary.cuts))]
                comparisons += [item for item in found if item is not None]
    tests = []
    for summary in (item for item in sets if item.role == "benchmark"):
        for cut in summary.cuts:
            mine = [
                item
                for item in comparisons
                if (item.benchmark, item.ratio, item.mode) == (summary.name, cut.ratio, cut.mode)
            ]
            worst = max(
                (item for item in mine if item.p_value is not None),
                key=lambda item: item.p_value,
                default=None,
            )
            p = None if worst is None else worst.p_value
            holm = None if p is None else min(1.0, 4 * p)
            control = None if worst is None else worst.control
            tests.append(
                RatioTest(summary.name, cut.ratio, cut.mode, p, holm, control, None if p is None else 0.018)
            )
    named = [item for item in sets if item.role == "benchmark"]
    first, last = (named[0].name, sets[-1].name) if named else ("", "")
    report = Report(
        schema_version=SCHEMA_VERSION,
        hfpar_version="0.0.0",
        created="2031-05-17T09:30:00+00:00",
        command="python eval/contamination.py --model_name_or_path models/heron-1b --benchmarks orchard,brookside",
        settings={"ratios": list(ratios), "seed": 42, "alpha": 0.05, "chat_template": "chat" in modes},
        versions={"torch": "2.9.0", "hfpar": "0.0.0", "transformers": "5.10.0"},
        model=ModelInfo(
            "models/heron-1b", "LlamaForCausalLM", 1_235_814_400, "bfloat16", "ab" * 32, "cd" * 32
        ),
        reference_model=None,
        method="forward",
        sets=sets,
        comparisons=comparisons,
        tests=tests,
        verdicts=[make_verdict(summary, tests) for summary in named],
        scores=[
            ScoreComparison(item.benchmark, item.control, method, 0.62, 0.57, 0.67)
            for item in comparisons
            if item.ratio == ratios[0] and item.mode == "bare"
            for method in ("loss", "zlib", "min_k", "min_k_plus_plus")
        ],
        orders=[OrderTest(item.name, 50, 25, 0.34) for item in named],
        intrusions=[Intrusion(first, last, 180, 61, 40, 0.0021, 14, 3, 0.0064)] if controls and named else [],
        limitations=[
            "A model that paraphrases what it has read, or was trained on it in another format, isn't found.",
            "Controls made by changing numbers keep the words around them: an item seen in part looks like its copy.",
        ],
        timing=Timing(93.4, 71.0, 212_345, 2),
    )
    return report, items


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


class Page(HTMLParser):
    """Elements by tag, the texts in them, and whether every element that was opened was closed."""

    VOID = {"meta", "input", "br", "col", "link", "img"}

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.scripts, self.links, self.words = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag == "script":
            self.scripts.append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


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
    assert not re.search(r"p \d", page.text.split("Exact match")[1].split("Longest runs")[0])
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


# Checkpoints compared


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
    assert "brookside: no item changed" in text
    # However clear a change on the way was.
    sooner = [replace(rate, p_holm=1e-30) if rate.second == "step-100" else rate for rate in comparison.rates]
    assert summarize_changes(replace(comparison, rates=sooner)) == text
