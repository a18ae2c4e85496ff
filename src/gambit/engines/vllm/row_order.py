"""Rows of a step in tree order: traces with a long prefix in common are neighbours and read it from the L2 cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

TreePath = tuple[int, ...]  # search, root, then for each branch: minus the tokens it inherited, and its number


def root_path(search: int, trace: int) -> TreePath:
    return (search, trace)


def child_path(parent: TreePath, inherited: int, trace: int) -> TreePath:
    """Sorted by these, all traces with the same first n tokens are neighbours, for every n.

    A child that leaves its parent before, or where, the parent left its own is another child of that one. Among the
    children of a trace those that leave it last come first, next to it.
    """
    end = len(parent)
    while end > 2 and -parent[end - 2] >= inherited:
        end -= 2
    return (*parent[:end], -inherited, trace)


class RowOrder:
    """Of the requests that a worker knows."""

    def __init__(self) -> None:
        self._paths: dict[str, TreePath] = {}
        self._counts: dict[str, int] = {}  # of the last step, in whatever order
        self._ordered: dict[str, int] = {}

    def update(self, finished: Iterable[str], new: Iterable[tuple[str, TreePath]]) -> None:
        for request in finished:
            self._paths.pop(request, None)
        self._paths.update(new)

    def ordered(self, counts: Mapping[str, int]) -> dict[str, int]:
        """A step's rows in tree order; they are sorted when the step differs from the one before."""
        if counts != self._counts:
            self._counts = dict(counts)
            rows = sorted(counts, key=lambda request: self._paths.get(request, ()))
            self._ordered = {request: counts[request] for request in rows}
        return self._ordered
