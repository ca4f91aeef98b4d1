"""An audit of a model behind a server finds what one in this process finds, as far as the server tells."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfpar.attention import interface
from hfpar.audit import server_audit
from hfpar.audit.answering import judge_answers, question_prompt, with_own_answer
from hfpar.audit.answers import gold_answer
from hfpar.audit.comparing import read_items, run_comparison
from hfpar.audit.endings import CommonEndings
from hfpar.audit.forward import Forward
from hfpar.audit.generate import Generator
from hfpar.audit.main import main
from hfpar.audit.plan import plain_cut
from hfpar.audit.prefix import TailLimits, TextTokenizer, TokenizedText
from hfpar.audit.probe import PlannedItem, Probe, ProbeSettings
from hfpar.audit.results import ItemResult
from hfpar.audit.server import CompletionServer, ServerToken
from hfpar.audit.server_audit import read_key, run_server_audit
from hfpar.audit.server_http import ServerError
from hfpar.audit.server_items import CutRules, Known, ServerProbe, judge
from hfpar.audit.server_probe import ScoredText
from hfpar.audit.sets import limits_of, load_sets, plan_items, ratios_of
from hfpar.audit.summarize import SetInfo
from hfpar.audit.text import word_spans
from hfpar.config.audit_schema import AuditConfig
from hfpar.config.audit_validate import validate_audit
from hfpar.data.benchmarks import Benchmark, BenchmarkItem
from hfpar.errors import ConfigError
from hfpar.models.tiny import build_tiny_model

NAME = "tests/tiny"
THINGS = "apples cards coins stamps shells cups keys toys boxes seeds pens books".split()

VERBATIM, SPELT, PART, NEW = range(4), range(4, 6), range(6, 8), range(8, 10)
NUM_ITEMS, NUM_CONTROLS = 10, 4


def text(number: int, dash: str = "-", gap: str = " ") -> str:
    """A made-up problem, as it stands in the benchmark or as another page spells it."""
    more = " Nobody else has any, and nobody sells them." if number in NEW else ""
    one, two, three = (THINGS[(number * step + step) % 12] for step in (1, 5, 7))
    return (
        f"Problem {number}: {number * 7 % 90} {one} and {two} cost {number * 13 % 97} €, but {three} cost "
        f"{number * 29 % 89} {dash} more than the {one}.{gap}How many {three} are {number * 3 % 8} of the {two}?{more}"
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt some texts by heart, some in another spelling, some up to their middle."""
    folder = tmp_path_factory.mktemp("model")
    build_tiny_model(folder, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder)
    texts = [text(number) for number in VERBATIM]
    texts += [text(number, "\N{EN DASH}", "  ") for number in SPELT]
    texts += [text(number)[:75] + " of the sea." for number in PART]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.0)
    torch.manual_seed(0)
    for _ in range(80):
        network(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    network.save_pretrained(folder)
    return folder


class Serving(ThreadingHTTPServer):
    """The model as vLLM would serve it; `most` requests are answered, then it is as if it had died."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder: Path, *, hides: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.network = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.hides, self.context = hides, 2048
        self.most: int | None = None
        self.spoils: str | None = None
        """A text whose tokens come back as those of another."""
        self.requests: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Serving

    def log_message(self, *_: Any) -> None:
        pass

    def send(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.send(
            200, {"data": [{"id": NAME, "owned_by": "vllm"}, {"id": "tests/again", "owned_by": "vllm"}]}
        )

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            if server.most is not None and len(server.requests) >= server.most:
                self.connection.close()
                return
            server.requests.append(body)
            ids = server.tokenizer(body["prompt"]).input_ids
            if len(ids) + body["max_tokens"] > server.context:
                self.send(400, {"error": {"message": "maximum context length exceeded"}})
                return
            written = self.write(ids, body["max_tokens"])
            answer = server.tokenizer.decode(written, clean_up_tokenization_spaces=False)
            for stop in body.get("stop", []):
                answer = answer.partition(stop)[0]
            choice: dict[str, Any] = {"text": answer, "logprobs": None}
            if body.get("echo") and not server.hides:
                choice["logprobs"] = self.logprobs([*ids, *written])
                if body["prompt"] == server.spoils:
                    choice["logprobs"]["tokens"][3] = "mist"
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(written)}
        self.send(200, {"choices": [choice], "usage": usage})

    def write(self, ids: list[int], most: int) -> list[int]:
        network, prompt = self.server.network, torch.tensor([ids])
        found = network.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=most, do_sample=False
        )
        written: list[int] = found[0, len(ids) :].tolist()
        return written[:-1] if written[-1] == self.server.tokenizer.eos_token_id else written

    def logprobs(self, ids: list[int]) -> dict[str, Any]:
        with torch.inference_mode():
            known = self.server.network(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
        texts = [self.server.tokenizer.decode([token]) for token in ids]
        values = known.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        tops: list[dict[str, float] | None] = [None]
        for place, (best, numbers) in enumerate(zip(*reversed(known.topk(2, -1)), strict=True), 1):
            top = {texts[place]: values[place - 1]}
            for token, number in zip(best.tolist(), numbers.tolist(), strict=True):
                top.setdefault(self.server.tokenizer.decode([token]), number)
            tops.append(top)
        return {"tokens": texts, "token_logprobs": [None, *values], "top_logprobs": tops}


@contextmanager
def serve(folder: Path, **settings: Any) -> Iterator[Serving]:
    server = Serving(folder, **settings)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("benchmark")
    rows = [
        {"id": f"n{number}", "question": text(number), "answer": str(number)}
        for number in (*VERBATIM, *SPELT, *PART, *NEW)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "made_up.yaml"
    path.write_text(
        "name: made_up\npath: rows.jsonl\nfields: {question: question, answer: answer, id: id}\n"
        "answer_kind: exact\n"
    )
    return path


def settings_of(benchmark: Path) -> dict[str, Any]:
    return {
        "benchmarks": str(benchmark),
        "builtin_controls": "perturbed",
        "num_control_items": NUM_CONTROLS,
        "ratios": [0.4, 0.6],
        "max_new_tokens": 20,
    }


@pytest.fixture
def make_config(benchmark: Path, tmp_path: Path) -> Callable[..., AuditConfig]:
    def make(server: Serving, output: str = "run", **settings: Any) -> AuditConfig:
        values = {"model_name_or_path": NAME, "backend": "openai", "base_url": server.url}
        values |= {**settings_of(benchmark), "output_dir": str(tmp_path / output)}
        return AuditConfig(**{**values, **settings})

    return make


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*args: Any, **settings: Any) -> CompletionServer:
        return CompletionServer(*args, **settings, retries=1, backoff=0.01)

    monkeypatch.setattr(server_audit, "CompletionServer", make)


@pytest.fixture(scope="module")
def expected(model: Path, benchmark: Path) -> list[ItemResult]:
    """What the in-process probe finds of the same texts, by generation."""
    config = AuditConfig(**settings_of(benchmark), generate=True, answers=True)
    interface.register()
    network = AutoModelForCausalLM.from_pretrained(model, attn_implementation="hfpar").eval()
    tokenizer = TextTokenizer(AutoTokenizer.from_pretrained(model))
    sets = load_sets(config)
    kinds = {one.name: one.benchmark.answer_kind for one in sets}
    planned = plan_items(sets, tokenizer, ratios_of(config), limits_of(config), None)
    ends = [tokenizer.tokenizer.eos_token_id]
    probe = Probe(
        Forward(network, packs=True),
        Generator(network, ends[0], ends),
        tokenizer,
        ProbeSettings(method="generate", generate=config.generate, max_new_tokens=config.max_new_tokens),
    )
    results = judge_answers(probe(planned), planned, kinds.__getitem__)
    written = probe.write([tokenizer.ids(question_prompt(item.tokenized.text)) for item in planned])
    return [
        result
        if gold_answer(item.item, kinds[item.set]) is None
        else with_own_answer(result, item, answer, kinds[item.set])
        for result, item, answer in zip(results, planned, written, strict=True)
    ]


def results_of(config: AuditConfig) -> list[ItemResult]:
    return [item for items in read_items(Path(str(config.output_dir))).values() for item in items]


def verdicts(items: list[ItemResult]) -> list[Any]:
    return [
        (
            item.set,
            item.item_id,
            cut.ratio,
            cut.skipped,
            cut.cut,
            cut.tail_words,
            cut.exact,
            cut.exact_normalized,
        )
        for item in items
        for cut in item.cuts
    ]


def tokens(items: list[ItemResult]) -> list[Any]:
    return [
        (
            item.num_tokens,
            item.longest_run,
            item.hits,
            [(cut.tail_tokens, cut.matched_tokens) for cut in item.cuts],
        )
        for item in items
    ]


def test_a_server_that_scores_finds_what_this_process_finds(
    model: Path,
    expected: list[ItemResult],
    make_config: Callable[..., AuditConfig],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serve(model) as server:
        config = make_config(server, generate=True, answers=True)
        report = run_server_audit(config)
        num_echoes = sum("echo" in request for request in server.requests)
    found = results_of(config)
    assert verdicts(found) == verdicts(expected) and tokens(found) == tokens(expected)
    cuts = [cut for item in expected for cut in item.cuts if not cut.skipped]
    # All kinds of verdicts are among them, or the equality above says little.
    assert {(cut.exact, cut.exact_normalized) for cut in cuts} == {
        (True, True),
        (False, True),
        (False, False),
    }
    assert any(0 < cut.matched_tokens < cut.tail_tokens for cut in cuts)
    assert "€" in found[0].text
    for mine, other in zip(found, expected, strict=True):
        assert mine.grade == other.grade and mine.own_answer == other.own_answer
        assert set(mine.logprobs) == {"loss", "zlib", "min_k"}
        for name, value in mine.logprobs.items():
            assert value == pytest.approx(other.logprobs[name], abs=2e-5)
        for cut, its in zip(mine.cuts, other.cuts, strict=True):
            assert cut.is_complete is its.is_complete
            assert (cut.written, cut.rouge_l, cut.answer) == (its.written, its.rouge_l, its.answer)
    assert num_echoes == len(found) + 2, "each text is scored once, and two for the check"
    assert report.method == "forward" and report.model.sha256 is None
    assert report.model.architecture == "server (vllm)" and report.model.num_parameters is None
    assert any("behind a server" in line for line in report.limitations)
    folder = Path(str(config.output_dir))
    page = (folder / "report.html").read_text()
    assert "server (vllm)" in page and "None parameters" not in page and (folder / "report.md").is_file()
    assert f"{NAME} at {config.base_url} (vllm)" in capsys.readouterr().out


@pytest.fixture
def unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """No files of the report, which take a while."""
    monkeypatch.setattr(server_audit, "publish", lambda *_: None)


FALLBACK = "every verdict is found by generation, as with --method generate"


@pytest.mark.usefixtures("unwritten")
def test_hidden_log_probabilities(
    model: Path,
    expected: list[ItemResult],
    make_config: Callable[..., AuditConfig],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serve(model, hides=True) as server:
        config = make_config(server)
        report = run_server_audit(config)
    found = results_of(config)
    assert verdicts(found) == verdicts(expected)
    assert FALLBACK in capsys.readouterr().out and any(FALLBACK in line for line in report.warnings)
    assert report.method == "generate" and report.scores == []
    assert any("in words" in line for line in report.limitations)
    for mine, other in zip(found, expected, strict=True):
        assert mine.logprobs == {} and mine.num_tokens == len(mine.text.split())
        for cut, its in zip(mine.cuts, other.cuts, strict=True):
            if cut.skipped:
                continue
            assert cut.settled_by == "generation" and cut.tail_tokens == cut.tail_words
            assert cut.matched_tokens <= its.matched_tokens, "a word has a token at least"
            assert not cut.exact or cut.matched_tokens == cut.tail_words
        # What is marked as the model's first choice is marked by the scores, too.
        marked = {place for start, end in other.hits for place in range(start, end)}
        for start, end in mine.hits:
            assert {place for place in range(start, end) if not mine.text[place].isspace()} <= marked
        assert mine.longest_run <= other.longest_run
        assert mine.longest_run == len(mine.text[slice(*mine.longest_run_span)].split())
    assert max(item.longest_run for item in found) >= 8


@pytest.mark.usefixtures("unwritten")
def test_generation_may_be_asked_for(
    model: Path,
    expected: list[ItemResult],
    make_config: Callable[..., AuditConfig],
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings: dict[str, Any] = {"method": "generate", "max_items": 3, "builtin_controls": "none"}
    for hides in (True, False):
        with serve(model, hides=hides) as server:
            config = make_config(server, f"hides-{hides}", **settings)
            report = run_server_audit(config)
        found = results_of(config)
        ids = [item.item_id for item in found]
        same = [item for item in expected if item.set == "made_up" and item.item_id in ids]
        assert len(found) == 3 and verdicts(found) == verdicts(same)
        assert hides or tokens(found) == tokens(same)
        assert {cut.settled_by for item in found for cut in item.cuts} == {"generation"}
        assert FALLBACK not in capsys.readouterr().out and FALLBACK not in "".join(report.warnings)
        assert any("in words" in line for line in report.limitations) is hides


@pytest.mark.usefixtures("unwritten")
def test_a_server_that_dies_midway(model: Path, make_config: Callable[..., AuditConfig]) -> None:
    with serve(model) as server:
        whole = make_config(server, "whole", request_concurrency=2)
        run_server_audit(whole)
        config = make_config(server, request_concurrency=2)
        server.requests.clear()
        server.most = 4 + 8
        with pytest.raises(
            ServerError, match=r"of 14 items are done and kept, the same command goes on"
        ) as caught:
            run_server_audit(config)
        part = Path(str(config.output_dir)) / ".items-0.partial.jsonl"
        kept = [json.loads(line)["text"] for line in part.read_text().splitlines()]
        assert 5 <= len(kept) <= 8 and caught.value.exit_code == 1 and "\n" not in str(caught.value)
        assert f"{len(kept)} of 14 items" in str(caught.value)
        server.most = None
        server.requests.clear()
        report = run_server_audit(config)
        again = [request["prompt"] for request in server.requests]
    assert not [prompt for prompt in again if any(one.startswith(prompt) for one in kept)]
    assert any("earlier, stopped run" in line for line in report.warnings)
    assert results_of(config) == results_of(whole)


@pytest.mark.usefixtures("unwritten")
def test_texts_that_do_not_fit_and_tokens_that_do_not_spell(
    model: Path, make_config: Callable[..., AuditConfig]
) -> None:
    with serve(model) as server:
        server.spoils = text(2)
        config = make_config(server, generate=True, max_new_tokens=64)
        lengths = [len(server.tokenizer(text(item)).input_ids) for item in range(NUM_ITEMS)]
        server.context = max(lengths[: NEW.start]) + 8  # a text whose tokens aren't known needs some more
        report = run_server_audit(config)
    found = {item.item_id: item for item in results_of(config) if item.set == "made_up"}
    long = {f"n{number}" for number in NEW}
    for name, item in found.items():
        assert ([cut.skipped for cut in item.cuts] == ["too_long"] * 2) is (name in long)
        # A whole continuation is as long as the context allows, if that leaves a place for any.
        assert item.cuts[0].is_complete is (name not in long)
    assert any("longer than the model's context" in line for line in report.warnings)
    assert found["n2"].logprobs == {} and all(cut.exact for cut in found["n2"].cuts)
    assert any("couldn't be laid over them" in line and "'mist'" in line for line in report.warnings)


def test_other_ways_in(
    model: Path,
    make_config: Callable[..., AuditConfig],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serve(model) as server:
        config = make_config(server, max_items=2, builtin_controls="none")
        flags = ["--backend", "openai", "--base_url", server.url, "--benchmarks", str(config.benchmarks)]
        flags += ["--max_items", "2", "--builtin_controls", "none"]
        output = ["--output_dir", str(tmp_path / "flags")]
        assert main([*flags, *output, "--model_name_or_path", NAME]) == 0
        assert main([*flags, *output, "--model_name_or_path", "tests/other"]) == 2
        assert "does not serve 'tests/other'" in capsys.readouterr().err
        settings = replace(config, model_name_or_path=None, compare=[NAME, "tests/again"])
        launch: Any = type("Launch", (), {"world_size": 1, "is_main": True})()
        assert [label for label, _ in run_comparison(settings, launch)] == ["tiny", "again"]
        with pytest.raises(ConfigError, match="backend: openai with 2 processes"):
            run_server_audit(config, world_size=2)


def test_the_key_is_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("a-key\n")
    assert read_key(str(path)) == "a-key"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="api_key_file: .* is empty"):
        read_key(str(path))
    with pytest.raises(ConfigError, match="api_key_file: .*none can't be read .No such file"):
        read_key(str(tmp_path / "none"))


def scored(
    spans: list[tuple[int, int]], hits: list[bool], best: list[str | None], ties: list[bool]
) -> ScoredText:
    gaps = [0.0 if hit else 1.0 for hit in hits]
    return ScoredText(spans, hits, [-1.0] * len(spans), gaps, best, ties)


@pytest.mark.parametrize(
    ("best", "tie", "expected"),
    [
        (" sea", False, (False, False, False)),
        ("sea", False, (False, False, False)),  # its space lost in decoding
        (" po", False, (None, None, False)),  # the tail, spelt with other tokens
        ("po", False, (None, None, False)),
        ("\ufffd", False, (None, None, False)),
        ("bytes:\\xf0", False, (None, None, False)),
        (None, False, (None, None, False)),
        ("", False, (None, None, False)),
        (" sea", True, (None, None, True)),
    ],
)
def test_what_scores_leave_open(best: str | None, tie: bool, expected: tuple[Any, ...]) -> None:
    known = scored([(0, 1), (1, 5), (5, 10)], [False, True, False], [None, " old", best], [False, False, tie])
    found = judge("a old pond", 1, known)
    assert (found.match.strict, found.match.normalized, found.near_tie) == expected
    assert found.matched_tokens == 1 and found.is_open is (expected[0] is None)


def test_words_and_tokens_that_a_continuation_begins_with() -> None:
    text = "a cat sat on"
    by_words = Known(text, None, word_spans(text))
    for written, count in (
        (" cat sat on", 3),
        (" cat sat on it", 3),
        (" cats sat", 0),
        (" cat sat", 1),
        (" dog", 0),
    ):
        assert by_words.num_common(1, written) == count, written
    spans = [(0, 1), (1, 5), (5, 9), (9, 12)]
    by_tokens = Known(text, scored(spans, [True] * 4, [None] * 4, [False] * 4), spans)
    assert by_tokens.num_common(1, " cat sits") == 1
    assert by_tokens.fits(5) and not by_tokens.fits(6) and by_words.fits(6)


def test_a_cut_falls_between_tokens() -> None:
    question = "a cat sat on the mat by the old red sea"
    pieces = ["a", " cat", " sat", " on", " the", " mat by", " the", " old", " red", " sea"]
    tokens = [ServerToken(piece, -0.1 if i else None, piece, -0.1, -5.0) for i, piece in enumerate(pieces)]

    class Stub:
        def score_one(self, text: str) -> list[ServerToken]:
            return tokens

    item = BenchmarkItem("1", "line 1", question, None, None)
    info = SetInfo("made_up", "benchmark", "benchmark", "", "0")
    common = CommonEndings([(info, Benchmark("made_up", (item,), "none", "", "0", 0))])
    rules = CutRules([0.4, 0.55], TailLimits(2, 4), common)
    probe = ServerProbe(cast(Any, Stub()), ProbeSettings(), rules, scores=True)
    found = probe(PlannedItem("made_up", item, TokenizedText(question, [], [], 0), []), ask=False).result
    assert [question[: cut.cut] for cut in found.cuts] == ["a cat sat on", "a cat sat on the"]
    assert [(cut.exact, cut.tail_tokens, cut.matched_tokens) for cut in found.cuts] == [
        (True, 6, 6),
        (True, 5, 5),
    ]
    assert plain_cut(question, 0.55, TailLimits(2, 4)).position == len("a cat sat on the mat")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"request_concurrency": 0}, "request_concurrency: 0; must be a whole number of at least 1"),
        ({"dtype": "float16"}, "dtype: float16 with backend: openai"),
        ({"reference_model": "other"}, "reference_model: other with backend: openai"),
        ({"base_url": None}, "base_url: missing"),
        ({"backend": "transformers"}, "base_url: http://host/v1 without a server"),
        (
            {"backend": "transformers", "base_url": None, "request_timeout": 5.0},
            "request_timeout: 5.0 without a server",
        ),
    ],
)
def test_settings_that_contradict_a_server(settings: dict[str, Any], says: str) -> None:
    config = AuditConfig(model_name_or_path=NAME, backend="openai", base_url="http://host/v1")
    validate_audit(config)
    with pytest.raises(ConfigError, match=says):
        validate_audit(replace(config, **settings))
