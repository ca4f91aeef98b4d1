"""Which tokens a ring rank holds and what it computes: every rank asked, the exchange played with token numbers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from hfpar.attention.placement import Placement, attention_work, place, ring_steps, ring_tokens

SIZES = [1, 2, 3, 4, 5, 8]
WINDOWS = [None, 1, 2, 3, 5, 8, 1000]
STREAM = 32768

# Documents on which a plan could go wrong: few tokens for the group, none to spare, or all of one kind.
STREAMS = {
    "one token": [1],
    "fewer tokens than ranks": [1, 1, 1],
    "one document shorter than the group": [7],
    "documents of one token": [1] * 40,
    "two tokens each": [2] * 17,
    "one document": [97],
    "a document ends where each rank's tokens do": [12] * 10,
    "the first fills a rank": [60, 20, 20, 20],
    "one huge, many tiny": [100, *[1] * 20],
    "tiny ones first": [*[1] * 20, 100],
    "equal, one too many": [10] * 9,
    "equal and odd": [13] * 7,
    "two that fit only in part": [40, 39, 41, 38, 37],
    "documents without tokens": [0, 9, 0, 30, 0],
    "nothing": [],
}


def random_streams(seed: int, count: int, longest: int = 60) -> Iterator[list[int]]:
    rng = random.Random(seed)
    for _ in range(count):
        highest = rng.choice([1, 2, 3, 8, 20, longest])
        lengths = [rng.randint(1, highest) for _ in range(rng.randint(1, rng.choice([1, 3, 8, 15])))]
        if rng.random() < 0.3:
            lengths.insert(rng.randrange(len(lengths) + 1), rng.randint(1, longest))
        yield lengths


def documents_of(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    """(document, position) of every token of the padded stream."""
    return [(document, position) for document, length in enumerate(lengths) for position in range(length)]


def tokens_of(placement: Placement, rank: int) -> list[int]:
    """Numbers, in the padded stream, of the tokens that a rank holds, in its order."""
    return [token for start, stop in placement.ranges(rank) for token in range(start, stop)]


def cut_documents(placement: Placement) -> set[int]:
    pieces = itertools.chain(*placement.pieces)
    return {piece.document for piece in pieces if piece.length < placement.lengths[piece.document]}


def check_placement(placement: Placement, lengths: list[int], cp_size: int, multiple_of: int) -> None:
    unit = cp_size * multiple_of
    padded = -(-sum(lengths) // unit) * unit
    assert placement.lengths[: len(lengths)] == tuple(lengths)
    assert placement.num_tokens == sum(lengths)
    assert sum(placement.lengths) == padded
    assert placement.cp_size == cp_size
    assert placement.tokens_per_rank * cp_size == padded
    documents = documents_of(placement.lengths)
    held = []
    for rank, pieces in enumerate(placement.pieces):
        tokens = tokens_of(placement, rank)
        assert len(tokens) == padded // cp_size
        assert tokens == [piece.start + i for piece in pieces for i in range(piece.length)]
        for piece in pieces:
            assert piece.length > 0
            assert documents[piece.start] == (piece.document, piece.position)
            assert documents[piece.start + piece.length - 1] == (piece.document, piece.end - 1)
        held += tokens
        # Cut documents first, padding last and whole, and of the rank's own.
        kinds = [
            2 if piece.document >= len(lengths) else piece.length == placement.lengths[piece.document]
            for piece in pieces
        ]
        assert kinds == sorted(kinds)
        assert kinds.count(2) <= 1
    assert sorted(held) == list(range(padded))
    assert all(document < len(lengths) for document in cut_documents(placement))


def seen_by(documents: list[tuple[int, int]], window: int | None) -> set[tuple[int, int]]:
    """(query, key) tokens that attention is to pair, by the definition."""
    return {
        (query, key)
        for query, (document, _) in enumerate(documents)
        for key in range(query + 1)
        if documents[key][0] == document and (window is None or query - key < window)
    }


def check_ring(placement: Placement, window: int | None) -> None:
    """Play the exchange with token numbers and compare with the definition."""
    size = placement.cp_size
    tokens = [tokens_of(placement, rank) for rank in range(size)]
    steps = [ring_steps(placement, rank, window) for rank in range(size)]
    distances = [step.distance for step in steps[0]]
    assert distances[0] == 0
    assert distances == sorted(set(distances))
    computed: list[tuple[int, int]] = []
    traffic = [0] * size
    for number, distance in enumerate(distances):
        assert [steps[rank][number].distance for rank in range(size)] == [distance] * size
        if distance:
            assert any(steps[rank][number].send for rank in range(size))
        for rank in range(size):
            step = steps[rank][number]
            keys = tokens[rank]
            if distance == 0:
                assert step.send == ()
                assert step.receive == 0
            else:
                source = (rank - distance) % size
                send = steps[source][number].send
                assert all(0 <= start < stop <= len(tokens[source]) for start, stop in send)
                assert all(before[1] < after[0] for before, after in itertools.pairwise(send))
                keys = [tokens[source][i] for start, stop in send for i in range(start, stop)]
                assert step.receive == len(keys)
                traffic[rank] += len(keys)
            looked_at = set()
            for pair in step.pairs:
                assert 0 <= pair.query_start < pair.query_stop <= len(tokens[rank])
                assert 0 <= pair.key_start < pair.key_stop <= len(keys)
                queries_with_keys, keys_with_queries = set(), set()
                for i in range(pair.query_stop - pair.query_start):
                    for j in range(pair.key_stop - pair.key_start):
                        back = i + pair.offset - j
                        if back >= 0 and (window is None or back < window):
                            computed.append((tokens[rank][pair.query_start + i], keys[pair.key_start + j]))
                            queries_with_keys.add(i)
                            keys_with_queries.add(j)
                # An empty row of scores would be a NaN; an unseen key, work and bytes for nothing.
                assert len(queries_with_keys) == pair.query_stop - pair.query_start
                assert len(keys_with_queries) == pair.key_stop - pair.key_start
                looked_at |= set(range(pair.key_start, pair.key_stop))
            if distance:
                assert looked_at == set(range(step.receive))
    expected = seen_by(documents_of(placement.lengths), window)
    assert len(computed) == len(set(computed))
    assert set(computed) == expected
    assert ring_tokens(placement, window) == traffic
    if window is None:
        assert sum(attention_work(placement)) == len(expected)
    if not cut_documents(placement):
        assert distances == [0]


@pytest.mark.parametrize("cp_size", SIZES)
@pytest.mark.parametrize("lengths", STREAMS.values(), ids=STREAMS.keys())
def test_each_query_meets_each_of_its_keys_once(lengths: list[int], cp_size: int) -> None:
    for multiple_of in (1, 2, 3):
        placement = place(lengths, cp_size, multiple_of)
        check_placement(placement, lengths, cp_size, multiple_of)
        for window in WINDOWS:
            check_ring(placement, window)


@pytest.mark.parametrize("cp_size", SIZES)
def test_random_streams(cp_size: int) -> None:
    for number, lengths in enumerate(random_streams(cp_size, 60)):
        multiple_of = 1 + number % 3
        placement = place(lengths, cp_size, multiple_of)
        check_placement(placement, lengths, cp_size, multiple_of)
        for window in WINDOWS:
            check_ring(placement, window)
