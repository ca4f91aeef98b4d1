"""Which tokens of a packed stream each rank of a ring holds, and what the ranks must show each other. Pure.

Attention is the only place where tokens meet, and a token keeps its position wherever it lies, so any assignment
of tokens to ranks gives the same numbers. This one gives every rank equally many tokens and nearly the same
attention work, and cuts few documents: only tokens of cut documents ever travel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

_BALANCED = 1.02
"""Largest over mean attention work that needs no more cuts."""

_TRIES = 12
"""Limits to try. Streams of few tokens, whose work can't be even, would otherwise be cut to crumbs."""


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one document, held by one ring rank."""

    start: int
    """In the padded stream."""
    length: int
    document: int
    """Its number in `Placement.lengths`."""
    position: int
    """Of the first token, within the document."""

    @property
    def end(self) -> int:
        """Position, within the document, after the last token."""
        return self.position + self.length


@dataclass(frozen=True)
class Placement:
    """A padded stream, spread over the ranks of a ring."""

    lengths: tuple[int, ...]
    """Documents of the padded stream; those of padding come last."""
    num_tokens: int
    """Tokens without padding."""
    pieces: tuple[tuple[Piece, ...], ...]
    """What each ring rank holds, in its order: pieces of cut documents, whole documents, padding."""

    @property
    def cp_size(self) -> int:
        """Ranks in the ring."""
        return len(self.pieces)

    @property
    def tokens_per_rank(self) -> int:
        """Tokens that every ring rank holds, padding included."""
        return sum(self.lengths) // self.cp_size

    def ranges(self, cp_rank: int) -> list[tuple[int, int]]:
        """Return what a ring rank holds as ranges (start, stop) of the padded stream, in its order."""
        return _join((piece.start, piece.start + piece.length) for piece in self.pieces[cp_rank])


@dataclass(frozen=True)
class Pair:
    """Some queries of a rank against some keys of the same document.

    Query i sees key j, counted from the first of each, if `j <= i + offset` and, under a window,
    `i + offset - j < window`. Every query sees a key, and every key is seen.
    """

    query_start: int
    """In the rank's own tokens."""
    query_stop: int
    key_start: int
    """In the step's keys: the rank's own tokens at distance 0, the received ones at others."""
    key_stop: int
    offset: int
    """Position of the first query minus that of the first key."""


@dataclass(frozen=True)
class Step:
    """Attention to the keys of one rank of the ring."""

    distance: int
    """The keys come from the ring rank that many places before; 0: from the rank itself."""
    send: tuple[tuple[int, int], ...]
    """Ranges of own tokens for the ring rank `distance` places after: those that its queries see, in order."""
    receive: int
    """Tokens that come from the ring rank `distance` places before."""
    pairs: tuple[Pair, ...]


def place(lengths: Sequence[int], cp_size: int, multiple_of: int) -> Placement:
    """Spread a stream's documents over the ranks of a ring.

    The stream is padded to the next multiple of `cp_size * multiple_of` tokens, and every ring rank holds
    exactly 1/cp_size of it. Documents are dealt longest first, each to the rank with the least work that has room
    for it. One that is too long for that, or too much work, is shared by as few ranks as can take it: cut into
    twice as many pieces, of which the first rank holds the first and the last, the next one those next to them,
    and so on, so that each has as many tokens as the others and, causally, as much work. A short one that
    fits nowhere is cut to fill what room is left. How much work is too much is the mean work of a rank, or, if
    that leaves some rank with 2 % more work than the mean, ever less.

    A rank's padding is a document of its own, the last it holds, so no rank looks at another's padding.

    Args:
        lengths: Tokens of each document of the stream.
        cp_size: Ranks in the ring.
        multiple_of: What each rank's number of tokens must be a multiple of.

    Returns:
        The placement; equal arguments give an equal one. On a ring of one it is the stream in its own order.
    """
    per_rank = -(-sum(lengths) // (cp_size * multiple_of)) * multiple_of
    ranks = _deal(lengths, cp_size, per_rank)
    padded = (*lengths, *(room for room in ranks.room if room))
    starts = [0, *accumulate(padded)]
    padding = iter(range(len(lengths), len(padded)))
    pieces = []
    for held, room in zip(ranks.held, ranks.room, strict=True):
        own = [
            Piece(starts[document] + position, length, document, position)
            for document, position, length in _joined(held)
        ]
        own.sort(key=lambda piece: piece.length == padded[piece.document])  # cut ones first
        if room:
            document = next(padding)
            own.append(Piece(starts[document], room, document, 0))
        pieces.append(tuple(own))
    return Placement(padded, sum(lengths), tuple(pieces))


def attention_work(placement: Placement) -> list[int]:
    """Return how many (query, key) pairs each ring rank computes, without a window."""
    return [sum(_work(piece.position, piece.length) for piece in held) for held in placement.pieces]


def ring_steps(placement: Placement, cp_rank: int, window: int | None) -> tuple[Step, ...]:
    """Return what a ring rank does in attention.

    The ranges that rank r sends at a distance, one after another, are the tokens that rank r + distance
    receives and that its pairs at that distance index. Only what some query sees is sent. Over all ranks and
    steps, each query meets each key it sees exactly once.

    Args:
        placement: Where the tokens are.
        cp_rank: Of the rank that asks.
        window: Number of keys, its own included, that a query sees; None: all before it.

    Returns:
        Distance 0 first, then in ascending order each distance at which any rank of the ring sends anything:
        the same distances for every rank.
    """
    held = [_by_document(placement, rank) for rank in range(placement.cp_size)]
    own = list(_local(placement.pieces[cp_rank]))
    steps = [Step(0, (), 0, _pairs(own, own, window))]
    for distance in range(1, placement.cp_size):
        after = [held[rank - placement.cp_size + distance] for rank in range(placement.cp_size)]
        if not any(_seen(held[rank], after[rank], window) for rank in range(placement.cp_size)):
            continue
        sent = _seen(held[cp_rank], after[cp_rank], window)
        send = _join((start, start + piece.length) for start, piece in sent)
        received = [piece for _, piece in _seen(held[cp_rank - distance], held[cp_rank], window)]
        receive = sum(piece.length for piece in received)
        steps.append(Step(distance, tuple(send), receive, _pairs(own, list(_local(received)), window)))
    return tuple(steps)


def ring_tokens(placement: Placement, window: int | None) -> list[int]:
    """Return how many tokens each ring rank receives over all steps.

    Of one document of T tokens that all ranks share, without a window, rank r needs one piece, T / (2 * cp_size)
    tokens, of every rank before it and both of every rank after it: `(2 * (cp_size - 1) - r) * T / (2 * cp_size)`,
    on average `0.75 * (cp_size - 1) * T / cp_size`. In a ring that passes whole blocks round, each rank receives
    `(cp_size - 1) * T / cp_size`, whatever the documents.
    """
    held = [_by_document(placement, rank) for rank in range(placement.cp_size)]
    return [
        sum(piece.length for source in held if source is not own for _, piece in _seen(source, own, window))
        for own in held
    ]


def _work(position: int, length: int) -> int:
    """(query, key) pairs of `length` queries from `position` on, with all keys up to each."""
    return length * position + length * (length + 1) // 2


def _join(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges that follow on each other."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


_Held = tuple[int, int, int]
"""(document, position, length)"""


def _joined(held: Iterable[_Held]) -> list[_Held]:
    """Sort, and join what follows on each other within a document."""
    joined: list[_Held] = []
    for document, position, length in sorted(held):
        if joined and joined[-1][0] == document and sum(joined[-1][1:]) == position:
            document, position, before = joined.pop()
            length += before
        joined.append((document, position, length))
    return joined


@dataclass
class _Ranks:
    """The ranks of a ring while they are filled."""

    room: list[int]
    work: list[int]
    held: list[list[_Held]]
    backwards: bool = False
    """Whether the next shared document begins at the last of its ranks."""

    @property
    def balance(self) -> float:
        """Largest over mean work."""
        return max(self.work) * len(self.work) / max(sum(self.work), 1)

    def give(self, rank: int, document: int, position: int, length: int) -> None:
        self.room[rank] -= length
        self.work[rank] += _work(position, length)
        self.held[rank].append((document, position, length))

    def take_whole(self, document: int, length: int) -> bool:
        """Give a document to the rank with the least work that has room for it, if any."""
        best = -1
        for rank, room in enumerate(self.room):
            if room >= length and (best < 0 or self.work[rank] < self.work[best]):
                best = rank
        if best >= 0:
            self.give(best, document, 0, length)
        return best >= 0

    def idlest(self, count: int, length: int) -> list[int]:
        """Return the `count` ranks with the least work that can hold so long a document together, or none."""
        least, odd = divmod(length, count)
        ranks = [rank for rank, room in enumerate(self.room) if room >= least]
        ranks = sorted(ranks, key=self.work.__getitem__)[:count]
        fit = len(ranks) == count and sum(self.room[rank] > least for rank in ranks) >= odd
        return sorted(ranks) if fit else []

    def share(self, document: int, length: int, ranks: Sequence[int]) -> None:
        """Give each rank two pieces of a document, one as far from its start as the other from its end.

        Those who hold its middle receive the least. So ranks take the other order every time, and of two equal
        documents each receives as much as the others do, at every distance.
        """
        if self.backwards:
            ranks = ranks[::-1]
        self.backwards = not self.backwards
        least, odd = divmod(length, len(ranks))
        sizes = dict.fromkeys(ranks, least)
        # Odd tokens go where most room is left, so that ranks which take part in everything fill up evenly.
        for rank in sorted(ranks, key=lambda rank: -self.room[rank])[:odd]:
            sizes[rank] += 1
        halves = [(rank, (sizes[rank] + 1) // 2) for rank in ranks]
        halves += [(rank, sizes[rank] // 2) for rank in reversed(ranks)]
        position = 0
        for rank, size in halves:
            if size:
                self.give(rank, document, position, size)
            position += size

    def fill(self, document: int, length: int) -> None:
        """Give a document to the ranks that have room, its start, the least work, to the busiest."""
        position = 0
        for rank in sorted(range(len(self.room)), key=lambda rank: -self.work[rank]):
            size = min(self.room[rank], length - position)
            if size:
                self.give(rank, document, position, size)
            position += size


def _deal(lengths: Sequence[int], cp_size: int, per_rank: int) -> _Ranks:
    """Deal with ever lower limits to a rank's work on one document, until the work is even; else the most even."""
    order = sorted((n for n, length in enumerate(lengths) if length), key=lambda n: -lengths[n])
    limit = int(_BALANCED * sum(_work(0, length) for length in lengths) / cp_size)
    tried: list[_Ranks] = []
    while not tried or (len(tried) < _TRIES and limit and tried[-1].balance > _BALANCED):
        tried.append(_deal_once(lengths, order, cp_size, per_rank, max(1, limit)))
        limit = limit * 2 // 3
    return min(tried, key=lambda ranks: ranks.balance)


def _deal_once(
    lengths: Sequence[int], order: Sequence[int], cp_size: int, per_rank: int, limit: int
) -> _Ranks:
    """Give each document, in this order, to as few ranks as have room and keep each one's work on it in the limit."""
    ranks = _Ranks([per_rank] * cp_size, [0] * cp_size, [[] for _ in range(cp_size)])
    left = []
    for document in order:
        length = lengths[document]
        work = _work(0, length)
        if work <= limit and ranks.take_whole(document, length):
            continue
        for count in range(min(max(2, -(-work // limit)), cp_size), cp_size + 1):
            chosen = ranks.idlest(count, length)
            if chosen:
                ranks.share(document, length, chosen)
                break
        else:
            left.append(document)
    for document in left:
        ranks.fill(document, lengths[document])
    return ranks


_Placed = tuple[int, Piece]
"""Where a piece begins among the tokens at hand, and the piece."""


def _local(pieces: Iterable[Piece]) -> Iterable[_Placed]:
    """The pieces with where each begins, when they lie one after another."""
    start = 0
    for piece in pieces:
        yield start, piece
        start += piece.length


def _by_document(placement: Placement, rank: int) -> dict[int, list[_Placed]]:
    """A rank's pieces of cut documents, in its order."""
    found: dict[int, list[_Placed]] = defaultdict(list)
    for start, piece in _local(placement.pieces[rank]):
        if piece.length < placement.lengths[piece.document]:
            found[piece.document].append((start, piece))
    return found


def _seen(
    source: dict[int, list[_Placed]], target: dict[int, list[_Placed]], window: int | None
) -> list[_Placed]:
    """What of one rank's tokens another rank's queries see, in the order of the first.

    Of each piece it is the end, from the first key that the nearest later query sees.
    """
    found = []
    for document, keys in source.items():
        queries = target.get(document)
        if not queries:
            continue
        for start, key in keys:
            nearest = min((piece.position for _, piece in queries if piece.position >= key.end), default=None)
            if nearest is None:
                continue
            hidden = 0 if window is None else max(0, nearest - window + 1 - key.position)
            if hidden < key.length:
                found.append((start + hidden, _without_first(key, hidden)))
    return found


def _without_first(piece: Piece, count: int) -> Piece:
    return Piece(piece.start + count, piece.length - count, piece.document, piece.position + count)


def _pairs(queries: Sequence[_Placed], keys: Sequence[_Placed], window: int | None) -> tuple[Pair, ...]:
    """Pair each piece of queries with each of keys that it sees, cut to the queries and keys that take part."""
    keys_of: dict[int, list[_Placed]] = defaultdict(list)
    for start, piece in keys:
        keys_of[piece.document].append((start, piece))
    found = []
    for query_start, query in queries:
        for key_start, key in keys_of.get(query.document, ()):
            if key.position > query.position:
                continue
            hidden, num_queries = 0, query.length
            if window is not None and key.position != query.position:
                hidden = max(0, query.position - window + 1 - key.position)
                num_queries = min(query.length, key.end + window - 1 - query.position)
            if hidden < key.length and num_queries > 0:
                found.append(
                    Pair(
                        query_start=query_start,
                        query_stop=query_start + num_queries,
                        key_start=key_start + hidden,
                        key_stop=key_start + key.length,
                        offset=query.position - key.position - hidden,
                    )
                )
    return tuple(found)
