"""The margin: how clearly a parent must lead the trace that gives way to its child."""

from __future__ import annotations

from dataclasses import dataclass

from gambit.stats import log_odds


@dataclass(frozen=True, slots=True)
class Margin:
    """The least lead of a parent. The paper's is 0: any lead will do.

    A branch is no independent voter. Where scores say little, most leads are noise: swaps by them cost the pool its
    variety and bring nothing for it.
    """

    least: float = 0.0
    in_log_odds: bool = False  # a lead from 0.01 to 0.07 is then as clear as one from 0.5 to 0.88

    def is_led(self, parent: float, victim: float) -> bool:
        """Returns whether a parent with one score leads a trace with another clearly enough."""
        if self.least == 0 or parent <= victim:
            return parent > victim
        lead = log_odds(parent) - log_odds(victim) if self.in_log_odds else parent - victim
        return lead >= self.least
