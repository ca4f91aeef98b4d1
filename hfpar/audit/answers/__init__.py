"""Answers: finding them in what a model wrote, and telling whether they are right."""

from hfpar.audit.answers.judge import answers_equal, extract_answer, gold_answer, is_right
from hfpar.audit.answers.symbolic import symbolic_backend_available

__all__ = ["answers_equal", "extract_answer", "gold_answer", "is_right", "symbolic_backend_available"]
