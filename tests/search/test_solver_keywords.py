"""Fields of `SearchConfig` as keywords of a solver's methods."""

import pytest

from gambit.config.options import SearchConfig
from gambit.errors import UserError
from gambit.solver.builder import request_of, with_fields
from gambit.solver.spread import SpreadSolver
from support.serving import EASY


def test_keywords_are_laid_over_the_options():
    assert with_fields(None, {}) == SearchConfig()
    config = SearchConfig(capacity=8, seed=3)
    assert with_fields(config, {}) is config
    assert with_fields(config, {"capacity": 4}) == SearchConfig(capacity=4, seed=3)
    assert with_fields(config, {"policy": "sc"}).model_fields_set == {"capacity", "seed", "policy"}


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"capcity": 4}, "unknown option 'capcity': did you mean 'capacity'"),
        ({"capacity": 0}, "capacity = 0"),
        ({"swap_size": 64}, "larger than the capacity 8"),  # with the capacity of 8 that was given before
    ],
)
def test_they_are_checked_together_with_the_options(fields, complaint):
    with pytest.raises(UserError, match=complaint):
        request_of("x?", SearchConfig(capacity=8), None, None, None, fields)


def test_every_method_takes_them(pawn_solver):
    expected = pawn_solver.solve(EASY, SearchConfig(capacity=4, seed=1))
    spread = SpreadSolver([pawn_solver])
    found = [
        pawn_solver.solve(EASY, capacity=4, seed=1),
        pawn_solver.submit(EASY, SearchConfig(seed=1), capacity=4).result(),
        *pawn_solver.solve_many([EASY], capacity=4, seed=1),
        spread.solve(EASY, capacity=4, seed=1),
        *spread.solve_many([EASY], capacity=4, seed=1),
    ]
    assert [(each.votes, each.seed, each.counts.completed) for each in found] == [(expected.votes, 1, 4)] * len(found)
