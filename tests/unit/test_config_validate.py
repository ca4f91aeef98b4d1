"""Impossible values and contradictions, each refused in one line that says what is allowed."""

import math

import pytest

from hfpar.config.schema import DataSource, SFTConfig
from hfpar.config.validate import TRACKERS, validate
from hfpar.errors import ConfigError

FLOATS = [name for name, value in vars(SFTConfig(max_grad_norm=1.0)).items() if isinstance(value, float)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lora_r": 8, "lora_alpha": 32.0},
        {"lora_r": 8, "modules_to_save": ["lm_head"]},
        {"lora_r": 8, "use_dora": True, "use_rslora": True, "init_lora_weights": "pissa"},
        {"lora_r": 8, "init_lora_weights": "loftq", "quantization": "nf4"},
        {
            "lora_r": 8,
            "trainable_token_indices": [0, 7],
            "train_tokens": ["<a>"],
            "adapter_dtype": "bfloat16",
        },
        {"lora_r": 8, "train_tokens": "none", "tp_size": 2},
        {"sp_size": 3, "cp_size": 2},
        {"max_steps": 1},
        {"max_steps": -1},
        {"warmup_ratio": 1.0},
        {"warmup_steps": 10},
        {"learning_rate": 0.0},
        {"max_grad_norm": 0.0},
        {"num_train_epochs": 0.5},
        {"max_length": 2},
        {"max_length": 64, "max_tokens_per_batch": 64},
        {"eval_steps": 5},
        {"eval_steps": 5, "dataset": "a", "eval_dataset": "b"},
        {"eval_steps": 5, "dataset": "a", "eval_fraction": 0.1},
        {"streaming": True, "max_steps": 5, "dataset": "a", "eval_dataset": "b"},
        {"dataset": ["a", DataSource(path="b", weight=0.5)]},
        {
            "decontaminate_against": "math500,gsm8k",
            "decontaminate": "drop",
            "benchmark_files": {"gsm8k": "g"},
        },
        {"report_to": ["wandb", "tensorboard"]},
        {"seed": 2**32 - 1},
        {"adam_beta1": 0.0},
    ],
)
def test_possible_settings_pass(settings):
    validate(SFTConfig(**settings))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", FLOATS)
def test_no_number_may_be_nan_or_infinite(name, number):
    with pytest.raises(ConfigError, match=rf"^{name}: -?(nan|inf); must be a finite number$"):
        validate(SFTConfig(**{name: number}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_steps": 0}, "max_steps: 0; must be at least 1, or -1 for no limit"),
        ({"max_steps": -2}, "max_steps: -2; must be at least 1, or -1 for no limit"),
        ({"num_train_epochs": -1.0}, "num_train_epochs: -1.0; must be above 0"),
        ({"num_train_epochs": 0.0}, "num_train_epochs: 0.0; must be above 0"),
        (
            {"max_length": 1},
            "max_length: 1; must be at least 2: the first token of a sample is never a target",
        ),
        *(
            ({name: value}, f"{name}: {value}; must be a whole number of at least 1")
            for value in (0, -3)
            for name in (
                "per_device_train_batch_size",
                "max_tokens_per_batch",
                "per_device_eval_batch_size",
                "gradient_accumulation_steps",
                "sp_size",
                "cp_size",
                "logging_steps",
                "eval_steps",
                "save_steps",
                "save_total_limit",
            )
        ),
        ({"learning_rate": -1e-3}, "learning_rate: -0.001; must be 0 or more"),
        ({"weight_decay": -0.5}, "weight_decay: -0.5; must be 0 or more"),
        ({"max_grad_norm": -1.0}, "max_grad_norm: -1.0; must be 0 or more"),
        ({"seed": -1}, "seed: -1; must be 0 or more"),
        ({"seed": 2**32}, "seed: 4294967296; must be below 2**32"),
        (
            {"quantization": "nf4"},
            "quantization: nf4 without lora_r; a quantized base can't be trained itself: set lora_r, such as 16, or "
            "leave quantization out",
        ),
        (
            {"quantization": "int8", "lora_r": 8, "bnb_4bit_use_double_quant": False},
            "bnb_4bit_use_double_quant: false is of nf4 and fp4, not of quantization: int8; leave it out",
        ),
        ({"lora_r": -1}, "lora_r: -1; must be 0 or more"),
        ({"lora_alpha": 0.0}, "lora_alpha: 0.0; must be above 0"),
        ({"lora_dropout": 1.0}, "lora_dropout: 1.0; must be at least 0 and below 1"),
        ({"adam_beta1": 1.0}, "adam_beta1: 1.0; must be at least 0 and below 1"),
        ({"adam_beta2": -0.1}, "adam_beta2: -0.1; must be at least 0 and below 1"),
        ({"adam_epsilon": 0.0}, "adam_epsilon: 0.0; must be above 0"),
        ({"warmup_ratio": 1.5}, "warmup_ratio: 1.5; must be from 0 to 1"),
        ({"warmup_ratio": -0.1}, "warmup_ratio: -0.1; must be from 0 to 1"),
        ({"warmup_steps": -1}, "warmup_steps: -1; must be 0 or more"),
        (
            {"warmup_ratio": 0.1, "warmup_steps": 5},
            "warmup_ratio: 0.1 contradicts warmup_steps: 5; keep one",
        ),
        (
            {"per_device_train_batch_size": 4, "max_tokens_per_batch": 4096},
            "per_device_train_batch_size: 4 contradicts max_tokens_per_batch: 4096; "
            "the first pads, the second packs: keep one",
        ),
        (
            {"max_tokens_per_batch": 512},
            "max_tokens_per_batch: 512 is below max_length: 1024, so that a long sample would not fit; "
            "raise the first or lower the second",
        ),
        (
            {"overwrite": True, "resume": True},
            "overwrite: true contradicts resume: true; overwrite starts anew, resume goes on",
        ),
        (
            {"dataset": "a", "eval_steps": 5},
            "eval_steps: 5 has nothing to evaluate; set eval_dataset or eval_fraction too",
        ),
        (
            {"eval_fraction": 0.1, "eval_dataset": "b"},
            "eval_fraction: 0.1 contradicts eval_dataset: b; keep one",
        ),
        ({"eval_fraction": 1.0}, "eval_fraction: 1.0; must be at least 0 and below 1"),
        (
            {"decontaminate": "drop"},
            "decontaminate: drop without decontaminate_against; name the benchmarks with it, or leave "
            "decontaminate out",
        ),
        (
            {"benchmark_files": {"gsm8k": "g.jsonl"}},
            "benchmark_files: {gsm8k: g.jsonl} without decontaminate_against; name the benchmarks with it, or leave "
            "benchmark_files out",
        ),
        (
            {"decontaminate_against": " "},
            "decontaminate_against: ' ' is empty; give a value, or leave decontaminate_against out",
        ),
        ({"streaming": True}, "streaming: true, so that nobody knows the number of steps; set max_steps"),
        (
            {"streaming": True, "max_steps": 1, "eval_fraction": 0.1},
            "streaming: true with eval_fraction: 0.1; use eval_dataset instead",
        ),
        (
            {"dataset": [DataSource(path="a", weight=0.0)]},
            "dataset: a has weight 0.0; must be above 0",
        ),
        (
            {"dataset": [DataSource(path="a", weight=math.inf)]},
            "dataset: a has weight inf; must be above 0",
        ),
        (
            {"eval_dataset": [DataSource(path="a", weight=2.0)]},
            "eval_dataset: a has weight 2.0; held-out data has none",
        ),
        ({"dataset": [DataSource(path="")]}, "dataset: [''] is empty; give a value, or leave dataset out"),
        ({"dataset_columns": {}}, "dataset_columns: {} is empty; give a value, or leave dataset_columns out"),
        (
            {"chat_template_kwargs": {"tokenize": True}},
            "chat_template_kwargs: tokenize isn't a template's to be told; leave it out",
        ),
        ({"dataset": ""}, "dataset: '' is empty; give a value, or leave dataset out"),
        ({"dataset": []}, "dataset: [] is empty; give a value, or leave dataset out"),
        ({"dataset": ["a", " "]}, "dataset: [a, ' '] is empty; give a value, or leave dataset out"),
        ({"output_dir": ""}, "output_dir: '' is empty; give a value, or leave output_dir out"),
        (
            {"lora_r": 8, "trainable_token_indices": []},
            "trainable_token_indices: [] is empty; give a value, or leave trainable_token_indices out",
        ),
        (
            {"lora_r": 8, "train_tokens": ""},
            "train_tokens: '' is empty; give a value, or leave train_tokens out",
        ),
        (
            {"lora_r": 8, "trainable_token_indices": [3, -1]},
            "trainable_token_indices: [3, -1]; must be token numbers of 0 or more",
        ),
        (
            {"lora_r": 8, "trainable_token_indices": [3], "tp_size": 2},
            "trainable_token_indices: [3] with tp_size: 2, whose ranks share the rows; leave tp_size at 1",
        ),
        ({"lora_r": 8, "train_tokens": ["a", "auto"]}, "train_tokens: [a, auto]; auto stands alone"),
        *(
            (
                {name: value},
                f"{name}: {shown} without lora_r, so that all weights would be trained; set lora_r, or leave {name} "
                "out",
            )
            for name, value, shown in (
                ("use_rslora", True, "true"),
                ("use_dora", True, "true"),
                ("init_lora_weights", "olora", "olora"),
                ("adapter_dtype", "float16", "float16"),
                ("trainable_token_indices", [1], "[1]"),
                ("train_tokens", "none", "none"),
            )
        ),
        (
            {"lora_r": 8, "init_lora_weights": "eva"},
            "init_lora_weights: eva begins from what layers compute on the data, for which no engine holds the model "
            "before training; use pissa or olora, which begin from the weights, or default",
        ),
        *(
            (
                {"lora_r": 8, "init_lora_weights": "loftq", "quantization": method},
                f"init_lora_weights: loftq begins with what 4 bits lose of each weight, and quantization is {shown}; "
                "set quantization: nf4, or use default",
            )
            for method, shown in ((None, "none"), ("int8", "int8"))
        ),
        (
            {"lora_r": 8, "use_dora": True, "tp_size": 2},
            "use_dora: true with tp_size: 2, but it takes norms of whole rows, which no rank has; use plain LoRA, or "
            "leave tp_size at 1",
        ),
        ({"modules_to_save": []}, "modules_to_save: [] is empty; give a value, or leave modules_to_save out"),
        (
            {"lora_target_modules": ["all-linear", "q_proj"]},
            "lora_target_modules: [all-linear, q_proj]; all-linear stands alone, and includes the others",
        ),
        (
            {"lora_alpha": 32.0},
            "lora_alpha: 32.0 without lora_r, so that all weights would be trained; set lora_r, or leave "
            "lora_alpha out",
        ),
        (
            {"modules_to_save": ["lm_head"]},
            "modules_to_save: [lm_head] without lora_r, so that all weights would be trained; set lora_r, or "
            "leave modules_to_save out",
        ),
        (
            {"report_to": "wandbb"},
            f"report_to: wandbb; must be of {', '.join(TRACKERS)}; did you mean wandb?",
        ),
        ({"report_to": ["none", "wandb"]}, "report_to: [none, wandb]; none stands alone"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ConfigError) as caught:
        validate(SFTConfig(**settings))
    assert str(caught.value) == message


def test_trackers_are_accelerates():
    from accelerate.utils import LoggerType

    assert set(TRACKERS) == {str(tracker.value) for tracker in LoggerType} | {"none"}
