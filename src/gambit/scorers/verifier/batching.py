"""Sequences of like length together, so that little of a batch is padding."""

from collections.abc import Iterator, Sequence


def by_length(lengths: Sequence[int], most_tokens: int) -> Iterator[list[int]]:
    """Indices in batches whose padded size stays within the budget; a sequence that is longer goes alone."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[index] > most_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def snug(lengths: Sequence[int], fewest_tokens: int, most_padding: float) -> Iterator[list[int]]:
    """Indices in batches with at most a share of padding, but for those that would have too few tokens to be fast."""
    batch: list[int] = []
    real = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        padded = (len(batch) + 1) * lengths[index]
        if real >= fewest_tokens and padded - real - lengths[index] > most_padding * padded:
            yield batch
            batch, real = [], 0
        batch.append(index)
        real += lengths[index]
    if batch:
        yield batch
