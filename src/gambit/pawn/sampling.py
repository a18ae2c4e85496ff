"""Samples traces of many puzzles in one batch and reads the states at their thought boundaries; searches nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gambit.pawn.puzzles import Puzzle
from gambit.pawn.traces import BOUNDARY, THINK_END, final_answer
from gambit.pawn.vocabulary import END, ID, PAD, decode, encode, render_prompt

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

MAX_NEW_TOKENS = 448
MAX_THOUGHTS = 48  # states of later thoughts are not kept: no valid trace within MAX_NEW_TOKENS has more than 37
POSITIONS = ("before", "boundary")
_STATE_CHUNK = 512  # rows whose states are read at once
_DROP_EVERY = 16  # decode steps between droppings of finished rows, each of which copies the cache


@dataclass(frozen=True, slots=True)
class Samples:
    """Traces of several puzzles, everything indexed [puzzle, trace]."""

    texts: list[list[str]]
    num_tokens: Tensor
    is_correct: Tensor
    num_steps: Tensor  # thought boundaries
    states: dict[str, Tensor]  # by position: [puzzle, trace, step, D]

    def select(self, puzzles: slice) -> "Samples":
        states = {position: states[puzzles] for position, states in self.states.items()}
        tensors = self.num_tokens[puzzles], self.is_correct[puzzles], self.num_steps[puzzles]
        return Samples(self.texts[puzzles], *tensors, states)


def sample_traces(model: "Qwen3ForCausalLM", puzzles: Sequence[Puzzle], num_traces: int, seed: int) -> Samples:
    """Puzzles with prompts of one length share a batch, so that nothing is padded."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    prompts = [encode(render_prompt(puzzle.text)) for puzzle in puzzles]
    order = sorted(range(len(puzzles)), key=lambda i: len(prompts[i]))
    parts = []
    for _, group in groupby(order, key=lambda i: len(prompts[i])):
        members = list(group)
        batch = torch.tensor([prompts[i] for i in members], device=device)
        tokens = _generate(model, batch.repeat_interleave(num_traces, 0), generator)
        parts.append(_samples(model, [puzzles[i] for i in members], tokens, batch.shape[1]))
    return _in_order(parts, order)


def _in_order(parts: list[Samples], order: list[int]) -> Samples:
    """Join the parts and undo the sorting."""
    texts = [row for part in parts for row in part.texts]
    back = sorted(range(len(order)), key=order.__getitem__)
    joined = {position: torch.cat([part.states[position] for part in parts])[back] for position in POSITIONS}
    num_tokens = torch.cat([part.num_tokens for part in parts])[back]
    is_correct = torch.cat([part.is_correct for part in parts])[back]
    num_steps = torch.cat([part.num_steps for part in parts])[back]
    return Samples([texts[i] for i in back], num_tokens, is_correct, num_steps, joined)


@torch.inference_mode()
def _generate(model: "Qwen3ForCausalLM", prompts: Tensor, generator: torch.Generator) -> Tensor:
    """Prompts and what the model writes after them at temperature 1, padded after the end token."""
    tokens = torch.full((len(prompts), prompts.shape[1] + MAX_NEW_TOKENS), ID[PAD], device=prompts.device)
    tokens[:, : prompts.shape[1]] = prompts
    live = torch.arange(len(prompts), device=prompts.device)
    inputs, cache = prompts, None
    for place in range(prompts.shape[1], tokens.shape[1]):
        output = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        inputs = torch.multinomial(output.logits[:, -1].float().softmax(-1), 1, generator=generator)
        tokens[live, place] = inputs[:, 0]
        if place % _DROP_EVERY == 0:
            keep = (tokens[live] != ID[END]).all(1).nonzero()[:, 0]
            live, inputs = live[keep], inputs[keep]
            cache.batch_select_indices(keep)
        if not len(live):
            break
    return _without_tail(tokens)


def _without_tail(tokens: Tensor) -> Tensor:
    """Rows that ended kept decoding until they were dropped: blank what follows their end token."""
    is_end = tokens == ID[END]
    return tokens.masked_fill(is_end.cumsum(1) - is_end.long() > 0, ID[PAD])


def _samples(model: "Qwen3ForCausalLM", puzzles: list[Puzzle], tokens: Tensor, prompt_length: int) -> Samples:
    shape = len(puzzles), len(tokens) // len(puzzles)
    num_steps, states = _boundary_states(model, tokens, prompt_length)
    written = tokens[:, prompt_length:]
    num_tokens = (written != ID[PAD]).sum(1)
    texts = [decode(ids[:n]).removesuffix(END) for ids, n in zip(written.tolist(), num_tokens.tolist(), strict=True)]
    rows = [texts[i * shape[1] : (i + 1) * shape[1]] for i in range(shape[0])]
    correct = [[final_answer(t) == answer for t in row] for row, answer in zip(rows, _answers(puzzles), strict=True)]
    return Samples(
        texts=rows,
        num_tokens=num_tokens.view(shape),
        is_correct=torch.tensor(correct, device=tokens.device),
        num_steps=num_steps.view(shape),
        states={position: found.view(*shape, MAX_THOUGHTS, -1) for position, found in states.items()},
    )


def _answers(puzzles: list[Puzzle]) -> list[int]:
    return [puzzle.answer for puzzle in puzzles]


@torch.inference_mode()
def _boundary_states(model: "Qwen3ForCausalLM", tokens: Tensor, prompt_length: int) -> tuple[Tensor, dict[str, Tensor]]:
    """States after the final norm: of the boundary token itself, and of the token before, which predicted it."""
    is_thinking = (tokens == ID[THINK_END]).cumsum(1) == 0
    is_boundary = (tokens == ID[BOUNDARY]) & is_thinking
    is_boundary[:, :prompt_length] = False
    is_boundary &= is_boundary.cumsum(1) <= MAX_THOUGHTS
    shape = len(tokens), MAX_THOUGHTS, model.config.hidden_size
    found = {position: torch.zeros(shape, dtype=torch.half, device=tokens.device) for position in POSITIONS}
    for start in range(0, len(tokens), _STATE_CHUNK):
        chunk = slice(start, start + _STATE_CHUNK)
        hidden = model.model(input_ids=tokens[chunk], use_cache=False).last_hidden_state.half()
        rows, places = is_boundary[chunk].nonzero(as_tuple=True)
        steps = is_boundary[chunk].cumsum(1)[rows, places] - 1
        found["before"][rows + start, steps] = hidden[rows, places - 1]
        found["boundary"][rows + start, steps] = hidden[rows, places]
    return is_boundary.sum(1), found
