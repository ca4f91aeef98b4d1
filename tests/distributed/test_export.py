"""What a run exports is loaded by Transformers and PEFT in another process, with the logits that were trained."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hfpar.config.schema import SFTConfig
from tests.distributed.spawn import (  # noqa: TID251
    ENGINES,
    engine_settings,
    make_layout,
    make_samples,
    make_trainer,
    spawn,
)

pytestmark = pytest.mark.timeout(900)  # one set of processes runs the cells of a whole module

LORA = {"lora_r": 4, "lora_alpha": 32.0}
ADAPTERS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": LORA,
    "lora-head": LORA | {"modules_to_save": ["lm_head"]},
}
CELLS = (
    {
        f"{engine}-{adapter}-{ties}": (engine, values)
        for engine in ENGINES
        for adapter, values in ADAPTERS.items()
        for ties in ("tied", "untied")
    }
    | {
        f"{engine}-{adapter}-bf16": (engine, {"dtype": "bfloat16"} | ADAPTERS[adapter])
        for engine in ("ddp", "fsdp2", "zero3")
        for adapter in ("full", "lora")
    }
    | {
        f"{engine}-lora-embedding-tied": (engine, LORA | {"modules_to_save": ["embed_tokens"]})
        for engine in ("ddp", "fsdp2", "zero3")
    }
)

LOAD = """
import json, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import torch
import transformers
from peft import AutoPeftModelForCausalLM
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)
for folder in map(Path, sys.argv[1:]):
    is_peft = (folder / "adapter_config.json").is_file()
    kind = AutoPeftModelForCausalLM if is_peft else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype="auto").eval()
    inner = model.get_base_model() if is_peft else model
    tokens = torch.load(folder.parent / f"{folder.name}.pt")
    with torch.no_grad():
        logits = model(input_ids=tokens["input_ids"]).logits
    error = (logits - tokens["logits"]).abs().max() / tokens["logits"].abs().max()
    files = [path for path in folder.glob("*.safetensors")]
    names = {}
    for path in files:
        with safe_open(path, "pt") as file:
            names |= {name: str(file.get_tensor(name).dtype) for name in file.keys()}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    print(json.dumps({
        "folder": folder.name,
        "error": float(error),
        "moved": float((tokens["before"] - tokens["logits"]).abs().max()),
        "tied": inner.get_output_embeddings().weight is inner.get_input_embeddings().weight,
        "dtype": str(inner.dtype),
        "names": names,
        "chat": tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False),
        "generation": None if is_peft else GenerationConfig.from_pretrained(folder).max_new_tokens,
    }))
"""


def build_model(folder: Path, *, tied: bool, dtype: str = "float32") -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from hfpar.models.tiny import build_tiny_model

    build_tiny_model(
        folder,
        hidden_size=32,
        intermediate_size=60,
        num_hidden_layers=2,
        vocab_size=301,
        initializer_range=0.1,
    )
    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = tied
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.generation_config = GenerationConfig.from_pretrained(folder)
    model.save_pretrained(folder)


def export_all(worker: Any, folder: Path) -> None:
    import torch
    from transformers import AutoTokenizer

    from hfpar.data.stream import build_stream
    from hfpar.parallel.layout import Layout
    from hfpar.parallel.sequence import shard_stream
    from hfpar.train.export import export_model
    from hfpar.train.step import model_inputs

    layout = make_layout(worker)
    samples = make_samples(8)
    stream = shard_stream(build_stream([samples[1]]), Layout(rank=0, world_size=1))
    inputs = model_inputs(stream, torch.device("cpu"))
    del inputs["labels"]

    def logits_of(engine: Any) -> torch.Tensor:
        engine.module.eval()
        with engine.inference():
            result: torch.Tensor = engine.forward(**inputs).logits.clone()
        engine.module.train()
        return result

    for name, (engine, values) in CELLS.items():
        worker.send(name)
        base = folder / name.rpartition("-")[2]
        config = SFTConfig(
            model_name_or_path=os.path.relpath(base),
            output_dir=str(folder / name),
            per_device_train_batch_size=2,
            max_steps=2,
            learning_rate=3e-2,
            lr_scheduler_type="constant",
            **values,
        )
        with make_trainer(config, engine_settings(engine), samples, layout) as trainer:
            before = logits_of(trainer.engine)
            for _ in range(2):
                trainer.train(None)
            logits = logits_of(trainer.engine)
            export_model(trainer.engine, AutoTokenizer.from_pretrained(base), folder / name, layout)
        if worker.rank == 0:
            results = {"input_ids": inputs["input_ids"], "logits": logits, "before": before}
            torch.save(results, folder / f"{name}.pt")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("export")
    build_model(folder / "tied", tied=True)
    build_model(folder / "untied", tied=False)
    build_model(folder / "bf16", tied=True, dtype="bfloat16")
    spawn(export_all, 2, folder, folder)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    process = subprocess.run(
        [sys.executable, "-c", LOAD, *(str(folder / name) for name in CELLS)],
        cwd=elsewhere,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = [json.loads(line) for line in process.stdout.splitlines()]
    return folder, {result["folder"]: result for result in found}


@pytest.mark.parametrize("name", CELLS)
def test_another_process_gets_the_same_logits(exported: tuple[Path, dict[str, Any]], name: str) -> None:
    folder, results = exported
    _, values = CELLS[name]
    result, adapter = results[name], name.split("-", 1)[1]
    bf16 = name.endswith("-bf16")
    assert result["moved"] > 0.1  # the base model wouldn't do
    assert result["error"] < (3e-2 if bf16 else 1e-5)
    assert result["dtype"] == ("torch.bfloat16" if bf16 else "torch.float32")
    assert "hi" in result["chat"] and "<|im_start|>" in result["chat"]
    forbidden = ("_fsdp", "module.", "default", "base_layer", "original_module", "_checkpoint_wrapped")
    bare = [key.removeprefix("base_model.model.") for key in result["names"]]
    assert not [key for key in bare if any(part in key for part in forbidden)]
    files = sorted(path.name for path in (folder / name).iterdir() if path.is_file())
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= set(files)
    if not adapter.startswith("lora"):
        assert result["generation"] == 64
        assert result["tied"] is not adapter.endswith("-untied")
        assert ("lm_head.weight" in result["names"]) is not result["tied"]
        assert (
            json.loads((folder / name / "config.json").read_text())["tie_word_embeddings"] is result["tied"]
        )
        assert set(result["names"].values()) == {result["dtype"]}
    else:
        assert not {"config.json", "model.safetensors"} & set(files)
        assert "torch.float32" in result["names"].values()


def checkpoint_of(folder: Path) -> int | None:
    """Which model a folder holds, by its weights; None if none can be loaded. Fails on a mixture."""
    from safetensors.torch import load_file

    if not (folder / "config.json").is_file():
        return None
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    values = {int(load_file(folder / file)[name].flatten()[0]) for name, file in index.items()}
    assert len(values) == 1, f"weights of {values}"
    return values.pop()


@pytest.mark.parametrize("has_old", [True, False])
def test_an_export_that_is_stopped_leaves_one_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_old: bool
) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from hfpar.train import export

    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    )

    def write(value: int, folder: Path) -> Path:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        model.save_pretrained(folder, max_shard_size="60KB")
        return folder

    replace = os.replace
    seen = []
    for allowed in range(100):
        output_dir = tmp_path / str(allowed)
        output_dir.mkdir()
        if has_old:
            export._publish(write(1, output_dir / ".export.partial"), output_dir)
            export._publish(write(2, output_dir / ".export.partial"), output_dir)
        left = allowed

        def stop(source: Any, target: Any) -> None:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            replace(source, target)

        partial = write(3, output_dir / ".export.partial")
        monkeypatch.setattr(os, "replace", stop)
        try:
            export._publish(partial, output_dir)
        except KeyboardInterrupt:
            stopped = True
        else:
            stopped = False
        monkeypatch.setattr(os, "replace", replace)
        seen.append(checkpoint_of(output_dir))
        if not stopped:
            break
    old = 2 if has_old else None
    assert seen[0] == old and seen[-1] == 3
    assert seen == sorted(seen, key=lambda value: value == 3) and set(seen) == {old, 3}
    shards = set(json.loads((output_dir / export.INDEX_FILE).read_text())["weight_map"].values())
    assert {path.name for path in output_dir.glob("*.safetensors")} == shards and len(shards) > 2
