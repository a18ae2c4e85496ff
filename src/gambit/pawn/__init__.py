"""Pawn, the bundled tiny reasoning model: its puzzles and its weights. `benchmarks/pawn` makes it."""

from pathlib import Path

from gambit.pawn.puzzles import Level, Puzzle, Split, generate, parse_puzzle
from gambit.types import NamedModel

MODEL_FOLDER = Path(__file__).parent / "model"
MODEL = NamedModel(MODEL_FOLDER, parse_puzzle)

__all__ = ["MODEL", "MODEL_FOLDER", "Level", "Puzzle", "Split", "generate", "parse_puzzle"]
