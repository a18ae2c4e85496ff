"""The fast path in vLLM's scheduler: with and without it every step plans the same and leaves the same state."""

import hashlib
import random
from collections import deque
from contextlib import nullcontext

import pytest
import torch

from support.engine_setups import HAS_VLLM, open_search, spec, start_own_vllm
from support.tiny import save_tiny
from support.vllm_state import StateReader, differences

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed: scripts/install.sh brings its CPU build"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]
BLOCK = 16
ROOMY, TIGHT = 400, 40  # blocks
STOP = 7
GROWING = 60  # steps in which requests come


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

    def __init__(self, scheduler, fast, seed):
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self.scheduler, self.fast, self.rng = scheduler, fast, random.Random(seed)
        self.reader = StateReader()
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.in_flight, self.depth = deque(), 1 if hasattr(scheduler, "_spec_token_placeholders") else 0
        self.num_requests = self.num_booked = self.num_left = self.num_planned = 0

    def tell(self, steps):
        for step in range(steps):
            if step >= GROWING and not self.scheduler.requests:
                break
            if step < GROWING and self.rng.random() < 0.5:
                self.add(self.rng.randint(1, 3))
            if self.scheduler.running and self.rng.random() < 0.05:
                self.abort()
            scheduled = self.step()
            yield {"plan": self.reader.read_plan(scheduled), **self.reader.read(self.scheduler)}

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
            if self.fast is not None:
                self.fast.begin(request)

    def abort(self):
        from vllm.v1.request import RequestStatus

        names = sorted(self.scheduler.requests)
        self.scheduler.finish_requests([self.rng.choice(names)], RequestStatus.FINISHED_ABORTED)

    def step(self):
        """As vLLM's core does it: asynchronous scheduling plans a step before the last one's tokens are known."""
        with self.planning():
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

    def planning(self):
        """Only where every running request finds its block; Gambit's scheduler knows it more exactly."""
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        if self.fast is None or free <= len(self.scheduler.running):
            return nullcontext()
        self.num_planned += len(self.fast._plain_decodes(self.scheduler.running)[0])
        return self.fast.planning()

    def read(self, scheduled, names, said):
        from vllm.v1.outputs import ModelRunnerOutput

        output = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: row for row, name in enumerate(names)}, sampled_token_ids=said,
            logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
        )  # fmt: skip
        if self.fast is not None:
            tokens, scheduled = self.fast.book(scheduled, output)
            self.num_left += len(scheduled.num_scheduled_tokens)
            self.num_booked += len(tokens) - len(scheduled.num_scheduled_tokens)
        self.scheduler.update_from_output(scheduled, output)


def token_of(name, length):
    return int(hashlib.sha256(f"{name} {length}".encode()).hexdigest()[:6], 16) % 50


def with_fast_decode(scheduler):
    from gambit.engines.vllm.compat.fast_decode import FastDecode, why_not

    assert why_not(scheduler, BLOCK) is None
    fast, free = FastDecode(scheduler, BLOCK), scheduler._free_request

    def free_and_forget(request, *args, **kwargs):
        fast.end(request.request_id)
        return free(request, *args, **kwargs)

    scheduler._free_request = free_and_forget
    return fast


@pytest.mark.parametrize(("is_async", "is_v2"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("num_blocks", "num_places"), [(ROOMY, 64), (TIGHT, 64), (ROOMY, 6)])
def test_every_step_leaves_the_same_state(model, is_async, is_v2, num_blocks, num_places):
    was_preempted = False
    for seed in range(3):
        plain, short = (make_scheduler(model, is_async, num_blocks, num_places) for _ in range(2))
        plain.use_v2_model_runner = short.use_v2_model_runner = is_v2
        stories = Story(plain, None, seed), Story(short, with_fast_decode(short), seed)
        for before, now in zip(*(story.tell(800) for story in stories), strict=True):
            assert differences(before, now) == []
            was_preempted |= any(request["status"].name == "PREEMPTED" for request in now["requests"].values())
        assert stories[1].num_booked > 3 * stories[1].num_left
        assert stories[1].num_planned > (stories[1].num_booked / 2 if num_blocks == ROOMY else 0)
        assert not short.requests, "the story is told to its end"
    assert was_preempted == (num_blocks == TIGHT)


def test_the_comparison_sees_every_field(model):
    """Of objects that vLLM has today and of fields that a later version may add."""
    from vllm.v1.request import Request

    stories = [Story(make_scheduler(model, True, TIGHT, 64), None, 0) for _ in range(2)]
    for story in stories:
        story.add(3)
        for _ in range(4):
            story.step()
    reader, (plain, changed) = StateReader(), (story.scheduler for story in stories)
    assert differences(reader.read(plain), reader.read(changed)) == []
    request: Request = changed.requests["1"]
    blocks = changed.kv_cache_manager.block_pool.blocks
    for found, name in ((request, "num_preemptions"), (changed, "current_step"), (blocks[3], "ref_cnt")):
        setattr(found, name, getattr(found, name) + 1)
        (line,) = differences(reader.read(plain), reader.read(changed))
        assert name in line or line.startswith("blocks")
        setattr(found, name, getattr(found, name) - 1)
    request.added_by_a_later_version = 1
    assert differences(reader.read(plain), reader.read(changed))
    request.added_by_a_later_version = lambda: 1
    with pytest.raises(AssertionError, match=r"Request.added_by_a_later_version is a .*LEFT_OUT"):
        reader.read(changed)


def test_what_is_more_than_plain_decoding_goes_vllms_own_way(model):
    from gambit.engines.vllm.compat.fast_decode import why_not

    scheduler = make_scheduler(model, False, ROOMY, 64)
    assert why_not(scheduler, BLOCK) is None and "blocks of another size" in why_not(scheduler, 2 * BLOCK)
    scheduler.num_lookahead_tokens = 1
    assert "num_lookahead_tokens" in why_not(scheduler, BLOCK)


# -- in an engine ------------------------------------------------------------------------------------------------


def scheduler_of(engine):
    return engine._core._client.engine_core.scheduler


def test_most_tokens_take_the_short_way_and_allocations_too(monkeypatch):
    engine = start_own_vllm()
    scheduler = scheduler_of(engine)
    book, coordinator = scheduler._fast_decode.book, scheduler.kv_cache_manager.coordinator
    taken, asked = [], []

    def watched(scheduled, output):
        tokens, left = book(scheduled, output)
        taken.append((len(tokens), len(left.num_scheduled_tokens)))
        return tokens, left

    real = coordinator.get_num_blocks_to_allocate
    monkeypatch.setattr(scheduler._fast_decode, "book", watched)
    monkeypatch.setattr(coordinator, "get_num_blocks_to_allocate", lambda *a, **k: asked.append(1) or real(*a, **k))
    open_search(engine, stops=())
    engine.submit([spec(i, tokens=96) for i in range(4)])
    while engine.progress(1):
        engine.step()
    engine.close()
    tokens, left = map(sum, zip(*taken, strict=True))
    assert tokens == 4 * 96
    assert left <= 4 * 2  # the first token and the last
    assert len(asked) <= 4 * 3, len(asked)


@pytest.mark.parametrize(
    ("version", "option"),
    [("0.31.7", {}), ("0.25.1", {}), (None, {"short_cuts": False})],
    ids=["untried version", "tried on another device only", "switched off"],
)
@pytest.mark.filterwarnings("ignore::gambit.errors.GambitWarning")
def test_vllms_own_path_is_taken_unless_version_and_device_were_tried(monkeypatch, version, option):
    from gambit.engines.vllm.compat import core

    monkeypatch.setattr(core, "VERSION", version or core.VERSION)
    engine = start_own_vllm(**option)
    assert scheduler_of(engine)._fast_decode is None
    open_search(engine, stops=())
    engine.submit([spec(i, tokens=40) for i in range(3)])
    said = sum(engine.step().searches[1].num_generated for _ in range(40))
    engine.close()
    assert said == 3 * 40


@pytest.mark.filterwarnings("ignore::gambit.errors.GambitWarning")
def test_the_fast_path_can_be_forced(monkeypatch):
    from gambit.engines.vllm.compat import core

    monkeypatch.setattr(core, "VERSION", "0.31.7")
    engine = start_own_vllm(short_cuts=True)
    assert scheduler_of(engine)._fast_decode is not None
    engine.close()
