"""The `gambit` command: options, live displays, exit codes."""

import io
import os
import sys
from pathlib import Path


def main() -> None:
    """Runs the command line, which is imported late, so that importing the package stays cheap."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell, as in `gambit … >&-`
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 # for the whole process
    if isinstance(sys.stdout, io.TextIOWrapper):  # as stderr does: an ASCII terminal is no reason to lose an answer
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        from gambit.cli.app import main as run

        run()
    except KeyboardInterrupt:  # before a command has begun, which reports it itself
        raise SystemExit(130) from None
