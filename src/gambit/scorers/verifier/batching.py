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
