"""Keys and values of the pool, the plan of a forward pass over them, and its attention.

Every running trace owns one dense row, and the traces of one search share the segment of their prompt. One row per
trace, not paged blocks: gathering keys through block tables costs a CPU more than half of its speed.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad, scaled_dot_product_attention

ATTENTION_NAME = "gambit_pool"  # as registered with transformers


class Snapshot(NamedTuple):
    """A copied entry of a pool."""

    layers: dict[int, tuple[torch.Tensor, torch.Tensor]]  # keys and values
    states: Sequence[torch.Tensor]
    cache: object


class KvPool:
    """The keys [entry, head, dim, position] and values [entry, head, position, dim] of rows, or of prompts, by layer.

    Keys have their positions last: a query's product with all of them then runs along memory, twice as fast on a CPU.
    Layers appear on first use, since only the model knows the number and width of their heads. Beside them are the
    states of recurrent layers, or caches of the model's own, which hold for the last position of an entry alone.
    """

    def __init__(self, states: Sequence[torch.Tensor] = ()) -> None:
        """Makes an empty pool; `states` [1, …] are like those that each entry will have."""
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.states = [state.new_zeros(0, *state.shape[1:]) for state in states]
        self.caches: dict[int, object] = {}  # by entry
        self.version = 0  # changes whenever a layer appears or moves
        self._entries = self._positions = 0  # allocated
        self._origin: dict[int, int] = {}  # by entry: the one that still holds its keys and values
        self._copied_length = 0

    def layer(self, index: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a layer, made on first use for keys and values like these ([entry, head, (position,) dim])."""
        if index not in self.keys:
            self.version += 1
            self.keys[index] = k.new_zeros(self._entries, k.shape[1], k.shape[-1], self._positions)
            self.values[index] = v.new_zeros(self._entries, v.shape[1], self._positions, v.shape[-1])
        return self.keys[index], self.values[index]

    def write(self, index: int, entry: int, k: torch.Tensor, v: torch.Tensor, start: int = 0) -> None:
        """Writes positions of an entry from `start` on; k and v are [1, head, position, dim]."""
        keys, values = self.layer(index, k, v)
        keys[entry, ..., start : start + k.shape[2]] = k[0].transpose(1, 2)
        values[entry, :, start : start + v.shape[2]] = v[0]

    @torch.inference_mode()
    def reserve(self, entries: int, positions: int) -> None:
        """Makes room for so many entries of so many tokens. Grows by half, so that growth is rare."""
        if entries <= self._entries and positions <= self._positions:
            return
        more_entries, more_positions = _growth(self._entries, entries), _growth(self._positions, positions)
        self._entries += more_entries
        self._positions += more_positions
        self.version += 1
        for index in self.keys:
            self.keys[index] = pad(self.keys[index], (0, more_positions, 0, 0, 0, 0, 0, more_entries))
            self.values[index] = pad(self.values[index], (0, 0, 0, more_positions, 0, 0, 0, more_entries))
        self.states = [torch.cat((s, s.new_zeros(more_entries, *s.shape[1:]))) for s in self.states]

    def copy(self, source: int, target: int, length: int) -> None:
        """Notes that `target` begins like `source`. `settle` carries out all copies of a step at once."""
        self._origin[target] = self._origin.get(source, source)
        self._copied_length = max(self._copied_length, length)

    @torch.inference_mode()
    def settle(self) -> None:
        """Carries out the noted copies. Must come before entries are read or written."""
        moves = {target: source for target, source in self._origin.items() if target != source}
        length, self._copied_length = self._copied_length, 0
        self._origin.clear()
        self.caches |= {target: copy.deepcopy(self.caches[at]) for target, at in moves.items() if at in self.caches}
        held = [self.keys[index][..., :length] for index in self.keys]
        held += [self.values[index][:, :, :length] for index in self.keys]
        held += self.states
        if moves and held:
            targets, sources = torch.tensor([list(moves), list(moves.values())], device=held[0].device)
            for entries in held:
                # All sources are read before a target is written: a target may be the source of another.
                entries[targets] = entries.index_select(0, sources)

    @torch.inference_mode()
    def snapshot(self, entry: int, length: int) -> Snapshot:
        """Copies an entry, for traces that will begin like it when it is gone, or in another pool."""
        at = self._origin.get(entry, entry)
        layers = {
            index: (keys[at, ..., :length].clone(), self.values[index][at, :, :length].clone())
            for index, keys in self.keys.items()
            if length
        }
        return Snapshot(layers, [state[at].clone() for state in self.states], copy.deepcopy(self.caches.get(at)))

    @torch.inference_mode()
    def restore(self, entry: int, snapshot: Snapshot, length: int) -> None:
        """Begins an entry with a copy. Several entries may begin with the same."""
        self.settle()  # a noted copy may start from this entry
        for index, (keys, values) in snapshot.layers.items():
            self.keys[index][entry, ..., :length] = keys[..., :length]
            self.values[index][entry, :, :length] = values[:, :length]
        for state, copied in zip(self.states, snapshot.states, strict=True):
            state[entry] = copied
        self.caches.pop(entry, None)
        if snapshot.cache is not None:
            self.caches[entry] = copy.deepcopy(snapshot.cache)

    @torch.inference_mode()
    def clear(self, entry: int) -> None:
        """Takes an entry's state and its own cache, which would stay in memory. Keys and values are overwritten."""
        if self.states or self.caches:
            self.settle()  # a noted copy may start from it
            self.caches.pop(entry, None)
            for state in self.states:
                state[entry : entry + 1] = 0


def _growth(have: int, needed: int) -> int:
    return 0 if needed <= have else -(-max(needed, have + have // 2) // 16) * 16 - have


class ForwardOutput(NamedTuple):
    """The outputs at the last position of every sequence in the batch."""

    states: torch.Tensor  # [n, hidden], after the final norm
    logits: torch.Tensor  # [n, vocabulary]
    inner: Sequence[torch.Tensor]  # [n, hidden] of each requested inner layer


@dataclass(slots=True)
class LayerCall:
    """The arguments of a model's attention layer, apart from queries, keys and values."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [heads]


class DecodePlan:
    """One new token for each of the first rows. All but positions holds until a row comes, moves or goes."""

    is_continued = True

    def __init__(
        self,
        rows: KvPool,
        prompts: KvPool,
        row_slots: npt.NDArray[np.int64],
        prompt_lengths: Sequence[int],
        device: torch.device,
    ) -> None:
        self.pool, self.prompts = rows, prompts
        self.row_slots = torch.from_numpy(row_slots).to(device)  # [n] prompt slot of each row
        self.prompt_lengths = torch.tensor(prompt_lengths, device=device)  # [slots]
        self.prompt_length = max(prompt_lengths)
        self._has_even_prompts = min(prompt_lengths) == self.prompt_length
        self._own_prompts = self.prompt_lengths[self.row_slots]  # [n] the prompt length of each row
        self._numbers = torch.arange(len(row_slots), device=device)
        # A table of the rows of each slot, and every row's place in it; None: all rows share slot 0.
        self._groups = _grouped(row_slots, device) if len(prompt_lengths) > 1 else None
        self.move_to(np.zeros_like(row_slots))

    def move_to(self, lengths: npt.NDArray[np.int64]) -> None:
        """Sets the own position of the token that each row feeds."""
        shortest, longest = int(lengths.min()), int(lengths.max())
        self.own = torch.from_numpy(lengths).to(self.row_slots.device)
        self.positions = self.own + self._own_prompts  # absolute
        self.own_length = longest + 1
        # The position of all rows where they are at the same, as the traces of one search are.
        self._level = longest if shortest == longest else None
        self._masks: dict[int | None, torch.Tensor] = {}

    def attend(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: LayerCall) -> torch.Tensor:
        n = len(self.own)
        grouped = q.view(n, k.shape[1], -1, q.shape[3])  # query heads of one KV head side by side
        return self.attend_rows(index, grouped, k[:, :, 0], v[:, :, 0], call).view(n, 1, -1, v.shape[3])

    def attend_rows(
        self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        """Attends from q [n, KV heads, queries of a KV head, dim] with k and v [n, KV heads, dim]; returns q's shape.

        Scores over the prompt and over the row's own tokens are side by side, under one softmax.
        """
        keys, values = self.pool.layer(index, k, v)
        if self._level is not None:
            keys[: len(k), :, :, self._level] = k
            values[: len(v), :, self._level] = v
        else:
            keys[self._numbers, :, :, self.own] = k
            values[self._numbers, :, self.own] = v
        prompt_keys, prompt_values = self.prompts.layer(index, k, v)
        q = q * call.scaling  # here and not on the scores, which are many
        own_scores = torch.matmul(q, keys[: len(q), ..., : self.own_length])
        prompt_scores = self._over_prompts(q, prompt_keys[..., : self.prompt_length])
        scores = torch.cat((prompt_scores, own_scores), dim=-1)
        weights = _softmax(scores, self._mask(call.sliding_window), call).to(v.dtype)
        out = torch.matmul(weights[..., self.prompt_length :], values[: len(q), :, : self.own_length])
        out += self._over_prompts(weights[..., : self.prompt_length], prompt_values[:, :, : self.prompt_length])
        return out

    def _over_prompts(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Multiplies left [n, heads, group, a] with each row's own prompt segment, right [slots, heads, a, b]."""
        n, heads, group, _ = left.shape
        if self._groups is None:
            flat = left.transpose(0, 1).reshape(heads, n * group, -1)
            return torch.matmul(flat, right[0]).view(heads, n, group, -1).transpose(0, 1)
        members, places = self._groups
        slots, most = members.shape
        flat = left[members].transpose(1, 2).reshape(slots, heads, most * group, -1)
        out = torch.matmul(flat, right[:slots]).view(slots, heads, most, group, -1).transpose(1, 2)
        return out.flatten(0, 1)[places]

    def _mask(self, window: int | None) -> torch.Tensor | None:
        """Returns [n, 1, 1, prompt + own]: 0 at the positions that a row sees, else -inf. None: all rows see all."""
        if self._level is not None and self._has_even_prompts and window is None:
            return None
        if window not in self._masks:
            at = torch.arange(self.prompt_length + self.own_length, device=self.own.device)
            is_prompt, own_at = at < self.prompt_length, at - self.prompt_length
            limits = self._own_prompts[:, None]
            seen = torch.where(is_prompt, at < limits, own_at <= self.own[:, None])
            if window is not None:
                absolute = torch.where(is_prompt, at, own_at + limits)
                seen &= absolute > self.positions[:, None] - window
            mask = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))
            self._masks[window] = mask[:, None, None, :]
        return self._masks[window]


def _grouped(row_slots: npt.NDArray[np.int64], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows of each prompt slot, padded with row 0, and every row's place in that table, flattened."""
    counts = np.bincount(row_slots)
    order = np.argsort(row_slots, kind="stable")
    slots = row_slots[order]
    rank = np.arange(len(order)) - (np.cumsum(counts) - counts)[slots]
    members = np.zeros((len(counts), counts.max()), np.int64)
    members[slots, rank] = order
    places = np.empty_like(order)
    places[order] = slots * counts.max() + rank
    return torch.from_numpy(members).to(device), torch.from_numpy(places).to(device)


@dataclass(slots=True)
class PrefillPlan:
    """Several tokens of one entry at once: the prompt of a search, or the prefix of a row, computed again."""

    pool: KvPool
    entry: int
    prompt: tuple[KvPool, int, int] | None = None  # pool, slot and length of the prompt that a row continues
    num_held: int = 0  # positions of the row that are there already
    num_skipped: int = 0  # first tokens whose keys and values are not kept: the prompt's, computed again with a row
    calls: dict[int, LayerCall] = field(default_factory=dict)  # by layer

    @property
    def is_continued(self) -> bool:
        return self.num_held > 0 or self.prompt is not None

    def attend(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: LayerCall) -> torch.Tensor:
        self.calls[index] = call
        self.pool.write(index, self.entry, k[:, :, self.num_skipped :], v[:, :, self.num_skipped :], self.num_held)
        before = [(self.pool, self.entry, self.num_held)] if self.num_held else []
        for pool, entry, length in before if self.prompt is None else [*before, self.prompt]:
            keys, values = pool.layer(index, k, v)
            k = torch.cat((keys[entry, ..., :length].transpose(1, 2)[None], k), 2)
            v = torch.cat((values[entry, :, :length][None], v), 2)
        return _causal(q, k, v, call)


AttentionPlan = DecodePlan | PrefillPlan  # holds the keys and values of a forward pass, and attends


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: LayerCall) -> torch.Tensor:
    """Attends from the last positions of the keys; returns [1, queries, heads, dim]."""
    query_at = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)[:, None]
    key_at = torch.arange(k.shape[2], device=q.device)[None]
    seen = key_at <= query_at
    if call.sliding_window is not None:
        seen &= key_at > query_at - call.sliding_window
    if call.softcap is None and call.sinks is None:
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=call.scaling, enable_gqa=True)
        return out.transpose(1, 2)
    heads, kv_heads, length = q.shape[1], k.shape[1], q.shape[2]
    queries = (q * call.scaling).reshape(1, kv_heads, -1, q.shape[3])  # those of one KV head side by side
    mask = torch.zeros(seen.shape, device=q.device).masked_fill_(~seen, float("-inf"))
    scores = torch.matmul(queries, k.transpose(-1, -2)).view(1, kv_heads, -1, length, k.shape[2])
    weights = _softmax(scores, mask, call).to(v.dtype).flatten(2, 3)
    return torch.matmul(weights, v).view(1, heads, length, -1).transpose(1, 2)


def _softmax(scores: torch.Tensor, mask: torch.Tensor | None, call: LayerCall) -> torch.Tensor:
    """Turns scores [n, KV heads, group, …, keys] into float32 weights. A sink takes weight and adds no value."""
    scores = scores.float()
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if mask is not None:
        scores += mask
    if call.sinks is None:
        return torch.softmax(scores, dim=-1)
    sinks = call.sinks.float().view(1, scores.shape[1], -1, *[1] * (scores.dim() - 3)).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]


def pool_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    pool: AttentionPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attends as transformers requests in every layer. `pool` comes from the model's forward."""
    call = LayerCall(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    return pool.attend(int(module.layer_idx), query, key, value, call), None  # type: ignore[arg-type]
