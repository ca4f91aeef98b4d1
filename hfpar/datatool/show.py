"""`hfpar data show`: one row, as it is trained on."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from hfpar.config.schema import SFTConfig
from hfpar.data.build import Recipe, sift
from hfpar.data.chat.encode import EncodedRow, encode
from hfpar.data.chat.overflow import EncodedSample
from hfpar.data.overlap.screen import Screen, describe
from hfpar.data.reading.chunks import split_lines
from hfpar.data.reading.formats import recognise, to_example
from hfpar.data.reading.rows import Example, Place, Problem, RowError
from hfpar.data.reading.sources import Chunk, data_sources, read_chunks
from hfpar.datatool.facts import NO_LIMIT, is_too_long
from hfpar.datatool.gather import find_files
from hfpar.datatool.pieces import Piece, special_token_ids, to_pieces
from hfpar.errors import ConfigError, HfparError
from hfpar.train.model import find_model
from hfpar.train.quiet import quiet_libraries

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TRAINED = "#ffffff on #17633a"
_SPECIAL = "#1f8a9e"
_TRAINED_SPECIAL = "#9be7f5 on #17633a"
_OPEN, _CLOSE = "\u27e6", "\u27e7"
_MOST_RAW_CHARS = 4000


@dataclass(frozen=True)
class FoundRow:
    """A row, as it was read."""

    index: int
    """From 0, over all files."""
    place: Place
    value: dict[str, Any] | Problem
    raw: str | None
    """The line itself, where it couldn't be read."""
    recipe: Recipe


def run_show(
    config: SFTConfig, *, index: int | None, line: int | None, ids: bool, console: Console | None = None
) -> int:
    """Print a row.

    Args:
        config: names the data, and says what becomes of it.
        index: of the row, from 0, over all files; or None.
        line: the row's line or row number in the only file; or None.
        ids: print a table of the tokens, too.
        console: where to; stdout by default.

    Returns:
        The exit code: 0, or 1 for a row that can't be used.

    Raises:
        ConfigError: no such row, or a model or file that can't be read.
    """
    quiet_libraries(True)
    console = console or Console(highlight=False)
    row = find_row(config, index=index, line=line)
    tokenizer = find_model(config).tokenizer
    if isinstance(row.value, Problem):
        return _print_bad(console, row, row.value)
    try:
        example = to_example(row.value, row.recipe.format, row.recipe.columns)
    except RowError as error:
        return _print_bad(console, row, error.at(row.place))
    encoded = _encode(row.place, example, tokenizer, row.recipe)
    if encoded.problem is not None:
        return _print_bad(console, row, encoded.problem)
    _print_row(console, row, example, encoded, tokenizer, ids=ids)
    return 0


def find_row(config: SFTConfig, *, index: int | None, line: int | None) -> FoundRow:
    """Read up to a row.

    Raises:
        ConfigError: there is no such row, or `line` without saying of which file.
    """
    sources = data_sources(config.dataset)
    files = find_files("dataset", sources)
    num_files = sum(map(len, files))
    if line is not None and num_files > 1:
        raise ConfigError(f"--line: {line} of which of the {num_files} files? name one, or use --index")
    num_rows = last = 0
    for source, found in zip(sources, files, strict=True):
        for chunk in read_chunks(found, streaming=config.streaming):
            for place, value in chunk.rows():
                if num_rows == index or place.number == line:
                    recipe = Recipe.of(config, source, Screen.of(config))
                    recipe = recipe.for_data(found, streaming=config.streaming)
                    return FoundRow(num_rows, place, value, _raw(chunk, place), recipe)
                num_rows, last = num_rows + 1, place.number
    if line is not None:
        raise ConfigError(f"--line: {line}; the data has {chunk.unit}s 1 to {last}")
    raise ConfigError(f"--index: {index}; the data has {num_rows} rows, 0 to {num_rows - 1}")


def _raw(chunk: Chunk, place: Place) -> str | None:
    if chunk.form != "lines":
        return None
    return split_lines(chunk.payload)[place.number - chunk.first].decode("utf-8", "backslashreplace")


def _encode(
    place: Place, example: Example, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, **options: Any
) -> EncodedRow:
    return encode([(place, example)], tokenizer, replace(recipe.options, **options))[0]


def _print_bad(console: Console, row: FoundRow, problem: Problem) -> int:
    _print(console, f"{_heading(row)}: {problem.kind}", "bold red")
    _print(console, problem.reason)
    raw = row.raw
    if raw is None and isinstance(row.value, dict):
        raw = json.dumps(row.value, ensure_ascii=False, default=str)
    if raw is not None and raw.strip():
        more = len(raw) - _MOST_RAW_CHARS
        _print(console, "\n" + raw[:_MOST_RAW_CHARS] + (f"\n({more:,} more characters)" if more > 0 else ""))
    return HfparError.exit_code


def _print_row(
    console: Console,
    row: FoundRow,
    example: Example,
    encoded: EncodedRow,
    tokenizer: PreTrainedTokenizerBase,
    *,
    ids: bool,
) -> None:
    samples, many = encoded.samples, len(encoded.samples)
    state = f"{many} sample{'' if many == 1 else 's'}" if many else "not trained on"
    _print(console, f"{_heading(row)}, format {_format(row)}: {state}", "bold")
    if encoded.counts:
        _print(console, ", ".join(f"{kind}: {count}" for kind, count in encoded.counts.items()))
    for _, hits in sift([(row.place, example)], row.recipe).found:
        left_out = row.recipe.screen is not None and row.recipe.screen.action == "drop"
        _print(
            console, f"{describe(row.place, hits)}{'; left out of training' if left_out else ''}", "bold red"
        )
    if is_too_long(encoded):
        whole = _encode(row.place, example, tokenizer, row.recipe, max_length=NO_LIMIT)
        lengths = " + ".join(f"{len(sample.input_ids):,}" for sample in whole.samples) or "?"
        options = row.recipe.options
        _print(
            console, f"{lengths} tokens; max_length {options.max_length:,}, on_overflow {options.on_overflow}"
        )
        if not samples and whole.samples:
            samples = whole.samples
            _print(console, "Without max_length it would be:")
    if not samples:
        samples = _nothing_trained(row, example, tokenizer)
    colors = console.color_system is not None and not console.no_color
    console.print(_legend(colors), soft_wrap=True)
    for number, sample in enumerate(samples, start=1):
        _print_sample(console, sample, f"sample {number} of {len(samples)}", tokenizer, colors=colors)
        if ids:
            console.print(_token_table(sample, tokenizer))


def _nothing_trained(
    row: FoundRow, example: Example, tokenizer: PreTrainedTokenizerBase
) -> list[EncodedSample]:
    """What a row without a label looks like."""
    whole = _encode(row.place, example, tokenizer, row.recipe, max_length=NO_LIMIT, train_on="all")
    return [sample._replace(trained=[False] * len(sample.trained)) for sample in whole.samples]


def _heading(row: FoundRow) -> str:
    return f"{row.place} (index {row.index})"


def _format(row: FoundRow) -> str:
    if row.recipe.format != "auto":
        return row.recipe.format
    assert isinstance(row.value, dict)
    return recognise(row.value, row.recipe.columns)


def _legend(colors: bool) -> Text:
    if not colors:
        return Text(f"{_OPEN}trained{_CLOSE}")
    return Text.assemble((" trained ", _TRAINED), "  not trained  ", ("special token", _SPECIAL))


def _print_sample(
    console: Console,
    sample: EncodedSample,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    colors: bool,
) -> None:
    num_trained = sum(sample.trained[1:])
    title = f"{name}: {len(sample.input_ids):,} tokens, {num_trained:,} of them trained"
    if console.is_terminal:
        console.print(Rule(Text(title), align="left", style="dim"))
    else:
        _print(console, f"--- {title} ---")
    pieces = to_pieces(sample.input_ids, sample.trained, tokenizer)
    console.print(colored_text(pieces) if colors else bracketed_text(pieces), soft_wrap=True)


def colored_text(pieces: list[Piece]) -> Text:
    """A sample's text, trained pieces on a coloured background."""
    styles = {
        (False, False): "",
        (False, True): _SPECIAL,
        (True, False): _TRAINED,
        (True, True): _TRAINED_SPECIAL,
    }
    runs = itertools.groupby(pieces, key=lambda piece: styles[piece.trained, piece.special])
    return Text.assemble(*(("".join(visible(piece.text) for piece in run), style) for style, run in runs))


def bracketed_text(pieces: list[Piece]) -> Text:
    """A sample's text, trained pieces in brackets."""
    parts, inside = [], False
    for piece in pieces:
        if piece.trained != inside:
            parts.append(_OPEN if piece.trained else _CLOSE)
            inside = piece.trained
        parts.append(visible(piece.text))
    return Text("".join(parts) + (_CLOSE if inside else ""))


def visible(text: str) -> str:
    """Text with pictures in place of control characters, which a terminal would obey; new lines and tabs stay."""
    return "".join(
        chr(0x2400 + ord(char)) if char < " " and char not in "\n\t" else "\u2421" if char == "\x7f" else char
        for char in text
    )


def _token_table(sample: EncodedSample, tokenizer: PreTrainedTokenizerBase) -> Table:
    """A line a token; a label of -100 isn't trained."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("position", "id"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("token", overflow="fold")
    table.add_column("label", justify="right", no_wrap=True)
    special_ids = special_token_ids(tokenizer)
    names = tokenizer.convert_ids_to_tokens(sample.input_ids)
    rows = zip(sample.input_ids, names, sample.trained, strict=True)
    for position, (token, name, trained) in enumerate(rows):
        trained = trained and position > 0
        text = name if token in special_ids else repr(tokenizer.decode([token]))
        if "\ufffd" in text:  # part of a character
            text = name
        style = _TRAINED if trained else ""
        table.add_row(str(position), str(token), Text(text, style), str(token if trained else -100))
    return table


def _print(console: Console, text: str, style: str = "") -> None:
    console.print(Text(visible(text), style=style), soft_wrap=True)
