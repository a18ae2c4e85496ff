"""Long chains of dependent steps as word problems, written by a generator: amounts, and things that change places."""

from gambit.chains.problems import FAMILIES, HOW_TO_WRITE, SYNTAX, Spec, generate, parse_spec, stream
from gambit.chains.words import SPLITS

__all__ = ["FAMILIES", "HOW_TO_WRITE", "SPLITS", "SYNTAX", "Spec", "generate", "parse_spec", "stream"]
