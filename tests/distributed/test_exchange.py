"""One attention layer whose stream is spread over ranks: what it computes, and every byte that it sends for it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.spawn import spawn  # noqa: TID251

pytestmark = pytest.mark.timeout(900)  # one set of processes runs the cases of a whole module

PACK = (3, 17, 1, 8, 2, 11, 6)
"""Documents of a stream of 48 tokens."""
WHOLE = (12, 12, 12, 12)
"""On a ring of 2 or 4, none of these need be cut."""


@dataclass(frozen=True)
class Case:
    cp_size: int
    sp_size: int
    lengths: tuple[int, ...] = PACK
    heads: tuple[int, int] = (4, 2)
    """Query, key-value."""
    dims: tuple[int, int] = (8, 8)
    """Of a key, of a value."""
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: str = "float32"
    tolerance: float = 2e-6
    """Largest difference from fp64, relative to the largest value if that is above 1."""


CASES = {
    "sp2": Case(1, 2),
    "sp2, uneven query heads": Case(1, 2, heads=(9, 3)),
    "sp2, as many key-value heads as query heads": Case(1, 2, heads=(4, 4)),
    "sp2, values of another size": Case(1, 2, dims=(12, 8)),
    "sp2, window": Case(1, 2, window=3),
    "sp2, sinks": Case(1, 2, heads=(6, 2), sinks=True),
    "sp4": Case(1, 4),
    "sp4, one key-value head": Case(1, 4, heads=(4, 1)),
    "sp4, six query heads": Case(1, 4, heads=(6, 2), dims=(8, 4)),
    "sp4, one token": Case(1, 4, lengths=(1,)),
    "sp4, padded": Case(1, 4, lengths=(7, 1, 17), heads=(9, 3), sinks=True, softcap=2.0),
    "sp2, bf16": Case(1, 2, dtype="bfloat16", tolerance=2e-2),
    "cp2, one document": Case(2, 1, lengths=(48,)),
    "cp2": Case(2, 1),
    "cp2, whole documents": Case(2, 1, lengths=WHOLE),
    "cp2, window": Case(2, 1, lengths=(48,), window=5),
    "cp2, window of one": Case(2, 1, lengths=(29, 19), window=1),
    "cp2, soft-capped": Case(2, 1, lengths=(30, 18), softcap=1.5),
    "cp4, one document": Case(4, 1, lengths=(48,), dims=(12, 8)),
    "cp4": Case(4, 1, heads=(9, 3)),
    "cp4, whole documents": Case(4, 1, lengths=WHOLE),
    "cp4, window": Case(4, 1, lengths=(45,), window=7, sinks=True, softcap=2.0),
    "cp4, one token": Case(4, 1, lengths=(1,)),
    "cp4, single tokens": Case(4, 1, lengths=(1, 1, 1, 1, 1)),
    "cp4, bf16": Case(4, 1, lengths=(61, 35), dtype="bfloat16", tolerance=2e-2),
    "cp2 x sp2, one document": Case(2, 2, lengths=(48,)),
    "cp2 x sp2": Case(2, 2, heads=(6, 2), dims=(12, 8), window=6, sinks=True),
    "cp2 x sp2, uneven query heads": Case(2, 2, lengths=(21, 20), heads=(9, 3)),
    "cp2 x sp2, whole documents": Case(2, 2, lengths=WHOLE),
    "cp2 x sp2, one token": Case(2, 2, lengths=(1,)),
}
RING_CASES = [name for name, case in CASES.items() if case.cp_size > 1]
COLLECTIVES = (
    "all_reduce reduce broadcast scatter gather reduce_scatter reduce_scatter_tensor all_gather "
    "all_gather_into_tensor all_to_all all_gather_object broadcast_object_list barrier send recv isend irecv"
).split()


# What runs in the processes


class Traffic:
    """Records what a rank sends, as (function, bytes to others, peers), and that it uses nothing else."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        import torch.distributed as dist

        self.sent: list[tuple[str, int]] = []
        all_to_all, batch = dist.all_to_all_single, dist.batch_isend_irecv

        def record_all_to_all(
            output: Any, values: Any, output_splits: Any, input_splits: Any, group: Any
        ) -> Any:
            own = input_splits[dist.get_rank(group)]
            assert sum(input_splits) == values.numel()
            self.sent.append(("all_to_all_single", (values.numel() - own) * values.element_size()))
            return all_to_all(output, values, output_splits, input_splits, group=group)

        def record_batch(operations: list[Any]) -> Any:
            for operation in operations:
                if operation.op is dist.isend:
                    self.sent.append(("isend", operation.tensor.numel() * operation.tensor.element_size()))
            return batch(operations)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError("a collective that nobody counts")

        for name in set(COLLECTIVES) - {"isend", "irecv"}:  # those two are named in operations, never called
            patch.setattr(dist, name, refuse)
        patch.setattr(dist, "all_to_all_single", record_all_to_all)
        patch.setattr(dist, "batch_isend_irecv", record_batch)

    def take(self) -> list[tuple[str, int]]:
        sent, self.sent = self.sent, []
        return sent


def make_states(case: Case, num_tokens: int) -> dict[str, Any]:
    """Query, key, value, sinks and the gradient of the output, of the whole stream and equal on every rank."""
    import torch

    generator = torch.Generator().manual_seed(len(case.lengths))
    (num_heads, num_kv_heads), (key_dim, value_dim) = case.heads, case.dims
    shapes = {
        "query": (1, num_heads, num_tokens, key_dim),
        "key": (1, num_kv_heads, num_tokens, key_dim),
        "value": (1, num_kv_heads, num_tokens, value_dim),
        "grad": (1, num_tokens, num_heads, value_dim),
        "sinks": (num_heads,),
    }
    dtype = getattr(torch, case.dtype)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def written_out(case: Case, states: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """Output and gradients by the definition, in fp64, in one process."""
    import torch

    document = torch.tensor([n for n, length in enumerate(case.lengths) for _ in range(length)])
    position = torch.arange(num_tokens)
    seen = (document[:, None] == document) & (position[:, None] >= position)
    if case.window is not None:
        seen &= position[:, None] - position < case.window
    leaves = {name: value.double().requires_grad_() for name, value in states.items()}
    group = case.heads[0] // case.heads[1]
    key, value = (leaves[name].repeat_interleave(group, dim=1) for name in ("key", "value"))
    scores = leaves["query"] @ key.transpose(2, 3) * case.dims[0] ** -0.5
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if case.sinks:
        sinks = leaves["sinks"].view(1, -1, 1, 1).expand(1, -1, num_tokens, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., :num_tokens]
    output = (weights @ value).transpose(1, 2)
    output.backward(leaves["grad"].detach())
    found = {name: leaves[name].grad for name in ("query", "key", "value", "sinks")}
    return {"output": output.detach(), **found}


def run_case(worker: Any, case: Case, traffic: Traffic) -> dict[str, Any]:
    """Errors against the definition, and what was sent forward and backward."""
    import torch

    from hfpar.attention.interface import attention_forward
    from hfpar.data.stream import Sample, build_stream
    from hfpar.parallel.layout import Layout
    from hfpar.parallel.sequence import shard_stream

    layout = Layout(worker.rank, worker.world_size, cp_size=case.cp_size, sp_size=case.sp_size)
    num_tokens = sum(case.lengths)
    ids = [[1] * length for length in case.lengths]
    shard = shard_stream(build_stream([Sample(tokens, tokens) for tokens in ids]), layout)
    arguments = shard.arguments(torch.device("cpu"))
    arguments.pop("input_ids")
    assert shard.sharding is not None
    ranges = shard.sharding.placement.ranges(layout.cp_rank)
    of_ring_rank = torch.cat([torch.arange(start, stop) for start, stop in ranges])
    index = of_ring_rank.chunk(layout.sp_size)[layout.sp_rank]  # which token of the stream each of mine is
    index = index.masked_fill(index >= num_tokens, -1)  # padding
    states = make_states(case, num_tokens)
    expected = written_out(case, states, num_tokens)

    def mine(name: str) -> Any:
        dim = 1 if name in ("grad", "output") else 2
        return states[name].index_select(dim, index.clamp(min=0)).detach().requires_grad_()

    leaves = {name: mine(name) for name in ("query", "key", "value")}
    sinks = states["sinks"].clone().requires_grad_() if case.sinks else None
    output, _ = attention_forward(
        torch.nn.Module(),
        *leaves.values(),
        None,
        softcap=case.softcap,
        sliding_window=case.window,
        s_aux=sinks,
        **arguments,
    )
    forward = traffic.take()
    is_real = (index >= 0)[None, :, None, None]
    output.backward(mine("grad").detach() * is_real)
    result = {"forward": forward, "backward": traffic.take(), "errors": {}}
    found = {"output": output.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}
    real = index >= 0
    for name, value in found.items():
        dim = 1 if name == "output" else 2
        assert torch.isfinite(value).all()  # padding included
        right = expected[name].index_select(dim, index[real])
        difference = (value.index_select(dim, real.nonzero()[:, 0]).double() - right).abs()
        size = expected[name].abs().max().clamp(min=1.0)  # one token's query and key have no gradient
        result["errors"][name] = float(difference.max() / size) if real.any() else 0.0
    result["sinks"] = None if sinks is None else sinks.grad
    result["expected sinks"] = expected["sinks"]
    result["tokens"] = len(index)
    result["place"] = (layout.cp_rank, layout.sp_rank, layout.dp_rank)
    result["index"] = index.tolist()
    return result


def run_cases(worker: Any) -> dict[str, Any]:
    results = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, case in CASES.items():
            layout_of = (case.cp_size, case.sp_size)
            results[name] = run_with_groups(worker, case, patch, layout_of)
    return results


def run_with_groups(worker: Any, case: Case, patch: pytest.MonkeyPatch, sizes: tuple[int, int]) -> Any:
    """Groups form first: making them is not the layer's traffic."""
    from hfpar.parallel.layout import Layout

    layout = Layout(worker.rank, worker.world_size, cp_size=sizes[0], sp_size=sizes[1])
    _ = layout.cp_group, layout.sp_group
    with patch.context() as inner:
        inner.setattr(Layout, "cp_group", layout.cp_group)
        inner.setattr(Layout, "sp_group", layout.sp_group)
        return run_case(worker, case, Traffic(inner))


# What it must be


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("exchange")
    return spawn(run_cases, 4, folder)


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_one_process(found: list[Any], name: str) -> None:
    import torch

    case = CASES[name]
    for rank in found:
        for what, error in rank[name]["errors"].items():
            assert error < case.tolerance, what
    if case.sinks:
        size = case.cp_size * case.sp_size  # ranks beyond those have the same once more
        total = sum(rank[name]["sinks"].double() for rank in found[:size])
        torch.testing.assert_close(total, found[0][name]["expected sinks"], rtol=1e-5, atol=1e-6)


def heads_of(case: Case) -> list[tuple[int, int]]:
    """By rank: its share of the query heads, in order, and the key-value heads that these use."""
    num_heads, num_kv_heads = case.heads
    group = num_heads // num_kv_heads
    bounds = [-(-rank * num_heads // case.sp_size) for rank in range(case.sp_size + 1)]
    return [
        (stop - start, len({head // group for head in range(start, stop)}))
        for start, stop in zip(bounds[:-1], bounds[1:], strict=True)
    ]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.sp_size > 1])
def test_bytes_of_ulysses(found: list[Any], name: str) -> None:
    """The formula in the docstring of hfpar.attention.ulysses: two exchanges forward, two backward."""
    case = CASES[name]
    element = 2 if case.dtype == "bfloat16" else 4
    key_dim, value_dim = case.dims
    heads = heads_of(case)
    for rank in found:
        result = rank[name]
        sp_rank, tokens = result["place"][1], result["tokens"]
        widths = [query * key_dim + kv * (key_dim + value_dim) for query, kv in heads]
        others = [other for other in range(case.sp_size) if other != sp_rank]
        forward = [
            element * tokens * sum(widths[other] for other in others),
            element * tokens * len(others) * heads[sp_rank][0] * value_dim,
        ]
        backward = [
            element * tokens * sum(heads[other][0] for other in others) * value_dim,
            element * tokens * len(others) * widths[sp_rank],
        ]
        assert [size for kind, size in result["forward"] if kind == "all_to_all_single"] == forward
        assert [size for kind, size in result["backward"] if kind == "all_to_all_single"] == backward


def test_bytes_of_ulysses_where_heads_divide(found: list[Any]) -> None:
    for name in ("sp2", "sp2, values of another size", "sp2, window"):
        case = CASES[name]
        (num_heads, num_kv_heads), (key_dim, value_dim) = case.heads, case.dims
        for rank in found:
            tokens = rank[name]["tokens"]
            width = num_heads * key_dim + num_kv_heads * (key_dim + value_dim) + num_heads * value_dim
            expected = 4 * tokens * (case.sp_size - 1) * width // case.sp_size
            assert sum(size for _, size in rank[name]["forward"]) == expected
            assert sum(size for _, size in rank[name]["backward"]) == expected


def shown(name: str, ranks: list[dict[str, Any]]) -> dict[tuple[int, int], int]:
    """Token by token: how many of one ring rank's keys some query of another sees, for each pair of ring ranks."""
    case = CASES[name]
    document = [number for number, length in enumerate(case.lengths) for _ in range(length)]
    held: dict[int, list[int]] = {}
    for rank in ranks:
        result = rank[name]
        cp_rank, sp_rank, dp_rank = result["place"]
        if dp_rank == 0:
            held.setdefault(cp_rank, []).extend(token for token in result["index"] if token >= 0)
    window = case.window or len(document)

    def sees(query: int, key: int) -> bool:
        return document[query] == document[key] and 0 <= query - key < window

    return {
        (source, target): sum(any(sees(query, key) for query in held[target]) for key in held[source])
        for source in held
        for target in held
        if source != target
    }


@pytest.mark.parametrize("name", RING_CASES)
def test_bytes_of_the_ring(found: list[Any], name: str) -> None:
    """The formula in the docstring of hfpar.attention.ring: no key travels that nobody sees."""
    case = CASES[name]
    element = 2 if case.dtype == "bfloat16" else 4
    tokens = shown(name, found)
    for rank in found:
        result = rank[name]
        cp_rank, sp_rank, _ = result["place"]
        num_kv_heads = case.heads[1] if case.sp_size == 1 else heads_of(case)[sp_rank][1]
        width = element * num_kv_heads * sum(case.dims)
        needed = sum(count for (source, _), count in tokens.items() if source == cp_rank)
        had = sum(count for (_, target), count in tokens.items() if target == cp_rank)
        sent = {
            way: [size for kind, size in result[way] if kind == "isend"] for way in ("forward", "backward")
        }
        assert sum(sent["forward"]) == width * needed
        assert sum(sent["backward"]) == width * (needed + had)
        assert len(sent["forward"]) <= case.cp_size - 1
        assert len(sent["backward"]) <= 2 * (case.cp_size - 1)


@pytest.mark.parametrize("name", ["cp2, whole documents", "cp4, whole documents", "cp2, window of one"])
def test_documents_that_lie_on_one_rank_send_nothing(found: list[Any], name: str) -> None:
    for rank in found:
        assert rank[name]["forward"] == rank[name]["backward"] == []


def test_the_average_of_one_document(found: list[Any]) -> None:
    """Three quarters of what a ring sends that passes whole blocks round."""
    name = "cp4, one document"
    width = 4 * CASES[name].heads[1] * sum(CASES[name].dims)
    total = sum(size for rank in found for _, size in rank[name]["forward"])
    assert total / 4 == width * 0.75 * (4 - 1) * 48 / 4
