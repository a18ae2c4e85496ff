"""Short cuts in vLLM's scheduler: with and without them every step plans the same and leaves the same books."""

import hashlib
import random
from collections import deque
from contextlib import nullcontext

import pytest
import torch

from engine_setups import HAS_VLLM, open_search, spec, start_own_vllm
from tiny import save_tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed: scripts/install.sh brings its CPU build"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]
BLOCK = 16
ROOMY, TIGHT = 400, 40  # blocks
STOP = 7


# -- vLLM's own scheduler, without an engine ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


def make_scheduler(model, is_async, num_blocks, num_traces):
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = VllmConfig(
        model_config=ModelConfig(model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=300),
        scheduler_config=SchedulerConfig(
            max_num_seqs=num_traces, max_num_batched_tokens=8 * num_traces, max_model_len=300,
            async_scheduling=is_async, is_encoder_decoder=False, policy="priority",
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
    )  # fmt: skip
    config.cache_config.num_gpu_blocks = num_blocks
    attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], attention)])
    kind = AsyncScheduler if is_async else Scheduler
    return kind(
        vllm_config=config, kv_cache_config=cache, structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK, log_stats=False,
    )  # fmt: skip


class Story:
    """Requests come at random, share prefixes, say what their names and lengths decide, stop, are aborted."""

    def __init__(self, scheduler, short_cuts, seed):
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self.scheduler, self.short_cuts, self.rng = scheduler, short_cuts, random.Random(seed)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.in_flight, self.depth = deque(), 1 if hasattr(scheduler, "_spec_token_placeholders") else 0
        self.num_requests = self.num_usual = self.num_unusual = self.num_aside = 0

    def tell(self, steps):
        for step in range(steps):
            if step < 60 and self.rng.random() < 0.5:
                self.add(self.rng.randint(1, 3))
            if self.scheduler.running and self.rng.random() < 0.05:
                self.abort()
            plan = plan_of(self.step(), self.scheduler)
            yield plan, books_of(self.scheduler), blocks_of(self.scheduler)

    def add(self, count):
        from vllm import SamplingParams
        from vllm.v1.request import Request

        for _ in range(count):
            self.num_requests += 1
            prompt = [*range(100, 100 + self.rng.choice([5, 20, 40])), self.rng.randint(200, 203)]
            stops = [STOP] if self.rng.random() < 0.5 else []
            params = SamplingParams(max_tokens=self.rng.randint(2, 120), stop_token_ids=stops, ignore_eos=True)
            request = Request(
                request_id=str(self.num_requests), prompt_token_ids=prompt, sampling_params=params,
                pooling_params=None, block_hasher=self.hasher, priority=self.rng.randint(0, 5),
                arrival_time=float(self.num_requests),
            )  # fmt: skip
            self.scheduler.add_request(request)
            if self.short_cuts is not None:
                self.short_cuts.begin(request)

    def abort(self):
        from vllm.v1.request import RequestStatus

        names = sorted(self.scheduler.requests)
        self.scheduler.finish_requests([self.rng.choice(names)], RequestStatus.FINISHED_ABORTED)

    def step(self):
        """As vLLM's core does it: asynchronous scheduling plans a step before the last one's tokens are known."""
        with self.setting_aside():
            scheduled = self.scheduler.schedule()
        names = list(scheduled.num_scheduled_tokens)
        if names:
            lengths = {name: self.scheduler.requests[name].num_computed_tokens for name in names}
            partial = {name for name in names if self.scheduler.requests[name].is_prefill_chunk}
            said = [[] if name in partial else [token_of(name, lengths[name])] for name in names]
            self.in_flight.append((scheduled, names, said))
        if len(self.in_flight) > (self.depth if names else 0):
            self.read(*self.in_flight.popleft())
        return scheduled

    def setting_aside(self):
        """Only where every running request finds its block; Gambit's scheduler knows it more exactly."""
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        if self.short_cuts is None or free <= len(self.scheduler.running):
            return nullcontext()
        self.num_aside += len(self.short_cuts._usual(self.scheduler.running)[0])
        return self.short_cuts.setting_aside()

    def read(self, scheduled, names, said):
        from vllm.v1.outputs import ModelRunnerOutput

        output = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: row for row, name in enumerate(names)}, sampled_token_ids=said,
            logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
        )  # fmt: skip
        if self.short_cuts is not None:
            tokens, scheduled = self.short_cuts.take(scheduled, output)
            self.num_unusual += len(scheduled.num_scheduled_tokens)
            self.num_usual += len(tokens) - len(scheduled.num_scheduled_tokens)
        self.scheduler.update_from_output(scheduled, output)


def token_of(name, length):
    return int(hashlib.sha256(f"{name} {length}".encode()).hexdigest()[:6], 16) % 50


def plan_of(scheduled, scheduler):
    """All that a model runner is told of a step, and who runs in which order afterwards."""
    known = scheduled.scheduled_cached_reqs
    columns = zip(known.new_block_ids, known.num_computed_tokens, known.num_output_tokens, strict=True)
    return (
        list(scheduled.num_scheduled_tokens.items()), scheduled.total_num_scheduled_tokens,
        scheduled.num_common_prefix_blocks, scheduled.finished_req_ids, scheduled.preempted_req_ids,
        dict(zip(known.req_ids, columns, strict=True)), known.resumed_req_ids, known.all_token_ids, known.new_token_ids,
        [(new.req_id, new.block_ids, new.num_computed_tokens) for new in scheduled.scheduled_new_reqs],
        scheduled.new_block_ids_to_zero,
        [request.request_id for request in scheduler.running], [request.request_id for request in scheduler.waiting],
        scheduler.max_num_running_reqs, scheduler.max_num_scheduled_tokens,
    )  # fmt: skip


def books_of(scheduler):
    """Everything that vLLM notes of a request while it decodes."""
    cached = scheduler.kv_cache_manager.coordinator.single_type_managers[0].num_cached_block
    return {
        name: (
            list(request.all_token_ids), list(request.output_token_ids), list(request.block_hashes),
            request.status.name, request.num_computed_tokens, request.num_output_placeholders, cached.get(name),
            getattr(request, "num_in_flight_tokens", None), scheduler.kv_cache_manager.get_block_ids(name),
        )
        for name, request in scheduler.requests.items()
    }  # fmt: skip


def blocks_of(scheduler):
    """Who holds a block and what is cached in it; in which order free ones will be given."""
    pool = scheduler.kv_cache_manager.block_pool
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    return [(block.ref_cnt, block.block_hash) for block in pool.blocks], free, len(pool.cached_block_hash_to_block)


def with_short_cuts(scheduler):
    from gambit.engines.vllm.compat.fast_decode import ShortCuts, are_possible

    assert are_possible(scheduler, BLOCK)
    short_cuts, free = ShortCuts(scheduler, BLOCK), scheduler._free_request

    def free_and_forget(request, *args, **kwargs):
        short_cuts.end(request.request_id)
        return free(request, *args, **kwargs)

    scheduler._free_request = free_and_forget
    return short_cuts


@pytest.mark.parametrize(("is_async", "is_v2"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("num_blocks", "num_places"), [(ROOMY, 64), (TIGHT, 64), (ROOMY, 6)])
def test_every_step_leaves_the_same_books(model, is_async, is_v2, num_blocks, num_places):
    was_preempted = False
    for seed in range(3):
        plain, short = (make_scheduler(model, is_async, num_blocks, num_places) for _ in range(2))
        plain.use_v2_model_runner = short.use_v2_model_runner = is_v2
        stories = Story(plain, None, seed), Story(short, with_short_cuts(short), seed)
        for before, now in zip(*(story.tell(800) for story in stories), strict=True):
            assert before == now
            was_preempted |= any(book[3] == "PREEMPTED" for book in now[1].values())
        assert stories[1].num_usual > 3 * stories[1].num_unusual
        assert stories[1].num_aside > (stories[1].num_usual / 2 if num_blocks == ROOMY else 0)
        assert not short.requests, "the story is told to its end"
    assert was_preempted == (num_blocks == TIGHT)


def test_what_is_more_than_plain_decoding_goes_vllms_own_way(model):
    from gambit.engines.vllm.compat.fast_decode import are_possible

    scheduler = make_scheduler(model, False, ROOMY, 64)
    assert are_possible(scheduler, BLOCK) and not are_possible(scheduler, 2 * BLOCK)
    scheduler.num_lookahead_tokens = 1
    assert not are_possible(scheduler, BLOCK)


# -- in an engine ------------------------------------------------------------------------------------------------


def scheduler_of(engine):
    return engine._core._core._client.engine_core.scheduler


def test_most_tokens_take_the_short_way_and_allocations_too(monkeypatch):
    engine = start_own_vllm()
    scheduler = scheduler_of(engine)
    take, coordinator = scheduler._short_cuts.take, scheduler.kv_cache_manager.coordinator
    taken, asked = [], []

    def watched(scheduled, output):
        tokens, unusual = take(scheduled, output)
        taken.append((len(tokens), len(unusual.num_scheduled_tokens)))
        return tokens, unusual

    real = coordinator.get_num_blocks_to_allocate
    monkeypatch.setattr(scheduler._short_cuts, "take", watched)
    monkeypatch.setattr(coordinator, "get_num_blocks_to_allocate", lambda *a, **k: asked.append(1) or real(*a, **k))
    open_search(engine, stops=())
    engine.submit([spec(i, tokens=96) for i in range(4)])
    while engine.progress(1):
        engine.step()
    engine.close()
    tokens, unusual = map(sum, zip(*taken, strict=True))
    assert tokens == 4 * 96
    assert unusual <= 4 * 2  # the first token and the last
    assert len(asked) <= 4 * 3, len(asked)


@pytest.mark.parametrize(("version", "option"), [("0.31.7", {}), (None, {"short_cuts": False})])
def test_untested_versions_and_users_go_vllms_own_way(monkeypatch, version, option):
    from gambit.engines.vllm.compat import adapter

    if version is not None:
        monkeypatch.setattr(adapter, "VERSION", version)
    engine = start_own_vllm(**option)
    assert scheduler_of(engine)._short_cuts is None
    open_search(engine, stops=())
    engine.submit([spec(i, tokens=40) for i in range(3)])
    said = sum(engine.step().searches[1].num_generated for _ in range(40))
    engine.close()
    assert said == 3 * 40
