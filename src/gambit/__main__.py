"""`python -m gambit`."""

from gambit.cli import main

if __name__ == "__main__":
    main()
