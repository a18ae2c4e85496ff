"""Writes the report of a bench run: Markdown, JSON, figures, an HTML page, tree pages."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gambit.bench import figures
from gambit.bench.datasets import slug
from gambit.bench.folder import BenchPlan, read_environments, read_plan
from gambit.bench.page import Content, render
from gambit.bench.recipe import default_options
from gambit.bench.rows import Row, read_rows
from gambit.bench.summary import BenchSummary, summarise
from gambit.bench.tables import Table, all_tables, cautions, findings
from gambit.errors import GambitError, UserError
from gambit.view import write_page

NO_FIGURES = "Figures were left out: matplotlib is not installed here (pip install 'gambit-search[bench]')."
FIGURES_FOLDER = "figures"
PAGES_FOLDER = "trees"
MOST_PAGES = 8


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What was written."""

    markdown: str
    json: str
    tables: tuple[Table, ...]
    sentences: tuple[str, ...]


def summary_of(folder: Path) -> tuple[BenchPlan, list[Row], BenchSummary]:
    """A run's figures, from its rows."""
    plan = read_plan(folder)
    rows = list(read_rows(folder))
    names = [info.name for info in plan.benchmarks]
    summary = summarise(rows, plan.variants, names, plan.recipe.bench.seeds, plan.num_tasks)
    if not summary.cells:
        raise UserError(f"{folder}: no problem has been searched by every method yet, so that nothing can be compared")
    return plan, rows, summary


def write_report(folder: Path, *, with_trees: bool = True) -> BenchReport:
    """report.md, report.json, report.html, figures/*.png and trees/*.html in the run's folder."""
    plan, rows, summary = summary_of(folder)
    pictures = list(figures.draw_all(summary, rows)) if figures.is_available() else []
    content = Content(
        title=f"Gambit bench: {', '.join(summary.benchmarks)}",
        lead=_lead(plan, rows, summary),
        cautions=cautions(summary),
        findings=findings(summary),
        tables=all_tables(summary),
        figures=[(picture.svg, picture.caption) for picture in pictures],
        environment=_environment(folder, plan),
        links=tree_pages(folder, rows, summary) if with_trees else [],
        notes=[] if pictures else [NO_FIGURES],
    )
    return write_files(folder, content, pictures, _json(plan, summary, content.environment))


def write_files(folder: Path, content: Content, pictures: Sequence[figures.Picture], as_json: str) -> BenchReport:
    """report.md, report.json, report.html and figures/*.png."""
    report = BenchReport(
        markdown=_markdown(content, [f"{FIGURES_FOLDER}/{picture.name}.png" for picture in pictures]),
        json=as_json,
        tables=tuple(content.tables),
        sentences=(*content.cautions, *content.findings),
    )
    for name, text in (("md", report.markdown), ("json", report.json), ("html", render(content))):
        (folder / f"report.{name}").write_text(text, encoding="utf-8")
    if pictures:
        (folder / FIGURES_FOLDER).mkdir(exist_ok=True)
    for picture in pictures:
        (folder / FIGURES_FOLDER / f"{picture.name}.png").write_bytes(picture.png)
    return report


def _lead(plan: BenchPlan, rows: Sequence[Row], summary: BenchSummary) -> str:
    bench = plan.recipe.bench
    num_engines = len({row.engine for row in rows})
    engines = "one engine" if num_engines == 1 else f"each of {num_engines} engines"
    if (width := max((row.engines for row in rows), default=1)) > 1:
        engines = f"{width} engines together"
    problems = sum(info.num_problems for info in plan.benchmarks)
    seeds = "one seed" if len(bench.seeds) == 1 else f"{len(bench.seeds)} seeds"
    methods = ", ".join(summary.variants[:8]) + (" …" if len(summary.variants) > 8 else "")
    return f"{methods} on {problems:,} problems, {seeds}, {bench.concurrency} at a time on {engines}."


def _environment(folder: Path, plan: BenchPlan) -> dict[str, str]:
    """Returns the last start's stamp, the starts and the options that differ from the defaults."""
    usual = default_options()
    flat = {name: value for name, value in {**plan.recipe.search, **plan.recipe.engine}.items()
            if name != "model" and value != usual.get(name)}  # fmt: skip
    found = {"model": f"{plan.identity.get('model')} ({plan.identity.get('model_hash')})", **made_with(folder)}
    found["options"] = ", ".join(f"{key} = {value}" for key, value in flat.items()) or "as the model's preset says"
    found["problems"] = ", ".join(f"{info.name}: {info.num_problems} ({info.hash})" for info in plan.benchmarks)
    return found


def made_with(folder: Path) -> dict[str, str]:
    """Engine, device, versions and times of a run's starts."""
    starts = read_environments(folder)
    found: dict[str, str] = {}
    if starts:
        last = starts[-1]
        engine, packages = last["engine"], last["packages"]
        assert isinstance(engine, dict) and isinstance(packages, dict)
        found |= {
            "engine": f"{engine['name']}, {engine['dtype']}, KV cache of {engine['kv_capacity_tokens']:,} tokens",
            "device": f"{last['device']} ({engine['device']}), {last['threads']} threads",
            "versions": ", ".join(f"{name} {number}" for name, number in packages.items())
            + f", Python {last['python']}",
            "source": str(last["commit"] or "installed package"),
            "started": ", ".join(str(start["time"]) for start in starts),
        }
        if len({json.dumps({**start, "time": None}, sort_keys=True) for start in starts}) > 1:
            found["note"] = "the environment changed between starts: see environment.jsonl"
    return found


def tree_pages(folder: Path, rows: Sequence[Row], summary: BenchSummary) -> list[tuple[str, str]]:
    """A tree page per method for one problem, where logs were kept: the first that they do not all solve."""
    chosen = _telling_problem([row for row in rows if row.log is not None and (folder / row.log).is_file()])
    links = []
    for row in sorted(chosen, key=lambda row: summary.variants.index(row.variant))[:MOST_PAGES]:
        page = Path(PAGES_FOLDER) / f"{slug(row.benchmark)}-{row.problem}-{slug(row.variant)}.html"
        with suppress(GambitError):  # a report without a page of a tree is still a report
            write_page(folder / str(row.log), folder / page)
            links.append((page.as_posix(), f"{row.variant} on {row.benchmark} {row.problem}"))
    return links


def _telling_problem(rows: Sequence[Row]) -> list[Row]:
    """The rows of one problem with one seed."""
    groups: dict[tuple[str, str, int], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.benchmark, row.problem, row.seed].append(row)
    telling = (group for group in groups.values() if len({row.correct for row in group}) > 1)
    return next(telling, next(iter(groups.values()), []))


def _markdown(content: Content, pictures: Sequence[str]) -> str:
    parts = [f"# {content.title}", content.lead]
    parts += [f"> {caution}" for caution in content.cautions]
    parts += [content.tables[0].to_markdown()]
    if content.findings:
        parts.append("## What is shown and what is not\n\n" + "\n".join(f"- {line}" for line in content.findings))
    parts += [f"![{caption}]({path})" for path, (_, caption) in zip(pictures, content.figures, strict=True)]
    parts += [table.to_markdown() for table in content.tables[1:]]
    parts.append("## Made with\n\n" + "\n".join(f"- {key}: {value}" for key, value in content.environment.items()))
    return "\n\n".join([*parts, *content.notes]) + "\n"


def _json(plan: BenchPlan, summary: BenchSummary, environment: Mapping[str, str]) -> str:
    found = {"plan": plan.to_json(), "environment": environment, **dataclasses.asdict(summary)}
    return json.dumps(found, indent=2, ensure_ascii=False)
