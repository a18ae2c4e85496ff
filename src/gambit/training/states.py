"""Reads the hidden states of finished traces with one teacher-forced forward pass.

Engines hand scores to a search, not states, and each keeps its states elsewhere. One more pass over the finished text
gives the same numbers whatever engine sampled it, any layer, and both state positions at once. It reads every trace up
to its last boundary only and needs no output layer, so it costs a fraction of sampling the trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gambit.engines.local.model import pick_device, pick_dtype, read_with_transformers
from gambit.engines.states import LayerChoice
from gambit.errors import UserError
from gambit.models.files import hidden_size_on_disk
from gambit.training.storage import state_name
from gambit.types import StatePosition
from gambit.verifiers.lora import by_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGEST_HALF = 65504.0  # massive activations of inner layers pass it; as infinities they would poison a fit
BATCH_TOKENS = {"cuda": 65_536, "mps": 16_384, "cpu": 8_192}


@dataclass(frozen=True, slots=True)
class Reading:
    """One trace to read: prompt, generated tokens, and where its thoughts end."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    boundaries: tuple[int, ...]  # places of the boundary tokens among `tokens`

    @property
    def length(self) -> int:
        """Tokens to feed: everything up to the last boundary."""
        return len(self.prompt) + self.boundaries[-1] + 1 if self.boundaries else 0

    @property
    def input_ids(self) -> tuple[int, ...]:
        return (*self.prompt, *self.tokens)[: self.length]


class StateReader:
    """Loads a second copy of the model, beside the engine's, and reads hidden states with it."""

    def __init__(
        self,
        model: str,
        *,
        layers: Sequence[int] = (-1,),
        positions: Sequence[StatePosition] = tuple(StatePosition),
        device: str = "auto",
        dtype: str = "auto",
        batch_tokens: int | None = None,
    ) -> None:
        self._device = pick_device(device)
        self._model = _load(model, dtype, self._device)
        self._layers, self._positions = tuple(layers), tuple(positions)
        self.hidden_size = int(self._model.config.get_text_config().hidden_size)
        self.batch_tokens = batch_tokens or BATCH_TOKENS[self._device.type]
        LayerChoice.of(self._layers, int(self._model.config.get_text_config().num_hidden_layers))

    def read(self, readings: Sequence[Reading]) -> list[dict[str, torch.Tensor]]:
        """For each reading its states by tensor name, [thoughts, hidden] in half precision on the CPU."""
        found: list[dict[str, torch.Tensor]] = [{} for _ in readings]
        for batch in by_length([reading.length for reading in readings], self.batch_tokens):
            for index, states in zip(batch, self._read_batch([readings[i] for i in batch]), strict=True):
                found[index] = states
        return found

    @torch.inference_mode()
    def _read_batch(self, readings: list[Reading]) -> list[dict[str, torch.Tensor]]:
        num_thoughts = [len(reading.boundaries) for reading in readings]
        rows = torch.tensor([row for row, count in enumerate(num_thoughts) for _ in range(count)], dtype=torch.long)
        places = torch.tensor([len(r.prompt) + place for r in readings for place in r.boundaries], dtype=torch.long)
        rows, places = rows.to(self._device), places.to(self._device)
        found: list[dict[str, torch.Tensor]] = [{} for _ in readings]
        hidden = self._forward(readings) if len(rows) else [torch.zeros(1, 1, self.hidden_size)] * len(self._layers)
        for layer, states in zip(self._layers, hidden, strict=True):
            for position in self._positions:
                shift = 1 if position is StatePosition.BEFORE else 0
                picked = states.to(rows.device)[rows, places - shift].float().clamp(-LARGEST_HALF, LARGEST_HALF)
                for mine, part in zip(found, torch.split(picked.half().cpu(), num_thoughts), strict=True):
                    mine[state_name(layer, position)] = part
        return found

    def _forward(self, readings: list[Reading]) -> list[torch.Tensor]:
        longest = max(reading.length for reading in readings)
        # Padding stands on the right, where causal attention keeps it away from everything that is read: no mask.
        padded = torch.zeros(len(readings), longest, dtype=torch.long)
        for row, reading in zip(padded, readings, strict=True):
            row[: reading.length] = torch.tensor(reading.input_ids, dtype=torch.long)
        needs_all = self._layers != (-1,)
        out = self._model(input_ids=padded.to(self._device), use_cache=False, output_hidden_states=needs_all)
        if not needs_all:
            return [out.last_hidden_state]
        return [out.last_hidden_state if layer == -1 else out.hidden_states[layer] for layer in self._layers]


class NoStates:
    """For collections without states, which verifiers are trained on: nothing is loaded or read."""

    def __init__(self, model: str, *, device: str = "auto", batch_tokens: int | None = None) -> None:
        size = hidden_size_on_disk(model)
        if size is None:
            raise UserError(f"{model} is not on this disk: download it first, or name its folder with --model")
        self.hidden_size = size
        self.batch_tokens = batch_tokens or BATCH_TOKENS[pick_device(device).type]

    def read(self, readings: Sequence[Reading]) -> list[dict[str, torch.Tensor]]:
        return [{} for _ in readings]


def _load(model: str, dtype: str, device: torch.device) -> PreTrainedModel:
    """The network without its output layer; its last hidden state is what would enter it."""
    try:
        whole = read_with_transformers(model, pick_dtype(dtype, device))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load model {model!r}: {str(error).strip().partition(chr(10))[0]}") from error
    base: PreTrainedModel = whole.base_model.to(device).eval()
    return base
