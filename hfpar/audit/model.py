"""The audited model: found and checked, hashed, and loaded whole onto each rank."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from hfpar.attention import interface
from hfpar.audit.generate import context_length
from hfpar.audit.results import ModelInfo
from hfpar.config.audit_schema import AuditConfig
from hfpar.config.engine import DDPSettings
from hfpar.errors import ConfigError, first_line
from hfpar.exporting.run import ADAPTER_CONFIG, open_run
from hfpar.models import load
from hfpar.models.quantization import (
    Quantization,
    QuantizationChoice,
    check_device,
    find_quantization,
    quantize_skeleton,
)
from hfpar.models.quantized_fill import Sharers
from hfpar.models.slices import Filling, fill_from_checkpoint
from hfpar.train.probe import check_family

_WEIGHT_FILES = ("*.safetensors", "*.bin")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "merges.txt")


@dataclass(frozen=True)
class ModelSettings:
    """What the user says of a model."""

    name: str
    base: str | None = None
    dtype: str = "auto"
    attn_implementation: str = "auto"
    trust_remote_code: bool = False


def model_settings(config: AuditConfig) -> ModelSettings:
    """What the config says of the audited model."""
    assert config.model_name_or_path is not None
    return ModelSettings(
        config.model_name_or_path,
        config.base,
        config.dtype,
        config.attn_implementation,
        config.trust_remote_code,
    )


@dataclass(frozen=True)
class ModelSource:
    """A model before its weights are loaded."""

    settings: ModelSettings
    folder: Path
    """Of the model, or of an adapter's base."""
    adapter: Path | None
    base_name: str | None
    config: PretrainedConfig
    tokenizer: Any
    tokenizer_folder: Path
    choice: QuantizationChoice
    """How an adapter's base was held while it was trained."""

    @property
    def max_length(self) -> int | None:
        """Most tokens that the model can read; None: its config doesn't say."""
        return context_length(self.config)


@contextlib.contextmanager
def open_model(settings: ModelSettings) -> Iterator[ModelSource]:
    """Find a model's files; an adapter that a killed run left in its last checkpoint is there until the end.

    Raises:
        ConfigError: no such model, no tokenizer, not a causal language model, an adapter without its base.
    """
    folder = Path(settings.name).expanduser()
    if not (folder / ADAPTER_CONFIG).is_file() and (
        not folder.is_dir() or (folder / "config.json").is_file()
    ):
        folder = load.resolve_folder(settings.name)
    is_adapter = (folder / ADAPTER_CONFIG).is_file() or not (folder / "config.json").is_file()
    trust = settings.trust_remote_code
    if not is_adapter:
        if settings.base is not None:
            raise ConfigError(f"base: {settings.base}, but {folder} is a whole model; leave base out")
        config = load.load_model_config(folder, trust_remote_code=trust)
        tokenizer = load.load_tokenizer(folder, trust_remote_code=trust)
        yield ModelSource(settings, folder, None, None, config, tokenizer, folder, QuantizationChoice())
        return
    with open_run(folder, settings.base, trust_remote_code=trust) as run:
        choice = QuantizationChoice()
        if run.config is not None:
            choice = QuantizationChoice(
                run.config.quantization,
                run.config.bnb_4bit_compute_dtype,
                run.config.bnb_4bit_use_double_quant,
                skip_modules=run.config.llm_int8_skip_modules,
            )
        yield ModelSource(
            replace(settings, trust_remote_code=run.trust_remote_code),
            run.base,
            run.adapter,
            run.base_name,
            run.base_config,
            run.tokenizer,
            run.tokenizer_folder,
            choice,
        )


def fetch_model(settings: ModelSettings) -> None:
    """Download what is missing. For one rank, before the others look.

    Raises:
        ConfigError: as `open_model`.
    """
    with open_model(settings):
        pass


@dataclass(frozen=True)
class LoadedModel:
    """A model that can be asked."""

    model: Any
    info: ModelInfo
    packs: bool
    """Whether several texts may share a stream."""
    warnings: list[str]


def load_audited(source: ModelSource, device: torch.device) -> LoadedModel:
    """Load the weights onto this rank's device.

    Quantized bases are held as hfpar's training holds them: what a token is given doesn't depend on its batch.

    Raises:
        ConfigError: weights that can't be read, or that don't belong to the config.
    """
    settings = source.settings
    dtype = _dtype(settings.dtype, source.config, device)
    quantization = find_quantization(source.choice, source.config, DDPSettings(), dtype)
    if quantization is not None:
        check_device(quantization.method, device)
    packs, warnings = _can_pack(source)
    interface.register()
    # Transformers' choice for a family that hasn't been checked: some have no attention at all.
    attention = interface.interface_name(settings.attn_implementation) if packs else None
    try:
        model = _load(source, dtype, attention, quantization, device)
    except (
        ImportError,
        ValueError,
        RuntimeError,
    ) as error:  # what Transformers and PEFT raise of a checkpoint
        raise ConfigError(f"model_name_or_path: {settings.name}: {first_line(error)}") from error
    return LoadedModel(model.eval(), _describe(source, model, dtype, quantization), packs, warnings)


def _dtype(name: str, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """`auto` is float32 on a CPU, which is slower in anything else."""
    if name == "auto" and device.type == "cpu":
        return torch.float32
    return load.weights_dtype(name, config)


def _can_pack(source: ModelSource) -> tuple[bool, list[str]]:
    trust = source.settings.trust_remote_code
    try:
        check_family(source.config, trust_remote_code=trust)
    except ConfigError as error:
        reason = str(error).removeprefix("model_name_or_path: ").partition(";")[0]
        return False, [f"{reason}: texts are read one by one, without hfpar's attention"]
    return True, []


def _load(
    source: ModelSource,
    dtype: torch.dtype,
    attention: str | None,
    quantization: Quantization | None,
    device: torch.device,
) -> Any:
    options = {
        "attn_implementation": attention,
        "trust_remote_code": source.settings.trust_remote_code,
    }
    if quantization is None:
        model = load.whole_model(
            AutoModelForCausalLM, source.folder, config=source.config, dtype=dtype, **options
        )
    else:
        model = load.skeleton(source.config, dtype=dtype, **options)
        quantize_skeleton(model, quantization)
        fill_from_checkpoint(
            model, source.folder, Filling(torch.device("cpu"), device, 0, Sharers(None, None))
        )
    if source.adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(source.adapter))
    return model.to(device)


# What the report says of it


def _describe(
    source: ModelSource, model: Any, dtype: torch.dtype, quantization: Quantization | None
) -> ModelInfo:
    return ModelInfo(
        name=source.settings.name,
        architecture=(source.config.architectures or [type(model).__name__])[0],
        num_parameters=model.num_parameters(),
        dtype=str(dtype).removeprefix("torch."),
        sha256=None,
        tokenizer_sha256=None,
        base=source.base_name,
        quantization=quantization.method if quantization else None,
    )


def hash_files(folder: Path, patterns: tuple[str, ...]) -> str:
    """SHA-256 over files in order of name: their names and contents."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        digest.update(f"{path.name}\0".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def hash_model(source: ModelSource) -> tuple[str, str]:
    """Of the weights (an adapter's after its base's), and of the tokenizer."""
    weights = hash_files(source.folder, _WEIGHT_FILES)
    if source.adapter is not None:
        own = hash_files(source.adapter, _WEIGHT_FILES)
        weights = hashlib.sha256(f"{weights}{own}".encode()).hexdigest()
    return weights, hash_files(source.tokenizer_folder, _TOKENIZER_FILES)
