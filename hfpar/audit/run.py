"""An audit from end to end. Read `run_audit` first: it does everything, in order."""

from __future__ import annotations

import time
from dataclasses import replace

from hfpar.accelerator import Launch, device_of, finish, start
from hfpar.audit.auditor import Auditor
from hfpar.audit.build import build_report, notes, publish
from hfpar.audit.folder import AuditFolder
from hfpar.audit.model import ModelSource, fetch_model, hash_model, load_audited, model_settings, open_model
from hfpar.audit.prefix import TextTokenizer
from hfpar.audit.ranks import Say, collect
from hfpar.audit.reference import reference_losses
from hfpar.audit.results import Report, Timing
from hfpar.audit.sets import limits_of, load_sets, plan_items, ratios_of
from hfpar.audit.store import LineStore
from hfpar.config.audit_schema import AuditConfig
from hfpar.config.engine import DDPSettings
from hfpar.errors import ConfigError
from hfpar.parallel.layout import Layout
from hfpar.train.checkpoint import on_main
from hfpar.train.quiet import quiet_libraries


def run_audit(config: AuditConfig, launch: Launch) -> Report:
    """Audit one checkpoint: items are spread over the ranks, each of which holds the whole model.

    Returns:
        The report, on every rank.

    Raises:
        HfparError: anything that the user can mend; what was finished is kept.
    """
    begin = time.monotonic()
    quiet_libraries(launch.is_main)
    check_engine(launch)
    accelerator = start(launch)
    device, layout = device_of(accelerator), Layout(launch.rank, launch.world_size)
    sets = on_main(layout, lambda: load_sets(config), may_take_long=f"sets of {config.model_name_or_path}")
    say = Say(launch.is_main)

    settings = model_settings(config)
    reference = reference_losses(config, sets, layout, device, say) if config.reference_model else None
    on_main(layout, lambda: fetch_model(settings), may_take_long=f"model of {config.model_name_or_path}")
    with open_model(settings) as source:
        say(f"{settings.name}: hashing the weights")
        hashes = on_main(
            layout, lambda: hash_model(source), may_take_long=f"hashes of {config.model_name_or_path}"
        )
        folder = AuditFolder(config, [*hashes, *(one.info.sha256 for one in sets)], layout)
        tokenizer = TextTokenizer(source.tokenizer)
        planned = plan_items(sets, tokenizer, ratios_of(config), limits_of(config), source.max_length)
        if reference is not None:
            planned = [replace(item, reference=reference.losses.get(item.key)) for item in planned]
        store = LineStore(folder.path, "items")
        done = on_main(layout, lambda: set(store.collect()))
        check_template(config, source)
        loaded = load_audited(source, device)
    for warning in loaded.warnings:
        say(f"note: {warning}")
    auditor = Auditor(config, sets, source, loaded, tokenizer, layout, say)
    probe_begin = time.monotonic()
    num_tokens = auditor.probe(planned, done, store)
    seconds = time.monotonic() - probe_begin
    orders = auditor.order_tests() if config.order_test else []

    items = collect(store, planned, layout)
    timing = Timing(time.monotonic() - begin, seconds, num_tokens, layout.world_size)
    num_too_long = sum(item.is_too_long for item in planned)

    def report_on_items() -> Report:
        report = build_report(
            config,
            sets,
            items,
            model=replace(loaded.info, sha256=hashes[0], tokenizer_sha256=hashes[1]),
            reference_model=reference.info if reference else None,
            orders=orders,
            timing=timing,
            warnings=[*loaded.warnings, *notes(len(planned), len(done), num_too_long)],
        )
        publish(folder.path, report, items, sets)
        return report

    report = on_main(layout, report_on_items, may_take_long=f"report of {config.model_name_or_path}")
    folder.release()
    finish(accelerator)
    return report


def check_template(config: AuditConfig, source: ModelSource) -> None:
    """Refuse a chat mode that the model has no template for, before its weights load.

    Raises:
        ConfigError: it has none.
    """
    if config.chat_template and not getattr(source.tokenizer, "chat_template", None):
        raise ConfigError("chat_template: true, but the model's tokenizer has no chat template; leave it out")


def check_engine(launch: Launch) -> None:
    """Refuse engines that cut weights: each rank holds the whole model.

    Raises:
        ConfigError: the Accelerate file asks for one.
    """
    if not isinstance(launch.settings, DDPSettings):
        raise ConfigError(
            f"distributed_type: {launch.settings.name} cuts the weights among ranks, but an audit holds the whole "
            "model on each; use accelerate_configs/ddp.yaml, or a server (backend: openai) for a larger model"
        )
