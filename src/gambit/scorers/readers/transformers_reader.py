"""Runs a verifier with transformers; every token is computed once as long as the cache has room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gambit.scorers.readers.base import ReaderInfo, ReadingScore, ThoughtReading
from gambit.scorers.readers.formats import PromptFormat
from gambit.scorers.readers.heads import Head
from gambit.scorers.readers.prefix_cache import PrefixCache, Segment

if TYPE_CHECKING:
    import torch


class TransformersReader:
    """A verifier in this process. Readings are computed one by one: a score does not depend on what else is read."""

    def __init__(
        self, info: ReaderInfo, backbone: torch.nn.Module, head: Head, prompt_format: PromptFormat, cache_bytes: int
    ) -> None:
        """`backbone` gives hidden states; `cache_bytes` is for its keys and values."""
        import torch

        self.info = info
        self._backbone: Any = backbone.eval()
        self._device = next(backbone.parameters()).device
        self._head = head.to(self._device)
        self._format = prompt_format
        self._cache = PrefixCache(cache_bytes)
        self._inference = torch.inference_mode

    def read(self, readings: Sequence[ThoughtReading]) -> Sequence[ReadingScore | None]:
        with self._inference():
            return [self._judge(self._format.encode(reading)) for reading in readings]

    def close(self) -> None:
        self._cache = PrefixCache(0)
        del self._backbone

    def _judge(self, tokens: Sequence[int]) -> ReadingScore | None:
        if self.info.context_tokens is not None and len(tokens) > self.info.context_tokens:
            return None
        segment, num_cached = self._cache.find(tokens)
        if num_cached == len(tokens) and segment.score is not None:
            return ReadingScore(segment.score, 0)
        return ReadingScore(self._extend(segment, tokens[num_cached:], num_cached), len(tokens) - num_cached)

    def _extend(self, segment: Segment, tokens: Sequence[int], num_cached: int) -> float:
        """The score of the last token; keys and values of all are kept."""
        import torch
        from transformers import DynamicCache

        past = DynamicCache()
        path = segment.lineage()
        for layer in range(len(path[0].layers) if path else 0):
            keys, values = torch.cat([each.layers[layer] for each in path], dim=-2)
            past.update(keys, values, layer)
        output = self._backbone(
            input_ids=torch.tensor([list(tokens)], device=self._device), past_key_values=past, use_cache=True
        )
        layers = [torch.stack((each.keys, each.values))[..., num_cached:, :].clone() for each in past.layers]
        score = float(self._head.probability(output.last_hidden_state[:, -1].float()))
        self._cache.add(segment, tokens, layers, score)
        return score
