"""Reads the hidden states of finished traces with one teacher-forced forward pass.

Engines return scores to a search, not states, and each keeps its states elsewhere. One more pass over the finished text
has the same result whatever engine sampled it, any layer, and both state positions at once. It reads every trace up
to its last boundary only and needs no output layer, so it costs a fraction of sampling the trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from gambit.engines.local.model import pick_device, pick_dtype, read_with_transformers
from gambit.engines.states import LayerChoice
from gambit.errors import UserError, first_line
from gambit.models.files import hidden_size_on_disk
from gambit.training.storage import state_name
from gambit.types import StatePosition
from gambit.verifiers.lora import by_length

if TYPE_CHECKING:
    from gambit.training.sampling import SampledTrace

LARGEST_HALF = 65504.0  # massive activations of inner layers pass it; as infinities they would poison a fit
BATCH_TOKENS = {"cuda": 65_536, "mps": 16_384, "cpu": 8_192}


class StateReader:
    """Reads hidden states with a second copy of the model, beside the engine's; without layers it loads nothing."""

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
        self._layers, self._positions = tuple(layers), tuple(positions)
        self.batch_tokens = batch_tokens or BATCH_TOKENS[self._device.type]
        if self._layers:
            self._model = _load(model, dtype, self._device)
            config = self._model.config.get_text_config()
            self.hidden_size = int(config.hidden_size)
            LayerChoice.of(self._layers, int(config.num_hidden_layers))
        elif size := hidden_size_on_disk(model):
            self.hidden_size = size
        else:
            raise UserError(f"{model} is not on this disk: download it first, or name its folder with --model")

    def read(self, traces: Sequence[SampledTrace]) -> list[dict[str, torch.Tensor]]:
        """Returns each trace's states by tensor name, [thoughts, hidden] in half precision on the CPU."""
        found: list[dict[str, torch.Tensor]] = [{} for _ in traces]
        if self._layers:
            for batch in by_length([trace.num_read for trace in traces], self.batch_tokens):
                for index, states in zip(batch, self._read_batch([traces[i] for i in batch]), strict=True):
                    found[index] = states
        return found

    @torch.inference_mode()
    def _read_batch(self, traces: list[SampledTrace]) -> list[dict[str, torch.Tensor]]:
        num_thoughts = [len(trace.boundaries) for trace in traces]
        rows = torch.tensor([row for row, count in enumerate(num_thoughts) for _ in range(count)], dtype=torch.long)
        places = torch.tensor([len(t.prompt) + place for t in traces for place in t.boundaries], dtype=torch.long)
        rows, places = rows.to(self._device), places.to(self._device)
        found: list[dict[str, torch.Tensor]] = [{} for _ in traces]
        hidden = self._forward(traces) if len(rows) else [torch.zeros(1, 1, self.hidden_size)] * len(self._layers)
        for layer, states in zip(self._layers, hidden, strict=True):
            for position in self._positions:
                shift = 1 if position is StatePosition.BEFORE else 0
                picked = states.to(rows.device)[rows, places - shift].float().clamp(-LARGEST_HALF, LARGEST_HALF)
                for mine, own in zip(found, torch.split(picked.half().cpu(), num_thoughts), strict=True):
                    mine[state_name(layer, position)] = own
        return found

    def _forward(self, traces: list[SampledTrace]) -> list[torch.Tensor]:
        """Returns the states of every token, by layer."""
        # Padding stands on the right, where causal attention keeps it away from everything that is read: no mask.
        padded = torch.zeros(len(traces), max(trace.num_read for trace in traces), dtype=torch.long)
        for row, trace in zip(padded, traces, strict=True):
            tokens = (*trace.prompt, *trace.tokens)[: trace.num_read]
            row[: len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        needs_all = self._layers != (-1,)
        out = self._model(input_ids=padded.to(self._device), use_cache=False, output_hidden_states=needs_all)
        if not needs_all:
            return [out.last_hidden_state]
        return [out.last_hidden_state if layer == -1 else out.hidden_states[layer] for layer in self._layers]


def _load(model: str, dtype: str, device: torch.device) -> Any:
    """Loads the network without its output layer; its last hidden state is what would enter it."""
    try:
        return read_with_transformers(model, pick_dtype(dtype, device)).base_model.to(device).eval()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load model {model!r}: {first_line(error)}") from error
