"""vLLM's schedulers with Gambit's rule of eviction, and one report per step instead of one output per request."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from gambit.engines.vllm.compat import scheduler_access as access
from gambit.engines.vllm.compat.core import ignore_interrupts, join_front
from gambit.engines.vllm.compat.fast_decode import NO_TOKEN, FastDecode, copy_prefixes, is_possible
from gambit.engines.vllm.messages import (
    DecodeAttention,
    GambitConfig,
    StepReport,
    TraceTask,
    WorkerStep,
    attach,
    attached,
    packed,
    unpacked,
)
from gambit.engines.vllm.scheduling import TraceScheduling


class _GambitScheduling:
    """Decides evictions and reports steps, mixed into vLLM's schedulers.

    With scheduling_policy="priority" vLLM takes max((priority, arrival)) among the running requests when an
    allocation fails. Priorities are set just before a step in which that will happen, so that vLLM chooses the trace
    that engines/eviction.py names; `_preempt_request` then does with it what its rule says.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        join_front()
        config: GambitConfig = self.vllm_config.additional_config
        self._block_tokens = self.cache_config.block_size
        access.hold_back_blocks(self)
        self._blocks_only_grow = access.blocks_only_grow(self)
        is_fast = config.fast_path and is_possible(self, self._block_tokens)
        self._fast_decode = FastDecode(self, self._block_tokens) if is_fast else None
        self._traces = TraceScheduling(
            config.scorer, access.usable_blocks(self), self._block_tokens, is_async=isinstance(self, AsyncScheduler)
        )
        self._measures_sharing = config.attention is DecodeAttention.AUTO
        self._gathering: list[Any] = []  # requests that came before others of their group
        self._is_ranked = False  # this step may have victims
        self._in_schedule = False
        self._only_decodes = False  # the last step: one token for every running request, no prompt is left

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
            self._traces.obey(message)
            return
        request.sampling_params.extra_args = packed(message)  # unpacked once, for the workers too
        self._traces.add(request.request_id, message)
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

    # -- one step ----------------------------------------------------------------------------------------------

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
                    stack.enter_context(access.failing_once(self, failing))
                if self._fast_decode is not None and not self._is_ranked:
                    # No trace can be evicted: vLLM need not look at those that just decode.
                    stack.enter_context(self._fast_decode.planning())
                output = super().schedule(*args, **kwargs)
        finally:
            self._in_schedule = False
            self._is_ranked = False
        began = time.perf_counter()
        self._attach_worker_step(output)
        self._traces.add_seconds(spent + time.perf_counter() - began)
        return output

    def _attach_worker_step(self, output: Any) -> None:
        """Attaches to vLLM's plan what the workers need beside it; notes which traces were admitted."""
        copies: list[tuple[int, int]] = []
        if self._fast_decode is not None:
            copies = copy_prefixes(self, output, self._traces.parent_of, self._block_tokens)
        sharing = access.sharing(self, self._block_tokens) if self._measures_sharing else None
        counts = output.num_scheduled_tokens
        for request_id in access.newly_scheduled(output):
            request = self.requests[request_id]
            self._traces.admit(request_id, request.num_computed_tokens - counts[request_id], request.num_tokens)
        self._only_decodes = output.total_num_scheduled_tokens == len(counts) == len(self.running)
        attach(output, WorkerStep(copies, sharing, self._traces.rows_to_score(list(counts))))

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        report = self._traces.begin_report()
        tokens, outputs = self._take_tokens(scheduler_output, model_runner_output)
        began = time.perf_counter()
        report.rows, report.tokens = list(tokens), list(tokens.values())
        ends, report.failure = access.finished(outputs)
        values, step = access.row_values(model_runner_output, report.rows), attached(scheduler_output, WorkerStep)
        stopped = self._traces.read(report, ends, values, None if step is None else step.thoughts)
        # A step that is already under way computes one more token of a stopped request, which is dropped.
        access.stop_requests(self, stopped)
        self._traces.forget_freed()
        report.num_running = len(self.running)
        report.num_waiting = int(self.get_num_unfinished_requests()) - report.num_running
        report.kv_used_blocks = access.used_blocks(self)
        report.seconds_scheduling += time.perf_counter() - began
        if report.is_empty and not report.num_waiting + report.num_running:
            return {}
        return access.outputs_of(packed(report))

    def _take_tokens(self, scheduler_output: Any, model_runner_output: Any) -> tuple[dict[str, int], Any]:
        """Returns the new token of each request, in the order of scheduling, and vLLM's own outputs."""
        tokens, left = {}, scheduler_output
        if self._fast_decode is not None:
            tokens, left = self._fast_decode.book(scheduler_output, model_runner_output)
        outputs = super().update_from_output(left, model_runner_output)
        tokens |= access.new_tokens(outputs)
        for request in left.num_scheduled_tokens:
            if tokens.get(request) == NO_TOKEN:
                del tokens[request]
        return tokens, outputs

    # -- memory pressure ---------------------------------------------------------------------------------------

    def _rank_if_tight(self) -> None:
        """Ranks the running requests for eviction if they need more blocks than are free."""
        missing = access.missing_blocks(self, self._block_tokens, only_decodes=self._only_decodes)
        if self._traces.failing is None and missing <= 0:
            return
        if not self._blocks_only_grow:
            self._traces.lose_blocks()
        running = (request.request_id for request in self.running)
        # The self-check makes an allocation fail although nothing is missing: then one victim must be known.
        order = self._traces.eviction_order(running, partial(access.blocks_from, self), max(missing, 1))
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
            access.end_request(self, request)
        else:
            request.priority = priority
            super()._preempt_request(request, *args, **kwargs)


class GambitScheduler(_GambitScheduling, Scheduler):
    """Schedules synchronously."""


class GambitAsyncScheduler(_GambitScheduling, AsyncScheduler):
    """Schedules asynchronously; vLLM recognises it by its base."""
