"""Reads vLLM's model runner between its forward pass and its sampler, and taps the sampler."""

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.outputs import ModelRunnerOutput

from gambit.engines.vllm.messages import RowValues, attach

# -- hidden states --------------------------------------------------------------------------------------------------


def sampled_states(runner: Any) -> torch.Tensor | None:
    """Returns post-norm states of the rows about to be sampled, in the order of ModelRunnerOutput.req_ids.

    None where nothing is to be sampled.
    """
    state = getattr(runner, "execute_model_state", None)
    if state is None or state.hidden_states is None:  # V2 has none on a pipeline stage that is not the last
        return None
    if _is_v1(state) and state.aux_hidden_states is None:
        return state.sample_hidden_states
    return state.hidden_states[_last_tokens(runner, state)]


def _is_v1(state: Any) -> bool:
    return hasattr(state, "sample_hidden_states")


def _last_tokens(runner: Any, state: Any) -> torch.Tensor:
    """Returns where each row's last token stands among those of the step."""
    if _is_v1(state):  # V1 does not keep the indices by which it has picked the states
        return runner.query_start_loc.gpu[1 : len(state.sample_hidden_states) + 1] - 1
    return state.input_batch.logits_indices


def request_layers(runner: Any, layers: tuple[int, ...]) -> None:
    """Has the model return the states of inner layers too. Before vLLM compiles it, which changes what it returns."""
    runner.use_aux_hidden_state_outputs = True
    runner.get_model().set_aux_hidden_state_layers(layers)


def inner_states(runner: Any) -> list[torch.Tensor]:
    """Returns the states of the rows about to be sampled in each requested layer, lowest first."""
    state = runner.execute_model_state
    if state.aux_hidden_states is None:
        return []
    rows = _last_tokens(runner, state)
    return [states[rows] for states in state.aux_hidden_states]


def row_ids(runner: Any) -> list[str]:
    """Returns the requests in row order, between the forward pass and the sampling of a step."""
    state = runner.execute_model_state
    batch = state.input_batch if hasattr(state, "input_batch") else runner.input_batch
    return [request for request in batch.req_ids if request is not None]


# -- logits ---------------------------------------------------------------------------------------------------------


class SamplerTap:
    """Stands before a model runner's sampler and sees the logits first; everything else goes through to it.

    V2 runners of 0.25 have no other place where logits can be seen.
    """

    def __init__(self, sampler: Any, see: Callable[[torch.Tensor], None]) -> None:
        self._sampler = sampler
        self._see = see

    def __call__(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._see(logits)
        return self._sampler(logits, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


# -- KV blocks ------------------------------------------------------------------------------------------------------


def blocks_by_layer(runner: Any) -> list[torch.Tensor]:
    """Returns views of all keys and values whose first dimension counts the scheduler's blocks."""
    num_blocks = runner.kv_cache_config.num_blocks
    return [by_block(cache, num_blocks) for cache in runner.kv_caches]


def by_block(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    # Keys and values are apart outside the blocks or inside them, by attention backend; a block of the scheduler may
    # be several of the backend's.
    outer = next((i for i, size in enumerate(cache.shape[:2]) if size >= num_blocks and size % num_blocks == 0), None)
    if outer is None:
        raise RuntimeError(f"keys and values of shape {tuple(cache.shape)} are not in {num_blocks} blocks")
    if cache.dtype.itemsize == 1:  # not every kind of 8 bits can be indexed
        cache = cache.view(torch.uint8)
    return cache.unflatten(outer, (num_blocks, -1)).movedim(outer, 0)


# -- what a worker adds to its output -------------------------------------------------------------------------------


def attach_rows(output: ModelRunnerOutput, values: RowValues) -> ModelRunnerOutput:
    for array in (values.scores, values.confidences, values.greedy, values.embeddings):
        if array is not None and len(array) != len(output.req_ids):
            raise RuntimeError(f"{len(array)} states for {len(output.req_ids)} requests: is speculative decoding on?")
    attach(output, values)
    return output
