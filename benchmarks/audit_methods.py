"""One forward pass against generation, on the same items: the same verdicts, and how much faster.

    python benchmarks/audit_methods.py --model SmolLM2-135M-Instruct --math500 math500.jsonl --gsm8k gsm8k_test.jsonl

Three ways of finding out which tails a model completes, one after another in one process:

- forward: `--method forward`, one packed pass, and generation where it can't tell;
- generate: `--method generate`, batched, with a KV cache, each continuation ending at its first divergence;
- plain: Transformers' `generate`, item by item, as many tokens as the tail has.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from hfpar.audit.auditor import end_tokens
from hfpar.audit.forward import Forward
from hfpar.audit.generate import Generator
from hfpar.audit.model import ModelSettings, load_audited, open_model
from hfpar.audit.prefix import TailLimits, TextTokenizer
from hfpar.audit.probe import PlannedItem, Probe, ProbeSettings
from hfpar.audit.ranks import batches_of
from hfpar.audit.results import ItemResult
from hfpar.audit.sets import load_sets, plan_items
from hfpar.config.audit_schema import AuditConfig
from hfpar.train.quiet import quiet_libraries

Verdicts = dict[tuple[str, str, float], bool]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--math500", required=True, metavar="PATH")
    parser.add_argument("--gsm8k", required=True, metavar="PATH")
    parser.add_argument("--max_items", type=int, default=60, help="of each benchmark, for all three ways")
    parser.add_argument("--max_tokens_per_batch", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    quiet_libraries(is_main=True)
    config = AuditConfig(
        model_name_or_path=given.model,
        benchmarks="math500,gsm8k",
        benchmark_files={"math500": given.math500, "gsm8k": given.gsm8k},
        builtin_controls="none",
        max_items=given.max_items,
    )
    with open_model(ModelSettings(given.model)) as source:
        tokenizer = TextTokenizer(source.tokenizer)
        planned = plan_items(load_sets(config), tokenizer, [0.4, 0.6], TailLimits(), source.max_length)
        loaded = load_audited(source, torch.device("cpu"))
        ends = end_tokens(source)
    num_tokens = sum(len(item.tokenized.input_ids) for item in planned)
    num_tails = sum(not cut.skipped for item in planned for cut in item.cuts)
    print(
        f"{len(planned)} items, {num_tokens:,} tokens, {num_tails} tails, {torch.get_num_threads()} threads"
    )

    found: dict[str, tuple[float, Verdicts]] = {}
    for method in ("forward", "generate"):
        probe = Probe(
            Forward(loaded.model, packs=loaded.packs),
            Generator(loaded.model, ends[0], ends),
            tokenizer,
            ProbeSettings(method=method, max_tokens_per_batch=given.max_tokens_per_batch),  # type: ignore[arg-type]
        )
        probe(planned[:2])
        begin = time.perf_counter()
        results: list[ItemResult] = []
        for batch in batches_of(
            [len(item.tokenized.input_ids) for item in planned], given.max_tokens_per_batch
        ):
            results += probe([planned[index] for index in batch])
        found[method] = (time.perf_counter() - begin, verdicts(results))
        settled = sum(cut.settled_by == "generation" for item in results for cut in item.cuts)
        print(f"{method}: {found[method][0]:.1f} s, {settled} of {num_tails} tails by generation", flush=True)
    found["plain"] = plain_generation(loaded.model, tokenizer, planned)
    print(f"plain: {found['plain'][0]:.1f} s")

    seconds, expected = found["forward"]
    summary: dict[str, Any] = {"items": len(planned), "tokens": num_tokens, "tails": num_tails}
    for method, (taken, given_verdicts) in found.items():
        same = sum(given_verdicts[key] == verdict for key, verdict in expected.items())
        summary[method] = {"seconds": taken, "ratio": taken / seconds, "same_verdicts": same}
        print(
            f"{method:<9} {taken:8.1f} s  {taken / seconds:6.1f} x  {same} of {len(expected)} verdicts the same"
        )
    print(f"completed: {sum(expected.values())}; forward reads {num_tokens / seconds:.0f} tokens/s")
    if given.json:
        given.json.write_text(json.dumps(summary, indent=2) + "\n")


def verdicts(results: list[ItemResult]) -> Verdicts:
    return {
        (item.set, item.item_id, cut.ratio): cut.exact
        for item in results
        for cut in item.cuts
        if not cut.skipped
    }


def plain_generation(
    model: Any, tokenizer: TextTokenizer, planned: list[PlannedItem]
) -> tuple[float, Verdicts]:
    found: Verdicts = {}
    begin = time.perf_counter()
    for item in planned:
        ids, text = item.tokenized.input_ids, item.tokenized.text
        for cut in item.cuts:
            if cut.skipped:
                continue
            prompt = torch.tensor([ids[: cut.num_prefix_tokens]])
            with torch.inference_mode():
                output = model.generate(
                    input_ids=prompt,
                    attention_mask=torch.ones_like(prompt),
                    do_sample=False,
                    max_new_tokens=len(ids) - cut.num_prefix_tokens,
                    pad_token_id=0,
                )
            written = tokenizer.continuation(prompt[0].tolist(), output[0, prompt.shape[1] :].tolist())
            found[item.set, item.item.item_id, cut.ratio] = written.startswith(text[cut.position :])
    return time.perf_counter() - begin, found


if __name__ == "__main__":
    main()
