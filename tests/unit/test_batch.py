"""An ordinary batch becomes a stream of its documents, or is refused by name."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers

from hfpar.data.stream import IGNORE_INDEX, Sample, TokenStream, build_stream
from hfpar.errors import ConfigError
from hfpar.parallel import sequence
from hfpar.parallel.batch import to_stream
from hfpar.parallel.layout import Layout

ALONE = Layout(rank=0, world_size=1)
DOCUMENTS = [
    Sample([5, 6, 7, 8], [-100, 6, 7, 8]),
    Sample([9], [9]),
    Sample([10, 2, 11, 12, 13, 2], [-100, -100, 11, 12, 13, 2]),
    Sample([3, 4], [-100, -100]),
]
PAD = 2
"""Also the last token of a document, and one in its middle."""


def padded(documents: Sequence[Sample], *, left: bool = False) -> dict[str, torch.Tensor]:
    """Rows with junk labels at the padding: only the mask says what counts."""
    longest = max(len(document.input_ids) for document in documents)
    rows: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for document in documents:
        rest = longest - len(document.input_ids)
        for name, tokens, filler in (
            ("input_ids", document.input_ids, PAD),
            ("attention_mask", [1] * len(document.input_ids), 0),
            ("labels", document.labels, 55),
        ):
            rows[name].append([filler] * rest + tokens if left else tokens + [filler] * rest)
    return {name: torch.tensor(values) for name, values in rows.items()}


def packed(documents: Sequence[Sample], **options: Any) -> dict[str, Any]:
    collate = transformers.DataCollatorWithFlattening(**options)
    batch: dict[str, Any] = collate([vars(document) for document in documents])
    return batch


def assert_same(stream: TokenStream, expected: TokenStream) -> None:
    for name in ("input_ids", "position_ids", "cu_seqlens", "labels"):
        assert getattr(stream, name).tolist() == getattr(expected, name).tolist(), name
    assert stream.num_label_tokens == expected.num_label_tokens
    assert stream.num_tokens == expected.num_tokens


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("mask_type", [torch.long, torch.bool, torch.float32, torch.uint8], ids=str)
def test_padding_is_removed(left: bool, mask_type: torch.dtype) -> None:
    batch = padded(DOCUMENTS, left=left)
    batch["attention_mask"] = batch["attention_mask"].to(mask_type)
    assert_same(to_stream(batch), build_stream(DOCUMENTS))


def test_positions_that_generation_would_give_to_padding() -> None:
    batch = padded(DOCUMENTS, left=True)
    positions = batch["attention_mask"].cumsum(1) - 1
    batch["position_ids"] = positions.masked_fill(batch["attention_mask"] == 0, 1)
    assert_same(to_stream(batch), build_stream(DOCUMENTS))


@pytest.mark.parametrize(
    "options",
    [{}, {"return_flash_attn_kwargs": True}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}],
)
def test_a_packed_row(options: dict[str, bool]) -> None:
    """The collator gives the first token of a document no label; nobody's target it is anyway."""
    assert_same(to_stream(packed(DOCUMENTS, **options)), build_stream(DOCUMENTS))


def test_packed_rows_with_padding_behind() -> None:
    batch = packed(DOCUMENTS[:3])
    rows = {
        name: torch.nn.functional.pad(batch[name], (0, 4)) for name in ("input_ids", "position_ids", "labels")
    }
    rows = {name: torch.cat([values, values]) for name, values in rows.items()}
    mask = torch.ones_like(rows["input_ids"])
    mask[:, -4:] = 0
    assert_same(to_stream({**rows, "attention_mask": mask}), build_stream(DOCUMENTS[:3] * 2))


def test_a_document_of_one_token_before_another() -> None:
    """0, 0, 1: where a position isn't one more than the last, a document begins."""
    documents = [Sample([7], [7]), Sample([8, 9], [8, 9]), Sample([4], [4]), Sample([5], [5])]
    assert_same(to_stream(packed(documents)), build_stream(documents))


def test_without_a_mask_rows_are_documents() -> None:
    batch = {
        "input_ids": torch.tensor([[5, 6, 7], [8, 9, 10]]),
        "labels": torch.tensor([[5, 6, 7], [8, 9, 10]]),
    }
    expected = build_stream([Sample([5, 6, 7], [5, 6, 7]), Sample([8, 9, 10], [8, 9, 10])])
    assert_same(to_stream(batch), expected)
    assert_same(to_stream({**batch, "attention_mask": None, "position_ids": None}), expected)


@pytest.mark.parametrize("labels", [{}, {"labels": None}], ids=["absent", "None"])
def test_without_labels(labels: dict[str, None]) -> None:
    stream = to_stream({"input_ids": torch.tensor([[5, 6, 7]]), **labels})
    assert stream.labels.tolist() == [[-100, -100, -100]]
    assert stream.num_label_tokens == 0
    arguments = ALONE.shard({"input_ids": torch.tensor([[5, 6, 7]]), **labels})
    assert not {"labels", "shift_labels", "num_items_in_batch"} & set(arguments)


def test_rows_without_tokens_leave_no_document() -> None:
    batch = padded(DOCUMENTS)
    batch["attention_mask"][1] = 0
    assert_same(to_stream(batch), build_stream([DOCUMENTS[0], *DOCUMENTS[2:]]))
    batch["attention_mask"][:] = 0
    assert_same(to_stream(batch), build_stream([]))
    empty = torch.zeros(2, 0, dtype=torch.long)
    assert_same(to_stream({"input_ids": empty, "labels": empty}), build_stream([]))


def test_small_integers() -> None:
    batch = {name: values.to(torch.int32) for name, values in padded(DOCUMENTS).items()}
    assert_same(to_stream(batch), build_stream(DOCUMENTS))


def test_what_collators_and_tokenizers_return() -> None:
    batch = transformers.BatchEncoding(padded(DOCUMENTS))
    assert_same(to_stream(batch), build_stream(DOCUMENTS))


IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 2]])
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"labels": IDS}, "input_ids is missing"),
    "embeddings": ({"inputs_embeds": IDS.float()[..., None]}, "input_ids is missing"),
    "3-D positions": (
        {"position_ids": torch.arange(4).expand(3, 2, 4)},
        r"position_ids has the shape \[3, 2, 4\], but input_ids \[2, 4\]; hfpar needs the same",
    ),
    "positions of one row": (
        {"position_ids": torch.arange(4)[None]},
        r"position_ids has the shape \[1, 4\], but input_ids \[2, 4\]",
    ),
    "labels of classes": (
        {"labels": torch.tensor([0, 1])},
        r"labels has the shape \[2\], but input_ids \[2, 4\]",
    ),
    "a 4-D mask": (
        {"attention_mask": torch.ones(2, 1, 4, 4)},
        r"attention_mask has the shape \[2, 1, 4, 4\], but input_ids \[2, 4\]",
    ),
    "documents in the mask": (
        {"attention_mask": torch.tensor([[1, 1, 2, 2], [1, 1, 1, 0]])},
        "attention_mask has values beside 0 and 1; tell documents apart by position_ids",
    ),
    "half a token": (
        {"attention_mask": torch.full((2, 4), 0.5)},
        "attention_mask has values beside 0 and 1; tell documents apart by position_ids",
    ),
    "a mask to add": (
        {"attention_mask": torch.tensor([[0.0, 0.0, 0.0, float("-inf")]] * 2)},
        "attention_mask has values beside 0 and 1",
    ),
    "images": (
        {"pixel_values": torch.zeros(2, 3, 8, 8)},
        "pixel_values can't be cut between ranks; what can: attention_mask, input_ids, labels, position_ids",
    ),
    "token types": ({"token_type_ids": torch.zeros_like(IDS)}, "token_type_ids can't be cut between ranks"),
    "shifted labels": ({"shift_labels": IDS}, "shift_labels can't be cut between ranks"),
    "documents without positions": (
        {"cu_seq_lens_q": torch.tensor([0, 3, 8])},
        "cu_seq_lens_q can't be cut between ranks",
    ),
    "tokens of no batch": (
        {"input_ids": torch.arange(4)},
        r"input_ids has the shape \[4\]; hfpar needs \[batch, t",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_by_name(name: str) -> None:
    entries, message = REFUSED[name]
    batch = entries if name in ("no tokens", "embeddings") else {"input_ids": IDS, **entries}
    with pytest.raises(ConfigError, match=f"^batch: {message}"):
        ALONE.shard(batch)


@pytest.mark.parametrize(
    ("name", "value", "starts"),
    [
        ("cu_seq_lens_q", torch.tensor([0, 3, 8]), "[0, 3]"),
        ("cu_seq_lens_k", torch.tensor([0, 3, 8]), "[0, 3]"),
        ("seq_idx", torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]]), "[0, 3]"),
    ],
)
def test_documents_that_contradict_the_positions(name: str, value: torch.Tensor, starts: str) -> None:
    """Positions that run on would make one document of two, without anybody noticing."""
    batch = {"input_ids": IDS.view(1, 8), "position_ids": torch.arange(8)[None], name: value}
    with pytest.raises(ConfigError) as caught:
        ALONE.shard(batch)
    assert str(caught.value) == (
        f"batch: by {name}, documents begin at {starts}, but by position_ids and attention_mask at [0]; count "
        "positions from 0 in each document"
    )


# The arguments, where a rank shares with nobody


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=PAD,
    )
    model = transformers.Qwen2ForCausalLM(config)
    sequence.apply(model, ALONE)
    return model


def written_out(model: Any, documents: Sequence[Sample]) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss over all labels, and its gradients, document by document."""
    model.zero_grad()
    count = sum(label != IGNORE_INDEX for document in documents for label in document.labels[1:])
    total = 0.0
    for document in documents:
        logits = model(input_ids=torch.tensor([document.input_ids])).logits[0, :-1]
        targets = torch.tensor(document.labels[1:])
        if len(targets):
            loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / max(count, 1)
            loss.backward()
            total += float(loss.detach())
    return total, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("make", [padded, packed])
def test_the_models_own_loss_is_the_mean_over_the_batchs_labels(model: Any, make: Any) -> None:
    expected, gradients = written_out(model, DOCUMENTS)
    model.zero_grad()
    arguments = ALONE.shard(make(DOCUMENTS))
    assert arguments["use_cache"] is False
    loss = model(**arguments).loss
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], msg=name)


@pytest.mark.parametrize("count", [7, torch.tensor(7)], ids=["int", "tensor"])
def test_label_tokens_of_a_whole_window(model: Any, count: Any) -> None:
    batch = padded(DOCUMENTS)
    mean = float(model(**ALONE.shard(batch)).loss)
    scaled = float(model(**ALONE.shard(batch, num_items_in_batch=count)).loss)
    labels = build_stream(DOCUMENTS).num_label_tokens
    assert scaled == pytest.approx(mean * labels / 7, rel=1e-6)


def test_a_batch_without_a_label_has_zero_gradients(model: Any) -> None:
    model.zero_grad()
    batch = padded(DOCUMENTS)
    batch["labels"][:] = IGNORE_INDEX
    loss = model(**ALONE.shard(batch)).loss
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert all(float(parameter.grad.abs().max()) == 0.0 for parameter in model.parameters())
