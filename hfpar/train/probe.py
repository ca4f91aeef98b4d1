"""Does hfpar compute this family right? Asked of a tiny copy, before the user's weights load.

Models differ in ways that no list keeps up with: a scale on the logits, an attention that bypasses Transformers'
interface, a state that runs on from one document into the next. So the copy is trained for one step both ways,
packed by hfpar and one document at a time by Transformers, and the gradients are compared. Where ranks are to
share streams, they share this one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from hfpar.attention import interface
from hfpar.data.stream import Sample, build_stream
from hfpar.errors import ConfigError, first_line
from hfpar.models.cuts import cuts_of
from hfpar.models.shrink import shrink_config
from hfpar.parallel import sequence, tensor
from hfpar.parallel.collectives import gather_whole
from hfpar.parallel.layout import Layout
from hfpar.train import loss
from hfpar.train.step import model_inputs

TOLERANCE = 1e-4
"""Relative, on the whole gradient: rounding gives about 1e-6, a wrong computation far more."""

_LENGTHS = (11, 5, 14)


def check_family(
    config: PretrainedConfig,
    *,
    layout: Layout | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Compare hfpar with Transformers on a tiny copy of the model. All ranks together.

    Args:
        config: the user's.
        layout: the ranks, of which some may share streams; None: one process.
        trust_remote_code: whether the model's own code may run.

    Raises:
        ConfigError: they don't agree, or no copy could be made to compare.
    """
    alone = Layout(rank=0, world_size=1)
    layout = layout or alone
    sequence.check_sequence(config, layout)
    tensor.check_tensor(config, layout, trust_remote_code=trust_remote_code)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            small = shrink_config(
                config, fewest_heads=layout.sp_size * layout.tp_size, tp_sizes=[layout.tp_size]
            )
            state_dict, expected = _plain_gradients(small, trust_remote_code)
        except Exception as error:  # a family's own code, on sizes that hfpar chose: anything can come of it
            if _keeps_a_state(config):
                raise _state_refusal(config) from error
            if isinstance(error, ConfigError):
                raise
            reason = first_line(error)
            raise ConfigError(
                f"model_name_or_path: {config.model_type} couldn't be checked on a tiny copy ({reason}); hfpar only "
                "trains what it can check"
            ) from error
        what = "doesn't take packed documents"
        packed = _packed_gradients(state_dict, small, alone, trust_remote_code, what)
        what = "comes out wrong when documents are packed"
        _compare(config, packed, expected, what, "hfpar can't train it")
        if layout.sequence_size > 1 or layout.tp_size > 1:
            shared = "layers" if layout.sequence_size == 1 else "a stream"
            flags = [f"{axis}_size" for axis in ("tp", "cp", "sp") if getattr(layout, f"{axis}_size") > 1]
            flags += ["tp_sequence"] if layout.tp_sequence else []
            what = f"can't be computed when ranks share {shared} ({layout.name})"
            sharded = _packed_gradients(state_dict, small, layout, trust_remote_code, what)
            what = f"comes out wrong when ranks share {shared} ({layout.name})"
            _compare(config, sharded, expected, what, f"train it without {' and '.join(flags)}")


def _compare(
    config: PretrainedConfig, mine: list[Tensor], expected: list[Tensor], what: str, advice: str
) -> None:
    difference = _relative_difference(mine, expected)
    if not difference < TOLERANCE:
        if _keeps_a_state(config):
            raise _state_refusal(config)
        raise ConfigError(
            f"model_name_or_path: {config.model_type} {what} (gradients of a tiny copy differ by "
            f"{difference:.1e}); {advice}"
        )


def _keeps_a_state(config: PretrainedConfig) -> bool:
    """Whether Transformers says so of the model's class (Mamba and its kin)."""
    model_class: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    return bool(getattr(model_class, "_is_stateful", False))


def _state_refusal(config: PretrainedConfig) -> ConfigError:
    return ConfigError(
        f"model_name_or_path: {config.model_type} carries a state from token to token, which would run on from one "
        "packed document into the next; hfpar can't train it"
    )


def _documents(vocab_size: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in _LENGTHS]
    return [Sample(tokens, [loss.IGNORE_INDEX] * 3 + tokens[3:]) for tokens in drawn]


def _make(config: PretrainedConfig, attn_implementation: str, trust_remote_code: bool) -> Any:
    return AutoModelForCausalLM.from_config(
        config,
        dtype=torch.float32,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
    )


def _plain_gradients(
    config: PretrainedConfig, trust_remote_code: bool
) -> tuple[dict[str, Tensor], list[Tensor]]:
    model = _make(config, "eager", trust_remote_code)
    for parameter in model.parameters():  # norms and sinks start equal: make every value count
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    for sample in _documents(model.config.vocab_size):
        input_ids, labels = torch.tensor([sample.input_ids]), torch.tensor([sample.labels])
        logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1].float()
        nn.functional.cross_entropy(logits[0], labels[0, 1:], reduction="sum").backward()
    return model.state_dict(), [_gradient(parameter) for parameter in model.parameters()]


def _packed_gradients(
    state_dict: dict[str, Tensor],
    config: PretrainedConfig,
    layout: Layout,
    trust_remote_code: bool,
    what_fails: str,
) -> list[Tensor]:
    """Of a copy that is made as the user's model will be: a family can ignore a later change of its attention.

    Summed over the ranks that share the stream, put together from those that share layers.
    """
    interface.register()
    name = interface.interface_name("auto")
    device = torch.device(layout.device_type if layout.world_size > 1 else "cpu")  # what their groups take
    try:
        model = _make(config, name, trust_remote_code)
        model.load_state_dict(state_dict)
        sequence.apply(model.to(device), layout)
        tensor.apply(model, layout)
        loss.install(model)
        shard = sequence.shard_stream(build_stream(_documents(model.config.vocab_size)), layout)
        model(**model_inputs(shard, device)).backward()
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (name,):
            reason = "its attention doesn't go through Transformers' AttentionInterface"
        else:
            reason = first_line(error)
        raise ConfigError(f"model_name_or_path: {config.model_type} {what_fails}: {reason}") from error
    gradients, cuts = [], cuts_of(model)
    for name, parameter in model.named_parameters():
        cut, gradient = cuts.get(name), _gradient(parameter)
        gradients.append(gradient if cut is None else gather_whole(gradient, cut, layout.tp_group, device))
    for group in (shard.sharding.cp_group, shard.sharding.sp_group) if shard.sharding else ():
        if group is not None:
            for gradient in gradients:
                dist.all_reduce(gradient, group=group)
    return [gradient.cpu() for gradient in gradients]


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()


def _relative_difference(mine: list[Tensor], expected: list[Tensor]) -> float:
    difference = sum(float((a - b).double().pow(2).sum()) for a, b in zip(mine, expected, strict=True))
    size = sum(float(b.double().pow(2).sum()) for b in expected)
    return (difference / size) ** 0.5 if size else float("nan")
