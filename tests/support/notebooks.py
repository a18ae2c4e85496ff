"""Runs the cells of a notebook in one namespace and keeps what they show, as Jupyter does, but without it."""

from __future__ import annotations

import ast
import contextlib
import io
import sys
from collections.abc import Iterator
from types import SimpleNamespace


def run_cells(notebook: dict) -> list[list[dict]]:
    """Returns the outputs of each code cell, in nbformat's words."""
    shown: list[dict] = []
    names: dict[str, object] = {"__name__": "__main__"}
    found = []
    display = SimpleNamespace(display=lambda content, display_id: _Area(shown, content), IFrame=_Frame)
    with _module("IPython", SimpleNamespace(display=display)), _module("IPython.display", display):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                found.append(_run(ast.parse("".join(cell["source"])), names, shown))
                shown.clear()
    return found


@contextlib.contextmanager
def _module(name: str, module: object) -> Iterator[None]:
    """Puts a module in place of one that is not there; modules that cells import stay, since torch loads only once."""
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


def _run(code: ast.Module, names: dict[str, object], shown: list[dict]) -> list[dict]:
    last = code.body.pop() if isinstance(code.body[-1], ast.Expr) else None
    printed = io.StringIO()
    value = None
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "cell", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    streams = [{"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())}]
    result = [] if value is None else [{"output_type": "execute_result", "execution_count": None, **_data(value)}]
    return [*(each for each in streams if each["text"]), *shown, *result]


def _data(value: object) -> dict:
    html = {"text/html": _lines(value._repr_html_())} if hasattr(value, "_repr_html_") else {}
    return {"data": {**html, "text/plain": _lines(repr(value))}, "metadata": {}}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


class _Area:
    """An output that its cell may draw anew; the notebook keeps the last drawing."""

    def __init__(self, shown: list[dict], content: object) -> None:
        self._output: dict = {"output_type": "display_data"}
        shown.append(self._output)
        self.update(content)

    def update(self, content: object) -> None:
        self._output |= _data(content)


class _Frame:
    def __init__(self, src: str, width: str, height: int) -> None:
        self.src, self.width, self.height = src, width, height

    def _repr_html_(self) -> str:
        return f'<iframe src="{self.src}" width="{self.width}" height="{self.height}" title="search tree"></iframe>'

    def __repr__(self) -> str:
        return f"<IFrame {self.src}>"
