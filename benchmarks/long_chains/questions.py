"""Prints a collection's judging problems as questions of `gambit bench`, with the phrase that was chosen.

python -m benchmarks.long_chains.questions FOLDER FAMILY > questions.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.long_chains.problems import prompt


def main() -> None:
    folder, family = Path(sys.argv[1]), sys.argv[2]
    for line in (folder / f"{family}-judge.jsonl").read_text(encoding="utf-8").splitlines():
        problem = json.loads(line)
        question = prompt(problem["question"], problem["setting"]["phrase"])
        print(json.dumps({"id": problem["id"], "question": question, "answer": problem["answer"]}))


if __name__ == "__main__":
    main()
