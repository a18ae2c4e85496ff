"""Published scorers: fetched once, checked, kept whole, trusted a little; whatever goes wrong is one sentence."""

import dataclasses
import io
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from gambit.config.options import PresetSource, SearchConfig
from gambit.config.presets import ModelDefaults, resolve
from gambit.config.trust import MARGIN, RULES, ScorerTrust
from gambit.errors import EngineError, GambitNote, GambitWarning, UserError
from gambit.scorers import published
from gambit.scorers.checkpoint import load_checkpoint, read_metadata, save_checkpoint
from gambit.scorers.choice import fetch_published, load_scorer, scorer_file, scorer_to_send
from gambit.scorers.simple import ConfidenceScorer
from gambit.training.evaluate import check_writable_trust
from support import GOLDEN, ROOT
from support.collected import make_collection
from support.published import COMMIT, FILE, MODEL, serving, tiny_scorer
from support.tiny import save_tiny

FIRST = f"/authors/one/{COMMIT}/{FILE}"
SECOND = f"/others/two/{COMMIT}/{FILE}"
SCORER = tiny_scorer()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that is called like the one of the table's row, and has its shape."""
    return str(save_tiny(tmp_path_factory.mktemp("models") / "Tiny-Thinker"))


@pytest.fixture
def hub():
    with serving() as hub:
        yield hub


@pytest.fixture
def online(hub, tmp_path, monkeypatch):
    """An empty cache, a table with one row, and leave to fetch."""
    environment = hub.environment(tmp_path / "cache", hub.table(tmp_path / "table.json", SCORER))
    for name in ("CI", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("GAMBIT_SCORERS", "XDG_CACHE_HOME", "NO_PROXY"):
        monkeypatch.setenv(name, environment[name])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(published, "_failed", {})
    return environment


def gambit(environment, *arguments, **options):
    command = [sys.executable, "-m", "gambit", *map(str, arguments)]
    return subprocess.Popen(
        command, env={**environment, "COLUMNS": "200"}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        cwd=ROOT, **options,
    )  # fmt: skip


def left_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]


# -- the table -------------------------------------------------------------------------------------------------


def test_the_rows_are_those_of_the_two_public_repositories():
    lines = [line.split() for line in (GOLDEN / "authors" / "trees.txt").read_text().splitlines()]
    known = {(repository, commit, path): blob for repository, commit, blob, path in lines}
    rows = published.tables()[-1].scorers
    assert len(rows) == 3 and len(known) == 6
    found = {(each.repository, each.commit, each.path): row.blob for row in rows for each in row.sources}
    assert found == known
    for row in rows:
        assert Path(row.sources[0].path).name.removesuffix("_step_scorer.pt") in row.model
        assert all(source.url.startswith("https://") for source in row.sources)


def test_their_training_problems_are_known_by_their_questions():
    table = published.tables()[-1]
    digits = table.problem_sets["hmmt_2012_2023"]
    assert len(digits) == 357 * published.HASH_DIGITS and int(digits, 16)
    assert {row.trained_on for row in table.scorers} == {"hmmt_2012_2023"}
    assert published.question_hash("What is  $1+1$?\n") == published.question_hash("What is $1+1$?")


@pytest.mark.parametrize(
    ("name", "is_known"),
    [
        ("Qwen/Qwen3-4B-Thinking-2507", True),
        ("qwen/qwen3-4b-thinking-2507", True),
        ("Qwen3-4B-Thinking-2507", True),
        ("Qwen/Qwen3-4B", False),
        ("stranger/Qwen3-4B-Thinking-2507", False),
        ("Qwen/Qwen3-4B-Thinking-2507-FP8", False),
        ("pawn", False),
    ],
)
def test_a_model_is_known_by_its_whole_name(name, is_known):
    assert (published.row_for(name) is not None) == is_known


@pytest.mark.parametrize("folder", ["Phi-4-reasoning-plus", "models--microsoft--Phi-4-reasoning-plus/snapshots/0a1b"])
def test_a_folder_is_known_by_its_name_or_its_place_in_the_hubs_cache(tmp_path, folder):
    (tmp_path / folder).mkdir(parents=True)
    assert published.row_for(str(tmp_path / folder)).model == "microsoft/Phi-4-reasoning-plus"


def test_a_table_that_is_none_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("GAMBIT_SCORERS", str(tmp_path / "mine.json"))
    (tmp_path / "mine.json").write_text('{"scorers": [{"model": "org/x"}]}')
    with pytest.raises(UserError, match=r"mine\.json is not a table of published scorers: scorers\.0\.hidden_size: "):
        published.published_scorers()


# -- fetching --------------------------------------------------------------------------------------------------


def test_a_scorer_is_fetched_once_and_says_from_where(online, hub, model):
    with pytest.warns(GambitNote, match="fetching the scorer published for org/Tiny-Thinker from http://127") as told:
        scorer = load_scorer("auto", model, model)
    assert len(told) == 1 and hub.asked == [FIRST]
    again = load_scorer("auto", model, model)
    assert hub.asked == [FIRST] and torch.equal(scorer.weights[0], again.weights[0])
    [file] = left_in(Path(online["XDG_CACHE_HOME"]))
    metadata = read_metadata(file)
    assert scorer_file("auto", model) == file == scorer_file("published", model)
    assert metadata["published"]["blob"] == published.blob_hash(SCORER) and metadata["published"]["path"] == FILE
    assert metadata["training"] == {"imported_from": "tiny.pt", "problem_set": "tiny_set"}
    assert (metadata["base_model"], metadata["state_position"], metadata["aggregation"]) == (MODEL, "boundary", "mean")


def test_it_comes_through_the_proxy_of_the_environment(online, hub, model, tmp_path, monkeypatch):
    proxy, hub.address = hub.address, "http://scorers.invalid"
    hub.table(tmp_path / "table.json", SCORER)
    hub.files = {f"http://scorers.invalid{path}": content for path, content in hub.files.items()}
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.setenv("http_proxy", proxy)
    with pytest.warns(GambitNote):
        assert load_scorer("published", model, model).info.hidden_size == 32
    assert hub.asked == [f"http://scorers.invalid{FIRST}"]


def test_the_second_source_is_used_where_the_first_is_damaged(online, hub, model):
    hub.files[FIRST] = SCORER[:-1] + bytes([SCORER[-1] ^ 1])
    with pytest.warns(GambitNote):
        scorer = load_scorer("published", model, model)
    assert hub.asked == [FIRST, SECOND] and scorer.info.hidden_size == 32


def test_a_damaged_file_in_the_cache_is_fetched_anew(online, hub, model):
    with pytest.warns(GambitNote):
        load_scorer("auto", model, model)
    [file] = left_in(Path(online["XDG_CACHE_HOME"]))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.warns(GambitNote):
        load_scorer("auto", model, model)
    assert len(hub.asked) == 2


class Payload:
    def __reduce__(self):
        return exec, ("open('executed', 'w').close()",)


def pickled(content: object) -> bytes:
    found = io.BytesIO()
    torch.save(content, found)
    return found.getvalue()


def wrong_byte(hub, tmp_path):
    hub.files |= dict.fromkeys((FIRST, SECOND), SCORER[:5000] + b"?" + SCORER[5001:])


def cut_short(hub, tmp_path):
    hub.promised |= {path: len(SCORER) + 10 for path in (FIRST, SECOND)}


def too_large(hub, tmp_path):
    hub.table(tmp_path / "table.json", SCORER, most_bytes=1000)


def absent(hub, tmp_path):
    hub.files.clear()


def no_network(hub, tmp_path):
    address, hub.address = hub.address, "http://127.0.0.1:9"
    hub.table(tmp_path / "table.json", SCORER)
    hub.address = address


def with_code(hub, tmp_path):
    hub.files.clear()
    hub.table(tmp_path / "table.json", pickled({"model_state_dict": {}, "extra": Payload()}))


def of_another_size(hub, tmp_path):
    hub.files.clear()
    hub.table(tmp_path / "table.json", tiny_scorer(hidden=48))


def no_cache(hub, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")


FAILURES = [
    (wrong_byte, "cannot be fetched (authors/one: the hash of its "),
    (cut_short, f"cannot be fetched (authors/one: {len(SCORER):,} bytes of {len(SCORER) + 10:,} arrived"),
    (too_large, "bytes, more than the 1,000 that are allowed; others/two: "),
    (absent, "cannot be fetched (authors/one: the server answers 404; others/two: the server answers 404)"),
    (no_network, "cannot be fetched (authors/one: [Errno 111] Connection refused; others/two: "),
    (with_code, "tiny.pt: not a torch file of plain weights; nothing in it was executed"),
    (of_another_size, "tiny.pt expects hidden size 48, org/Tiny-Thinker has 32"),
    (no_cache, "cannot write to "),
]


@pytest.mark.parametrize(("damage", "message"), FAILURES, ids=lambda value: getattr(value, "__name__", ""))
def test_whatever_is_wrong_is_one_sentence_and_leaves_nothing(
    online, hub, model, tmp_path, monkeypatch, damage, message
):
    monkeypatch.chdir(tmp_path)
    damage(hub, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GambitNote)
        with pytest.raises((UserError, EngineError)) as error:
            load_scorer("published", model, model)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "executed").exists()
    asked = list(hub.asked)
    with pytest.warns(GambitWarning) as told:
        found = load_scorer("auto", model, model)
    assert isinstance(found, ConfidenceScorer) and hub.asked == asked, "what failed is not tried again"
    assert [str(each.message) for each in told] == [
        f"{error.value}; thoughts are ranked by the model's token confidence, a weak guide"
    ]
    assert left_in(tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("HF_HUB_OFFLINE", "1", "nothing is fetched offline"), ("CI", "true", "nothing is fetched where CI is set")],
)
def test_nothing_is_fetched_unasked_where_that_is_unwanted(online, hub, model, monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", name == "HF_HUB_OFFLINE")
    fetch_published("auto", model)
    with pytest.warns(GambitWarning, match=message) as told:
        assert isinstance(load_scorer("auto", model, model), ConfidenceScorer)
    assert "run `gambit scorer get org/Tiny-Thinker`" in str(told[0].message) and len(told) == 1
    assert message in published.outlook(MODEL) and hub.asked == []
    monkeypatch.setenv("CI", "")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.warns(GambitNote):
        fetch_published("auto", model)
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", name == "HF_HUB_OFFLINE")
    assert not isinstance(load_scorer("auto", model, model), ConfidenceScorer), "what is in the cache is used"


def test_a_model_of_the_same_name_with_another_shape_gets_none(online, hub, model, tmp_path):
    hub.table(tmp_path / "table.json", SCORER, layers=3)
    with pytest.warns(
        GambitWarning, match="is for a hidden size of 32, 3 layers and 37 token ids, but .* has 32, 2, 37"
    ):
        assert isinstance(load_scorer("auto", model, model), ConfidenceScorer)
    assert hub.asked == [] and scorer_file("auto", model) is None


def test_a_model_without_a_published_scorer_is_refused_one():
    with pytest.raises(UserError, match="no scorer is published for 'org/other': `gambit scorer list` names"):
        load_scorer("published", "org/other", "org/other")


# -- trust -----------------------------------------------------------------------------------------------------


def pool_of(scorer, **options):
    return resolve(
        SearchConfig(**options), ModelDefaults(), 10_000, is_probability=True, trust=scorer.info.trust
    )[0]  # fmt: skip


@pytest.mark.filterwarnings("ignore::gambit.errors.GambitNote")
def test_a_published_scorer_gets_the_middle_row_with_the_margin(online, model):
    settings = pool_of(load_scorer("auto", model, model), capacity=64)
    islands = 64 // RULES[1].island_size
    assert (settings.pool.islands, settings.pool.swap_size) == (islands, islands * RULES[1].swaps_per_island)
    assert settings.pool.swap_margin == MARGIN and settings.hard_floor is None
    assert "published, not judged by us" in settings.pool.why
    paper = pool_of(load_scorer("auto", model, model), preset=PresetSource.PAPER)
    assert (paper.capacity, paper.pool.islands, paper.pool.swap_margin, paper.hard_floor) == (256, 1, 0.0, 0.1)


@pytest.mark.filterwarnings("ignore::gambit.errors.GambitNote")
def test_no_file_is_published_by_its_own_word(online, model, tmp_path):
    """The file in the cache, given by its path to any model, is a stranger's; so is one that says it were published."""
    load_scorer("auto", model, model)
    file = scorer_file("auto", model)
    assert pool_of(load_scorer(str(file), model, model), capacity=64).pool.islands == 64 // RULES[2].island_size
    loaded = load_checkpoint(file)
    claimed = ScorerTrust(auc=(None,) * 4, num_problems=0, is_published=True)
    claims = dataclasses.replace(loaded, info=dataclasses.replace(loaded.info, trust=claimed))
    save_checkpoint(claims, tmp_path / "claims.safetensors")
    assert not load_checkpoint(tmp_path / "claims.safetensors").info.trust.is_published


@pytest.mark.filterwarnings("ignore::gambit.errors.GambitNote")
@pytest.mark.parametrize(("num_problems", "row"), [(100, RULES[0]), (19, RULES[1])])
def test_a_published_scorer_that_was_judged_is_trusted_by_that(online, model, num_problems, row):
    load_scorer("auto", model, model)
    file = scorer_file("auto", model)
    judged = ScorerTrust(auc=(0.9,) * 4, num_problems=num_problems, spread=(0.1,) * 8)
    loaded = load_checkpoint(file)
    info = dataclasses.replace(loaded.info, trust=judged)
    save_checkpoint(dataclasses.replace(loaded, info=info), file, {"published": read_metadata(file)["published"]})
    assert pool_of(load_scorer("auto", model, model), capacity=64).pool.islands == 64 // row.island_size


@pytest.mark.filterwarnings("ignore::gambit.errors.GambitNote")
def test_it_is_not_judged_on_the_problems_it_was_trained_on(online, model, hub, tmp_path):
    load_scorer("auto", model, model)
    names, folder = [str(scorer_file("auto", model))], make_collection(tmp_path / "made", num_problems=3)
    check_writable_trust(names, folder, "auto")
    index = json.loads((folder / "index.jsonl").read_text().splitlines()[0])
    table = json.loads((tmp_path / "table.json").read_text())
    table["problem_sets"]["tiny_set"] = "00000000" + published.question_hash(f"  {index['problems'][0]['question']}\n")
    (tmp_path / "table.json").write_text(json.dumps(table))
    with pytest.raises(UserError, match="was trained on tiny_set, and 1 of these 3 problems are from it"):
        check_writable_trust(names, folder, "auto")


@pytest.mark.filterwarnings("ignore::gambit.errors.GambitNote")
def test_engines_on_other_machines_get_the_scorer_from_this_one(online, model, hub):
    sent = scorer_to_send("auto", model, model)
    assert sent.info.trust.is_published and len(hub.asked) == 1
    assert scorer_to_send("confidence", model, model) is None and scorer_to_send("auto", "pawn", "pawn") is None


# -- as a user types it ----------------------------------------------------------------------------------------


def ended(process):
    out, err = process.communicate(timeout=300)
    assert "Traceback" not in err
    return process.returncode, out, " ".join(err.split())


@pytest.mark.system
def test_one_command_fetches_verifies_imports_and_searches_with_branches(online, hub, model, tmp_path):
    flags = ("--model", model, "--engine", "local", "--device", "cpu", "--capacity", "8", "--max-new-tokens", "200",
             "--warmup-tokens", "4", "--check-interval", "2", "--temperature", "1.5", "--top-p", "1",
             "--top-k", "0")  # fmt: skip
    code, out, err = ended(gambit(online, "solve", "a=1", *flags, "--out", tmp_path / "run", "--json"))
    assert code == 0, err
    result = json.loads(out)
    assert result["counts"]["branched"] > 0 and "published, not judged by us" in json.dumps(result)
    assert err.startswith("fetching the scorer published for org/Tiny-Thinker from http://127.0.0.1")
    assert len(left_in(tmp_path / "cache" / "gambit" / "scorers")) == 1 and hub.asked == [FIRST]
    code, again, err = ended(gambit(online, "solve", "a=1", *flags, "--out", tmp_path / "again", "--json", "--offline"))
    assert code == 0 and err == "" and json.loads(again)["answer"] == result["answer"]
    assert hub.asked == [FIRST]


@pytest.mark.system
def test_two_processes_at_once_fetch_it_once(online, hub, tmp_path):
    hub.seconds = 1.0
    both = [gambit(online, "scorer", "get", MODEL) for _ in range(2)]
    results = [ended(each) for each in both]
    assert [code for code, _, _ in results] == [0, 0] and results[0][1] == results[1][1]
    assert hub.asked == [FIRST] and len(left_in(tmp_path / "cache")) == 1


@pytest.mark.system
def test_get_list_and_a_dry_run_say_what_there_is(online, hub, model, tmp_path):
    code, out, _ = ended(gambit(online, "scorer", "list", "--json"))
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [row["file"] for row in rows] == [None] * 4 and rows[0]["model"] == MODEL
    dry = ("bench", "--dry-run", "--benchmark", "pawn", "--limit", "2", "--capacity", "4", "--model", MODEL)
    assert "would be fetched from http://127" in ended(gambit(online, *dry))[1] and hub.asked == []
    code, _, err = ended(gambit({**online, "HF_HUB_OFFLINE": "1"}, "scorer", "get", MODEL))
    assert code == 2 and "HF_HUB_OFFLINE is set: unset it to fetch the scorer of org/Tiny-Thinker" in err
    code, out, err = ended(gambit(online, "scorer", "get", model))
    assert code == 0 and Path(out.strip()).is_file() and "`--scorer auto` uses it from now on" in err
    assert "is in the cache" in ended(gambit(online, *dry))[1]
    _, shown, _ = ended(gambit(online, "scorer", "list"))
    assert [line.split()[-1] for line in shown.splitlines()] == ["fetched", "yes", "no", "no", "no"]
    assert "published, not judged by us" in shown


@pytest.mark.system
def test_a_scorer_goes_to_the_hub_with_a_card_and_is_used_from_there(online, hub, model, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GambitNote)
        loaded = load_scorer("auto", model, model)
    trust = ScorerTrust(auc=(0.6, 0.7125, 0.8, None), num_problems=40, base_model=MODEL, source="judge.jsonl")
    info = dataclasses.replace(loaded.info, trust=trust)
    save_checkpoint(
        dataclasses.replace(loaded, info=info), tmp_path / "mine.safetensors", {"training": {"source": "x.jsonl"}}
    )
    code, out, err = ended(gambit(online, "scorer", "push", tmp_path / "mine.safetensors", "org/mine"))
    assert code == 0 and out.strip() == f"{hub.address}/org/mine" and "--scorer hf:org/mine" in err, err
    card = hub.files["/org/mine/resolve/main/README.md"].decode()
    assert card == ended(gambit(online, "scorer", "push", tmp_path / "mine.safetensors", "org/mine", "--card"))[1][:-1]
    for part in (f"base_model: {MODEL}", "| 0.600 | 0.713 | 0.800 | unknown |", "on 40 problems of judge.jsonl",
                 "| trained on | x.jsonl |", f"gambit solve --model {MODEL} --scorer hf:org/mine"):  # fmt: skip
        assert part in card, card
    flags = ("--model", model, "--engine", "local", "--device", "cpu", "--capacity", "4", "--max-new-tokens", "30")
    search = ("solve", "a=1", *flags, "--scorer", "hf:org/mine", "--json", "--out")
    code, out, err = ended(gambit(online, *search, tmp_path / "1"))
    assert code == 0, err
    assert "40 problems" in json.dumps(json.loads(out))
    code, _, err = ended(gambit({**online, "HF_HUB_OFFLINE": "1"}, *search, tmp_path / "2"))
    assert code == 0, "from the cache"
    code, _, err = ended(gambit(online, "solve", "a=1", *flags, "--scorer", "hf:org/none", "--out", tmp_path / "3"))
    assert code == 2 and "hf:org/none: scorer.safetensors cannot be fetched: " in err
    code, _, err = ended(gambit(online, "solve", "a=1", *flags, "--scorer", "hf:none", "--out", tmp_path / "4"))
    assert code == 2 and "'hf:none': give hf:ORG/REPO, or hf:ORG/REPO@REVISION" in err


@pytest.mark.system
def test_a_models_own_scorer_is_judged_in_one_command(online, model, tmp_path):
    """The tiny model answers 7 or 8 as it likes, so that many problems have right and wrong traces."""
    problems = tmp_path / "p.jsonl"
    rows = [{"id": f"p{i}", "question": f"{'abcd'[i % 4]}={i}", "answer": "78"[i % 2]} for i in range(4)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--problems", problems, "--traces", "6", "--max-new-tokens", "60", "--device", "cpu")
    command = ("scorer", "eval", model, *options, "--data", tmp_path / "data", "--write", "--json")
    code, out, err = ended(gambit(online, *command))
    assert code == 0, err
    assert (
        "collecting 4 problems, 24 traces and about 720 tokens (30 a trace); a scorer counts as judged from 20" in err
    )
    assert "that takes 40 problems, 240 traces and about 7,200 tokens" in err
    report = out[out.index("{") :]
    assert json.loads(report)["num_traces"] == 24 and (tmp_path / "data" / "index.jsonl").is_file()
    assert read_metadata(scorer_file("auto", model))["metrics"]["test"]["source"] == "p.jsonl"
    table = json.loads((tmp_path / "table.json").read_text())
    table["problem_sets"]["tiny_set"] = published.question_hash("a=0")
    (tmp_path / "table.json").write_text(json.dumps(table))
    code, _, err = ended(gambit(online, *command[:-3], tmp_path / "other", "--write"))
    assert code == 2 and "was trained on tiny_set, and 1 of these 4 problems are from it" in err
    assert not (tmp_path / "other").exists()
    code, _, err = ended(gambit(online, "scorer", "eval", "confidence"))
    assert code == 2 and "give --data FOLDER, or --problems" in err
