"""When an interval supports a claim: one rule for bench reports and for evaluations of scorers."""

FEWEST_PROBLEMS = 20  # bootstrap intervals of fewer are too narrow


def supports_claim(low: float, high: float, num_problems: int, *, no_difference: float = 0.0) -> bool:
    """Whether a 95 % interval shows a difference: over enough problems, with a width, and without `no_difference`.

    An interval of width 0 comes from problems that all say the same, which resampling cannot doubt.
    """
    return num_problems >= FEWEST_PROBLEMS and low < high and not low <= no_difference <= high
