"""vLLM's schedulers with Gambit's rule of eviction, and one report per step instead of one output per request."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.request import StructuredOutputRequest

from gambit.engines.vllm.compat.blocks import blocks_from, only_grow
from gambit.engines.vllm.compat.core import ignore_interrupts, join_front, num_blocks
from gambit.engines.vllm.messages import (
    DecodeAttention,
    GambitConfig,
    RowValues,
    Sharing,
    StepReport,
    TraceTask,
    WorkerStep,
    attach,
    attached,
    packed,
    unpacked,
)
from gambit.engines.vllm.scheduling import TraceScheduling
from gambit.engines.vllm.schemas import AnswerGrammars
from gambit.types import EndReason

REASONS = {FinishReason.STOP: EndReason.STOP, FinishReason.LENGTH: EndReason.LENGTH}


class _GambitScheduling:
    """Decides evictions and reports steps, mixed into vLLM's schedulers.

    With scheduling_policy="priority" vLLM takes max((priority, arrival)) among the running requests when an
    allocation fails. Priorities are set just before a step in which that will happen, so that vLLM chooses the trace
    that engines/eviction.py names; `_preempt_request` then applies its rule to it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        join_front()
        config: GambitConfig = self.vllm_config.additional_config
        self._block_tokens = self.cache_config.block_size
        self._num_blocks = num_blocks(self.vllm_config)
        if (surplus := self._num_free_blocks() - self._num_blocks) > 0:
            self.kv_cache_manager.block_pool.get_new_blocks(surplus)  # over the budget: never given to a request
        self._blocks_only_grow = only_grow(self)
        self._fast_decode: Any = None
        self._why_plain = self._take_short_cuts() if config.short_cuts else None
        self._traces = TraceScheduling(
            config.scorer, self._num_blocks, self._block_tokens, is_async=isinstance(self, AsyncScheduler)
        )
        self._grammars = AnswerGrammars(
            self.vllm_config.model_config.model, self.vllm_config.model_config.get_vocab_size()
        )
        self._measures_sharing = config.attention is DecodeAttention.AUTO
        self._gathering: list[Any] = []  # requests that came before others of their group
        self._is_ranked = False  # this step may have victims
        self._in_schedule = False
        self._only_decodes = False  # the last step: one token for every running request, no prompt is left

    def _take_short_cuts(self) -> str | None:
        """Has plain decodes planned and booked here, if they can be; else returns the reason."""
        from gambit.engines.vllm.compat import fast_decode  # here: a version that was not tried needs none of its names

        reason = fast_decode.why_not(self, self._block_tokens)
        if reason is None:
            self._fast_decode = fast_decode.FastDecode(self, self._block_tokens)
        return reason

    # -- requests come and go ----------------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        """Takes a message from the front, which is a new trace or about others.

        Traces that were submitted together begin together, since a step that reads a prompt costs more than a plain
        one. From another process requests arrive one by one, while steps go on.
        """
        if not self._traces.num_steps:  # vLLM before 0.32 sets handlers of its own once the scheduler is made
            ignore_interrupts()
        message = unpacked(request.sampling_params.extra_args)
        assert message is not None and not isinstance(message, StepReport), "a request that Gambit did not make"
        if not isinstance(message, TraceTask):
            self._traces.receive(message)
            return
        request.sampling_params.extra_args = packed(message)  # unpacked once, for the workers too
        search = self._traces.add(request.request_id, message)
        if search.json_schema is not None:
            stop_ids = request.sampling_params.stop_token_ids
            inherited = request.prompt_token_ids[message.prompt_tokens :]
            self.structured_output_manager.backend = self._grammars
            request.structured_output_request = StructuredOutputRequest(None)
            request.structured_output_request.grammar = self._grammars.grammar(search, stop_ids, inherited)
        self._gathering.append(request)
        if message.followers:
            return
        for gathered in self._gathering:
            super().add_request(gathered)
            if self._fast_decode is not None:
                self._fast_decode.begin(gathered)
        self._gathering = []

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._traces.free(request.request_id)
        if self._fast_decode is not None:
            self._fast_decode.end(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """Ends what still runs of requests that the front aborts; their histories are not needed any more."""
        ended = super().finish_requests(request_ids, *args, **kwargs)
        if request_ids is not None:
            self._traces.release([request_ids] if isinstance(request_ids, str) else list(request_ids))
        return ended

    # -- before a step -----------------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        self._traces.begin_step()
        self._rank_if_tight()
        spent = time.perf_counter() - began
        self._in_schedule = True
        try:
            with ExitStack() as stack:
                if (failing := self._traces.failing) is not None:
                    self._traces.failing = None
                    stack.enter_context(_failing_once(self.kv_cache_manager, failing))
                if self._fast_decode is not None and not self._is_ranked:
                    # No trace can be evicted: vLLM need not look at those that just decode.
                    stack.enter_context(self._fast_decode.planning())
                output = super().schedule(*args, **kwargs)
        finally:
            self._in_schedule = False
            self._is_ranked = False
        began = time.perf_counter()
        self._attach_worker_step(output)
        self._traces.report.seconds_scheduling += spent + time.perf_counter() - began
        return output

    def _attach_worker_step(self, output: Any) -> None:
        """Attaches to vLLM's plan what the workers need beside it; notes which traces were admitted."""
        copies: list[tuple[int, int]] = []
        if self._fast_decode is not None:
            copies = self._fast_decode.copy_prefixes(output)
        sharing = None
        if self._measures_sharing:
            lengths = [request.num_computed_tokens for request in self.running]
            unique = self._num_used_blocks() * self._block_tokens  # a block that is being filled counts as a whole
            sharing = Sharing(len(lengths), sum(lengths), unique, max(lengths, default=0))
        counts = output.num_scheduled_tokens
        new = [data.req_id for data in output.scheduled_new_reqs]
        for request_id in (*new, *output.scheduled_cached_reqs.resumed_req_ids):  # queued before, on model runner V1
            request = self.requests[request_id]
            self._traces.admit(request_id, request.num_computed_tokens - counts[request_id], request.num_tokens)
        self._only_decodes = output.total_num_scheduled_tokens == len(counts) == len(self.running)
        attach(output, WorkerStep(copies, sharing, self._traces.rows_to_score(list(counts))))

    # -- after a step ------------------------------------------------------------------------------------------

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        report = self._traces.begin_report()
        tokens, outputs = self._take_tokens(scheduler_output, model_runner_output)
        began = time.perf_counter()
        report.rows, report.tokens = list(tokens), list(tokens.values())
        values, step = attached(model_runner_output, RowValues), attached(scheduler_output, WorkerStep)
        if values is not None and report.rows != model_runner_output.req_ids:
            values = values.of_rows([model_runner_output.req_id_to_index[request] for request in report.rows])
        ended = {each.request_id: each.finish_reason for each in outputs if each.finish_reason is not None}
        for request_id, reason in ended.items():
            if reason not in REASONS:
                report.failure = f"vLLM gave up request {request_id} ({reason})"
        ends = {request_id: REASONS[reason] for request_id, reason in ended.items() if reason in REASONS}
        stopped = self._traces.read(report, ends, values, None if step is None else step.thoughts)
        if stopped:
            # A step that is already under way computes one more token of each, which is dropped.
            self.finish_requests(stopped, RequestStatus.FINISHED_ABORTED)
        self._traces.forget_freed()
        report.why_plain = self._why_plain
        report.num_running = len(self.running)
        report.num_waiting = int(self.get_num_unfinished_requests()) - report.num_running
        report.kv_used_blocks = self._num_used_blocks()
        report.seconds_scheduling += time.perf_counter() - began
        if report.is_empty and not report.num_waiting + report.num_running:
            return {}
        return {0: EngineCoreOutputs(outputs=[EngineCoreOutput("gambit", [], kv_transfer_params=packed(report))])}

    def _take_tokens(self, scheduled: Any, output: Any) -> tuple[dict[str, int], list[EngineCoreOutput]]:
        """Returns the new token of each request, in the order of scheduling, and vLLM's own outputs."""
        tokens, left = {}, scheduled
        if self._fast_decode is not None:
            tokens, left = self._fast_decode.book(scheduled, output)
        by_client = super().update_from_output(left, output)
        outputs = by_client[0].outputs if 0 in by_client else []
        tokens |= {each.request_id: each.new_token_ids[0] for each in outputs if each.new_token_ids}
        for request_id in left.num_scheduled_tokens:
            if request_id in tokens and tokens[request_id] is None:
                del tokens[request_id]
        return tokens, outputs

    # -- memory pressure ---------------------------------------------------------------------------------------

    def _num_free_blocks(self) -> int:
        return int(self.kv_cache_manager.block_pool.get_num_free_blocks())

    def _num_used_blocks(self) -> int:
        return self._num_blocks - self._num_free_blocks()

    def _num_missing_blocks(self) -> int:
        """Counts the blocks that the running requests need in the next step beyond the free ones; at most 0: enough."""
        groups, free, size = len(self.kv_cache_config.kv_cache_groups), self._num_free_blocks(), self._block_tokens
        # No step can need more than one block per trace and those that its share of prompt tokens fills.
        prefill = 0 if self._only_decodes else self.max_num_scheduled_tokens // size
        if free > groups * (len(self.running) + prefill):
            return 0
        needed = 0
        for request in self.running:
            end = request.num_tokens + request.num_output_placeholders
            needed += -(-end // size) - -(-request.num_computed_tokens // size)
        return groups * needed - free

    def _rank_if_tight(self) -> None:
        """Ranks the running requests for eviction if they need more blocks than are free."""
        missing = self._num_missing_blocks()
        if self._traces.failing is None and missing <= 0:
            return
        if not self._blocks_only_grow:
            self._traces.lose_blocks()
        running = (request.request_id for request in self.running)
        # The self-check makes an allocation fail although nothing is missing: then one victim must be known.
        order = self._traces.eviction_order(running, partial(blocks_from, self), max(missing, 1))
        place = {request: len(order) - index for index, request in enumerate(order)}
        for request in self.running:
            request.priority = place[request.request_id]
        # The next victim last: where vLLM evicts the very request it is placing, it leaves the rest of the list
        # without a token in that step.
        self.running.sort(key=lambda request: request.priority)
        self._is_ranked = True

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self._traces.lose_blocks([request.request_id])
        if not self._in_schedule:  # vLLM resets its caches
            super()._preempt_request(request, *args, **kwargs)
            return
        if not self._is_ranked:
            raise RuntimeError("vLLM preempts in a step for which Gambit counted enough blocks: "
                               "its block arithmetic has changed")  # fmt: skip
        priority = self._traces.evict(request.request_id, is_last=not self.running)
        if priority is None:
            request.status = RequestStatus.FINISHED_ABORTED
            self._free_request(request)  # vLLM has just taken it out of the running ones; its workers forget it
        else:
            request.priority = priority
            super()._preempt_request(request, *args, **kwargs)


@contextmanager
def _failing_once(manager: Any, request_id: str) -> Iterator[None]:
    """Lets one allocation of a request fail although blocks are free: the self-check then sees which trace goes."""
    real, has_failed = manager.allocate_slots, False

    def allocate(request: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal has_failed
        if request.request_id == request_id and not has_failed:
            has_failed = True
            return None
        return real(request, *args, **kwargs)

    manager.allocate_slots = allocate
    try:
        yield
    finally:
        manager.allocate_slots = real


class GambitScheduler(_GambitScheduling, Scheduler):
    """Schedules synchronously."""


class GambitAsyncScheduler(_GambitScheduling, AsyncScheduler):
    """Schedules asynchronously; vLLM recognises it by its base."""
