"""Answers are extracted from texts, brought into a normal form and compared."""

from gambit.answers.extract import AnswerKind, Extractor, extract_boxed, extractor_for
from gambit.answers.forms import canonical
from gambit.answers.grader import Equivalent, Grader

__all__ = ["AnswerKind", "Equivalent", "Extractor", "Grader", "canonical", "extract_boxed", "extractor_for"]
