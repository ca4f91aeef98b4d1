"""An audit's report and items, made up."""

import math
import random
import re
from html.parser import HTMLParser

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
