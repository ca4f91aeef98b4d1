"""How the ranks of an audit share its items, and what they say meanwhile."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from hfpar.audit.probe import PlannedItem
from hfpar.audit.results import ItemResult, item_from_dict
from hfpar.audit.store import LineStore
from hfpar.audit.summarize import without_shared_runs
from hfpar.config.audit_schema import AuditConfig
from hfpar.data.packing import pack
from hfpar.parallel.layout import Layout
from hfpar.train.checkpoint import on_main


@dataclass(frozen=True)
class Say:
    """Lines for the user, from one rank."""

    is_main: bool

    def __call__(self, text: str) -> None:
        """Print one."""
        if self.is_main:
            print(text, flush=True)


def gather(value: Any, layout: Layout) -> list[Any]:
    """Every rank's value, on every rank."""
    if layout.world_size == 1:
        return [value]
    values: list[Any] = [None] * layout.world_size
    dist.all_gather_object(values, value)
    return values


def token_budget(config: AuditConfig, device: torch.device) -> int:
    """Tokens of a batch: the config's, or what suits the device."""
    if config.max_tokens_per_batch is not None:
        return config.max_tokens_per_batch
    return 4096 if device.type == "cpu" else 8192


def batches_of(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Texts that are read in one pass, the same whatever the number of ranks; a longer one stands alone."""
    long = [[index] for index, length in enumerate(lengths) if length > budget]
    short = [index for index, length in enumerate(lengths) if length <= budget]
    return [*long, *([short[i] for i in group] for group in pack([lengths[i] for i in short], budget))]


def collect(store: LineStore, planned: Sequence[PlannedItem], layout: Layout) -> dict[str, list[ItemResult]]:
    """Every rank's results, brought together in the order of the sets and written, by rank 0; others get none.

    Grades are settled here, where an item's text can be held against the others of its set.
    """
    part = store.part(layout.rank)
    mine = part.read_text(encoding="utf-8").splitlines() if part.is_file() else []
    texts = [text for lines in gather(mine, layout) for text in lines]

    items: dict[str, list[ItemResult]] = {}

    def bring_together() -> None:
        found = store.read()
        for text in texts:
            line = json.loads(text)
            found.setdefault((line["set"], line["item_id"]), line)
        for item in planned:
            items.setdefault(item.set, []).append(item_from_dict(found[item.key]))
        items.update({name: without_shared_runs(results) for name, results in items.items()})
        store.write([asdict(result) for results in items.values() for result in results])

    on_main(layout, bring_together)
    store.drop_part(layout.rank)
    return items


@contextlib.contextmanager
def progress(total: int, what: str, is_main: bool) -> Iterator[Callable[[int], object]]:
    """A bar over items, on one rank; call what it gives with how many more are done."""
    with tqdm(total=total, desc=what, unit="item", disable=None if is_main else True) as shown:
        yield shown.update
