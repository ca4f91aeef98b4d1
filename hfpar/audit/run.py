"""An audit from end to end. Read `run_audit` first: it does everything, in order."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hfpar.accelerator import Launch, device_of, finish, start
from hfpar.audit.answering import is_answered, judge_answers, question_prompt, with_own_answer
from hfpar.audit.answers import gold_answer
from hfpar.audit.build import build_report
from hfpar.audit.folder import AuditFolder
from hfpar.audit.forward import Forward
from hfpar.audit.generate import Generator
from hfpar.audit.model import LoadedModel, ModelSettings, ModelSource, hash_model, load_audited, open_model
from hfpar.audit.order import make_shards, order_test, rank_of
from hfpar.audit.prefix import TextTokenizer
from hfpar.audit.probe import PlannedItem, Probe, ProbeSettings, chat_prompt
from hfpar.audit.report import print_report, write_report
from hfpar.audit.results import ItemResult, ModelInfo, OrderTest, Report, Timing, item_from_dict
from hfpar.audit.sets import AuditSet, limits_of, load_sets, plan_items, ratios_of
from hfpar.audit.store import Key, LineStore
from hfpar.config.audit_schema import AuditConfig
from hfpar.config.engine import DDPSettings
from hfpar.data.packing import pack
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
    on_main(layout, lambda: len(load_sets(config)), may_take_long="sets")  # one rank downloads
    sets = load_sets(config)
    say = Say(launch.is_main)

    settings = model_settings(config)
    reference = _reference_losses(config, sets, layout, device, say) if config.reference_model else None
    on_main(layout, lambda: _look_at(settings), may_take_long="model")
    with open_model(settings) as source:
        say(f"{settings.name}: hashing the weights")
        hashes = on_main(layout, lambda: hash_model(source), may_take_long="hashes")
        folder = AuditFolder(config, [*hashes, *(one.info.sha256 for one in sets)], layout)
        tokenizer = TextTokenizer(source.tokenizer)
        planned = plan_items(sets, tokenizer, ratios_of(config), limits_of(config), source.max_length)
        if reference is not None:
            planned = [replace(item, reference=reference.losses.get(item.key)) for item in planned]
        store = LineStore(folder.path, "items")
        done = on_main(layout, lambda: set(store.collect()))
        loaded = load_audited(source, device)
    for warning in loaded.warnings:
        say(f"note: {warning}")
    auditor = Auditor(config, sets, source, loaded, tokenizer, layout, say)
    probe_begin = time.monotonic()
    num_tokens = auditor.probe(planned, done, store)
    seconds = time.monotonic() - probe_begin
    orders = auditor.order_tests() if config.order_test else []

    items = collect(store, planned, layout)
    report = build_report(
        config,
        sets,
        items,
        model=replace(loaded.info, sha256=hashes[0], tokenizer_sha256=hashes[1]),
        reference_model=reference.info if reference else None,
        orders=orders,
        timing=Timing(time.monotonic() - begin, seconds, num_tokens, layout.world_size),
        warnings=[*loaded.warnings, *_warnings(planned, done)],
    )
    on_main(layout, lambda: _write(folder.path, report, items, sets), may_take_long="report")
    folder.release()
    finish(accelerator)
    return report


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


def _look_at(settings: ModelSettings) -> None:
    """Download what is missing."""
    with open_model(settings):
        pass


@dataclass(frozen=True)
class Say:
    """Lines for the user, from one rank."""

    is_main: bool

    def __call__(self, text: str) -> None:
        """Print one."""
        if self.is_main:
            print(text, flush=True)


class Auditor:
    """One rank's work with the loaded model."""

    def __init__(
        self,
        config: AuditConfig,
        sets: Sequence[AuditSet],
        source: ModelSource,
        loaded: LoadedModel,
        tokenizer: TextTokenizer,
        layout: Layout,
        say: Say,
    ) -> None:
        """Take what has been found and loaded."""
        self.config, self.sets, self.source, self.layout, self.say = config, sets, source, layout, say
        self.kinds = {one.name: one.benchmark.answer_kind for one in sets}
        self.tokenizer = tokenizer
        ends = end_tokens(source)
        self.probe_model = Probe(
            Forward(loaded.model, packs=loaded.packs),
            Generator(loaded.model, ends[0] if ends else 0, ends),
            tokenizer,
            ProbeSettings(
                method=config.method,
                chat_template=config.chat_template,
                generate=config.generate,
                answers=config.answers,
                max_new_tokens=config.max_new_tokens,
                tie_tolerance=config.tie_tolerance,
                max_tokens_per_batch=config.max_tokens_per_batch,
            ),
        )
        if config.chat_template and not getattr(source.tokenizer, "chat_template", None):
            raise ConfigError(
                "chat_template: true, but the model's tokenizer has no chat template; leave it out"
            )

    def probe(self, planned: Sequence[PlannedItem], done: set[Key], store: LineStore) -> int:
        """Probe this rank's share of what isn't done yet, and keep each batch as soon as it is.

        Returns:
            Tokens read on all ranks.
        """
        batches = batches_of(
            [len(item.tokenized.input_ids) for item in planned], self.config.max_tokens_per_batch
        )
        mine = batches[self.layout.rank :: self.layout.world_size]
        left = [batch for batch in mine if any(planned[index].key not in done for index in batch)]
        num_tokens = 0
        with progress(sum(map(len, left)), "probing", self.say.is_main) as advance:
            for batch in left:
                items = [planned[index] for index in batch]
                results = judge_answers(self.probe_model(items), items, self.kinds.__getitem__)
                if self.config.answers:
                    results = self._ask(results, items)
                # A batch is computed as a whole, so that its figures don't depend on where a run was stopped.
                new = [asdict(one) for one, item in zip(results, items, strict=True) if item.key not in done]
                store.append(new, self.layout.rank)
                num_tokens += sum(len(item.tokenized.input_ids) for item in items)
                advance(len(batch))
        return sum(gather(num_tokens))

    def _ask(self, results: Sequence[ItemResult], items: Sequence[PlannedItem]) -> list[ItemResult]:
        """Let the model answer the whole questions of those that have answers."""
        asked = [
            index
            for index, item in enumerate(items)
            if not item.is_too_long and gold_answer(item.item, self.kinds[item.set]) is not None
        ]
        prompts = [self._question(items[index].tokenized.text) for index in asked]

        def is_done(number: int, tokens: list[int]) -> bool:
            return len(tokens) % 8 == 0 and is_answered(self.tokenizer.continuation(prompts[number], tokens))

        found = list(results)
        for index, text in zip(asked, self.probe_model.write(prompts, is_done), strict=True):
            found[index] = with_own_answer(found[index], items[index], text, self.kinds[items[index].set])
        return found

    def _question(self, question: str) -> list[int]:
        if self.config.chat_template:
            return chat_prompt(self.source.tokenizer, question)
        return self.tokenizer.ids(question_prompt(question))

    def order_tests(self) -> list[OrderTest]:
        """Compare the files' own orders with shuffled ones; every rank takes some of the shards."""
        most = min(self.source.max_length or 2048, self.config.max_tokens_per_batch)
        benchmarks = [one for one in self.sets if one.info.role == "benchmark"]
        shards = [
            shard
            for one in benchmarks
            for shard in make_shards(
                one, lambda texts: [len(one.input_ids) for one in self.tokenizer(texts)], most
            )
        ]
        mine = shards[self.layout.rank :: self.layout.world_size]
        ranks: list[tuple[str, int]] = []
        with progress(len(mine), "orders", self.say.is_main) as advance:
            for shard in mine:
                texts = shard.orders(self.config.order_permutations, self.config.seed)
                scores = [
                    float(self.probe_model.forward([ids])[0].logprob[1:].sum())
                    for ids in map(self.tokenizer.ids, texts)
                ]
                ranks.append((shard.benchmark, rank_of(scores)))
                advance(1)
        found = [pair for part in gather(ranks) for pair in part]
        return [
            order_test(
                one.name, [rank for name, rank in found if name == one.name], self.config.order_permutations
            )
            for one in benchmarks
        ]


# A reference model


@dataclass(frozen=True)
class Reference:
    """What a reference model needs for each text."""

    info: ModelInfo
    losses: dict[Key, float]
    """Nats."""


def _reference_losses(
    config: AuditConfig, sets: Sequence[AuditSet], layout: Layout, device: torch.device, say: Say
) -> Reference:
    settings = replace(model_settings(config), name=str(config.reference_model), base=None)
    on_main(layout, lambda: _look_at(settings), may_take_long="reference")
    with open_model(settings) as source:
        hashes = on_main(layout, lambda: hash_model(source), may_take_long="reference hashes")
        tokenizer = TextTokenizer(source.tokenizer)
        planned = plan_items(sets, tokenizer, [], limits_of(config), None)
        limit = source.max_length
        planned = [item for item in planned if limit is None or len(item.tokenized.input_ids) <= limit]
        loaded = load_audited(source, device)
    forward = Forward(loaded.model, packs=loaded.packs)
    batches = batches_of([len(item.tokenized.input_ids) for item in planned], config.max_tokens_per_batch)
    mine = batches[layout.rank :: layout.world_size]
    losses: dict[Key, float] = {}
    with progress(sum(map(len, mine)), "reference", say.is_main) as advance:
        for batch in mine:
            scores = forward([planned[index].tokenized.input_ids for index in batch])
            for index, one in zip(batch, scores, strict=True):
                begin = max(planned[index].tokenized.num_special, 1)
                losses[planned[index].key] = -float(one.logprob[begin:].sum())
            advance(len(batch))
    together = {key: value for part in gather(losses) for key, value in part.items()}
    info = replace(loaded.info, sha256=hashes[0], tokenizer_sha256=hashes[1])
    return Reference(info, together)


# Ranks


def gather(value: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    if dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def batches_of(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Texts that are read in one pass, the same whatever the number of ranks; a longer one stands alone."""
    long = [[index] for index, length in enumerate(lengths) if length > budget]
    short = [index for index, length in enumerate(lengths) if length <= budget]
    return [*long, *([short[i] for i in group] for group in pack([lengths[i] for i in short], budget))]


def collect(store: LineStore, planned: Sequence[PlannedItem], layout: Layout) -> dict[str, list[ItemResult]]:
    """Every rank's results, brought together in the order of the sets, on every rank; rank 0 writes them."""
    part = LineStore(store.folder, store.name).part(layout.rank)
    mine = part.read_text(encoding="utf-8").splitlines() if part.is_file() else []
    texts = [text for lines in gather(mine) for text in lines]
    found = {} if layout.rank else store.read()
    found = gather(found)[0]
    for text in texts:
        line = json.loads(text)
        found.setdefault((line["set"], line["item_id"]), line)
    lines = [found[item.key] for item in planned]
    on_main(layout, lambda: store.write(lines))
    store.drop_part(layout.rank)
    items: dict[str, list[ItemResult]] = {}
    for line in lines:
        items.setdefault(line["set"], []).append(item_from_dict(line))
    return items


def progress(total: int, what: str, is_main: bool) -> Any:
    """A bar over items, on one rank."""
    from contextlib import contextmanager

    from tqdm import tqdm

    @contextmanager
    def bar() -> Any:
        with tqdm(total=total, desc=what, unit="item", disable=None if is_main else True) as shown:
            yield shown.update

    return bar()


def end_tokens(source: ModelSource) -> list[int]:
    """Tokens after which a model says nothing more."""
    found: list[int] = []
    path = source.folder / "generation_config.json"
    if path.is_file():
        saved = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        found += saved if isinstance(saved, list) else [saved]
    found.append(source.tokenizer.eos_token_id)
    return list(dict.fromkeys(token for token in found if token is not None))


# The end


def _warnings(planned: Sequence[PlannedItem], done: set[Key]) -> list[str]:
    found = []
    too_long = sum(item.is_too_long for item in planned)
    if too_long:
        found.append(f"{too_long} texts are longer than the model's context, and weren't read")
    if done:
        found.append(
            f"{len(done)} of {len(planned)} items are from an earlier, stopped run of the same audit"
        )
    return found


def _write(
    folder: Path, report: Report, items: dict[str, list[ItemResult]], sets: Sequence[AuditSet]
) -> None:
    write_report(folder, report, [item for one in sets for item in items[one.name]])
    print_report(report)
    print(f"report: {folder / 'report.html'}", flush=True)
