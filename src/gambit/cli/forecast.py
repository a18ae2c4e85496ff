"""Says of a long search what it will do, when it may be over, and what its first two traces answer."""

from collections.abc import Callable, Mapping

from gambit import events as ev
from gambit.config.presets import num_fitting

LONG_TOKENS = 200_000  # that a search may write: with fewer it is over before a line is read
FORECAST_STEP = 200  # by then an engine has warmed up
FIRST_VOTES = 2


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
