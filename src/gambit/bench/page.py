"""The bench report as one HTML page without external files, for light and dark screens."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gambit.bench.tables import Table

STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --rule: #d9d9d9; --dim: #666; --mark: #fff6d6; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e4e4; --paper: #17181a; --rule: #3d4045; --dim: #a0a4aa; --mark: #3a3317; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 2rem 4rem; max-width: 1120px; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
p.lead, p.note, figcaption { color: var(--dim); margin: .3rem 0; } p.note, figcaption { font-size: .87rem; }
ul.caution { background: var(--mark); padding: .6rem 1rem .6rem 2rem; border-radius: 6px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--rule); white-space: nowrap; }
td:not(.number) { white-space: normal; }
th { font-weight: 600; } .number { text-align: right; font-variant-numeric: tabular-nums; }
figure { margin: 1.2rem 0; } figure svg { width: 100%; height: auto; max-width: 560px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .87rem; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; } a { color: inherit; }
details summary { cursor: pointer; }
"""


@dataclass(frozen=True, slots=True)
class Content:
    """All that stands on the page."""

    title: str
    lead: str
    cautions: Sequence[str]
    findings: Sequence[str]
    tables: Sequence[Table]
    figures: Sequence[tuple[str, str]]  # element, caption
    environment: Mapping[str, str]
    links: Sequence[tuple[str, str]]  # target, text
    notes: Sequence[str]


def render(content: Content) -> str:
    """The first table and the claims come first: that is what a reader came for."""
    first, rest = content.tables[:1], content.tables[1:]
    parts = [
        f"<h1>{html.escape(content.title)}</h1><p class=lead>{html.escape(content.lead)}</p>",
        _list(content.cautions, "caution"),
        *(table.to_html() for table in first),
        "<h2>What is shown and what is not</h2>" + _list(content.findings) if content.findings else "",
        "<h2>Figures</h2>" if content.figures else "",
        *(f"<figure>{svg}<figcaption>{html.escape(text)}</figcaption></figure>" for svg, text in content.figures),
        *(table.to_html() for table in rest),
        _links(content.links),
        "<h2>Made with</h2>" + _pairs(content.environment),
        *(f"<p class=note>{html.escape(note)}</p>" for note in content.notes),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
    title = f"<title>{html.escape(content.title)}</title>"
    return f'<!doctype html>\n<html lang="en"><head>{head}{title}</head><body>{"".join(parts)}</body></html>\n'


def _list(items: Sequence[str], kind: str = "") -> str:
    if not items:
        return ""
    mark = f" class={kind}" if kind else ""
    return f"<ul{mark}>" + "".join(f"<li>{html.escape(item)}</li>" for item in items) + "</ul>"


def _pairs(values: Mapping[str, str]) -> str:
    rows = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in values.items())
    return f"<dl>{rows}</dl>"


def _links(links: Sequence[tuple[str, str]]) -> str:
    if not links:
        return ""
    items = "".join(f'<li><a href="{html.escape(to, quote=True)}">{html.escape(text)}</a></li>' for to, text in links)
    return f"<h2>Trees of single searches</h2><ul>{items}</ul>"
