"""Runs a verifier with transformers; every token is computed once as long as the cache has room."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch

from gambit.config.options import EngineConfig
from gambit.errors import UserError
from gambit.verifiers.base import ReadingScore, ThoughtReading, VerifierInfo
from gambit.verifiers.families import FAMILIES, Encoder, Head, own_info, verifier_info
from gambit.verifiers.lora import load_adapter, read_base
from gambit.verifiers.lora_folder import is_verifier
from gambit.verifiers.names import VerifierName, family_named, model_folder

CPU_CACHE_BYTES = 2 << 30  # where memory is shared with everything else


@dataclass(slots=True, eq=False)
class Segment:
    """Tokens that follow those of a parent, with their keys and values by layer: [2, 1, heads, tokens, size]."""

    tokens: tuple[int, ...]
    layers: tuple[torch.Tensor, ...]
    parent: Segment | None = None
    children: dict[int, Segment] = field(default_factory=dict)  # by first token
    last_used: int = 0
    score: float | None = None  # of its last token, where a reading ended there

    @property
    def num_bytes(self) -> int:
        return sum(layer.numel() * layer.element_size() for layer in self.layers)

    def lineage(self) -> list[Segment]:
        """Returns the segments from the first token on; the root holds none."""
        path: list[Segment] = []
        segment: Segment | None = self
        while segment is not None and segment.parent is not None:
            path.append(segment)
            segment = segment.parent
        return path[::-1]

    def cut(self, length: int) -> Segment:
        """Splits off and returns the first part, so that a sibling can begin there; this one becomes the rest."""
        assert self.parent is not None and 0 < length < len(self.tokens)
        layers = tuple(layer[..., :length, :].clone() for layer in self.layers)
        first = Segment(self.tokens[:length], layers, self.parent, {self.tokens[length]: self}, self.last_used)
        self.parent.children[self.tokens[0]] = first
        self.tokens, self.parent = self.tokens[length:], first
        self.layers = tuple(layer[..., length:, :].clone() for layer in self.layers)
        return first


class PrefixCache:
    """A radix tree of token sequences. When it is full, the least recently used leaf goes first."""

    def __init__(self, max_bytes: int) -> None:
        self._root = Segment((), ())
        self._max_bytes = max_bytes
        self._clock = 0
        self.used_bytes = 0

    def find(self, tokens: Sequence[int]) -> tuple[Segment, int]:
        """Returns the segment that ends the longest known beginning of `tokens`, and the length of that.

        It is all of them only where the score of the last is known too, so that equal readings get equal scores.
        """
        self._clock += 1
        segment, length = self._root, 0
        while (child := segment.children.get(tokens[length])) is not None:
            is_known = child.score is not None and len(child.tokens) == len(tokens) - length
            rest = tokens[length : None if is_known else -1]
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(child.tokens, rest, strict=False)))
            if common == 0:
                break
            segment = child if common == len(child.tokens) else child.cut(common)
            segment.last_used = self._clock
            length += common
            if length == len(tokens):
                break
        return segment, length

    def add(self, parent: Segment, tokens: Sequence[int], layers: Sequence[torch.Tensor], score: float) -> None:
        """Stores the tokens after a segment that `find` gave last, and the score of the last one."""
        if (known := parent.children.get(tokens[0])) is not None:  # it begins with the last token, the only one here
            if len(known.tokens) == 1:
                known.score = score
            return
        segment = Segment(tuple(tokens), tuple(layers), parent, last_used=self._clock, score=score)
        parent.children[tokens[0]] = segment
        self.used_bytes += segment.num_bytes
        self._evict()

    def _evict(self) -> None:
        while self.used_bytes > self._max_bytes:
            idle = [leaf for leaf in self._leaves() if leaf.tokens and leaf.last_used < self._clock]
            if not idle:
                return
            oldest = min(idle, key=lambda leaf: leaf.last_used)
            assert oldest.parent is not None
            del oldest.parent.children[oldest.tokens[0]]
            self.used_bytes -= oldest.num_bytes

    def _leaves(self) -> Iterator[Segment]:
        left = [self._root]
        while left:
            segment = left.pop()
            left += segment.children.values()
            if not segment.children:
                yield segment


class TransformersVerifier:
    """A verifier in this process. Readings are computed one by one: a score does not depend on what else is read."""

    def __init__(
        self, info: VerifierInfo, backbone: torch.nn.Module, head: Head, encode: Encoder, cache_bytes: int
    ) -> None:
        """Keeps the network that computes hidden states, with `cache_bytes` for its keys and values."""
        self.info = info
        self._backbone: Any = backbone.eval()
        self._device = next(backbone.parameters()).device
        self._head = head.to(self._device)
        self._encode = encode
        self._cache = PrefixCache(cache_bytes)

    def read(self, readings: Sequence[ThoughtReading]) -> Sequence[ReadingScore | None]:
        with torch.inference_mode():
            return [self._scored(self._encode(reading)) for reading in readings]

    def close(self) -> None:
        self._cache = PrefixCache(0)
        del self._backbone

    def _scored(self, tokens: Sequence[int]) -> ReadingScore | None:
        if self.info.context_tokens is not None and len(tokens) > self.info.context_tokens:
            return None
        segment, num_cached = self._cache.find(tokens)
        if num_cached == len(tokens) and segment.score is not None:
            return ReadingScore(segment.score, 0)
        return ReadingScore(self._extend(segment, tokens[num_cached:], num_cached), len(tokens) - num_cached)

    def _extend(self, segment: Segment, tokens: Sequence[int], num_cached: int) -> float:
        """Returns the score of the last token, and keeps keys and values of all."""
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


def start_local_verifier(name: VerifierName, config: EngineConfig, device: str) -> TransformersVerifier:
    """Loads a verifier into this process; `device` is what torch calls it."""
    folder = model_folder(name)
    try:
        if is_verifier(folder):
            family = FAMILIES["gambit"]
            backbone, head = load_adapter(folder, config.model, device)
        else:
            family = family_named(name, folder)
            dtype = torch.float32 if torch.device(device).type == "cpu" else "auto"
            backbone, head = read_base(str(folder), dtype).to(device), family.read_head(folder)
    except torch.cuda.OutOfMemoryError as error:
        raise UserError(f"the verifier {name.model} does not fit on {device}: lower --memory-ratio, or put it "
                        "elsewhere with --verifier-device") from error  # fmt: skip
    context = getattr(backbone.config, "max_position_embeddings", None)
    info = verifier_info(name.model, family, own_info(folder), config, runs_on="local", device=device,
                         context_tokens=context)  # fmt: skip
    return TransformersVerifier(info, backbone, head, family.encoder(folder), _cache_bytes(config, backbone, device))


def _cache_bytes(config: EngineConfig, backbone: torch.nn.Module, device: str) -> int:
    """Returns the bytes that the verifier's part of the memory leaves for keys and values."""
    if torch.device(device).type != "cuda":
        return config.verifier_part.num_bytes or CPU_CACHE_BYTES
    total = torch.cuda.get_device_properties(device).total_memory
    weights = sum(each.numel() * each.element_size() for each in backbone.parameters())
    left = config.verifier_part.bytes_of(total) - weights
    if left <= 0:
        raise UserError(f"--verifier-memory {config.verifier_memory} is {(left + weights) >> 20:,} MiB on {device}; "
                        f"the verifier's weights alone take {weights >> 20:,}: raise it")  # fmt: skip
    return left
