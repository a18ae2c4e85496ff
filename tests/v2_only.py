"""What only vLLM's second model runner can do; `test_vllm_v2.py` runs it, with `v2_on_cpu`."""

from dataclasses import replace

from engine_setups import SAMPLED, finish, open_search, spec, start_own_vllm, tokens_of
from gambit.types import TraceKey


def test_vllms_own_noise_comes_from_seed_trace_and_position():
    engine = start_own_vllm(exact_noise=False)

    def said(search, seed, traces):
        open_search(engine, search, stops=())
        sampling = replace(SAMPLED, seed=seed)
        engine.submit([spec(trace, search=search, sampling=sampling, tokens=30) for trace in traces])
        engine.step()
        child = spec(99, search=search, sampling=sampling, tokens=30, inherited=1, parent=TraceKey(search, traces[0]))
        engine.submit([child])
        found = tokens_of(finish(engine, search))
        engine.close_search(search)
        return found

    once, again, other = said(1, 5, [0, 1, 2]), said(2, 5, [2, 1, 0]), said(3, 6, [0, 1, 2])
    traces = [once[trace] for trace in (0, 1, 2)]
    assert traces == [again[trace] for trace in (0, 1, 2)], "neighbours change nothing"
    assert len({*traces, *(other[trace] for trace in (0, 1, 2))}) == 6
    assert once[99] != once[0] and once[99][0] == once[0][0]
    engine.close()
