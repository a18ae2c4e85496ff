"""Invocations that no command can obey, each with a piece of the sentence that must name the culprit.

Run as a script in an empty folder, it tries all of them in one process and prints what came of each as JSON.
"""

import codecs
import json
import struct
import sys
from pathlib import Path

HUGE = "99999999999999999999"
PUZZLE = "a = 17; b = 61; c = a + b; c?"


def solve(*args):
    return ("solve", PUZZLE, *args)


def of_file(name, *args):
    return ("solve", "--file", name, *args)


# -- numbers: below, above, no number --------------------------------------------------------------------------

COUNTS = ("capacity", "num_traces", "islands", "swap_size", "check_interval", "max_new_tokens", "budget_tokens",
          "budget_traces", "consensus_min_traces", "first_traces", "confidence_window", "kv_budget_tokens")  # fmt: skip
FROM_ZERO = ("warmup_tokens", "top_k")
FLOATS = {"hard_floor": "1.5", "child_temperature": "1e9", "temperature": "1e9", "top_p": "1.01", "min_p": "1",
          "budget_seconds": "1e30", "memory_ratio": "2"}  # fmt: skip


def flag(name):
    return "--" + name.replace("_", "-")


def numbers():
    for name in COUNTS:
        for value in ("0", "-1", HUGE, "2.5", "many"):
            yield solve(flag(name), value), f"{name} = '{value}'"
    for name in FROM_ZERO:
        for value in ("-1", HUGE, "x"):
            yield solve(flag(name), value), f"{name} = '{value}'"
    for name, above in FLOATS.items():
        for value in ("-1", above, "nan", "inf", "hot"):
            yield solve(flag(name), value), f"{name} = '{value}'"
    for value in ("x", "1.5", HUGE, f"-{HUGE}"):
        yield solve("--seed", value), f"seed = '{value}'"
    yield solve("--capacity", "9" * 5000), "capacity = '999"
    for value in ("0", "-3", HUGE, "two"):
        yield solve("--concurrency", value), "--concurrency"


# -- names and forms -------------------------------------------------------------------------------------------

NAMES = [
    (solve("--policy", "gambti"), "unknown policy 'gambti': did you mean 'gambit'?"),
    (solve("--policy", ""), "unknown policy ''"),
    (solve("--policy", "my-option-policy"), "unknown policy 'my-option-policy': known are"),
    (solve("--scorer", "confidense"), "unknown scorer 'confidense': did you mean 'confidence'?"),
    (solve("--scorer", ""), "scorer = ''"),
    (solve("--scorer", "none.safetensors"), "none.safetensors"),
    (solve("--scorer", "junk.safetensors"), "junk.safetensors"),
    (solve("--engine", "warp"), "unknown engine 'warp'"),
    (solve("--engine", "loca"), "unknown engine 'loca': did you mean 'local'?"),
    (solve("--engine", ""), "engine = ''"),
    (solve("--model", ""), "model = ''"),
    (solve("--model", "./nowhere"), "cannot load model './nowhere': there is no such folder"),
    (solve("--model", "nobody/nothing"), "cannot load model 'nobody/nothing'"),
    (solve("--model", "pwan"), "cannot load model 'pwan' (did you mean 'pawn'?)"),
    (
        ("bench", "--benchmark", "pawn", "--policies", "sc,gambitt,beam"),
        "'gambit'? unknown policy 'beam'",
    ),
    (solve("--model", "a b c"), "cannot load model 'a b c'"),
    (solve("--device", "tpu"), "unknown device 'tpu': use auto, cpu"),
    (solve("--device", "cuda:x"), "unknown device 'cuda:x'"),
    (solve("--dtype", "float7"), "unknown dtype 'float7': use auto, float32"),
    (solve("--vote", "loud"), "vote = 'loud'"),
    (solve("--preset", "mine"), "preset = 'mine'"),
    (solve("--answer", "poem"), "answer = 'poem'"),
    (solve("--branch-point", "root"), "branch_point = 'root'"),
    (solve("--consensus-stop", "maybe"), "maybe"),
    (solve("--consensus-stop", "1.5"), "1.5"),
    (solve("--policy", "deepconf", "--consensus-stop", "certain"), "Use --vote majority, or a share"),
    (solve("--capacity", "2", "--swap-size", "3"), "swap size 3 is larger than the capacity 2"),
    (solve("--engine-option", "fast"), "not of the form key=value"),
    (solve("--engine-option", "=1"), "not of the form key=value"),
    (solve("--engine-option", "x=[1"), "--engine-option"),
    (
        solve("--engine-option", "foo=1"),
        "the local engine has no options of its own, but was given --engine-option foo",
    ),
    (solve("--engine", "local", "--engine-option", "foo=1"), "--engine-option foo"),
    (solve("--policy-option", "fast"), "not of the form key=value"),
    (solve("--policy-option", "fast=1"), "policy 'gambit': unknown option 'fast': known are parents, views"),
    (solve("--policy", "deepconf", "--policy-option", "windowtokens=1"), "did you mean 'window_tokens'?"),
    (solve("--policy", "deepconf", "--policy-option", "percentile=x"), "percentile = 'x'"),
    (solve("--capcity", "3"), "--capacity"),
    (solve("--capacity"), "--capacity"),
    (solve("--quiett"), "--quiet"),
    (solve("--no-thinkin"), "--no-thinking"),
    (solve("more"), "more"),
    (("sovle", PUZZLE), "solve"),
    (("--versoin",), "--version"),
    (("solve", ""), "the problem is empty"),
    (("solve", " \n"), "the problem is empty"),
    (("solve", "what is love?"), "pawn"),
]

# -- files -----------------------------------------------------------------------------------------------------

UTF16 = codecs.BOM_UTF16_LE + '{"question": 1}'.encode("utf-16-le")
# A header that promises 36 bytes of weights, and none.
CUT_SHORT = struct.pack("<Q", 66) + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'.ljust(66)
FILES = {
    "empty.txt": b"",
    "blank.txt": b" \n ",
    "latin.txt": "a = 1;\né?".encode("latin-1"),
    "nul.txt": b"a = 1\n\0?",
    "empty.jsonl": b"",
    "broken.jsonl": b'{"question": "a = 1; a?"}\n{"question"',
    "list.jsonl": b"[1]",
    "text.jsonl": b'"a"',
    "other.jsonl": b'{"prompt": "a = 1; a?", "target": 1}',
    "null.jsonl": b'{"question": null}',
    "number.jsonl": b'{"question": 5}',
    "blank.jsonl": b'{"question": "a = 1; a?"}\n\n{"question": "  "}',
    "out.jsonl": b'{"question": "a = 1; a?", "id": "../evil"}',
    "dots.jsonl": b'{"question": "a = 1; a?", "id": ".."}',
    "slash.jsonl": b'{"question": "a = 1; a?", "id": "a/b"}',
    "object_id.jsonl": b'{"question": "a = 1; a?", "id": {}}',
    "truth_id.jsonl": b'{"question": "a = 1; a?", "id": true}',
    "long_id.jsonl": json.dumps({"question": "a = 1; a?", "id": "x" * 101}).encode(),
    "twice.jsonl": b'{"question": "a = 1; a?", "id": "a"}\n{"question": "b = 1; b?", "id": "a"}',
    "listed.jsonl": b'{"question": "a = 1; a?", "answer": [1]}',
    "truth.jsonl": b'{"question": "a = 1; a?", "answer": true}',
    "latin.jsonl": '{"question": "a = 1; a?"}\n{"question": "é"}'.encode("latin-1"),
    "utf16.jsonl": UTF16,
    "half16.jsonl": UTF16[:-1],
    "chat.jsonl": json.dumps({"question": PUZZLE}).encode() + b'\n{"question": "what is love?"}',
    "broken.json": b'[{"question": "a = 1; a?"},',
    "empty.json": b"[]",
    "number.json": b"7",
    "entry.json": b'[{"question": "a = 1; a?"}, 3]',
    "deep.json": b"[" * 100_000,
    "short.csv": b"question,answer\n\"a = 1; a?\"\n",
    "wide.csv": b"question,answer\na = 1; a?,1,2\n",
    "open.csv": b'question,answer\n"a = 1; a?,1\n',
    "header.csv": b"question,answer\n",
    "other.csv": b"prompt,target\na = 1; a?,1\n",
    "gap.csv": b"question,answer\n,1\n",
    "book.pdf": b"%PDF-1.4",
    "rows.parquet": b"PAR1",
    "run.yaml.gz": b"\x1f\x8b",
    "junk.safetensors": b"not safetensors",
    "plain.gz": b"not compressed",
    "list.yaml": b"- 1\n",
    "typo.yaml": b"capcity: 3\n",
    "value.yaml": b"capacity: none at all\n",
    "open.yaml": b"a: [\n",
    "latin.yaml": "system_prompt: é".encode("latin-1"),
    "bench.yaml": b"benchmarks: [pawn]\npolicys: [sc]\n",
    "twice.yaml": b"capacity: 3\ncapacity: 4\n",
    "date.yaml": b"seed: 2026-13-45\n",
    "deep.yaml": b"[" * 5000,
    "unnamed.yaml": b"benchmarks: [pawn]\nvariants: {'': {policy: sc}}\n",
    "text.yaml": b"benchmarks: pawn\n",
    "number.yaml": b"benchmarks: [pawn]\nvariants: 3\n",
    "options.yaml": b"benchmarks: [pawn]\npolicies: [sc]\npolicy_options: {x: 1}\n",
    "taken.jsonl": b"{}",
    "logs/events.jsonl": b'{"event": "Nonsense"}\n',
    "begun/events.jsonl": b"{}\n",
    "cut/model.safetensors": CUT_SHORT,
    "cut/config.json": b'{"model_type": "qwen3"}',
    "wild/model.safetensors": b"\xff" * 64,
    "wild/config.json": b"{}",
    "preset/gambit.json": b'{"capacity": "lots"}',
    "preset/config.json": b"{}",
    "listed/gambit.json": b"[1]",
    "listed/config.json": b"{}",
    "length/gambit.json": b'{"median_length": "long"}',
    "length/config.json": b"{}",
    "comma/gambit.json": b'{"capacity": 3,}',
    "comma/config.json": b"{}",
    "generation/generation_config.json": b"{",
    "generation/config.json": b"{}",
}  # fmt: skip
PROBLEMS = [
    (of_file("none.txt"), "cannot read none.txt"),
    (of_file("none.jsonl"), "cannot read none.jsonl"),
    (of_file("logs"), "cannot read logs"),
    (of_file("empty.txt"), "empty.txt is empty"),
    (of_file("blank.txt"), "blank.txt is empty"),
    (of_file("latin.txt"), "latin.txt, line 2: byte 0xe9 is not UTF-8"),
    (of_file("nul.txt"), "nul.txt, line 2: a NUL character"),
    (of_file("empty.jsonl"), "empty.jsonl holds no problem"),
    (of_file("broken.jsonl"), "broken.jsonl, line 2: not JSON"),
    (of_file("list.jsonl"), "list.jsonl, line 1: must be an object"),
    (of_file("text.jsonl"), 'text.jsonl, line 1: must be an object such as {"question": "…"}, not text'),
    (of_file("other.jsonl"), 'other.jsonl, line 1: needs a "question" of text; it has prompt, target'),
    (of_file("null.jsonl"), '"question" must be text, not null'),
    (of_file("number.jsonl"), '"question" must be text, not a number'),
    (of_file("blank.jsonl"), 'blank.jsonl, line 3: "question" is empty'),
    (of_file("out.jsonl"), "the id '../evil' names the problem's folder"),
    (of_file("dots.jsonl"), "the id '..' names the problem's folder"),
    (of_file("slash.jsonl"), "the id 'a/b' names the problem's folder"),
    (of_file("object_id.jsonl"), "the id {} names the problem's folder"),
    (of_file("truth_id.jsonl"), "the id True names the problem's folder"),
    (of_file("long_id.jsonl"), "names the problem's folder"),
    (of_file("twice.jsonl"), "twice.jsonl, line 2: the id 'a' is there twice"),
    (of_file("listed.jsonl"), '"answer" must be text or a number, not a list'),
    (of_file("truth.jsonl"), '"answer" must be text or a number, not a truth value'),
    (of_file("latin.jsonl"), "latin.jsonl, line 2: byte 0xe9 is not UTF-8"),
    (of_file("utf16.jsonl"), '"question" must be text, not a number'),
    (of_file("half16.jsonl"), "half16.jsonl, line 1: byte"),
    (of_file("chat.jsonl"), "chat.jsonl, line 2"),
    (of_file("broken.json"), "broken.json: not JSON"),
    (of_file("empty.json"), "empty.json holds no problem"),
    (of_file("number.json"), "number.json, entry 1: must be an object"),
    (of_file("entry.json"), "entry.json, entry 2: must be an object"),
    (of_file("deep.json"), "deep.json: not JSON"),
    (of_file("short.csv"), "short.csv, line 2: the header has 2 columns"),
    (of_file("wide.csv"), "wide.csv, line 2: the header has 2 columns"),
    (of_file("open.csv"), "open.csv, line"),
    (of_file("header.csv"), "header.csv holds no problem"),
    (of_file("other.csv"), 'other.csv, line 2: needs a "question" of text'),
    (of_file("gap.csv"), 'gap.csv, line 2: needs a "question" of text'),
    (of_file("book.pdf"), "cannot read book.pdf: files of problems end in .jsonl"),
    (of_file("rows.parquet"), "cannot read rows.parquet"),
    (of_file("run.yaml.gz"), "cannot read run.yaml.gz"),
    (solve("--file", "blank.txt"), "both a problem and --file are given"),
    (solve("--map", "question=prompt"), "--map names the columns of a file"),
    (of_file("latin.txt", "--map", "question=prompt"), "--map names columns, and latin.txt is one problem of text"),
    (of_file("other.jsonl", "--map", "prompt"), "--map 'prompt' is not of the form"),
    (of_file("other.jsonl", "--map", "question="), "--map 'question=' is not of the form"),
    (of_file("other.jsonl", "--map", "text=prompt"), "'text' is none of id, question, answer"),
    (of_file("other.jsonl", "--map", "question=prompt,question=target"), "'question' is there twice"),
    (of_file("other.jsonl", "--map", "question=problem"), "--map names a column 'problem'; it has prompt, target"),
    (of_file("other.csv", "--map", "question=prompt,answer=gold"), "--map names a column 'gold'"),
    (solve("--config", "none.yaml"), "cannot read config none.yaml"),
    (solve("--config", "list.yaml"), "config list.yaml must be a mapping"),
    (solve("--config", "typo.yaml"), "typo.yaml: unknown option 'capcity': did you mean 'capacity'?"),
    (solve("--config", "value.yaml"), "capacity = 'none at all'"),
    (solve("--config", "open.yaml"), "cannot read config open.yaml"),
    (solve("--config", "latin.yaml"), "cannot read config latin.yaml"),
    (solve("--engines", "2"), "--engines 2 is for engines under Ray"),
    (solve("--spread"), "--spread is for engines under Ray"),
    (solve("--ray", "--spread"), "--spread needs more than one engine"),
    (solve("--ray", "--engines", "2", "--spread", "--concurrency", "2"), "--concurrency 2 and --spread disagree"),
    (solve("--out", "/dev/null/x"), "cannot write to /dev/null/x"),
    (solve("--out", "empty.txt"), "cannot write to empty.txt"),
    (solve("--out", "begun"), "begun/events.jsonl exists already"),
    (solve("--output", "taken.jsonl"), "taken.jsonl exists already"),
    (solve("--output", "/dev/null/x.jsonl"), "cannot write to /dev/null"),
    (solve("--model", "cut"), "cut/model.safetensors is not a whole safetensors file"),
    (solve("--model", "wild"), "wild/model.safetensors is not a whole safetensors file"),
    (solve("--model", "preset"), "preset/gambit.json is not a preset: capacity: Input should be a valid integer"),
    (solve("--model", "listed"), "listed/gambit.json is not a preset: Input should be an object"),
    (solve("--model", "length"), "length/gambit.json is not a preset: median_length: Input should be a valid number"),
    (solve("--model", "comma"), "comma/gambit.json is not a preset"),
    (solve("--model", "generation"), "generation/generation_config.json is not a file of a model"),
]

# -- other commands --------------------------------------------------------------------------------------------


def bench(*args):
    return ("bench", "--benchmark", "pawn", *args)


COMMANDS = [
    (("bench",), "no benchmark is named"),
    (("bench", "--recipe", "twice.yaml"), "cannot read recipe twice.yaml: the key 'capacity' is there twice"),
    (("bench", "--recipe", "date.yaml"), "cannot read recipe date.yaml: month must be in 1..12"),
    (("bench", "--recipe", "deep.yaml"), "cannot read recipe deep.yaml: maximum recursion depth"),
    (("bench", "--recipe", "unnamed.yaml"), "a variant with {'policy': 'sc'} has no name"),
    (("bench", "--recipe", "text.yaml"), "benchmarks = 'pawn': must be a list, as in [a, b]"),
    (("bench", "--recipe", "number.yaml"), "variants = 3: must be a mapping, as in {key: value}"),
    (("bench", "--recipe", "options.yaml"), "unknown option 'x': known are none"),
    (solve("--config", "twice.yaml"), "cannot read config twice.yaml: the key 'capacity' is there twice"),
    (solve("--config", "date.yaml"), "cannot read config date.yaml: month must be in 1..12"),
    (bench("--policies", ""), "--policies '' names nothing"),
    (bench("--policies", ","), "--policies ',' names nothing"),
    (bench("--policies", "sc,sc"), "policies"),
    (bench("--policies", "sc,gambti"), "unknown policy 'gambti'"),
    (bench("--seeds", ""), "--seeds '' names nothing"),
    (bench("--seeds", "one"), "seeds"),
    (bench("--seeds", HUGE), "seeds"),
    (bench("--seeds", "1,1"), "seeds"),
    (bench("--limit", "0"), "--limit"),
    (bench("--limit", HUGE), "--limit"),
    (bench("--concurrency", "0"), "--concurrency"),
    (bench("--concurrency", "100000"), "--concurrency"),
    (bench("--block", "0"), "--block"),
    (bench("--spread"), "--spread is for engines under Ray"),
    (bench("--ray", "--engines", "2", "--spread", "--concurrency", "3"), "--concurrency 3 and --spread disagree"),
    (bench("--ray", "127.0.0.1:1"), "--ray 127.0.0.1:1: no server answers there (Connection refused): start a cluster"),
    (bench("--ray", "127.0.0.1:99999"), "--ray 127.0.0.1:99999: not an address of Ray: give HOST:PORT"),
    (bench("--ray", "http://head:8265"), "--ray http://head:8265: not an address of Ray"),
    (bench("--ray", "head"), "--ray head: not an address of Ray"),
    (bench("--ray", "ray://head:10001"), "--ray ray://head:10001: Ray's client protocol"),
    (bench("--shard", "3/2"), "shard 3/2"),
    (bench("--shard", "0/2"), "shard"),
    (bench("--shard", "half"), "shard"),
    (bench("--resume"), "--resume needs the folder"),
    (bench("--resume", "--out", "nowhere"), "nowhere"),
    (bench("--out", "/dev/null/x"), "cannot write to /dev/null/x"),
    (bench("--recipe", "none.yaml"), "cannot read recipe none.yaml"),
    (bench("--recipe", "list.yaml"), "recipe list.yaml must be a mapping"),
    (bench("--recipe", "bench.yaml"), "unknown option 'policys'"),
    (bench("--capacity", "0"), "capacity = '0'"),
    (bench("--device", "tpu"), "unknown device 'tpu'"),
    (bench("--engine-option", "foo=1"), "--engine-option foo"),
    (bench("--preset", "auto"), "preset auto"),
    (("bench", "--benchmark", "paw"), "unknown benchmark 'paw': did you mean 'pawn'?"),
    (("bench", "--benchmark", "chains:65"), "'chains:65': STEPS is a whole number from 2 to 64, not '65'"),
    (("bench", "--benchmark", "chains:8,idle=x"), "'chains:8,idle=x': idle is a whole number from 0 to 16, not 'x'"),
    (("bench", "--benchmark", "none.jsonl"), "cannot read none.jsonl"),
    (("bench", "--benchmark", "broken.jsonl"), "broken.jsonl, line 1: needs an \"answer\""),
    (("bench", "--benchmark", "other.csv"), 'other.csv, line 2: needs a "question"'),
    (("bench", "--benchmark", "empty.txt"), "cannot read empty.txt"),
    (("bench", "--benchmark", "pawn", "--benchmark", "pawn"), "benchmarks"),
    (("report", "nowhere"), "nowhere"),
    (("report",), "name the folder of a run"),
    (("merge", "nowhere", "--out", "whole"), "nowhere"),
    (("merge", "nowhere", "--out", "/dev/null/x"), "cannot write to /dev/null/x"),
    (("merge",), "FOLDER"),
    (("replay", "nowhere"), "no events.jsonl in nowhere"),
    (("replay", "logs"), "line 1"),
    (("replay",), "name the folder of a run"),
    (("view", "nowhere"), "nowhere"),
    (("view",), "name the folder of a run"),
    (("demo", "--seed", "-1"), "--seed"),
    (("demo", "--seed", HUGE), "--seed"),
    (("demo", "--out", "/dev/null/x"), "cannot write to /dev/null/x"),
    (("demo", "--out", "begun"), "begun/events.jsonl exists already"),
    (("doctor", "--jsn"), "--json"),
    (("policies", "gambit"), "gambit"),
    (("scorer", "collekt"), "collect"),
    (("scorer", "collect"), "--problems"),
    (("scorer", "collect", "--problems", "pawn:dev"), "--out"),
    (("scorer", "collect", "--problems", "pawn:val", "--out", "o"), "unknown split 'val'"),
    (("scorer", "collect", "--problems", "empty.txt", "--out", "o"), "'empty.txt' is neither a file of problems"),
    (("scorer", "collect", "--problems", "other.jsonl", "--out", "o"), "other.jsonl, line 1"),
    (("scorer", "collect", "--problems", "moves:1", "--out", "o"), "'moves:1': STEPS is a whole number from 2 to 64"),
    (("scorer", "collect", "--problems", "pawn:dev", "--out", "o", "--traces", "0"), "--traces"),
    (("scorer", "collect", "--problems", "pawn:dev", "--out", "o", "--temperature", "nan"), "temperature"),
    (("scorer", "collect", "--problems", "pawn:dev", "--out", "o", "--layers", "last"), "layers 'last'"),
    (("scorer", "collect", "--problems", "pawn:dev", "--out", "o", "--layers", "None"), "layers 'None': give numbers "
     "such as -1,-9, or none"),
    (("scorer", "collect", "--problems", "pawn:dev", "--out", "/dev/null/x"), "cannot write to /dev/null/x"),
    (("scorer", "train", "--data", "nowhere", "--out", "o"), "no collection.json in nowhere"),
    (("scorer", "train", "--data", "nowhere", "--out", "/dev/null/x/y"), "cannot write to /dev/null/x"),
    (("scorer", "train", "--data", "nowhere", "--out", "o", "--epochs", "0"), "--epochs"),
    (("scorer", "train", "--data", "nowhere", "--out", "o", "--validation", "2"), "--validation"),
    (("scorer", "train", "--data", "nowhere", "--out", "o", "--architecture", "verifer"), "sequence, verifier"),
    (("scorer", "train", "--data", "nowhere", "--out", "o", "--architecture", "sequence", "--start", "x"),
     "--start is for verifiers"),
    (("scorer", "train", "--data", "nowhere", "--out", "begun"), "begun is a folder: give the name of a .safetensors"),
    (("scorer", "train", "--data", "nowhere", "--out", "taken.jsonl"), "taken.jsonl exists and is no .safetensors"),
    (("scorer", "import", "none.pt", "--out", "taken.jsonl"), "taken.jsonl exists and is no .safetensors"),
    (("scorer", "eval", "confidence", "--data", "nowhere", "--out", "begun"), "begun is a folder: give the name of a"),
    (("scorer", "eval", "confidence", "--data", "nowhere", "--plot", "taken.jsonl"), "taken.jsonl exists and is"),
    (("scorer", "collect", "--problems", "pawn:dev", "--limit", "1", "--shard", "2/2", "--out", "o"),
     "shard 2/2 holds no problem: there are fewer problems than shards"),
    (bench("--limit", "1", "--shard", "2/2", "--out", "o"), "shard 2/2 holds no"),
    (("scorer", "collect", "--problems", "pawn:dev", "--out", "o", "--layers", "0,0"), "layers '0,0': one of them is"),
    (("prefix-value", "--benchmark", "pawn", "--out", "o", "--cuts", "nan"), "cuts [nan]: give shares of a trace"),
    (("prefix-value", "--benchmark", "pawn", "--out", "o", "--cuts", ""), "cuts '': give shares of a trace"),
    (("prefix-value", "--benchmark", "pawn", "--out", "o", "--keep", "16"), "--keep 16 of --traces 16"),
    (("scorer", "eval", "confidence", "--data", "nowhere"), "nowhere"),
    (("scorer", "eval", "--data", "nowhere"), "SCORER"),
    (("scorer", "import", "none.pt", "--out", "o", "--base-model", "pawn"), "--state-position boundary|before"),
    (("scorer", "import", "none.pt", "--out", "o", "--base-model", "pawn", "--state-position", "after"), "after"),
    (
        ("scorer", "import", "none.pt", "--out", "o", "--base-model", "pawn", "--state-position", "before"),
        "none.pt",
    ),
    (("scorer", "show", "none.safetensors"), "none.safetensors"),
    (("scorer", "show", ""), "scorer '': the name is empty"),
    (("scorer", "show", "confidence"), "scorer 'confidence' has no checkpoint to show"),
    (("scorer", "show", "cut"), "scorer 'cut': the folder holds no verifier"),
    (("scorer", "show", "verifier:cut"), "scorer 'verifier:cut' is no folder that `gambit scorer train"),
    (("scorer", "show", "verifier:"), "scorer 'verifier:'"),
    (("scorer", "export", "cut", "--out", "o"), "scorer 'cut': the folder holds no verifier"),
    (("scorer", "export", "confidence", "--out", "o"), "'confidence' is no verifier"),
    (("scorer", "export", "none.safetensors", "--out", "o"), "'none.safetensors' is no verifier"),
    (("scorer", "train", "--data", "nowhere", "--out", "o", "--architecture", "verifier", "--model", "pawn", "--start",
      "verifier:cut"), "scorer 'verifier:cut' is no folder"),
    (bench("--scorer", "cut", "--out", "o"), "scorer 'cut': the folder holds no verifier"),
    (("prefix-value", "--benchmark", "pawn", "--out", "o", "--scorer", "verifier:cut"),
      "--scorer verifier:cut: a verifier cannot judge prefixes here"),
    (("scorer", "show", "junk.safetensors"), "junk.safetensors"),
    (("scorer", "export", "first", "--out", "cut"), "cut holds something else than an exported verifier: choose"),
    (("scorer", "train", "--data", "nowhere", "--out", "cut", "--architecture", "verifier", "--model", "pawn"),
     "cut holds something else than a verifier: choose another --out"),
    (("replay", "latin.txt"), "latin.txt is no event log"),
    (("view", "latin.txt"), "latin.txt is no event log"),
    (("replay", "plain.gz"), "plain.gz is no event log"),
]  # fmt: skip

INVOCATIONS = [*numbers(), *NAMES, *PROBLEMS, *COMMANDS]
# These look at weights, for which torch is imported; they load no model.
WITH_TORCH = {"train", "eval", "export", "import", "show", "collect", "prefix-value", "none.safetensors",
              "junk.safetensors"}  # fmt: skip


def main():
    from typer.testing import CliRunner

    from gambit.cli.app import app

    for name, content in FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
    before = set(Path().rglob("*"))
    runner = CliRunner(env={"COLUMNS": "400"})
    for args, _ in sorted(INVOCATIONS, key=needs_torch):
        if needs_torch((args, "")):
            refuse_models()
        done = runner.invoke(app, list(args))
        left = sorted(str(path) for path in {*Path().rglob("*")} - before)
        imported = sorted({"torch", "transformers", "vllm"} & set(sys.modules))
        sys.stdout.write(json.dumps([args, done.exit_code, done.stdout, done.stderr, imported, left]) + "\n")


def needs_torch(invocation):
    return bool(WITH_TORCH & set(invocation[0]))


def refuse_models():
    """Where torch is there, a model that is loaded all the same ends the command with exit code 1."""
    from gambit.engines.local import model
    from gambit.training import collect

    def refuse(*_):
        raise AssertionError("a model is loaded")

    model.read_llama = model.read_with_transformers = collect.read_with_transformers = refuse


if __name__ == "__main__":
    main()
