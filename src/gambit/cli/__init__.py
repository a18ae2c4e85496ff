"""The `gambit` command: options, live displays, exit codes."""


def main() -> None:
    """Run the command line; imported late, so that importing the package stays cheap."""
    from gambit.cli.app import main as run

    run()
