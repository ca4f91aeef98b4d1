"""One rank's work with the loaded model: its share of the items, and of the shuffled orders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from hfpar.audit.answering import is_answered, judge_answers, question_prompt, with_own_answer
from hfpar.audit.answers import gold_answer
from hfpar.audit.forward import Forward
from hfpar.audit.generate import Generator
from hfpar.audit.model import LoadedModel, ModelSource
from hfpar.audit.order import make_shards, order_test, rank_of
from hfpar.audit.prefix import TextTokenizer
from hfpar.audit.probe import PlannedItem, Probe, ProbeSettings, chat_prompt
from hfpar.audit.ranks import Say, batches_of, gather, progress, token_budget
from hfpar.audit.results import ItemResult, OrderTest
from hfpar.audit.sets import AuditSet
from hfpar.audit.store import Key, LineStore
from hfpar.config.audit_schema import AuditConfig
from hfpar.parallel.layout import Layout


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
        self.budget = token_budget(config, next(loaded.model.parameters()).device)
        ends = end_tokens(source)
        self.probe_model = Probe(
            Forward(loaded.model, packs=loaded.packs),
            Generator(loaded.model, ends[0] if ends else 0, ends),
            tokenizer,
            ProbeSettings(
                method=config.method,
                chat_template=config.chat_template,
                generate=config.generate,
                max_new_tokens=config.max_new_tokens,
                tie_tolerance=config.tie_tolerance,
                max_tokens_per_batch=self.budget,
            ),
        )

    def probe(self, planned: Sequence[PlannedItem], done: set[Key], store: LineStore) -> int:
        """Probe this rank's share of what isn't done yet, and keep each batch as soon as it is.

        Returns:
            Tokens read on all ranks.
        """
        batches = batches_of([len(item.tokenized.input_ids) for item in planned], self.budget)
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
        return sum(gather(num_tokens, self.layout))

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
        most = min(self.source.max_length or 2048, max(self.budget, 4096))
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
        found = [pair for part in gather(ranks, self.layout) for pair in part]
        return [
            order_test(
                one.name, [rank for name, rank in found if name == one.name], self.config.order_permutations
            )
            for one in benchmarks
        ]


def end_tokens(source: ModelSource) -> list[int]:
    """Tokens after which a model says nothing more."""
    found: list[int] = []
    path = source.folder / "generation_config.json"
    if path.is_file():
        saved = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        found += saved if isinstance(saved, list) else [saved]
    found.append(source.tokenizer.eos_token_id)
    return list(dict.fromkeys(token for token in found if token is not None))
