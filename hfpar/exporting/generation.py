"""Where generation stops: an adapter has no such setting, and its base may not know the turns that were trained."""

from __future__ import annotations

import json
from pathlib import Path

from hfpar.config.schema import SFTConfig
from hfpar.data.chat.encode import EncodeOptions, encode
from hfpar.data.reading.rows import Conversation, Place
from hfpar.exporting.run import Run

_FILE = "generation_config.json"
_CONVERSATION = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello."}]


def write_generation_config(run: Run, folder: Path) -> None:
    """The base's settings, with the token that ends a trained turn among those that end a generation."""
    path = run.base / _FILE
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    stop = None if run.config is None else _end_of_turn(run, run.config)
    if stop is not None:
        given = settings.get("eos_token_id", getattr(run.base_config, "eos_token_id", None))
        known = [] if given is None else given if isinstance(given, list) else [given]
        if stop not in known:
            settings["eos_token_id"] = [*known, stop] if known else stop
    if settings:
        (folder / _FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _end_of_turn(run: Run, config: SFTConfig) -> int | None:
    """The special token that the model was taught to end its turn with; None: it wasn't, or not with one."""
    tokenizer = run.tokenizer
    if not tokenizer.chat_template:
        return None
    options = EncodeOptions(max_length=2**20, chat_template_kwargs=config.chat_template_kwargs or {})
    row = encode([(Place("", "row", 1), Conversation(_CONVERSATION))], tokenizer, options)[0]
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    trained = [
        token
        for sample in row.samples[-1:]
        for token, is_trained in zip(sample.input_ids, sample.trained, strict=True)
        if is_trained
    ]
    return trained[-1] if trained and trained[-1] in special else None
