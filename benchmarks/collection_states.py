"""Adds hidden states to a collection that was made without: sampling is twice as fast when nothing is read beside it.

python benchmarks/collection_states.py COLLECTION --model DIR --layers=-1,-9 --out WITH_STATES
"""

from __future__ import annotations

import argparse
from itertools import accumulate, pairwise
from pathlib import Path

import torch

from gambit.training.states import Reading, StateReader
from gambit.training.storage import Shard, new_id, read_header, read_shards, writing


def readings_of(shard: Shard) -> list[Reading]:
    problems = shard.entry.problems
    traces = [trace for problem in problems for trace in problem.traces]
    tokens = torch.split(shard.tensors["tokens"], [trace.num_tokens for trace in traces])
    ends = torch.split(shard.tensors["step_ends"], [trace.num_steps for trace in traces])
    prompts = torch.split(shard.tensors["prompts"], shard.tensors["prompt_lengths"].tolist())
    prompt_of = [prompt for prompt, problem in zip(prompts, problems, strict=True) for _ in problem.traces]
    return [
        Reading(tuple(prompt.tolist()), tuple(own.tolist()), tuple((end - 1).tolist()))
        for prompt, own, end in zip(prompt_of, tokens, ends, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("collection", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--layers", type=lambda text: tuple(map(int, text.split(","))), default=(-1,))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", default="auto", help="of the weights: bfloat16 is twice as fast on many CPUs")
    parser.add_argument("--shards-at-once", type=int, default=8, help="shards whose traces are read together")
    options = parser.parse_args()
    reader = StateReader(options.model, layers=options.layers, dtype=options.dtype)
    header = read_header(options.collection).model_copy(update={"id": new_id(), "layers": options.layers})
    shards = list(read_shards(options.collection, skip_corrupted=False))
    with writing(options.out, header) as writer:
        for start in range(0, len(shards), options.shards_at_once):
            some = shards[start : start + options.shards_at_once]
            readings = [readings_of(shard) for shard in some]
            states = reader.read([reading for each in readings for reading in each])
            bounds = pairwise(accumulate(map(len, readings), initial=0))
            for shard, (first, last) in zip(some, bounds, strict=True):
                found = {name: torch.cat([each[name] for each in states[first:last]]) for name in states[first]}
                writer.add(shard.entry.problems, {**shard.tensors, **found})
            print(f"{start + len(some)} of {len(shards)} shards", flush=True)


if __name__ == "__main__":
    main()
