"""`gambit serve` through the real openai client: answers, streams, usage, errors, queue, budgets, cancelling."""

import asyncio
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random
from types import SimpleNamespace

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gambit.config import registry
from gambit.config.options import SearchConfig
from gambit.errors import DeadEngineError, EngineError
from gambit.pawn.puzzles import random_puzzle
from gambit.policies.baselines import SelfConsistency
from gambit.search import limits
from gambit.types import StopReason
from gambit.view.page import write_page
from support.serving import CHAIN, EASY, KEY, OTHER_KEY, SMALL, answer_of, serving


@pytest.fixture(scope="module")
def served(pawn_solver):
    with serving(pawn_solver) as running:
        yield running


QUESTION = [{"role": "user", "content": EASY}]


def long(**options):
    """A search that would run for very long."""
    return {"gambit": {"policy": "sc", "capacity": 4, "num_traces": 10_000, **options}}


def reasoning_of(chunk):
    return getattr(chunk.choices[0].delta, "reasoning", None) if chunk.choices else None


# -- what a client gets ----------------------------------------------------------------------------------------------


def test_the_openai_client_gets_an_answer_with_its_trace(served):
    reply = served.ask(seed=3)
    message = reply.choices[0].message
    assert message.content == "\\boxed{78}" and reply.choices[0].finish_reason == "stop"
    assert "17 + 61 = 78" in message.reasoning == message.reasoning_content and "think" not in message.reasoning
    assert reply.object == "chat.completion" and reply.id.startswith("chatcmpl-") and reply.model == "pawn"
    assert reply.gambit["answer"] == "78" and reply.gambit["seed"] == 3 and reply.gambit["stop_reason"] == "completed"
    assert sum(vote["traces"] for vote in reply.gambit["votes"]) == reply.gambit["counts"]["completed"] == 4


def test_usage_is_what_the_log_counts(served):
    for model in ("pawn", "pawn:sc", "pawn:single", "pawn:step"):
        reply = served.ask(CHAIN, model=model)
        record = served.record_of(reply.gambit["search_id"])
        assert (
            reply.usage.completion_tokens
            == record.tokens.generated
            == sum(t.num_own_tokens for t in record.tree.traces)
        )
        assert reply.usage.prompt_tokens == len(record.started.prompt_tokens)
        assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
        assert 0 < reply.usage.completion_tokens_details.reasoning_tokens < reply.usage.completion_tokens
        assert record.started.policy == reply.gambit["policy"] == (model.partition(":")[2] or "gambit")


def test_a_stream_tells_thoughts_the_winner_and_its_answer(served):
    chunks = list(served.ask(CHAIN, seed=1, stream=True, stream_options={"include_usage": True}))
    whole = served.ask(CHAIN, seed=1)
    assert chunks[0].choices[0].delta.role == "assistant" and len({chunk.id for chunk in chunks}) == 1
    told = [text for text in map(reasoning_of, chunks) if text]
    assert told[0].startswith("[trace ") and "17 + 61 = 78" in told[0]
    assert whole.choices[0].message.reasoning in "".join(told)
    both = [chunk.choices[0].delta.reasoning_content for chunk in chunks if reasoning_of(chunk)]
    assert both == told
    content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert content == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert chunks[-2].gambit["votes"] == whole.gambit["votes"]
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []


def test_the_first_words_of_the_model_come_long_before_the_end(served, gate):
    """The engine stands still after 30 of well over 60 steps, and the thought is there."""
    gate.allow(30)
    stream = served.ask(CHAIN, stream=True)
    first = next(text for text in map(reasoning_of, stream) if text)
    assert "= 78" in first and gate.num_steps <= 30
    gate.open()
    rest = list(stream)
    assert gate.num_steps > 60 and rest[-1].choices[0].finish_reason == "stop"


def test_a_silent_stream_is_kept_alive(pawn_solver, gate):
    with serving(pawn_solver, sse_keep_alive_interval=0.05) as served:
        gate.hold()
        body = {"model": "pawn", "messages": [{"role": "user", "content": EASY}], "stream": True}
        with served.http() as client, client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(line for line in lines if line.startswith(":")) == ": keep-alive"
            gate.open()
            assert [line for line in lines if line][-1] == "data: [DONE]"


def test_completions_give_the_text_alone(served):
    client = served.client()
    reply = client.completions.create(model="pawn", prompt=EASY, seed=1)
    assert reply.choices[0].text == "\\boxed{78}" and reply.object == "text_completion"
    chunks = list(client.completions.create(model="pawn", prompt=[EASY], seed=1, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "\\boxed{78}"


def test_content_parts_and_other_roles_make_the_same_question(served):
    parts = [{"type": "text", "text": EASY[:10]}, {"type": "text", "text": EASY[10:]}]
    whole = served.ask(seed=2)
    split = served.ask(seed=2, messages=[{"role": "user", "content": parts}])
    assert split.gambit["votes"] == whole.gambit["votes"] and split.usage == whole.usage
    told = served.ask(
        seed=2, messages=[{"role": "developer", "content": "Modulo 97."}, {"role": "user", "content": EASY}]
    )
    assert told.usage.prompt_tokens > whole.usage.prompt_tokens


def test_several_choices_are_the_best_voted_distinct_answers(served):
    reply = served.ask(CHAIN, model="pawn:sc", n=3, seed=1, extra_body={"gambit": {"capacity": 16}})
    answers = [f"\\boxed{{{vote['answer']}}}" for vote in reply.gambit["votes"][:3]]
    assert [choice.message.content for choice in reply.choices] == answers and len(set(answers)) == len(answers) > 1


def test_stop_cuts_the_content_alone(served):
    reply = served.ask(stop=["}", "nothing"])
    assert reply.choices[0].message.content == "\\boxed{78" and reply.choices[0].finish_reason == "stop"
    assert "= 78" in reply.choices[0].message.reasoning


def test_a_question_without_a_readable_answer_gets_the_best_trace_and_a_warning(served):
    reply = served.ask(max_completion_tokens=6)
    [choice] = reply.choices
    assert choice.finish_reason == "length" and choice.message.reasoning and choice.message.content == ""
    assert any("no answer could be read" in warning for warning in reply.gambit["warnings"])


def test_greedy_decoding_is_for_the_single_id(served):
    many, one = served.ask(temperature=0), served.ask(model="pawn:single", temperature=0)
    assert any("temperature 0" in warning for warning in many.gambit["warnings"])
    assert one.gambit["warnings"] == [] and one.gambit["counts"]["roots"] == 1


# -- the same under load ---------------------------------------------------------------------------------------------


def votes_of(reply):
    return reply.gambit["votes"], reply.usage


def test_the_same_seed_gives_the_same_votes_alone_and_under_load(served, pawn_solver):
    alone = votes_of(served.ask(CHAIN, seed=7))
    config = SMALL.model_copy(update={"seed": 7})
    assert [v["answer"] for v in alone[0]] == [entry.answer for entry in pawn_solver.solve(CHAIN, config).votes]

    async def together():
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEY)
        questions = [CHAIN, EASY, CHAIN, EASY, CHAIN]
        asked = [[{"role": "user", "content": question}] for question in questions]
        create = client.chat.completions.create
        return await asyncio.gather(*(create(model="pawn", messages=each, seed=7) for each in asked))

    replies = asyncio.run(together())
    assert [votes_of(reply) for reply in replies[::2]] == [alone] * 3
    assert [reply.gambit["answer"] for reply in replies[1::2]] == ["78"] * 2


def test_the_client_names_an_effort_in_all_three_apis(pawn_solver):
    with serving(pawn_solver, SearchConfig(seed=0)) as running:
        client = running.client()
        chats = [running.ask(reasoning_effort=effort) for effort in ("low", "medium")]
        text = client.completions.create(model="pawn", prompt=EASY, extra_body={"reasoning_effort": "low"})
        response = client.responses.create(model="pawn", input=EASY, reasoning={"effort": "low"})
        short = running.ask(CHAIN, reasoning_effort="low", extra_body={"thinking_token_budget": 5})
    low, medium = (reply.gambit["counts"] for reply in chats)
    assert low["roots"] == low["completed"] == 1 and 4 <= medium["completed"] <= medium["roots"] + medium["branched"]
    assert medium["roots"] <= 16 and text.gambit["counts"]["roots"] == response.gambit["counts"]["roots"] == 1
    assert response.reasoning.effort == "low"
    assert short.usage.completion_tokens_details.reasoning_tokens <= 5 + 1  # and the end of thought that it is given


def test_without_a_seed_searches_differ(pawn_solver):
    with serving(pawn_solver, SearchConfig(capacity=4)) as served:
        seeds = {served.ask(model="pawn:single").gambit["seed"] for _ in range(3)}
    assert len(seeds) == 3


def test_a_server_started_with_a_seed_uses_it(served):
    assert served.ask(model="pawn:single").gambit["seed"] == SMALL.seed


def test_a_small_search_that_joins_a_large_one_ends_first_and_as_it_would_alone(served, gate):
    alone = votes_of(served.ask(seed=5))
    gate.allow(gate.num_steps + 10)
    large = served.ask(stream=True, extra_body=long())
    next(text for text in map(reasoning_of, large) if text)
    gate.open()
    assert votes_of(served.ask(seed=5)) == alone
    assert any(search.status == "running" for search in served.desk.searches.values())
    large.close()
    served.wait_until_idle()


def test_what_lm_eval_sends_is_answered_as_in_process(served, pawn_solver):
    """Its parameters, two requests at a time."""
    sent = {"max_tokens": 448, "temperature": 0.0, "stop": ["<|end|>", "Question:"], "seed": 1234}
    puzzles = [random_puzzle(Random(number), 4) for number in range(4)]
    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(lambda puzzle: served.ask(puzzle.text, **sent), puzzles))
    config = SMALL.model_copy(update={"max_new_tokens": 448, "seed": 1234})
    answers = [pawn_solver.solve(puzzle.text, config).answer for puzzle in puzzles]
    assert [reply.gambit["answer"] for reply in replies] == answers
    assert [reply.choices[0].message.content for reply in replies] == [f"\\boxed{{{answer}}}" for answer in answers]


# -- who leaves ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_frees_the_engine_within_two_steps(served, gate, is_streamed):
    body = {"model": "pawn", "messages": [{"role": "user", "content": EASY}], "stream": is_streamed, **long()}

    async def leave():
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}, timeout=60) as client:
            request = asyncio.ensure_future(client.post(f"{served.url}/v1/chat/completions", json=body))
            await asyncio.to_thread(gate.wait_for_steps, begun + 20)
            gate.hold()
            request.cancel()

    begun = gate.num_steps
    asyncio.run(leave())
    search = next(reversed(served.desk.searches.values()))
    while not search.is_over:  # the server has heard of it; the engine stands still meanwhile
        served.on_loop(lambda: None)
    assert search.status == "cancelled"
    at = gate.num_steps
    gate.allow(2)
    served.wait_until_idle()
    assert gate.num_steps - at <= 2 and served.kv_used == 0 and not served.solver._parts.host._tickets


@pytest.mark.system
def test_two_hundred_clients_that_leave_at_random_leave_nothing_behind(served):
    rng = random.Random(0)

    async def one(client):
        body = {
            "model": "pawn",
            "messages": [{"role": "user", "content": CHAIN}],
            "stream": rng.random() < 0.7,
            **long(),
        }
        request = asyncio.ensure_future(client.post(f"{served.url}/v1/chat/completions", json=body))
        await asyncio.wait({request}, timeout=rng.choice([0, 0.001, 0.01, 0.05, 0.2]))
        request.cancel()

    async def all_of_them():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}, timeout=60, limits=limits) as client:
            for _ in range(8):
                await asyncio.gather(*(one(client) for _ in range(25)))

    asyncio.run(all_of_them())
    assert served.ask().gambit["answer"] == "78"  # by now the server has seen every connection that came before
    served.wait_until_idle()
    assert served.kv_used == 0 and not served.solver._parts.host._tickets and not served.desk.queue.num_waiting


# -- errors ----------------------------------------------------------------------------------------------------------


def test_refusals_become_the_exceptions_of_the_client(served):
    with pytest.raises(openai.BadRequestError, match="logit_bias") as refused:
        served.ask(logit_bias={"5": 1})
    assert refused.value.param == "logit_bias" and refused.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="not a register puzzle"):
        served.ask("hello")
    with pytest.raises(openai.NotFoundError, match="pawn:sc") as missing:
        served.ask(model="gpt-5")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        served.client("sk-wrong").models.list()
    with pytest.raises(openai.NotFoundError):
        served.client().responses.retrieve("resp_0")


def test_a_full_queue_says_429_and_the_client_succeeds_when_it_tries_again(pawn_solver, gate):
    with serving(pawn_solver, max_running=1, max_waiting=1) as served:
        gate.hold()
        body = {"model": "pawn", "messages": [{"role": "user", "content": EASY}]}

        async def crowd():
            async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}, timeout=60) as client:
                replies = [
                    asyncio.ensure_future(client.post(f"{served.url}/v1/chat/completions", json=body)) for _ in "123"
                ]
                done, waiting = await asyncio.wait(replies, return_when=asyncio.FIRST_COMPLETED)
                [refused] = [each.result() for each in done]
                assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
                assert refused.json()["error"]["code"] == "queue_full"
                patient = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=9)
                retried = asyncio.ensure_future(patient.chat.completions.create(**body))
                while served.num_answers("/v1/chat/completions", 429) < 2:
                    await asyncio.sleep(0.01)
                gate.open()
                assert [(await each).status_code for each in waiting] == [200, 200]
                return await retried

        assert asyncio.run(crowd()).gambit["answer"] == "78"


class RaisingPolicy(SelfConsistency):
    """Fails when a trace completes."""

    name = "raising"

    def decide(self, state, view):
        if view.finished:
            raise ValueError("a bug of this policy")
        return super().decide(state, view)


def test_a_policy_that_raises_fails_its_own_request(pawn_solver, monkeypatch):
    monkeypatch.setitem(registry.BUILT_IN["gambit.policies"], "raising", f"{__name__}:RaisingPolicy")
    with serving(pawn_solver) as served:
        neighbour = served.ask(CHAIN, stream=True, seed=1)
        next(text for text in map(reasoning_of, neighbour) if text)
        with pytest.raises(openai.InternalServerError, match="a bug of this policy"):
            served.ask(model="pawn:raising")
        with pytest.raises(openai.APIError, match="a bug of this policy"):
            list(served.ask(model="pawn:raising", stream=True))
        assert list(neighbour)[-1].choices[0].finish_reason == "stop"
        assert served.http().get("/health").status_code == 200


def test_an_engine_that_dies_gives_every_stream_an_error_and_ends_the_server(pawn_solver, gate, monkeypatch):
    def fail():
        raise EngineError("the engine's process is gone")

    with serving(pawn_solver, shutdown_timeout=0.1) as served:
        gate.hold()
        streams = [served.ask(CHAIN, stream=True) for _ in range(3)]
        monkeypatch.setattr(gate, "_step", fail)
        gate.open()
        for stream in streams:
            with pytest.raises(openai.APIError, match="process is gone"):
                list(stream)
        while served.desk.engine_failure is None:
            served.on_loop(lambda: None)
        assert "gone" in str(served.desk.engine_failure)
    monkeypatch.undo()
    assert pawn_solver.solve(EASY, SMALL).answer == "78"


def test_an_engine_that_died_without_searches_ends_the_server_at_the_next_request(pawn_solver, monkeypatch):
    def fail(specs):
        raise DeadEngineError("its process has died")

    with serving(pawn_solver, shutdown_timeout=0.1) as served:
        monkeypatch.setattr(pawn_solver.engine, "submit", fail)
        with pytest.raises(openai.InternalServerError, match="has died"):
            served.ask()
        while served.desk.engine_failure is None:
            served.on_loop(lambda: None)
    monkeypatch.undo()
    assert pawn_solver.solve(EASY, SMALL).answer == "78"


def test_an_engine_that_fails_once_serves_on(pawn_solver, gate, monkeypatch):
    step, failures = gate._step, iter([EngineError("out of memory, once")])

    def fail_once():
        if (failure := next(failures, None)) is not None:
            raise failure
        return step()

    with serving(pawn_solver) as served:
        monkeypatch.setattr(gate, "_step", fail_once)
        with pytest.raises(openai.InternalServerError, match="once"):
            served.ask()
        assert served.ask().gambit["answer"] == "78" and served.http().get("/health").status_code == 200


# -- budgets and deadlines -------------------------------------------------------------------------------------------


def test_budgets_are_kept_and_give_a_vote(served, gate, monkeypatch):
    tokens = served.ask(extra_body=long(budget_tokens=500))
    assert tokens.usage.completion_tokens <= 500 and tokens.gambit["stop_reason"] == "budget_tokens"
    assert tokens.gambit["answer"] == "78" and tokens.choices[0].finish_reason == "length"
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 15 * gate.num_steps)  # whatever a step takes
    monkeypatch.setattr(limits, "time", clock)
    seconds = served.ask(extra_body=long(budget_seconds=1000))
    assert seconds.gambit["stop_reason"] == "budget_seconds" and seconds.gambit["answer"] == "78"


def test_server_and_key_cap_the_budgets(pawn_solver):
    base = SMALL.model_copy(update={"budget_tokens": 600})
    with serving(pawn_solver, SearchConfig(**base.model_dump(exclude_unset=True))) as served:
        assert served.ask(extra_body=long(budget_tokens=10_000)).usage.completion_tokens <= 600
        assert served.ask(extra_body=long(budget_tokens=100)).usage.completion_tokens <= 100


def test_a_deadline_counts_from_arrival(pawn_solver, gate):
    with serving(pawn_solver, request_timeout=0.5, max_running=1) as served:
        assert served.ask(extra_body=long()).gambit["stop_reason"] == "budget_seconds"
        gate.hold()
        first = served.ask(extra_body=long(), stream=True)
        with pytest.raises(openai.InternalServerError, match="no turn came within the"):
            served.ask()
        gate.open()
        assert list(first)[-1].choices[0].finish_reason == "length"


def test_draining_ends_running_searches_with_their_best_vote_and_refuses_new_ones(pawn_solver, gate):
    with serving(pawn_solver, shutdown_timeout=0.5) as served:
        stream = served.ask(stream=True, extra_body=long())
        next(text for text in map(reasoning_of, stream) if text)
        gate.wait_for_steps(60)  # some traces are complete
        gate.hold()  # nothing ends, and with it the server, before the test has looked
        served.server.end_soon()
        while not served.desk.is_draining:
            served.on_loop(lambda: None)
        with pytest.raises(openai.InternalServerError, match="shutting down") as refused:
            served.ask()
        assert refused.value.status_code == 503
        assert served.http(None).get("/health").status_code == 503 and served.http(None).get("/ping").status_code == 200
        gate.open()
        last = list(stream)[-1]
        assert last.choices[0].finish_reason == "length" and last.gambit["answer"] == "78"
        assert last.gambit["stop_reason"] == str(StopReason.INTERRUPTED)


# -- what else there is ----------------------------------------------------------------------------------------------


def test_the_small_endpoints(served):
    with served.http() as client:
        models = client.get("/v1/models").json()["data"]
        assert [model["id"] for model in models][:1] == ["pawn"] and {"pawn:sc", "pawn:single"} <= {
            m["id"] for m in models
        }
        assert client.get("/v1/models/pawn:sc").json()["policy"] == "sc"
        assert client.get("/version").json()["version"][0].isdigit()
        assert client.get("/health").status_code == client.get("/ping").status_code == 200
        served.ask()
        families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
    values = {
        sample.name: sample.value for family in families.values() for sample in family.samples if not sample.labels
    }
    assert values["gambit_searches_running"] == 0 and values["gambit_generated_tokens_total"] > 0
    assert families["gambit_info"].samples[0].labels == {"model": "pawn"}
    latency = families["gambit_search_seconds"]
    assert latency.type == "histogram" and latency.samples[-1].value > 0


def test_a_search_opens_as_a_page(pawn_solver, tmp_path):
    with serving(pawn_solver, out_dir=tmp_path) as served:
        search_id = served.ask(CHAIN).gambit["search_id"]
    write_page(tmp_path / search_id, tmp_path / "tree.html")
    assert json.loads((tmp_path / search_id / "result.json").read_text())["problem_id"] == search_id
    assert answer_of(EASY) == "78" and CHAIN.split(";")[2] in (tmp_path / "tree.html").read_text()


LINE_ENDS = "\u2028\x85\u2029\x0b\x0c\x1c "


def test_a_log_keeps_its_lines_whatever_the_prompt_holds(served):
    """Unicode has more ends of a line than a log."""
    search_id = served.ask(f"{LINE_ENDS}{EASY}").gambit["search_id"]
    served.wait_until_idle()
    log = served.desk.searches[search_id].log
    while log._packed is None:  # sealed on a thread of its own
        pass
    with served.http() as client:
        text = client.get(f"/page/searches/{search_id}/log").text
        with client.stream("GET", f"/page/searches/{search_id}/live") as stream:
            shown = [line for line in stream.iter_lines() if line.startswith("event: ")]
    kinds = [json.loads(line)["event"] for line in text.rstrip("\n").split("\n")]
    assert (kinds[0], kinds[-1]) == ("RunStarted", "Voted")
    assert shown[-1] == "event: end" and "event: snapshot" in shown
    assert served.record_of(search_id).started.question.endswith(EASY)


def test_text_that_cannot_be_encoded_reaches_no_engine(served):
    body = json.dumps({"model": "pawn", "messages": [{"role": "system", "content": "\ud800"}, *QUESTION]})
    response = json.dumps({"model": "pawn", "input": EASY, "metadata": {"a": "\ud800"}, "background": True})
    known = list(served.desk.searches)
    with served.http() as client:
        for path, sent in (("chat/completions", body), ("responses", response)):
            reply = client.post(f"/v1/{path}", content=sent)
            assert reply.status_code == 400 and "line 1 column" in reply.json()["error"]["message"]
    assert list(served.desk.searches) == known


def test_keys_do_not_see_each_other(served):
    mine = served.ask().gambit["search_id"]
    response = served.client().responses.create(model="pawn", input=EASY)
    with pytest.raises(openai.NotFoundError):
        served.client(OTHER_KEY).responses.retrieve(response.id)
    assert served.http(OTHER_KEY).get(f"/page/searches/{mine}/log").status_code == 404
    assert served.http().get(f"/page/searches/{mine}/log").status_code == 200
    assert mine not in served.http(OTHER_KEY).get("/page/searches").text
