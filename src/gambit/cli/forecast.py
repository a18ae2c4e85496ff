"""Says of a long search what it will do, when it may be over, and what its first two traces answer."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gambit import events as ev
from gambit.bench.recipe import LONG_TRACE
from gambit.config.effort import Effort
from gambit.config.presets import SearchSettings, num_fitting
from gambit.models import files as models
from gambit.stats import FEWEST_PROBLEMS

LONG_TOKENS = 200_000  # that a search may write: with fewer it is over before a line is read
FORECAST_STEP = 200  # by then an engine has warmed up
FIRST_VOTES = 2
SLOWER = 4  # the first steps are than those of traces of 24,000 tokens: 3.7 in results/forest_speed_qwen3-8b.json
EFFORTS = {
    Effort.MEDIUM: "medium effort: rounds of 4 to 16 traces (--effort high: the full pool)",
    Effort.HIGH: "high effort: the full pool (--effort medium: rounds of 4 to 16 traces)",
}


class Forecast:
    """Reads the events of the first search of a command; prints nothing about a short one."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._started: ev.RunStarted | None = None
        self._is_timed = False
        self._answers: list[str | None] = []

    def on_event(self, problem_id: str, event: ev.Event) -> None:
        """Takes the next event of a problem's search."""
        if isinstance(event, ev.RunStarted) and self._started is None:
            self._started = event
            if (line := plan_line(event)) is not None:
                self._say(line)
        elif isinstance(event, ev.Sample | ev.Finished) and (started := self._started) is not None:
            is_its = problem_id == started.problem_id
            if is_its and most_tokens(started) >= LONG_TOKENS:
                self._follow(started, event)

    def _follow(self, started: ev.RunStarted, event: ev.Sample | ev.Finished) -> None:
        if isinstance(event, ev.Sample):
            if not self._is_timed and event.step >= FORECAST_STEP and event.running + event.waiting:
                self._is_timed = True
                self._say(time_line(started, event))
        elif len(self._answers) < FIRST_VOTES:
            self._answers.append(event.answer)
            if len(self._answers) == FIRST_VOTES:
                found = ", ".join(answer or "no answer" for answer in self._answers)
                self._say(f"the first {FIRST_VOTES} of {started.num_traces} traces have ended: {found}")


@dataclass(slots=True)
class CompareForecast:
    """Says how long `gambit compare` takes for as many problems as advice needs."""

    num_traces: int  # of each method
    trace_tokens: int  # of a usual trace
    at_once: int = 1
    minutes: float = math.inf
    say: Callable[[str], None] = lambda line: None
    said: set[str] = field(default_factory=set)

    @property
    def tokens(self) -> int:
        return FEWEST_PROBLEMS * 2 * self.num_traces * self.trace_tokens

    def __str__(self) -> str:
        traces = f"twice {self.num_traces} traces of about {self.trace_tokens:,} tokens"
        return f"{FEWEST_PROBLEMS} problems with {traces}: {self.tokens / 1e6:,.3g} M tokens"

    def times(self, rate: float) -> list[float]:
        """Returns the seconds from the pace of first steps; of long traces the least and the most."""
        least = self.tokens / max(rate, 1e-9)
        return [least] if self.trace_tokens < LONG_TRACE else [least, SLOWER * least]

    def on_event(self, event: ev.Event) -> None:
        """Takes an event of voting."""
        if isinstance(event, ev.Sample) and event.step >= FORECAST_STEP:
            rate = self.at_once * event.generated / max(event.seconds_total, 1e-9)
            self._say_once("at the pace of the first steps", *self.times(rate))

    def on_pair(self, seconds: float) -> None:
        """Takes the time of a problem that both methods have searched."""
        self._say_once("by the time of the first one", math.ceil(FEWEST_PROBLEMS / self.at_once) * seconds)

    def _say_once(self, source: str, *seconds: float) -> None:
        if source not in self.said:
            self.said.add(source)
            line = f"{FEWEST_PROBLEMS} problems take {' to '.join(map(duration, seconds))} {source}"
            smaller = ", or --capacity 16" if self.num_traces > 16 else ""
            more = f"; --minutes {self.minutes:g} may be too few: give {math.ceil(seconds[-1] / 60):,}{smaller}"
            self.say(line + more * (seconds[-1] > 60 * self.minutes))


def usual_tokens(model: str, settings: SearchSettings) -> int:
    """Returns the tokens of a usual trace by the preset, or twice those of the warm-up, which is half of one."""
    median = models.defaults_of(models.locate(model)).preset.median_length
    return min(int(median or 2 * settings.pool.warmup_tokens), settings.max_new_tokens)


def most_tokens(started: ev.RunStarted) -> int:
    """Returns the most tokens that a search may write."""
    budget = _number(started.settings, "budget_tokens")
    written = started.num_traces * (_number(started.settings, "max_new_tokens") or 0)
    return min(written, budget or written)


def plan_line(started: ev.RunStarted) -> str | None:
    """Returns the number of traces, their limit, and how many fit into the KV cache; None for a short search."""
    if most_tokens(started) < LONG_TOKENS:
        return None
    line = f"{started.num_traces:,} traces of at most {_number(started.settings, 'max_new_tokens'):,} tokens each"
    if (first := _number(started.settings, "first_traces")) is not None:
        line += f", in rounds from {first:,} on"
    engine = started.environment.get("engine")
    engine = engine if isinstance(engine, dict) else {}
    room, state = _number(engine, "kv_capacity_tokens"), _number(engine, "state_tokens") or 0
    length = _number(started.settings, "warmup_tokens")
    if room and length:
        fitting = num_fitting(room - state - len(started.prompt_tokens), length + state)
        line += f"; {fitting:,} fit into the KV cache at {length:,} tokens, the warm-up"
    return f"{line}; Ctrl-C ends the search with its vote so far"


def time_line(started: ev.RunStarted, sample: ev.Sample) -> str:
    """Returns the time that is left if traces run to their limit, at the pace so far, or to the budget."""
    settings, seconds = started.settings, max(sample.seconds_total, 1e-9)
    limit = _number(settings, "max_new_tokens") or sample.step
    rounds = -(-started.num_traces // started.capacity)
    left = (rounds * limit - sample.step) * seconds / sample.step
    if (tokens := _number(settings, "budget_tokens")) is not None:
        left = min(left, (tokens - sample.generated) * seconds / max(1, sample.generated))
    if isinstance(budget := settings.get("budget_seconds"), int | float):
        left = min(left, budget - seconds)
    return (f"about {duration(left)} left after {sample.step:,} steps if traces use all of their {limit:,} tokens, "
            f"less if they end before ({sample.generated / seconds:,.0f} tokens/s)")  # fmt: skip


def duration(seconds: float) -> str:
    """Returns a time in words, as exactly as a forecast can be."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{seconds / 3600:.1f} h"


def _number(values: Mapping[str, ev.Json], name: str) -> int | None:
    found = values.get(name)
    return found if isinstance(found, int) else None
