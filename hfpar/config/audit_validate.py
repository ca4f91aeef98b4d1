"""Refuse settings of an audit that cannot work, as far as the settings alone can tell."""

from __future__ import annotations

import math
from dataclasses import fields

from hfpar.config.audit_schema import AuditConfig
from hfpar.config.validate import did_you_mean, names_in, show
from hfpar.errors import ConfigError

BUILTIN_CONTROLS = ("perturbed", "random_calculation")
DEFAULT_RATIOS = (0.4, 0.6)
MOST_PERMUTATIONS = 10_000

_AT_LEAST_ONE = (
    "num_control_items",
    "max_items",
    "max_new_tokens",
    "order_permutations",
    "min_tail_words",
    "min_tail_chars",
    "max_tokens_per_batch",
    "request_concurrency",
)
_OF_A_SERVER = ("base_url", "api_key_file", "request_timeout", "request_concurrency")
_OF_THIS_PROCESS = (
    "base",
    "trust_remote_code",
    "dtype",
    "attn_implementation",
    "reference_model",
    "chat_template",
    "order_test",
    "max_tokens_per_batch",
)
_NOT_EMPTY = (
    "model_name_or_path",
    "base",
    "reference_model",
    "base_url",
    "api_key_file",
    "benchmarks",
    "benchmark_files",
    "controls",
    "builtin_controls",
    "ratios",
    "output_dir",
    "compare",
)


def validate_audit(config: AuditConfig) -> None:
    """Refuse impossible values, and combinations of settings that contradict each other.

    Raises:
        ConfigError: One line with the key, its value, what is allowed and how to mend it.
    """
    _check_values(config)
    _check_controls(config)
    _check_server(config)
    if config.compare is not None:
        if len(config.compare) < 2:
            raise ConfigError(
                f"compare: {show(config.compare)}; must be two or more checkpoints or folders of audits"
            )
        if config.model_name_or_path is not None:
            raise ConfigError("compare: names the checkpoints itself; leave model_name_or_path out")
        if config.plan:
            raise ConfigError("plan: true with compare; a plan is made for one checkpoint, so leave one out")
    elif config.model_name_or_path is None and not config.plan:
        raise ConfigError(
            "model_name_or_path: missing; name the checkpoint to audit, or use --plan, which needs none"
        )


def _check_values(config: AuditConfig) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{field.name}: {value}; must be a finite number")
    for name in _AT_LEAST_ONE:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name}: {value}; must be a whole number of at least 1")
    for name in _NOT_EMPTY:
        value = getattr(config, name)
        empty = isinstance(value, str) and not names_in(value)
        if value is not None and (not value or empty):
            raise ConfigError(f"{name}: {show(value)} is empty; give a value, or leave {name} out")
    ratios = config.ratios or []
    for ratio in ratios:
        if not 0 < ratio < 1:
            raise ConfigError(f"ratios: {show(ratios)}; each must be above 0 and below 1, such as 0.4")
    if len(set(ratios)) < len(ratios):
        raise ConfigError(f"ratios: {show(ratios)}; each may stand once")
    if not 0 < config.alpha < 1:
        raise ConfigError(f"alpha: {config.alpha}; must be above 0 and below 1, such as 0.05")
    if config.order_permutations > MOST_PERMUTATIONS:
        raise ConfigError(
            f"order_permutations: {config.order_permutations}; must be at most {MOST_PERMUTATIONS}: eight items have "
            "no more orders than four times that"
        )
    if config.tie_tolerance < 0:
        raise ConfigError(f"tie_tolerance: {config.tie_tolerance}; must be 0 or more")
    if config.request_timeout <= 0:
        raise ConfigError(f"request_timeout: {config.request_timeout}; must be above 0, in seconds")
    if not 0 <= config.seed < 2**32:
        raise ConfigError(f"seed: {config.seed}; must be 0 or more and below 2**32")


def _check_controls(config: AuditConfig) -> None:
    builtin = names_in(config.builtin_controls)
    for name in builtin:
        if name not in (*BUILTIN_CONTROLS, "none"):
            near = did_you_mean(name, BUILTIN_CONTROLS)
            raise ConfigError(
                f"builtin_controls: {show(name)}; allowed are {', '.join(BUILTIN_CONTROLS)} or none{near}"
            )
    if "none" in builtin and len(builtin) > 1:
        raise ConfigError(f"builtin_controls: {show(config.builtin_controls)}; none stands alone")
    benchmarks = names_in(config.benchmarks)
    if len(set(benchmarks)) < len(benchmarks):
        raise ConfigError(f"benchmarks: {show(config.benchmarks)}; each may stand once")
    for name in config.controls or {}:
        own = name.rpartition("/")[2]
        if own in (*BUILTIN_CONTROLS, *benchmarks, "others", ""):
            raise ConfigError(f"controls: {show(name)}; this name is taken, choose another")
    for name in config.benchmark_files or {}:
        if name not in benchmarks:
            raise ConfigError(
                f"benchmark_files: {show(name)}, but benchmarks: {show(config.benchmarks)} doesn't name it"
            )


def _check_server(config: AuditConfig) -> None:
    defaults = AuditConfig()
    is_set = {
        name: getattr(config, name) != getattr(defaults, name) for name in (*_OF_A_SERVER, *_OF_THIS_PROCESS)
    }
    if config.backend == "openai":
        for name in _OF_THIS_PROCESS:
            if is_set[name]:
                raise ConfigError(
                    f"{name}: {show(getattr(config, name))} with backend: openai; it needs the model in this "
                    "process, so use backend: transformers or leave it out"
                )
        if config.plan:
            return
        if config.base_url is None:
            raise ConfigError("base_url: missing; backend: openai needs it, such as http://localhost:8000/v1")
        if not config.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url: {show(config.base_url)}; must begin with http:// or https://")
        return
    for name in _OF_A_SERVER:
        if is_set[name]:
            raise ConfigError(f"{name}: {show(getattr(config, name))} without a server; add backend: openai")
