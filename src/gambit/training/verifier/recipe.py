"""The settings of a verifier's training."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gambit.training.dataset import OUTCOMES, Division
from gambit.training.train import AUTO
from gambit.verifiers.lora_folder import ALL_LINEAR

# Tokens of one step of the optimiser and, at most, of one pass, which keeps about 3 MB a token of a 1.5B model to go
# back; on CUDA it is measured how many of them the memory holds.
UPDATE_TOKENS = {"cuda": 24_576, "mps": 8_192, "cpu": 1_024}
PASS_TOKENS = {"cuda": 32_768, "mps": 4_096, "cpu": 1_024}


@dataclass(frozen=True, slots=True)
class VerifierRecipe:
    """How one verifier is trained."""

    rank: int = 16
    alpha: float = 32.0
    targets: str = ALL_LINEAR
    rate: float = 2e-4  # of the adapter, at its highest
    head_rate: float = 5e-3
    warmup: float = 0.05  # share of the training over which the rate rises; then it falls to 0 in a line
    weight_decay: float = 0.0
    most_gradient: float = 1.0  # its norm is cut to this
    chance_weight: float = 0.5  # of the cross-entropy, beside the ranking loss
    traces_per_problem: int = 8  # in an epoch; half of them right where there are enough
    uniform_traces: int = 2  # of a problem with right or wrong traces only
    num_problems: int | None = None  # of those to train on, drawn at random: for a learning curve
    epochs: int = 4  # at most
    seconds: float | None = None  # at most; the rate is 0 when they are over
    update_tokens: int | None = None  # None: what suits the device
    pass_tokens: int | None = None
    recomputes: bool | None = None  # activations on the way back: less memory, a third more time; None: if need be
    seed: int = 0


@dataclass(frozen=True, slots=True)
class VerifierPlan:
    """What to train on what."""

    data: Path
    model: str
    recipe: VerifierRecipe = field(default_factory=VerifierRecipe)
    division: Division = field(default_factory=Division)
    labels: str = OUTCOMES
    device: str = AUTO
    skip_corrupted: bool = False
    start: Path | None = None  # the folder of a verifier to go on from
