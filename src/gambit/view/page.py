"""Puts a run's data and the page's assets into one HTML file."""

import dataclasses
import html
import json
from collections.abc import Mapping
from importlib.resources import files
from itertools import chain
from pathlib import Path

from gambit import events as ev
from gambit.answers import Grader
from gambit.errors import UserError
from gambit.storage.run_folder import find_log
from gambit.text.tokenizers import Tokenizer
from gambit.view import data
from gambit.view.history import History, follow
from gambit.view.text import TokenText, read_tokens, tokenizer_of

SCRIPTS = ("model.js", "groups.js", "paint.js", "tree.js", "charts.js", "panel.js", "main.js")  # in order of use
NO_TEXT = "Traces are shown as token numbers, because their tokenizer cannot be read here: {reason}"


def write_page(run_log: Path | str, out: Path | str, tokenizer: str | Tokenizer | None = None) -> None:
    """Writes the tree page of one event log, or of a folder that holds one.

    The text of the traces is decoded with the tokenizer that the log names, or with `tokenizer`: a folder, a hub name,
    or a loaded one where many pages are written. Without any the page shows token numbers and a notice.
    """
    log, out = find_log(Path(run_log)), Path(out)
    history = follow(ev.read_log(log), log)
    text, problems = _text_of(history, tokenizer)
    with Grader() as grader:
        content, texts = data.build(history, text, grader.equivalent, problems)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(render(content, texts), encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from error


def _text_of(history: History, given: str | Tokenizer | None) -> tuple[TokenText, list[str]]:
    traces, started = history.record.tree.traces, history.record.started
    tokens = chain(started.prompt_tokens, chain.from_iterable(trace.own_tokens for trace in traces))
    try:
        loaded = tokenizer_of(started, given) if given is None or isinstance(given, str) else given
        return read_tokens(tokens, loaded), []
    except UserError as error:
        if given is not None:
            raise
        return read_tokens(tokens, None), [NO_TEXT.format(reason=error)]


def render(content: data.PageData, texts: str) -> str:
    """Returns the page. Nothing in the data can end its element, and base64 has no markup."""
    parts = {
        "TITLE": html.escape(f"{content.run.problem} · Gambit"),
        "STYLE": asset("page.css"),
        "STAGE": asset("stage.html"),
        "DATA": inert_json(content),
        "TEXTS": texts,
        "SCRIPT": "\n".join(map(asset, SCRIPTS)),
    }
    return filled(asset("page.html"), parts)


def filled(page: str, parts: Mapping[str, str]) -> str:
    """Replaces the {{NAMES}} of a template, each by its text as it is."""
    before, *rest = page.split("{{")
    return before + "".join(parts[name] + after for name, _, after in (piece.partition("}}") for piece in rest))


def inert_json(content: data.PageData) -> str:
    """Returns JSON that cannot end the script element around it."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False, default=_fields)
    return text.replace("<", "\\u003c")


def _fields(record: object) -> dict[str, object]:
    """Returns the fields of a record as they are; `dataclasses.asdict` would copy every number."""
    assert dataclasses.is_dataclass(record), f"no page data: {type(record).__name__}"
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def asset(name: str) -> str:
    """Returns the text of a file of the page."""
    return (files("gambit.view") / "assets" / name).read_text(encoding="utf-8")
