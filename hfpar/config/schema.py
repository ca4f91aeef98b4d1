"""Every setting of a fine-tuning run: its name, type, default and help.

The names are Hugging Face's (`TrainingArguments`, `SFTConfig`, PEFT's `LoraConfig` with the prefix `lora_`).
The text under a field is its `--help`. A field that nothing reads is a lie to the user, so a test refuses it.
"""

from dataclasses import dataclass
from typing import Any, Literal

SchedulerName = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
]
"""Transformers' schedulers that need no arguments of their own."""

OptimizerName = Literal[
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_bnb_8bit",
    "paged_adamw_32bit",
    "paged_adamw_8bit",
    "sgd",
    "adafactor",
]
"""Optimizers by Transformers' names; those of bitsandbytes need the extra `quantization`."""

AttentionName = Literal["auto", "eager", "sdpa", "flash_attention_2", "varlen"]
DtypeName = Literal["float32", "bfloat16", "float16", "auto"]
QuantizationName = Literal["nf4", "fp4", "int8", "mxfp4", "none"]
StorageName = Literal["auto", "uint8", "float32", "bfloat16", "float16"]
InitName = Literal["default", "gaussian", "pissa", "olora", "loftq", "eva"]

FormatName = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text"]
TrainOnName = Literal["assistant", "last_assistant", "completion", "all"]
EarlierTurnsName = Literal["split", "mask", "error"]
OverflowName = Literal["drop", "truncate", "split", "error"]


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """One entry of `dataset`, where a path alone doesn't say enough."""

    path: str
    """File, pattern of files, folder, or hub id."""
    split: str | None = None
    """Of a hub data set or a saved one; `train` by default."""
    name: str | None = None
    """Configuration of a hub data set, where it has several."""
    weight: float = 1.0
    """How many times an epoch passes over it: 0.5 takes half of it, another half in the next epoch."""
    format: FormatName | None = None
    """In place of `dataset_format`."""
    columns: dict[str, str] | None = None
    """In place of `dataset_columns`."""


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """A supervised fine-tuning run, but for the engine, which the Accelerate config file names."""

    model_name_or_path: str | None = None
    """Folder or hub id of the model. Without it: a tiny demo model, built on the spot."""
    trust_remote_code: bool = False
    """Run the Python code that the model's repository brings along."""
    dtype: DtypeName = "float32"
    """Type of the weights as they are loaded; auto keeps the checkpoint's own."""
    attn_implementation: AttentionName = "auto"
    """Kernel for the packed stream's attention; auto takes the best one that this machine has."""
    gradient_checkpointing: bool | None = None
    """Recompute each block's activations in the backward pass instead of keeping them. Without it: true with a
    quantized base, else false."""

    quantization: QuantizationName | None = None
    """How the frozen base is held while adapters are trained: nf4 or fp4 (4 bits, bitsandbytes), int8, mxfp4 (for
    checkpoints that hold it); none for no such thing. Without it: what the checkpoint holds."""
    bnb_4bit_compute_dtype: DtypeName = "auto"
    """Type in which layers with a quantized weight are computed; auto takes the engine's mixed precision, else
    dtype."""
    bnb_4bit_use_double_quant: bool | None = None
    """Quantize the scales of 4-bit blocks, too (0.37 bits a parameter less). Without it: true."""
    bnb_4bit_quant_storage: StorageName = "auto"
    """Type as which an engine sees the packed bytes; auto takes uint8, which none of them converts."""
    llm_int8_skip_modules: list[str] | None = None
    """Modules that stay as they are, in 4 bits as in 8; the head always does."""

    tp_size: int | None = None
    """Tensor parallelism: ranks that share every layer's weights and compute it together. Without it: the Accelerate
    file's parallelism_config, or 1."""
    tp_sequence: bool = False
    """Let tp ranks share the tokens wherever they don't share weights (norms, residuals): less memory for
    activations."""
    sp_size: int | None = None
    """Ulysses: ranks that share a stream's tokens and, inside attention, its heads. Without it: the Accelerate
    file's parallelism_config, or 1."""
    cp_size: int | None = None
    """Ring attention: ranks that share a stream's tokens and pass keys and values round. Together with sp_size
    their product shares a stream. Without it: the Accelerate file's parallelism_config, or 1."""

    dataset: str | list[str | DataSource] | None = None
    """Files, patterns of files, folders or hub ids; or entries with path, split, name, weight, format, columns.
    Without it: the built-in demo data."""
    eval_dataset: str | list[str | DataSource] | None = None
    """Held-out data for eval_loss, of the same kinds as dataset."""
    eval_fraction: float = 0.0
    """Share of the samples of dataset that is held out for eval_loss, drawn by seed."""
    dataset_format: FormatName = "auto"
    """What rows look like; auto tells by their columns."""
    dataset_columns: dict[str, str] | None = None
    """The columns that a format needs, by the names that they have here, such as instruction=question."""
    bad_rows: Literal["error", "skip"] = "error"
    """What a row that can't be used does: end the run with a list of them, or be left out and counted."""
    decontaminate_against: str | list[str] | None = None
    """Benchmarks whose items are looked for in the rows of dataset: math500, gsm8k, gsm8k_train, or YAML files that
    describe others; several with commas."""
    decontaminate: Literal["warn", "drop"] = "warn"
    """What becomes of rows that hold one: they're told of and stay, or are left out and counted."""
    benchmark_files: dict[str, str] | None = None
    """Files to read those benchmarks from instead of the hub, by name: math500=PATH."""
    chat_template: str | None = None
    """chatml, or a Jinja file, in place of the tokenizer's own chat template; saved with the model."""
    chat_template_kwargs: dict[str, Any] | None = None
    """What the chat template is given beside the messages, such as enable_thinking=false."""
    train_on: TrainOnName = "assistant"
    """What is learnt of a conversation; a message's own train or weight wins."""
    earlier_turns: EarlierTurnsName = "split"
    """Where the template renders a turn otherwise once others follow, as when it leaves out earlier thinking:
    split makes a sample of its own of such a turn, mask doesn't train it, error stops."""
    max_length: int = 1024
    """Longest sample, in tokens."""
    on_overflow: OverflowName = "drop"
    """What becomes of longer ones; all are counted."""
    dataset_num_proc: int | None = None
    """Processes that tokenize. Without it: as many as help."""
    token_cache: str | None = None
    """Folder where tokenized data is kept for the next run. Without it: hfpar/tokens in Hugging Face's cache."""
    streaming: bool = False
    """Tokenize while training, a window of rows at a time, and keep nothing; needs max_steps."""
    streaming_window: int = 10_000
    """Rows of a window, in which samples are shuffled and packed."""

    per_device_train_batch_size: int | None = None
    """Samples in a padded micro-batch (8 unless max_tokens_per_batch is set; not both)."""
    max_tokens_per_batch: int | None = None
    """Bin-pack samples into micro-batches of up to this many tokens; at least max_length."""
    per_device_eval_batch_size: int = 8
    """Samples in an evaluation batch; it doesn't change eval_loss."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches in an optimizer step. Without it: the Accelerate file's value, or 1."""

    optim: OptimizerName = "adamw_torch"
    """Optimizer, by Transformers' name."""
    learning_rate: float = 2e-5
    """Highest learning rate, reached after the warm-up."""
    lr_scheduler_type: SchedulerName = "cosine"
    """How the learning rate falls, by Transformers' name."""
    warmup_ratio: float = 0.0
    """Share of all optimizer steps in which the learning rate rises from 0."""
    warmup_steps: int = 0
    """The same as a number of optimizer steps; not together with warmup_ratio."""
    weight_decay: float = 0.0
    """Decoupled weight decay; biases and norms have none."""
    adam_beta1: float = 0.9
    """Decay of Adam's first moment."""
    adam_beta2: float = 0.999
    """Decay of Adam's second moment."""
    adam_epsilon: float = 1e-8
    """What Adam adds to its denominator."""
    max_grad_norm: float | None = None
    """Clip the global gradient norm to this; 0 never clips. Without it: the Accelerate or DeepSpeed file's
    gradient_clipping, or 1.0."""
    num_train_epochs: float = 1.0
    """Passes over the data; may be a fraction."""
    max_steps: int = -1
    """Stop after this many optimizer steps, whatever num_train_epochs says; -1 for no such limit."""
    seed: int = 42
    """Seed of the data order, new weights and dropout."""

    lora_r: int = 0
    """Rank of LoRA adapters; 0 trains all weights."""
    lora_alpha: float = 16
    """LoRA's scale is lora_alpha / lora_r."""
    lora_dropout: float = 0.0
    """Dropout in front of the adapters."""
    lora_target_modules: str | list[str] = "all-linear"
    """Modules that get an adapter: all-linear, or names such as q_proj."""
    modules_to_save: list[str] | None = None
    """Modules trained in full beside the adapters, such as lm_head."""
    use_rslora: bool = False
    """LoRA's scale is lora_alpha / sqrt(lora_r) instead."""
    use_dora: bool = False
    """Train each weight's magnitude beside its direction (DoRA)."""
    init_lora_weights: InitName = "default"
    """First values of the adapters, by PEFT's name; default starts with no change of the model."""
    adapter_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the adapters' weights."""
    trainable_token_indices: list[int] | None = None
    """Tokens whose embedding rows are trained beside the adapters (and the head's rows, where the two are tied)."""
    train_tokens: str | list[str] = "auto"
    """Tokens of the chat template that the model was never taught: auto finds them and trains their rows beside the
    adapters; a list of tokens trains those; none trains none."""

    output_dir: str | None = None
    """Folder of the run. Without it: runs/demo for the demo's model and data, else runs/sft."""
    overwrite: bool = False
    """Delete what output_dir holds and start anew."""
    resume: bool = False
    """Go on from the last whole checkpoint in output_dir."""
    logging_steps: int = 1
    """Optimizer steps between two rows of metrics."""
    eval_steps: int | None = None
    """Optimizer steps between two evaluations. Without it: one at the end."""
    save_steps: int | None = None
    """Optimizer steps between two checkpoints. Without it: one at the end."""
    save_total_limit: int | None = None
    """Keep only this many of the newest checkpoints. Without it: all."""
    report_to: list[str] | str = "none"
    """Trackers, by Accelerate's names: wandb, tensorboard, trackio...; none for none."""
    run_name: str | None = None
    """Name of the run in the trackers."""
