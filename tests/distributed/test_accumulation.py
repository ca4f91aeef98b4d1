"""However a global batch is cut into ranks and micro-batches, the step is that of one plain process."""

from pathlib import Path
from typing import Any

import pytest

from hfpar.config.schema import SFTConfig
from tests.distributed.spawn import (  # noqa: TID251
    ENGINES,
    build_llama,
    engine_settings,
    make_layout,
    make_samples,
    make_trainer,
    spawn,
)

pytestmark = pytest.mark.timeout(900)  # one set of processes runs the cells of a whole module

CELLS: dict[str, tuple[int, str, int, int, int]] = {
    # name: (ranks, samples, per_device_train_batch_size, gradient_accumulation_steps, steps)
    "1 x 8 x 1": (1, "eight", 8, 1, 1),
    "1 x 1 x 8": (1, "eight", 1, 8, 1),
    "2 x 2 x 2": (2, "eight", 2, 2, 1),
    "2 x 1 x 4": (2, "eight", 1, 4, 1),
    "window of 4, 4, 2": (1, "ten", 1, 4, 3),
    "window of 8, 2": (2, "ten", 1, 4, 2),
    "unequal labels": (2, "unequal", 1, 1, 3),
    "a rank without samples": (2, "nine", 1, 2, 3),
    "a step without labels": (2, "some without labels", 1, 1, 4),
}
OPTIMIZER = {"lr": 0.3, "momentum": 0.0}


def samples_of(name: str) -> list[Any]:
    from hfpar.data.stream import Sample

    counts = {"eight": 8, "nine": 9, "ten": 10}
    if name in counts:
        return make_samples(counts[name], seed=4)
    if name == "unequal":  # 1 label or many
        tokens = [list(range(3, 3 + length)) for length in (20, 24, 22, 19, 23, 21)]
        keep = (1, 19, 1, 18, 20, 1)
        return [
            Sample(row, [-100] * (len(row) - labels) + row[len(row) - labels :])
            for row, labels in zip(tokens, keep, strict=True)
        ]
    # The first token of a document is nobody's target: five of these eight have nothing to learn.
    rows = [list(range(5 + number, 15 + number)) for number in range(8)]
    return [Sample(row, row if number < 3 else [row[0]] + [-100] * 9) for number, row in enumerate(rows)]


def config_of(folder: Path, cell: str) -> SFTConfig:
    _, _, size, accumulation, steps = CELLS[cell]
    return SFTConfig(
        model_name_or_path=str(folder / "model"),
        output_dir=str(folder / cell),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        max_steps=steps,
        learning_rate=OPTIMIZER["lr"],
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.5,
    )


def train_cells(worker: Any, folder: Path) -> dict[tuple[str, str], Any]:
    results = {}
    for name, (ranks, samples, *_) in CELLS.items():
        if ranks != worker.world_size:
            continue
        for engine in ENGINES:
            worker.send((name, engine))
            results[name, engine] = train_cell(worker, folder, name, engine, samples_of(samples))
    return results


def train_cell(worker: Any, folder: Path, name: str, engine: str, samples: list[Any]) -> dict[str, Any]:
    """Every step's figures, the gradients of the first step and the weights after the last."""
    import torch

    seen: dict[str, Any] = {"steps": [], "gradients": None, "empty": 0}
    config = config_of(folder / engine, name)
    config = SFTConfig(**{**vars(config), "model_name_or_path": str(folder / "model")})
    with make_trainer(config, engine_settings(engine), samples, make_layout(worker)) as trainer:
        step = trainer.engine.step

        def keep(max_grad_norm: float | None) -> float:
            if seen["gradients"] is None:
                seen["gradients"] = {key: value.clone() for key, value in trainer.engine.gradients()}
            norm: float = step(max_grad_norm)
            seen["steps"].append(norm)
            return norm

        trainer.engine.step = keep
        stream = trainer.loader._stream

        def count(indices: list[int]) -> Any:
            seen["empty"] += not indices
            return stream(indices)

        trainer.loader._stream = count
        trainer.train(None)
        seen["weights"] = {key: value.clone() for key, value in trainer.engine.parameters()}
        seen["num_steps_without_labels"] = trainer.position.num_steps_without_labels
    if worker.rank == 0:
        from hfpar.train.progress import read_metrics

        rows = read_metrics(Path(str(config.output_dir)) / "metrics.jsonl")
        seen["losses"] = [row["loss"] for row in rows]
    assert all(torch.isfinite(value).all() for value in seen["weights"].values())
    return seen


def plain_training(folder: Path, cell: str) -> dict[str, Any]:
    """The same steps in one process: document after document, whole logits, gradients divided by all labels."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    from hfpar.data.plan import plan_epoch

    ranks, name, size, accumulation, num_steps = CELLS[cell]
    samples = samples_of(name)
    plan = plan_epoch(
        [len(sample.input_ids) for sample in samples],
        seed=SFTConfig().seed,
        epoch=0,
        dp_size=ranks,
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=size,
        max_tokens_per_batch=None,
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), **OPTIMIZER)
    losses, norms, gradients = [], [], None
    assert len(plan.steps) == num_steps
    for step in plan.steps:
        batch = [samples[index] for window in step for rank in window for index in rank]
        num_labels = sum(label != -100 for sample in batch for label in sample.labels[1:])
        total = 0.0
        for sample in batch:
            logits = model(input_ids=torch.tensor([sample.input_ids])).logits[0, :-1]
            loss = cross_entropy(logits, torch.tensor(sample.labels[1:]), reduction="sum", ignore_index=-100)
            loss = loss / max(num_labels, 1)
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        if gradients is None:
            gradients = {key: p.grad.clone() for key, p in model.named_parameters()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    weights = {key: p.detach() for key, p in model.named_parameters()}
    return {"losses": losses, "steps": norms, "gradients": gradients, "weights": weights}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    folder = tmp_path_factory.mktemp("accumulation")
    build_llama(folder / "model")
    results: dict[Any, Any] = {cell: plain_training(folder, cell) for cell in CELLS}
    for ranks in (1, 2):
        of_ranks = spawn(train_cells, ranks, folder, folder)
        for key, result in of_ranks[0].items():
            results[key] = [of_rank[key] for of_rank in of_ranks]
            assert result["losses"]
    results["log"] = [path.read_text() for path in sorted(folder.glob("ranks_*/rank?.log"))]
    return results


def relative_error(found: dict[str, Any], expected: dict[str, Any]) -> float:
    assert found.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    return max(float((found[key] - value).abs().max()) for key, value in expected.items()) / max(
        largest, 1e-12
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("cell", CELLS)
def test_every_cut_is_the_same_step(trained: dict[Any, Any], cell: str, engine: str) -> None:
    expected = trained[cell]
    for result in trained[cell, engine]:
        assert result["steps"] == pytest.approx(expected["steps"], rel=1e-5, abs=1e-12)
        assert relative_error(result["gradients"], expected["gradients"]) < 1e-5
        assert relative_error(result["weights"], expected["weights"]) < 1e-5
    assert trained[cell, engine][0]["losses"] == pytest.approx(expected["losses"], rel=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_cells_are_what_they_are_called(trained: dict[Any, Any], engine: str) -> None:
    assert [result["empty"] > 0 for result in trained["a rank without samples", engine]] == [False, True]
    assert trained["1 x 8 x 1"]["losses"] == pytest.approx(trained["2 x 2 x 2"]["losses"])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_without_labels_is_counted(trained: dict[Any, Any], engine: str) -> None:
    cell = "a step without labels"
    without = [number for number, loss in enumerate(trained[cell]["losses"]) if loss == 0]
    assert without
    for result in trained[cell, engine]:
        assert result["num_steps_without_labels"] == len(without)
        assert [result["steps"][number] for number in without] == [0.0] * len(without)


def test_a_step_without_labels_is_said_once_by_rank_0(trained: dict[Any, Any]) -> None:
    counts = [log.count("not one label in the global batch") for log in trained["log"]]
    without = trained["a step without labels"]["losses"].count(0.0)
    assert sorted(counts) == [0, 0, without * len(ENGINES)]
