"""A verifier behind an address: what it is sent, how answers are read, and what a broken server leads to."""

import json
import threading
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from gambit.config.options import EngineConfig, SearchConfig
from gambit.errors import EngineError, UserError
from gambit.pawn import Level, Split, generate
from gambit.solver import Solver
from gambit.types import Aggregation
from gambit.verifiers.families import FAMILIES
from gambit.verifiers.http import start_http_verifier
from gambit.verifiers.names import parse_verifier
from support.verifiers import CLOSE, QUESTION, SPECIAL, THOUGHTS, math_shepherd, own, qwen_prm, readings, rlhflow


class Server:
    """Answers as vLLM's server does for one model; `answer` makes what stands under `data` of one sequence."""

    def __init__(self, root, answer, max_model_len=1024):
        self.requests, self.status = [], 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                served = {"id": "judge", "root": str(root), "max_model_len": max_model_len}
                self.reply({"object": "list", "data": [served]} if self.path == "/v1/models" else {"data": []})

            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append((self.path, asked))
                rows = [{"index": i, "object": "pooling", "data": answer(ids)} for i, ids in enumerate(asked["input"])]
                self.reply({"object": "list", "model": "judge", "data": rows[::-1]})

            def reply(self, content):
                body = json.dumps(content if outer.status == 200 else {"error": {"message": "no memory"}}).encode()
                self.send_response(outer.status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()


def started(server, family=None, beside="", **options):
    named = f"{family}:" if family else ""
    return start_http_verifier(parse_verifier(f"verifier:{named}{server.address}{beside}"), EngineConfig(**options))


def classify(verifier):
    return lambda ids: [float(verifier.model(torch.tensor([ids])).logits[0].detach().sigmoid())]


STEPS = (SPECIAL.index("<extra_0>"), SPECIAL.index("ки"))


def test_own_verifiers_are_classifiers_with_an_offset_of_their_own(tmp_path):
    verifier = own(tmp_path / "own", offset=0.5)
    with Server(verifier.folder, classify(verifier)) as server:
        reader = started(server)
        found = reader.read(readings())
        assert [each.score for each in found] == pytest.approx(verifier.scores(QUESTION, THOUGHTS), **CLOSE)
        assert reader.info.aggregation is Aggregation.MEAN and reader.info.runs_on == "http"
        ((path, asked),) = server.requests
        assert path == "/pooling" and asked["task"] == "classify" and asked["model"] == "judge"
        assert [len(tokens) for tokens in asked["input"]] == [each.num_tokens for each in found]


def test_step_pooling_is_read_at_its_last_step(tmp_path):
    verifier = qwen_prm(tmp_path / "prm")
    expected = verifier.scores(QUESTION, THOUGHTS)
    count = lambda ids: sum(token in STEPS for token in ids)  # noqa: E731
    with Server(verifier.folder, lambda ids: [[1 - p, p] for p in expected[: count(ids)]]) as server:
        found = started(server).read(readings())
        assert [each.score for each in found] == pytest.approx(expected)
        assert server.requests[0][1]["task"] == "token_classify"
        encode = FAMILIES["qwen-prm"].encoder(verifier.folder)
        assert server.requests[0][1]["input"] == [encode(reading) for reading in readings()]


def test_of_plus_and_minus_the_first_counts(tmp_path):
    verifier = math_shepherd(tmp_path / "m")
    with Server("far/away", lambda ids: [[0.1, 0.9], [0.7, 0.3]]) as server:
        reader = started(server, "math-shepherd", f"/v1/prm#{verifier.folder}")
        assert [each.score for each in reader.read(readings())] == [0.7] * 3
        assert server.requests[0][0] == "/v1/prm"


def test_a_reading_longer_than_the_servers_context_is_not_sent(tmp_path):
    with Server("far/away", lambda ids: [0.5], max_model_len=50) as server:
        assert [each and each.score for each in started(server, "gambit").read(readings())] == [0.5, None, None]
        assert [len(asked["input"]) for _, asked in server.requests] == [1]


def test_what_cannot_be_known_from_here_is_asked_for(tmp_path):
    with Server("far/away", lambda ids: [0.5]) as server:
        with pytest.raises(UserError, match=r"is not known here: name it, verifier:FORMAT:http://…"):
            started(server)
        with pytest.raises(UserError, match=r"'far/away' is not on this disk: put a folder that has it behind"):
            started(server, "qwen-prm")
        with pytest.raises(UserError, match=r"does not serve verifiers of the format 'rlhflow'"):
            started(server, "rlhflow", f"#{rlhflow(tmp_path / 'r').folder}")
    with pytest.raises(UserError, match=r"no verifier is served: http://127\.0\.0\.1:\d+/v1/models does not answer"):
        started(server, "gambit")


def test_answers_of_another_kind_are_refused():
    for data in ([], [0.1, 0.2, 0.7], ["x"]):
        with (
            Server("far/away", lambda ids, data=data: data) as server,
            pytest.raises(EngineError, match="does not answer as vLLM's /pooling does"),
        ):
            started(server, "gambit").read(readings())


def test_a_search_with_a_served_verifier_ends_with_its_reason_when_the_server_does():
    puzzle = next(generate(Split.DEV, 0, Level.EASY)).text
    quick = SearchConfig(capacity=4, swap_size=1, check_interval=12, warmup_tokens=12, islands=1)
    with Server("far/away", lambda ids: [len(ids) % 7 / 7]) as server, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Solver("pawn", scorer=f"verifier:gambit:{server.address}", device="cpu") as solver:
            result = solver.solve(puzzle, quick)
            sent = [len(tokens) for _, asked in server.requests for tokens in asked["input"]]
            assert 4 < result.verifier.thoughts <= len(sent) and 0 < result.verifier.tokens <= sum(sent)
            server.status = 500
            with pytest.raises(EngineError, match=r"answers 500: .*no memory.*; --verifier-optional"):
                solver.solve(puzzle, quick)
