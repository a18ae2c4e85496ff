"""`gambit serve` against those who mean ill: no key, other keys' ids, forged forms, strange and slow requests."""

import json
import resource
import socket
import ssl
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest

from gambit.serve import page, server, settings
from gambit.serve.page import SESSION_COOKIE
from gambit.serve.settings import NOBODY
from support.attacks import BODY, PATHS, REFUSED, attack, attack_everything, unread
from support.serving import EASY, KEY, OTHER_KEY, SMALL, serving
from support.tables import table


@pytest.fixture(scope="module")
def served(pawn_solver):
    with serving(pawn_solver) as running:
        yield running


@pytest.fixture(scope="module")
def open_server(pawn_solver):
    """One that asks for no key, on this machine alone."""
    with serving(pawn_solver, keys=()) as running:
        yield running


# -- keys ------------------------------------------------------------------------------------------------------------


@table("headers", [{}, {"authorization": "Bearer sk-wrong"}, {"authorization": KEY},
                                     {"authorization": f"Basic {KEY}"}, {"authorization": "Bearer"},
                                     {"cookie": f"{SESSION_COOKIE}=guess"}])  # fmt: skip
def test_without_a_key_there_is_health_and_nothing_else(served, headers):
    with served.http(None) as client:
        client.headers["origin"] = served.url
        for method, path in PATHS:
            assert client.request(method, path, headers=headers, json=BODY).status_code == 401, path
        assert (
            client.get("/health", headers=headers).status_code
            == client.get("/ping", headers=headers).status_code
            == 200
        )
        assert "API key" in client.get("/", headers=headers).text and "ask-button" not in client.get("/").text


def test_every_key_is_compared_whatever_is_presented(monkeypatch, served):
    """Constant time: neither the first match nor a wrong length ends the comparison."""
    seen = []
    real = settings.hmac.compare_digest
    monkeypatch.setattr(settings.hmac, "compare_digest", lambda a, b: seen.append((len(a), len(b))) or real(a, b))
    for presented in (KEY, OTHER_KEY, "x", "y" * 1000):
        settings.key_of(presented, served.server.config.app._settings.keys)
    assert seen == [(32, 32)] * 8


@table("name", ["../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2e%2e/x", "search-0", "a\\b", "%00"])
def test_ids_are_names_and_no_paths(served, name):
    with served.http() as client:
        for path in (f"/page/searches/{name}/log", f"/page/searches/{name}/live", f"/v1/responses/{name}"):
            reply = client.get(path)
            assert reply.status_code == 404 and "root:" not in reply.text


# -- a browser on this machine ---------------------------------------------------------------------------------------


def test_other_sites_cannot_use_a_server_without_keys(open_server):
    with open_server.http(None) as client:
        assert client.post("/v1/chat/completions", json=BODY).status_code == 200
        evil = {"origin": "https://evil.example"}
        assert client.post("/v1/chat/completions", json=BODY, headers=evil).status_code == 403
        assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 403  # DNS rebinding
        assert client.get("/", headers={"host": "evil.example:80"}).status_code == 403


def logged_in(served, key=KEY):
    """A browser, which names the origin of what it sends."""
    client = served.http(None)
    client.headers["origin"] = served.url
    return client, client.post("/login", data={"key": key})


def test_logging_in_gives_a_cookie_that_scripts_and_other_sites_cannot_use(served):
    client, reply = logged_in(served)
    [cookie] = reply.headers.get_list("set-cookie")
    assert reply.status_code == 303 and "httponly" in cookie.lower() and "samesite=strict" in cookie.lower()
    assert KEY not in cookie
    policy = client.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe-inline" not in policy
    assert client.get("/page/searches").status_code == 200
    assert client.get("/v1/models").status_code == 401, "the API takes keys alone"
    assert client.post("/logout", headers={"origin": "https://evil.example"}).status_code == 403
    assert client.get("/page/searches").status_code == 200
    assert client.post("/logout").status_code == 303
    assert client.get("/page/searches").status_code == 401


ELSEWHERE = [{"origin": "https://evil.example"}, {"origin": "null"}, {"origin": "http://127.0.0.1:1"}, {"origin": ""}]


def test_forms_are_taken_from_this_site_alone(served, monkeypatch):
    monkeypatch.setattr(page, "LOGIN_SECONDS", 0)
    assert served.http(None).post("/login", data={"key": KEY}).status_code == 403, "no browser leaves its origin out"
    assert logged_in(served, "sk-wrong")[1].status_code == 401
    client, _ = logged_in(served)
    other, _ = logged_in(served, OTHER_KEY)
    ask = {"question": EASY, "model": "pawn:single"}
    asked = client.post("/page/ask", json=ask)
    assert asked.status_code == 200
    for path in ("/login", "/page/ask", f"/page/searches/{asked.json()['id']}/cancel"):
        for headers in ELSEWHERE:
            assert client.post(path, json=ask, headers=headers).status_code == 403, (path, headers)
        del client.headers["origin"]
        assert client.post(path, json=ask).status_code == 403, path
        client.headers["origin"] = served.url
    assert served.http().post("/page/ask", json=ask).status_code == 200, "a key needs no origin"
    assert other.get(f"/page/searches/{asked.json()['id']}/log").status_code == 404
    assert other.get("/page/searches").json() == [] or asked.json()["id"] not in other.get("/page/searches").text


def test_what_a_question_says_is_no_markup(open_server):
    text = "<script>alert(1)</script>"
    with open_server.http(None) as client:
        reply = client.post("/page/ask", json={"question": text, "model": text}, headers={"origin": open_server.url})
        assert (
            reply.headers["content-type"] == "application/json" and reply.headers["x-content-type-options"] == "nosniff"
        )
        assert text not in client.get("/").text


# -- requests that are none ------------------------------------------------------------------------------------------


def raw(served, *parts: bytes) -> bytes:
    with served.connect() as connection:
        for part in parts:
            connection.sendall(part)
        return received(connection)


def received(connection: socket.socket) -> bytes:
    """Until the server closes."""
    found = b""
    try:
        while chunk := connection.recv(65536):
            found += chunk
    except ConnectionResetError:
        pass
    return found


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer sk-first\r\n"
HIDDEN = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@table("headers", [
    b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nX" + HIDDEN,
    b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n0\r\n\r\n" + HIDDEN,
    b"Content-Length: 0\r\nContent-Length: 50\r\n\r\n" + HIDDEN,
    b"Content-Length: +5\r\n\r\nhello" + HIDDEN,
    b"Content-Length : 5\r\n\r\nhello" + HIDDEN,
    b"Transfer-Encoding: xchunked\r\n\r\n" + HIDDEN,
    b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + HIDDEN,
    b"Host: other\r\n\r\n" + HIDDEN,
    b"X: a\r\n b: c\r\nBad Header\r\n\r\n" + HIDDEN,
    b"X-\x00: a\r\n\r\n" + HIDDEN,
])  # fmt: skip
def test_a_request_inside_another_is_not_answered(served, headers):
    reply = raw(served, HEAD, headers)
    assert (
        reply.startswith((b"HTTP/1.1 4", b"HTTP/1.1 501"))
        and reply.count(b"HTTP/1.1 ") == 1
        and b"gambit_" not in reply
    )


CHUNKED = b"POST %s HTTP/1.1\r\nHost: evil.example\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/health", b"/", b"/nothing"])
@pytest.mark.parametrize("chunk", [b"zz\r\n{}\r\n0\r\n\r\n", b"2\r\n{}XX0\r\n\r\n"])
def test_a_body_in_broken_chunks_is_answered_once(open_server, caplog, path, chunk):
    assert raw(open_server, CHUNKED % path + chunk).startswith(b"HTTP/1.1 400")
    with open_server.connect() as connection:  # broken only after it was answered
        connection.sendall(CHUNKED % path + b"2\r\n")
        assert connection.recv(12) == b"HTTP/1.1 403"
        connection.sendall(b"{}XX0\r\n\r\n")
        assert received(connection).count(b"HTTP/1.1") == 0
    assert open_server.http(None).get("/health").status_code == 200  # all of the above has been logged by now
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == [
        "Invalid HTTP request received."
    ] * 2


@table(("header", "status"), [(b"Host: [::1", 400), (b"Host: 127.0.0.1\r\nOrigin: http://[::1", 403)])
def test_a_host_that_is_none_is_refused(open_server, header, status):
    request = b"POST /login HTTP/1.1\r\nConnection: close\r\nContent-Length: 0\r\n%s\r\n\r\n" % header
    assert raw(open_server, request).startswith(b"HTTP/1.1 %d" % status)


def test_bodies_that_are_too_large_are_not_read(served):
    reply = raw(served, HEAD, b"Content-Length: 10000000\r\n\r\n" + b"x" * 1000)
    assert b" 413 " in reply and json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    with served.http() as client:
        chunks = (b"x" * 100_000 for _ in range(100))  # 10 MB without a word about their number
        with suppress(httpx.WriteError, httpx.ReadError):  # the server had closed before everything was sent
            assert client.post("/v1/chat/completions", content=chunks).status_code == 413
    assert raw(served, b"GET / HTTP/1.1\r\nX: " + b"y" * 100_000 + b"\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_deep_and_broken_json_is_a_400(served):
    with served.http() as client:
        for body in (
            b"[" * 200_000,
            b'{"a":' * 200_000,
            b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
            b"\x00",
            b"{",
        ):
            assert client.post("/v1/chat/completions", content=body).status_code == 400


def test_slow_requests_are_cut_off(pawn_solver):
    with serving(pawn_solver, body_timeout=0.3) as served:
        assert b" 408 " in raw(served, HEAD, b"Content-Length: 100\r\n\r\n{")  # the rest never comes
    with serving(pawn_solver, header_timeout=0.3) as served:
        assert raw(served, b"GET /health HT") == b""
        assert raw(served) == b"", "a connection that says nothing"


def test_many_silent_connections_keep_nobody_out(pawn_solver):
    """Ten times as many as there may be; serve_load.py does it with 10,000."""
    with serving(pawn_solver, max_connections=40, header_timeout=600) as served, ExitStack() as stack:
        silent = [stack.enter_context(served.connect()) for _ in range(400)]
        assert served.http(None).get("/health").status_code == 200
        assert received(silent[0]) == b"", "the oldest went"
        assert len(served.server.server_state.connections) <= 40


QUESTION = json.dumps(BODY).encode()
BUSY = (HEAD + b"Content-Length: %d\r\n\r\n" % len(QUESTION) + QUESTION, 429)


@contextmanager
def full_server(solver, **options):
    """A server whose only place is taken, so that every question gets a 429."""
    with serving(solver, max_running=1, max_waiting=0, **options) as served:
        ticket = served.on_loop(lambda: served.desk.queue.join(NOBODY, 1))
        try:
            yield served
        finally:
            served.on_loop(lambda: served.desk.queue.leave(ticket))


def test_refused_clients_who_go_on_sending_lock_nobody_out(pawn_solver):
    with (
        full_server(pawn_solver, max_connections=30, header_timeout=600, idle_timeout=600) as served,
        ExitStack() as stack,
    ):
        for request, status in [*REFUSED, BUSY] * 2:
            stack.enter_context(attack(served, request, status))
        assert served.http(None).get("/health").status_code == 200
        assert len(served.server.server_state.connections) <= 30


def test_refused_clients_who_go_on_sending_are_cut_off(pawn_solver):
    with (
        full_server(pawn_solver, header_timeout=600, body_timeout=600, idle_timeout=0.2) as served,
        ExitStack() as stack,
    ):
        attackers = [stack.enter_context(attack(served, request, status)) for request, status in [*REFUSED, BUSY]]
        for attacker in attackers:
            attacker.settimeout(20)
            received(attacker)  # or it times out
        assert served.http(None).get("/health").status_code == 200


def test_clients_who_do_not_read_their_answers_are_cut_off(pawn_solver):
    with serving(pawn_solver, header_timeout=0.3, idle_timeout=0.3) as served, served.connect() as connection:
        connection.settimeout(20)
        with pytest.raises(ConnectionError):
            while True:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n" * 100)


def test_a_local_server_stands_all_attacks(pawn_solver):
    with serving(pawn_solver, max_connections=30, header_timeout=600, idle_timeout=600) as served:
        attack_everything(served)


def test_a_body_that_never_ends_keeps_its_connection_only_while_there_is_room(pawn_solver):
    """Also where no key is needed: a request counts as one when it is wholly there."""
    with serving(pawn_solver, keys=(), max_connections=10, body_timeout=600) as served, ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(served.connect()).sendall(unread("POST", "/v1/chat/completions"))
        assert served.http(None).get("/health").status_code == 200


def test_a_search_outlives_the_deadlines_of_its_connection(pawn_solver, gate):
    with serving(pawn_solver, header_timeout=0.2, idle_timeout=0.2, body_timeout=0.2) as served:
        gate.hold()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(served.ask)
            served.wait_until(lambda desk: desk.queue.running)
            time.sleep(1)  # longer than all of them together
            gate.open()
            assert asked.result(timeout=60).gambit["answer"] == "78"


@pytest.mark.parametrize(("soft", "hard", "room", "raised"), [
    (1024, 4096, 2048, 2304), (1024, 1500, 1244, 1500), (100, 200, 1, 200), (8192, 8192, 2048, None),
    (1024, resource.RLIM_INFINITY, 2048, 2304), (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 2048, None),
])  # fmt: skip
def test_there_are_as_many_connections_as_the_process_may_have_open(monkeypatch, soft, hard, room, raised):
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: limits.append(pair))
    assert server._descriptors_for(2048) == room
    assert limits == ([] if raised is None else [(raised, hard)])


def test_https(pawn_solver, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
               "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    with serving(pawn_solver, ssl_certfile=certificate, ssl_keyfile=key) as served:
        trusted = ssl.create_default_context(cafile=certificate)
        with httpx.Client(base_url=served.url.replace("http:", "https:"), verify=trusted, timeout=60) as client:
            assert client.get("/health").status_code == 200
            reply = client.post("/login", data={"key": KEY}, headers={"origin": str(client.base_url).rstrip("/")})
            assert "secure" in reply.headers["set-cookie"].lower()


def test_strange_requests_are_answered_in_one_shape(served):
    with served.http() as client:
        strange = [("GET", "/v1/chat/completions", 405), ("PUT", "/", 405), ("GET", "/v2", 404),
                   ("POST", "/v1/models", 405), ("GET", "/v1/responses/x?stream=true", 400)]  # fmt: skip
        for method, path, status in strange:
            reply = client.request(method, path)
            assert reply.status_code == status and reply.json()["error"]["message"]
        reply = client.get("/health", headers={"x-request-id": "mine-1"})
        assert reply.headers["x-request-id"] == "mine-1"
        assert client.get("/health", headers={"x-request-id": "no\tid;"}).headers["x-request-id"].startswith("req-")
        mine = "m\u00efne".encode("latin-1")  # what would not come back as it was sent
        assert client.get("/health", headers={b"x-request-id": mine}).headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c", b"nonsense"])
def test_a_wish_for_another_protocol_is_answered_without_a_warning(served, caplog, protocol):
    with served.connect() as connection:
        connection.sendall(
            b"GET /v1/models HTTP/1.1\r\nHost: h\r\nUpgrade: %s\r\nConnection: upgrade\r\n\r\n" % protocol
        )
        assert connection.recv(12) == b"HTTP/1.1 401"
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []


def request_lines(caplog, *ids):
    """Those of the requests asked for: a server of another test may still have something to log."""
    logged = [json.loads(record.getMessage()) for record in caplog.records if record.name == "gambit.serve.requests"]
    return [line for line in logged if line["request_id"] in ids]


def called(request_id):
    return {"x-request-id": request_id}


def test_the_log_has_a_line_per_request_without_what_was_asked(pawn_solver, caplog):
    caplog.set_level("INFO", "gambit.serve.requests")
    with serving(pawn_solver, SMALL) as served:
        served.ask(user="u-1", extra_headers=called("right"))
        with pytest.raises(Exception, match="401"):
            served.client("sk-wrong").models.list(extra_headers=called("wrong"))
    lines = request_lines(caplog, "right", "wrong")
    assert [line["status"] for line in lines] == [200, 401]
    asked = lines[0]
    assert (
        asked["key"] == "first"
        and asked["policy"] == "gambit"
        and asked["generated_tokens"] > 0
        and asked["user"] == "u-1"
    )
    assert EASY not in caplog.text and KEY not in caplog.text and "sk-wrong" not in caplog.text
    caplog.clear()
    with serving(pawn_solver, SMALL, log_prompts=True) as served:
        served.ask(extra_headers=called("prompted"))
    assert [line["question"] for line in request_lines(caplog, "prompted")] == [EASY]
