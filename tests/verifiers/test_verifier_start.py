"""When a verifier is started: beside the engine where neither measures the other's memory, else before it."""

import threading

import pytest

from gambit.config.options import EngineConfig
from gambit.errors import EngineError, UserError
from gambit.solver import Solver, builder
from gambit.verifiers import names
from gambit.verifiers.names import parse_verifier, prepare_verifier
from support.scripted import FunctionVerifier
from support.verifiers import own

IN_BYTES = {"verifier_memory": "20GB", "engine_options": {"kv_cache_memory_bytes": 1 << 30}}


class Starts:
    """What was started, in order; a verifier beside the engine waits until the engine is there."""

    def __init__(self, monkeypatch, *, beside, failure=None):
        self.seen, self._engine_is_there, self._failure, self._beside = [], threading.Event(), failure, beside
        start_engine = builder.start_engine

        def engine(*args):
            self.seen.append("engine begins")
            self.engine = start_engine(*args)
            self._engine_is_there.set()
            return self.engine

        monkeypatch.setattr(builder, "start_engine", engine)
        monkeypatch.setattr(builder, "prepare_verifier", lambda *_: (self._verifier, beside))

    def _verifier(self):
        if self._beside:
            assert self._engine_is_there.wait(60), "the engine waits for the verifier"
        self.seen.append("verifier is there")
        if self._failure:
            raise EngineError(self._failure)
        return FunctionVerifier(lambda reading: 0.5)


def load():
    return Solver("pawn", scorer="verifier:anything", engine="local", device="cpu")


@pytest.mark.parametrize(
    ("beside", "order"),
    [(True, ["engine begins", "verifier is there"]), (False, ["verifier is there", "engine begins"])],
)
def test_it_starts_beside_the_engine_or_before_it(monkeypatch, beside, order):
    starts = Starts(monkeypatch, beside=beside)
    with load() as solver:
        assert starts.seen == order and solver._parts.verifier.info.name


def test_where_it_fails_the_engine_is_closed_again(monkeypatch):
    starts, closed = Starts(monkeypatch, beside=True, failure="no room"), []
    monkeypatch.setattr("gambit.engines.local.engine.LocalEngine.close", lambda self: closed.append(self))
    with pytest.raises(EngineError, match="no room"):
        load()
    assert closed == [starts.engine]


@pytest.mark.parametrize(
    ("options", "beside"),
    [
        ({}, False),
        ({"verifier_memory": "20GB"}, False),
        ({"engine_options": {"kv_cache_memory_bytes": 1 << 30}}, False),
        (IN_BYTES, True),
        ({"verifier_device": "cuda:1"}, True),
    ],
)
def test_on_a_gpu_both_must_know_their_memory(tmp_path, monkeypatch, options, beside):
    monkeypatch.setattr(names, "find_spec", lambda name: name)
    monkeypatch.setattr("gambit.verifiers.vllm.find_spec", lambda name: name)
    name = parse_verifier(f"verifier:{own(tmp_path).folder}")
    assert prepare_verifier(name, EngineConfig(device="cuda", **options))[1] is beside
    options = {**options, "verifier_engine": "local"}
    assert not prepare_verifier(name, EngineConfig(device="cuda", **options))[1], "one process loads both"


@pytest.mark.parametrize("options", [{"verifier_engine": "local"}, {"device": "cpu"}])
def test_a_share_of_the_gpu_is_not_ignored_where_nothing_keeps_to_it(tmp_path, options):
    name = parse_verifier(f"verifier:{own(tmp_path).folder}")
    with pytest.raises(UserError, match="--verifier-gpu-share is for a verifier that vLLM runs here"):
        prepare_verifier(name, EngineConfig(verifier_gpu_share=0.5, **options))
    with pytest.raises(UserError, match="--verifier-gpu-share is for a verifier that vLLM runs here"):
        prepare_verifier(parse_verifier("verifier:http://127.0.0.1:9"), EngineConfig(verifier_gpu_share=0.5))
