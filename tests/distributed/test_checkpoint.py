"""A resumed run goes on as if it had never stopped: losses, norms, weights and data; from whole checkpoints only."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from hfpar.config.schema import SFTConfig
from tests.distributed.spawn import (  # noqa: TID251
    ENGINES,
    build_llama,
    changed,
    engine_settings,
    make_layout,
    make_samples,
    spawn,
    train,
)

pytestmark = pytest.mark.timeout(900)  # one set of processes runs the cells of a whole module

LORA = {"lora_r": 4, "lora_dropout": 0.25, "modules_to_save": ["norm"]}
PADDED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
PACKED = {"max_tokens_per_batch": 30, "gradient_accumulation_steps": 2}
CELLS = {
    f"{engine}-{adapter}-{batching}": (engine, {}, lora | batch)
    for engine in ENGINES
    for adapter, lora in (("full", {}), ("lora", LORA))
    for batching, batch in (("padded", PADDED), ("packed", PACKED))
    if engine in ("ddp", "fsdp2") or (adapter == "full") == (batching == "padded")
} | {
    "fsdp2-one-file-full": ("fsdp2", {"state_dict_type": "FULL_STATE_DICT"}, PADDED),
    "fsdp2-one-file-lora": ("fsdp2", {"state_dict_type": "FULL_STATE_DICT"}, LORA | PACKED),
    "ddp-8bit": ("ddp", {}, PADDED | {"optim": "adamw_bnb_8bit"}),
    "zero2-8bit": ("zero2", {}, PADDED | {"optim": "adamw_bnb_8bit"}),
    "ddp-adafactor": ("ddp", {}, PADDED | {"optim": "adafactor"}),
    "fsdp2-sgd": ("fsdp2", {}, PADDED | {"optim": "sgd"}),
    "ddp-fp16": ("ddp", {"mixed_precision": "fp16"}, PADDED),
    "fsdp2-fp16": ("fsdp2", {"mixed_precision": "fp16"}, PADDED),
}
STEPS, SAVED = 6, 3
SAVED_BY_FOUR = {
    "ddp": ("ddp", {}, {}),
    "fsdp2": ("fsdp2", {}, {}),
    "fsdp2-one-file-lora": ("fsdp2", {"state_dict_type": "FULL_STATE_DICT"}, {"lora_r": 4}),
    "zero2": ("zero2", {}, {}),
}
RESUMED_BY_ANOTHER = {
    # name: (written by, by how many ranks, resumed by)
    "ddp to fsdp2": ("ddp-full-packed", 2, "fsdp2"),
    "fsdp2 to ddp": ("fsdp2-full-packed", 2, "ddp"),
    "ddp to fsdp2, lora": ("ddp-lora-padded", 2, "fsdp2"),
    "fsdp2 to ddp, lora": ("fsdp2-lora-padded", 2, "ddp"),
    "fsdp2 one file to ddp, lora": ("fsdp2-one-file-lora", 2, "ddp"),
    "ddp x 4 to ddp x 2": ("ddp", 4, "ddp"),
    "ddp x 4 to fsdp2 x 2": ("ddp", 4, "fsdp2"),
    "fsdp2 x 4 to fsdp2 x 2": ("fsdp2", 4, "fsdp2"),
    "fsdp2 x 4 to ddp x 2": ("fsdp2", 4, "ddp"),
    "fsdp2 one file x 4 to fsdp2 x 2, lora": ("fsdp2-one-file-lora", 4, "fsdp2"),
}
REFUSED = {
    # name: (written by, by how many ranks, resumed by, samples a step, the line)
    "zero x 4 to zero x 2": ("zero2", 4, "zero2", 4, "by 4 processes.*--num_processes 4"),
    "ddp to zero": ("ddp", 4, "zero1", 4, "by ddp, which zero1 can't read.*of ddp or fsdp2"),
    "zero to ddp": ("zero1-full-padded", 2, "ddp", 4, "by zero1, which ddp can't read.*of zero1"),
    "zero1 to zero2": ("zero1-full-padded", 2, "zero2", 4, "by zero1, which zero2 can't read.*of zero1"),
    "another batch": ("ddp", 4, "ddp", 2, "4 samples or packs a step, this run 2; set gradient_acc"),
}


def make_config(folder: Path, output_dir: Path, **values: Any) -> SFTConfig:
    return SFTConfig(
        model_name_or_path=str(folder / "model"),
        output_dir=str(output_dir),
        max_length=30,
        max_steps=STEPS,
        save_steps=SAVED,
        learning_rate=1e-2,
        warmup_steps=2,
        weight_decay=0.1,
        max_grad_norm=0.5,
        **values,
    )


def train_by_four(worker: Any, folder: Path) -> None:
    layout = make_layout(worker)
    for name, (engine, options, values) in SAVED_BY_FOUR.items():
        worker.send(name)
        config = make_config(
            folder, folder / f"{name} x 4" / "whole", per_device_train_batch_size=1, **values
        )
        train(config, engine_settings(engine, **options), make_samples(12), layout)


def train_by_two(worker: Any, folder: Path) -> dict[str, Any]:
    return {
        "same": resume_by_the_same(worker, folder),
        "another": resume_by_another(worker, folder),
        "refused": resume_refused(worker, folder),
        "whole": keep_whole_checkpoints(worker, folder / "whole"),
    }


def copy_checkpoint(source: Path, target: Path) -> None:
    """On rank 0, then wait for it."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        target.mkdir()
        shutil.copytree(source / "whole" / f"checkpoint-{SAVED}", target / f"checkpoint-{SAVED}")
    dist.barrier()


def resume_by_the_same(worker: Any, folder: Path) -> dict[str, Any]:
    layout = make_layout(worker)
    samples = make_samples(12)  # padded: step 3 is the last of epoch 0
    results = {}
    for name, (engine, options, values) in CELLS.items():
        worker.send(name)
        settings = engine_settings(engine, **options)
        config = make_config(folder, folder / f"{name} x 2" / "whole", **values)
        whole = train(config, settings, samples, layout)
        again = folder / f"{name} x 2" / "again"
        copy_checkpoint(again.parent, again)
        resumed = train(changed(config, output_dir=str(again), resume=True), settings, samples, layout)
        differing = [
            key for key, value in whole["weights"].items() if not value.equal(resumed["weights"][key])
        ]
        del whole["weights"], resumed["weights"]
        results[name] = {"differing": differing, "whole": whole, "resumed": resumed}
    return results


def resume_by_another(worker: Any, folder: Path) -> None:
    for number, (source, ranks, engine) in enumerate(RESUMED_BY_ANOTHER.values()):
        worker.send(source)
        values = CELLS[source][2] if ranks == 2 else SAVED_BY_FOUR[source][2] | PADDED
        again = folder / f"another-{number}"
        copy_checkpoint(folder / f"{source} x {ranks}", again)
        config = make_config(folder, again, resume=True, **values)
        train(config, engine_settings(engine), make_samples(12), make_layout(worker))


def resume_refused(worker: Any, folder: Path) -> dict[str, str]:
    from hfpar.errors import ConfigError
    from hfpar.train.checkpoint import load_checkpoint

    lines = {}
    for name, (source, ranks, engine, global_batch, _) in REFUSED.items():
        worker.send(name)
        checkpoint = folder / f"{source} x {ranks}" / "whole" / f"checkpoint-{SAVED}"

        class Stand:
            pass

        stand: Any = Stand()
        stand.name = engine
        try:
            load_checkpoint(stand, checkpoint, make_layout(worker), global_batch=global_batch)
        except ConfigError as error:
            lines[name] = str(error)
    again = folder / "other samples"
    copy_checkpoint(folder / "ddp x 4", again)
    config = make_config(folder, again, resume=True, **PADDED)
    try:
        train(config, engine_settings("ddp"), make_samples(12, seed=1), make_layout(worker))
    except ConfigError as error:
        lines["other samples"] = str(error)
    return lines


def keep_whole_checkpoints(worker: Any, folder: Path) -> list[Any]:
    """What is kept and what is found, step by step; the same on both ranks."""
    import torch.distributed as dist

    from hfpar.train.checkpoint import TrainerState, last_checkpoint, save_checkpoint, whole_checkpoints

    class Writer:
        """Writes what an engine might."""

        name = "ddp"

        def save_state(self, folder: Path) -> None:
            (folder / "shards").mkdir(exist_ok=True)
            (folder / "shards" / f"{worker.rank}").write_bytes(b"x" * 1000)

    layout, writer = make_layout(worker), Writer()

    def save(step: int, limit: int | None) -> list[str]:
        state = TrainerState(
            step=step,
            epoch=0,
            step_in_epoch=step,
            num_tokens=0,
            num_label_tokens=0,
            global_batch=1,
            engine="ddp",
            world_size=2,
        )
        save_checkpoint(writer, state, folder, layout, save_total_limit=limit)  # type: ignore[arg-type]
        kept = [path.name for path in whole_checkpoints(folder)]
        dist.barrier()
        return kept

    def spoil(change: Any) -> Any:
        if worker.rank == 0:
            change()
        dist.barrier()
        found, skipped = last_checkpoint(folder, layout)
        dist.barrier()
        return found and found.name, skipped

    seen = [save(step, 2) for step in (8, 9, 10)]
    return [
        seen,
        spoil(lambda: None),
        spoil(lambda: (folder / ".checkpoint-11.partial").mkdir()),
        spoil(lambda: (folder / "checkpoint-12").mkdir()),
        spoil(lambda: (folder / "checkpoint-10" / "shards" / "1").write_bytes(b"x")),
        save(10, 1),
        spoil(lambda: (folder / "checkpoint-10" / "shards" / "0").unlink()),
        sorted(path.name for path in folder.iterdir()),
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("checkpoint")
    build_llama(folder / "model", intermediate_size=130)  # 8-bit optimizers leave weights below 4096 alone
    spawn(train_by_four, 4, folder, folder)
    return folder, spawn(train_by_two, 2, folder, folder)


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "epoch", "loss", "grad_norm", "learning_rate", "num_tokens", "num_label_tokens")
    return [{key: line[key] for key in keys} for line in lines if "loss" in line]


@pytest.mark.parametrize("name", CELLS)
def test_a_resumed_run_equals_an_uninterrupted_one(runs: tuple[Path, list[Any]], name: str) -> None:
    folder, results = runs
    whole, resumed = rows(folder / f"{name} x 2" / "whole"), rows(folder / f"{name} x 2" / "again")
    assert [row["step"] for row in resumed] == list(range(SAVED + 1, STEPS + 1))
    assert resumed == whole[SAVED:]
    for result in results:
        assert result["same"][name]["differing"] == []
        assert result["same"][name]["resumed"] == result["same"][name]["whole"]


def test_the_loss_scale_of_fp16_is_resumed(runs: tuple[Path, list[Any]]) -> None:
    _, results = runs
    for name in ("ddp-fp16", "fsdp2-fp16"):
        scale = results[0]["same"][name]["resumed"]["scale"]
        assert scale < 65536  # it has changed, so it isn't what a fresh scaler has


@pytest.mark.parametrize("name", RESUMED_BY_ANOTHER)
def test_ddp_and_fsdp2_read_each_other(runs: tuple[Path, list[Any]], name: str) -> None:
    folder, _ = runs
    source, ranks, _ = RESUMED_BY_ANOTHER[name]
    resumed = rows(folder / f"another-{list(RESUMED_BY_ANOTHER).index(name)}")
    whole = rows(folder / f"{source} x {ranks}" / "whole")[SAVED:]
    assert len(resumed) == STEPS - SAVED
    for row, expected in zip(resumed, whole, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_other_checkpoints_are_refused_with_what_works(runs: tuple[Path, list[Any]], name: str) -> None:
    _, results = runs
    for result in results:
        line = result["refused"][name]
        assert re.search(REFUSED[name][-1], line) and "\n" not in line


def test_other_samples_are_refused(runs: tuple[Path, list[Any]]) -> None:
    _, results = runs
    for result in results:
        assert "checkpoint-3 was trained on other samples; " in result["refused"]["other samples"]


def test_only_whole_checkpoints_are_kept_and_found(runs: tuple[Path, list[Any]]) -> None:
    folder, results = runs
    whole = folder / "whole"
    for result in results:
        seen, first, unfinished, empty, cut, again, missing, files = result["whole"]
        assert seen == [
            ["checkpoint-8"],
            ["checkpoint-8", "checkpoint-9"],
            ["checkpoint-9", "checkpoint-10"],
        ]
        assert first == ("checkpoint-10", [])
        lines = [
            f"{whole}/.checkpoint-11.partial: it was never finished",
            f"{whole}/checkpoint-12: it has no trainer_state.json",
        ]
        assert unfinished == ("checkpoint-10", lines[:1])
        assert empty == ("checkpoint-10", lines)
        short = f"{whole}/checkpoint-10: it has 1 of the 1000 bytes of shards/1"
        assert cut == ("checkpoint-9", [*lines, short])
        assert again == ["checkpoint-10"]
        assert missing == (None, [*lines, f"{whole}/checkpoint-10: it has no shards/0"])
        assert files == [".checkpoint-11.partial", "checkpoint-10", "checkpoint-12"]
