"""The `gambit` command: options, live displays, exit codes."""


def main() -> None:
    """Run the command line; imported late, so that importing the package stays cheap."""
    try:
        from gambit.cli.app import main as run

        run()
    except KeyboardInterrupt:  # before a command has begun, which says so itself
        raise SystemExit(130) from None
