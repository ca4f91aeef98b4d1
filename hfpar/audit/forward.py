"""One teacher-forced pass over a text: at each place, the model's first choice and the log-probability of the truth.

A greedy continuation equals a text's tail if and only if, at every place of the tail, the first choice given the true
text before it is the true token. So this one pass decides exact completion from every cut at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hfpar.attention import interface
from hfpar.data.stream import Sample, TokenStream, build_stream
from hfpar.errors import ConfigError
from hfpar.parallel.sequence import unwrap_peft
from hfpar.train.loss import CHUNK_ELEMENTS, LogitTransform, decoder_and_head

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

_CPU_STREAM_TOKENS = 1024
"""Read at once on a CPU: larger activations leave its caches, and are given back to the system and asked for anew."""
_CACHE_ELEMENTS = 1 << 20
"""Logits whose statistics are taken at once: what a CPU's caches hold."""
_LEAST_GAP = 1e-12


@dataclass(frozen=True, eq=False)
class TokenScores:
    """What the model thinks of each token of a text, `(T,)` each; the first token has no prediction."""

    best: Integers
    """The model's first choice; -1 at the first token."""
    logprob: Floats
    """Of the true token, in nats; NaN at the first."""
    gap: Floats
    """How far the true token's logit is below the best: 0 where it is the first choice, and above 0 where another is,
    even one whose logit is the same, as happens with 16 bits."""
    margin: Floats
    """How far the second best logit is below the best."""
    mean: Floats
    """Of all words' log-probabilities, as the model expects them: minus the entropy."""
    std: Floats
    """Their standard deviation, in the same sense."""

    @property
    def hits(self) -> npt.NDArray[np.bool_]:
        """Where the true token is the first choice."""
        return (self.gap == 0) & (self.best >= 0)


class Forward:
    """A model that reads texts."""

    def __init__(self, model: Any, *, packs: bool) -> None:
        """Take a causal language model, or a PEFT model around one.

        Args:
            model: with hfpar's attention if `packs`.
            packs: whether several texts may share a stream; else each is read alone, by the model's own forward pass,
                because what it does between its decoder and its logits hasn't been checked.
        """
        self.causal_lm = unwrap_peft(model)
        self.packs = packs
        if packs:
            self.decoder, self.head = decoder_and_head(self.causal_lm)
            self.transform = LogitTransform.of(self.causal_lm.config.get_text_config())
        self.device = next(self.causal_lm.parameters()).device

    @torch.inference_mode()
    def __call__(self, texts: Sequence[Sequence[int]]) -> list[TokenScores]:
        """Read several texts, packed into streams if the model packs.

        Args:
            texts: token numbers of each, none empty.

        Raises:
            ConfigError: the model gives no numbers, as weights do that overflow in 16 bits.
        """
        scores = self._read(texts)
        if any(not np.isfinite(one.logprob[1:]).all() for one in scores):
            dtype = str(self.causal_lm.dtype).removeprefix("torch.")
            raise ConfigError(
                f"dtype: {dtype}; the model's log-probabilities are no finite numbers: its weights are damaged, or "
                "need another dtype, such as float32"
            )
        return scores

    def _read(self, texts: Sequence[Sequence[int]]) -> list[TokenScores]:
        if not self.packs:
            return [self._read_alone(text) for text in texts]
        most = _CPU_STREAM_TOKENS if self.device.type == "cpu" else None
        groups = groups_of([len(text) for text in texts], most)
        return [one for group in groups for one in self._read_stream([texts[index] for index in group])]

    def _read_stream(self, texts: Sequence[Sequence[int]]) -> list[TokenScores]:
        stream = build_stream([Sample(list(text), list(text)) for text in texts])
        on_device = stream.to(self.device)
        documents = interface.stream_arguments(on_device.cu_seqlens)
        hidden = self.decoder(
            input_ids=on_device.input_ids, position_ids=on_device.position_ids, use_cache=False, **documents
        ).last_hidden_state[0]  # [T, H]
        return _split(self._scores(hidden, on_device.labels[0]), stream)

    def _read_alone(self, text: Sequence[int]) -> TokenScores:
        ids = torch.tensor([list(text)], device=self.device)
        logits = self.causal_lm(input_ids=ids, use_cache=False).logits[0].float()  # [T, V]
        targets = torch.cat([ids[0, 1:], ids.new_full((1,), -1)])
        return _shifted(prediction_scores(logits, targets, LogitTransform()).cpu().numpy())

    def _scores(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """[T, 6]: best, logprob, gap, margin, mean and std of the prediction made at each place."""
        vocab_size = self.causal_lm.config.get_text_config().vocab_size
        rows = max(1, CHUNK_ELEMENTS // vocab_size)
        rows_in_cache = max(1, _CACHE_ELEMENTS // vocab_size) if hidden.device.type == "cpu" else rows
        parts = []
        for some_hidden, some_targets in zip(hidden.split(rows), targets.split(rows), strict=True):
            logits = self.head(some_hidden)
            blocks = zip(logits.split(rows_in_cache), some_targets.split(rows_in_cache), strict=True)
            parts += [prediction_scores(block.float(), labels, self.transform) for block, labels in blocks]
        return torch.cat(parts).cpu()


def groups_of(lengths: Sequence[int], most: int | None) -> list[range]:
    """Texts in the order given, as many together as have at most `most` tokens; a longer one stands alone."""
    ends: list[int] = []
    total = 0
    for index, length in enumerate(lengths):
        if most is not None and total and total + length > most:
            ends.append(index)
            total = 0
        total += length
    bounds = [0, *ends, len(lengths)]
    return [range(a, b) for a, b in zip(bounds[:-1], bounds[1:], strict=True) if b > a]


def prediction_scores(logits: Tensor, targets: Tensor, transform: LogitTransform) -> Tensor:
    """Statistics of predictions.

    Args:
        logits: [N, V], float32; overwritten.
        targets: [N]; a negative one has no truth, and its figures mean nothing.
        transform: what the family does to the logits.

    Returns:
        [N, 6] float64: as in `TokenScores`, in its order.
    """
    if transform.scale != 1.0:
        logits *= transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    highest, best = logits.max(-1)
    shifted = logits.sub_(highest[:, None])
    true = shifted.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    weights = shifted.exp()
    total = weights.sum(-1)
    log_total = total.log()
    first = weights.mul_(shifted).sum(-1) / total
    second = weights.mul_(shifted).sum(-1) / total
    variance = (second - first**2).clamp(min=0)
    margin = -shifted.scatter_(1, best[:, None], -torch.inf).amax(-1)
    gap = torch.where(best == targets, 0.0, (-true).clamp(min=_LEAST_GAP))
    columns = [best, true - log_total, gap, margin, first - log_total, variance.sqrt()]
    return torch.stack([column.double() for column in columns], dim=1)


def _split(scores: Tensor, stream: TokenStream) -> list[TokenScores]:
    """From predictions made at each place of a stream to scores of each token of its texts."""
    bounds = stream.cu_seqlens.tolist()
    return [_shifted(scores[begin:end].numpy()) for begin, end in zip(bounds[:-1], bounds[1:], strict=True)]


def _shifted(scores: npt.NDArray[np.float64]) -> TokenScores:
    """The prediction made at place t is of token t + 1."""
    columns = np.full((6, len(scores)), np.nan)
    columns[:, 1:] = scores[:-1].T
    columns[0, 0] = -1
    return TokenScores(columns[0].astype(np.int64), *(column.astype(np.float32) for column in columns[1:]))
