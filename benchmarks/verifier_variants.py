"""Ways to train a verifier that `gambit scorer train` does not have, and what verifiers say of collections.

    python benchmarks/verifier_variants.py --data C --model DIR --out OUT --train full --seconds 80
    python benchmarks/verifier_variants.py --data C --model DIR --out OUT --read name=FOLDER …

C holds the collections train, test, held and other (`judge_data.py`). The loss, the order of problems and the looks at
held-out ones are those of `gambit scorer train --architecture verifier`. Writes OUT/PART-NAME.npz, the logits at the
end of each thought and of each trace, OUT/NAME.json, the AUC by quarter, and OUT/PART-traces.json, what is known of
the traces (votes and stacks can be worked out from these without the model).

- full: all weights are trained instead of an adapter, with a hundredth of its rate.
- implicit: no head. A trace's logit is how much likelier an adapted model finds it than the model that wrote it, times
  0.1 (Yuan et al. 2024, Free Process Rewards without Process Labels), so that every token brings its own share.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gambit.core.types import Aggregation
from gambit.engines.local.model import pick_device
from gambit.models import files as models
from gambit.scorers.verifier.model import Passage, Verifier, dtype_for, info_for, read_base
from gambit.training.dataset import Division
from gambit.training.fit import parts_of
from gambit.training.train import AUTO
from gambit.training.verifier import train as training
from gambit.training.verifier.passages import Passages, load_passages
from gambit.training.verifier.passes import PackedRow
from gambit.training.verifier.reading import quarter_aucs, read_traces
from gambit.training.verifier.recipe import VerifierRecipe

PARTS = ("held", "test", "other")
BETA = 0.1  # of the implicit reward
CHUNK = 2_048  # tokens whose chances over the whole vocabulary are held at once
DIVISION = Division(validation=0.05, test=0.1)  # as in lent_gpu/judges.sh


class ImplicitVerifier(Verifier):
    """Logits are sums of log-ratios of an adapted and the plain model over a trace's own tokens."""

    def packed_logits(self, row: PackedRow) -> Tensor:
        def states() -> Tensor:
            found: Tensor = self.network(
                input_ids=row.tokens[None], position_ids=row.positions[None], use_cache=False, packing=row.packing
            ).last_hidden_state[0]
            return found

        with torch.no_grad(), self.network.disable_adapter():  # type: ignore[operator]
            plain = self._log_chances(states(), row.tokens)
        ratios = self._log_chances(states(), row.tokens) - plain
        starts = row.packing.starts.long()
        sequence = torch.searchsorted(starts[1:], torch.arange(len(row.tokens), device=starts.device), right=True)
        # A prompt's own tokens say nothing of a trace: sums are differences to that at the prompt's end.
        sums = ratios.cumsum(0)
        before = row.places.new_tensor(self._prompt_ends(row, starts))
        return BETA * (sums[row.places] - sums[before[sequence[row.places]]])

    def picked_logits(self, passages: list[Passage]) -> Tensor:  # type: ignore[override]
        row = PackedRow.of(passages, self.uses_flash).moved(lambda tensor: tensor.to(self.device))
        return self.packed_logits(row)

    def _log_chances(self, states: Tensor, tokens: Tensor) -> Tensor:
        """[token]: of each after those before it; 0 for the first of the row."""
        weights = self.network.get_base_model().embed_tokens.weight  # type: ignore[operator]

        def of(part: Tensor, following: Tensor) -> Tensor:
            logits = (part @ weights.T).float()
            return logits.gather(1, following[:, None])[:, 0] - logits.logsumexp(1)

        chunks = zip(states[:-1].split(CHUNK), tokens[1:].split(CHUNK), strict=True)
        found = [checkpoint(of, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.cat([states.new_zeros(1, dtype=torch.float32), *found])

    def _prompt_ends(self, row: PackedRow, starts: Tensor) -> list[int]:
        tokens, bounds = row.tokens.cpu().numpy(), starts.tolist()
        return [
            start + self._prompt_length(tokens[start:stop]) - 1
            for start, stop in pairwise(bounds)
        ]  # fmt: skip

    def _prompt_length(self, tokens: np.ndarray) -> int:
        for length in self.lengths_of_prompts:
            if length < len(tokens) and tokens[:length].tobytes() in self.prompts:
                return length
        raise ValueError("a passage begins with no prompt of the collection")

    def know(self, passages: Passages, uses_flash: bool) -> None:
        self.uses_flash = uses_flash
        known = getattr(self, "prompts", set())
        self.prompts = known | {prompt.tobytes() for prompt in passages.prompts}
        self.lengths_of_prompts = sorted({len(each) // 8 for each in self.prompts}, reverse=True)


def beginning(name: str, model: str, device: torch.device, passages: Passages, recipe: VerifierRecipe) -> Verifier:
    info = info_for(model, rank=recipe.rank, alpha=recipe.alpha, targets=recipe.targets,
                    boundary_rule=passages.data.header.boundary_rule)  # fmt: skip
    if name == "implicit":
        fresh = Verifier.fresh(models.locate(model), info, device)
        return ImplicitVerifier(fresh.network, fresh.head, info)
    network = read_base(models.locate(model), dtype_for(device)).to(device)
    network.get_base_model = lambda: network
    head = torch.nn.Linear(info.hidden_size, 1, bias=False).to(device)
    torch.nn.init.zeros_(head.weight)
    return Verifier(network, head, info)


def trained(name: str, options: argparse.Namespace, parts: dict[str, Passages]) -> Verifier:
    recipe = VerifierRecipe(epochs=2, seconds=options.seconds)
    if name == "full":
        recipe = dataclasses.replace(recipe, rate=options.full_rate, head_rate=1e-3)
    passages = load_passages(options.data / "train")
    device = pick_device(AUTO)
    torch.manual_seed(recipe.seed)
    train, held_out = parts_of(passages.data, DIVISION)
    verifier = beginning(name, options.model, device, passages, recipe)
    if isinstance(verifier, ImplicitVerifier):
        for each in (passages, *parts.values()):
            verifier.know(each, device.type == "cuda")
        training.use_fused_layers = lambda network: None  # type: ignore[assignment]  # they cannot go without an adapter
        PackedRow.logits = lambda row, which: which.packed_logits(row)  # type: ignore[method-assign]
        recipe = dataclasses.replace(recipe, pass_tokens=8_192)
    run = training._TrainingRun(verifier, passages, train, held_out, recipe, lambda text: print(text, flush=True))
    run.fit()
    look = training.best_look([each.aucs for each in run._looks])
    if look is not None:
        run._weights.put_back(run._looks[look].weights)
    verifier.network.eval()
    print(f"{run.tokens_per_second:,.0f} tokens/s, look {look} of {len(run._looks)}", flush=True)
    return verifier


def write_read(name: str, verifier: Verifier, parts: dict[str, Passages], out: Path) -> None:
    """What it says of each part, and how well that ranks."""
    found = {}
    for part, passages in parts.items():
        chosen = np.arange(len(passages.tokens))
        with torch.inference_mode():
            read = read_traces(verifier, passages, chosen)
        np.savez_compressed(
            out / f"{part}-{name}.npz", steps=read.steps.astype(np.float32), ends=read.ends.astype(np.float32)
        )
        found[part] = {
            str(how): [float(np.nanmean(each)) for each in quarter_aucs(read, passages, chosen, how)]
            for how in (Aggregation.LAST, Aggregation.MEAN)
        }
    (out / f"{name}.json").write_text(json.dumps(found))
    print(name, json.dumps(found), flush=True)


def describe_traces(part: str, passages: Passages, out: Path) -> None:
    known = passages.data.traces
    rows = [
        {"problem": problem.id, "gold": problem.gold,
         "traces": [trace.model_dump(mode="json") for trace in problem.traces]}
        for problem in passages.data.problems
    ]  # fmt: skip
    ends = [known.step_ends[s : s + n].tolist() for s, n in zip(known.starts, known.num_steps, strict=True)]
    (out / f"{part}-traces.json").write_text(json.dumps({"problems": rows, "step_ends": ends}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train", choices=("full", "implicit"))
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--full-rate", type=float, default=1e-5)
    parser.add_argument("--read", nargs="*", default=[], help="name=FOLDER of a verifier")
    options = parser.parse_args()
    parts = {part: load_passages(options.data / part) for part in PARTS}
    for part, passages in parts.items():
        describe_traces(part, passages, options.out)
    if options.train:
        write_read(options.train, trained(options.train, options, parts), parts, options.out)
    for each in options.read:
        name, _, folder = each.partition("=")
        write_read(name, Verifier.load(Path(folder), pick_device(AUTO), options.model), parts, options.out)


if __name__ == "__main__":
    main()
