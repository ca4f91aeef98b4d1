"""One rank of a contestant of `train_throughput.py`: Transformers' Trainer on padded batches, or TRL with packing.

Both get what makes them fast on a CPU: SDPA, no gradient checkpointing, fp32 (bf16, TRL's default, is slower on CPUs
without its instructions), their default AdamW (fused), no saving and no tracking.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import torch
import transformers


class Recorder(transformers.TrainerCallback):
    """Counts real tokens and notes when each step ends."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.step_ends: list[float] = []
        self.pending = 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.step_ends.append(time.perf_counter())
        self.tokens.append(self.pending)
        self.pending = 0

    def count(self, inputs: dict[str, Any]) -> None:
        mask = inputs.get("attention_mask")
        self.pending += int(inputs["input_ids"].numel() if mask is None else mask.sum())

    def write(self, path: Path) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        record = {"tokens": self.tokens, "step_ends": self.step_ends, "peak_memory_bytes": peak}
        path.write_text(json.dumps(record))


def shared_settings(args: argparse.Namespace) -> dict[str, Any]:
    settings = {
        "output_dir": str(args.output / "trainer"),
        "max_steps": args.steps,
        "learning_rate": 2e-5,
        "lr_scheduler_type": "cosine",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": bool(args.qlora),
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 42,
    }
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        settings |= {"ddp_backend": "gloo", "ddp_find_unused_parameters": False}
    return settings


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def make_padded(args: argparse.Namespace, recorder: Recorder) -> transformers.Trainer:
    from hfpar.data.build import Recipe, encode_rows
    from hfpar.data.chat.encode import EncodeOptions

    class CountingTrainer(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, *rest: Any, **options: Any) -> torch.Tensor:
            recorder.count(inputs)
            return super().training_step(model, inputs, *rest, **options)

    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    recipe = Recipe("messages", None, EncodeOptions(max_length=args.max_tokens))
    samples = encode_rows(read_rows(args.data), tokenizer, recipe)
    return CountingTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(
            args.model, dtype=torch.float32, attn_implementation="sdpa"
        ),
        args=transformers.TrainingArguments(
            per_device_train_batch_size=args.batch_size, **shared_settings(args)
        ),
        train_dataset=[{"input_ids": s.input_ids, "labels": s.labels} for s in samples],
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer),
        callbacks=[recorder],
    )


def make_trl(args: argparse.Namespace, recorder: Recorder) -> transformers.Trainer:
    import datasets
    import trl

    class CountingTrainer(trl.SFTTrainer):
        def training_step(self, model: Any, inputs: Any, *rest: Any, **options: Any) -> torch.Tensor:
            recorder.count(inputs)
            return super().training_step(model, inputs, *rest, **options)

    qlora: dict[str, Any] = {}
    model_options: dict[str, Any] = {"dtype": "float32", "attn_implementation": "sdpa"}
    if args.qlora:
        import peft

        model_options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
        model_options["device_map"] = {"": "cpu"}
        qlora["peft_config"] = peft.LoraConfig(
            task_type="CAUSAL_LM", r=16, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear"
        )
    messages = [row["messages"] for row in read_rows(args.data)]
    return CountingTrainer(
        model=str(args.model),
        args=trl.SFTConfig(
            per_device_train_batch_size=1,
            max_length=args.max_tokens,
            packing=True,
            model_init_kwargs=model_options,
            **shared_settings(args),
        ),
        # The same labels as the others': the answer alone.
        train_dataset=datasets.Dataset.from_dict(
            {"prompt": [row[:-1] for row in messages], "completion": [row[-1:] for row in messages]}
        ),
        callbacks=[recorder],
        **qlora,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", choices=["padded", "trl"], required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--max_tokens", type=int, required=True)
    parser.add_argument("--batch_size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--qlora", type=int, default=0)
    args = parser.parse_args()
    recorder = Recorder()
    trainer = (make_padded if args.peer == "padded" else make_trl)(args, recorder)
    trainer.train()
    recorder.write(args.output / f"rank_{os.environ.get('RANK', '0')}.json")


if __name__ == "__main__":
    main()
