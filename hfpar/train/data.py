"""From the config to the samples of a run and their order."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from hfpar.config.schema import SFTConfig
from hfpar.config.validate import first_of
from hfpar.data.build import Recipe
from hfpar.data.cache import TokenCache, TokenRequest
from hfpar.data.loader import StepLoader
from hfpar.data.overlap.screen import DROPPED, KEPT, Screen
from hfpar.data.packing import pack
from hfpar.data.reading.chunks import Chunk
from hfpar.data.reading.sources import data_sources, resolve
from hfpar.data.store import DataReport, Selection, TokenStore
from hfpar.data.stream import IGNORE_INDEX, Sample, TokenStream, build_stream
from hfpar.data.streaming import StreamLoader, WindowReader
from hfpar.errors import ConfigError, DataError
from hfpar.models.rope import longest_before_change
from hfpar.parallel.layout import Layout
from hfpar.train.checkpoint import on_main
from hfpar.train.model import ModelSource
from hfpar.train.progress import RowsBar


@dataclass(frozen=True)
class RunData:
    """What a run is trained and evaluated on, the same on every rank."""

    samples: Selection
    """Those to train on; none where they are streamed."""
    report: DataReport
    eval_samples: Selection
    segments: list[tuple[int, float]]
    """Of `samples`, source after source: how many, and with what weight."""
    windows: WindowReader | None = None
    """What is streamed."""


def read_data(config: SFTConfig, source: ModelSource, layout: Layout) -> RunData:
    """Find the data's tokens in the cache, or make them on rank 0.

    Args:
        config: names the data.
        source: the model's tokenizer, with its chat template, and its bounds on lengths and token ids.
        layout: for the number of data-parallel ranks, each of which needs a sample.

    Raises:
        BadRowsError: rows that can't be used; each is listed with its line.
        DataError: data that can't be read at all, or nothing usable in it.
        ConfigError: fewer samples than ranks, or samples that don't fit the model.
    """
    cache = TokenCache(cache_folder(config), source.tokenizer, source.folder)
    eval_stores = _stores("eval_dataset", config, cache, layout)
    if config.streaming:
        chosen_eval = Selection(eval_stores)
        windows = _window_reader(config, source, cache, layout)
        return RunData(Selection([]), DataReport(), chosen_eval, [], windows)
    stores = _stores("dataset", config, cache, layout)
    kept, held_out = hold_out(stores, config.eval_fraction, config.seed)
    samples = Selection(stores, kept)
    eval_samples = Selection(stores, held_out) if config.eval_fraction else Selection(eval_stores)
    if len(samples) < layout.dp_size:
        raise ConfigError(
            f"dataset: {len(samples)} usable samples for {layout.dp_size} data-parallel ranks; "
            f"use --num_processes {len(samples)} or fewer"
        )
    weights = [entry.weight for entry in data_sources(config.dataset)]
    segments = list(zip(samples.sizes, weights, strict=True))
    for key, selection in (("dataset", samples), ("eval_dataset", eval_samples)):
        if len(selection):
            check_fit(
                key,
                selection.lengths,
                _largest_token(selection),
                source.config,
                sequence_size=layout.sequence_size,
            )
    report = DataReport()
    for store in stores:
        report.add(store.report)
    return RunData(samples, report, eval_samples, segments)


def cache_folder(config: SFTConfig) -> Path:
    """Where tokenized data is kept."""
    from huggingface_hub.constants import HF_HOME

    return (
        Path(HF_HOME, "hfpar", "tokens")
        if config.token_cache is None
        else Path(config.token_cache).expanduser()
    )


def _stores(key: str, config: SFTConfig, cache: TokenCache, layout: Layout) -> list[TokenStore]:
    """The tokens of each entry of `dataset` or `eval_dataset`. All ranks together."""
    sources = data_sources(getattr(config, key))
    if not sources:
        return []

    def build() -> list[str]:
        requests = _requests(key, config)
        num_bytes = sum(file.num_bytes for request in requests for file in request.files)
        with RowsBar(f"Tokenizing {key}", num_bytes) as bar:

            def progress(chunk: Chunk, num_rows: int) -> None:
                bar.add(chunk.path, chunk.num_bytes, num_rows)

            options: dict[str, Any] = {"progress": progress, "say": bar.message}
            try:
                return [
                    cache.get(request, num_proc=config.dataset_num_proc, **options).key
                    for request in requests
                ]
            except DataError as error:
                raise DataError(f"{key}: {error}") from error

    keys = on_main(layout, build, may_take_long=key)
    # A node that doesn't share rank 0's cache builds its own.
    found = [cache.find(name) for name in keys]
    if all(found):
        stores = [store for store in found if store is not None]
    else:
        stores = [cache.get(request) for request in _requests(key, config)]
    report = DataReport()
    for store in stores:
        report.add(store.report)
    if not report.num_samples:
        raise DataError(
            f"{key}: none of the {report.num_rows} rows can be trained on; {explain(report, config.max_length)}"
        )
    return stores


def _requests(key: str, config: SFTConfig) -> list[TokenRequest]:
    """What is tokenized for `dataset` or `eval_dataset`; benchmark items are looked for in the first alone."""
    sources = data_sources(getattr(config, key))
    screen = Screen.of(config) if key == "dataset" else None
    try:
        files = [resolve(source) for source in sources]
    except DataError as error:
        raise DataError(f"{key}: {error}") from error
    return [
        TokenRequest(found, Recipe.of(config, source, screen), config.bad_rows == "skip")
        for found, source in zip(files, sources, strict=True)
    ]


def warn_of_overlaps(config: SFTConfig, run_data: RunData, layout: Layout) -> None:
    """Tell of rows that hold benchmark items, once, on rank 0; of streamed ones, those of the first window."""
    report = run_data.report if run_data.windows is None else run_data.windows.report
    if layout.rank != 0:
        return
    if report.hidden_items:
        logging.getLogger(__name__).warning(
            "dataset: %d of the benchmarks' items %s in what most rows have in common (a system prompt, examples), "
            "and %s trained on with every row: %s",
            len(report.hidden_items),
            *(("stands", "is") if len(report.hidden_items) == 1 else ("stand", "are")),
            first_of(report.hidden_items, 5),
        )
    count = report.counts[DROPPED] + report.counts[KEPT]
    if not count:
        return
    done = (
        "are left out"
        if config.decontaminate == "drop"
        else "are trained on (--decontaminate drop leaves them out)"
    )
    logging.getLogger(__name__).warning(
        "dataset: %d of %d rows hold a benchmark's item and %s; such as %s; `hfpar data decontaminate` lists all",
        count,
        report.num_rows,
        done,
        "; ".join(report.listed_overlaps),
    )


def explain(report: DataReport, max_length: int) -> str:
    """What was left out, and why, in words."""
    parts = [
        f"{report.counts['too long']} are longer than max_length {max_length}",
        f"{report.counts['without label']} have nothing to learn",
    ]
    if report.counts[DROPPED]:
        parts.append(f"{report.counts[DROPPED]} hold a benchmark's item")
    parts += [f"{count} are bad ({kind})" for kind, count in report.problems.most_common()]
    return ", ".join(parts)


def hold_out(
    stores: Sequence[TokenStore], fraction: float, seed: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Split samples into those to train on and those held out.

    Samples of one row stay together, and so do rows that say the same: a copy of what is held out isn't trained.

    Returns:
        For each store the numbers of its samples that are kept, and of those that are held out, in order.

    Raises:
        ConfigError: a fraction that leaves nothing on one side.
    """
    everything = [np.arange(len(store)) for store in stores]
    if not fraction:
        return everything, [part[:0] for part in everything]
    rows_of_samples = [_rows(store) for store in stores]
    contents = [
        np.add.reduceat(store.contents(), np.flatnonzero(np.diff(rows, prepend=-1)))
        for store, rows in zip(stores, rows_of_samples, strict=True)
        if len(store)
    ]
    _, first, group_of_row = np.unique(np.concatenate(contents), return_index=True, return_inverse=True)
    # In the order in which they come, so that the draw depends on the data alone.
    rank = np.argsort(np.argsort(first))
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(first))
    is_out_row = np.isin(rank[group_of_row.reshape(-1)], order[: round(fraction * len(first))])
    kept, held_out, begin = [], [], 0
    for rows in rows_of_samples:
        num_rows = int(rows[-1]) + 1 if len(rows) else 0
        is_out = is_out_row[begin : begin + num_rows][rows]
        begin += num_rows
        kept.append(np.flatnonzero(~is_out))
        held_out.append(np.flatnonzero(is_out))
    if not (sum(map(len, kept)) and sum(map(len, held_out))):
        raise ConfigError(
            f"eval_fraction: {fraction} of {sum(map(len, stores))} samples leaves nothing to "
            f"{'train on' if not sum(map(len, kept)) else 'evaluate'}"
        )
    return kept, held_out


def _rows(store: TokenStore) -> np.ndarray:
    """`(samples,)`: the row that each sample is of, counted from 0 without those that have none."""
    is_new = np.ones(len(store), dtype=bool)
    is_new[1:] = (np.diff(store.rows) != 0) | (np.diff(store.files) != 0)
    return np.cumsum(is_new) - 1


def _largest_token(selection: Selection) -> int:
    return max(store.report.max_token_id for store in selection.stores)


def check_fit(
    key: str,
    lengths: np.ndarray,
    largest_token: int,
    model_config: PretrainedConfig,
    *,
    sequence_size: int = 1,
) -> None:
    """Refuse samples that the model can't take, or not the same in every batch.

    Args:
        key: the setting that names the samples.
        lengths: of all samples, in tokens.
        largest_token: largest token id among them.
        model_config: the model's.
        sequence_size: ranks that share a stream.

    Raises:
        ConfigError: more tokens than positions, token ids that the model has no embedding for, or lengths on
            both sides of where longrope changes its factors; where ranks share a stream, lengths above it.
    """
    text_config = model_config.get_text_config()
    shortest, longest = int(lengths.min()), int(lengths.max())
    max_positions = getattr(text_config, "max_position_embeddings", None)
    if max_positions is not None and longest > max_positions:
        raise ConfigError(
            f"max_length: a sample of {key} has {longest} tokens, but the model has {max_positions} "
            f"positions; set max_length to {max_positions} or less"
        )
    vocab_size = getattr(text_config, "vocab_size", None)
    if vocab_size is not None and largest_token >= vocab_size:
        raise ConfigError(
            f"model_name_or_path: its tokenizer makes token {largest_token} of {key}, but the model has {vocab_size} "
            "tokens; use the model's own tokenizer, or resize the model's embeddings first"
        )
    # Transformers gives a whole call the factors of its longest document: batches would decide a short one's.
    kind, short = longest_before_change(text_config) or ("", longest)
    if sequence_size > 1 and longest > short:
        raise ConfigError(
            f"max_length: {key} has a sample of {longest} tokens, but the model's {kind} computes those above {short} "
            f"in another way, which none of the {sequence_size} ranks that share it can tell from its slice; set "
            f"max_length to {short} or less, or leave out sp_size and cp_size"
        )
    if kind == "longrope" and shortest <= short < longest:
        raise ConfigError(
            f"max_length: {key} has samples of {shortest} and of {longest} tokens, but the model's longrope "
            f"computes those up to {short} in another way, and a batch in one way; set max_length to {short} or less"
        )


def _window_reader(config: SFTConfig, source: ModelSource, cache: TokenCache, layout: Layout) -> WindowReader:
    """What is streamed. Hub data sets are looked up on rank 0 first."""
    on_main(layout, lambda: _requests("dataset", config) and None, may_take_long="stream")
    return WindowReader(
        _requests("dataset", config),
        [entry.weight for entry in data_sources(config.dataset)],
        source.tokenizer,
        rows=config.streaming_window,
        check=lambda block: check_fit(
            "dataset",
            block.lengths,
            block.report.max_token_id,
            source.config,
            sequence_size=layout.sequence_size,
        ),
        tokenizer_key=cache.tokenizer_key,
    )


def make_loader(
    config: SFTConfig, run_data: RunData, layout: Layout, *, pad_token_id: int
) -> StepLoader | StreamLoader:
    """The order in which this rank sees the samples."""
    batches = batch_options(config, layout, pad_token_id=pad_token_id)
    if run_data.windows is not None:
        return StreamLoader(run_data.windows, **batches)
    content = "".join(store.digest for store in run_data.samples.stores)
    return StepLoader(run_data.samples, sources=run_data.segments, content=content, **batches)


def batch_options(config: SFTConfig, layout: Layout, *, pad_token_id: int) -> dict[str, Any]:
    """What a loader is told beside the samples."""
    return {
        "seed": config.seed,
        "dp_size": layout.dp_size,
        "dp_rank": layout.dp_rank,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "per_device_train_batch_size": config.per_device_train_batch_size,
        "max_tokens_per_batch": config.max_tokens_per_batch,
        "pad_token_id": pad_token_id,
    }


def stop_token(samples: Sequence[Sample], tokenizer: Any) -> int | None:
    """The special token that ends what is trained, if all of the first samples end with the same one.

    Generation is to stop there, also where the model comes with another end, as a base model does.
    """
    last = {
        next(label for label in reversed(samples[index].labels) if label != IGNORE_INDEX)
        for index in range(min(len(samples), 100))
    }
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return last.pop() if len(last) == 1 and last <= special else None


def eval_batches(samples: Selection, config: SFTConfig, layout: Layout) -> list[TokenStream]:
    """This rank's share of the held-out samples, as many batches as every other rank has.

    Packed as in training if training is packed; otherwise `per_device_eval_batch_size` samples of like length
    a batch. The mean over all label tokens is the same either way.
    """
    lengths = samples.lengths.tolist()
    if config.max_tokens_per_batch is not None:
        batches = pack(lengths, config.max_tokens_per_batch)
    else:
        by_length = sorted(range(len(samples)), key=lambda index: (-lengths[index], index))
        size = config.per_device_eval_batch_size
        batches = [by_length[start : start + size] for start in range(0, len(by_length), size)]
    num_rounds = -(-len(batches) // layout.dp_size)
    batches += [[]] * (num_rounds * layout.dp_size - len(batches))
    return [
        build_stream([samples[index] for index in batch])
        for batch in batches[layout.dp_rank :: layout.dp_size]
    ]
