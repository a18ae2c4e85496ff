"""`python -m gambit.pawn.train`: from nothing to the folder that ships, seeded, minutes on one GPU."""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from gambit.pawn import MODEL_FOLDER


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m gambit.pawn.train", description=__doc__)
    parser.add_argument("--out", type=Path, default=MODEL_FOLDER, help="folder to write (default: the one that ships)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, help="updates of the network, instead of the recipe's")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that make data")
    parser.add_argument("--tiny", action="store_true", help="a useless model in seconds on a CPU, to test the recipe")
    options = parser.parse_args(arguments)

    # Here, not above: worker processes import this module and need no torch.
    import torch

    from gambit.pawn.recipe import TINY, Plan, run

    plan = replace(TINY if options.tiny else Plan(), seed=options.seed)
    if options.updates:
        plan = replace(plan, recipe=replace(plan.recipe, num_updates=options.updates))
    device = torch.device("cuda" if torch.cuda.is_available() and not options.tiny else "cpu")
    # As the card tells it: where the folder was written is nobody's business.
    decisive = {"--seed": options.seed or None, "--updates": options.updates, "--workers": options.workers}
    flags = [f"{flag} {value}" for flag, value in decisive.items() if value is not None]
    command = " ".join(["python -m gambit.pawn.train", *flags, *(["--tiny"] if options.tiny else [])])
    record = run(plan, options.out, device, options.workers, command, _say)
    for level, reached in record.accuracy.items():
        _say(f"{level}: {reached}")
    for position, ranked in record.ranking.items():
        _say(f"{position}: {ranked}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
