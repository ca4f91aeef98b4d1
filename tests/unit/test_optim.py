"""Optimizers and schedules by Transformers' names; what decays; what is refused before weights load."""

import pytest
import torch
from torch import nn

from hfpar.config.engine import DDPSettings, FSDP2Settings, ZeROSettings
from hfpar.config.schema import SFTConfig
from hfpar.errors import ConfigError, MissingDependencyError
from hfpar.train import optim

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "decayed"),
    [
        ("model.embed_tokens.weight", True),
        ("model.layers.0.self_attn.q_proj.weight", True),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight", True),
        ("model.layers.0.mlp.experts.gate_up_proj", True),
        ("model.layers.0.self_attn.q_proj.bias", False),
        ("model.layers.0.mlp.experts.down_proj_bias", False),
        ("model.layers.0.self_attn.sinks", False),
        ("model.layers.0.input_layernorm.weight", False),
        ("model.layers.0.self_attn.q_norm.weight", False),
        ("transformer.h.0.ln_1.weight", False),
        ("model.norm.weight", False),
    ],
)
def test_what_decays(name, decayed):
    assert optim.is_decayed(name) is decayed


def test_the_parameters_are_split_and_each_is_in_one_group():
    model = nn.ModuleDict({"proj": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})
    optimizer = optim.make_optimizer(list(model.named_parameters()), SFTConfig(weight_decay=0.1))
    groups = [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]
    assert groups == [(0.1, 1), (0.0, 3)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("adamw_torch", "AdamW"), ("adamw_torch_fused", "AdamW"), ("sgd", "SGD"), ("adafactor", "Adafactor")],
)
def test_optimizers_update(name, kind):
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    before = model.weight.clone()
    optimizer = optim.make_optimizer(
        list(model.named_parameters()),
        SFTConfig(optim=name, learning_rate=0.1, adam_beta1=0.8, adam_epsilon=1e-7),
    )
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    assert type(optimizer).__name__ == kind
    assert not torch.equal(model.weight, before)
    if kind == "AdamW":
        assert optimizer.param_groups[0]["betas"] == (0.8, 0.999)
        assert optimizer.param_groups[0]["eps"] == 1e-7


def test_adamw_equals_torch_own_to_rounding():
    torch.manual_seed(0)
    mine, own = nn.Linear(7, 5), nn.Linear(7, 5)
    own.load_state_dict(mine.state_dict())
    config = SFTConfig(learning_rate=0.01)
    optimizer = optim.make_optimizer(list(mine.named_parameters()), config)
    reference = torch.optim.AdamW(own.parameters(), lr=0.01, weight_decay=0.0, foreach=False, fused=False)
    for _ in range(5):
        inputs = torch.randn(4, 7)
        for model, stepper in ((mine, optimizer), (own, reference)):
            stepper.zero_grad()
            model(inputs).pow(2).sum().backward()
            stepper.step()
    torch.testing.assert_close(mine.weight, own.weight, rtol=1e-6, atol=1e-7)


def test_every_optimizer_and_schedule_of_the_config_exists():
    from typing import get_args, get_type_hints

    hints = get_type_hints(SFTConfig)
    for name in get_args(hints["lr_scheduler_type"]):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = optim.make_schedule(optimizer, SFTConfig(lr_scheduler_type=name, warmup_steps=2), 10)
        rates = []
        for _ in range(10):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        assert rates[0] == (1.0 if name == "constant" else 0.0) and max(rates) == pytest.approx(1.0)
    for name in get_args(hints["optim"]):
        model = nn.Linear(2, 2)
        try:
            optim.check_optimizer(SFTConfig(optim=name), DDPSettings(), CPU)
        except (ConfigError, MissingDependencyError):
            continue
        assert optim.make_optimizer(list(model.named_parameters()), SFTConfig(optim=name)).param_groups


def test_warmup_ratio_is_a_share_of_the_steps():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = optim.make_schedule(optimizer, SFTConfig(warmup_ratio=0.3, lr_scheduler_type="linear"), 10)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0])


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("adafactor", FSDP2Settings(), "optim: adafactor needs whole matrices, which fsdp2 cuts"),
        ("adafactor", ZeROSettings.for_stage(2), "optim: adafactor needs whole matrices, which zero2 cuts"),
        ("adamw_bnb_8bit", FSDP2Settings(), "optim: adamw_bnb_8bit can't update FSDP2's sharded parameters"),
        ("paged_adamw_8bit", DDPSettings(), "optim: paged_adamw_8bit needs a GPU"),
    ],
)
def test_combinations_that_do_not_work_are_refused(name, settings, message):
    pytest.importorskip("bitsandbytes")
    with pytest.raises(ConfigError, match=message):
        optim.check_optimizer(SFTConfig(optim=name), settings, CPU)


def test_a_missing_package_names_the_command(monkeypatch):
    monkeypatch.setattr(optim.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'hfpar\[quantization\]'"):
        optim.check_optimizer(SFTConfig(optim="adamw_bnb_8bit"), DDPSettings(), CPU)
