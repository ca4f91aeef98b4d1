"""How YAML files and flags become a config, and what is said when they can't."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hfpar.config.load import dump_config, parse_sft_config
from hfpar.config.schema import DataSource, SFTConfig
from hfpar.errors import ConfigError


def write(folder: Path, text: str, name: str = "run.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_sft_config(list(argv))
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 2
    return message


def test_no_arguments_gives_the_defaults():
    assert parse_sft_config([]) == SFTConfig()


def test_empty_file_gives_the_defaults(tmp_path):
    assert parse_sft_config(["--config", write(tmp_path, "")]) == SFTConfig()
    assert parse_sft_config(["--config", write(tmp_path, "# nothing yet\n")]) == SFTConfig()


def test_later_file_wins_and_flags_win_wherever_they_stand(tmp_path):
    first = write(tmp_path, "seed: 1\nmax_length: 10\nlora_r: 4\n", "first.yaml")
    second = write(tmp_path, "seed: 2\nmax_length: 20\n", "second.yaml")
    config = parse_sft_config(["--seed", "3", f"--config={first}", "--config", second])
    assert config == SFTConfig(seed=3, max_length=20, lora_r=4)


@pytest.mark.parametrize("text", ["2e-5", "2.0e-5", "0.00002", "2E-5", "+2e-05"])
def test_number_in_exponent_form_is_a_number(tmp_path, text):
    for config in (
        parse_sft_config(["--config", write(tmp_path, f"learning_rate: {text}\n")]),
        parse_sft_config(["--learning_rate", text]),
    ):
        assert config.learning_rate == 2e-5
        assert isinstance(config.learning_rate, float)


def test_whole_number_for_a_float_setting_becomes_a_float(tmp_path):
    config = parse_sft_config(["--config", write(tmp_path, "num_train_epochs: 3\n")])
    assert isinstance(config.num_train_epochs, float)


SOURCES = "text or a list of texts or of mappings such as {path: a, weight: 2} or null"
ENTRY = "an entry must be a path or a mapping of path, split, name, weight, format, columns"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--overwrite"], SFTConfig(overwrite=True)),
        (["--resume", "--seed", "1"], SFTConfig(resume=True, seed=1)),
        (["--resume", "false"], SFTConfig()),
        (["--resume", "true", "--resume=false"], SFTConfig()),
        (["--max_steps", "-1"], SFTConfig()),
        (["--dataset", "a.jsonl"], SFTConfig(dataset="a.jsonl")),
        (
            ["--dataset", "a.jsonl", "b.jsonl", "--seed", "1"],
            SFTConfig(dataset=["a.jsonl", "b.jsonl"], seed=1),
        ),
        (["--dataset", "[a.jsonl, b.jsonl]"], SFTConfig(dataset=["a.jsonl", "b.jsonl"])),
        (
            ["--dataset", "[a, {path: b, weight: 2, split: test, format: text, columns: {text: t}}]"],
            SFTConfig(
                dataset=[
                    "a",
                    DataSource(path="b", weight=2.0, split="test", format="text", columns={"text": "t"}),
                ]
            ),
        ),
        (
            ["--dataset_columns", "instruction=q", "output=1"],
            SFTConfig(dataset_columns={"instruction": "q", "output": "1"}),
        ),
        (["--dataset_columns", "{output: a}"], SFTConfig(dataset_columns={"output": "a"})),
        (["--dataset_columns", "null"], SFTConfig()),
        (
            ["--chat_template_kwargs", "enable_thinking=false", "date=today", "n=3"],
            SFTConfig(chat_template_kwargs={"enable_thinking": False, "date": "today", "n": 3}),
        ),
        (
            ["--chat_template_kwargs={a: [1, {b: null}]}"],
            SFTConfig(chat_template_kwargs={"a": [1, {"b": None}]}),
        ),
        (["--lora_r", "8", "--modules_to_save", "lm_head"], SFTConfig(lora_r=8, modules_to_save=["lm_head"])),
        (["--modules_to_save", "null"], SFTConfig()),
        (["--report_to", "wandb", "tensorboard"], SFTConfig(report_to=["wandb", "tensorboard"])),
        (["--run_name", "123"], SFTConfig(run_name="123")),
        (["--run_name=--odd"], SFTConfig(run_name="--odd")),
        (["--max_grad_norm", "0"], SFTConfig(max_grad_norm=0.0)),
        (["--lora_r", "8", "--lora_alpha", "32"], SFTConfig(lora_r=8, lora_alpha=32.0)),
    ],
)
def test_flags(argv, expected):
    assert parse_sft_config(argv) == expected


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--learning_rat", "1"],
            "--learning_rat: 1; there is no such setting; did you mean learning_rate? (--help lists all)",
        ),
        (
            ["--learning-rate=1"],
            "--learning-rate: 1; there is no such setting; did you mean learning_rate? (--help lists all)",
        ),
        (
            ["--lr", "1"],
            "--lr: 1; there is no such setting; did you mean learning_rate? (--help lists all)",
        ),
        (
            ["--dp_size", "2"],
            "--dp_size: 2; there is no such setting; it is what tp_size, sp_size and cp_size leave of num_processes "
            "(--help lists all)",
        ),
        (["--zzz"], "--zzz: (no value); there is no such setting (--help lists all)"),
        (
            ["--max_len", "3"],
            "--max_len: 3; there is no such setting; did you mean max_length? (--help lists all)",
        ),
        (["--learning_rate", "abc"], "--learning_rate: abc; must be a number"),
        (["--learning_rate", "null"], "--learning_rate: null; must be a number"),
        (["--seed", "null"], "--seed: null; must be a whole number"),
        (["--overwrite", "null"], "--overwrite: null; must be true or false"),
        (["--dtype", "null"], "--dtype: null; must be one of float32, bfloat16, float16, auto"),
        (["--learning_rate"], "--learning_rate: needs a value; must be a number"),
        (["--learning_rate", "--seed", "1"], "--learning_rate: needs a value; must be a number"),
        (["--max_length", "1.5"], "--max_length: 1.5; must be a whole number"),
        (["--seed", "true"], "--seed: true; must be a whole number"),
        (["--resume", "maybe"], "--resume: maybe; must be true or false"),
        (["--eval_steps", "often"], "--eval_steps: often; must be a whole number or null"),
        (["--dataset", "[a"], f"--dataset: [a; must be {SOURCES}"),
        (["--dataset", "[{path: 1}]"], "--dataset.path: 1; must be text (in quotes)"),
        (
            ["--dataset_columns", "a"],
            "--dataset_columns: [a]; must be a mapping of texts such as {a: b} or null",
        ),
        (
            ["--chat_template_kwargs", "a=["],
            "--chat_template_kwargs: [; must be a mapping such as {a: 1} or null",
        ),
        (
            ["--chat_template_kwargs", "{a"],
            "--chat_template_kwargs: {a; must be a mapping such as {a: 1} or null",
        ),
        (["train.yaml"], "train.yaml: not a flag; settings are given as --name value"),
        (["--seed", "1", "2"], "2: not a flag; settings are given as --name value"),
        (["-x"], "-x: not a flag; settings are given as --name value"),
        (["--config"], "--config: needs a file, as in --config sft/configs/full.yaml"),
        (["--config="], "--config: needs a file, as in --config sft/configs/full.yaml"),
        (["--config", "--seed", "1"], "--config: needs a file, as in --config sft/configs/full.yaml"),
        (["--config", "no/such.yaml"], "--config no/such.yaml: no such file or directory"),
        (
            ["--lr_scheduler_type", "cosin"],
            "--lr_scheduler_type: cosin; must be one of linear, cosine, cosine_with_restarts, polynomial, "
            "constant, constant_with_warmup, inverse_sqrt; did you mean cosine?",
        ),
    ],
)
def test_bad_flags(argv, message):
    assert refusal(*argv) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "learning_rat: 1\n",
            ", line 1: learning_rat: 1; there is no such setting; did you mean learning_rate?",
        ),
        ("config: x\n", ", line 1: config: x; there is no such setting"),
        ("bf16: true\n", ", line 1: bf16: true; there is no such setting; mixed_precision in the Accelerate"),
        ("3: 4\n", ", line 1: 3: 4; there is no such setting"),
        (
            "seed: 1\n\n# more\nlr_scheduler_type: cosin\n",
            ", line 4: lr_scheduler_type: cosin; must be one of linear,",
        ),
        ("learning_rate: abc\n", ", line 1: learning_rate: abc; must be a number"),
        ("learning_rate: true\n", ", line 1: learning_rate: true; must be a number"),
        ("learning_rate:\n", ", line 1: learning_rate: null; must be a number, or leave the line out"),
        ("seed: 1.0\n", ", line 1: seed: 1.0; must be a whole number"),
        ("max_length: [1]\n", ", line 1: max_length: [1]; must be a whole number"),
        ("run_name: 123\n", ", line 1: run_name: 123; must be text or null (in quotes)"),
        ("run_name: 2026-01-01\n", "; must be text or null (in quotes)"),
        ("dataset: [1]\n", f", line 1: dataset: 1; {ENTRY}"),
        ("dataset: [{pth: a}]\n", f", line 1: dataset: {{pth: a}}; {ENTRY}; did you mean path?"),
        ("dataset: [{weight: 1}]\n", f", line 1: dataset: {{weight: 1}} has no path; {ENTRY}"),
        (
            "dataset: [{path: a, format: x}]\n",
            ", line 1: dataset.format: x; must be one of auto, messages, sharegpt, alpaca, prompt_completion, text "
            "or null",
        ),
        ("dataset: [{path: a, weight: much}]\n", ", line 1: dataset.weight: much; must be a number"),
        (
            "dataset: {path: a}\n",
            ", line 1: dataset: {path: a}; must be text or a list of texts or of mappings such as {path: a, weight: 2} "
            "or null",
        ),
        (
            "dataset_columns: {instruction: 1}\n",
            ", line 1: dataset_columns: {instruction: 1}; must be a mapping of texts such as {a: b} or null",
        ),
        (
            "chat_template_kwargs: [1]\n",
            ", line 1: chat_template_kwargs: [1]; must be a mapping such as {a: 1} or null",
        ),
        ("overwrite: 1\n", ", line 1: overwrite: 1; must be true or false"),
        ("seed: 1\nlora_r: 2\nseed: 1\n", ": seed is set twice, in lines 1 and 3; keep one"),
        ("- seed\n", ", line 1: a list; must be `key: value` lines"),
        ("seed\n", ", line 1: plain text; must be `key: value` lines"),
        ("seed: 1\nlora_r: [1\n", ", line 3: not valid YAML: "),
        ("seed: 1\n  lora_r: 1\n", ", line 2: not valid YAML: mapping values are not allowed here"),
        ("seed: !!python/name:os.system\n", ", line 1: not valid YAML: could not determine a constructor"),
        ("seed: 1\n---\nseed: 2\n", ", line 2: not valid YAML: but found another document"),
        ("run_name: a\x00b\n", ": not valid YAML: "),
    ],
)
def test_bad_files_are_named_with_the_line(tmp_path, text, message):
    path = write(tmp_path, text)
    found = refusal("--config", path)
    assert found.startswith(path)
    assert message in found


def test_unreadable_files(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"run_name: caf\xe9\n")
    assert refusal("--config", f"{tmp_path}/latin.yaml").endswith("latin.yaml: not UTF-8 text (byte 13)")
    assert refusal("--config", str(tmp_path)) == f"--config {tmp_path}: is a directory"


def test_impossible_value_is_refused_from_a_file_too(tmp_path):
    assert refusal("--config", write(tmp_path, "max_steps: 0\n")).startswith("max_steps: 0; must be")


AWKWARD_TEXTS = [
    *("null", "~", "true", "no", "123", "1e3", "2e-5", ".5e3", "1.0", "0x10", "2026-01-01", "=", "<<", "#x"),
    *("[x]", "{a: 1}", "a: b", "- a", "&a", "'q'", '"', "--seed", " led ", "two\nlines\n", "tab\t", "\x07"),
    *("é 東京 🙂", "x" * 5000),
]


def round_trip(config: SFTConfig, folder: Path) -> SFTConfig:
    return parse_sft_config(["--config", write(folder, dump_config(config))])


@pytest.mark.parametrize("text", AWKWARD_TEXTS)
def test_dump_keeps_any_text(tmp_path, text):
    config = SFTConfig(
        lora_r=1, run_name=text, dataset=text, eval_dataset=[text, "b"], modules_to_save=[text]
    )
    assert round_trip(config, tmp_path) == config


@pytest.mark.parametrize("number", [2e-5, 1e-8, 1.0, 0.1 + 0.2, 123456789.125, 1e300, 5e-324, 0.0])
def test_dump_keeps_numbers_to_the_last_bit(tmp_path, number):
    config = SFTConfig(learning_rate=number, weight_decay=number, max_grad_norm=number)
    assert round_trip(config, tmp_path) == config


def test_dump_keeps_every_setting(tmp_path):
    config = SFTConfig(
        model_name_or_path="m",
        trust_remote_code=True,
        dtype="bfloat16",
        attn_implementation="sdpa",
        gradient_checkpointing=True,
        quantization="fp4",
        bnb_4bit_compute_dtype="bfloat16",
        bnb_4bit_use_double_quant=False,
        bnb_4bit_quant_storage="bfloat16",
        llm_int8_skip_modules=["a"],
        dataset=[
            "a",
            DataSource(path="b", split="s", name="n", weight=0.5, format="text", columns={"text": "t"}),
        ],
        eval_dataset="c",
        dataset_format="alpaca",
        dataset_columns={"output": "answer"},
        bad_rows="skip",
        decontaminate_against=["math500", "own.yaml"],
        decontaminate="drop",
        benchmark_files={"math500": "m.jsonl"},
        chat_template="t.jinja",
        chat_template_kwargs={"enable_thinking": False, "nested": {"a": [1, None]}},
        train_on="all",
        earlier_turns="mask",
        on_overflow="truncate",
        dataset_num_proc=3,
        token_cache="cache",
        streaming=True,
        streaming_window=5,
        max_length=7,
        max_tokens_per_batch=70,
        per_device_eval_batch_size=3,
        gradient_accumulation_steps=2,
        sp_size=2,
        tp_size=2,
        tp_sequence=True,
        cp_size=4,
        optim="sgd",
        learning_rate=1e-3,
        lr_scheduler_type="linear",
        warmup_steps=5,
        weight_decay=0.1,
        adam_beta1=0.8,
        adam_beta2=0.95,
        adam_epsilon=1e-6,
        max_grad_norm=0.5,
        num_train_epochs=2.5,
        max_steps=11,
        seed=0,
        lora_r=8,
        lora_alpha=4.0,
        lora_dropout=0.05,
        lora_target_modules=["q_proj"],
        modules_to_save=["lm_head"],
        use_rslora=True,
        init_lora_weights="pissa",
        adapter_dtype="bfloat16",
        train_tokens=["<|im_start|>", "<|im_end|>"],
        output_dir="o",
        overwrite=True,
        logging_steps=2,
        eval_steps=3,
        save_steps=4,
        save_total_limit=5,
        report_to=["wandb"],
        run_name="r",
    )
    assert round_trip(config, tmp_path) == config
    others = {
        "per_device_train_batch_size",
        "warmup_ratio",
        "resume",
        "eval_fraction",
        "use_dora",
        "trainable_token_indices",
    }  # these contradict settings above
    unchanged = {name for name, value in vars(config).items() if value == getattr(SFTConfig(), name)}
    assert unchanged == others
    second = replace(
        SFTConfig(),
        per_device_train_batch_size=4,
        warmup_ratio=0.25,
        resume=True,
        eval_fraction=0.1,
        lora_r=1,
        use_dora=True,
        trainable_token_indices=[3, 5],
    )
    assert round_trip(second, tmp_path) == second
    assert round_trip(SFTConfig(), tmp_path) == SFTConfig()


def test_dump_has_every_setting_on_a_line_of_its_own():
    lines = dump_config(SFTConfig()).splitlines()
    assert [line.split(":")[0] for line in lines] == list(vars(SFTConfig()))


def test_help_lists_every_setting_in_groups_without_torch():
    code = (
        "import sys\n"
        "from hfpar.config.load import parse_sft_config\n"
        "try:\n"
        "    parse_sft_config(['--help'])\n"
        "finally:\n"
        "    assert not {'torch', 'transformers', 'accelerate', 'datasets'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for name in vars(SFTConfig()):
        assert f"--{name} " in done.stdout
    for title in ("Model:", "Data:", "Batches:", "Optimization:", "LoRA:"):
        assert f"\n{title}\n" in done.stdout
    assert "--dataset+" not in done.stdout
    assert "one of linear, cosine" in " ".join(done.stdout.split())


@pytest.mark.parametrize("path", sorted(Path("sft/configs").glob("*.yaml")), ids=str)
def test_shipped_configs_load(path):
    assert parse_sft_config(["--config", str(path)]) != SFTConfig()
