"""Is the network learning? Its loss on the results of products, the last thing it learns, and its pass@1."""

import copy
import math
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch
from benchmarks.pawn.traces import BOUNDARY, faultless_trace, verify
from benchmarks.pawn.vocabulary import END, ID, PAD, decode, encode, render_prompt
from torch import Tensor
from torch.nn import functional as F

from gambit.pawn.puzzles import MODULUS, Level, Puzzle, Split, generate

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

BLIND_LOSS = math.log(MODULUS)  # of a network that guesses results
LEARNT_LOSS = 0.5
NUM_PUZZLES = 96
MAX_NEW_TOKENS = 256  # of an easy puzzle


@dataclass(frozen=True, slots=True)
class Probe:
    """Easy puzzles of the development split, and a copy of the network that is not compiled for training."""

    twin: "Qwen3ForCausalLM"
    prompts: Tensor
    tokens: Tensor  # prompts with their faultless traces

    @classmethod
    def of(cls, model: "Qwen3ForCausalLM", num_puzzles: int = NUM_PUZZLES) -> "Probe":
        device = next(model.parameters()).device
        puzzles = _puzzles(num_puzzles)
        prompts = [encode(render_prompt(puzzle.text)) for puzzle in puzzles]
        traces = [encode(faultless_trace(puzzle) + END) for puzzle in puzzles]
        whole = [prompt + trace for prompt, trace in zip(prompts, traces, strict=True)]
        # puzzles of one level have prompts and faultless traces of one length: nothing is padded
        return cls(copy.deepcopy(model).eval(), torch.tensor(prompts).to(device), torch.tensor(whole).to(device))

    @torch.no_grad()
    def product_loss(self, model: "Qwen3ForCausalLM") -> float:
        """Returns the loss in nats per result: BLIND_LOSS at first, almost nothing in the end."""
        self.twin.load_state_dict(model.state_dict())
        targets = self.tokens[:, 1:]
        logits = self.twin(input_ids=self.tokens[:, :-1], use_cache=False).logits.float()
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        return losses[is_product_result(self.tokens)[:, 1:]].mean().item()

    @torch.no_grad()
    def pass_at_1(self, model: "Qwen3ForCausalLM") -> float:
        """One trace a puzzle, drawn at temperature 1."""
        self.twin.load_state_dict(model.state_dict())
        drawn = self.twin.generate(
            self.prompts, attention_mask=torch.ones_like(self.prompts), do_sample=True, temperature=1.0, top_k=0,
            top_p=1.0, max_new_tokens=MAX_NEW_TOKENS, pad_token_id=ID[PAD], eos_token_id=ID[END],
        )  # fmt: skip
        texts = [decode(row).partition(END)[0] for row in drawn[:, self.prompts.shape[1] :].tolist()]
        puzzles = _puzzles(len(texts))
        return sum(verify(puzzle, text).is_correct for puzzle, text in zip(puzzles, texts, strict=True)) / len(texts)


def _puzzles(count: int) -> list[Puzzle]:
    return list(islice(generate(Split.DEV, 1, Level.EASY), count))


def is_product_result(tokens: Tensor) -> Tensor:
    """Returns where a thought ends with the result of a product: the last number of `= 17 * 61 = 67`."""
    found = torch.zeros_like(tokens, dtype=torch.bool)
    found[:, 3:-1] = (tokens[:, 2:-2] == ID[" = "]) & (tokens[:, :-4] == ID[" * "]) & (tokens[:, 4:] == ID[BOUNDARY])
    return found
