"""One item at a time behind a server: its tokens scored where the server does that, continuations where it doesn't.

As in the in-process probe, the scores of a whole text decide exact completion from every cut, and generation settles
near ties and what the scores leave open. There is no tokenizer here, so that a continuation is compared as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os.path import commonprefix

import numpy as np

from hfpar.audit.answering import NEXT_QUESTION, question_prompt
from hfpar.audit.endings import CommonEndings
from hfpar.audit.plan import plain_cut
from hfpar.audit.prefix import Cut, TailLimits
from hfpar.audit.probe import Judgement, PlannedItem, ProbeSettings
from hfpar.audit.results import CutResult, ItemResult
from hfpar.audit.scoring import Run, Span, edit_similarity, familiarity, hit_spans, longest_run, rouge_l
from hfpar.audit.server import CompletionServer, HiddenError, TooLong
from hfpar.audit.server_probe import ScoredText, SpellingError, scored_text
from hfpar.audit.text import Match, match, word_spans

_SPARE_TOKENS = 8
"""Generated beyond a tail's own tokens, in case that the model spells it with more of them."""
_FEWEST_TOKENS = 16
"""Of a continuation that shall fit into what is left of the context."""


@dataclass(frozen=True)
class CutRules:
    """How texts are cut."""

    ratios: Sequence[float]
    limits: TailLimits
    common: CommonEndings


@dataclass(frozen=True)
class Probed:
    """What was found about an item; its answers aren't judged yet."""

    result: ItemResult
    own_answer: str | None
    """What the model wrote after the whole question, where that was asked."""
    spelling: str | None
    """Why the server's tokens couldn't be used, where it scored the text."""


@dataclass(frozen=True)
class Known:
    """A text with what the server says of it."""

    text: str
    scored: ScoredText | None
    spans: list[Span]
    """Of its tokens; of its words, where the tokens aren't known."""

    def first_after(self, position: int) -> int:
        """The first token or word of the tail."""
        return next((i for i, (_, end) in enumerate(self.spans) if end > position), len(self.spans))

    def fits(self, position: int) -> bool:
        """Whether a cut falls between tokens."""
        return self.scored is None or not any(start < position < end for start, end in self.spans)

    def num_common(self, position: int, written: str) -> int:
        """Tokens or words of the tail that a continuation begins with."""
        tail = self.text[position:]
        common = len(commonprefix([tail, written]))
        if self.scored is None and common < len(tail):
            common -= 1  # a word has ended once what follows it is the same, too
        return sum(end <= position + common for _, end in self.spans[self.first_after(position) :])


class ServerProbe:
    """A model behind a server, and how it is asked. May be called by several threads at once."""

    def __init__(
        self, server: CompletionServer, settings: ProbeSettings, rules: CutRules, *, scores: bool
    ) -> None:
        """Bring together what is asked and how.

        Args:
            server: the model.
            settings: as of the in-process probe.
            rules: where texts are cut.
            scores: whether the server gives log-probabilities of a text's tokens.
        """
        self.server = server
        self.settings = settings
        self.rules = rules
        self.scores = scores

    def __call__(self, planned: PlannedItem, *, ask: bool) -> Probed:
        """Probe all cuts of one item.

        Args:
            planned: the item; its cuts and tokens aren't looked at.
            ask: whether the model shall answer the whole question, too.
        """
        question = planned.tokenized.text
        read, spelling = self._read(question)
        if isinstance(read, TooLong):
            text = Known(question, None, word_spans(question))
            cuts = [CutResult(ratio, "bare", "too_long") for ratio in self.rules.ratios]
            return Probed(_result(planned, text, cuts), None, None)
        text = Known(question, read, word_spans(question) if read is None else read.spans)
        cuts = [self._probe(text, self._cut(planned, text, ratio)) for ratio in self.rules.ratios]
        own = self._write(question_prompt(question), (NEXT_QUESTION,)) if ask else None
        return Probed(_result(planned, text, cuts), own, spelling)

    def _read(self, text: str) -> tuple[ScoredText | TooLong | None, str | None]:
        """A text's scores, or why there are none."""
        if not self.scores:
            return None, None
        try:
            tokens = self.server.score_one(text)
            if isinstance(tokens, TooLong):
                return tokens, None
            return scored_text(text, tokens, self.settings.tie_tolerance), None
        except (SpellingError, HiddenError) as error:
            return None, str(error)

    def _cut(self, planned: PlannedItem, text: Known, ratio: float) -> Cut:
        cut = plain_cut(text.text, ratio, self.rules.limits, text.fits)
        return self.rules.common.skip(cut, planned.item, planned.set)

    # Verdicts

    def _probe(self, text: Known, cut: Cut) -> CutResult:
        if cut.skipped:
            return CutResult(cut.ratio, "bare", cut.skipped)
        prefix, tail = text.text[: cut.position], text.text[cut.position :]
        whole = self._write(prefix) if self.settings.generate else None
        judged = None if text.scored is None else judge(text.text, cut.position, text.scored)
        if judged is None or judged.is_open or self.settings.method == "generate":
            judged = self._settle(text, cut.position, judged, whole)
        if judged is None:
            return CutResult(cut.ratio, "bare", "too_long")
        return CutResult(
            ratio=cut.ratio,
            mode="bare",
            cut=cut.position,
            tail_words=cut.tail_words,
            tail_tokens=len(text.spans) - text.first_after(cut.position),
            exact=bool(judged.match.strict),
            exact_normalized=bool(judged.match.normalized),
            matched_tokens=judged.matched_tokens,
            near_tie=judged.near_tie,
            settled_by=judged.settled_by,
            written=judged.written if whole is None else whole,
            is_complete=whole is not None,
            rouge_l=None if whole is None else rouge_l(tail, whole),
            edit_similarity=None if whole is None else edit_similarity(tail, whole),
        )

    def _settle(
        self, text: Known, position: int, before: Judgement | None, whole: str | None
    ) -> Judgement | None:
        """By generation; None: prefix and tail don't fit into the context together."""
        tail = text.text[position:]
        if whole is not None and not match(tail, whole).is_open:
            written: str | None = whole
        else:
            written = self._continue(text, position)
        if written is None:
            return None
        matched = text.num_common(position, written)
        if text.scored is not None:
            matched = _divergence(text.scored, text.first_after(position), matched)
        near_tie = before is not None and before.near_tie
        return Judgement(match(tail, written, ended=True), matched, near_tie, written, "generation")

    def _continue(self, text: Known, position: int) -> str | None:
        """As much as it takes to tell whether the tail is completed; None: the context ends before."""
        prefix, tail = text.text[:position], text.text[position:]
        if text.scored is not None:
            num_tokens = len(text.spans) - text.first_after(position)
            limits = (num_tokens + _SPARE_TOKENS, num_tokens)
        else:  # a token has two letters and more, and often four
            limits = (len(tail) // 2 + 2 * _SPARE_TOKENS, len(tail) // 4 + _SPARE_TOKENS)
        written = self.server.complete_one(prefix, limits[0])
        is_short = isinstance(written, TooLong)
        if is_short:
            written = self.server.complete_one(prefix, limits[1])
        if text.scored is None and isinstance(written, str) and match(tail, written).is_open:
            # No token has less than a byte.
            written = (
                TooLong("")
                if is_short
                else self.server.complete_one(prefix, len(tail.encode()) + _SPARE_TOKENS)
            )
        return None if isinstance(written, TooLong) else written

    def _write(self, prompt: str, stop: Sequence[str] = ()) -> str | None:
        """A whole continuation, a shorter one if the context ends before; None: there is no place for any."""
        most = self.settings.max_new_tokens
        while True:
            answer = self.server.complete_one(prompt, most, stop)
            if not isinstance(answer, TooLong):
                return answer
            if most <= _FEWEST_TOKENS:
                return None
            most = max(_FEWEST_TOKENS, most // 2)


def judge(text: str, position: int, scored: ScoredText) -> Judgement:
    """What the scores of a text say of the tail behind a position."""
    start = next(i for i, (_, end) in enumerate(scored.spans) if end > position)
    hits, ties = np.array(scored.hits[start:]), np.array(scored.near_ties[start:])
    misses = np.flatnonzero(~hits)
    if not len(misses) and not ties.any():
        return Judgement(Match(True, True), len(hits), False, text[position:])
    matched = int(misses[0]) if len(misses) else len(hits)
    clear = np.flatnonzero(~hits & ~ties)
    if not len(clear):
        return Judgement(Match(None, None), matched, True, "")
    first = start + int(clear[0])
    place = max(scored.spans[first][0], position)
    choice = scored.best_texts[first]
    same, tail = text[position:place], text[position:]
    if choice is None or choice.startswith("bytes:"):
        return Judgement(Match(None, None), matched, False, same)
    judged = match(tail, same + choice)
    if text[place : place + 1].isspace() and not choice[:1].isspace():
        # Decoded alone, a token of SentencePiece may have lost its space.
        spaced = match(tail, f"{same} {choice}")
        judged = spaced if spaced.is_open or spaced.normalized else judged
    return Judgement(judged, matched, False, same + choice)


def _divergence(scored: ScoredText, start: int, num_common: int) -> int:
    """Tokens before the first that was written otherwise: there the scores know of another that could be."""
    places = []
    for i in range(start, len(scored.spans)):
        if scored.near_ties[i] or not scored.hits[i]:
            places.append(i - start)
        if not scored.hits[i] and not scored.near_ties[i]:
            break
    else:
        places.append(len(scored.spans) - start)
    return max((place for place in places if place <= num_common), default=num_common)


# Results


def _result(planned: PlannedItem, text: Known, cuts: Sequence[CutResult]) -> ItemResult:
    """Hits and the longest run are known from the cuts on only, and in words, where there are no scores."""
    if text.scored is not None:
        run = longest_run(text.spans, text.scored.hits)
        hits = hit_spans(text.spans, text.scored.hits)
        logprobs = np.array(text.scored.logprobs)
        known = familiarity(text.text, logprobs[~np.isnan(logprobs)], None, None)
    else:
        known = {}
        matched = [_matched(text, cut) for cut in cuts if cut.matched_tokens]
        hits = _joined(run.span for run in matched)
        run = max(matched, key=lambda one: one.length, default=Run(0, (0, 0)))
    return ItemResult(
        set=planned.set,
        item_id=planned.item.item_id,
        place=planned.item.place,
        text=text.text,
        num_tokens=len(text.spans),
        hits=hits,
        longest_run=run.length,
        longest_run_span=list(run.span),
        logprobs=known,
        cuts=list(cuts),
        pair_id=planned.item.pair_id,
        pair_set=planned.item.pair_set,
        varies=planned.item.varies,
    )


def _matched(text: Known, cut: CutResult) -> Run:
    """The words behind a cut that the model wrote."""
    first = text.first_after(cut.cut)
    start, end = text.spans[first][0], text.spans[first + cut.matched_tokens - 1][1]
    return Run(cut.matched_tokens, (start, end))


def _joined(spans: Iterable[Span]) -> list[list[int]]:
    """Overlapping stretches as one."""
    found: list[list[int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1][1] = max(end, found[-1][1])
        else:
            found.append([start, end])
    return found
