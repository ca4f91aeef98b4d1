"""Greedy continuations with a KV cache, several at once, each ending as soon as it is known what it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from hfpar.parallel.sequence import unwrap_peft

IsDone = Callable[[int, list[int]], bool]
"""Given which prompt and its new tokens so far: whether no more are wanted."""


class _Stop(StoppingCriteria):
    def __init__(self, numbers: Sequence[int], prompt_length: int, is_done: IsDone) -> None:
        self.numbers = numbers
        self.prompt_length = prompt_length
        self.is_done = is_done
        self.done = [False] * len(numbers)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        for row, tokens in enumerate(input_ids[:, self.prompt_length :].tolist()):
            self.done[row] = self.done[row] or self.is_done(self.numbers[row], tokens)
        return torch.tensor(self.done, device=input_ids.device)


class Generator:
    """A model that writes."""

    def __init__(self, model: Any, pad_token_id: int, eos_token_ids: Sequence[int]) -> None:
        """Take a causal language model, or a PEFT model around one.

        Args:
            model: its own generation settings (penalties, sampling) are left aside: the probe is greedy.
            pad_token_id: any token.
            eos_token_ids: after which nothing follows.
        """
        self.model = unwrap_peft(model)
        self.model.generation_config = GenerationConfig()  # `generate` fills what it isn't told from here
        self.pad_token_id = pad_token_id
        self.eos_token_ids = list(eos_token_ids)
        self.device = next(self.model.parameters()).device
        self.max_length = context_length(self.model.config)

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
        is_done: IsDone,
        *,
        tokens_per_batch: int,
    ) -> list[list[int]]:
        """Continue each prompt.

        Args:
            prompts: token numbers.
            max_new_tokens: most new tokens, by prompt.
            is_done: ends a continuation early.
            tokens_per_batch: prompts and new tokens of a batch; a longer one stands alone.

        Returns:
            The new tokens of each, at most `max_new_tokens` and as many as the model's context has places for, without
            end-of-text tokens.
        """
        most = [
            self._fitting(len(prompt), most) for prompt, most in zip(prompts, max_new_tokens, strict=True)
        ]
        open_ones = [number for number in range(len(prompts)) if most[number] > 0]
        lengths = [len(prompts[number]) + most[number] for number in open_ones]
        written: list[list[int]] = [[] for _ in prompts]
        for group in group_alike(lengths, tokens_per_batch):
            numbers = [open_ones[index] for index in group]
            for some in self._apart(numbers, prompts, most):
                for number, tokens in zip(some, self._batch(prompts, some, most, is_done), strict=True):
                    written[number] = tokens
        return written

    def _fitting(self, prompt_length: int, most: int) -> int:
        return most if self.max_length is None else max(0, min(most, self.max_length - prompt_length))

    def _apart(
        self, numbers: list[int], prompts: Sequence[Sequence[int]], most: Sequence[int]
    ) -> list[list[int]]:
        """Each alone where they'd run out of the model's context together: a row that has ended is carried on."""
        longest = max(len(prompts[number]) for number in numbers) + max(most[number] for number in numbers)
        if self.max_length is None or longest <= self.max_length:
            return [numbers]
        return [[number] for number in numbers]

    @torch.inference_mode()
    def _batch(
        self,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        max_new_tokens: Sequence[int],
        is_done: IsDone,
    ) -> list[list[int]]:
        longest = max(len(prompts[number]) for number in numbers)
        ids = torch.full((len(numbers), longest), self.pad_token_id, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, number in enumerate(numbers):  # padding on the left: all continue at the same place
            ids[row, longest - len(prompts[number]) :] = torch.tensor(prompts[number])
            mask[row, longest - len(prompts[number]) :] = 1
        most = max(max_new_tokens[number] for number in numbers)
        stop = _Stop(
            numbers,
            longest,
            lambda number, tokens: len(tokens) >= max_new_tokens[number] or is_done(number, tokens),
        )
        output = self.model.generate(
            input_ids=ids.to(self.device),
            attention_mask=mask.to(self.device),
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=most,
                pad_token_id=self.pad_token_id,
                eos_token_id=self.eos_token_ids or None,
            ),
            stopping_criteria=StoppingCriteriaList([stop]),
        )
        rows = output[:, longest:].tolist()
        return [self._cut(row, max_new_tokens[number]) for row, number in zip(rows, numbers, strict=True)]

    def _cut(self, tokens: list[int], most: int) -> list[int]:
        kept = tokens[:most]
        ends = [position for position, token in enumerate(kept) if token in self.eos_token_ids]
        return kept[: ends[0]] if ends else kept


def context_length(config: Any) -> int | None:
    """Most tokens that a model can read; None: its config doesn't say."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit and limit > 0 else None


def group_alike(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Batches of sequences of about the same length, so that little of a batch is padding.

    Args:
        lengths: tokens of each.
        budget: most tokens of a batch, padding included; a longer sequence stands alone.

    Returns:
        Their numbers, the longest first.
    """
    groups: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= budget:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups
