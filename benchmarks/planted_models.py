"""Tiny models that are made to have seen a benchmark: what is planted, and how they are trained.

Used by planted_contamination.py, which says what for.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hfpar.audit.perturb import perturb
from hfpar.data.benchmarks import BenchmarkItem

COPIES = (1, 4, 16, 32)
FORMATS = ("verbatim", "question only", "reformatted", "numbers changed")
PLACES = {1: 20, 4: 16, 16: 15, 32: 11}
"""Items of each format with so many copies; 62 or 63 in all."""
BEGIN, PAD = "<s>", "<pad>"


@dataclass(frozen=True)
class Sizes:
    """Of the models and their training: what five minutes of one core can do."""

    hidden_size: int = 256
    num_hidden_layers: int = 4
    vocab_size: int = 2048
    num_texts: int = 1000
    """Of GSM8K, for each model."""
    max_length: int = 192
    """Tokens; longer documents end there."""
    tokens_per_step: int = 256
    learning_rate: float = 1.5e-3


# What is planted


@dataclass(frozen=True)
class Planted:
    """An item and how the model was shown it."""

    item: BenchmarkItem
    copies: int
    format: str


def deal(items: Sequence[BenchmarkItem], seed: int) -> tuple[list[Planted], list[BenchmarkItem]]:
    """Half of the items with their copies and formats, and the other half."""
    shuffled = list(items)
    random.Random(f"half:{seed}").shuffle(shuffled)
    half = len(shuffled) // 2
    weights = [(copies, name) for copies in COPIES for name in FORMATS for _ in range(PLACES[copies])]
    cells = [weights[index * len(weights) // half] for index in range(half)]
    return [
        Planted(item, copies, name) for item, (copies, name) in zip(shuffled[:half], cells, strict=True)
    ], shuffled[half:]


def as_text(planted: Planted, seed: int) -> str:
    """The document that the model reads in place of the item."""
    question = planted.item.question.strip()
    both = f"{question}\n{planted.item.solution}" if planted.item.solution else question
    if planted.format == "question only":
        return question
    if planted.format == "verbatim":
        return both
    if planted.format == "reformatted":
        return "Problem: " + reformat(question)
    rng = random.Random(f"planted:{seed}:{planted.item.item_id}")
    return perturb(question, rng).text


def reformat(text: str) -> str:
    """Other spacing: around signs within formulas, and two spaces between sentences."""

    def formula(found: re.Match[str]) -> str:
        return re.sub(r"(?<=[\w)}])\s*([=+<>-])\s*(?=[\w(\\])", r" \1 ", found[0])

    return re.sub(r"(?<=[.?!]) (?=[A-Z$])", "  ", re.sub(r"\$[^$]*\$", formula, text))


# Models


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Any:
    """A byte-level BPE that has seen no benchmark; documents begin with `<s>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=BEGIN, eos_token=BEGIN, pad_token=PAD, model_max_length=int(1e30)
    )


def make_batches(
    lengths: Sequence[int], places: Sequence[float], tokens_per_step: int, rng: random.Random
) -> list[list[int]]:
    """Documents in order of their places in the run, and of 64 neighbours those of about the same length together.

    Args:
        lengths: in tokens.
        places: from 0 to 1.
        tokens_per_step: of a batch, padding included.
        rng: Shuffles batches among neighbours.
    """
    order = sorted(range(len(lengths)), key=lambda index: places[index])
    found = []
    for begin in range(0, len(order), 64):
        near: list[list[int]] = [[]]
        for index in sorted(order[begin : begin + 64], key=lambda index: lengths[index]):
            if near[-1] and lengths[index] * (len(near[-1]) + 1) > tokens_per_step:
                near.append([])
            near[-1].append(index)
        rng.shuffle(near)
        found += near
    return found


def make_documents(filler: Sequence[str], planted: Sequence[Planted], seed: int) -> list[tuple[float, str]]:
    """Every document with its place in the run: an item's copies are spread evenly over it."""
    rng = random.Random(f"places:{seed}")
    documents = [(rng.random(), text) for text in filler]
    for one in planted:
        text = as_text(one, seed)
        documents += [((number + rng.random()) / one.copies, text) for number in range(one.copies)]
    return documents


def train_model(
    documents: Sequence[tuple[float, str]], tokenizer: Any, sizes: Sizes, seed: int, folder: Path
) -> dict[str, Any]:
    """Train a Llama from scratch, one epoch, and save it with its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    heads = sizes.hidden_size // 32
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=sizes.hidden_size,
            intermediate_size=3 * sizes.hidden_size,
            num_hidden_layers=sizes.num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=4096,
            initializer_range=0.05,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    ids = [one[: sizes.max_length] for one in tokenizer([text for _, text in documents]).input_ids]
    batches = make_batches(
        [len(one) for one in ids],
        [place for place, _ in documents],
        sizes.tokens_per_step,
        random.Random(f"order:{seed}"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=sizes.learning_rate, betas=(0.9, 0.95), fused=True)
    begin, losses = time.process_time(), []
    for step, batch in enumerate(batches):
        done = step / len(batches)
        for group in optimizer.param_groups:
            group["lr"] = (
                sizes.learning_rate
                * min(1.0, 20 * (done + 1e-3))
                * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))
            )
        longest = max(len(ids[index]) for index in batch)
        rows = torch.tensor(
            [ids[index] + [tokenizer.pad_token_id] * (longest - len(ids[index])) for index in batch]
        )
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits  # pads are last: no token sees them
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), rows[:, 1:].flatten(), ignore_index=tokenizer.pad_token_id
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {
        "documents": len(documents),
        "tokens": sum(map(len, ids)),
        "steps": len(batches),
        "last_loss": float(np.mean(losses[-len(losses) // 10 :])),
        "parameters": model.num_parameters(),
        "cpu_seconds": time.process_time() - begin,
    }
