"""Every setting of a fine-tuning run: its name, type, default and help.

The names are Hugging Face's (`TrainingArguments`, `SFTConfig`, PEFT's `LoraConfig` with the prefix `lora_`).
The text under a field is its `--help`. A field that nothing reads is a lie to the user, so a test refuses it.
"""

from dataclasses import dataclass
from typing import Literal

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
    gradient_checkpointing: bool = False
    """Recompute each block's activations in the backward pass instead of keeping them."""

    dataset: str | list[str] | None = None
    """JSONL, JSON, CSV or parquet file(s), or a hub id. Without it: the built-in demo data."""
    eval_dataset: str | list[str] | None = None
    """Held-out data for eval_loss, of the same kinds as dataset."""
    chat_template: str | None = None
    """Jinja file to use in place of the tokenizer's own chat template."""
    max_length: int = 1024
    """Longest sample, in tokens; longer ones are dropped and counted."""

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
