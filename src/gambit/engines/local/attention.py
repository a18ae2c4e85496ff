"""Keys and values of the pool, and the attention over them.

Every running trace owns one dense row, and the traces of one search share the segment of their prompt. One row per
trace, not paged blocks: gathering keys through block tables costs a CPU more than half of its speed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

ATTENTION_NAME = "gambit_pool"  # as registered with transformers


@dataclass(slots=True)
class LayerStore:
    """One layer's pool: values [row or prompt slot, head, position, dim], keys [row or slot, head, dim, position].

    Keys with positions last: a query's product with all of them then runs along memory, twice as fast on a CPU.
    """

    row_keys: torch.Tensor
    row_values: torch.Tensor
    prompt_keys: torch.Tensor
    prompt_values: torch.Tensor

    def write_row(self, row: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes the first positions of a row; k and v are [head, position, dim]."""
        self.row_keys[row, :, :, : k.shape[1]] = k.transpose(1, 2)
        self.row_values[row, :, : v.shape[1]] = v

    def write_prompt(self, slot: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.prompt_keys[slot, :, :, : k.shape[1]] = k.transpose(1, 2)
        self.prompt_values[slot, :, : v.shape[1]] = v


@dataclass(slots=True)
class RowSnapshot:
    """The keys and values of a row that was taken out of the pool, for children that still wait to share them."""

    layers: list[tuple[torch.Tensor, torch.Tensor]]


class PoolStore:
    """All layers. They appear on first use, since only the model knows how many heads of what width each has."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerStore] = {}
        self._shape = {"row": (0, 0), "prompt": (0, 0)}  # entries and positions that are allocated
        self.version = 0  # changes whenever a layer appears or moves
        self._origin: dict[int, int] = {}  # row -> the row that still holds its keys and values
        self._copied_length = 0

    def layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> LayerStore:
        """Returns a layer, made on first use for keys and values like these ([entry, head, (position,) dim])."""
        if index not in self.layers:
            self.version += 1
            self.layers[index] = LayerStore(
                *(
                    like.new_zeros(_shape(name, like.shape[1], like.shape[-1], *self._shape[kind]))
                    for kind in ("row", "prompt")
                    for name, like in (("keys", keys), ("values", values))
                )
            )
        return self.layers[index]

    @torch.inference_mode()
    def reserve(self, kind: str, entries: int, positions: int) -> None:
        """Makes room for `entries` rows (or prompts) of `positions` tokens. Grows by half, so that growth is rare."""
        have_entries, have_positions = self._shape[kind]
        if entries <= have_entries and positions <= have_positions:
            return
        shape = (_grown(have_entries, entries), _grown(have_positions, positions))
        self._shape[kind] = shape
        self.version += 1
        for layer in self.layers.values():
            for name, axis in _POSITION_AXIS.items():
                old: torch.Tensor = getattr(layer, f"{kind}_{name}")
                new = old.new_zeros(_shape(name, old.shape[1], old.shape[5 - axis], *shape))
                new[: len(old)].narrow(axis, 0, old.shape[axis]).copy_(old)
                setattr(layer, f"{kind}_{name}", new)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Notes that row `target` begins like row `source`. `settle` carries out all copies of a step at once."""
        self._origin[target] = self._origin.get(source, source)
        self._copied_length = max(self._copied_length, length)

    @torch.inference_mode()
    def settle(self) -> None:
        """Carries out the noted copies. Must come before anything is read from or written to rows."""
        moves = {target: source for target, source in self._origin.items() if target != source}
        length, self._copied_length = self._copied_length, 0
        self._origin.clear()
        if not moves or not self.layers:
            return
        device = next(iter(self.layers.values())).row_keys.device
        targets, sources = torch.tensor([list(moves), list(moves.values())], device=device)
        for layer in self.layers.values():
            for rows in (layer.row_keys[..., :length], layer.row_values[:, :, :length]):
                # All sources are read before a target is written: a target may be another one's source.
                rows[targets] = rows.index_select(0, sources)

    @torch.inference_mode()
    def copy_prompt(self, source: int, target: int) -> None:
        for layer in self.layers.values():
            layer.prompt_keys[target] = layer.prompt_keys[source]
            layer.prompt_values[target] = layer.prompt_values[source]

    @torch.inference_mode()
    def snapshot_row(self, row: int, length: int) -> RowSnapshot:
        row = self._origin.get(row, row)
        return RowSnapshot([
            (layer.row_keys[row, :, :, :length].clone(), layer.row_values[row, :, :length].clone())
            for _, layer in sorted(self.layers.items())
        ])  # fmt: skip

    @torch.inference_mode()
    def restore_row(self, row: int, snapshot: RowSnapshot, length: int) -> None:
        self.settle()  # what this row held may be wanted elsewhere
        for (_, layer), (keys, values) in zip(sorted(self.layers.items()), snapshot.layers, strict=True):
            layer.row_keys[row, :, :, :length] = keys[..., :length]
            layer.row_values[row, :, :length] = values[:, :length]


_POSITION_AXIS = {"keys": 3, "values": 2}


def _shape(name: str, heads: int, dim: int, entries: int, positions: int) -> tuple[int, ...]:
    return (entries, heads, dim, positions) if name == "keys" else (entries, heads, positions, dim)


def _grown(have: int, want: int) -> int:
    return have if want <= have else -(-max(want, have + have // 2) // 16) * 16


@dataclass(slots=True)
class LayerCall:
    """The arguments of a model's attention layer, apart from its tensors."""

    scaling: float
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


@dataclass(slots=True)
class DecodePlan:
    """One new token for each of the first `len(own)` rows."""

    store: PoolStore
    rows: torch.Tensor  # [n] 0, 1, 2, …
    own: torch.Tensor  # [n] own position of the token being fed
    positions: torch.Tensor  # [n] absolute positions
    own_length: int  # longest row, the fed token included
    prompt_lengths: torch.Tensor  # [slots]
    prompt_length: int  # longest prompt segment
    row_slots: torch.Tensor  # [n] prompt slot of each row
    members: torch.Tensor | None  # [slots, most rows] row indices, padded with 0; None: all rows share slot 0
    places: torch.Tensor | None  # [n] where a row stands in the flattened `members`
    level: int | None  # the own position of all rows where they are at the same, as the traces of one search are
    has_even_prompts: bool  # all prompt segments have the same length
    _masks: dict[int | None, torch.Tensor] = field(init=False, default_factory=dict)

    def attend(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: LayerCall) -> torch.Tensor:
        n = len(self.own)
        grouped = q.view(n, k.shape[1], -1, q.shape[3])  # query heads of one KV head side by side
        return self.attend_rows(index, grouped, k[:, :, 0], v[:, :, 0], call).view(n, 1, -1, v.shape[3])

    def attend_rows(
        self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        """Attends from q [n, KV heads, queries of a KV head, dim] with k and v [n, KV heads, dim]; gives q's shape."""
        layer = self.store.layer(index, k, v)
        if self.level is not None:
            layer.row_keys[: len(k), :, :, self.level] = k
            layer.row_values[: len(v), :, self.level] = v
        else:
            layer.row_keys[self.rows, :, :, self.own] = k
            layer.row_values[self.rows, :, self.own] = v
        return self._attend(layer, q, call)

    def _attend(self, layer: LayerStore, q: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """Computes scores over prompt and own part side by side, and one softmax over both."""
        keys = layer.row_keys[: len(q), ..., : self.own_length]
        values = layer.row_values[: len(q), :, : self.own_length]
        q = q * call.scaling  # here and not on the scores, which are many
        own_scores = torch.matmul(q, keys)
        prompt_scores = self._over_prompts(q, layer.prompt_keys[..., : self.prompt_length])
        scores = torch.cat((prompt_scores, own_scores), dim=-1)
        weights = _softmax(scores, self._mask(call.sliding_window), call, keys.shape[1]).to(values.dtype)
        out = torch.matmul(weights[..., self.prompt_length :], values)
        out += self._over_prompts(weights[..., : self.prompt_length], layer.prompt_values[:, :, : self.prompt_length])
        return out

    def _over_prompts(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Multiplies left [n, heads, group, a] with each row's own prompt segment, right [slots, heads, a, b]."""
        n, heads, group, _ = left.shape
        if self.members is None:
            flat = left.transpose(0, 1).reshape(heads, n * group, -1)
            return torch.matmul(flat, right[0]).view(heads, n, group, -1).transpose(0, 1)
        slots, most = self.members.shape
        flat = left[self.members].transpose(1, 2).reshape(slots, heads, most * group, -1)
        out = torch.matmul(flat, right[:slots]).view(slots, heads, most, group, -1).transpose(1, 2)
        return out.flatten(0, 1)[self.places]

    def _mask(self, window: int | None) -> torch.Tensor | None:
        """Returns [n, 1, 1, prompt + own]: 0 where a row may look, -inf where not. None: all may look everywhere."""
        if self.level is not None and self.has_even_prompts and window is None:
            return None
        if window not in self._masks:
            at = torch.arange(self.prompt_length + self.own_length, device=self.own.device)
            is_prompt, own_at = at < self.prompt_length, at - self.prompt_length
            limits = self.prompt_lengths[self.row_slots]
            seen = torch.where(is_prompt, at < limits[:, None], own_at <= self.own[:, None])
            if window is not None:
                absolute = torch.where(is_prompt, at, own_at + limits[:, None])
                seen &= absolute > self.positions[:, None] - window
            mask = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))
            self._masks[window] = mask[:, None, None, :]
        return self._masks[window]


@dataclass(slots=True)
class PromptPlan:
    """The shared prompt segment of one search, computed once and kept in `slot`."""

    store: PoolStore
    slot: int

    def attend(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: LayerCall) -> torch.Tensor:
        layer = self.store.layer(index, k, v)
        layer.write_prompt(self.slot, k[0], v[0])
        return _causal(q, k, v, call)


@dataclass(slots=True)
class RowPlan:
    """Several tokens of one row at once: a prefix that lost its memory is computed again."""

    store: PoolStore
    row: int
    slot: int
    prompt_length: int

    def attend(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: LayerCall) -> torch.Tensor:
        layer = self.store.layer(index, k, v)
        layer.write_row(self.row, k[0], v[0])
        keys = layer.prompt_keys[self.slot, ..., : self.prompt_length].transpose(1, 2)[None]
        values = layer.prompt_values[self.slot, :, : self.prompt_length][None]
        return _causal(q, torch.cat((keys, k), 2), torch.cat((values, v), 2), call)


class AttentionPlan(Protocol):
    """The place of a forward pass's keys and values, and the attention over them."""

    def attend(
        self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: LayerCall
    ) -> torch.Tensor: ...


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
    heads, length, dim = q.shape[1:]
    scaled = q * call.scaling
    grouped = scaled.view(1, k.shape[1], -1, length, dim).flatten(2, 3)  # [1, kv heads, group × queries, dim]
    mask = torch.zeros(seen.shape, device=q.device).masked_fill_(~seen, float("-inf"))
    scores = torch.matmul(grouped, k.transpose(-1, -2))
    weights = _softmax(scores, mask.repeat(heads // k.shape[1], 1), call, k.shape[1], length).to(v.dtype)
    out = torch.matmul(weights, v).view(1, heads, length, -1)
    return out.transpose(1, 2)


def _softmax(
    scores: torch.Tensor, mask: torch.Tensor | None, call: LayerCall, kv_heads: int, queries: int = 1
) -> torch.Tensor:
    """Turns scores [n, kv heads, group × queries, keys] into float32 weights. A sink takes weight and gives nothing."""
    scores = scores.float()
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if mask is not None:
        scores += mask
    if call.sinks is None:
        return torch.softmax(scores, dim=-1)
    sinks = call.sinks.float().view(1, kv_heads, -1, 1, 1).expand(len(scores), -1, -1, queries, 1).flatten(2, 3)
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
    """The attention function that transformers calls in every layer. `pool` comes from the model's forward."""
    call = LayerCall(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    return pool.attend(int(module.layer_idx), query, key, value, call), None  # type: ignore[arg-type]


def group_by_slot(
    row_slots: npt.NDArray[np.int64], num_slots: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the rows of each prompt slot, padded with row 0, and every row's place in that table, flattened."""
    counts = np.bincount(row_slots, minlength=num_slots)
    order = np.argsort(row_slots, kind="stable")
    slots = row_slots[order]
    rank = np.arange(len(order)) - (np.cumsum(counts) - counts)[slots]
    members = np.zeros((num_slots, counts.max()), np.int64)
    members[slots, rank] = order
    places = np.empty_like(order)
    places[order] = slots * counts.max() + rank
    return members, places
