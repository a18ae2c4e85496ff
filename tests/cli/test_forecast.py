"""What a command says about a long search while it runs: traces and limits, the time left, the first two answers."""

import dataclasses

import pytest

from gambit import events as ev
from gambit.cli.forecast import Forecast, duration, plan_line
from gambit.cli.results import last_thoughts
from gambit.types import EndReason
from support.searching import make_header, make_settings

ROOM = 410_000


def header(**changes):
    settings = make_settings("sc", capacity=64, num_traces=64, max_new_tokens=32_768, warmup_tokens=12_000, **changes)
    engine = {"engine": {"kv_capacity_tokens": ROOM}}
    return dataclasses.replace(make_header(settings), environment=engine, prompt_tokens=(1,) * 100)


def sample(step, generated, seconds):
    return ev.Sample(step, 60, 0, 0, 4, generated, 0, ROOM, seconds, 0.0, 0.0, 0.0, 0.0)


def finished(trace, answer):
    return ev.Finished(500, trace, EndReason.STOP, answer, (1, 2))


def said(*events, problem="p"):
    lines = []
    forecast = Forecast(lines.append)
    for event in events:
        forecast.on_event(problem, event)
    return lines


def test_a_long_search_begins_with_its_traces_their_limit_and_how_many_fit():
    [line] = said(header())
    assert line.startswith("64 traces of at most 32,768 tokens each; 34 fit into the KV cache at 12,000 tokens")


def test_a_short_search_says_nothing():
    short = dataclasses.replace(header(), settings={**header().settings, "max_new_tokens": 448})
    assert plan_line(short) is None
    assert said(short, sample(300, 9000, 3.0), finished(1, "7"), finished(2, "8")) == []


def test_after_200_steps_the_time_left_is_said_once():
    lines = said(header(), sample(100, 6_400, 10.0), sample(200, 12_800, 20.0), sample(300, 19_200, 30.0))
    assert len(lines) == 2
    # 32,568 steps are left at 0.1 s each
    assert lines[1].startswith("about 54 min left after 200 steps if traces use all of their 32,768 tokens")


def test_budgets_shorten_the_time_left():
    tokens, seconds = header(budget_tokens=300_000), header(budget_seconds=90.0)
    assert said(tokens, sample(200, 12_800, 20.0))[1].startswith("about 7 min left")
    assert said(seconds, sample(200, 12_800, 20.0))[1].startswith("about 70 s left")


def test_more_traces_than_places_take_several_rounds():
    started = dataclasses.replace(header(), num_traces=128)
    assert said(started, sample(200, 12_800, 20.0))[1].startswith("about 109 min left")


def test_the_first_two_answers_are_said_once():
    lines = said(header(), finished(3, "42"), finished(4, None), finished(5, "42"))
    assert lines[1:] == ["the first 2 of 64 traces have ended: 42, no answer"]


def test_only_the_first_search_of_a_command_is_followed():
    lines = []
    forecast = Forecast(lines.append)
    for problem in ("p", "other"):
        forecast.on_event(problem, dataclasses.replace(header(), problem_id=problem))
    forecast.on_event("other", finished(0, "1"))
    forecast.on_event("other", finished(1, "1"))
    assert len(lines) == 1


@pytest.mark.parametrize(("seconds", "words"), [(0.2, "1 s"), (89, "89 s"), (100, "2 min"), (9000, "2.5 h")])
def test_durations_are_rounded(seconds, words):
    assert duration(seconds) == words


def test_the_last_thoughts_of_a_trace_are_its_last_lines_without_blank_ones():
    text = "one\n\ntwo\n\nthree\n\nfour\n\n</think>\nso it is \\boxed{5}\n"
    assert last_thoughts(text) == "two\nthree\nfour\nso it is \\boxed{5}"
    long = last_thoughts("x" * 2000)
    assert long.startswith("…") and len(long) == 801
