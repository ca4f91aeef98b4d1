"""Which special and added tokens a chat template writes."""

from __future__ import annotations

from typing import Any, Literal

from hfpar.data.chat.encode import EncodeOptions, encode
from hfpar.data.chat.overflow import EncodedSample
from hfpar.data.reading.rows import Conversation, Message, Place
from hfpar.errors import ConfigError
from hfpar.models.token_matrices import tokens_in_use

TemplateUse = Literal["written", "named"]
"""written: in a rendered conversation; named: only in the template's text, for tools, images and the like."""

_NO_LIMIT = 2**31
_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


def tokens_of_template(tokenizer: Any) -> dict[int, TemplateUse]:
    """Which special and added tokens the tokenizer's template uses.

    Conversations are rendered and tokenized as training does it, with and without a system message, over two turns,
    and once up to where an answer is generated.

    Args:
        tokenizer: maybe without a template, which uses none.

    Raises:
        ConfigError: the template can't be rendered at all.
    """
    if not tokenizer.chat_template:
        return {}
    samples = _rendered(tokenizer)
    found: dict[int, TemplateUse] = dict.fromkeys(_named(tokenizer), "named")
    return found | dict.fromkeys(tokens_in_use(samples, tokenizer), "written")


def _rendered(tokenizer: Any) -> list[EncodedSample]:
    turn: list[Message] = [
        {"role": "user", "content": "How many are there?"},
        {"role": "assistant", "content": "There are two."},
    ]
    system: Message = {"role": "system", "content": "Answer in one sentence."}
    conversations = [[*turn], [system, *turn], [*turn, *turn]]
    rows = [
        (Place("conversation", "number", number), Conversation(messages))
        for number, messages in enumerate(conversations, start=1)
    ]
    encoded = encode(rows, tokenizer, EncodeOptions(max_length=_NO_LIMIT, train_on="all"))
    samples = [sample for row in encoded for sample in row.samples]
    if not samples:
        problem = next((row.problem for row in encoded if row.problem is not None), None)
        raise ConfigError(f"chat_template: can't be rendered: {problem.reason if problem else 'it is empty'}")
    try:
        ids = tokenizer.apply_chat_template(turn[:1], add_generation_prompt=True, tokenize=False)
        samples.append(EncodedSample(tokenizer(ids, add_special_tokens=False)["input_ids"], []))
    except (ValueError, TypeError, KeyError):  # it has rendered whole conversations
        pass
    return samples


def _named(tokenizer: Any) -> list[int]:
    template = tokenizer.chat_template
    texts = list(template.values()) if isinstance(template, dict) else [str(template)]
    by_name = {getattr(tokenizer, name, None) for name in _NAMES if any(name in text for text in texts)}
    return [
        token
        for token, added in tokenizer.added_tokens_decoder.items()
        if added.content in by_name
        or (added.content.strip() and any(added.content in text for text in texts))
    ]
