"""Answers: found in a text, brought into a normal form, compared."""

from gambit.answers.extraction import AnswerKind, Extractor, extract_boxed, extractor_for
from gambit.answers.forms import canonical
from gambit.answers.grader import Equivalent, Grader

__all__ = ["AnswerKind", "Equivalent", "Extractor", "Grader", "canonical", "extract_boxed", "extractor_for"]
