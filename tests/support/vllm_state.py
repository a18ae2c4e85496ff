"""All that a vLLM scheduler holds, as plain values: two schedulers that did the same work compare equal.

Every field of every object is read, those that a new vLLM brings among them. What is left out stands in `LEFT_OUT` with
its reason; a value of a kind that nobody has thought of is an error, so that a field cannot be overlooked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any

CONFIG = "set at the start and the same in both schedulers"
HOOK = "Gambit's own, on the instance"
LEFT_OUT = {  # class, field: reason
    ("Request", "sampling_params"): CONFIG,
    ("NewRequestData", "sampling_params"): CONFIG,
    ("Request", "_block_hasher"): CONFIG,
    ("Scheduler", "vllm_config"): CONFIG,
    ("Scheduler", "scheduler_config"): CONFIG,
    ("Scheduler", "cache_config"): CONFIG,
    ("Scheduler", "parallel_config"): CONFIG,
    ("Scheduler", "observability_config"): CONFIG,
    ("Scheduler", "kv_cache_config"): CONFIG,
    ("Scheduler", "structured_output_manager"): "no request here is of structured output",
    ("Scheduler", "kv_event_publisher"): "publishes nothing: events are off",
    ("KVCacheManager", "kv_cache_config"): CONFIG,
    ("KVCacheCoordinator", "kv_cache_config"): CONFIG,
    ("KVCacheCoordinator", "kv_cache_spec"): CONFIG,
    ("SingleTypeKVCacheManager", "kv_cache_spec"): CONFIG,
    ("KVCacheBlock", "pool"): "the pool that the block is read from",
    ("KVCacheManager", "allocate_slots"): HOOK,
    ("Scheduler", "_make_cached_request_data"): HOOK,
    ("Scheduler", "_update_after_schedule"): HOOK,
    ("Scheduler", "_free_request"): "the test's own, on the instance",
}
PLAIN = {int, float, str, bytes, bool, type(None)}


class StateReader:
    """Reads schedulers of one vLLM and their plans; remembers the fields of its classes."""

    def __init__(self) -> None:
        self._fields: dict[tuple[type, tuple[str, ...]], list[str]] = {}
        self._block_fields: Callable[[Any], tuple[Any, ...]] | None = None

    def read(self, scheduler: Any) -> dict[str, Any]:
        """By object, so that a difference can be named; blocks and requests are written out once, by id elsewhere."""
        manager = scheduler.kv_cache_manager
        blocks = manager.block_pool.blocks
        queue = manager.block_pool.free_block_queue
        return {
            "scheduler": self._object(scheduler, skipped=("requests", "kv_cache_manager")),
            "requests": {name: self._object(request) for name, request in scheduler.requests.items()},
            "kv_cache_manager": self._object(manager, skipped=("coordinator", "block_pool")),
            "coordinator": self._object(manager.coordinator, skipped=("block_pool",)),
            "block_pool": self._object(manager.block_pool, skipped=("blocks",)),
            "blocks": [self._block(block) for block in blocks],
            "free_queue": [self._block(queue.fake_free_list_head), self._block(queue.fake_free_list_tail)],
        }

    def read_plan(self, scheduled: Any) -> dict[str, Any]:
        """All that a model runner is told of a step. It finds requests by id: the order of the known ones is free."""
        known = self._object(scheduled.scheduled_cached_reqs)
        ids = known.pop("req_ids")
        columns = {name: known.pop(name) for name in _columns(scheduled.scheduled_cached_reqs)}
        rows = {request: {name: column[at] for name, column in columns.items()} for at, request in enumerate(ids)}
        assert len(rows) == len(ids)
        plan = self._object(scheduled, skipped=("scheduled_cached_reqs",))
        return {**plan, "scheduled_cached_reqs": {**known, "rows": rows}}

    def _object(self, found: Any, skipped: tuple[str, ...] = ()) -> dict[str, Any]:
        values = {name: getattr(found, name) for name in self._names(found) if name not in skipped}
        return {
            name: value if type(value) in PLAIN else self._value(value, (type(found).__name__, name))
            for name, value in values.items()
        }

    def _names(self, found: Any) -> list[str]:
        """Of its fields, in `__dict__` or in slots, those that are compared."""
        known = (type(found), tuple(getattr(found, "__dict__", ())))
        if known not in self._fields:
            classes = [base for base in type(found).__mro__ if base is not object]
            slots = [name for base in classes for name in _slots(base)]
            left_out = {name for owner, name in LEFT_OUT if any(base.__name__ == owner for base in classes)}
            self._fields[known] = [name for name in dict.fromkeys((*known[1], *slots)) if name not in left_out]
        return self._fields[known]

    def _block(self, block: Any) -> tuple[Any, ...]:
        """There are hundreds: their fields are looked up once. Neighbours in the free queue are ids."""
        if self._block_fields is None:
            names = [name for name in self._names(block) if name not in ("prev_free_block", "next_free_block")]
            self._block_fields = attrgetter(*names)
        before, after = block.prev_free_block, block.next_free_block
        return (*self._block_fields(block), before and before.block_id, after and after.block_id)

    def _value(self, value: Any, path: tuple[str, str]) -> Any:
        kind = type(value).__name__
        if type(value) in PLAIN or isinstance(value, Enum | bytes | str):
            return value
        if kind == "Request":
            return f"request {value.request_id}"
        if kind == "KVCacheBlock":
            return f"block {value.block_id}"
        if kind == "BlockPool":
            return "the block pool"
        if isinstance(value, Mapping):
            return [(self._value(key, path), self._value(each, path)) for key, each in value.items()]
        if isinstance(value, set | frozenset):
            return sorted((self._value(each, path) for each in value), key=repr)
        if isinstance(value, list | tuple | deque):
            return list(value) if _is_plain(value) else [self._value(each, path) for each in value]
        if isinstance(value, FunctionType | MethodType) or not type(value).__module__.startswith("vllm.v1"):
            raise AssertionError(f"{'.'.join(path)} is a {type(value)}: compare it, or say in LEFT_OUT why not")
        return self._object(value)


def _columns(known: Any) -> list[str]:
    """Fields of CachedRequestData with a value for every request."""
    names = ("new_block_ids", "num_computed_tokens", "num_output_tokens", "new_token_ids")
    return [name for name in names if len(getattr(known, name)) == len(known.req_ids)]


def _is_plain(values: list[Any] | tuple[Any, ...] | deque[Any]) -> bool:
    """Whether a copy is enough: lists of tokens and hashes are long."""
    return not values or (isinstance(values[0], int | bytes) and isinstance(values[-1], int | bytes))


def _slots(base: type) -> tuple[str, ...]:
    slots = base.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(name for name in slots if not name.startswith("__"))


def differences(before: Any, now: Any, path: str = "") -> list[str]:
    """Where two states differ, by name."""
    if before == now:
        return []
    if isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys():
        return [line for key in before for line in differences(before[key], now[key], f"{path}.{key}".lstrip("."))]
    return [f"{path}: {before!r} by vLLM, {now!r} by the fast path"]
