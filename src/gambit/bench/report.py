"""Writes the report of a bench run: Markdown, JSON, figures, an HTML page, tree pages."""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gambit.bench.datasets import slug
from gambit.bench.figures import accuracies, further
from gambit.bench.folder import BenchPlan, read_environments, read_plan
from gambit.bench.recipe import default_options
from gambit.bench.rows import Row, read_rows
from gambit.bench.summary import BenchSummary, summarise
from gambit.bench.tables import Table, all_tables, cautions, findings, headline
from gambit.config.registry import is_import
from gambit.errors import GambitError, UserError
from gambit.policies.base import Outcome
from gambit.results.html import Markup, joined, page, tag
from gambit.search.choice import idle_reason
from gambit.view import write_page

FIGURES_FOLDER = "figures"
TABLES_FOLDER = "tables"
PAGES_FOLDER = "trees"
MOST_PAGES = 8
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
.scroll { overflow-x: auto; background: linear-gradient(to left, var(--paper) 30%, transparent) right / 44px 100%
  no-repeat local, linear-gradient(to left, var(--dim), transparent) right / 12px 100% no-repeat scroll; }
table { border-collapse: collapse; font-size: .9rem; width: max-content; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--rule); white-space: nowrap; }
td:not(.number) { white-space: normal; max-width: 22rem; }
th { font-weight: 600; } .number { text-align: right; font-variant-numeric: tabular-nums; }
figure { margin: 1.2rem 0; } figure svg { width: 100%; height: auto; max-width: 560px; }
figure .dots { --ground: var(--paper); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .87rem; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; } a { color: inherit; }
details { border-top: 1px solid var(--rule); padding: .35rem 0; } summary { cursor: pointer; }
summary h2 { display: inline; font-size: 1rem; } details[open] summary { margin-bottom: .6rem; }
p.headline { font-size: 1.15rem; margin: .2rem 0 .5rem; } main { display: block; }
@media (max-width: 600px) { body { padding: 1rem 1rem 3rem; } h1 { font-size: 1.35rem; } }
"""


@dataclass(frozen=True, slots=True)
class Report:
    """The content of a report, of which the page, the Markdown and the JSON file are made."""

    title: str
    lead: str
    cautions: Sequence[str]
    findings: Sequence[str]
    tables: Sequence[Table]
    environment: Mapping[str, str]
    figures: Mapping[str, object]  # of the JSON file
    headline: str = ""
    plots: Mapping[str, Markup] = field(default_factory=dict)  # by title, shown first
    pictures: Mapping[str, Markup] = field(default_factory=dict)  # folded on the page
    links: Sequence[tuple[str, str]] = ()  # target, text

    def write(self, folder: Path) -> None:
        """Writes report.md, report.json, report.html, tables/*.csv and *.tex, and figures/*.svg."""
        files = {"md": self.to_markdown(), "json": self.to_json(), "html": page(self.title, STYLE, self._elements())}
        for name, text in files.items():
            (folder / f"report.{name}").write_text(text, encoding="utf-8")
        (folder / TABLES_FOLDER).mkdir(exist_ok=True)
        for each in self.tables:
            name = slug(each.title.lower().replace("@", "_at_"))
            (folder / TABLES_FOLDER / f"{name}.csv").write_text(each.to_csv(), encoding="utf-8")
            (folder / TABLES_FOLDER / f"{name}.tex").write_text(each.to_latex(), encoding="utf-8")
        for title, picture in {**self.plots, **self.pictures}.items():
            (folder / FIGURES_FOLDER).mkdir(exist_ok=True)
            (folder / _figure_file(title)).write_text(picture, encoding="utf-8")

    def to_json(self) -> str:
        return json.dumps(self.figures, indent=2, ensure_ascii=False)

    def to_markdown(self) -> str:
        parts = [f"# {self.title}", *([f"**{self.headline}**"] if self.headline else []), self.lead]
        parts += [f"> {caution}" for caution in self.cautions]
        parts += [self.tables[0].to_markdown()]
        if self.findings:
            parts.append("## What is shown and what is not\n\n" + "\n".join(f"- {line}" for line in self.findings))
        parts += [f"![{title}]({_figure_file(title)})" for title in (*self.plots, *self.pictures)]
        parts += [table.to_markdown() for table in self.tables[1:]]
        parts.append("## Made with\n\n" + "\n".join(f"- {key}: {value}" for key, value in self.environment.items()))
        return "\n\n".join(parts) + "\n"

    def _elements(self) -> Iterator[Markup]:
        """Yields the page: a sentence, a plot and the claims come first, since readers come for these."""
        yield tag("h1", self.title)
        if self.headline:
            yield tag("p", self.headline, class_="headline")
        yield tag("p", self.lead, class_="lead")
        yield from (tag("figure", plot) for plot in self.plots.values())
        yield _bullets(self.cautions, "caution")
        if self.findings:
            yield joined([tag("h2", "What is shown and what is not"), _bullets(self.findings)])
        yield from (table.to_html(is_open=number == 0 and not self.plots) for number, table in enumerate(self.tables))
        if self.pictures:
            figures = (tag("figure", picture) for picture in self.pictures.values())
            yield tag("details", tag("summary", tag("h2", "Figures")), *figures)
        if self.links:
            links = [tag("a", text, href=target) for target, text in self.links]
            yield joined([tag("h2", "Trees of single searches"), _bullets(links)])
        pairs = [element for name, text in self.environment.items() for element in (tag("dt", name), tag("dd", text))]
        yield joined([tag("h2", "Made with"), tag("dl", *pairs)])


def _figure_file(title: str) -> str:
    return f"{FIGURES_FOLDER}/{slug(title)}.svg"


def _bullets(items: Sequence[str], kind: str | None = None) -> Markup:
    return tag("ul", *(tag("li", item) for item in items), class_=kind) if items else Markup()


def write_report(folder: Path, *, with_trees: bool = True) -> Report:
    """Writes report.md, report.json, report.html, tables, figures/*.svg and trees/*.html into the run's folder."""
    plan = read_plan(folder)
    rows = list(read_rows(folder))
    names = [info.name for info in plan.benchmarks]
    summary = summarise(rows, plan.variants, names, plan.recipe.bench.seeds, plan.num_tasks)
    if not summary.cells:
        raise UserError(f"{folder}: no problem has been searched by every method yet, so that nothing can be compared")
    environment = _environment(folder, plan)
    report = Report(
        title=f"Gambit bench: {', '.join(summary.benchmarks)}",
        headline=headline(summary),
        lead=_lead(plan, rows, summary),
        cautions=[*cautions(summary), *_idle_methods(plan, rows)],
        findings=findings(summary),
        tables=all_tables(summary),
        environment=environment,
        figures={"plan": plan.to_json(), "environment": environment, **dataclasses.asdict(summary)},
        plots=dict(accuracies(summary)),
        pictures=dict(further(summary, rows)),
        links=tree_pages(folder, rows, summary) if with_trees else [],
    )
    report.write(folder)
    return report


def _idle_methods(plan: BenchPlan, rows: Sequence[Row]) -> Iterator[str]:
    """Yields a sentence for each method that had nothing to do; a folder's own MODULE:NAME is not imported for it."""
    for variant in (each for each in plan.variants if not is_import(each.policy)):
        good = [row for row in rows if row.variant == variant.label and row.error is None]
        lengths = [length for row in good for length in row.total_lengths]
        most = max((row.roots for row in good), default=0)
        kv_share = max((row.kv_peak / max(row.kv_capacity, 1) for row in good), default=0.0)
        outcome = Outcome(most, sum(row.pruned for row in good), lengths, kv_share)
        with suppress(UserError):  # a policy that is not installed here
            if reason := idle_reason(plan.recipe.search_config(variant, 0, {}), outcome):
                yield f"{variant.label} cannot have worked: {reason}."


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
    """Returns the model, the last start's stamp, the options that differ from the defaults, and the problems."""
    usual = default_options()
    flat = {name: value for name, value in {**plan.recipe.search, **plan.recipe.engine}.items()
            if name != "model" and value != usual.get(name)}  # fmt: skip
    found = {"model": f"{plan.identity.get('model')} ({plan.identity.get('model_hash')})", **made_with(folder)}
    found["options"] = ", ".join(f"{key} = {value}" for key, value in flat.items()) or "as the model's preset says"
    found["problems"] = ", ".join(f"{info.name}: {info.num_problems} ({info.hash})" for info in plan.benchmarks)
    return found


def made_with(folder: Path) -> dict[str, str]:
    """Returns engine, device, versions and times of a run's starts."""
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
    """Writes a tree page per method for the first problem that not all solve; returns links. It needs kept logs."""
    chosen = _telling_problem([row for row in rows if row.log is not None and (folder / row.log).is_file()])
    links = []
    for row in sorted(chosen, key=lambda row: summary.variants.index(row.variant))[:MOST_PAGES]:
        page = Path(PAGES_FOLDER) / f"{slug(row.benchmark)}-{row.problem}-{slug(row.variant)}.html"
        with suppress(GambitError):  # a report without a page of a tree is still a report
            write_page(folder / str(row.log), folder / page)
            verdict = "right" if row.correct else "wrong"
            links.append((page.as_posix(), f"{row.variant} on {row.benchmark} {row.problem}: {verdict}"))
    return links


def _telling_problem(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of the first problem and seed that the methods do not agree about, or of the first of all."""
    groups: dict[tuple[str, str, int], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.benchmark, row.problem, row.seed].append(row)
    telling = (group for group in groups.values() if len({row.correct for row in group}) > 1)
    return next(telling, next(iter(groups.values()), []))
