"""Every setting of an audit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """Find out which items of a benchmark a checkpoint has seen, with evidence item by item."""

    model_name_or_path: str | None = None
    """The checkpoint: a folder, a hub id, or the folder of a PEFT adapter, whose base is loaded with it. With a server,
    the name by which it knows the model."""
    base: str | None = None
    """Of an adapter: folder or hub id of its base, if that isn't where the adapter says."""
    trust_remote_code: bool = False
    """Run Python code that the model's folder brings along."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the weights; auto: as the checkpoint stores them on a GPU, float32 on a CPU."""
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2", "varlen"] = "auto"
    """Kernel of hfpar's attention; auto takes the fastest that can compute what the model needs."""
    reference_model: str | None = None
    """A second model, which hasn't seen the benchmark: its loss is put beside the audited one's."""
    backend: Literal["transformers", "openai"] = "transformers"
    """Where the model runs: in this process, or behind a server with OpenAI's /v1/completions."""
    base_url: str | None = None
    """Of the server, such as http://localhost:8000/v1."""
    api_key_file: str | None = None
    """File that holds the server's key."""
    request_timeout: float = 60.0
    """Seconds for one answer of the server."""
    request_concurrency: int = 8
    """Requests that the server gets at a time."""

    benchmarks: str | list[str] = "math500"
    """What to look for: math500, gsm8k, gsm8k_train, or YAML files that describe others; several with commas."""
    benchmark_files: dict[str, str] | None = None
    """Files to read benchmarks from instead of the hub, by name: math500=PATH."""
    controls: dict[str, str] | None = None
    """Texts that the model can't have seen, by a name of your own: name=PATH; benchmark/name=PATH holds them against
    that benchmark only."""
    builtin_controls: str | list[str] = "perturbed,random_calculation"
    """Controls that hfpar makes itself: perturbed copies of the benchmark's own items, and arithmetic problems; none
    for neither."""
    num_control_items: int = 500
    """Items of each control that hfpar makes, per benchmark."""
    max_items: int | None = None
    """Only so many items of each benchmark and of each control's file, spread evenly over it; of a control first those
    that vary one of the benchmark's."""

    ratios: list[float] | None = None
    """Shares of a problem that the model is given; null: 0.4 and 0.6."""
    method: Literal["forward", "generate"] = "forward"
    """How exact completions are found: one forward pass over the whole text, or by generating; both agree."""
    chat_template: bool = False
    """Probe a second time with the prefix as a user's message in the model's chat template."""
    generate: bool = False
    """Also write out whole continuations: ROUGE-L, edit similarity, and the answer reached from the prefix alone."""
    answers: bool = False
    """Also let the model answer the whole questions, and perturbed ones where a control has pairs."""
    max_new_tokens: int = 512
    """Most tokens of a generated continuation or answer."""
    order_test: bool = False
    """Also test whether the file's own order of items is likelier than shuffled ones."""
    order_permutations: int = 19
    """Shuffled orders of each shard; with m of them no shard's own p-value is below 1 / (m + 1)."""
    tie_tolerance: float = 1e-4
    """Logits closer than this to the best count as tied, and generation decides."""

    min_tail_words: int = 8
    """Shorter tails aren't probed: anyone completes them."""
    min_tail_chars: int = 32
    """The same in characters."""
    alpha: float = 0.05
    """Level of the tests, after Holm's correction."""
    max_tokens_per_batch: int | None = None
    """Tokens of the texts that are read together, and of a batch of generation. Null: 4096 on a CPU
    (which reads them in packs of 1024) and 8192 on a GPU."""
    seed: int = 42
    """Of controls, bootstrap and permutations."""

    output_dir: str | None = None
    """Where the report and the items go; null: runs/audit/MODEL. The same command again goes on where it was
    stopped."""
    overwrite: bool = False
    """Begin anew in a folder that holds another audit."""
    fail_on: Literal["none", "some", "strong"] = "none"
    """End with exit code 1 where a benchmark's evidence is at least this: for release checks."""
    plan: bool = False
    """Say what the audit would cost and could find, and stop; needs no model."""
    compare: list[str] | None = None
    """Checkpoints, or folders of finished audits, to put side by side, such as before and after a fine-tuning."""
