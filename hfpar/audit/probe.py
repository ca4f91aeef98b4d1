"""The probe: what the model makes of texts with cuts, by a forward pass, and by generation where it counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hfpar.audit.forward import Forward, TokenScores, groups_of
from hfpar.audit.generate import Generator
from hfpar.audit.prefix import Cut, TextTokenizer, TokenizedText
from hfpar.audit.results import CutResult, ItemResult, Mode
from hfpar.audit.scoring import edit_similarity, familiarity, hit_spans, longest_run, rouge_l
from hfpar.audit.text import Match, match
from hfpar.data.benchmarks import BenchmarkItem

_SPARE_TOKENS = 8
"""Generated beyond a tail's own tokens, in case that the model spells it with more of them."""


@dataclass(frozen=True)
class PlannedItem:
    """A text to probe."""

    set: str
    item: BenchmarkItem
    tokenized: TokenizedText
    cuts: list[Cut]
    reference: float | None = None
    """Nats that a reference model needs for the text."""

    @property
    def key(self) -> tuple[str, str]:
        """What `items.jsonl` knows it by."""
        return self.set, self.item.item_id

    @property
    def is_too_long(self) -> bool:
        """Whether the model can't read it."""
        return any(cut.skipped == "too_long" for cut in self.cuts)


@dataclass(frozen=True)
class ProbeSettings:
    """How the probe is done."""

    method: Literal["forward", "generate"] = "forward"
    chat_template: bool = False
    generate: bool = False
    max_new_tokens: int = 512
    tie_tolerance: float = 1e-4
    max_tokens_per_batch: int = 4096


@dataclass(frozen=True)
class Tail:
    """One cut of one text, as the model is given it."""

    number: int
    """Of the item in its batch."""
    cut: Cut
    mode: Mode
    prompt: list[int]
    tokens: list[int]
    """The true ones that follow."""
    text: str
    """What they spell."""


@dataclass(frozen=True)
class Judgement:
    """What is known of a tail."""

    match: Match
    matched_tokens: int
    near_tie: bool
    written: str
    settled_by: Literal["forward", "generation"] = "forward"

    @property
    def is_open(self) -> bool:
        """Whether only generation can tell."""
        return self.near_tie or self.match.is_open


class Probe:
    """A model, and how it is asked."""

    def __init__(
        self, forward: Forward, generator: Generator, tokenizer: TextTokenizer, settings: ProbeSettings
    ) -> None:
        """Bring together what reads, what writes, and the tokenizer."""
        self.forward = forward
        self.generator = generator
        self.tokenizer = tokenizer
        self.settings = settings

    def __call__(self, items: Sequence[PlannedItem]) -> list[ItemResult]:
        """Probe a batch of texts that a forward pass can hold, all cuts of each."""
        readable = [number for number, item in enumerate(items) if not item.is_too_long]
        read = self.forward([items[number].tokenized.input_ids for number in readable]) if readable else []
        scores = dict(zip(readable, read, strict=True))
        tails = [tail for number in readable for tail in self._bare_tails(number, items[number])]
        judged = self._judge_bare(tails, scores)
        if self.settings.chat_template:
            chat = [tail for number in readable for tail in self._chat_tails(number, items[number])]
            judged += self._judge_alone(chat)
            tails += chat
        cuts = self._cut_results(tails, self._settle(tails, judged))
        results = [self._item_result(item, scores.get(number)) for number, item in enumerate(items)]
        for tail, cut in zip(tails, cuts, strict=True):
            results[tail.number].cuts.append(cut)
        modes: tuple[Mode, ...] = ("bare", "chat") if self.settings.chat_template else ("bare",)
        for result, item in zip(results, items, strict=True):
            probed = {(cut.mode, cut.ratio) for cut in result.cuts}
            result.cuts.extend(
                # Only in the template can a text that the model can read be too long.
                CutResult(cut.ratio, mode, cut.skipped or "too_long")
                for mode in modes
                for cut in item.cuts
                if (mode, cut.ratio) not in probed
            )
            result.cuts.sort(key=lambda cut: (cut.mode, cut.ratio))
        return results

    # Tails

    def _bare_tails(self, number: int, planned: PlannedItem) -> list[Tail]:
        ids, text = planned.tokenized.input_ids, planned.tokenized.text
        return [
            Tail(
                number,
                cut,
                "bare",
                ids[: cut.num_prefix_tokens],
                ids[cut.num_prefix_tokens :],
                text[cut.position :],
            )
            for cut in planned.cuts
            if not cut.skipped
        ]

    def _chat_tails(self, number: int, planned: PlannedItem) -> list[Tail]:
        """The prefix is a user's message, and the tail, without its leading space, the answer."""
        tails = []
        for cut in planned.cuts:
            if cut.skipped:
                continue
            prefix = planned.tokenized.text[: cut.position]
            tail = planned.tokenized.text[cut.position :].lstrip()
            prompt = chat_prompt(self.tokenizer.tokenizer, prefix)
            tokens = self.tokenizer.plain_ids(tail)
            most = self.generator.max_length
            if most is not None and len(prompt) + len(tokens) > most:
                continue
            tails.append(Tail(number, cut, "chat", prompt, tokens, tail))
        return tails

    # Verdicts

    def _judge_bare(self, tails: Sequence[Tail], scores: dict[int, TokenScores]) -> list[Judgement]:
        return [self._judge(tail, scores[tail.number], len(tail.prompt)) for tail in tails]

    def _judge_alone(self, tails: Sequence[Tail]) -> list[Judgement]:
        """Tails whose prompts are no beginnings of the text itself, so that each needs a pass of its own."""
        judged: list[Judgement] = []
        lengths = [len(tail.prompt) + len(tail.tokens) for tail in tails]
        for group in groups_of(lengths, self.settings.max_tokens_per_batch):
            some = [tails[index] for index in group]
            read = self.forward([[*tail.prompt, *tail.tokens] for tail in some])
            judged += [
                self._judge(tail, scores, len(tail.prompt)) for tail, scores in zip(some, read, strict=True)
            ]
        return judged

    def _judge(self, tail: Tail, scores: TokenScores, start: int) -> Judgement:
        hits, tolerance = scores.hits[start:], self.settings.tie_tolerance
        ties = np.where(hits, scores.margin[start:] <= tolerance, scores.gap[start:] <= tolerance)
        misses = np.flatnonzero(~hits)
        if not len(misses) and not ties.any():
            return Judgement(Match(True, True), len(hits), False, tail.text)
        matched = int(misses[0]) if len(misses) else len(hits)
        clear = np.flatnonzero(~hits & ~ties)
        if not len(clear):
            return Judgement(Match(None, None), matched, True, "")
        first = int(clear[0])
        choice = int(scores.best[start + first])
        ended = choice in self.generator.eos_token_ids
        new = [*tail.tokens[:first], *([] if ended else [choice])]
        written = self.tokenizer.continuation(tail.prompt, new)
        return Judgement(match(tail.text, written, ended=ended), matched, False, written)

    def _settle(self, tails: Sequence[Tail], judged: Sequence[Judgement]) -> list[Judgement]:
        """Generate where the pass couldn't tell, or all of them if the method is generation."""
        by_generation = self.settings.method == "generate"
        several = [
            index for index, one in enumerate(judged) if by_generation or (one.is_open and not one.near_tie)
        ]
        alone = [index for index, one in enumerate(judged) if one.near_tie and not by_generation]
        settled = list(judged)
        # A near tie may fall either way in the company of others.
        for group in filter(None, [several, *([index] for index in alone)]):
            for index, found in zip(group, self._generate([tails[i] for i in group]), strict=True):
                settled[index] = replace(found, near_tie=judged[index].near_tie)
        return settled

    def _generate(self, tails: Sequence[Tail]) -> list[Judgement]:
        def is_done(number: int, tokens: list[int]) -> bool:
            tail = tails[number]
            if tokens == tail.tokens[: len(tokens)]:
                return len(tokens) == len(tail.tokens)
            return not self._match(tail, tokens).is_open

        written = self.generator(
            [tail.prompt for tail in tails],
            [len(tail.tokens) + _SPARE_TOKENS for tail in tails],
            is_done,
            tokens_per_batch=self._generation_budget(),
        )
        return [
            Judgement(
                self._match(tail, tokens, ended=True),
                common_length(tail.tokens, tokens),
                False,
                self.tokenizer.continuation(tail.prompt, tokens),
                "generation",
            )
            for tail, tokens in zip(tails, written, strict=True)
        ]

    def _generation_budget(self) -> int:
        """One prompt at a time for a family that hasn't been checked: it may not know of padding."""
        return self.settings.max_tokens_per_batch if self.forward.packs else 1

    def _match(self, tail: Tail, tokens: Sequence[int], *, ended: bool = False) -> Match:
        if list(tokens[: len(tail.tokens)]) == tail.tokens:
            return Match(True, True)  # even if the tokenizer doesn't give back the text that it was given
        return match(tail.text, self.tokenizer.continuation(tail.prompt, tokens), ended=ended)

    # Results

    def _cut_results(self, tails: Sequence[Tail], judged: Sequence[Judgement]) -> list[CutResult]:
        whole: Sequence[str | None] = [None] * len(tails)
        if self.settings.generate:
            whole = self.write([tail.prompt for tail in tails])
        results = []
        for tail, judgement, text in zip(tails, judged, whole, strict=True):
            results.append(
                CutResult(
                    ratio=tail.cut.ratio,
                    mode=tail.mode,
                    cut=tail.cut.position,
                    tail_words=tail.cut.tail_words,
                    tail_tokens=len(tail.tokens),
                    exact=bool(judgement.match.strict),
                    exact_normalized=bool(judgement.match.normalized),
                    matched_tokens=judgement.matched_tokens,
                    near_tie=judgement.near_tie,
                    settled_by=judgement.settled_by,
                    written=judgement.written if text is None else text,
                    is_complete=text is not None,
                    rouge_l=None if text is None else rouge_l(tail.text, text),
                    edit_similarity=None if text is None else edit_similarity(tail.text, text),
                )
            )
        return results

    def write(
        self, prompts: Sequence[list[int]], is_done: Callable[[int, list[int]], bool] | None = None
    ) -> list[str]:
        """Continue prompts to their end, or to `max_new_tokens`."""
        most = [self.settings.max_new_tokens] * len(prompts)
        done = is_done or (lambda number, tokens: False)
        written = self.generator(prompts, most, done, tokens_per_batch=self._generation_budget())
        return [
            self.tokenizer.continuation(prompt, tokens)
            for prompt, tokens in zip(prompts, written, strict=True)
        ]

    def _item_result(self, planned: PlannedItem, scores: TokenScores | None) -> ItemResult:
        tokenized = planned.tokenized
        first = tokenized.num_special
        hits: npt.NDArray[np.bool_] = np.zeros(0, bool) if scores is None else scores.hits[first:]
        spans = tokenized.offsets[first:] if scores is not None else []
        logprobs: dict[str, float] = {}
        if scores is not None:
            # The first token has a prediction only where a special one stands before it.
            begin = max(first, 1)
            logprobs = familiarity(
                tokenized.text, scores.logprob[begin:], scores.mean[begin:], scores.std[begin:]
            )
            if planned.reference is not None and logprobs:
                total = -float(scores.logprob[begin:].sum())
                logprobs["reference"] = round(planned.reference / max(total, 1e-6), 6)
        run = longest_run(spans, hits.tolist())
        return ItemResult(
            set=planned.set,
            item_id=planned.item.item_id,
            place=planned.item.place,
            text=tokenized.text,
            num_tokens=len(tokenized.input_ids) - first,
            hits=hit_spans(spans, hits.tolist()),
            longest_run=run.length,
            longest_run_span=list(run.span),
            logprobs=logprobs,
            cuts=[],
            pair_id=planned.item.pair_id,
            pair_set=planned.item.pair_set,
            varies=planned.item.varies,
        )


def chat_prompt(tokenizer: Any, message: str) -> list[int]:
    """A user's message in the model's template, up to where the answer begins."""
    ids: list[int] = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], add_generation_prompt=True, return_dict=False
    )
    return ids


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))
