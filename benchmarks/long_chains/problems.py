"""Writes generated word problems as lines of JSON, and words prompts for them in several ways.

python benchmarks/long_chains/problems.py chains:16 dev 150 > dev.jsonl
"""

import argparse
import json
import sys

from gambit.chains import HOW_TO_WRITE, SPLITS, SYNTAX, generate
from gambit.errors import UserError

__all__ = ["PHRASES", "generate", "prompt"]

PHRASES = {
    "lines": HOW_TO_WRITE,
    "paragraphs": "Work through this one step at a time. Write each step as a short paragraph of its own, with a blank "
    "line after it, and end it with the value found. Put your final answer within \\boxed{}.",
    "numbered": "Please reason step by step in a numbered list: one step per line, each line ending with its result. "
    "Then give the final answer in \\boxed{}.",
    "plain": "Please reason step by step, and put your final answer within \\boxed{}.",
}


def prompt(question: str, phrase: str = "lines") -> str:
    """Returns what the model is given: the question and how to write the solution."""
    return f"{question}\n\n{PHRASES[phrase]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", metavar="SPEC", help=" or ".join(SYNTAX))
    parser.add_argument("split", metavar="SPLIT", choices=SPLITS, help=" or ".join(SPLITS))
    parser.add_argument("count", metavar="COUNT", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        for row in generate(args.spec, args.split, args.count, args.seed):
            print(json.dumps(row))
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
