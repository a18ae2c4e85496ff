"""The README and the docs: every code block runs or says why not, shown output is real, links lead somewhere."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from scripts import code_tables, floors, provenance, result_tables
from scripts.pictures import PICTURES, as_file
from scripts.shown_output import printed, shown

from gambit.cli.app import COMMANDS
from gambit.config.options import SearchConfig
from gambit.errors import UserError
from gambit.pawn.puzzles import parse_puzzle
from gambit.results.dots import Dot, dot_plot
from gambit.serve.settings import EXAMPLE_PUZZLE
from support import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = [*PAGES, *ROOT.glob("[A-Z]*.md"), ROOT / "benchmarks" / "README.md", *ROOT.glob(".github/*.md")]
# A fence may carry "no-run: reason" after its language: installs, hub names, CUDA.
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
PUZZLE = re.compile(r"(?:[a-z] = [^;\"'`]+; )+[a-z]\?")
STATED = re.compile(rf"({PUZZLE.pattern})(?:[^\n]*# answer: |['`] \(|\", \")(\d+)")
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)")
SHOWN = list({block: None for page in PAGES for block in shown(page.read_text())})
MOST_NOT_RUN = 8
# Options of pip, uv, ray, docker, lm_eval and of scripts in benchmarks/.
OF_OTHERS = {
    "--address",
    "--apply",
    "--gpus",
    "--head",
    "--help",
    "--overrides",
    "--parts",
    "--verdict",
    "--tasks",
    "--torch-backend",
}
MOST_LINES, MOST_WORDS = 250, 20_000  # of a page, of all
COMMIT = re.compile(r"\b(?=[a-f]*\d)[0-9a-f]{7,10}\b")
FEWEST_COMMITS = 100  # of a history that is not cut off
GENERATED = re.compile(r"<!-- ([\w-]+): begin -->.*?<!-- \1: end -->", re.DOTALL)
MOST_README_LINES, MOST_README_WORDS, WIDEST_README_LINE = 140, 1_100, 120
INSTALL_BEFORE_LINE = 40


def blocks(page, *languages):
    return [(lang, note.strip(), code) for lang, note, code in FENCE.findall(page.read_text()) if lang in languages]


def to_run(page, *languages):
    """What runs in one go; blocks with shown output are run by themselves."""
    apart = {block.code for block in shown(page.read_text())}
    return [code for _, note, code in blocks(page, *languages) if not note and code not in apart]


@pytest.mark.system
@pytest.mark.parametrize("page", [page for page in PAGES if to_run(page, "python")], ids=lambda page: page.name)
def test_python_blocks_run_from_top_to_bottom(page, tmp_path, monkeypatch):
    """The blocks of one page build on each other, as a reader takes them."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "page.py"
    script.write_text("\n".join(to_run(page, "python")))
    only_current_names = ("-W", "ignore", "-W", "error::DeprecationWarning:__main__")
    subprocess.run([sys.executable, *only_current_names, str(script)], check=True, cwd=tmp_path, timeout=300)


def on_free_ports(script):
    """Somebody else may serve at the port that a page names."""
    for named in set(re.findall(r"--port (\d+)", script)):
        with socket.create_server(("127.0.0.1", 0)) as free:
            script = script.replace(named, str(free.getsockname()[1]))
    return script


@pytest.mark.system
@pytest.mark.parametrize("page", [page for page in PAGES if to_run(page, "bash", "sh")], ids=lambda page: page.name)
def test_shell_blocks_run(page, tmp_path, tmp_path_factory):
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path_factory.getbasetemp() / "cache"),  # the step is compiled once for all pages
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # other tests run beside
        "RAY_worker_niceness": "0",
    }
    script = on_free_ports("set -e\n" + "\n".join(to_run(page, "bash", "sh")))
    subprocess.run(["bash", "-c", script], check=True, cwd=tmp_path, timeout=600, env=environment)


def test_blocks_that_do_not_run_say_why_and_are_few():
    notes = [note for page in PAGES for _, note, _ in blocks(page, "python", "bash", "sh") if note]
    assert all(re.fullmatch(r"no-run: \w.*", note) for note in notes), notes
    assert len(notes) <= MOST_NOT_RUN


def shape(output):
    """Lines of an output without its figures, which depend on the machine; equal neighbours then count once."""
    lines = [re.sub(r"\s+", " ", re.sub(r"runs/\S+|[\d.,]+", "#", line)) for line in output.splitlines()]
    return [line for line, before in zip(lines, [None, *lines], strict=False) if line != before]


@pytest.mark.system
@pytest.mark.parametrize("block", SHOWN, ids=lambda block: block.language)
def test_pages_show_what_their_blocks_print(block, tmp_path):
    """If they do not: `python scripts/shown_output.py`."""
    output = printed(block, tmp_path)
    assert output.splitlines()[0] == block.output.splitlines()[0], "the answer"
    assert shape(output) == shape(block.output)


def puzzle_texts():
    """Pages and error texts that print puzzles, by name; a puzzle may go over several lines of a shell."""
    yield from ((page.name, page.read_text().replace("\\\n", "")) for page in PAGES)
    yield "greeting", f'"{EXAMPLE_PUZZLE}"'
    yield "model card", (ROOT / "src" / "gambit" / "pawn" / "model" / "README.md").read_text()
    with pytest.raises(UserError) as refused:
        parse_puzzle("1 + 1?")
    yield "error text", str(refused.value)


def stated_answers(text):
    """Puzzles with the answers stated beside them: by an output, a comment, in brackets, or as a benchmark's item."""
    for block in shown(text):
        for puzzle in PUZZLE.findall(block.code):
            alone = re.findall(r"^\d+$", block.output, re.MULTILINE)  # of several searches, the last one is Gambit's
            yield puzzle, alone[-1] if alone else re.findall(r"\d+", block.output.splitlines()[0])[-1]
    yield from STATED.findall(text)


def test_stated_answers_of_puzzles_are_right():
    found = {name: list(stated_answers(text)) for name, text in puzzle_texts()}
    stated = [each for pairs in found.values() for each in pairs]
    assert [(puzzle, answer) for puzzle, answer in stated if str(parse_puzzle(puzzle).answer) != answer] == []
    assert {name for name, pairs in found.items() if pairs} >= {"README.md", "cluster.md", "model card", "error text"}
    assert len(stated) >= 10


def test_printed_puzzles_are_solved_rightly(pawn_solver):
    """A newcomer who runs what a page prints should not be answered wrongly."""
    puzzles = {puzzle for _, text in puzzle_texts() for puzzle in PUZZLE.findall(text)}
    answers = {puzzle: pawn_solver.solve(puzzle, SearchConfig(capacity=16, seed=0)).answer for puzzle in puzzles}
    assert answers == {puzzle: str(parse_puzzle(puzzle).answer) for puzzle in puzzles}
    assert len(puzzles) >= 8


def test_the_readme_is_short_and_begins_with_the_installation():
    lines = PAGES[0].read_text().splitlines()
    assert len(lines) <= MOST_README_LINES
    assert len(" ".join(lines).split()) < MOST_README_WORDS
    assert max(map(len, lines)) <= WIDEST_README_LINE
    first = "\n".join(lines[:INSTALL_BEFORE_LINE])
    assert all(words in first for words in ("make demo", "make test", "pip install"))


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_of_results_show_the_results(name):
    """If they do not: `python -m scripts.pictures`."""
    assert as_file(PICTURES[name]()) == (ROOT / "docs" / "results" / f"{name}.svg").read_text()


def test_a_difference_that_is_not_shown_is_hollow():
    drawn = dot_plot("gain", [Dot("a", 1, 0.5, 1.5, is_ours=True), Dot("b", 1, -1, 3)], unit="", is_difference=True)
    assert re.findall(r'<g(?: class="(.*?)")?>', drawn) == ["ours", "open"]
    assert "<title>gain: a +1.0; b +1.0</title>" in drawn


def test_a_heading_among_the_rows_is_no_row_and_long_labels_keep_clear_of_the_dots():
    dots = [Dot("Gambit + verifier, ¼ of the cache", -15, -20, 5, is_ours=True), Dot("b", 1, -1, 3)]
    drawn = dot_plot("gain", ["searches", *dots], unit="", is_difference=True)
    assert "<title>gain: Gambit + verifier, ¼ of the cache -15.0; b +1.0</title>" in drawn and ">searches<" in drawn
    assert min(float(x) for x in re.findall(r'x1="([\d.]+)"', drawn)) > 300


def without_code(text):
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def anchors(page):
    """Of a page's headings, as GitHub and MkDocs make them; a heading that comes again gets a number."""
    found = []
    for heading in HEADING.findall(FENCE.sub("", page.read_text())):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        found.append(re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", plain.strip().lower())))
    return found


def broken_links(page):
    for path, anchor in LINK.findall(without_code(page.read_text())):
        target = page.parent / path if path else page
        if not target.exists():
            yield f"{page.name} links to {path}, which is not there"
        elif anchor and anchor not in anchors(target):
            yield f"{page.name} links to {target.name}#{anchor}, which has only {anchors(target)}"


def test_links_between_pages_lead_somewhere():
    assert [sentence for page in LINKED for sentence in broken_links(page)] == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# One thing\n[a](gone.md) [b](#one-thing) [c](page.md#another) `[d](code.md)` [e](https://e.org)\n"
    )
    assert [sentence.split(", ")[0] for sentence in broken_links(page)] == [
        "page.md links to gone.md",
        "page.md links to page.md#another",
    ]


def test_extending_needs_the_public_names_alone():
    code = "\n".join(code for _, _, code in blocks(ROOT / "docs" / "extending.md", "python"))
    assert set(re.findall(r"from (gambit[\w.]*) import", code)) == {"gambit.api"}
    assert "import gambit" not in code.replace("from gambit.api import", "")


def test_the_map_of_packages_is_the_one_that_is_checked():
    """If it is not: `python scripts/floors.py`."""
    text = floors.PAGE.read_text()
    assert floors.renewed(text) == text


def test_the_manifest_for_kuberay_gives_options_that_exist():
    manifests = list(yaml.safe_load_all((ROOT / "deploy" / "kuberay.yaml").read_text()))
    [job] = [each for each in manifests if each["kind"] == "RayJob"]
    entrypoint = job["spec"]["entrypoint"]
    known = {name for parameter in COMMANDS["bench"].made("bench").params for name in parameter.opts}
    assert set(re.findall(r"--[a-z-]+", entrypoint)) <= known
    assert subprocess.run(["sh", "-n", "-c", entrypoint], check=False).returncode == 0
    workers = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert f"--engines {sum(group['replicas'] for group in workers)}" in entrypoint


def test_the_page_on_provenance_is_made_of_the_files_beside_the_results():
    """If it is not: `python -m scripts.provenance`."""
    text = provenance.PAGE.read_text(encoding="utf-8")
    assert provenance.renewed(text) == text
    assert all(provenance.made(result).commit for result in provenance.results())


def test_commits_that_results_name_exist():
    history = subprocess.run(["git", "rev-list", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    commits = history.stdout.split()
    if len(commits) < FEWEST_COMMITS:
        pytest.skip("no history here: not a clone, or a shallow one")
    named = {name for result in provenance.results() for name in COMMIT.findall(provenance.made(result).commit)}
    assert len(named) > 20
    assert [name for name in sorted(named) if not any(each.startswith(name) for each in commits)] == []


@pytest.mark.parametrize("script", [result_tables, code_tables], ids=lambda script: script.__name__)
def test_tables_say_what_the_results_and_the_code_say(script):
    """If they do not: `python -m scripts.result_tables` or `python -m scripts.code_tables`."""
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    assert [name for name, text in texts.items() if result_tables.renewed(text, script.TABLES) != text] == []
    assert all(any(f"<!-- {name}: begin -->" in text for text in texts.values()) for name in script.TABLES)


def test_every_result_that_is_kept_is_explained_somewhere():
    pages = {ROOT / "benchmarks" / "README.md", *PAGES} - {provenance.PAGE}
    texts = " ".join(page.read_text(encoding="utf-8") for page in pages)
    assert [result.name for result in provenance.results() if result.name not in texts] == []


def words(page):
    """Returns the number of words of a page, without the tables that scripts make."""
    return len(GENERATED.sub("", page.read_text(encoding="utf-8")).split())


def test_pages_are_short_and_few_words_in_all():
    docs = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]
    lengths = {page: len(GENERATED.sub("", page.read_text(encoding="utf-8")).splitlines()) for page in docs}
    assert [name for name, length in lengths.items() if length > MOST_LINES] == []
    assert sum(map(words, docs)) < MOST_WORDS


def options_of(command):
    """Returns the options of a command and of its subcommands."""
    names = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return names.union(*(options_of(each) for each in getattr(command, "commands", {}).values()))


def test_options_that_pages_name_exist():
    known = set().union(*(options_of(command.made(name)) for name, command in COMMANDS.items()))
    texts = {page: GENERATED.sub("", page.read_text(encoding="utf-8")) for page in PAGES}
    named = {option for text in texts.values() for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)}
    assert len(known & named) > 60
    assert named - known <= OF_OTHERS


def test_every_page_is_in_the_menu():
    menu = re.findall(r"\S+\.md$", (ROOT / "mkdocs.yml").read_text().partition("\nplugins:")[0], re.MULTILINE)
    assert len(menu) == len(set(menu))
    docs = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]}
    assert docs <= set(menu) and all((ROOT / name).exists() for name in set(menu) - docs)
