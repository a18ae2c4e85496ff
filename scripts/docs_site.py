"""MkDocs hooks: linked files outside docs/ come along, the API page is filled in."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
# [text](path#anchor) of a relative link; the path may be empty, and images are links too.
LINK = re.compile(r"\]\((?!\w+:|/)([^)#\s]*)(#[^)\s]+)?\)")
NOT_RUN = re.compile(r"^(```\w+) no-run:.*$", re.MULTILINE)  # a note for tests/repository/test_docs.py
PROJECT_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")  # in the menu
API = ROOT / "src" / "gambit" / "api.py"
API_HERE = "<!-- api -->"
GROUP_OR_NAME = re.compile(r'^    (?:# (.+)|"(\w+)",)$', re.MULTILINE)


def linked_files(page: Path) -> Iterator[Path]:
    """Files of the repository that a page links to."""
    for path, _ in LINK.findall(page.read_text(encoding="utf-8")):
        target = (page.parent / path).resolve()
        if path and target.is_file() and target.is_relative_to(ROOT):
            yield target


def outside_docs() -> set[Path]:
    """Everything outside docs/ that pages lead to, through other such pages too, and the pages about the project."""
    found = {ROOT / name for name in PROJECT_PAGES}
    pending = [*found, *DOCS.rglob("*.md")]
    while pending:
        for target in linked_files(pending.pop()):
            if target not in found and not target.is_relative_to(DOCS):
                found.add(target)
                pending += [target] if target.suffix == ".md" else []
    return found


def place(path: Path) -> str:
    """Returns where a file of the repository is on the site."""
    return path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).as_posix()


def source(place: str) -> Path:
    """The file of the repository behind a place on the site."""
    return DOCS / place if (DOCS / place).exists() else ROOT / place


def with_places(markdown: str, page: Path) -> str:
    """The page's text with links to where their targets are on the site."""

    def moved(link: re.Match[str]) -> str:
        path, anchor = link[1], link[2] or ""
        target = (page.parent / path).resolve()
        if not path or not target.is_file():
            return link[0]  # MkDocs names it if it is broken
        return f"]({os.path.relpath(place(target), Path(place(page)).parent)}{anchor})"

    return LINK.sub(moved, markdown)


def api_reference(module: str) -> str:
    """The names of the module's `__all__`, under headings where comments divide them."""
    listed = module[module.index("\n__all__ = [") :]
    parts = GROUP_OR_NAME.findall(listed[: listed.index("\n]")])
    return "\n\n".join(f"## {group.capitalize()}" if group else f"::: gambit.api.{name}" for group, name in parts)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for path in sorted(outside_docs()):
        files.append(File.generated(config, place(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if API_HERE in markdown:
        markdown = markdown.replace(API_HERE, api_reference(API.read_text(encoding="utf-8")))
    return NOT_RUN.sub(r"\1", with_places(markdown, source(page.file.src_uri)))
