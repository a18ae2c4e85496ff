"""LoRA adapters on vLLM: each search has its own, or none; scorers know which they were trained on."""

from dataclasses import replace

import pytest
import torch

from gambit import SearchConfig, Solver
from gambit.config.options import EngineConfig
from gambit.engines.base import SearchSpec, check_engine
from gambit.errors import GambitNote, UserError
from gambit.models.files import adapter_hash, weight_hash
from gambit.training.collect import StateReader
from gambit.training.sampling import SampledTrace
from gambit.types import StatePosition, TraceKey
from support.adapters import merged, save_adapter
from support.engine_setups import GREEDY, HAS_VLLM, PROMPT, RULE, random_mlp, run, spec, start_own_vllm, tokens_of
from support.tiny import save_tiny, tiny_model

needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    return save_adapter(tmp_path_factory.mktemp("adapter"))


def greedy(model, num_tokens):
    ids = list(PROMPT)
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(PROMPT) :])


@needs_vllm
def test_searches_in_one_batch_have_an_adapter_or_none(adapter):
    with pytest.warns(GambitNote, match="the engine serves adapters"):
        engine = start_own_vllm(adapters={"other": adapter}, self_check=True)
    for number, lora in ((1, None), (2, "other")):
        engine.open(SearchSpec(number, PROMPT, RULE, frozenset(), lora=lora))
        engine.submit([spec(0, search=number, sampling=GREEDY, tokens=50)])
    run(engine, 41)
    for number in (1, 2):
        parent = TraceKey(number, 0)
        engine.submit([spec(1, search=number, sampling=GREEDY, tokens=50, inherited=35, parent=parent)])
    found = {1: [], 2: []}
    while engine.progress(1) or engine.progress(2):
        for number, step in engine.step().searches.items():
            found[number].append(step)
    engine.close()
    plain, other = (tokens_of(steps) for steps in found.values())
    assert plain[0] == plain[1] == greedy(tiny_model(), 50)
    assert other[0] == other[1] == greedy(merged(adapter), 50)
    assert plain[0] != other[0]
    assert all(each.reused for steps in found.values() for step in steps for each in step.admitted), (
        "the cache is shared"
    )


@needs_vllm
def test_a_search_names_an_adapter_of_the_engine_and_its_log_has_it(adapter, tmp_path):
    model = save_tiny(tmp_path / "model")
    trained_plain = replace(random_mlp(), info=replace(random_mlp().info, base_model_hash=weight_hash(str(model))))
    options = {"engine": "vllm", "engine_options": {"kv_cache_memory_bytes": 64 << 20, "self_check": False}}
    config, events = SearchConfig(policy="sc", capacity=2, max_new_tokens=24, lora="other"), []
    with Solver(str(model), scorer=trained_plain, adapters={"other": adapter}, **options) as solver:
        with pytest.warns(UserWarning, match="was trained without an adapter, this search runs with other"):
            solver.solve("a=1+2", config, on_event=events.append)
        with pytest.raises(UserError, match=r"no adapter 'another' \(its own: other\)"):
            solver.solve("a=1+2", SearchConfig(policy="sc", capacity=2, lora="another"))
    assert events[0].environment["lora"] == {"name": "other", "hash": adapter_hash(adapter)}


def test_an_adapter_is_refused_where_it_cannot_be_served(adapter, tmp_path):
    with pytest.raises(UserError, match="the local engine serves no adapters, and other was given"):
        check_engine(EngineConfig(engine="local", adapters={"other": adapter}))
    with pytest.raises(UserError, match=r"no LoRA adapter in .*: give a folder with adapter_config\.json"):
        check_engine(EngineConfig(engine="vllm", adapters={"other": str(tmp_path)}))


def test_a_scorers_hash_names_weights_and_adapter(adapter, tmp_path):
    model = str(save_tiny(tmp_path))
    assert weight_hash(model, adapter) == f"{weight_hash(model)}+{adapter_hash(adapter)}"
    other = save_adapter(tmp_path / "other", seed=4)
    assert adapter_hash(other) != adapter_hash(adapter)


def test_states_are_collected_with_the_adapter_that_sampled(adapter, tmp_path):
    model = str(save_tiny(tmp_path))
    trace = SampledTrace(PROMPT, (5, 6, 7, 8, 9), boundaries=[2, 4])
    (states,) = StateReader(model, positions=[StatePosition.BOUNDARY], adapter=adapter).read([trace])
    with torch.inference_mode():
        expected = merged(adapter).model(input_ids=torch.tensor([[*PROMPT, *trace.tokens]])).last_hidden_state[0]
    (found,) = states.values()
    assert torch.allclose(found.float(), expected[[len(PROMPT) + 2, len(PROMPT) + 4]], atol=0.01)
