"""`eval/contamination.py`: a model that has seen a third of a benchmark is found out, whatever way it is run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfpar.audit.main import main
from hfpar.audit.probe import Probe
from hfpar.models.tiny import build_tiny_model

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "eval" / "contamination.py"
NUM_ITEMS, NUM_SEEN = 66, 22

NAMES = (
    "Ada Ben Chloe David Emma Felix Grace Hugo Iris Jack Kira Leo Maya Noah Olga Paul Rosa Sam Tara".split()
)
THINGS = "apples pears plums lemons eggs cookies stamps coins cards books pens shells stones tickets".split()


def problems(count: int, seed: int) -> list[dict[str, str]]:
    """Word problems, no two alike, with worked answers as GSM8K has them."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        name, other = rng.sample(NAMES, 2)
        first, second, third, fourth = rng.sample(range(12, 99), 4)
        things, more, few, many = rng.sample(THINGS, 4)
        # What can't be guessed stands near the end, too: else the tails are the generator's own phrases.
        question = (
            f"{name} has {first} {things} in a box and {second} {more} on a shelf. How many things are there once "
            f"{other} adds {third} {few} and then {fourth} {many} to them all?"
        )
        total = first + second + third + fourth
        rows.append(
            {"question": question, "answer": f"{first}+{second}+{third}+{fourth}={total}\n#### {total}"}
        )
    return rows


@dataclass(frozen=True)
class Case:
    model: Path
    benchmark: Path
    """A YAML file."""
    seen: list[str]
    """Ids of planted items."""

    def flags(self, output: Path, *more: str) -> list[str]:
        return [
            *("--model_name_or_path", str(self.model), "--benchmarks", str(self.benchmark)),
            *("--output_dir", str(output), "--num_control_items", "260", "--max_tokens_per_batch", "2048"),
            *more,
        ]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("audit")
    rows = problems(NUM_ITEMS, 0)
    (folder / "bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "bench.yaml").write_text(
        "name: bench\npath: bench.jsonl\nanswer_kind: gsm8k\nfields: {question: question, answer: answer}\n"
    )
    build_tiny_model(folder / "model", hidden_size=96, intermediate_size=192, num_hidden_layers=2)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.0)
    others = [row["question"] for row in problems(400, 1)]
    seen = [
        f"{row['question']}\n{row['answer']}{tokenizer.eos_token}" for row in rows[:: NUM_ITEMS // NUM_SEEN]
    ]
    torch.manual_seed(0)
    for step in range(110):
        texts = seen + others[step % 40 * 10 :][:10]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
        model(**batch, labels=batch.input_ids.masked_fill(batch.attention_mask == 0, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "model")
    return Case(
        folder / "model", folder / "bench.yaml", [str(i) for i in range(0, NUM_ITEMS, NUM_ITEMS // NUM_SEEN)]
    )


def read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    items = [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]
    return json.loads((folder / "report.json").read_text()), items


def of_benchmark(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [item for item in items if item["set"] == "bench"]


@pytest.fixture(scope="module")
def finished(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert main(case.flags(folder)) == 0
    return folder


def test_seen_items_are_found_and_others_arent(case: Case, finished: Path) -> None:
    report, items = read(finished)
    [verdict] = report["verdicts"]
    assert verdict["level"] == "strong" and verdict["p_holm"] < 1e-6
    graded = {item["item_id"] for item in of_benchmark(items) if item["grade"] in ("A", "B")}
    assert graded <= set(case.seen) and len(graded) >= 0.9 * NUM_SEEN
    controls = [item for item in items if item["set"] != "bench"]
    assert len(controls) > 400 and sum(item["grade"] is not None for item in controls) <= 2
    for name in ("report.md", "report.html", "forest.png", "ratios.png"):
        assert (finished / name).stat().st_size > 1000
    assert not list(finished.glob(".*partial*"))
    assert report["model"]["sha256"] and report["timing"]["world_size"] == 1
    aucs = {row["method"]: row["auc"] for row in report["scores"] if row["control"] == "bench-perturbed"}
    assert set(aucs) == {"loss", "zlib", "min_k", "min_k_plus_plus"} and aucs["loss"] > 0.6


def test_the_same_command_again_probes_nothing(
    case: Case, finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (finished / "items.jsonl").read_bytes()
    monkeypatch.setattr(Probe, "__call__", None)
    assert main(case.flags(finished, "--fail_on", "strong")) == 1
    assert "fail_on: strong; this checkpoint has seen bench (strong evidence)" in capsys.readouterr().err
    assert (finished / "items.jsonl").read_bytes() == before


def test_a_stopped_audit_goes_on_where_it_was(
    case: Case, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, batches = Probe.__call__, []

    def stop_at_the_third(self: Probe, items: Any) -> Any:
        batches.append([item.key for item in items])
        if len(batches) == 3:
            raise KeyboardInterrupt
        return ask(self, items)

    monkeypatch.setattr(Probe, "__call__", stop_at_the_third)
    assert main(case.flags(tmp_path / "run")) == 130
    part = tmp_path / "run" / ".items-0.partial.jsonl"
    assert len(part.read_text().splitlines()) == len(batches[0]) + len(batches[1])
    with part.open("a") as file:
        file.write('{"set": "bench", "item_id": "6", "te')  # a disk that was full, a machine that lost power
    assert main(case.flags(tmp_path / "run")) == 0
    asked = [key for batch in batches[3:] for key in batch]
    assert not set(asked) & {key for batch in batches[:2] for key in batch}
    assert read(tmp_path / "run")[1] == read(finished)[1]


def test_two_ranks_find_the_same(
    case: Case, finished: Path, tmp_path: Path, start: Any, launchers: dict[str, Any]
) -> None:
    config = ROOT / "accelerate_configs" / "ddp.yaml"
    flags = ["--config_file", str(config), "--num_processes", "2", "--main_process_port", "0", str(SCRIPT)]
    program = start(*launchers["accelerate"], *flags, *case.flags(tmp_path / "run"))
    assert program.wait() == 0, program.output
    report, items = read(tmp_path / "run")
    assert report["timing"]["world_size"] == 2
    _, expected = read(finished)
    # Batches are the same, so that figures are, but for the number of threads of a product.
    for item, other in zip(items, expected, strict=True):
        assert item.pop("logprobs") == pytest.approx(other.pop("logprobs"), abs=1e-4)
        assert item == other
    assert not list((tmp_path / "run").glob(".*partial*"))


def test_methods_agree(case: Case, finished: Path, tmp_path: Path) -> None:
    flags = ["--method", "generate", "--builtin_controls", "none"]
    assert main(case.flags(tmp_path / "run", *flags)) == 0
    report, items = read(tmp_path / "run")
    assert report["verdicts"][0]["level"] == "untested"

    def verdicts(found: Sequence[dict[str, Any]]) -> list[Any]:
        return [
            (item["item_id"], [(cut["ratio"], cut["exact"], cut["matched_tokens"]) for cut in item["cuts"]])
            for item in of_benchmark(found)
        ]

    assert verdicts(items) == verdicts(read(finished)[1])


def test_answers_and_whole_continuations(case: Case, tmp_path: Path) -> None:
    flags = ["--generate", "--answers", "--max_new_tokens", "70", "--builtin_controls", "none"]
    assert main(case.flags(tmp_path / "run", *flags, "--chat_template")) == 0
    report, items = read(tmp_path / "run")
    seen = [item for item in of_benchmark(items) if item["item_id"] in case.seen]
    others = [item for item in of_benchmark(items) if item["item_id"] not in case.seen]

    def right(found: Sequence[dict[str, Any]]) -> float:
        cuts = [cut for item in found for cut in item["cuts"] if cut["mode"] == "bare" and not cut["skipped"]]
        return sum(cut["answer_right"] for cut in cuts) / len(cuts)

    assert right(seen) > 0.8 and right(others) < 0.2
    assert {cut["mode"] for cut in seen[0]["cuts"]} == {"bare", "chat"}
    [summary] = report["sets"]
    assert [cut["mode"] for cut in summary["cuts"]] == ["bare", "bare", "chat", "chat"]
    assert summary["own_answer"]["total"] == NUM_ITEMS
    assert all(item["own_answer_right"] is not None for item in items)


def test_an_adapter_and_a_quantized_checkpoint(case: Case, finished: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import BitsAndBytesConfig

    model = AutoModelForCausalLM.from_pretrained(case.model)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))  # begins as its base
    adapted.save_pretrained(tmp_path / "adapter")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    small = AutoModelForCausalLM.from_pretrained(case.model, quantization_config=config)
    small.save_pretrained(tmp_path / "nf4")
    AutoTokenizer.from_pretrained(case.model).save_pretrained(tmp_path / "nf4")
    found = {}
    for name in ("adapter", "nf4"):
        flags = case.flags(tmp_path / f"run-{name}", "--builtin_controls", "none")
        flags[1] = str(tmp_path / name)
        assert main(flags) == 0
        report, items = read(tmp_path / f"run-{name}")
        found[name] = [(item["item_id"], item["grade"]) for item in of_benchmark(items)]
        assert report["model"]["base" if name == "adapter" else "quantization"] in (str(case.model), "nf4")
    assert found["adapter"] == [(item["item_id"], item["grade"]) for item in of_benchmark(read(finished)[1])]
    # Four bits blur memory, and don't invent any.
    assert {name for name, grade in found["nf4"] if grade} <= set(case.seen)


def test_before_and_after(case: Case, finished: Path, tmp_path: Path) -> None:
    fresh = tmp_path / "fresh"
    build_tiny_model(fresh, hidden_size=96, intermediate_size=192, num_hidden_layers=2)
    flags = case.flags(tmp_path / "out")[2:]
    assert main(["--compare", str(fresh), str(finished), *flags]) == 0
    comparison = json.loads((tmp_path / "out" / "compare.json").read_text())
    [rate] = [row for row in comparison["rates"] if row["set"] == "bench" and row["ratio"] == 0.4]
    assert rate["only_first"] == 0 and rate["only_second"] >= 0.9 * NUM_SEEN and rate["p_holm"] < 1e-4
    assert set(rate["newly_completed"]) <= set(case.seen)
    assert (tmp_path / "out" / "fresh" / "report.html").is_file()


def test_other_texts_and_a_reference_model(case: Case, tmp_path: Path) -> None:
    """A control of the user's own whose items vary the benchmark's, the order of the file, and a reference model."""
    rows = [json.loads(line) for line in (case.benchmark.parent / "bench.jsonl").read_text().splitlines()]
    varied = [
        {"question": other["question"], "answer": other["answer"], "seed_question": row["question"]}
        for row, other in zip(rows, problems(NUM_ITEMS, 7), strict=True)
    ]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in varied))
    fresh = tmp_path / "fresh"
    build_tiny_model(fresh, hidden_size=96, intermediate_size=192, num_hidden_layers=2)
    flags = [
        "--controls",
        f"bench/mine={tmp_path / 'mine.jsonl'}",
        "--builtin_controls",
        "none",
        "--order_test",
    ]
    flags += [
        "--reference_model",
        str(fresh),
        "--answers",
        "--max_new_tokens",
        "40",
        "--order_permutations",
        "5",
    ]
    assert main(case.flags(tmp_path / "run", *flags)) == 0
    report, items = read(tmp_path / "run")
    assert {row["method"] for row in report["scores"]} >= {"reference", "loss"}
    [intrusion] = report["intrusions"]
    assert intrusion["num_pairs"] >= 0.9 * NUM_ITEMS
    assert all(item["own_answer_right"] is not None for item in items)
    [order] = report["orders"]
    assert order["num_shards"] == NUM_ITEMS // 8 and 0 < order["p_value"] <= 1
    pairs = {item["item_id"]: item["pair_id"] for item in items if item["set"] == "mine"}
    assert pairs == {str(number): str(number) for number in range(NUM_ITEMS)}


def test_a_plan_needs_no_model(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--plan", "--benchmarks", str(case.benchmark), "--num_control_items", "260"]) == 0
    text = capsys.readouterr().out
    assert "bench-perturbed" in text and "what could be found" in text


# What a user can mend


Spoil = Callable[[Case, Path], list[str]]


def spoil(change: Callable[[Path, Path], Sequence[str]]) -> Spoil:
    """Flags of an audit, of which `change(model, data)` says what else is given; it may change copies of both."""

    def flags(case: Case, folder: Path) -> list[str]:
        import shutil

        shutil.copytree(case.model, folder / "model")
        for name in ("bench.jsonl", "bench.yaml"):
            shutil.copy(case.benchmark.parent / name, folder / name)
        more = change(folder / "model", folder / "bench.jsonl")
        copy = Case(folder / "model", folder / "bench.yaml", [])
        return copy.flags(folder / "run", *more)

    return flags


def no_tokenizer(model: Path, data: Path) -> list[str]:
    for path in model.glob("tokenizer*"):
        path.unlink()
    return []


def no_template(model: Path, data: Path) -> list[str]:
    (model / "chat_template.jinja").unlink()
    return ["--chat_template"]


def missing_field(model: Path, data: Path) -> list[str]:
    data.write_text('{"question": "a", "answer": "#### 1"}\n{"text": "b"}\n')
    return []


def twice(model: Path, data: Path) -> list[str]:
    data.write_text('{"id": 1, "question": "a", "answer": "1"}\n{"id": 1, "question": "b", "answer": "1"}\n')
    return []


def empty(model: Path, data: Path) -> list[str]:
    data.write_text("")
    return []


def no_weights(model: Path, data: Path) -> list[str]:
    (model / "model.safetensors").write_bytes(b"not weights")
    return []


def foreign_folder(model: Path, data: Path) -> list[str]:
    (data.parent / "run").mkdir()
    (data.parent / "run" / "data.json").write_text("{}")
    return []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (no_tokenizer, "no usable tokenizer"),
        (no_template, "chat_template: true, but"),
        (missing_field, 'bench.jsonl, line 2: has no "question"'),
        (twice, "line 2: has the id 1 of"),
        (empty, "the data set is empty"),
        (no_weights, "model_name_or_path"),
        (foreign_folder, "holds other files"),
        (lambda model, data: ["--benchmarks", "math5000"], "did you mean math500?"),
        (lambda model, data: ["--ratios", "1.5"], "ratios"),
        (lambda model, data: ["--controls", "other/x=y"], "other is no benchmark of this audit"),
        (lambda model, data: ["--base", "x"], "base: x, but"),
    ],
)
def test_one_line_says_what_to_mend(
    case: Case,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Path, Path], Sequence[str]],
    message: str,
) -> None:
    assert main(spoil(change)(case, tmp_path)) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hfpar: error: ")]
    assert message in line and len(line) < 400


def test_a_folder_holds_one_audit(
    case: Case, finished: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(case.flags(finished, "--ratios", "0.5")) == 2
    assert "holds an audit of other settings (ratios: None, and now [0.5])" in capsys.readouterr().err
    from filelock import FileLock

    with FileLock(finished / ".lock"):
        assert main(case.flags(finished)) == 2
    assert "is in use by another audit" in capsys.readouterr().err


def test_texts_longer_than_the_context(case: Case, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(case.model, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 60}))
    rows = problems(3, 5)
    rows[1]["question"] *= 3
    (tmp_path / "bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copy(case.benchmark, tmp_path / "bench.yaml")
    copy = Case(tmp_path / "model", tmp_path / "bench.yaml", [])
    assert main(copy.flags(tmp_path / "run", "--builtin_controls", "none", "--generate", "--answers")) == 0
    report, items = read(tmp_path / "run")
    assert [{cut["skipped"] for cut in item["cuts"]} for item in items] == [{None}, {"too_long"}, {None}]
    assert any("longer than the model's context" in warning for warning in report["warnings"])
