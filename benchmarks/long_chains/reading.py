"""Reads the hidden states of finished traces with one forward pass of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

LARGEST_HALF = 65504.0
LOGIT_ROWS = 8192


@dataclass
class Reading:
    """A trace to read, and the places among its generated tokens whose states are kept."""

    prompt: list[int]
    tokens: np.ndarray
    places: np.ndarray

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)


class Reader:
    """A model without its sampler; `layers` count as in transformers' hidden_states; -1 is after the last norm."""

    def __init__(self, model: str, layers: Sequence[int], device: torch.device, batch_tokens: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = (
            AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa").to(device).eval()
        )
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.layers, self.device, self._batch_tokens = tuple(layers), device, batch_tokens
        self._wanted: tuple[Tensor, Tensor] | None = None
        self._found: dict[int, Tensor] = {}
        for layer in self.layers:
            module = self.model.model.norm if layer == -1 else self.model.model.layers[layer - 1]
            module.register_forward_hook(self._keeper(layer))
        self._all = self.model.model.layers
        self._needed = len(self._all) if -1 in self.layers else max(self.layers)

    def _keeper(self, layer: int) -> Any:
        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            assert self._wanted is not None
            hidden = output[0] if isinstance(output, tuple) else output
            picked = hidden[self._wanted[0], self._wanted[1]].float()
            self._found[layer] = picked.clamp(-LARGEST_HALF, LARGEST_HALF).half()

        return keep

    @torch.inference_mode()
    def read(self, readings: Sequence[Reading], with_probabilities: bool) -> tuple[dict[int, Tensor], list[np.ndarray]]:
        """Returns for each layer the states of all kept places in order, and each trace's log-probabilities."""
        # Log-probabilities need every layer, states only those up to the last that is kept.
        self.model.model.layers = self._all if with_probabilities else self._all[: self._needed]
        bounds = np.cumsum([0, *(len(each.places) for each in readings)])
        hidden = self.model.config.hidden_size
        states = {
            layer: torch.empty(int(bounds[-1]), hidden, dtype=torch.half, device=self.device) for layer in self.layers
        }
        probabilities: list[np.ndarray] = [np.zeros(0, dtype=np.float32)] * len(readings)
        for batch in self._batches(readings):
            own = [readings[i] for i in batch]
            last = self._forward(own)
            rows = torch.from_numpy(np.concatenate([np.arange(bounds[i], bounds[i + 1]) for i in batch])).to(
                self.device
            )
            for layer in self.layers:
                states[layer][rows] = self._found[layer]
            if with_probabilities:
                for i, found in zip(batch, self._probabilities(own, last), strict=True):
                    probabilities[i] = found
        return states, probabilities

    def _batches(self, readings: Sequence[Reading]) -> list[list[int]]:
        order = sorted(range(len(readings)), key=lambda i: -readings[i].length)
        batches: list[list[int]] = []
        for i in order:
            if batches and readings[batches[-1][0]].length * (len(batches[-1]) + 1) <= self._batch_tokens:
                batches[-1].append(i)
            else:
                batches.append([i])
        return batches

    def _forward(self, readings: Sequence[Reading]) -> Tensor:
        longest = max(each.length for each in readings)
        ids = torch.zeros(
            len(readings), longest, dtype=torch.long
        )  # padded on the right: causal attention needs no mask
        for row, each in zip(ids, readings, strict=True):
            row[: each.length] = torch.tensor([*each.prompt, *each.tokens.tolist()])
        rows = np.concatenate([np.full(len(each.places), row) for row, each in enumerate(readings)])
        places = np.concatenate([len(each.prompt) + each.places for each in readings])
        self._wanted = torch.from_numpy(rows).to(self.device), torch.from_numpy(places.astype(np.int64)).to(self.device)
        self._ids = ids.to(self.device)
        last: Tensor = self.model.model(input_ids=self._ids, use_cache=False).last_hidden_state
        return last

    def _probabilities(self, readings: Sequence[Reading], last: Tensor) -> list[np.ndarray]:
        found = []
        for row, each in enumerate(readings):
            start, end = len(each.prompt), each.length
            parts = []
            for first in range(start, end, LOGIT_ROWS):
                until = min(end, first + LOGIT_ROWS)
                logits = self.model.lm_head(last[row, first - 1 : until - 1]).float()
                own = logits.gather(1, self._ids[row, first:until, None])[:, 0]
                parts.append((own - logits.logsumexp(-1)).cpu().numpy())
            found.append(np.concatenate(parts))
        return found

    def close(self) -> None:
        del self.model
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
