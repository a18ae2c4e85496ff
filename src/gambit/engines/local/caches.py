"""The two ways to run a model: on the pool's keys, values and states, or on caches of its own.

On the pool, one pass computes a step of all traces. It serves attention of whole contexts and of windows, and layers
that keep a state of constant size instead of keys (gated DeltaNet, Mamba, short convolutions). The pool is chosen if
a short pass agrees with the model's own cache. All other models run with their own caches, one trace after the other,
and those without a cache compute all tokens again at every step.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gambit.engines.local.attention import (
    ATTENTION_NAME,
    AttentionPlan,
    DecodePlan,
    ForwardOutput,
    KvPool,
    PrefillPlan,
    pool_attention,
)
from gambit.errors import UserError

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

CACHE_NAMES = ("past_key_values", "cache_params", "state")  # of the field in which a model returns its cache
POOLED_LAYERS = (
    "DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)  # fmt: skip
STATES = ("conv_states", "recurrent_states")
PROOF_PROMPT = 3
TOLERANCE, HALF_TOLERANCE = 1e-3, 0.1  # of the largest value; a wrong formula errs more than half precision does


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """The memory that a trace's past takes."""

    token_bytes: int  # of each token; 0 if no layer keeps keys and values
    state_bytes: int = 0  # of each trace, however long it is
    can_cut: bool = True  # a past holds the pasts of all its prefixes; else it can be continued from its end alone

    def state_blocks(self, block_tokens: int) -> int:
        """Returns the KV blocks that weigh as much as a state: one if nothing else is kept."""
        if not self.token_bytes:
            return 1
        return -(-self.state_bytes // (self.token_bytes * block_tokens))


class ModelRunner:
    """Runs a model's modules for all traces at once. Last hidden states are the inputs of the output layer.

    Attention reads the pool's keys and values, and recurrent layers find and leave their states there.
    """

    def __init__(self, model: Any, cache: Any = None, cache_name: str = "") -> None:
        """Keeps the model. `cache` is one that it has filled, `cache_name` the name of the argument."""
        self.model, self.cache_name = model, cache_name
        self._head_input: list[torch.Tensor] = []
        self._hook = model.get_output_embeddings().register_forward_pre_hook(self._keep_states)
        accepted = inspect.signature(model.forward).parameters
        self._accepted = None if any(each.kind is each.VAR_KEYWORD for each in accepted.values()) else set(accepted)
        self._shown: Any = None  # the cache that recurrent layers see
        self._states: dict[tuple[int, str, int], torch.Tensor] = {}  # like those of an entry, by their places in it
        for index, layer in enumerate(getattr(cache, "layers", ())):
            for kind in STATES:
                found = {(index, kind, number): state for number, state in getattr(layer, kind, {}).items()}
                self._states |= {place: state for place, state in found.items() if state is not None}
        if self._states:
            self._show(cache)

    def _show(self, cache: Any) -> None:
        from transformers import DynamicCache

        self._shown = DynamicCache(config=self.model.config)
        self._shown.update = lambda keys, values, *_, **__: (keys, values)  # the attention of the pool keeps them
        for index, kind, number in self._states:
            layer = self._shown.layers[index]
            getattr(layer, f"is_{kind}_initialized")[number] = True
            layer.conv_kernel_size[number] = cache.layers[index].conv_kernel_size[number]

    def _keep_states(self, head: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self._head_input[:] = [args[0]]

    def new_pool(self) -> KvPool:
        return KvPool([*self._states.values()])

    def close(self) -> None:
        self._hook.remove()

    @torch.inference_mode()
    def run(
        self, tokens: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, inner: Sequence[int] = ()
    ) -> ForwardOutput:
        """Runs the model on [n, length] tokens. `inner`: layers whose states are returned too, lowest first."""
        given: dict[str, object] = {"input_ids": tokens, "position_ids": positions, "pool": plan}
        if not self._states:
            return self._call(inner, use_cache=False, **given)[0]
        entries = slice(plan.entry, plan.entry + 1) if isinstance(plan, PrefillPlan) else slice(len(tokens))
        views = [state[entries] for state in plan.pool.states]
        for (index, kind, number), view in zip(self._states, views, strict=True):
            layer = self._shown.layers[index]
            getattr(layer, kind)[number], layer.has_previous_state[number] = view, plan.is_continued
        found, _ = self._call(inner, use_cache=True, **{self.cache_name: self._shown}, **given)
        for (index, kind, number), view in zip(self._states, views, strict=True):
            left = getattr(self._shown.layers[index], kind)[number]
            if left is not view:  # most layers update it in place
                view.copy_(left)
        return found

    def _call(self, inner: Sequence[int], **arguments: object) -> tuple[ForwardOutput, Any]:
        """Calls the model; returns the outputs at the last position, and all that it has returned."""
        arguments |= {"logits_to_keep": 1, "output_hidden_states": bool(inner)}
        accepted = arguments if self._accepted is None else self._accepted
        out = self.model(**{name: value for name, value in arguments.items() if name in accepted})
        if any(out.hidden_states[layer].dim() != 3 for layer in inner):
            raise UserError(f"inner layers of {type(self.model).__name__} have several states of a token: use a scorer "
                            "of the last layer (-1)")  # fmt: skip
        kept = [out.hidden_states[layer][:, -1] for layer in inner]
        return ForwardOutput(self._head_input.pop()[:, -1], out.logits[:, -1], kept), out


class OwnCaches(ModelRunner):
    """Runs each trace with a cache object that the model has made, or with all its tokens if it makes none."""

    has_caches = True  # False: the model makes none, or one that it cannot use

    @torch.inference_mode()
    def run(
        self, tokens: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, inner: Sequence[int] = ()
    ) -> ForwardOutput:
        first = plan.entry if isinstance(plan, PrefillPlan) else 0
        if not plan.is_continued:
            plan.pool.caches.pop(first, None)
        found = [self._advance(plan.pool, first + at, tokens[at, None], positions[at, None], inner)
                 for at in range(len(tokens))]  # fmt: skip
        states, logits, kept = zip(*found, strict=True)
        inner_states = [torch.cat(layer) for layer in zip(*kept, strict=True)]
        return ForwardOutput(torch.cat(states), torch.cat(logits), inner_states)

    def _advance(
        self, pool: KvPool, entry: int, tokens: torch.Tensor, positions: torch.Tensor, inner: Sequence[int]
    ) -> ForwardOutput:
        cache: Any = pool.caches.get(entry)
        if not self.has_caches:  # the tokens so far are kept in its place
            tokens = tokens if cache is None else torch.cat((cache, tokens), dim=1)
            pool.caches[entry] = tokens
            return self._call(inner, input_ids=tokens, use_cache=False)[0]
        given = {} if cache is None else {self.cache_name: cache}
        found, out = self._call(inner, input_ids=tokens, position_ids=positions, use_cache=True, **given)
        if not self.cache_name:  # in the first pass
            self.cache_name = next((name for name in CACHE_NAMES if getattr(out, name, None) is not None), "")
            self.has_caches = self.cache_name != ""
        pool.caches[entry] = getattr(out, self.cache_name) if self.has_caches else tokens
        return found


def choose_runner(model: PreTrainedModel) -> tuple[ModelRunner, CacheSizes]:
    """Returns the pool's way to run a model if it agrees with the model's own cache in a short pass, else that."""
    own = OwnCaches(model)
    try:
        proof = Proof(own, model)
    except Exception:  # whatever the model's code raises when it finds its cache
        own.has_caches = False
        proof = Proof(own, model)
    sizes, cache = CacheSizes(*_cache_sizes(proof, model), can_cut=False), proof.prompts.caches[0]
    layers = {type(layer).__name__ for layer in getattr(cache, "layers", ())}
    if not layers or not layers <= {*POOLED_LAYERS} or not model._can_set_attn_implementation():
        return own, sizes
    before, pooled = model.config._attn_implementation, _pooled(model, cache, own.cache_name)
    try:
        found = Proof(pooled, model)
        if is_alike(found.output, proof.output) and _has_windows(found.prefill, cache):
            own.close()
            return pooled, dataclasses.replace(sizes, can_cut=not sizes.state_bytes)
    except (TypeError, AttributeError):  # the attention is called without the plan, or is another one
        pass
    pooled.close()
    model.set_attn_implementation(before)
    return own, sizes


class Proof:
    """A short pass: a prompt, and a step of two rows that continue it."""

    def __init__(self, runner: ModelRunner, model: Any, last_position: int = PROOF_PROMPT) -> None:
        device, self.rows, self.prompts = model.device, runner.new_pool(), runner.new_pool()
        self.prompts.reserve(1, PROOF_PROMPT)
        self.rows.reserve(2, 1)
        tokens = torch.arange(PROOF_PROMPT + 2, device=device)[None] % model.config.get_text_config().vocab_size
        self.prefill = PrefillPlan(self.prompts, 0)
        runner.run(tokens[:, :PROOF_PROMPT], torch.arange(PROOF_PROMPT, device=device)[None], self.prefill)
        for row in range(2):
            self.rows.restore(row, self.prompts.snapshot(0, 0), 0)
        plan = DecodePlan(self.rows, self.prompts, np.zeros(2, np.int64), [PROOF_PROMPT], device)
        self.step = tokens[:, PROOF_PROMPT:].T, torch.tensor([[PROOF_PROMPT], [last_position]], device=device), plan
        self.output = runner.run(*self.step)


def is_alike(found: ForwardOutput, expected: ForwardOutput) -> bool:
    """Compares the states and logits of two forward passes."""
    is_half = expected.states.dtype is not torch.float32  # some models return logits of half precision as float32
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        most = (HALF_TOLERANCE if is_half else TOLERANCE) * float(theirs.abs().max())
        if ours.shape != theirs.shape or not float((ours - theirs).abs().max()) <= most:
            return False
    return True


def _pooled(model: Any, cache: Cache, cache_name: str) -> ModelRunner:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, pool_attention)
    model.set_attn_implementation(ATTENTION_NAME)
    return ModelRunner(model, cache, cache_name)


def _has_windows(prefill: PrefillPlan, cache: Cache) -> bool:
    """Compares the windows of the calls of attention with the cache's: a short pass cannot tell them apart."""
    windows = {index: getattr(layer, "sliding_window", None) for index, layer in enumerate(cache.layers)}
    return all(call.sliding_window == windows.get(index, call.sliding_window) for index, call in prefill.calls.items())


def _cache_sizes(proof: Proof, model: Any) -> tuple[int, int]:
    """Returns the bytes of a token and of a trace, from the cache before and after a token."""
    before, after = (sum(each.nbytes for each in _tensors(pool.caches[0])) for pool in (proof.prompts, proof.rows))
    if not before:  # all tokens are computed again, and what a pass holds is counted
        config = model.config.get_text_config()
        return int(config.num_hidden_layers * config.hidden_size * model.dtype.itemsize), 0
    return after - before, before - PROOF_PROMPT * (after - before)


def _tensors(held: object) -> Iterator[torch.Tensor]:
    """Yields the tensors of numbers that an object holds."""
    if isinstance(held, torch.Tensor):
        if held.is_floating_point():
            yield held
        return
    inner = held if isinstance(held, (list, tuple)) else getattr(held, "__dict__", held)
    for each in inner.values() if isinstance(inner, Mapping) else inner if isinstance(inner, (list, tuple)) else ():
        yield from _tensors(each)
