"""What the command line reads and writes besides the plain case: kinds of files, encodings, columns, outputs."""

import codecs
import json
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from typer.testing import CliRunner

import gambit
from gambit.cli import app as cli_app
from gambit.cli.app import app
from gambit.config.options import EngineConfig, SearchConfig, build
from gambit.config.presets import ModelDefaults, Preset, resolve
from gambit.errors import UserError, check_host
from gambit.storage.problems import read_problem_file, read_problems
from gambit.storage.run_folder import check_writable
from gambit.types import Problem
from support.tables import table

SMALL = ("--capacity", "4", "--check-interval", "5", "--warmup-tokens", "5", "--max-new-tokens", "60")
TWO = [{"question": "a=1", "answer": 7}, {"question": "b=2", "answer": "x"}]


def stdin_of(content: bytes) -> TextIOWrapper:
    return TextIOWrapper(BytesIO(content), encoding="utf-8")


def found_in(path: Path, **columns: str):
    found = read_problem_file(path, columns)
    return [(problem.id, problem.question, found.expected.get(problem.id)) for problem in found.problems]


# -- files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.jsonl", "\n".join(map(json.dumps, TWO))),
        ("P.JSONL", "\r\n".join(map(json.dumps, TWO)) + "\r\n\r\n"),
        ("p.ndjson", "\n\n".join(map(json.dumps, TWO))),
        ("p.json", json.dumps(TWO, indent=2)),
        ("p.Json", json.dumps(TWO)),
        ("p.csv", "question,answer\na=1,7\nb=2,x\n"),
        ("p.CSV", 'answer,"question"\r\n7,"a=1"\r\nx,b=2\r\n'),
        ("p.tsv", "question\tanswer\na=1\t7\nb=2\tx"),
    ],
)
@pytest.mark.parametrize(
    "encode",
    [
        str.encode,
        lambda text: codecs.BOM_UTF8 + text.encode(),
        lambda text: codecs.BOM_UTF16_LE + text.encode("utf-16-le"),
        lambda text: codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
        lambda text: codecs.BOM_UTF32_LE + text.encode("utf-32-le"),
    ],
    ids=["utf-8", "utf-8 with a mark", "utf-16-le", "utf-16-be", "utf-32"],
)
def test_problems_are_read_from_files_of_every_kind(tmp_path, name, text, encode):
    path = tmp_path / name
    path.write_bytes(encode(text))
    assert [(question, answer) for _, question, answer in found_in(path)] == [("a=1", "7"), ("b=2", "x")]


def test_one_object_of_a_json_file_is_one_problem(tmp_path):
    (tmp_path / "p.json").write_text('{"question": "a=1", "id": "x", "answer": null}')
    assert found_in(tmp_path / "p.json") == [("x", "a=1", None)]


def test_columns_of_other_names_take_the_place_of_ours(tmp_path):
    (tmp_path / "p.csv").write_text("name,prompt,target,question\nx,a=1,7,other\n")
    assert found_in(tmp_path / "p.csv", question="prompt", answer="target", id="name") == [("x", "a=1", "7")]
    assert found_in(tmp_path / "p.csv") == [("1", "other", None)]


def test_an_id_that_is_null_is_no_id(tmp_path):
    (tmp_path / "p.jsonl").write_text('\n{"question": "a=1", "id": null}')
    assert found_in(tmp_path / "p.jsonl") == [("2", "a=1", None)]


def test_a_field_of_a_csv_may_have_lines_and_the_line_of_its_end_is_named(tmp_path):
    (tmp_path / "p.csv").write_text('id,question\n1,"a=1\nb=2"\n2,"c\nd",x\n')
    with pytest.raises(UserError, match=r"p.csv, line 5: the header has 2 columns"):
        read_problem_file(tmp_path / "p.csv", {})


def test_a_field_of_a_csv_may_be_longer_than_the_limit_of_pythons_reader(tmp_path):
    (tmp_path / "p.csv").write_text(f"question,answer\n{'x' * 200_000},7\n")
    [(_, question, answer)] = found_in(tmp_path / "p.csv")
    assert len(question) == 200_000 and answer == "7"


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_an_answer_that_is_no_number_is_refused_with_its_line(tmp_path, value):
    """pandas writes NaN for an empty cell: no trace could be right."""
    (tmp_path / "p.jsonl").write_text(f'{{"question": "a", "answer": 1}}\n{{"question": "b", "answer": {value}}}\n')
    with pytest.raises(UserError, match=r'p.jsonl, line 2: "answer" is (nan|-?inf), not a number: write the answer'):
        read_problem_file(tmp_path / "p.jsonl", {})


def test_stdin_may_have_a_mark_and_must_be_text():
    read = read_problems(None, None, stdin_of(codecs.BOM_UTF8 + "é = 1".encode()))
    assert read.problems[0].question == "é = 1"
    with pytest.raises(UserError, match=r"stdin, line 2: byte 0xff is not UTF-8"):
        read_problems("-", None, stdin_of(b"a = 1\n\xff"))


def test_stdin_that_is_no_utf8_ends_with_code_2():
    command = [sys.executable, "-m", "gambit", "solve", "-"]
    done = subprocess.run(command, input=b"a \xff", capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.decode() == "error: stdin, line 1: byte 0xff is not UTF-8: save it as UTF-8\n"


# -- ids and folders -------------------------------------------------------------------------------------------


@table("name", ["../../evil", "a/b", "..", ".", "", "a\\b", "a\0b", "/etc"])
def test_an_id_that_leaves_the_folder_is_refused_in_python_too(name):
    with pytest.raises(UserError, match="cannot name a problem's folder"):
        Problem("a=1", id=name)


def test_trying_a_folder_leaves_nothing_behind(tmp_path):
    check_writable(tmp_path / "a" / "b")
    check_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to"):
        check_writable(tmp_path / "file" / "x")


# -- options from Python ---------------------------------------------------------------------------------------


def test_a_wrong_option_in_python_is_the_sentence_of_the_command_line():
    for kind, values, message in (
        (SearchConfig, {"capasity": 3}, "unknown option 'capasity': did you mean 'capacity'?"),
        (SearchConfig, {"capacity": 10**9}, "capacity = 1000000000: input should be less than or equal to 65536"),
        (SearchConfig, {"temperature": float("nan")}, "temperature = nan: input should be a finite number"),
        (EngineConfig, {"devise": "cpu"}, "unknown option 'devise': did you mean 'device'?"),
        (EngineConfig, {"device": "tpu"}, "unknown device 'tpu'"),
    ):
        with pytest.raises(UserError) as from_python:
            kind(**values)
        with pytest.raises(UserError) as built:
            build(kind, values)
        assert str(from_python.value) == str(built.value) and message in str(built.value)


def test_every_number_of_a_search_has_an_upper_bound():
    unbounded = []
    for kind in (SearchConfig, EngineConfig):
        for name, schema in kind.model_json_schema()["properties"].items():
            branches = schema.get("anyOf", [schema])
            numbers = [each for each in branches if each.get("type") in ("integer", "number")]
            unbounded += [name for each in numbers if not each.keys() & {"maximum", "exclusiveMaximum"}]
    assert unbounded == ["consensus_stop"]  # whose own check holds it below 1
    with pytest.raises(UserError):
        SearchConfig(consensus_stop=1.5)


def test_more_traces_than_one_island_starts_are_a_warning():
    settings, warnings = resolve(
        SearchConfig(num_traces=100_000, capacity=8, islands=1), ModelDefaults(Preset()), 40_000, is_probability=True
    )
    assert settings.num_traces == 100_000
    assert "num_traces 100000 is above the capacity 8" in warnings[0] and "raise --capacity" in warnings[0]
    _, warnings = resolve(SearchConfig(num_traces=8, capacity=8), ModelDefaults(Preset()), 40_000, is_probability=True)
    assert warnings == []


# -- a search --------------------------------------------------------------------------------------------------


@pytest.fixture
def solve(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def call(*args: str):
        command = ["solve", "--model", str(tiny_folder), "--scorer", "constant", *SMALL, *args]
        return CliRunner().invoke(app, command)

    return call


def test_quiet_prints_answers_and_nothing_else(solve):
    Path("p.csv").write_text("id,question\none,a=1\ntwo,b=2\n")
    done = solve("--file", "p.csv", "--quiet", "--warmup-tokens", "60", "--out", "o")
    answers = {name: json.loads(Path(f"o/{name}/result.json").read_text())["answer"] for name in ("one", "two")}
    assert done.exit_code == 0 and done.stderr == ""
    assert sorted(done.stdout.splitlines()) == sorted(f"{name}\t{answer}" for name, answer in answers.items())
    single = solve("a=1", "-q", "--out", "p")
    assert single.stdout == f"{json.loads(Path('p/result.json').read_text())['answer']}\n"


def test_results_are_written_to_a_file_of_json_lines_too(solve):
    Path("p.csv").write_text("prompt,target\na=1,7\nb=2,8\n")
    done = solve("--file", "p.csv", "--map", "question=prompt,answer=target", "--output", "new/r.jsonl")
    rows = [json.loads(line) for line in Path("new/r.jsonl").read_text().splitlines()]
    assert done.exit_code == 0 and "of 2 right" in done.stdout
    assert {row["problem_id"]: row["expected"] for row in rows} == {"1": "7", "2": "8"}
    assert all(row["is_right"] is (row["answer"] == row["expected"]) for row in rows)


def test_not_one_answer_is_exit_code_3_and_one_is_enough_for_0(solve):
    Path("p.jsonl").write_text('{"question": "a=1"}\n{"question": "b=2"}\n')
    done = solve("--file", "p.jsonl", "--max-new-tokens", "1", "--warmup-tokens", "0", "--json")
    assert done.exit_code == 3 and len(done.stdout.splitlines()) == 2
    assert solve("--file", "p.jsonl", "--json").exit_code == 0


def test_benchmarks_are_listed():
    done = CliRunner().invoke(app, ["bench", "--list-benchmarks"])
    assert done.exit_code == 0 and {"pawn", "aime_2025", "gsm8k"} <= set(done.stdout.split())


# -- Windows ---------------------------------------------------------------------------------------------------


def test_windows_is_refused_in_one_sentence(monkeypatch, capsys):
    with pytest.raises(UserError, match="inside WSL"):
        check_host("win32")
    check_host("linux")
    check_host("darwin")
    monkeypatch.setattr(cli_app, "check_host", lambda: check_host("win32"))
    monkeypatch.setattr(sys, "argv", ["gambit", "doctor"])
    with pytest.raises(SystemExit, match="2"):
        cli_app.main()
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: Gambit runs on Linux and macOS") and said.err.count("\n") == 1
    monkeypatch.setattr(gambit, "check_host", lambda: check_host("win32"))
    with pytest.raises(UserError, match="inside WSL"):
        gambit.Solver  # noqa: B018
