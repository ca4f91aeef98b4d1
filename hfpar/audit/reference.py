"""A reference model: what it needs for each text, to be put beside the audited one's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hfpar.audit.forward import Forward
from hfpar.audit.model import fetch_model, hash_model, load_audited, model_settings, open_model
from hfpar.audit.prefix import TextTokenizer
from hfpar.audit.ranks import Say, batches_of, gather, progress, token_budget
from hfpar.audit.results import ModelInfo
from hfpar.audit.sets import AuditSet, limits_of, plan_items
from hfpar.audit.store import Key
from hfpar.config.audit_schema import AuditConfig
from hfpar.parallel.layout import Layout
from hfpar.train.checkpoint import on_main


@dataclass(frozen=True)
class Reference:
    """What a reference model needs for each text."""

    info: ModelInfo
    losses: dict[Key, float]
    """Nats."""


def reference_losses(
    config: AuditConfig, sets: Sequence[AuditSet], layout: Layout, device: torch.device, say: Say
) -> Reference:
    """Read every text with the reference model, which is gone again before the audited one is loaded."""
    settings = replace(model_settings(config), name=str(config.reference_model), base=None)
    on_main(layout, lambda: fetch_model(settings), may_take_long=f"reference for {config.model_name_or_path}")
    with open_model(settings) as source:
        hashes = on_main(
            layout,
            lambda: hash_model(source),
            may_take_long=f"reference hashes for {config.model_name_or_path}",
        )
        tokenizer = TextTokenizer(source.tokenizer)
        planned = plan_items(sets, tokenizer, [], limits_of(config), None)
        limit = source.max_length
        planned = [item for item in planned if limit is None or len(item.tokenized.input_ids) <= limit]
        loaded = load_audited(source, device)
    forward = Forward(loaded.model, packs=loaded.packs)
    batches = batches_of([len(item.tokenized.input_ids) for item in planned], token_budget(config, device))
    mine = batches[layout.rank :: layout.world_size]
    losses: dict[Key, float] = {}
    with progress(sum(map(len, mine)), "reference", say.is_main) as advance:
        for batch in mine:
            scores = forward([planned[index].tokenized.input_ids for index in batch])
            for index, one in zip(batch, scores, strict=True):
                begin = max(planned[index].tokenized.num_special, 1)
                losses[planned[index].key] = -float(one.logprob[begin:].sum())
            advance(len(batch))
    together = {key: value for part in gather(losses, layout) for key, value in part.items()}
    info = replace(loaded.info, sha256=hashes[0], tokenizer_sha256=hashes[1])
    return Reference(info, together)
