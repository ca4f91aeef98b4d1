"""The model of a run, in the order in which it is put together."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from hfpar.attention import interface
from hfpar.config.engine import EngineSettings, FSDP2Settings
from hfpar.config.schema import SFTConfig
from hfpar.errors import ConfigError
from hfpar.models import adapters, load
from hfpar.models.quantization import Quantization, QuantizationChoice, check_device, find_quantization
from hfpar.models.token_rows import Fresh
from hfpar.parallel import sequence, tensor
from hfpar.parallel.layout import Layout
from hfpar.train import loss


@dataclass(frozen=True)
class TokenRows:
    """Tokens whose own rows are trained beside adapters."""

    embedding: tuple[int, ...] = ()
    """The head's, too, where the two are tied."""
    head: tuple[int, ...] = ()
    """Of a head with a matrix of its own."""
    fresh_embedding: Fresh | None = field(default=None, compare=False)
    fresh_head: Fresh | None = field(default=None, compare=False)
    """Of these rows, those that don't begin as the checkpoint has them."""

    @classmethod
    def of(cls, config: SFTConfig) -> TokenRows:
        """Those that the config names by number."""
        return cls(embedding=tuple(config.trainable_token_indices or ()))


@dataclass(frozen=True)
class ModelSource:
    """A model before its weights are loaded."""

    folder: Path
    config: PretrainedConfig
    tokenizer: Any

    @property
    def pad_token_id(self) -> int:
        """What padding is made of before it is removed again; any token would do."""
        return self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0


def download(config: SFTConfig) -> None:
    """Bring a hub model into the local cache; nothing for a folder. For one rank, before the others look."""
    assert config.model_name_or_path is not None
    load.resolve_folder(config.model_name_or_path)


def find_model(config: SFTConfig) -> ModelSource:
    """Everything about the model but its weights.

    Raises:
        ConfigError: no such model, no tokenizer, not a causal language model.
    """
    assert config.model_name_or_path is not None
    folder = load.resolve_folder(config.model_name_or_path)
    return ModelSource(
        folder,
        load.load_model_config(folder, trust_remote_code=config.trust_remote_code),
        load.load_tokenizer(
            folder, chat_template=config.chat_template, trust_remote_code=config.trust_remote_code
        ),
    )


def choose_quantization(
    config: SFTConfig, source: ModelSource, settings: EngineSettings, device: torch.device
) -> Quantization | None:
    """How the frozen base is held in few bits; None: it isn't.

    Raises:
        ConfigError: a combination that can't be trained.
    """
    choice = QuantizationChoice(
        config.quantization,
        config.bnb_4bit_compute_dtype,
        config.bnb_4bit_use_double_quant,
        config.bnb_4bit_quant_storage,
        config.llm_int8_skip_modules,
    )
    dtype = load.weights_dtype(config.dtype, source.config)
    quantization = find_quantization(choice, source.config, settings, dtype)
    if quantization is not None:
        check_device(quantization.method, device)
        if not config.lora_r:
            raise ConfigError(
                f"lora_r: 0, but the base is quantized ({quantization.method}) and can't be trained itself; set "
                "lora_r, such as 16, or use the unquantized model"
            )
    return quantization


def build_model(
    config: SFTConfig,
    source: ModelSource,
    settings: EngineSettings,
    layout: Layout,
    quantization: Quantization | None = None,
    token_rows: TokenRows | None = None,
) -> Any:
    """Load the weights this rank keeps, then adapters, then the patches: checkpointing, sequence, tensor, loss.

    Args:
        config: the run's.
        source: the model's folder, config and tokenizer.
        settings: the engine's.
        layout: the rank's place.
        quantization: how the frozen base is held in few bits; None: it isn't.
        token_rows: of the embedding and the head, to be trained beside adapters.

    Raises:
        ConfigError: a model or a combination that hfpar can't train.
    """
    interface.register()
    if config.lora_r:
        choices = lora_choices(config, token_rows or TokenRows.of(config))
        adapters.check_adapters(
            load.skeleton(source.config, trust_remote_code=config.trust_remote_code), choices
        )
    model = load.load_model(
        source.folder,
        source.config,
        settings=settings,
        dtype=load.weights_dtype(config.dtype, source.config),
        attn_implementation=interface.interface_name(config.attn_implementation),
        trust_remote_code=config.trust_remote_code,
        tp_size=layout.tp_size,
        quantization=quantization,
    )
    is_on = config.gradient_checkpointing
    if is_on is None:
        is_on = quantization is not None and model.supports_gradient_checkpointing
    if config.gradient_checkpointing and not model.supports_gradient_checkpointing:
        raise ConfigError(f"gradient_checkpointing: true, but {type(model).__name__} has none; leave it out")
    if is_on or (isinstance(settings, FSDP2Settings) and settings.activation_checkpointing):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.lora_r:
        model = adapters.add_adapters(model, choices, seed=config.seed, folder=source.folder)
        if isinstance(settings, FSDP2Settings):
            _check_one_dtype(model, config)
        # An adapter names its base; a relative path would only be right in this run's working folder.
        is_folder = source.folder == Path(str(config.model_name_or_path)).expanduser()
        base = str(source.folder.resolve()) if is_folder else config.model_name_or_path
        model.peft_config["default"].base_model_name_or_path = base
    sequence.apply(model, layout)
    tensor.apply(model, layout)
    loss.install(model)
    return model.train()


def _check_one_dtype(model: Any, config: SFTConfig) -> None:
    """FSDP2 gathers what is trained in one piece, in one dtype."""
    dtypes = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad}
    if len(dtypes) > 1:
        raise ConfigError(
            f"adapter_dtype: {config.adapter_dtype} with modules_to_save, whose weights are {config.dtype}; FSDP2 "
            "takes one dtype for all that is trained: set adapter_dtype and dtype alike, or leave modules_to_save out"
        )


def lora_choices(config: SFTConfig, token_rows: TokenRows) -> adapters.LoraChoices:
    """What the config says of adapters."""
    return adapters.LoraChoices(
        r=config.lora_r,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        target_modules=config.lora_target_modules,
        modules_to_save=config.modules_to_save,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        init_lora_weights=config.init_lora_weights,
        dtype=load.DTYPES[config.adapter_dtype],
        embedding_rows=token_rows.embedding,
        head_rows=token_rows.head,
        fresh_embedding=token_rows.fresh_embedding,
        fresh_head=token_rows.fresh_head,
    )
