"""Read settings from YAML files and flags, and write them back; the only user of jsonargparse.

jsonargparse converts and checks each single value (`2e-5` too, which PyYAML takes for text) and formats
`--help`. The rest is done here, because its errors take several lines and name Python types, a file wins over
the flags in front of it, a boolean flag needs a value, and the text "null" in a file becomes no value.
"""

import argparse
import ast
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args, get_origin

import yaml
from jsonargparse import ArgumentError, ArgumentParser  # noqa: TID251

from hfpar.config.audit_schema import AuditConfig
from hfpar.config.audit_validate import validate_audit
from hfpar.config.schema import DataSource, SFTConfig
from hfpar.config.validate import did_you_mean, show, validate
from hfpar.config.yaml_io import read_mapping, write_mapping
from hfpar.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Settings(Generic[T]):
    """A dataclass of settings, and what its command line knows beside it."""

    cls: type[T]
    validate: Callable[[T], None]
    groups: Mapping[str, str]
    """The first setting of each group in `--help`."""
    elsewhere: Mapping[str, str]
    """Names that people know from other programs and that no spelling check would find."""

    def hints(self) -> dict[str, Any]:
        """The types by name."""
        return typing.get_type_hints(self.cls)


SFT = Settings(
    SFTConfig,
    validate,
    groups={
        "model_name_or_path": "Model",
        "tp_size": "Ranks that share a layer or a sequence",
        "dataset": "Data",
        "per_device_train_batch_size": "Batches",
        "optim": "Optimization",
        "lora_r": "LoRA",
        "output_dir": "The run's folder, metrics and checkpoints",
    },
    elsewhere={
        "batch_size": "did you mean per_device_train_batch_size?",
        "bf16": "mixed_precision in the Accelerate config file sets it",
        "context_parallel_size": "did you mean cp_size?",
        "deepspeed": "the Accelerate config file names the engine",
        "dp_size": "it is what tp_size, sp_size and cp_size leave of num_processes",
        "epochs": "did you mean num_train_epochs?",
        "fp16": "mixed_precision in the Accelerate config file sets it",
        "fsdp": "the Accelerate config file names the engine",
        "lr": "did you mean learning_rate?",
        "model": "did you mean model_name_or_path?",
        "packing": "max_tokens_per_batch packs",
        "pp_size": "pipeline parallelism isn't supported yet",
        "sequence_parallel_size": "did you mean sp_size?",
        "sequence_parallel": "did you mean tp_sequence, or sp_size?",
        "tensor_parallel_size": "did you mean tp_size?",
        "ulysses_size": "did you mean sp_size?",
        "use_peft": "lora_r above 0 trains adapters",
    },
)

AUDIT = Settings(
    AuditConfig,
    validate_audit,
    groups={
        "model_name_or_path": "Model",
        "benchmarks": "Benchmarks and controls",
        "ratios": "Probes",
        "min_tail_words": "What is counted, and how",
        "output_dir": "The report",
    },
    elsewhere={
        "batch_size": "max_tokens_per_batch sets it in tokens",
        "limit": "did you mean max_items?",
        "model": "did you mean model_name_or_path?",
        "tasks": "did you mean benchmarks?",
        "temperature": "the probe is greedy",
        "api_key": "api_key_file names a file that holds it: other users of a machine see command lines",
    },
)

_CONFIG_HELP = "YAML file of settings; may be given several times: later files win, flags win over all."
_APPEND_FORM = re.compile(r", --\w+\+ TEXT\.\.\.")
"""jsonargparse's `--dataset+ X`, which appends to a list; here a list's flag takes several values instead."""

_USAGE = "%(prog)s [--config FILE] ... [--SETTING VALUE] ..."


class _Flag(NamedTuple):
    name: str
    values: list[str]


def parse_sft_config(argv: list[str]) -> SFTConfig:
    """`parse` of a training run's settings."""
    return parse(SFT, argv)


def parse_audit_config(argv: list[str]) -> AuditConfig:
    """`parse` of an audit's settings."""
    return parse(AUDIT, argv)


def parse(settings: Settings[T], argv: list[str]) -> T:
    """Merge `--config` files and flags into a checked config; `--help` prints all settings and exits.

    Later files win over earlier ones, and flags over all files. A boolean flag without a value means true; a
    flag for a list takes several values.

    Args:
        settings: which there are.
        argv: The command line without the program's name.

    Raises:
        ConfigError: Anything that is wrong with a file or a flag, in one line.
        SystemExit: After `--help`.
    """
    hints = settings.hints()
    parser = _build_parser(settings)
    if "-h" in argv or "--help" in argv:
        sys.stdout.write(_APPEND_FORM.sub("", parser.format_help()))
        raise SystemExit(0)
    paths, flags = _split(argv, settings)
    values: dict[str, Any] = {}
    for path in paths:
        for key, entry in read_mapping(path).items():
            where = f"{path}, line {entry.line}: "
            if key not in hints:
                raise ConfigError(f"{where}{_unknown(key, show(entry.value), settings)}")
            values[key] = _from_yaml(parser, where, key, entry.value, hints[key])
    for flag in flags:
        values[flag.name] = _from_flag(parser, flag, hints[flag.name])
    config = settings.cls(**values)
    settings.validate(config)
    return config


def dump_config(config: SFTConfig | AuditConfig) -> str:
    """YAML of every setting; given to `--config`, it makes an equal config."""
    return write_mapping(plain_settings(config))


def plain_settings(config: SFTConfig | AuditConfig) -> dict[str, Any]:
    """Every setting as a YAML file has it."""
    return {key: _plain(value) for key, value in vars(config).items()}


def _plain(value: Any) -> Any:
    """A value as YAML has it; of an entry of `dataset`, what isn't left open."""
    if isinstance(value, DataSource):
        return {name: item for name, item in asdict(value).items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _build_parser(settings: Settings[Any]) -> ArgumentParser:
    # The formatter is argparse's own: jsonargparse's appends Python's names of types.
    parser = ArgumentParser(
        exit_on_error=False,
        usage=_USAGE,
        description=settings.cls.__doc__,
        formatter_class=argparse.HelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help=_CONFIG_HELP)
    help_texts = _attribute_docstrings(settings.cls)
    hints = settings.hints()
    group: Any = parser
    for field in fields(settings.cls):
        name, hint = field.name, hints[field.name]
        if name in settings.groups:
            group = parser.add_argument_group(settings.groups[name])
        text = f"{help_texts[name]} ({_allowed(hint)}; default: {show(field.default)})".replace("%", "%%")
        group.add_argument(f"--{name}", type=hint, default=field.default, help=text, metavar=_metavar(hint))
    return parser


def _attribute_docstrings(cls: type) -> dict[str, str]:
    """The string under each annotated field of a class, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    texts = {}
    for statement, after in zip(body, body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr):
            texts[statement.target.id] = " ".join(ast.literal_eval(after.value).split())  # type: ignore[union-attr]
    return texts


def _split(argv: list[str], settings: Settings[Any]) -> tuple[list[str], list[_Flag]]:
    """Take a command line apart into the `--config` paths and the other flags with their values."""
    hints = settings.hints()
    paths: list[str] = []
    flags: list[_Flag] = []
    position = 0
    while position < len(argv):
        token = argv[position]
        position += 1
        if not token.startswith("--") or token == "--":
            raise ConfigError(f"{show(token)}: not a flag; settings are given as --name value")
        name, equals, text = token[2:].partition("=")
        values = [text] if equals else []
        if not equals:
            while position < len(argv) and not argv[position].startswith("--"):
                if values and not (name in hints and _takes_list(hints[name])):
                    break
                values.append(argv[position])
                position += 1
        if name == "config":
            if not values or not values[0]:
                raise ConfigError("--config: needs a file, as in --config sft/configs/full.yaml")
            paths += values
        elif name not in hints:
            raise ConfigError("--" + _unknown(name, show(values[0]) if values else "(no value)", settings))
        else:
            flags.append(_Flag(name, values))
    return paths, flags


def _from_yaml(parser: ArgumentParser, where: str, key: str, value: object, hint: Any) -> Any:
    if value is None and type(None) not in _alternatives(hint):
        raise ConfigError(f"{where}{key}: null; must be {_allowed(hint)}, or leave the line out")
    if isinstance(value, str) and str in _alternatives(hint):
        return value  # jsonargparse would read the text once more, and take "null" for no value
    if _takes_sources(hint) and isinstance(value, list):
        return [_source(where, key, item) for item in value]
    if _takes_mapping(hint) and isinstance(value, dict):
        return _mapping(where, key, value, hint)
    try:
        return parser.parse_object({key: value}, defaults=False)[key]
    except ArgumentError:
        raise ConfigError(f"{where}{_wrong_value(key, value, hint)}") from None


def _from_flag(parser: ArgumentParser, flag: _Flag, hint: Any) -> Any:
    if not flag.values:
        if hint is bool:
            return True
        raise ConfigError(f"--{flag.name}: needs a value; must be {_allowed(hint)}")
    if _takes_mapping(hint) and flag.values != ["null"]:
        return _mapping_flag(flag, hint)
    is_numbers = list[int] in _alternatives(hint) or list[float] in _alternatives(hint)
    if len(flag.values) > 1 and not is_numbers:
        return flag.values
    text = ", ".join(flag.values)
    if _takes_sources(hint) and text[:1] == "[":
        return _from_yaml(parser, "--", flag.name, _read_inline(flag.name, text, hint), hint)
    if _takes_list(hint) and str not in _alternatives(hint) and text != "null" and text[:1] != "[":
        if not is_numbers:
            return [text]
        text = f"[{text}]"
    try:
        return parser.parse_args([f"--{flag.name}={text}"], defaults=False)[flag.name]
    except ArgumentError:
        raise ConfigError("--" + _wrong_value(flag.name, text, hint)) from None


# Settings that are more than one value


def _source(where: str, key: str, item: object) -> str | DataSource:
    """An entry of `dataset`: a path, or a mapping that says more."""
    if isinstance(item, str):
        return item
    hints = typing.get_type_hints(DataSource)
    needs = f"an entry must be a path or a mapping of {', '.join(hints)}"
    if not isinstance(item, dict):
        raise ConfigError(f"{where}{key}: {show(item)}; {needs}")
    for name in item:
        if name not in hints:
            raise ConfigError(f"{where}{key}: {show(item)}; {needs}{did_you_mean(str(name), list(hints))}")
    if "path" not in item:
        raise ConfigError(f"{where}{key}: {show(item)} has no path; {needs}")
    values = {name: _entry_value(where, key, name, value, hints[name]) for name, value in item.items()}
    return DataSource(**values)


def _entry_value(where: str, key: str, name: str, value: object, hint: Any) -> Any:
    if value is None and name != "path":
        return DataSource.__dataclass_fields__[name].default
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if _takes_mapping(hint) and isinstance(value, dict):
        return _mapping(where, f"{key}.{name}", value, hint)
    allowed = [
        choice for part in _alternatives(hint) if get_origin(part) is Literal for choice in get_args(part)
    ]
    if isinstance(value, str) and (value in allowed if allowed else str in _alternatives(hint)):
        return value
    raise ConfigError(f"{where}{_wrong_value(f'{key}.{name}', value, hint)}")


def _mapping(where: str, key: str, value: dict[Any, Any], hint: Any) -> dict[str, Any]:
    only_text = dict[str, str] in _alternatives(hint)
    for name, item in value.items():
        if not isinstance(name, str) or (only_text and not isinstance(item, str)):
            raise ConfigError(f"{where}{_wrong_value(key, value, hint)}")
    return value


def _mapping_flag(flag: _Flag, hint: Any) -> dict[str, Any]:
    """`--name a=b c=d`, or one YAML or JSON mapping."""
    if len(flag.values) == 1 and flag.values[0][:1] == "{":
        value = _read_inline(flag.name, flag.values[0], hint)
        if not isinstance(value, dict):
            raise ConfigError("--" + _wrong_value(flag.name, flag.values[0], hint))
        return _mapping("--", flag.name, value, hint)
    pairs = [text.partition("=") for text in flag.values]
    if not all(name and equals for name, equals, _ in pairs):
        raise ConfigError("--" + _wrong_value(flag.name, flag.values, hint))
    only_text = dict[str, str] in _alternatives(hint)
    return {name: text if only_text else _read_inline(flag.name, text, hint) for name, _, text in pairs}


def _read_inline(name: str, text: str, hint: Any) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError("--" + _wrong_value(name, text, hint)) from None


def _unknown(name: str, value: str, settings: Settings[Any]) -> str:
    hint = settings.elsewhere.get(name) or did_you_mean(name, list(settings.hints())).removeprefix("; ")
    return (
        f"{name}: {value}; there is no such setting" + (f"; {hint}" if hint else "") + " (--help lists all)"
    )


def _wrong_value(key: str, value: object, hint: Any) -> str:
    near = ""
    if get_origin(hint) is Literal and isinstance(value, str):
        near = did_you_mean(value, get_args(hint))
    quoted = " (in quotes)" if str in _alternatives(hint) and not isinstance(value, str | list | dict) else ""
    return f"{key}: {show(value)}; must be {_allowed(hint)}{quoted}{near}"


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _takes_list(hint: Any) -> bool:
    """Whether a flag may have several values."""
    return any(get_origin(part) in (list, dict) for part in _alternatives(hint))


def _takes_sources(hint: Any) -> bool:
    return list[str | DataSource] in _alternatives(hint)


def _takes_mapping(hint: Any) -> bool:
    return any(get_origin(part) is dict for part in _alternatives(hint))


def _allowed(hint: Any) -> str:
    """What a setting may be, in words."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint))
    words = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        list[str]: "a list of texts such as [a, b]",
        list[int]: "a list of whole numbers such as [1, 2]",
        list[float]: "a list of numbers such as [0.4, 0.6]",
        list[str | DataSource]: "a list of texts or of mappings such as {path: a, weight: 2}",
        dict[str, str]: "a mapping of texts such as {a: b}",
        dict[str, Any]: "a mapping such as {a: 1}",
        type(None): "null",
    }
    return " or ".join(words[part] if part in words else _allowed(part) for part in _alternatives(hint))


def _metavar(hint: Any) -> str:
    if any(get_origin(part) is Literal for part in _alternatives(hint)):
        return "NAME"
    if _takes_mapping(hint):
        return "NAME=VALUE..."
    if _takes_list(hint):
        return "TEXT..."
    return {bool: "[true|false]", int: "N", float: "X", str: "TEXT"}[_alternatives(hint)[0]]
