"""A tokenized document, as plain lists: processes that only read and tokenize start without torch."""

from __future__ import annotations

from dataclasses import dataclass

IGNORE_INDEX = -100
"""The label of a position that has none, as in `torch.nn.functional.cross_entropy`."""


@dataclass(frozen=True)
class Sample:
    """One tokenized document."""

    input_ids: list[int]
    labels: list[int]
    """Same length as `input_ids` and not shifted: the token itself where it is to be learnt, else -100."""

    def __post_init__(self) -> None:
        """Check that every token has a label entry."""
        if len(self.input_ids) != len(self.labels):
            raise ValueError(f"{len(self.input_ids)} input_ids but {len(self.labels)} labels")
