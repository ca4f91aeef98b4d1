"""Which of many special and added tokens are shown."""

from __future__ import annotations

from collections.abc import Sequence

from hfpar.tokentool.measure import Model

MOST_LISTED = 40


def choose_tokens(models: Sequence[Model], *, all_tokens: bool) -> tuple[list[str], int]:
    """The texts to show, and how many are left out.

    First what the chat template writes or names and what has a role, then what was never trained, then the others;
    shown in the order of the first model's ids.

    Args:
        models: one, or two to compare.
        all_tokens: leave none out.
    """
    order: dict[str, tuple[int, int, int]] = {}
    for number, model in enumerate(models):
        untrained = model.untrained
        for token in model.tokens.values():
            matters = 0 if token.template == "written" or token.roles else 1 if token.template else 3
            matters = min(matters, 2 if token.id in untrained else 3)
            known = order.get(token.text, (3, number, token.id))
            order[token.text] = (min(matters, known[0]), known[1], known[2])
    texts = sorted(order, key=lambda text: order[text])
    most = len(texts) if all_tokens else MOST_LISTED
    listed = sorted(texts[:most], key=lambda text: order[text][1:])
    return listed, len(texts) - len(listed)
