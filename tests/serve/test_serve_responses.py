"""`/v1/responses`: whole, streamed, in the background, polled, cancelled, forgotten."""

import asyncio

import openai
import pytest

from gambit.serve import queue
from gambit.serve.formats import ResponseStore
from gambit.serve.search import ServedSearch
from support.serving import CHAIN, EASY, OTHER_KEY, serving


@pytest.fixture(scope="module")
def served(pawn_solver):
    with serving(pawn_solver) as running:
        yield running


def poll(client, response, until):
    while (found := client.responses.retrieve(response.id)).status not in until:
        pass
    return found


def test_a_response_holds_reasoning_message_and_usage(served):
    client = served.client()
    response = client.responses.create(model="pawn", input=EASY, metadata={"run": "1"})
    assert response.status == "completed" and response.output_text == "\\boxed{78}"
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert "= 78" in response.output[0].content[0].text and response.metadata == {"run": "1"}
    record = served.record_of(response.gambit["search_id"])
    assert response.usage.output_tokens == record.tokens.generated
    assert client.responses.retrieve(response.id).output_text == response.output_text
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_stream_of_typed_events_ends_with_the_response(served):
    with served.client().responses.stream(model="pawn", input=CHAIN) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == final.output_text and "response.reasoning_text.delta" in kinds


def test_a_background_response_is_polled_to_its_end(served, gate):
    gate.hold()
    client = served.client()
    response = client.responses.create(model="pawn", input=EASY, background=True)
    assert response.status in ("queued", "in_progress") and response.output == []
    with pytest.raises(openai.NotFoundError):
        served.client(OTHER_KEY).responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        served.client(OTHER_KEY).responses.cancel(response.id)
    gate.open()
    assert poll(client, response, {"completed"}).output_text == "\\boxed{78}"


def test_a_background_response_can_be_cancelled(served, gate):
    client, body = served.client(), {"gambit": {"policy": "sc", "num_traces": 10_000}}
    response = client.responses.create(model="pawn", input=EASY, background=True, extra_body=body)
    poll(client, response, {"in_progress"})
    assert client.responses.cancel(response.id).status == "cancelled"
    assert client.responses.cancel(response.id).status == "cancelled"
    served.wait_until_idle()
    assert served.kv_used == 0 and client.responses.retrieve(response.id).status == "cancelled"
    whole = client.responses.create(model="pawn", input=EASY)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(whole.id)


def test_what_was_cut_short_says_so(served):
    body = {"gambit": {"policy": "sc", "num_traces": 10_000, "budget_tokens": 300}}
    response = served.client().responses.create(model="pawn", input=EASY, extra_body=body)
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == "\\boxed{78}"


def test_a_failed_one_says_why(served, monkeypatch):
    def fail(*_):
        raise ValueError("something broke")

    monkeypatch.setattr(queue, "answer_of", fail)
    client = served.client()
    response = client.responses.create(model="pawn", input=EASY, background=True)
    found = poll(client, response, {"failed"})
    assert "something broke" in found.error.message


def test_responses_are_forgotten_in_time_and_in_number(served):
    now = [0.0]

    async def body():
        store = ResponseStore(10.0, 3, lambda: now[0])

        class Search:
            key = type("Key", (), {"name": "a"})
            id_as = ServedSearch.id_as

            def __init__(self, number, ended):
                self.id, self.ended = f"search-{number}", ended

        kept = [Search(number, None if number == 0 else 0.0) for number in range(4)]
        for each in kept:
            store.keep(each)
        assert list(store._kept) == ["resp_0", "resp_2", "resp_3"], "the oldest that is over goes"
        now[0] = 11.0
        store.find("resp_0", Search.key)  # still runs
        for number in (1, 2, 3):
            with pytest.raises(Exception, match="no response"):
                store.find(f"resp_{number}", Search.key)

    asyncio.run(body())


def test_without_store_nothing_is_kept(served):
    client = served.client()
    response = client.responses.create(model="pawn", input=EASY, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
