"""What `--help` shows, what a shell completes, and what starting a command imports."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gambit.cli.app import COMMANDS, app
from gambit.cli.commands import without_flag_types
from gambit.cli.options import FROM_PRESET, SEARCH_PANELS
from gambit.config.options import EngineConfig, SearchConfig
from gambit.config.presets import Preset

METAVARS = {"", "[ADDRESS]", "INT", "NUMBER", "TEXT", "FILE", "FOLDER", "KEY=VALUE"}
PUZZLE = "a = 17; b = 61; c = a + b; c?"


def help_of(*args):
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(args))
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.replace("│", " ").split())


def real_commands():
    """Every command and subcommand, as it is when it is called."""
    for name, lazy in COMMANDS.items():
        command = lazy.made(name)
        subcommands = getattr(command, "commands", None)
        yield from (
            ((f"{name} {each}", made) for each, made in subcommands.items()) if subcommands else [(name, command)]
        )


def test_every_config_field_stands_in_one_panel():
    for model in (SearchConfig, EngineConfig):
        shown = [name for panel in SEARCH_PANELS if panel.model is model for name in panel.fields]
        assert sorted(shown) == sorted(model.model_fields)


OF_HELP = {"help", "help_all"}


def test_help_shows_ten_options_and_help_all_the_others_too():
    basic, everything = help_of("solve", "--help"), help_of("solve", "--help-all")
    assert all(panel.title in everything for panel in SEARCH_PANELS)
    assert "--capacity" in basic and "--swap-size" not in basic and "--swap-size" in everything
    assert "--help-all" in basic and "3 not one problem got an answer" in basic
    for name, command in real_commands():
        options = [each.name for each in command.params if each.param_type_name == "option"]
        shown = set(options) - {*command.rare, *OF_HELP}
        assert len(shown) == 10 if "help_all" in options else len(shown) <= 13, (name, shown)
        assert set(command.rare) <= set(options), name


def test_a_required_option_is_never_left_out():
    for name, command in real_commands():
        assert [each.name for each in command.params if each.required and each.name in command.rare] == [], name


@pytest.mark.parametrize(
    "arguments", [(name, *rest) for name in ("solve", "bench", "serve") for rest in ((), ("all",))]
)
def test_no_name_is_cut_at_80_columns(arguments):
    [name, *rest] = arguments
    flag = "--help-all" if rest else "-h"
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, [name, flag]).stdout
    command = COMMANDS[name].made(name)
    names = [flag for each in command.params if rest or each.name not in command.rare for flag in each.opts
             if each.param_type_name == "option"]  # fmt: skip
    assert [each for each in names if re.search(rf"{each}\b", shown) is None] == []
    assert max(map(len, shown.splitlines())) <= 80


def test_defaults_from_a_preset_are_called_so():
    text = help_of("solve", "--help-all")
    from_preset = [name for name in Preset.__slots__ if name in SearchConfig.model_fields and name != "system_prompt"]
    assert text.count(FROM_PRESET) >= len(set(from_preset) - {"islands"})
    assert "C: most traces in the pool at once (default: from the model's preset)." in text


def test_the_switch_for_thinking_reads_the_right_way_round():
    text = help_of("solve", "--help-all")
    assert "--no-thinking Answer without thinking first" in text
    assert "(default: True)" not in text and "do not let" not in text


def test_every_option_has_a_metavar_of_one_style():
    for name, command in real_commands():
        options = [each for each in without_flag_types(command.params) if each.param_type_name == "option"]
        assert [each.opts for each in options if each.metavar not in METAVARS] == [], name


def test_the_list_of_commands_says_what_the_commands_say():
    listed = help_of("--help")
    for name, lazy in COMMANDS.items():
        assert f"{name} {lazy.about}" in listed
        assert lazy.about.rstrip(".").split(",")[0] in help_of(name, "--help"), name


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("gambit sol", "solve"),
        ("gambit solve --cap", "--capacity"),
        ("gambit solve --kv", "--kv-budget-tokens"),
        ("gambit bench --list", "--list-benchmarks"),
        ("gambit scorer co", "collect"),
        ("gambit solve --policy deep", "deepconf"),
        ("gambit solve --vote maj", "majority"),
        ("gambit solve --force-answers a", "auto"),
        ("gambit bench --benchmark aime_2024", "aime_2024"),
        ("gambit bench --policy slim", "slim-sc"),
        ("gambit serve --engine vl", "vllm"),
        ("gambit view runs/ol", "runs/older"),
    ],
)
def test_bash_completes_commands_options_and_values(line, expected, tmp_path):
    for name in ("older", "newer"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    words = line.split()
    asked = {"_GAMBIT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    code = "from gambit.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True, check=False,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.split() == [expected], done.stderr


def test_the_script_that_bash_reads_is_printed(monkeypatch):
    # typer looks for the shell among the parents of this process, of which a test runner may have none.
    monkeypatch.setattr("typer.completion._get_shell_name", lambda: "bash")
    done = CliRunner().invoke(app, ["--show-completion"], prog_name="gambit")
    assert done.exit_code == 0 and "complete -o default -F _gambit_completion gambit" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's full device")
@pytest.mark.parametrize("args", [(), ("--help",), ("--version",), ("solve", "--help-all"), ("scorer",), ("policies",)])
def test_a_help_that_cannot_be_written_is_said_in_one_sentence(args):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "gambit", *args]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: OSError: [Errno 28] No space left on device")


@pytest.mark.parametrize("args", [("--help",), ("solve", "--help-all"), ("bench", "--help"), ("policies",)])
def test_an_ascii_terminal_gets_its_help(args):
    command, environment = [sys.executable, "-m", "gambit", *args], {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"") and done.stdout.isascii()


def test_an_ascii_terminal_gets_json(tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps({"question": PUZZLE, "answer": "ä…"}))
    command = [sys.executable, "-m", "gambit", "solve", "--file", "p.jsonl", "--capacity", "2", "--json"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert json.loads(done.stdout)["expected"] == "ä…"


# -- what is imported --------------------------------------------------------------------------------------------


def imported_by(*args):
    code = "import sys; from gambit.cli.app import app; app(sys.argv[1:], standalone_mode=False, prog_name='gambit')"
    report = "; sys.stderr.write(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", f"import atexit, sys; atexit.register(lambda: exec({report[2:]!r})); {code}", *args],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return set(done.stderr.split()), done.stdout


@pytest.mark.parametrize("args", [("--help",), ("--version",), ("solve", "--help-all"), ("bench", "--list-benchmarks")])
def test_nothing_heavy_is_imported_before_a_model_is_wanted(args):
    modules, _ = imported_by(*args)
    assert "typer" in modules and not modules & {"torch", "transformers", "vllm", "sympy"}


def test_a_search_with_the_bundled_model_imports_neither_transformers_nor_torchs_compiler(tmp_path):
    modules, out = imported_by("solve", PUZZLE, "--engine", "local", "--json", "--out", str(tmp_path / "o"))
    assert '"answer": "78"' in out and "torch" in modules
    assert not modules & {"transformers", "torch._dynamo", "sympy", "math_verify", "huggingface_hub", "pandas"}
