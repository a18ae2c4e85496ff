"""The tree page: one HTML file that shows what a search did, made from its event log."""

from gambit.view.page import write_page

__all__ = ["write_page"]
