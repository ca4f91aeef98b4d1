"""A merge holds about a file of its output in memory, however large the model is."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from hfpar.models.tiny import build_tiny_model

MIB = 2**20
CODE = """
from pathlib import Path
from hfpar.exporting.main import main

def peak():  # not ru_maxrss, which begins with that of the process that started this one
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024

def merge(name):
    main([f"{name}_adapter", "--merge", "--output", f"{name}_merged", "--max_shard_size", "16MiB"])

merge("small")  # whatever is imported and kept
before = peak()
merge("large")
print("grown by", peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="measured as Linux does")
def test_peak_memory(tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "tiny", hidden_size=32, num_hidden_layers=1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    for name, num_layers in (("small", 1), ("large", 24)):
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=num_layers,
            num_attention_heads=8,
            pad_token_id=None,
            eos_token_id=1,
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(tmp_path / name, max_shard_size="16MB")
        tokenizer.save_pretrained(tmp_path / name)
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
        adapted.peft_config["default"].base_model_name_or_path = name
        adapted.save_pretrained(tmp_path / f"{name}_adapter")
    files = list((tmp_path / "large").glob("model-*.safetensors"))
    size = sum(path.stat().st_size for path in files) / MIB
    assert size > 210 and len(files) > 12
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=240)
    grown = int(done.stdout.rpartition("grown by")[2])
    assert grown < 90, f"{grown} MiB for a model of {size:.0f} MiB in files of 16 MiB"
