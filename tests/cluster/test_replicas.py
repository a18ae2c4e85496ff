"""Engines that are always there, under Ray: a search spread over them, and a server in front of them."""

import dataclasses
import json
import os
import signal
import threading

import openai
import pytest
from typer.testing import CliRunner

from gambit import events as ev
from gambit.bench.rows import read_rows
from gambit.cli.app import app
from gambit.cluster.engines import EnginePool
from gambit.cluster.plan import EngineNeeds
from gambit.cluster.serving import ReplicaSolver
from gambit.cluster.work import RemoteEngine, SolverMaker
from gambit.config.options import SearchConfig
from gambit.errors import UserError
from gambit.results.record import replay_log
from gambit.serve.settings import ApiKey
from gambit.solver import Solver
from gambit.solver.spread import SpreadSolver
from support.attacks import attack_everything
from support.engine_setups import HAS_VLLM
from support.searching import plain
from support.serving import CHAIN, EASY, KEY, OTHER_KEY, answer_of, serving
from support.tiny import save_worded

QUESTION = "a = 17; b = 5; c = a * b; d = c - a; d?"
LONG = {"policy": "sc", "capacity": 8, "num_traces": 5000}  # for as long as a test wants
pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore:engine . died"),
]


@pytest.fixture(scope="module")
def engines(ray_cluster):
    make, needs = SolverMaker({"model": "pawn"}), EngineNeeds(cpus=0.5)
    with EnginePool(make, 2, needs, jobs_per_engine=8) as found:
        found.wait()
        yield found


@pytest.fixture
def both(engines):
    """Once both live, whatever the test before did to them."""
    engines.wait()
    return engines


def kill(slot):
    os.kill(slot.pid, signal.SIGKILL)


# -- one search on both ----------------------------------------------------------------------------------------------


@pytest.fixture
def spread(both):
    with SpreadSolver([RemoteEngine(both, slot) for slot in both.slots]) as solver:
        yield solver


@pytest.fixture(scope="module")
def alone():
    with Solver("pawn") as solver:
        yield solver


@pytest.mark.parametrize("options", [{}, {"budget_tokens": 300}, {"consensus_stop": 0.5, "consensus_min_traces": 4}])
def test_a_search_on_engines_elsewhere_is_the_search_on_one_here(spread, alone, options, tmp_path):
    config = SearchConfig(capacity=16, islands=4, seed=3, warmup_tokens=5, check_interval=5, **options)
    expected = alone.solve(QUESTION, config, out_dir=tmp_path / "alone")
    result = spread.solve(QUESTION, config, out_dir=tmp_path / "spread")
    assert result.votes == expected.votes and result.traces == expected.traces
    assert result.stop_reason is expected.stop_reason and result.tokens == expected.tokens
    logs = [list(ev.read_log(tmp_path / name / "events.jsonl")) for name in ("alone", "spread")]
    assert plain(logs[0]) == plain(logs[1])
    assert replay_log(tmp_path / "spread" / "events.jsonl", str.__eq__).finding is None


def test_a_search_that_loses_an_engine_begins_anew(spread, both, alone, tmp_path):
    # Its parts wait for the driver where the tokens are used up: none is over before its engine is killed.
    config = SearchConfig(capacity=16, num_traces=48, islands=4, seed=4, check_interval=2, budget_tokens=700)
    headers = []

    def on_event(event):
        if isinstance(event, ev.RunStarted):
            headers.append(event)
        elif len(headers) == 1 and not both.slots[1].num_deaths:
            kill(both.slots[1])
            headers.append("killed")

    result = spread.solve(QUESTION, config, out_dir=tmp_path / "run", on_event=on_event)
    assert len(headers) == 3 and both.slots[1].num_deaths == 1
    assert result.votes and result.votes == alone.solve(QUESTION, config).votes
    assert replay_log(tmp_path / "run" / "events.jsonl", str.__eq__).result.votes == result.votes


def test_a_question_that_is_refused_is_refused_in_the_same_words(spread, alone):
    with pytest.raises(UserError) as here:
        alone.solve("who are you?")
    with pytest.raises(UserError) as there:
        spread.solve("who are you?")
    assert str(here.value) == str(there.value)


def test_a_bench_run_of_spread_searches_has_the_rows_of_a_local_one(ray_cluster, tmp_path):
    words = [
        "bench",
        "--benchmark",
        "pawn",
        "--limit",
        "2",
        "--capacity",
        "6",
        "--islands",
        "3",
        "--policies",
        "gambit",
    ]
    spread = ["--ray", ray_cluster.address, "--engines", "2", "--cpus-per-engine", "0.5", "--spread"]
    for name, more in (("local", ["--no-report"]), ("spread", spread)):
        done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / name), *more])
        assert done.exit_code == 0, done.output
    local, rows = (sorted(read_rows(tmp_path / name), key=lambda row: row.problem) for name in ("local", "spread"))
    for here, there in zip(local, rows, strict=True):
        assert (there.answer, there.generated, there.unique_lengths, there.pool, there.revotes) == (
            here.answer, here.generated, here.unique_lengths, here.pool, here.revotes
        )  # fmt: skip
    assert {row.engines for row in rows} == {2} and {row.engines for row in local} == {1}
    report = (tmp_path / "spread" / "report.md").read_text()
    assert "1 at a time on 2 engines together" in report
    cells = json.loads((tmp_path / "spread" / "report.json").read_text())["cells"]
    assert cells[0]["wall_seconds"] == pytest.approx(2 * sum(row.seconds.total for row in rows), rel=0.02)


# -- a server in front of them ---------------------------------------------------------------------------------------


@pytest.fixture
def server(both):
    keys = (ApiKey(name="first", key=KEY, max_running=1), ApiKey(name="second", key=OTHER_KEY))
    with serving(ReplicaSolver("pawn", both), keys=keys) as served:
        yield served


def chunks_of(lines):
    """The data of a stream, read line by line."""
    for line in lines:
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def opened(server, key, config, question=CHAIN):
    """A stream, once the search behind it runs, with the rest of its data."""
    body = {"model": "pawn", "messages": [{"role": "user", "content": question}], "stream": True, "gambit": config}
    context = server.http(key).stream("POST", "/v1/chat/completions", json=body)
    data = chunks_of(context.__enter__().iter_lines())
    for chunk in data:
        if "reasoning" in json.loads(chunk)["choices"][0]["delta"]:
            return context, data
    raise AssertionError("the stream ended before its first words")


def test_answers_streams_and_logs_are_those_of_one_engine(server, alone):
    wanted = {"seed": 5, "extra_body": {"gambit": {"capacity": 8}}}
    reply = server.ask(EASY, key=OTHER_KEY, **wanted)
    expected = alone.solve(EASY, SearchConfig(capacity=8, seed=5))
    assert reply.gambit["votes"] == [
        {name: value for name, value in dataclasses.asdict(entry).items() if name not in ("forms", "islands")}
        for entry in expected.votes
    ]
    assert reply.usage.completion_tokens == expected.tokens.generated
    assert reply.choices[0].message.content and reply.choices[0].message.reasoning
    assert server.record_of(reply.gambit["search_id"]).vote(str.__eq__).answer == expected.answer
    streamed = list(server.ask(CHAIN, key=OTHER_KEY, stream=True, **wanted))
    assert streamed[-1].choices[0].finish_reason == "stop"
    assert any(getattr(chunk.choices[0].delta, "reasoning", None) for chunk in streamed[:-2])
    assert server.http().get("/health").status_code == 200
    assert "gambit_engines_ready 2" in server.http().get("/metrics").text


FIELDS = {"kind": {"enum": ["sun", "rain"]}, "degrees": {"type": "integer", "minimum": 10, "maximum": 99}}


def weather(degrees="integer"):
    fields = {**FIELDS, "degrees": {**FIELDS["degrees"], "type": degrees}}
    schema = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}


def test_an_engine_refuses_a_schema_before_the_search_begins(server):
    with pytest.raises(openai.BadRequestError, match="the engine local holds no answers to a schema") as refused:
        server.ask(EASY, key=OTHER_KEY, response_format=weather(), stream=True)
    assert refused.value.param == "response_format.json_schema.schema"


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_an_engine_elsewhere_holds_answers_to_a_schema(ray_cluster, tmp_path):
    folder = str(save_worded(tmp_path))
    fast = {"kv_cache_memory_bytes": 64 << 20, "own_process": False, "self_check": False}
    make = SolverMaker({"model": folder, "engine": "vllm", "scorer": "confidence", "engine_options": fast})
    base = SearchConfig(policy="sc", capacity=4, seed=0, max_new_tokens=100, thinking_tokens=8)
    with (
        EnginePool(make, 1, EngineNeeds(cpus=0.5), jobs_per_engine=2) as pool,
        serving(ReplicaSolver(folder, pool), base, served_names=("tiny",)) as served,
    ):
        pool.wait()
        reply = served.ask("the weather?", model="tiny", response_format=weather())
        found = json.loads(reply.choices[0].message.content)
        assert found["kind"] in ("sun", "rain") and 10 <= found["degrees"] <= 99
        with pytest.raises(openai.BadRequestError, match='cannot be compiled: Unsupported type "strin"'):
            served.ask("the weather?", model="tiny", response_format=weather("strin"), stream=True)


def test_a_reader_who_leaves_takes_the_search_off_its_engine(server, both):
    def kv_used():
        return sum(both.call(each, lambda solver: solver.engine._pool.blocks.used_tokens) for each in both.slots)

    context, _ = opened(server, OTHER_KEY, LONG)
    assert kv_used() > 0
    context.__exit__(None, None, None)
    server.wait_until_idle()
    assert kv_used() == 0


def test_the_limit_of_a_key_holds_over_all_engines(server):
    first, _ = opened(server, KEY, LONG)
    reply = {}
    asking = threading.Thread(target=lambda: reply.update(server.ask(EASY, key=KEY).gambit))
    asking.start()
    server.wait_until(lambda desk: desk.queue.num_waiting > 0)
    other = server.ask(EASY, key=OTHER_KEY)  # meanwhile another key's is answered, on the other engine
    assert other.choices[0].message.content and not reply
    first.__exit__(None, None, None)
    asking.join(600)
    assert reply["answer"] == answer_of(EASY)


def test_a_response_in_the_background_is_found_wherever_it_runs(server):
    with server.http(OTHER_KEY) as http:
        body = {"model": "pawn", "input": EASY, "background": True}
        made = [http.post("/v1/responses", json=body).json() for _ in range(2)]
        server.wait_until_idle()
        found = [http.get(f"/v1/responses/{each['id']}").json() for each in made]
        assert [each["status"] for each in found] == ["completed", "completed"]
        stopped = http.post("/v1/responses", json={"model": "pawn", "input": CHAIN, "background": True, "gambit": LONG})
        ended = http.post(f"/v1/responses/{stopped.json()['id']}/cancel").json()
        assert ended["status"] == "cancelled"
        server.wait_until_idle()


def test_a_killed_engine_ends_its_streams_with_an_error_and_comes_back(server, both):
    streams = [opened(server, key, LONG) for key in (KEY, OTHER_KEY)]
    assert [len(slot.jobs) for slot in both.slots] == [1, 1]
    searches = list(server.desk.searches.values())
    doomed = next(
        index for index, search in enumerate(searches)
        if search.pending.job.actor is both.slots[0].actor
    )  # fmt: skip
    num_deaths = both.slots[0].num_deaths
    kill(both.slots[0])
    rest = list(streams[doomed][1])
    assert rest[-1] == "[DONE]" and "died" in json.loads(rest[-2])["error"]["message"]
    next(streams[1 - doomed][1])  # the other goes on
    assert server.http().get("/health").status_code == 200
    both.wait()
    assert both.slots[0].num_deaths == num_deaths + 1
    for context, _ in streams:
        context.__exit__(None, None, None)
    server.wait_until_idle()
    assert server.ask(EASY, key=OTHER_KEY).gambit["answer"] == answer_of(EASY)


def test_engines_under_ray_stand_the_attacks_that_a_local_one_stands(both):
    with serving(ReplicaSolver("pawn", both), max_connections=30, header_timeout=600, idle_timeout=600) as served:
        deaths = [slot.num_deaths for slot in both.slots]
        attack_everything(served)
        assert [slot.num_deaths for slot in both.slots] == deaths


def test_while_no_engine_is_left_new_requests_are_refused_and_waiting_ones_wait(server, both):
    streams = [opened(server, key, LONG) for key in (KEY, OTHER_KEY)]
    reply = {}
    waiting = threading.Thread(target=lambda: reply.update(server.ask(EASY, key=KEY).gambit))  # for its key's turn
    waiting.start()
    server.wait_until(lambda desk: desk.queue.num_waiting > 0)
    for slot in both.slots:
        kill(slot)
    for _, data in streams:
        assert list(data)[-1] == "[DONE]"
    assert server.http().get("/health").status_code == 503 and server.http().get("/ping").status_code == 200
    body = {"model": "pawn", "messages": [{"role": "user", "content": EASY}]}
    refused = server.http(OTHER_KEY).post("/v1/chat/completions", json=body)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "no_engine"
    assert int(refused.headers["retry-after"]) > 0
    waiting.join(600)
    assert reply["answer"] == answer_of(EASY)
    assert server.http().get("/health").status_code == 200
