"""`hfpar data check` and `hfpar data show`: what they print, on every format and for bad input."""

import csv
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hfpar import cli

ROOT = Path(__file__).resolve().parents[2]

CHATML = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def chat(question, answer, **more):
    return {"messages": [user(question), assistant(answer, **more)]}


def num_tokens(question, answer):
    """Every byte is a token, and so is every special token."""
    return len(f".user\n{question}.\n.assistant\n{answer}.\n".encode())


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A folder with a config and a tokenizer whose tokens are bytes; no weights, which nobody asks for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: number for number, token in enumerate(special + alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(folder)
    Qwen3Config(vocab_size=len(tokenizer), max_position_embeddings=2048).save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORCE_COLOR", raising=False)


@pytest.fixture
def hfpar_data(capsys):
    """`hfpar_data(*words)`: exit code, stdout, stderr."""

    def run(*words):
        capsys.readouterr()
        code = cli.main(["data", *words])
        return code, *capsys.readouterr()

    return run


def write(name, *rows):
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    Path(name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def unpadded(text):
    """Without the spaces with which tables end."""
    return "\n".join(line.rstrip() for line in text.splitlines())


def write_mixed():
    """Good rows, and bad ones of several kinds."""
    write(
        "mixed.jsonl",
        chat("Hi", "Yo"),
        '{"messages": [',
        chat("Hi", "Yo"),
        chat("Hi", "No <|im_end|>"),
        "",
        {"messages": [user("a"), user("b"), assistant("c")]},
        '["a list"]',
        {"messages": [user("a"), assistant("b"), user("c"), assistant("d", train=False)]},
        chat("q" * 100, "long"),
        chat("x", "y", train=False),
    )


MIXED_REPORT = """\
dataset: mixed.jsonl
  rows        10, of them 4 that can't be used
  formats     messages 7
  roles       user 7, assistant 7
  samples     4, 1 too long, 1 without label
  tokens      123, of them 13 labels (10.6%)
  too long    1 over 100 tokens; on_overflow drop
  max_length  125 for 95 %, 125 for 99 %, 125 for 100 % of the samples

                                      min  1 %  5 %  25 %  50 %  75 %  95 %  99 %  max  mean
 ────────────────────────────────────────────────────────────────────────────────────────────
 tokens of a sample                    25   25   25    25    27    46   125   125  125  49.6
 label tokens of a sample               2    2    2     3     3     5     5     5    5   3.6
 assistant's turns of a conversation    1    1    1     1     1     1     2     2    2   1.2

problems
  1 broken JSON
    mixed.jsonl, line 2: not valid JSON: Expecting value at column 15
  1 empty line
    mixed.jsonl, line 5: the line is empty
  1 two users in a row
    mixed.jsonl, line 6: messages 1 and 2 are both the user's
  1 wrong type
    mixed.jsonl, line 7: a list where an object is needed
notes
  1 special token text
    mixed.jsonl, line 4
  1 too long
    mixed.jsonl, line 9
  1 without label
    mixed.jsonl, line 10
duplicates
  1 rows that say what an earlier row says
    mixed.jsonl, line 3 = mixed.jsonl, line 1
  1 rows that answer an earlier row's prompt otherwise
    mixed.jsonl, line 4 = mixed.jsonl, line 1
batches
  samples  4 an epoch
  packs    2 of 100 tokens, 61.50% full
  batch    1 pack x 1 x 1 ranks
  steps    4 (2 an epoch, num_train_epochs 2)"""


def test_check_reports_everything_that_it_found(hfpar_data, model):
    write_mixed()
    words = ("--model_name_or_path", model, "--max_length", "100", "--max_tokens_per_batch", "100")
    code, out, err = hfpar_data("check", "mixed.jsonl", *words, "--num_train_epochs", "2")
    assert (code, err) == (1, "")
    assert unpadded(out) == MIXED_REPORT


def place(line, file="mixed.jsonl"):
    return {"file": file, "unit": "line", "number": line}


def quantiles(*values):
    """Of so few values that the 1st and 5th percent are the first, and the 95th and 99th the last."""
    values = sorted(values)
    middle = {f"p{share}": values[-(-share * len(values) // 100) - 1] for share in (25, 50, 75)}
    first, last = values[0], values[-1]
    ends = {"min": first, "p1": first, "p5": first, "p95": last, "p99": last, "max": last}
    return {**ends, **middle, "mean": round(sum(values) / len(values), 2)}


def test_json_holds_the_same_figures_and_every_problem(hfpar_data, model):
    write_mixed()
    words = ("--model_name_or_path", model, "--max_length", "100", "--per_device_train_batch_size", "2")
    code, out, err = hfpar_data("check", "mixed.jsonl", "--json", *words, "--dp_size", "2")
    assert (code, err) == (1, "")
    report = json.loads(out)
    # "Hi" and "Yo" are two tokens each, and <|im_end|> is one also where a message says it.
    lengths = [num_tokens("Hi", "Yo"), num_tokens("Hi", "Yo"), num_tokens("Hi", "No .")]
    lengths.append(num_tokens("a", "b") + num_tokens("c", "d"))
    too_long = num_tokens("q" * 100, "long")
    assert [*lengths, too_long] == [25, 25, 27, 46, 125]
    kinds = ["broken JSON", "empty line", "two users in a row", "wrong type"]
    reasons = [
        "not valid JSON: Expecting value at column 15",
        "the line is empty",
        "messages 1 and 2 are both the user's",
        "a list where an object is needed",
    ]
    dataset = report["dataset"]
    assert dataset == {
        "rows": 10,
        "bad_rows": 4,
        "formats": {"messages": 7},
        "conversations": 6,
        "roles": {"user": 7, "assistant": 7},
        "turns_per_conversation": quantiles(1, 1, 1, 2, 1, 1),
        "samples": 4,
        "tokens": sum(lengths),
        "label_tokens": 3 + 3 + 5 + 2,
        "tokens_per_sample": quantiles(*lengths, too_long),
        "label_tokens_per_sample": quantiles(3, 3, 5, 2, 5),
        "overflow": {
            "max_length": 100,
            "on_overflow": "drop",
            "longer": 1,
            "max_length_that_keeps": {"95": 125, "99": 125, "100": 125},
        },
        "notes": {
            "special token text": {"count": 1, "places": [place(4)]},
            "too long": {"count": 1, "places": [place(9)]},
            "without label": {"count": 1, "places": [place(10)]},
        },
        "problems": {
            "kinds": dict.fromkeys(kinds, 1),
            "rows": [
                {"kind": kind, **place(line), "reason": reason}
                for kind, line, reason in zip(kinds, (2, 5, 6, 7), reasons, strict=True)
            ],
        },
        "duplicates": {
            "rows": {"count": 1, "pairs": [{**place(3), "earlier": place(1)}]},
            "prompts_answered_otherwise": {"count": 1, "pairs": [{**place(4), "earlier": place(1)}]},
        },
        "benchmark_items_in_all_rows": [],
        "sources": [
            {
                "path": "mixed.jsonl",
                "weight": 1.0,
                "rows": 10,
                "bad_rows": 4,
                "samples": 4,
                "tokens": 123,
                "label_tokens": 13,
            }
        ],
    }
    batches = report["batches"]
    # Two batches of two, in an order drawn by chance: both short ones may meet, or not.
    assert batches.pop("fill") in [123 / (2 * 25 + 2 * 46), 123 / (2 * 27 + 2 * 46)]
    assert batches == {
        "dp_size": 2,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 2,
        "max_tokens_per_batch": None,
        "num_samples": 4,
        "num_held_out": 0,
        "num_packs": None,
        "steps_per_epoch": 1,
        "num_train_epochs": 1.0,
        "total_steps": 1,
    }
    assert {key: report[key] for key in ("eval_dataset", "rows_in_both", "refusals", "exit_code")} == {
        "eval_dataset": None,
        "rows_in_both": None,
        "refusals": [],
        "exit_code": 1,
    }


def test_terminal_lists_five_places_of_a_kind_and_json_all(hfpar_data):
    write("bad.jsonl", *["{"] * 7)
    code, out, _ = hfpar_data("check", "bad.jsonl")
    assert code == 1
    assert out.splitlines()[3:] == [
        "problems",
        "  7 broken JSON",
        *(
            f"    bad.jsonl, line {line}: not valid JSON: Expecting property name enclosed in double quotes at column 2"
            for line in range(1, 6)
        ),
        "    and 2 more",
        "Without --model_name_or_path there are no tokens, lengths, labels and batches to report.",
    ]
    code, out, _ = hfpar_data("check", "bad.jsonl", "--json")
    problems = json.loads(out)["dataset"]["problems"]
    assert [row["number"] for row in problems["rows"]] == [1, 2, 3, 4, 5, 6, 7]


def test_check_names_benchmark_items_that_all_rows_hold(hfpar_data):
    held = "A glassblower fills eleven crates with bottles, nine to a crate, and drops two of them on the way to town."
    write("bench.jsonl", {"question": held, "answer": "#### 97"})
    write("rows.jsonl", *({"text": f"{held} row {number} of many"} for number in range(40)))
    words = ("--decontaminate_against", "gsm8k", '--benchmark_files={"gsm8k": "bench.jsonl"}')
    code, out, _ = hfpar_data("check", "rows.jsonl", *words)
    assert code == 0
    lines = out.splitlines()
    where = lines.index("  1 benchmark items in what most rows have in common, such as a system prompt")
    assert lines[where - 1 : where + 2 : 2] == ["notes", "    gsm8k 0"]
    report = json.loads(hfpar_data("check", "rows.jsonl", *words, "--json")[1])
    assert report["dataset"]["benchmark_items_in_all_rows"] == ["gsm8k 0"]


def test_without_a_model_it_reports_what_needs_no_tokenizer(hfpar_data):
    write("good.jsonl", chat("Hi", "Yo"), {"text": "Once"})
    code, out, err = hfpar_data("check", "good.jsonl")
    assert (code, err) == (0, "")
    assert (
        unpadded(out)
        == """\
dataset: good.jsonl
  rows     2, of them 0 that can't be used
  formats  messages 1, text 1
  roles    user 1, assistant 1

                                      min  1 %  5 %  25 %  50 %  75 %  95 %  99 %  max  mean
 ────────────────────────────────────────────────────────────────────────────────────────────
 assistant's turns of a conversation    1    1    1     1     1     1     1     1    1   1.0

Without --model_name_or_path there are no tokens, lengths, labels and batches to report."""
    )
    code, out, _ = hfpar_data("check", "good.jsonl", "--json")
    report = json.loads(out)
    keys = ("samples", "tokens", "label_tokens", "tokens_per_sample", "label_tokens_per_sample", "overflow")
    assert [report["dataset"][key] for key in keys] == [None] * 6
    assert (code, report["batches"], report["dataset"]["notes"]) == (0, None, None)


def test_figures_are_those_of_training(hfpar_data, model, tmp_path, monkeypatch):
    from hfpar.config.engine import LaunchDefaults
    from hfpar.config.load import parse_sft_config
    from hfpar.parallel.layout import Layout
    from hfpar.train import data as train_data
    from hfpar.train.data import make_loader, read_data
    from hfpar.train.model import find_model
    from hfpar.train.run import settle

    for name, count in (("a.jsonl", 40), ("b.jsonl", 30)):
        write(name, *(chat("q" * (7 * number % 50 + 1), name * (number % 5 + 1)) for number in range(count)))
    Path("config.yaml").write_text(
        "dataset: [a.jsonl, {path: b.jsonl, weight: 0.5}]\n"
        "eval_fraction: 0.1\non_overflow: split\nmax_length: 60\nmax_tokens_per_batch: 200\n"
        "gradient_accumulation_steps: 2\nnum_train_epochs: 2.5\n"
    )
    words = [
        "--config",
        "config.yaml",
        "--model_name_or_path",
        model,
        "--token_cache",
        str(tmp_path / "cache"),
    ]
    code, out, _ = hfpar_data("check", "--json", *words)
    found = json.loads(out)

    config = settle(parse_sft_config(words), LaunchDefaults())
    layout = Layout(rank=0, world_size=1)
    monkeypatch.setattr(train_data, "on_main", lambda layout, work, **_: work())  # there is no process group
    source = find_model(config)
    data = read_data(config, source, layout)
    loader = make_loader(config, data, layout, pad_token_id=0)
    names = {
        "rows": "num_rows",
        "samples": "num_samples",
        "tokens": "num_tokens",
        "label_tokens": "num_label_tokens",
    }
    for key, name in names.items():
        assert found["dataset"][key] == getattr(data.report, name)
    assert found["dataset"]["notes"]["pieces"]["count"] > 0
    assert {kind: note["count"] > 0 for kind, note in found["dataset"]["notes"].items()} == {
        kind: True for kind in data.report.counts
    }
    assert code == 0
    assert found["batches"]["num_held_out"] == len(data.eval_samples)
    assert found["batches"]["steps_per_epoch"] == loader.num_steps(0)
    assert found["batches"]["total_steps"] == loader.total_steps(2.5)
    packs = loader.plan(0).items
    assert found["batches"]["num_packs"] == packs.num_packs
    num_tokens_of_epoch = int(data.samples.lengths[packs.indices].sum())
    assert found["batches"]["fill"] == num_tokens_of_epoch / (200 * packs.num_packs)
    assert num_tokens_of_epoch < data.samples.lengths.sum()  # the second file's weight is 0.5


def test_held_out_data_is_read_too_and_compared(hfpar_data, model):
    write("train.jsonl", chat("Hi", "Yo"), chat("a", "b"))
    write("eval.jsonl", chat("c", "d"), chat("Hi", "Yo"))
    words = ("--eval_dataset", "eval.jsonl", "--model_name_or_path", model)
    code, out, _ = hfpar_data("check", "train.jsonl", *words)
    assert code == 0
    assert unpadded(out).splitlines()[-8:] == [
        "in both",
        "  1 rows of eval_dataset that dataset has, too",
        "    eval.jsonl, line 2 = train.jsonl, line 1",
        "batches",
        "  samples  2 an epoch",
        "  batch    8 samples x 1 x 1 ranks",
        "  padding  4.0% of padded batches, taken out before the model",
        "  steps    1 (1 an epoch, num_train_epochs 1)",
    ]
    code, out, _ = hfpar_data("check", "train.jsonl", *words, "--json")
    report = json.loads(out)
    pair = {**place(2, "eval.jsonl"), "earlier": place(1, "train.jsonl")}
    assert report["rows_in_both"] == {"count": 1, "pairs": [pair]}
    assert (report["dataset"]["tokens"], report["eval_dataset"]["rows"]) == (48, 2)


def test_a_sample_s_first_token_is_no_label(hfpar_data, model):
    write("text.jsonl", {"text": "Hi"})
    words = ("--model_name_or_path", model, "--train_on", "all", "--json")
    _, out, _ = hfpar_data("check", "text.jsonl", *words)
    dataset = json.loads(out)["dataset"]
    assert (dataset["label_tokens"], dataset["label_tokens_per_sample"]) == (2, quantiles(2))


@pytest.mark.parametrize(
    ("on_overflow", "samples", "notes", "code"),
    [
        ("drop", 1, {"too long": 1}, 0),
        ("truncate", 2, {"truncated": 1}, 0),
        ("split", 4, {"split": 1, "pieces": 3}, 0),
        ("error", 1, {}, 1),
    ],
)
def test_overflow(hfpar_data, model, on_overflow, samples, notes, code):
    # The second has 10 + 11 + 36 + 2 tokens: pieces of 25, 25 and 9.
    write("long.jsonl", chat("Hi", "Yo"), chat("Hi", "a" * 36))
    words = ("--model_name_or_path", model, "--max_length", "25", "--on_overflow", on_overflow, "--json")
    got, out, _ = hfpar_data("check", "long.jsonl", *words)
    dataset = json.loads(out)["dataset"]
    assert dataset["overflow"] == {
        "max_length": 25,
        "on_overflow": on_overflow,
        "longer": 1,
        "max_length_that_keeps": {"95": 59, "99": 59, "100": 59},
    }
    assert (got, dataset["samples"]) == (code, samples)
    assert {kind: note["count"] for kind, note in dataset["notes"].items()} == notes
    if on_overflow == "error":
        assert dataset["problems"]["rows"] == [
            {
                "kind": "too long",
                **place(2, "long.jsonl"),
                "reason": "it has 59 tokens, more than max_length 25",
            }
        ]


@pytest.mark.parametrize(
    ("settings", "code", "refusal"),
    [
        (
            ["--max_length", "4096"],
            2,
            "max_length: a sample of dataset has 3024 tokens, but the model has 2048 positions; set max_length to "
            "2048 or less",
        ),
        (
            ["--dp_size", "3"],
            2,
            "dataset: 1 usable samples for 3 data-parallel ranks; use --dp_size 1 or fewer",
        ),
        (
            ["--max_length", "20"],
            2,
            "dataset: none of the 2 rows can be trained on; 2 are longer than max_length 20, 0 have nothing to learn",
        ),
    ],
)
def test_what_would_stop_training_is_said(hfpar_data, model, settings, code, refusal):
    write("train.jsonl", chat("Hi", "Yo"), chat("q" * 3001, "Yo"))
    got, out, _ = hfpar_data("check", "train.jsonl", "--model_name_or_path", model, *settings)
    assert got == code
    assert out.splitlines()[-1] == f"training would stop: {refusal}"


def test_plot(hfpar_data, model):
    write("train.jsonl", chat("Hi", "Yo"), chat("q" * 500, "Yo"))
    code, _, err = hfpar_data("check", "train.jsonl", "--plot", "lengths.png", "--model_name_or_path", model)
    assert (code, err) == (0, "")
    assert Path("lengths.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert sorted(os.listdir()) == ["lengths.png", "train.jsonl"]


# show

SHOWN = """\
{place}, format {format}: 1 sample
⟦trained⟧
--- sample 1 of 1: 25 tokens, 3 of them trained ---
<|im_start|>user
Hi<|im_end|>
<|im_start|>assistant
⟦Yo<|im_end|>⟧

"""
ROWS = {
    "messages": chat("Hi", "Yo"),
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]},
    "alpaca": {"question": "Hi", "answer": "Yo"},
    "prompt_completion": {"prompt": [user("Hi")], "completion": [assistant("Yo")]},
}
MAPPING = ("--dataset_columns", "instruction=question", "output=answer")


@pytest.mark.parametrize("name", ROWS)
def test_show_every_format(hfpar_data, model, name):
    write("row.jsonl", {"text": "First"}, ROWS[name])
    mapping = MAPPING if name == "alpaca" else ()
    # The mapping holds for every row, so that it alone has its file for itself.
    if mapping:
        write("row.jsonl", {"question": "", "answer": ""}, ROWS[name])
    code, out, err = hfpar_data("show", "row.jsonl", "--index", "1", "--model_name_or_path", model, *mapping)
    assert (code, err) == (0, "")
    assert out == SHOWN.format(place="row.jsonl, line 2 (index 1)", format=name)


@pytest.mark.parametrize(
    ("row", "settings", "head", "text"),
    [
        (
            {"prompt": "Hi", "completion": " Yo"},
            [],
            "prompt_completion: 1 sample\n⟦trained⟧\n--- sample 1 of 1: 6 tokens, 4",
            "Hi⟦ Yo<|im_end|>⟧",
        ),
        # Nothing predicts the first token of a sample.
        ({"text": "Hi"}, [], "text: 1 sample\n⟦trained⟧\n--- sample 1 of 1: 3 tokens, 2", "H⟦i<|im_end|>⟧"),
        (
            {"prompt": "Hi", "completion": " Yo"},
            ["--train_on", "all"],
            "prompt_completion: 1 sample\n⟦trained⟧\n--- sample 1 of 1: 6 tokens, 5",
            "H⟦i Yo<|im_end|>⟧",
        ),
    ],
)
def test_show_plain_text(hfpar_data, model, row, settings, head, text):
    write("row.jsonl", row)
    code, out, _ = hfpar_data("show", "row.jsonl", "--index", "0", "--model_name_or_path", model, *settings)
    assert code == 0
    assert out == f"row.jsonl, line 1 (index 0), format {head} of them trained ---\n{text}\n"


def write_gzip(name, rows):
    with gzip.open(name, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_csv(name, rows):
    with open(name, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(name, rows):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), name)


@pytest.mark.parametrize(
    ("name", "writer", "unit"),
    [
        ("rows.jsonl.gz", write_gzip, "line 2"),
        ("rows.csv", write_csv, None),
        ("rows.parquet", write_parquet, "row 2"),
    ],
)
def test_every_kind_of_file(hfpar_data, model, name, writer, unit):
    writer(name, [{"question": "First", "answer": "One"}, ROWS["alpaca"]])
    words = (*MAPPING, "--model_name_or_path", model)
    code, out, _ = hfpar_data("show", name, "--index", "1", *words)
    where = out.partition(" (")[0]
    assert where == f"{name}, {unit}" if unit else where.startswith(f"{name}, ")
    assert (code, out) == (0, SHOWN.format(place=f"{where} (index 1)", format="alpaca"))
    number = where.rpartition(" ")[2]
    assert hfpar_data("show", name, "--line", number, *words) == (0, out, "")
    code, out, _ = hfpar_data("check", name, "--json", *words)
    dataset = json.loads(out)["dataset"]
    assert (code, dataset["rows"], dataset["formats"], dataset["tokens"]) == (
        0,
        2,
        {"alpaca": 2},
        num_tokens("First", "One") + num_tokens("Hi", "Yo"),
    )


def test_index_counts_over_all_files(hfpar_data, model):
    write("a.jsonl", chat("a", "b"), "{")
    write("b.jsonl", chat("Hi", "Yo"))
    code, out, _ = hfpar_data("show", "--index", "2", "a.jsonl", "b.jsonl", "--model_name_or_path", model)
    assert (code, out) == (0, SHOWN.format(place="b.jsonl, line 1 (index 2)", format="messages"))
    code, out, _ = hfpar_data("check", "a.jsonl", "b.jsonl", "--json")
    sources = json.loads(out)["dataset"]["sources"]
    assert [(source["path"], source["rows"], source["bad_rows"]) for source in sources] == [
        ("a.jsonl", 2, 1),
        ("b.jsonl", 1, 0),
    ]


def test_show_a_bad_row_as_it_is(hfpar_data, model):
    write_mixed()
    shown = [
        hfpar_data("show", "mixed.jsonl", "--line", line, "--model_name_or_path", model)
        for line in ("2", "5", "6", "7")
    ]
    assert shown == [
        (
            1,
            "mixed.jsonl, line 2 (index 1): broken JSON\n"
            'not valid JSON: Expecting value at column 15\n\n{"messages": [\n',
            "",
        ),
        (1, "mixed.jsonl, line 5 (index 4): empty line\nthe line is empty\n", ""),
        (
            1,
            "mixed.jsonl, line 6 (index 5): two users in a row\nmessages 1 and 2 are both the user's\n\n"
            '{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, '
            '{"role": "assistant", "content": "c"}]}\n',
            "",
        ),
        (
            1,
            'mixed.jsonl, line 7 (index 6): wrong type\na list where an object is needed\n\n["a list"]\n',
            "",
        ),
    ]


def test_show_what_is_dropped_with_the_reason(hfpar_data, model):
    write("long.jsonl", chat("Hi", "Yo"), chat("Hi", "Yo", train=False))
    words = ("--model_name_or_path", model)
    sample = SHOWN.partition("⟦trained⟧\n")[2]
    code, out, _ = hfpar_data("show", "long.jsonl", "--index", "0", "--max_length", "20", *words)
    assert (code, out) == (
        0,
        "long.jsonl, line 1 (index 0), format messages: not trained on\ntoo long: 1\n"
        "25 tokens; max_length 20, on_overflow drop\nWithout max_length it would be:\n⟦trained⟧\n" + sample,
    )
    code, out, _ = hfpar_data("show", "long.jsonl", "--index", "1", *words)
    assert (code, out) == (
        0,
        "long.jsonl, line 2 (index 1), format messages: not trained on\nwithout label: 1\n⟦trained⟧\n"
        + sample.replace("3 of", "0 of").replace("⟦", "").replace("⟧", ""),
    )


def test_show_every_sample_of_a_row_that_is_split(hfpar_data, model):
    write("long.jsonl", chat("Hi", "🚂 to Oslo"))
    words = ("--max_length", "24", "--on_overflow", "split", "--model_name_or_path", model)
    code, out, _ = hfpar_data("show", "long.jsonl", "--index", "0", *words)
    assert code == 0
    assert (
        out
        == """\
long.jsonl, line 1 (index 0), format messages: 2 samples
split: 1, pieces: 2
35 tokens; max_length 24, on_overflow split
⟦trained⟧
--- sample 1 of 2: 24 tokens, 3 of them trained ---
<|im_start|>user
Hi<|im_end|>
<|im_start|>assistant
⟦\ufffd⟧
--- sample 2 of 2: 11 tokens, 9 of them trained ---
\ufffd⟦ to Oslo<|im_end|>⟧

"""
    )


def test_ids(hfpar_data, model):
    write("row.jsonl", {"prompt": "é", "completion": "x"})
    code, out, _ = hfpar_data("show", "row.jsonl", "--index", "0", "--ids", "--model_name_or_path", model)
    assert (code, unpadded(out)) == (
        0,
        """\
row.jsonl, line 1 (index 0), format prompt_completion: 1 sample
⟦trained⟧
--- sample 1 of 1: 4 tokens, 2 of them trained ---
é⟦x<|im_end|>⟧

 position   id  token       label
 ─────────────────────────────────
        0  129  Ã            -100
        1  104  ©            -100
        2   89  'x'            89
        3    1  <|im_end|>      1
""",
    )


# Settings


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check"], "dataset: missing; name the files to look at"),
        (["check", "nope.jsonl"], "dataset: nope.jsonl: no such file"),
        (["check", "row.jsonl", "--dataset", "b.jsonl"], "dataset: given twice"),
        (["check", "row.jsonl", "--dp_size", "0"], "--dp_size: 0; must be a whole number of at least 1"),
        (["check", "row.jsonl", "--plot", "x.png"], "--plot: draws lengths in tokens; name a tokenizer"),
        (["check", "row.jsonl", "--plot", "no/x.png"], "--plot: no is no folder"),
        (["check", "row.jsonl", "--json=x"], "--json: takes no value, not x"),
        (
            ["check", "row.jsonl", "--max_lenght", "3"],
            "--max_lenght: 3; there is no such setting; did",
        ),
        (["show", "row.jsonl", "--index", "0"], "model_name_or_path: missing"),
        (["show", "row.jsonl"], "--index: say which row is shown, with either --index N or --line N"),
        (["show", "row.jsonl", "--index", "0", "--line", "1"], "--index: say which row is shown"),
        (["show", "row.jsonl", "--index", "x"], "--index: x; must be a whole number of at least 0"),
        (["show", "row.jsonl", "--index"], "--index: needs a value"),
        (
            ["show", "row.jsonl", "--index", "1", "--model_name_or_path", "m"],
            "--index: 1; the data has 1 rows, 0 to 0",
        ),
        (
            ["show", "row.jsonl", "--line", "9", "--model_name_or_path", "m"],
            "--line: 9; the data has lines 1 to 1",
        ),
        (
            ["show", "row.jsonl", "row.jsonl", "--line", "1", "--model_name_or_path", "m"],
            "--line: 1 of which of the 2 files? name one, or use --index",
        ),
        (["shwo", "row.jsonl"], "data: shwo; there are check, show, decontaminate; did you mean show?"),
    ],
)
def test_mistakes_end_with_one_line(hfpar_data, words, message):
    write("row.jsonl", chat("Hi", "Yo"))
    code, out, err = hfpar_data(*words)
    assert (code, out) == (2, "")
    assert err.startswith(f"hfpar: error: {message}")
    assert err.count("\n") == 1


def test_help(hfpar_data):
    for words, flags in (
        (["--help"], ["check", "show"]),
        (["check", "--help"], ["--json", "--plot FILE.png", "--dp_size N", "--help_settings"]),
        (["show", "-h"], ["--index N", "--line N", "--ids", "--help_settings"]),
    ):
        code, out, err = hfpar_data(*words)
        assert (code, err) == (0, "")
        assert [flag for flag in flags if f"\n  {flag} " not in out and flag not in out] == []
    assert hfpar_data()[0] == 2
    with pytest.raises(SystemExit) as ended:
        hfpar_data("check", "--help_settings")
    assert ended.value.code == 0


# As a program


def program(*words, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    return subprocess.run(
        [sys.executable, "-m", "hfpar.cli", "data", *words],
        env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_check_as_a_program_in_two_processes(hfpar_data, model):
    write_mixed()
    words = ("check", "mixed.jsonl", "--json", "--model_name_or_path", model, "--max_length", "100")
    done = program(*words, "--dataset_num_proc", "2")
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(done.stdout) == json.loads(hfpar_data(*words)[1])


def test_show_as_a_program_with_colours(model):
    write("row.jsonl", chat("Hi", "Yo"))
    words = ("show", "row.jsonl", "--index", "0", "--model_name_or_path", model)
    done = program(*words, FORCE_COLOR="1", COLORTERM="truecolor", TERM="xterm-256color", COLUMNS="80")
    assert (done.returncode, done.stderr) == (0, "")
    white, blue, green = "38;2;255;255;255", "38;2;155;231;245", "48;2;23;99;58"
    assert done.stdout.splitlines()[-3:] == [
        "\x1b[38;2;31;138;158m<|im_start|>\x1b[0massistant",
        f"\x1b[{white};{green}mYo\x1b[0m\x1b[{blue};{green}m<|im_end|>\x1b[0m",
        "",
    ]
