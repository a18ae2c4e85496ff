"""The `gambit` command: options, live displays, exit codes."""

import io
import os
import sys
from pathlib import Path


def main() -> None:
    """Run the command line; imported late, so that importing the package stays cheap."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us, as in `gambit … >&-`
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 # for the whole process
    if isinstance(sys.stdout, io.TextIOWrapper):  # as stderr does: an ASCII terminal is no reason to lose an answer
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        from gambit.cli.app import main as run

        run()
    except KeyboardInterrupt:  # before a command has begun, which says so itself
        raise SystemExit(130) from None
