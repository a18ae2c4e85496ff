"""vLLM's scheduler with Gambit's rules: scores choose the victim of a failed allocation; it decides nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from gambit.core.types import EndReason, PressureAction
from gambit.engines.vllm.compat import adapter
from gambit.engines.vllm.compat import fast_decode as shortcuts
from gambit.engines.vllm.compat.prefix_copy import hand_over
from gambit.engines.vllm.inside.histories import RequestHistories
from gambit.engines.vllm.inside.trace_table import TraceBook
from gambit.engines.vllm.messages import GambitConfig, Order, Report, RowValues
from gambit.scorers.base import HistoryScorer

FAILING_CHECK = 3  # self-check: after this many compared steps an allocation is made to fail


class _GambitScheduling:
    """Mixed into vLLM's schedulers.

    With scheduling_policy="priority" vLLM takes max((priority, arrival)) among the running requests when an
    allocation fails. Priorities are set just before a step in which that will happen, so that vLLM finds exactly the
    trace that engines/pressure.py names; `_preempt_request` then does with it what its rule says.
    """

    _knows_fed = True  # a step is scheduled after the tokens of the one before were read

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        adapter.follow_parent()
        config: GambitConfig = self.vllm_config.additional_config
        self._block_tokens = self.cache_config.block_size
        adapter.hold_back_blocks(self)
        self._book = TraceBook(config.scorer, adapter.usable_blocks(self), self._block_tokens)
        self._blocks_only_grow = adapter.blocks_only_grow(self)
        may_cut_short = config.short_cuts and shortcuts.are_possible(self, self._block_tokens)
        self._short_cuts = shortcuts.ShortCuts(self, self._block_tokens) if may_cut_short else None
        scorer = config.scorer
        self._histories = RequestHistories(scorer.max_past) if isinstance(scorer, HistoryScorer) else None
        self._gathering: list[Any] = []  # requests that came before others of their group
        self._report = Report()
        self._freed: list[str] = []
        self._is_ranked = False  # whether this step may have victims
        self._in_schedule = False
        self._only_decodes = False  # the last step: one token for every running request, no prompt is left
        self._num_schedules = 0
        self._num_queued = 0
        self._num_compared = 0
        self._fail_for: str | None = None  # self-check: the next allocation of this request fails once

    # -- requests come and go ----------------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        if self._num_schedules == 0:  # vLLM before 0.32 sets handlers of its own once the scheduler is made
            adapter.ignore_interrupts()
        order = Order.unpack(request.sampling_params.extra_args)
        assert order is not None, "a request that Gambit did not make"
        self._book.add(request.request_id, order, self._num_schedules)
        if self._histories is not None:
            self._histories.begin(request.request_id, order)
        self._gathering.append(request)
        if not order.followers:
            self._let_in()

    def _let_in(self) -> None:
        """What was submitted together begins together: each step that reads a prompt costs more than one that does not.

        From another process requests come one by one, while steps go on.
        """
        group, self._gathering = self._gathering, []
        for request in group:
            super().add_request(request)
            if self._short_cuts is not None:
                self._short_cuts.begin(request)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        # Not forgotten at once: its last token is read after vLLM has freed it.
        self._freed.append(request.request_id)
        if self._short_cuts is not None:
            self._short_cuts.end(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """The front aborts: what still runs ends, and of what it names nothing need be remembered."""
        ended = super().finish_requests(request_ids, *args, **kwargs)
        if self._histories is not None and request_ids is not None:
            self._histories.let_go([request_ids] if isinstance(request_ids, str) else request_ids)
        return ended

    # -- one step ----------------------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        self._num_schedules += 1
        self._forget_freed()
        if self._histories is not None:
            self._histories.forget()
        self._rank_if_tight()
        spent = time.perf_counter() - began
        self._in_schedule = True
        try:
            with self._failing_allocation(), self._setting_aside():
                output = super().schedule(*args, **kwargs)
        finally:
            self._in_schedule = False
            self._is_ranked = False
        began = time.perf_counter()
        if self._short_cuts is not None and (copies := hand_over(self, output, self._parent_of, self._block_tokens)):
            adapter.attach_copies(output, copies)
        self._note_admissions(output)
        counts = output.num_scheduled_tokens
        self._only_decodes = output.total_num_scheduled_tokens == len(counts) == len(self.running)
        if self._histories is not None:
            rows = self._book.may_end_thought(list(output.num_scheduled_tokens), knows_fed=self._knows_fed)
            adapter.attach_thoughts(output, self._histories.orders(rows))
        self._report.seconds_scheduling += spent + time.perf_counter() - began
        return output

    def _setting_aside(self) -> AbstractContextManager[None]:
        """Where nobody can lose its blocks, vLLM need not look at those that just go on."""
        if self._short_cuts is None or self._is_ranked:
            return nullcontext()
        return self._short_cuts.setting_aside()

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        report, self._report = self._report, Report()
        tokens, outputs = self._take_tokens(scheduler_output, model_runner_output)
        began = time.perf_counter()
        self._read(report, tokens, outputs, model_runner_output)
        if self._histories is not None and (orders := adapter.thoughts_of(scheduler_output)) is not None:
            self._histories.settle(orders, {request for request, _, _ in report.scored})
        self._forget_freed()
        report.num_running, report.num_waiting = len(self.running), self._num_unfinished() - len(self.running)
        report.kv_used_blocks = adapter.used_blocks(self)
        report.seconds_scheduling += time.perf_counter() - began
        if report.is_empty and not report.num_waiting + report.num_running:
            return {}
        return adapter.outputs_of(report.pack())

    def _take_tokens(self, scheduler_output: Any, model_runner_output: Any) -> tuple[dict[str, int], Any]:
        """The new token of each request, in the order of scheduling, and what vLLM has to say beside."""
        tokens, unusual = {}, scheduler_output
        if self._short_cuts is not None:
            tokens, unusual = self._short_cuts.take(scheduler_output, model_runner_output)
        outputs = super().update_from_output(unusual, model_runner_output)
        tokens |= adapter.new_tokens(outputs)
        for request in unusual.num_scheduled_tokens:
            if tokens.get(request) == shortcuts.NO_TOKEN:
                del tokens[request]
        return tokens, outputs

    def _num_unfinished(self) -> int:
        return int(self.get_num_unfinished_requests())

    def _read(self, report: Report, tokens: dict[str, int], outputs: Any, model_runner_output: Any) -> None:
        values: RowValues | None = adapter.row_values(model_runner_output)
        report.finished += adapter.finished(outputs)
        report.rows, report.tokens = list(tokens), list(tokens.values())
        if values is not None:
            report.seconds_scoring, report.seconds_waiting = values.seconds, values.waited
            if values.greedy is not None:
                self._compare(report, values, model_runner_output.req_id_to_index)
        if report.rows:
            self._book.read(report, values, model_runner_output.req_id_to_index)
            self._stop_doubtful(report, self._book.follow(report, values, model_runner_output.req_id_to_index))
        self._book.close_tracks(report)

    def _stop_doubtful(self, report: Report, requests: list[str]) -> None:
        """Stop rules that hold now. A step that is already under way computes one more token, which nobody reads."""
        ended = {request for request, _ in report.finished}
        stopped = [request for request in requests if request not in ended]
        adapter.stop_requests(self, stopped)
        report.finished += [(request, EndReason.CONFIDENCE.value) for request in stopped]

    def _compare(self, report: Report, values: RowValues, row_of: dict[str, int]) -> None:
        """Self-check: the state of a row makes the token that was sampled for that row."""
        report.checked = len(report.rows)
        for request, token in zip(report.rows, report.tokens, strict=True):
            report.mismatches += int(values.greedy[row_of[request]]) != token
        self._num_compared += 1
        if self._num_compared == FAILING_CHECK:
            self._fail_for = report.rows[0]

    def _forget_freed(self) -> None:
        for request in self._freed:
            self._book.remove(request)
        self._freed.clear()

    # -- admission ---------------------------------------------------------------------------------------------

    def _parent_of(self, request_id: str) -> str | None:
        return self._book.entries[request_id].order.parent

    def _note_admissions(self, output: Any) -> None:
        for request_id in adapter.newly_scheduled(output):
            entry = self._book.entries[request_id]
            if entry.is_running:
                continue
            self._book.admit(entry)
            cached = self.requests[request_id].num_computed_tokens - output.num_scheduled_tokens[request_id]
            waited = max(self._num_schedules - entry.waiting_since - 1, 0)
            self._report.admitted.append((request_id, cached, waited))

    # -- memory pressure ---------------------------------------------------------------------------------------

    def _rank_if_tight(self) -> None:
        """Where the running requests need more blocks than are free, order them by who gives way."""
        missing = self._missing_blocks()
        if self._fail_for is None and missing <= 0:
            return
        running = (request.request_id for request in self.running)
        # The self-check makes an allocation fail although nothing is missing: then one victim must be known.
        if not self._blocks_only_grow:
            self._book.lose_blocks(self._book.entries)
        order = self._book.eviction_order(running, self._blocks_from, max(missing, 1))
        place = {request: len(order) - index for index, request in enumerate(order)}
        for request in self.running:
            request.priority = place[request.request_id]
        # The next victim last: where vLLM evicts the very request it is placing, it leaves the rest of the list
        # without a token in that step.
        self.running.sort(key=lambda request: request.priority)
        self._is_ranked = True

    def _missing_blocks(self) -> int:
        """How many blocks the running requests want in this step beyond those that are free; at most 0: enough."""
        groups = len(self.kv_cache_config.kv_cache_groups)
        free = adapter.free_blocks(self)
        # No step can want more than one block per trace and those that its share of prompt tokens fills.
        prefill = 0 if self._only_decodes else self.max_num_scheduled_tokens // self._block_tokens
        if free > groups * (len(self.running) + prefill):
            return 0
        return groups * sum(map(self._blocks_wanted, self.running)) - free

    def _blocks_wanted(self, request: Any) -> int:
        have = request.num_computed_tokens
        end = request.num_tokens + request.num_output_placeholders
        return -(-end // self._block_tokens) - -(-have // self._block_tokens)

    def _blocks_from(self, request_id: str, start: int) -> list[int]:
        return adapter.blocks_from(self, request_id, start)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self._book.lose_blocks([request.request_id])
        if not self._in_schedule:  # vLLM resets its caches
            super()._preempt_request(request, *args, **kwargs)
            return
        if not self._is_ranked:
            raise RuntimeError("vLLM preempts in a step for which Gambit saw room: its block arithmetic has changed")
        entry = self._book.entries[request.request_id]
        action, score = self._book.action_on(entry), self._book.score_of(entry)
        if action is PressureAction.QUEUE and self.running:
            self._requeue(request, *args, **kwargs)
        else:
            adapter.end_request(self, request)
        if action is PressureAction.QUEUE and not self.running:
            # Alone it still does not fit: queueing it would go round forever.
            self._report.finished.append((request.request_id, EndReason.MEMORY.value))
        else:
            self._report.evicted.append((request.request_id, action.value, score))

    def _requeue(self, request: Any, *args: Any, **kwargs: Any) -> None:
        entry = self._book.entries[request.request_id]
        entry.is_running, entry.waiting_since = False, self._num_schedules
        # Ahead of everything that waits, the last queued first.
        self._num_queued += 1
        request.priority = -self._num_queued
        super()._preempt_request(request, *args, **kwargs)

    @contextmanager
    def _failing_allocation(self) -> Iterator[None]:
        """Self-check: one allocation fails although there is room, to see that the victim is the one Gambit names."""
        if self._fail_for is None:
            yield
            return
        failing, self._fail_for = self._fail_for, None
        with adapter.failing_once(self.kv_cache_manager, failing):
            yield


class GambitScheduler(_GambitScheduling, adapter.Scheduler):
    """For synchronous scheduling."""


class GambitAsyncScheduler(_GambitScheduling, adapter.AsyncScheduler):
    """For asynchronous scheduling; vLLM recognises it by its base."""

    _knows_fed = False
