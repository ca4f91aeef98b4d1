"""Which tokens a ring rank holds and what it computes: every rank asked, the exchange played with token numbers."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from hfpar.attention.placement import Piece, Placement, attention_work, place, ring_steps, ring_tokens

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


def test_thousands_of_small_streams() -> None:
    # Short documents and few tokens: whoever counts wrongly overfills a rank or leaves a token out here.
    for number, lengths in enumerate(random_streams(0, 4000, longest=25)):
        cp_size, multiple_of = SIZES[1 + number % 5], 1 + number % 3
        check_placement(place(lengths, cp_size, multiple_of), lengths, cp_size, multiple_of)


@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
def test_long_documents_that_fill_the_ranks_exactly(cp_size: int) -> None:
    # Each has odd tokens. Without one to spare, the ranks that take them must be others every time.
    rng = random.Random(cp_size)
    for _ in range(300):
        total = cp_size * rng.randint(20, 60)
        first = rng.randint(1, total - 1)
        lengths = [first, total - first]
        placement = place(lengths, cp_size, 1)
        check_placement(placement, lengths, cp_size, 1)
        assert len(placement.lengths) == 2
        # All else than an even share of both would be far off.
        assert unevenness(placement) < 1.25


def test_a_ring_of_one_is_the_stream_itself() -> None:
    placement = place([5, 0, 9, 1], 1, 4)
    assert placement.lengths == (5, 0, 9, 1, 1)
    assert placement.pieces == (
        (Piece(0, 5, 0, 0), Piece(5, 9, 2, 0), Piece(14, 1, 3, 0), Piece(15, 1, 4, 0)),
    )
    assert placement.ranges(0) == [(0, 16)]
    (step,) = ring_steps(placement, 0, None)
    assert [(pair.query_start, pair.query_stop, pair.offset) for pair in step.pairs] == [
        (0, 5, 0),
        (5, 14, 0),
        (14, 15, 0),
        (15, 16, 0),
    ]


def test_each_rank_holds_the_same_place_from_both_ends_of_a_long_document() -> None:
    placement = place([20], 3, 2)  # four tokens of padding, all where the odd tokens are not
    assert placement.pieces[0] == (Piece(0, 4, 0, 0), Piece(17, 3, 0, 17), Piece(20, 1, 1, 0))
    assert placement.pieces[1] == (Piece(4, 4, 0, 4), Piece(14, 3, 0, 14), Piece(21, 1, 2, 0))
    # The two pieces in the middle are one.
    assert placement.pieces[2] == (Piece(8, 6, 0, 8), Piece(22, 2, 3, 0))


@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
def test_pieces_of_a_long_document_differ_by_one_token_at_most(cp_size: int) -> None:
    for length in range(2 * cp_size, 6 * cp_size):
        placement = place([length], cp_size, 1)
        sizes = [piece.length for held in placement.pieces for piece in held if piece.document == 0]
        middle = sizes.pop()  # two pieces in one
        sizes += [middle // 2, middle - middle // 2]
        assert len(sizes) == 2 * cp_size
        assert max(sizes) - min(sizes) <= 1


def test_documents_that_fit_stay_whole() -> None:
    for cp_size in (2, 4, 8):
        placement = place([64] * (3 * cp_size), cp_size, 8)
        assert not cut_documents(placement)
        for rank in range(cp_size):
            assert [step.distance for step in ring_steps(placement, rank, None)] == [0]
        assert ring_tokens(placement, None) == [0] * cp_size


def test_no_more_ranks_than_needed_share_a_document() -> None:
    placement = place([1000, 1000], 4, 1)
    holders = [
        {rank for rank in range(4) for piece in placement.pieces[rank] if piece.document == n} for n in (0, 1)
    ]
    assert holders == [{0, 1}, {2, 3}]
    assert unevenness(placement) < 1.01
    # Neighbours in the ring only: a piece of 250 or two for one of both, at distance 1 or 3.
    steps = [ring_steps(placement, rank, None) for rank in range(4)]
    assert [step.distance for step in steps[0]] == [0, 1, 3]
    assert ring_tokens(placement, None) == [500, 250, 250, 500]


def test_what_fits_nowhere_fills_the_room_that_is_left() -> None:
    # Two tokens and four are left for the last one; rank 0 has more work, and gets the two that look at least.
    placement = place([8, 6, 6], 2, 1)
    assert placement.pieces[0] == (Piece(14, 2, 2, 0), Piece(0, 8, 0, 0))
    assert placement.pieces[1] == (Piece(16, 4, 2, 2), Piece(8, 6, 1, 0))
    assert attention_work(placement) == [39, 39]


def test_a_distance_that_nobody_needs_is_left_out() -> None:
    # Each query sees the token before it, which in a document shared zigzag only neighbours hold.
    placement = place([80], 4, 1)
    assert [step.distance for step in ring_steps(placement, 0, None)] == [0, 1, 2, 3]
    steps = [ring_steps(placement, rank, 2) for rank in range(4)]
    assert [[step.distance for step in own] for own in steps] == [[0, 1, 3]] * 4
    assert [[step.receive for step in own] for own in steps] == [[0, 0, 1], [0, 1, 1], [0, 1, 1], [0, 1, 0]]
    assert ring_tokens(placement, 1) == [0] * 4


@pytest.mark.parametrize("length", [8192, 65536])
@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_one_long_document(cp_size: int, length: int) -> None:
    placement = place([length], cp_size, 1)
    assert unevenness(placement) <= 1.0001
    received = ring_tokens(placement, None)
    assert received == [(2 * (cp_size - 1) - rank) * length // (2 * cp_size) for rank in range(cp_size)]
    assert sum(received) / cp_size == 0.75 * (cp_size - 1) * length / cp_size


def test_of_two_long_documents_all_ranks_receive_the_same() -> None:
    placement = place([6000, 6000], 3, 1)
    steps = [ring_steps(placement, rank, None) for rank in range(3)]
    # Three of the four pieces that a rank holds. Were both cut in the same order, some would need all four.
    assert [[step.receive for step in own] for own in steps] == [[0, 3000, 3000]] * 3


def realistic_pack(seed: int) -> list[int]:
    """A stream's worth of conversations: half of them shorter than 400 tokens, a few of thousands."""
    rng = random.Random(seed)
    lengths: list[int] = []
    while True:
        length = min(STREAM // 2, max(1, int(rng.lognormvariate(6, 1))))
        if sum(lengths) + length > STREAM:
            return lengths
        lengths.append(length)


def unevenness(placement: Placement) -> float:
    work = attention_work(placement)
    return max(work) * len(work) / sum(work)


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_a_realistic_pack(cp_size: int) -> None:
    travelling, cut = [], []
    for seed in range(20):
        lengths = realistic_pack(seed)
        placement = place(lengths, cp_size, 8)
        check_placement(placement, lengths, cp_size, 8)
        assert unevenness(placement) <= 1.025  # 2 % without padding
        travelling.append(sum(ring_tokens(placement, None)) / ((cp_size - 1) * STREAM))
        cut.append(len(cut_documents(placement)) / len(lengths))
    # Of what a ring that passes whole blocks round moves.
    assert max(travelling) < 0.45
    assert sum(travelling) / 20 < 0.15
    assert sum(cut) / 20 < 0.2


@pytest.mark.parametrize("cp_size", [2, 4, 8])
@pytest.mark.parametrize(
    "lengths",
    [
        [1000] * 9,
        [30000, *[1] * 2768],
        [*[10] * 500, 20000],
        [8192, 8191, 8193, 8192],
        [5000, 3000, 2000, 77],
    ],
    ids=["equal", "huge first", "huge last", "as many as ranks, or half", "few"],
)
def test_work_is_even_whatever_the_documents(lengths: list[int], cp_size: int) -> None:
    assert unevenness(place(lengths, cp_size, 2)) <= 1.025


def test_equal_arguments_give_an_equal_placement() -> None:
    lengths = realistic_pack(0)
    assert place(lengths, 4, 2) == place(tuple(lengths), 4, 2)


@pytest.mark.parametrize("cp_size", [1, 8])
@pytest.mark.parametrize("kind", ["log-normal", "equal", "tiny"])
def test_many_documents_are_planned_fast(kind: str, cp_size: int) -> None:
    rng = random.Random(0)
    lengths = {
        "log-normal": [max(1, int(rng.lognormvariate(6, 1))) for _ in range(10_000)],
        "equal": [100] * 10_000,
        "tiny": [rng.randint(1, 3) for _ in range(10_000)],
    }[kind]
    planning, stepping = [], []
    for _ in range(3):  # the best of three: a collection of the whole suite's garbage can fall into one
        start = time.process_time()
        placement = place(lengths, cp_size, 2)
        planned = time.process_time()
        ring_steps(placement, 0, None)
        planning.append(planned - start)
        stepping.append(time.process_time() - planned)
    assert min(planning) < 0.5
    assert min(stepping) < 0.5


def test_planning_loads_nothing_heavy() -> None:
    code = "import sys, hfpar.attention.placement; print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout == "[]\n"
