"""What a hostile client sends to a server, whatever engines are behind it: bodies, text, connections."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress

from gambit import events as ev
from gambit.results.record import fold
from gambit.serve.requests import ChatFields, CompletionFields, ResponseFields
from support.serving import EASY, KEY, Served, answer_of

USER = {"role": "user", "content": "a?"}
BODIES = {
    ChatFields: {"model": "M", "messages": [USER]},
    CompletionFields: {"model": "M", "prompt": "a?"},
    ResponseFields: {"model": "M", "input": "a?"},
}
ALL = tuple(BODIES)
TEXTS, NUMBERS, FLAGS = ["", "x", "\0", "1"], [0, -1, 10**30, 1.5, float("1e308")], [True, False]
THINGS = [[], {}, [[]], {"a": {}}, [None]]
LONG = "x" * 5000


def tool(**changes):
    return {"type": "function", "function": {"name": "f", **changes}}


# Fields with values that they do not take, by the formats that have them.
WRONG = [
    *((ALL, "model", value) for value in ["", 5, True, [], {}, ["M"], {"id": "M"}]),
    *((ALL, "n", value) for value in [0, -1, 129, 10**30, 1.5, "1", True, [], {}, "x"]),
    *((ALL, "temperature", value) for value in [-0.1, "0.5", True, [], {}, 1e308, -1e308]),
    *((ALL, "top_p", value) for value in [0, -1, 1.1, "1", True, [], {}]),
    *((ALL, "top_k", value) for value in [-2, 1.5, "1", True, [], {}, 10**30]),
    *((ALL, "min_p", value) for value in [-0.1, 1.1, "0", True, [], {}]),
    *((ALL, "seed", value) for value in [1.5, "1", True, [], {}, "x"]),
    *((ALL, "stop", value) for value in [5, True, {}, [5], [None], [""], ["a"] * 17, [["a"]], 1.5]),
    *((ALL, "stream", value) for value in [0, 1, "true", [], {}, "yes", 1.5]),
    *((ALL, "stream_options", value) for value in [5, "x", [], True, {"include_usage": 1}, {"x": 1}]),
    *((ALL, "user", value) for value in [5, True, [], {}, "x" * 513]),
    *((ALL, "safety_identifier", value) for value in [5, True, [], {}, "x" * 513]),
    *((ALL, "gambit", value) for value in [5, "x", True, [], ["a"], [["capacity", 2]]]),
    *((ALL, "nothing_of_this_name", value) for value in [5, "x", True, [], {}]),
    *(((ChatFields,), "messages", value) for value in [
        5, True, {}, [], [5], [[]], [None], ["x"], [{}], [{"role": "user"}], [{"content": "x"}],
        [{"role": "tool", "content": "x"}], [{"role": 5, "content": "x"}], [{"role": "user", "content": 5}],
        [{"role": "user", "content": {}}], [{"role": "user", "content": [5]}], [{"role": "user", "content": [{}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "assistant", "content": "x"}], [USER, {"role": "system", "content": "x"}],
        [{**USER, "name": "x"}], [{**USER, "tool_calls": [1]}], [{**USER, "type": "function_call"}], [USER, None],
    ]),
    *(((ChatFields, ResponseFields), "tools", value) for value in [
        5, "x", True, {}, [5], [[]], [None], [{}], [{"type": "function"}], [{"type": "web_search"}],
        [{"function": {"name": "f"}}], [tool(name="")], [tool(parameters=[])], [tool(x=1)],
        [tool(name=str(number)) for number in range(129)],
    ]),
    *(((ChatFields, ResponseFields), "tool_choice", value) for value in [5, "x", True, [], {}, {"type": "function"}]),
    *(((ChatFields, ResponseFields), "parallel_tool_calls", value) for value in [0, "x", [], {}]),
    *((ALL, "reasoning_effort", value) for value in ["", "x", 5, True, [], {}, "LOW"]),
    *((ALL, "thinking_token_budget", value) for value in [0, -1, 1.5, "5", True, [], {}]),
    *(((ResponseFields,), "reasoning", value) for value in [5, "x", True, [], {"effort": "x"}, {"summary": "auto"}]),
    *(((ChatFields, CompletionFields), "max_tokens", value) for value in [0, -1, 1.5, "5", True, [], {}]),
    *(((ChatFields,), "max_completion_tokens", value) for value in [0, -1, 1.5, "5", True, [], {}]),
    *(((ChatFields,), "chat_template_kwargs", value) for value in [5, "x", [], {"x": 1}, {"enable_thinking": 1}]),
    *(((CompletionFields,), "prompt", value) for value in [5, True, {}, [], ["a", "b"], [1, 2], [[1]], [None], [5]]),
    *(((ResponseFields,), "input", value) for value in [
        5, True, {}, [], [5], [{}], [{"role": "user"}], [{"type": "function_call_output"}],
        [{"role": "assistant", "content": "x"}], [{"role": "user", "content": [{"type": "input_image"}]}], [[]],
    ]),
    *(((ResponseFields,), "instructions", value) for value in [5, True, [], {}, ["x"]]),
    *(((ResponseFields,), "max_output_tokens", value) for value in [0, -1, 1.5, "5", True, []]),
    *(((ResponseFields,), "background", value) for value in [0, 1, "true", [], {}]),
    *(((ResponseFields,), "store", value) for value in [0, 1, "true", [], {}]),
    *(((ResponseFields,), "metadata", value) for value in [
        5, "x", [], {"a": 5}, {"a": None}, {"a": []}, {"x" * 65: "a"}, {"a": "x" * 513},
        {str(number): "" for number in range(17)},
    ]),
]  # fmt: skip
ROWS = [(kind, name, value) for kinds, name, value in WRONG for kind in kinds]
OPTIONS = [
    ("capacity", value) for value in [0, -1, 1.5, "x", [], {}, True, 10**30]
] + [
    ("islands", value) for value in [0, -1, 1.5, "x", [], {}, 10**30]
] + [
    (name, value) for name in ("swap_size", "check_interval", "num_traces", "first_traces", "budget_tokens")
    for value in [0, -1, "x", [], {}, 1.5]
] + [
    (name, value) for name in ("vote", "policy", "answer", "consensus_stop", "branch_point", "preset")
    for value in ["nothing", 5, [], {}]
] + [
    ("budget_seconds", value) for value in [-1, "x", [], {}]
] + [
    ("seed", 1), ("temperature", 0.5), ("max_new_tokens", 5), ("nothing_of_this_name", 1), ("__class__", 1), ("", 1),
]  # fmt: skip


PATHS = [
    ("GET", "/v1/models"), ("GET", "/v1/models/pawn"), ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"),
    ("POST", "/v1/responses"), ("GET", "/v1/responses/resp_1"), ("DELETE", "/v1/responses/resp_1"),
    ("POST", "/v1/responses/resp_1/cancel"), ("GET", "/version"), ("GET", "/metrics"), ("GET", "/page/events"),
    ("GET", "/page/searches"), ("POST", "/page/ask"), ("GET", "/page/searches/x/live"), ("GET", "/page/searches/x/log"),
    ("POST", "/page/searches/x/cancel"), ("GET", "/nothing"), ("GET", "/v1/../health/x"),
]  # fmt: skip
BODY = {"model": "pawn", "messages": [{"role": "user", "content": EASY}]}


def unread(method: str, path: str, *, key: str = "", length: int = 2_000_000) -> bytes:
    """The beginning of a request: its headers and one byte of the body they announce."""
    presented = f"Authorization: Bearer {key}\r\n" if key else ""
    host = "Host: 127.0.0.1\r\nOrigin: http://127.0.0.1\r\n"
    head = f"{method} {path} HTTP/1.1\r\n{host}{presented}Content-Length: {length}\r\n\r\nx"
    return head.encode()


REFUSED = [
    *((unread(method, path), 401) for method, path in PATHS),
    (unread("POST", "/page/nothing"), 404), (unread("POST", "/nothing", key=KEY), 404),
    (unread("POST", "/health"), 405), (unread("DELETE", "/ping"), 405), (unread("POST", "/v1/models", key=KEY), 405),
    (unread("GET", "/health"), 200), (unread("GET", "/"), 200), (unread("GET", "/v1/models", key=KEY), 200),
    (unread("POST", "/login"), 413), (unread("POST", "/v1/responses", key=KEY, length=10**8), 413),
]  # fmt: skip


def attack(served, request: bytes, status: int) -> socket.socket:
    """A connection that has got its answer and then goes on with the body."""
    connection = served.connect()
    connection.sendall(request)
    answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 %d" % status), answer
    with suppress(ConnectionError):  # the server may have closed it already
        connection.sendall(b"y")
    return connection


# -- all of it against one server ------------------------------------------------------------------------------------

ADDRESSES = {ChatFields: "chat/completions", CompletionFields: "completions", ResponseFields: "responses"}
HALF = "\ud800"  # of a surrogate pair
NO_TEXT = [
    {"messages": [{"role": "system", "content": HALF}, USER]}, {"prompt": HALF}, {"prompt": "a?", HALF: 1},
    {"input": "a?", "instructions": HALF}, {"input": "a?", "user": HALF}, {"prompt": "a?", "stop": HALF},
    {"input": "a?", "metadata": {"a": HALF}, "background": True}, {"prompt": "a?", "stream": True, "model": HALF},
]  # fmt: skip
UNREADABLE = [
    b"", b"{", b"null", b"[1, 2]", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"\x00",
    b'{"prompt": "\xed\xa0\x80"}', *(json.dumps(body).encode() for body in NO_TEXT),
]  # fmt: skip
# Line ends that only some programs know, and what looks like a line of the log or like markup: pawn reads past blanks.
FORGED = "\u2028\x85\u2029\x0b\x0c\x1c "


def attack_everything(served: Served, forge: Callable[[str], str] = lambda question: FORGED + question) -> None:
    """Raises AssertionError where a server on any engine does not stand an attack, or answers worse after it."""
    for each in (send_hostile_bodies, send_what_is_no_text, hold_connections):
        each(served)
        assert served.http(None).get("/health").status_code == 200, each.__name__
    ask_what_is_no_line(served, forge(EASY))
    assert served.ask().gambit["answer"] == answer_of(EASY)


def send_hostile_bodies(served: Served) -> None:
    """Wrong fields of every format: refused with a sentence that names them, before anything is queued."""
    known = list(served.desk.searches)
    with served.http() as client:
        for kind, name, value in ROWS:
            sent = json.dumps({**BODIES[kind], "model": "pawn", name: value})
            reply = client.post(f"/v1/{ADDRESSES[kind]}", content=sent)
            error = reply.json()["error"]
            assert reply.status_code in (400, 404) and name in error["message"], (name, value, reply.text)
        for name, value in OPTIONS:
            reply = client.post("/v1/chat/completions", content=json.dumps({**BODY, "gambit": {name: value}}))
            assert reply.status_code == 400 and name in reply.json()["error"]["message"], (name, value, reply.text)
    assert list(served.desk.searches) == known


def send_what_is_no_text(served: Served) -> None:
    """Bodies that are no JSON objects, and halves of surrogate pairs anywhere: refused at the door."""
    known = list(served.desk.searches)
    with served.http() as client:
        for sent in UNREADABLE:
            for address in ADDRESSES.values():
                reply = client.post(f"/v1/{address}", content=sent)
                assert reply.status_code == 400 and reply.json()["error"]["message"].encode(), sent[:80]
    assert list(served.desk.searches) == known


def hold_connections(served: Served) -> None:
    """Refused clients who go on sending; the server must have few `max_connections`."""
    most = served.server.config.http.args[1]
    with ExitStack() as stack:
        for _ in range(1 + most // len(REFUSED)):
            for request, status in REFUSED:
                stack.enter_context(attack(served, request, status))
        assert served.http(None).get("/health").status_code == 200
        assert len(served.server.server_state.connections) <= most
        assert served.ask().gambit["answer"] == answer_of(EASY)


def ask_what_is_no_line(served: Served, question: str) -> None:
    """A question that forges line ends: its log has one event a line, and its page shows the end."""
    search_id = served.ask(question).gambit["search_id"]
    served.wait_until_idle()
    with served.http() as client:
        text = client.get(f"/page/searches/{search_id}/log").text
        with client.stream("GET", f"/page/searches/{search_id}/live") as stream:
            shown = [line for line in stream.iter_lines() if line.startswith("event: ")]
    events = [ev.from_json(line) for line in text.rstrip("\n").split("\n")]
    assert isinstance(events[0], ev.RunStarted) and isinstance(events[-1], ev.Voted)
    assert fold(events).started.question == question and shown[-1] == "event: end"
