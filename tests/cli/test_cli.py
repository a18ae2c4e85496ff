"""The command line, mostly in-process on a tiny random model: what it prints where, and with which exit code."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from gambit import events as ev
from gambit.cli import doctor
from gambit.cli import main as start_command
from gambit.cli.app import app
from gambit.cli.progress import SearchScreen
from gambit.cli.results import Shown, Style, report
from gambit.config.options import NESTED_OPTIONS, EngineConfig, SearchConfig
from gambit.results.record import fold, replay
from gambit.results.result import SearchResult
from gambit.scorers.base import ScorerInfo
from gambit.scorers.checkpoint import save_checkpoint
from gambit.scorers.mlp import MlpScorer
from gambit.solver import Solver
from support.searching import check_ended

pytestmark = pytest.mark.system  # every test runs a command
REQUIRED = {"answer", "votes", "policy", "seed", "counts", "tokens", "seconds", "stop_reason", "out_dir"}
SMALL = ("--capacity", "4", "--check-interval", "5", "--warmup-tokens", "5", "--max-new-tokens", "60")
GAMBIT = (sys.executable, "-m", "gambit")


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Path:
    return tiny_folder


class Outcome:
    def __init__(self, *args: str, stdin: str | None = None) -> None:
        result = CliRunner(env={"COLUMNS": "100"}).invoke(app, list(args), input=stdin)
        self.code, self.out, self.err = result.exit_code, result.stdout, " ".join(result.stderr.split())
        assert "Traceback" not in result.output


@pytest.fixture
def solve(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`gambit solve` on the tiny model, in an empty current directory."""
    monkeypatch.chdir(tmp_path)

    def call(*args: str, model: Path = tiny, scorer: str = "constant", stdin: str | None = None) -> Outcome:
        return Outcome("solve", "--model", str(model), "--scorer", scorer, *SMALL, *args, stdin=stdin)

    return call


# -- results ---------------------------------------------------------------------------------------------------


def test_the_report_has_answer_votes_ledger_stop_reason_and_run_folder(solve, tmp_path: Path) -> None:
    outcome = solve("a=1", "-v")
    assert outcome.code == 0 and outcome.err == ""
    [folder] = (tmp_path / "runs").iterdir()
    stored = json.loads((folder / "result.json").read_text())
    lines = outcome.out.splitlines()
    assert lines[0] == f"answer: {stored['answer']}"
    for part in ("weight", "traces", "roots", "4 roots +", f"{stored['tokens']['generated']:,} generated", "reused",
                 "recomputed", f"; sharing {stored['sharing']['factor']:.2f}",
                 "the planned number of traces is complete", f"runs/{folder.name}"):  # fmt: skip
        assert part in outcome.out
    assert "\x1b" not in outcome.out


def test_json_is_one_object_with_the_documented_keys(solve, tmp_path: Path) -> None:
    outcome = solve("a=1", "--json", "--out", "here", "--seed", "3")
    result = json.loads(outcome.out)
    assert outcome.code == 0 and outcome.out.count("\n") == 1
    assert set(result) >= REQUIRED
    keys = {"answer", "weight", "traces", "roots", "forms", "islands"}
    assert result["votes"] and all(set(vote) == keys for vote in result["votes"])
    assert set(result["counts"]) >= {"roots", "branched", "pruned", "evicted", "completed"}
    assert set(result["tokens"]) == {"generated", "reused", "recomputed"}
    assert set(result["sharing"]) == {"total_tokens", "unique_tokens", "factor"} and result["sharing"]["factor"] > 1
    assert set(result["seconds"]) == {"total", "engine", "search"}
    assert (result["policy"], result["seed"], result["out_dir"]) == ("gambit", 3, "here")


def test_a_report_is_short_unless_more_is_wanted(solve) -> None:
    out = solve("a=1", "--out", "here").out
    facts = [line.split()[0] for line in out.splitlines()[-2:]]
    assert facts == ["cost", "run"] and "traces completed" in out and "share" in out
    assert "weight" not in out and "recomputed" not in out
    shares = [int(share) for share in re.findall(r"(\d+)%", out)]
    assert sum(shares) == pytest.approx(100, abs=4), "the last row has its share, too"
    stored = json.loads(Path("here/result.json").read_text())
    assert f"{stored['tokens']['generated']:,} tokens" in out


def test_a_result_says_which_pool_was_taken_and_why(solve) -> None:
    pool = json.loads(solve("a=1", "--json", "--out", "here").out)["pool"]
    assert (pool["islands"], pool["swap_size"]) == (2, 2) and "nobody has judged the scorer" in pool["why"]
    header = next(iter(ev.read_log(Path("here/events.jsonl"))))
    assert header.settings["why"] == pool["why"]
    told = " ".join(Outcome("replay", "here", "-v").out.split())
    assert (
        f"2 islands, 1 swap in each by a lead of 2 or more, warm-up of {pool['warmup_tokens']} tokens: nobody" in told
    )
    assert "roots islands" in told, "the vote table has both"
    alone = solve("a=1", "--islands", "1", "-v").out
    assert "islands = 1 is given" in alone and "roots islands" not in " ".join(alone.split())
    assert json.loads(solve("a=1", "--json", "--policy", "sc").out)["pool"] is None


def test_a_model_that_thinks_is_searched_with_a_medium_effort(tiny: Path, tmp_path: Path) -> None:
    """The tiny model has a think tag."""
    for args, sizes in (((), (16, 4)), (("--effort", "low"), (1, None)), (("--capacity", "3"), (3, None))):
        out = tmp_path / "_".join(("run", *args))
        options = ("--model", str(tiny), "--scorer", "constant", "--max-new-tokens", "24", "--out", str(out), "-q")
        Outcome("solve", *options, *args, "a?")
        started = next(ev.read_log(out / "events.jsonl"))
        assert isinstance(started, ev.RunStarted)
        assert (started.capacity, started.settings["first_traces"]) == sizes


def test_replay_prints_the_same_result(solve) -> None:
    solved = json.loads(solve("a=1", "--json", "--out", "here").out)
    replayed = json.loads(Outcome("replay", "here", "--json").out)
    assert solved.pop("text") and replayed.pop("text") is None  # a log holds token ids
    assert replayed == solved
    assert f"answer: {solved['answer']}" in Outcome("replay", "here").out


def test_no_answer_is_said_and_has_an_exit_code_of_its_own(solve) -> None:
    outcome = solve("a=1", "--max-new-tokens", "1", "--warmup-tokens", "0")
    assert outcome.code == 3
    assert outcome.out.startswith("no answer: none of the 4 completed traces gave one")


@pytest.mark.parametrize(
    ("flag", "value"), [("--budget-tokens", "30"), ("--budget-seconds", "1e-6"), ("--budget-traces", "1")]
)
def test_a_budget_that_ends_the_run_is_named(solve, flag: str, value: str) -> None:
    outcome = solve("a=1", flag, value)
    is_answered = "answer: " in outcome.out and not outcome.out.startswith("no answer")
    assert outcome.code == (0 if is_answered else 3) and f"({flag})" in outcome.out


# -- where problems and options come from -----------------------------------------------------------------------


@pytest.mark.parametrize("args", [("-",), ()])
def test_the_problem_comes_from_stdin(solve, args: tuple[str, ...]) -> None:
    assert solve(*args, "--json", "--out", "here", stdin="b=2\n").code == 0
    assert json.loads(Path("here/events.jsonl").read_text().splitlines()[0])["question"] == "b=2"


def test_a_text_file_is_one_problem(solve) -> None:
    Path("p.txt").write_text("c=3\n\nand d=4\n")
    assert solve("--file", "p.txt", "--out", "here").code == 0
    assert json.loads(Path("here/events.jsonl").read_text().splitlines()[0])["question"] == "c=3\n\nand d=4"


def test_a_jsonl_file_is_many_problems_with_a_folder_each(solve) -> None:
    lines = [{"id": "one", "question": "a=1", "answer": 8}, {"question": "a" * 600}, {"question": "b=2", "other": 1}]
    Path("p.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    outcome = solve("--file", "p.jsonl", "--concurrency", "2", "--json", "--out", "here")
    results = {result["problem_id"]: result for result in map(json.loads, outcome.out.splitlines())}
    assert set(results) == {"one", "2", "3"}
    assert "context is 512" in results["2"]["error"] and outcome.code == 2
    assert results["one"]["expected"] == "8" and results["one"]["is_right"] is (results["one"]["answer"] == "8")
    assert results["3"]["out_dir"] == "here/3" and Path("here/3/result.json").is_file()
    assert len(Outcome("replay", "here", "--json").out.splitlines()) == 2


def test_many_problems_are_summed_up_for_people(solve) -> None:
    Path("p.jsonl").write_text('{"id": "one", "question": "a=1", "answer": 123}\n')
    outcome = solve("--file", "p.jsonl")
    assert outcome.out.startswith("one: answer: ") and "123 (wrong)" in outcome.out
    assert outcome.out.endswith("0 of 1 right\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "p.jsonl holds no problem"),
        ("{", "p.jsonl, line 1: not JSON"),
        ("[1]", "line 1: must be an object"),
        ('{"problem": "x"}', 'needs a "question" of text; it has problem. --map question=COLUMN'),
        ('{"question": null}', 'line 1: "question" must be text, not null'),
        ('{"question": " "}', 'line 1: "question" is empty'),
        ('{"question": "x", "answer": [1]}', '"answer" must be text or a number, not a list'),
        ('{"question": "x", "id": "../x"}', "'../x' names the problem's folder"),
        ('{"question": "x", "id": "a"}\n{"question": "y", "id": "a"}', "line 2: the id 'a' is there twice"),
    ],
)
def test_a_broken_jsonl_file_is_refused_with_its_line(solve, content: str, message: str) -> None:
    Path("p.jsonl").write_text(content)
    outcome = solve("--file", "p.jsonl")
    assert (outcome.code, outcome.out) == (2, "") and message in outcome.err


def test_a_question_that_the_bundled_model_cannot_read_is_named_with_its_line(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text('{"question": "a = 2; b = 3; c = a + b; c?"}\n\n{"question": "What is 2+2?"}\n')
    Path("one.txt").write_text("What is 2+2?")
    for file, place in (("p.jsonl", "p.jsonl, line 3"), ("one.txt", "one.txt")):
        outcome = Outcome("solve", "--file", file)
        assert outcome.code == 2 and outcome.err.startswith(f"error: {place}: not a register puzzle: ")
        assert outcome.err.endswith("Name one with --model.")


def test_a_folder_that_cannot_be_written_is_answered_with_the_option(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").write_text("no folder")
    outcome = Outcome("solve", "a = 2; b = 3; c = a + b; c?")
    assert outcome.code == 2 and outcome.err.endswith("name another folder with --out FOLDER")


def test_flags_override_the_config_file_and_the_rest_stays_open(solve) -> None:
    Path("run.yaml").write_text("seed: 5\nnum_traces: 2\nsystem_prompt: ''\n")
    outcome = solve("a=1", "--config", "run.yaml", "--seed", "6", "--out", "here", "--no-thinking", "--json")
    header = json.loads(Path("here/events.jsonl").read_text().splitlines()[0])
    assert json.loads(outcome.out)["seed"] == 6
    assert header["num_traces"] == 2
    assert header["settings"]["swap_size"] == 1  # worked out


def test_options_of_a_policy_are_laid_over_those_of_the_config_file_one_by_one(solve) -> None:
    block = "policy: deepconf\npolicy_options:\n  warmup_traces: 2\n  window_tokens: 9\n"
    Path("run.yaml").write_text(block)
    outcome = solve("a=1", "--config", "run.yaml", "--policy-option", "window_tokens=4", "--out", "here", "--json")
    header = json.loads(Path("here/events.jsonl").read_text().splitlines()[0])
    assert outcome.code == 0 and header["vote"] == "lowest-confidence"
    assert header["settings"]["policy_options"] == {"warmup_traces": 2, "window_tokens": 4, "percentile": 90.0}


def test_every_config_field_has_its_option() -> None:
    text = Outcome("solve", "--help-all").out
    special = {"enable_thinking", *NESTED_OPTIONS}
    names = {*SearchConfig.model_fields, *EngineConfig.model_fields} - special
    assert {name for name in names if "--" + name.replace("_", "-") not in text} == set()
    assert "--no-thinking" in text and "--engine-option " in text and "--policy-option " in text


# -- the user's mistakes: exit code 2, one sentence --------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--capcity", "3"), "--capacity"),
        (("--capacity", "2", "--swap-size", "3"), "swap size 3 is larger than the capacity 2"),
        (("--capacity", "0"), "capacity = '0': input should be greater than or equal to 1"),
        (("--swap-size", "0"), "swap_size = '0': input should be greater than or equal to 1"),
        (("--seed", "x"), "seed = 'x'"),
        (("--vote", "loud"), "vote = 'loud': input should be 'majority', 'concise', "),
        (("--policy", "gambti"), "unknown policy 'gambti': did you mean 'gambit'?"),
        (("--scorer", "confidense"), "unknown scorer 'confidense': did you mean 'confidence'?"),
        (("--engine", "warp"), "unknown engine 'warp'"),
        (("--engine-option", "fast"), "not of the form key=value"),
        (("--policy-option", "fast"), "not of the form key=value"),
        (("--policy-option", "fast=1"), "policy 'gambit': unknown option 'fast'"),
        (("--policy", "deepconf", "--policy-option", "windowtokens=1"), "did you mean 'window_tokens'?"),
        (("--policy", "deepconf", "--consensus-stop", "certain"), "Use --vote majority, or a share"),
        (("--device", "cuda:7" if not torch.cuda.is_available() else "mps"), "gambit doctor"),
        (("--dtype", "float7"), "unknown dtype 'float7'"),
        (("--model", "./nowhere"), "cannot load model './nowhere': there is no such folder"),
        (("--kv-budget-tokens", "16"), "raise --kv-budget-tokens to "),
        (("--kv-budget-tokens", "17"), "a KV budget of 17 tokens, which is 16 in whole blocks of 16, cannot hold"),
        (("--file", "none.txt"), "both a problem and --file are given"),
        (("--config", "none.yaml"), "cannot read config none.yaml"),
        (("--concurrency", "0"), "concurrency"),
        (("--out", "/dev/null/x"), "cannot write to /dev/null/x"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(solve, args: tuple[str, ...], message: str) -> None:
    outcome = solve("a=1", *args)
    assert (outcome.code, outcome.out) == (2, ""), outcome.err
    assert message in outcome.err


def test_an_unknown_key_in_the_config_file_is_an_error_with_a_suggestion(solve) -> None:
    Path("run.yaml").write_text("capcity: 3\n")
    outcome = solve("a=1", "--config", "run.yaml")
    assert outcome.code == 2 and "run.yaml: unknown option 'capcity': did you mean 'capacity'?" in outcome.err


def test_a_model_that_is_nowhere(solve) -> None:
    outcome = solve("a=1", model=Path("nobody/nothing"), scorer="auto")
    assert outcome.code == 2
    assert outcome.err == (
        "error: cannot load model 'nobody/nothing': there is no such folder, and the hub is not asked: "
        "HF_HUB_OFFLINE is set"
    )


@pytest.mark.parametrize("problem", ["", "  \n "])
def test_an_empty_problem(solve, problem: str) -> None:
    assert solve(problem).err == "error: the problem is empty: give it some text"
    assert solve("-", stdin=problem).code == 2


def test_a_prompt_longer_than_the_context(solve) -> None:
    outcome = solve("a" * 600)
    assert outcome.code == 2 and "the model's context is 512: shorten the problem" in outcome.err


def test_a_scorer_of_another_model(solve) -> None:
    weights = (torch.zeros(8, 16), torch.zeros(8), torch.zeros(1, 8), torch.zeros(1))
    save_checkpoint(MlpScorer(ScorerInfo("mlp", hidden_size=16), weights), Path("other.safetensors"))
    outcome = solve("a=1", scorer="other.safetensors")
    assert outcome.code == 2 and "the scorer expects hidden size 16, the model has 32" in outcome.err


def test_a_run_folder_is_never_overwritten(solve) -> None:
    assert solve("a=1", "--out", "here").code == 0
    outcome = solve("a=1", "--out", "here")
    assert outcome.code == 2 and "never overwritten" in outcome.err


def test_replay_of_something_else(tmp_path: Path) -> None:
    assert "no events.jsonl" in Outcome("replay", str(tmp_path)).err
    (tmp_path / "events.jsonl").write_text('{"event": "Nonsense"}\n')
    outcome = Outcome("replay", str(tmp_path))
    assert outcome.code == 2 and "events.jsonl, line 1: " in outcome.err


def test_verify_finds_a_changed_log_wrong_and_goes_on_to_the_next(solve, tmp_path: Path) -> None:
    for name in ("runs/a", "runs/b"):
        assert solve("a=1", "--out", name).code == 0
    log = tmp_path / "runs" / "a" / "events.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*lines[:3], *lines[4:]]))
    outcome = Outcome("replay", str(tmp_path / "runs"), "--verify")
    said = " ".join(outcome.out.split())
    assert outcome.code == 1 and "events.jsonl: not verified: " in said and "line 4: " in said
    assert "b/events.jsonl: verified: " in said
    assert Outcome("replay", str(log)).code == 2, "there is no result to show"


# -- warnings: one line each on stderr ----------------------------------------------------------------------------


def test_a_warmup_longer_than_a_trace_is_a_warning(solve) -> None:
    outcome = solve("a=1", "--warmup-tokens", "60", "--json")
    assert outcome.code == 0 and json.loads(outcome.out)["warnings"]
    assert outcome.err.startswith("warning: the warm-up of 60 tokens") and outcome.err.count("warning") == 1


def test_a_missing_chat_template_and_scorer_are_said_once(solve, tiny: Path) -> None:
    shutil.copytree(tiny, "plain")
    Path("plain/chat_template.jinja").unlink()
    Path("p.jsonl").write_text('{"question": "a=1"}\n{"question": "b=2"}\n')
    outcome = solve("--file", "p.jsonl", "--json", model=Path("plain"), scorer="auto")
    assert outcome.code == 0 and len(outcome.out.splitlines()) == 2
    assert outcome.err.count("warning:") == 2
    assert outcome.err.count("no chat template") == 1 and outcome.err.count("no scorer is known for plain") == 1


# -- failures: exit code 1 ----------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's full device")
def test_a_full_disk_costs_the_log_and_not_the_answer(solve, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnFullDisk(ev.LogWriter):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            os.dup2(os.open("/dev/full", os.O_WRONLY), self._file.fileno())

    monkeypatch.setattr(ev, "LogWriter", OnFullDisk)
    outcome = solve("a=1", "--json", "--out", "here")
    assert outcome.code == 1
    result = json.loads(outcome.out)
    assert result["answer"] is not None
    assert result["log_error"] == "the log in here is incomplete: No space left on device"
    assert outcome.err == f"warning: {result['log_error']}"


def test_a_result_that_cannot_be_written_counts_as_an_incomplete_log(solve) -> None:
    Path("here/result.json").mkdir(parents=True)
    outcome = solve("a=1", "--out", "here")
    assert outcome.code == 1 and "result.json: Is a directory" in outcome.err and "answer: " in outcome.out


def test_an_engine_that_fails_leaves_a_log_and_no_stack_trace(solve, monkeypatch: pytest.MonkeyPatch) -> None:
    from gambit.engines.local.engine import LocalEngine

    real_step, steps = LocalEngine.step, iter(range(1000))

    def step(engine: LocalEngine) -> object:
        if next(steps) == 30:
            raise RuntimeError("the GPU fell off\nwith a long story")
        return real_step(engine)

    monkeypatch.setattr(LocalEngine, "step", step)
    outcome = solve("a=1", "--out", "here")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == (
        "error: RuntimeError: the GPU fell off (GAMBIT_DEBUG=1 shows the traceback) "
        "what was found until then is logged: gambit replay here"
    )
    replayed = json.loads(Outcome("replay", "here", "--json").out)
    assert replayed["stop_reason"] == "failed" and replayed["tokens"]["generated"] > 0


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = CliRunner(env={"GAMBIT_DEBUG": "1"}).invoke(app, ["replay", str(tmp_path)])
    assert result.exit_code == 2 and "Traceback" in result.stderr


# -- signals and pipes, in real processes --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interrupted(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str, str, Path]]:
    """A run that would go on for long, stopped by Ctrl-C once some traces have finished."""
    out = tmp_path_factory.mktemp("run") / "out"
    command = [*GAMBIT, "solve", "a=1", "--model", str(tiny), "--scorer", "constant", "--policy", "sc",
               "--capacity", "4", "--num-traces", "1000000", "--out", str(out)]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log, deadline = out / "events.jsonl", time.monotonic() + 120
    while not (log.exists() and log.read_text().count('"Finished"') > 5) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    yield process.returncode, stdout, stderr, out


def test_ctrl_c_prints_the_best_vote_and_completes_the_log(interrupted: tuple[int, str, str, Path]) -> None:
    code, stdout, stderr, out = interrupted
    assert code == 130
    assert "answer: " in stdout.splitlines()[0] and "interrupted; the vote is the one so far" in stdout
    *forecast, last = stderr.splitlines()
    assert last == "stopping: the best vote so far follows; Ctrl-C again aborts at once"
    assert forecast[0].startswith("1,000,000 traces of at most ") and "Ctrl-C" in forecast[0]
    stored = json.loads((out / "result.json").read_text())
    replayed = replay(out / "events.jsonl", lambda a, b: False)
    assert (replayed.answer, replayed.stop_reason) == (stored["answer"], "interrupted")
    check_ended(fold(ev.read_log(out / "events.jsonl")).tree)


def test_a_reader_that_leaves_early_gets_no_traceback(interrupted: tuple[int, str, str, Path]) -> None:
    for extra in ((), ("--json",)):
        command = [*GAMBIT, "replay", str(interrupted[3]), *extra]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        process.stderr.close()
        assert process.wait() == 141  # as of `cat`, which SIGPIPE ends


def test_a_stop_between_problems_begins_no_other(solve, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("p.jsonl").write_text('{"question": "a=1"}\n' * 3)
    real = Solver.solve_many

    def stop_after_the_first(solver: Solver, *args: object, **options: object) -> Iterator[SearchResult]:
        results = real(solver, *args, **options)  # type: ignore[arg-type]
        yield next(results)
        os.kill(os.getpid(), signal.SIGTERM)
        yield from results

    monkeypatch.setattr(Solver, "solve_many", stop_after_the_first)
    outcome = solve("--file", "p.jsonl", "--json")
    assert outcome.code == 143
    assert len(outcome.out.splitlines()) == 1 and "stopped early: 2 problems not begun" in outcome.err


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_the_second_signal_ends_the_process_at_once(name: str, code: int) -> None:
    program = f"""
import os, signal, time
from gambit.cli.terminal import StopSignal
from gambit.errors import ONE_WISH_SECONDS
with StopSignal(lambda: None) as stop:
    for _ in range(2):  # as `timeout` does it
        os.kill(os.getpid(), signal.{name})
    assert stop() and stop.exit_code == {code}
    print("goes on", flush=True)
    time.sleep(2 * ONE_WISH_SECONDS)
    os.kill(os.getpid(), signal.{name})
    while True: pass
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=300, check=False, capture_output=True, text=True)
    assert done.returncode == code and done.stdout == "goes on\n"


def test_help_imports_nothing_heavy() -> None:
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "gambit", "--help"], capture_output=True, text=True, check=True
    )
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"torch", "transformers", "pydantic", "numpy", "yaml"}
    assert all(command in result.stdout for command in ("solve", "replay", "doctor"))


# -- the other commands, and what a terminal shows -----------------------------------------------------------------


def test_version_and_public_names() -> None:
    import gambit

    assert Outcome("--version").out == f"gambit {gambit.__version__}\n"
    assert all(getattr(gambit, name) is not None for name in gambit.__all__)
    with pytest.raises(AttributeError):
        gambit.nothing  # noqa: B018


def test_doctor_finds_what_is_here() -> None:
    outcome = Outcome("doctor")
    assert outcome.code == 0
    for part in ("python", "torch", "transformers", "cpu", "engine local", "engine vllm", "model pawn", "gambit",
                 " sc, "):  # fmt: skip
        assert part in outcome.out
    report = json.loads(Outcome("doctor", "--json").out)
    assert report["can_run"] is True and {"name", "condition", "detail"} == set(report["findings"][0])


def test_doctor_without_torch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gambit.cli.doctor._torch", lambda: None)
    outcome = Outcome("doctor")
    assert outcome.code == 1 and "torch does not import" in outcome.out


def screen(display: SearchScreen, width: int) -> list[str]:
    console = Console(file=StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(display.render())
    output = console.file
    assert isinstance(output, StringIO)
    return [line.rstrip() for line in output.getvalue().splitlines()]


def test_the_live_view_is_made_from_events_and_fits_60_columns(solve) -> None:
    solve("a=1", "--out", "here")
    events = list(ev.read_log(Path("here/events.jsonl")))
    display = SearchScreen(Console(file=StringIO()), is_live=False)
    display.loading("some/model")
    assert "loading some/model" in screen(display, 60)[0]
    views = []
    for event in events[:-1]:
        display.on_event("problem", event)
        views.append(screen(display, 60))
    assert all(len(view) == 4 and max(map(len, view)) <= 60 for view in views)
    sample = next(event for event in reversed(events) if isinstance(event, ev.Sample))
    head, strip, pool, leader = views[-1]
    assert head.split()[1:3] == ["gambit", "·"]
    assert strip.count("█") == sample.completed and " " in strip.strip(), "a space divides islands"
    assert any("×" in view[1] for view in views) == any(isinstance(event, ev.Pruned) for event in events)
    assert f"step {sample.step} · {sample.generated:,} tokens" in head and "tokens/s" in head
    assert pool.strip() == f"0 running · 0 waiting · {sample.ghosts} ghosts · done {sample.completed}/4 · 0/2 islands"
    assert leader.strip().startswith("leading: ") and leader.endswith("%)")


def test_the_token_count_between_samples_stays_close(solve) -> None:
    solve("a=1", "--out", "here", "--policy", "sc", "--capacity", "8")
    display = SearchScreen(Console(file=StringIO()), is_live=False)
    for event in ev.read_log(Path("here/events.jsonl")):
        if isinstance(event, ev.Sample):
            [view] = display._running.values()
            assert abs(view.generated - event.generated) <= 5 * 8  # a sample comes at least every five steps
        if not isinstance(event, ev.Voted):
            display.on_event("problem", event)


def test_another_search_of_a_session_counts_from_zero(solve) -> None:
    solve("a=1", "--out", "here")
    events = list(ev.read_log(Path("here/events.jsonl")))
    display = SearchScreen(Console(file=StringIO()), is_live=False)
    for event in [*events, events[0]]:
        display.on_event("problem", event)
    assert "step 0 · 0 tokens" in screen(display, 60)[0]


def test_several_searches_share_the_live_view(solve) -> None:
    solve("a=1", "--out", "here")
    events = list(ev.read_log(Path("here/events.jsonl")))
    display = SearchScreen(Console(file=StringIO()), is_live=False, num_problems=12)
    for number in range(10):
        for event in events[:-1]:
            display.on_event(f"problem-{number}", event)
    display.on_event("problem-0", events[-1])
    lines = screen(display, 60)
    assert "1/12 problems" in lines[0] and lines[1].startswith("  problem-1: ") and lines[-1] == "  … and 1 more"


def test_the_report_folds_at_60_columns(solve) -> None:
    solve("a=1", "--out", "here")
    result = replay(Path("here/events.jsonl"), lambda a, b: False)
    console = Console(file=StringIO(), width=60)
    console.print(report(Shown(result), Style()))
    output = console.file
    assert isinstance(output, StringIO)
    assert max(map(len, output.getvalue().splitlines())) <= 60


def test_a_terminal_gets_the_live_view(tiny: Path, tmp_path: Path) -> None:
    """On a real pseudo-terminal: the live lines come and go, the report stays."""
    import pty

    leader, follower = pty.openpty()
    command = [
        *GAMBIT,
        "solve",
        "a=1",
        "--model",
        str(tiny),
        "--scorer",
        "constant",
        *SMALL,
        "--out",
        str(tmp_path / "o"),
    ]
    process = subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, env={**os.environ, "TERM": "xterm"}
    )
    os.close(follower)
    chunks = []
    try:
        while chunk := os.read(leader, 65536):
            chunks.append(chunk)
    except OSError:  # Linux's way to say that the other side is closed
        pass
    os.close(leader)
    text = b"".join(chunks).decode()
    assert process.wait() == 0
    assert f"loading {tiny}"[:40] in text and "\x1b[?25h" in text
    assert "answer: " in text and "Loading weights" not in text


def test_ctrl_c_before_a_command_has_begun_is_no_traceback(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("gambit.cli.app.main", interrupted)
    with pytest.raises(SystemExit) as ended:
        start_command()
    assert ended.value.code == 130


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_closed_output_is_no_failure(closed, tmp_path):
    gambit = f"{sys.executable} -m gambit"
    run = f"{gambit} policies {closed}; echo $?; {gambit} replay none {closed}; echo $?"
    done = subprocess.run(["bash", "-c", run], capture_output=True, text=True, cwd=tmp_path, check=False)
    codes = [line for line in done.stdout.splitlines() if line.isdigit()]
    assert codes == ["0", "2"] and "Traceback" not in done.stderr, done


@pytest.mark.parametrize(("cuda", "has_gpu", "words"), [
    ("12.8", False, "CUDA 12.8 without a GPU; gigabytes smaller: pip install uv && uv pip install"),
    ("12.8", True, "CUDA 12.8"),
    (None, False, "CPU only"),
])  # fmt: skip
def test_doctor_proposes_a_cpu_torch_where_there_is_no_gpu(monkeypatch, cuda, has_gpu, words) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    build = next(doctor._devices(torch)).detail
    assert build.startswith(words) and ("uv pip" in build) == (cuda is not None and not has_gpu)
