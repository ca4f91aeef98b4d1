"""YAML as hfpar reads and writes it: one flat mapping, with the line of each key, and no key twice.

PyYAML keeps the last of two equal keys without a word, so the mapping is built from its nodes here.
"""

from collections.abc import Mapping
from typing import NamedTuple

import yaml

from hfpar.errors import ConfigError


class Entry(NamedTuple):
    """A value of a YAML mapping and the line of its key, counted from 1."""

    value: object
    line: int


def read_mapping(path: str) -> dict[str, Entry]:
    """Read a file that holds one flat YAML mapping; an empty file is an empty mapping.

    Raises:
        ConfigError: The file can't be read, isn't YAML, isn't a mapping, or has a key twice. The message
            names the file and, where there is one, the line in it.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except OSError as error:
        raise ConfigError(f"--config {path}: {(error.strerror or 'cannot be read').lower()}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path}: not UTF-8 text (byte {error.start})") from error
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode):
            found = "a list" if isinstance(node, yaml.SequenceNode) else "plain text"
            raise ConfigError(f"{path}, line {node.start_mark.line + 1}: {found}; must be `key: value` lines")
        return _entries(path, loader, node)
    except yaml.YAMLError as error:
        raise ConfigError(_syntax_message(path, error)) from error
    finally:
        if loader is not None:
            loader.dispose()


def write_mapping(values: Mapping[str, object]) -> str:
    """Text that `read_mapping` reads back as the same keys, values and types, in the same order."""
    return yaml.dump(dict(values), Dumper=yaml.SafeDumper, sort_keys=False, allow_unicode=True, width=10_000)


def _entries(path: str, loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = str(loader.construct_object(key_node, deep=True))
        if key in entries:
            raise ConfigError(
                f"{path}: {key} is set twice, in lines {entries[key].line} and {line}; keep one"
            )
        entries[key] = Entry(loader.construct_object(value_node, deep=True), line)
    return entries


def _syntax_message(path: str, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"{path}, line {mark.line + 1}" if mark else path
    problem = getattr(error, "problem", None) or str(error)
    return f"{where}: not valid YAML: {' '.join(str(problem).split())}"
