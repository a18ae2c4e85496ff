"""The folder of a run: its event log, its result, the search for logs, and checks before anything is written."""

import dataclasses
import json
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gambit import events as ev
from gambit.errors import GambitWarning, StorageError, UserError, reason_of
from gambit.results.result import SearchResult
from gambit.storage.files import write_whole
from gambit.storage.folders import made_folder, refusal

LOG_FILE = "events.jsonl"
EventCallback = Callable[[str, ev.Event], None]  # problem id, event


class EventSink:
    """Writes a run's events to its log file and sends them to the caller.

    A full disk ends the log, not the search. A callback that fails ends the search, and is not called again for the
    events of that end.
    """

    def __init__(
        self, problem_id: str, out_dir: Path | None, on_event: EventCallback | None, *, must_log: bool = True
    ) -> None:
        self._failure: str | None = None
        self._problem_id = problem_id
        self._out_dir = out_dir
        self._on_event = on_event
        self._log: ev.LogWriter | None = None
        if out_dir is None:
            return
        try:
            self._log = ev.LogWriter(out_dir / LOG_FILE)
        except OSError as error:
            check_free(out_dir)
            if must_log:
                raise refusal(out_dir, error) from error
            self._give_up(error)

    def write(self, event: ev.Event) -> None:
        if self._log is not None:
            try:
                self._log.write(event)
            except OSError as error:
                self._give_up(error)
        if self._on_event is not None:
            try:
                self._on_event(self._problem_id, event)
            except BaseException:
                self._on_event = None
                raise

    def finish(self, result: SearchResult) -> SearchResult:
        """Closes the log and writes the result beside it; returns the result with its folder and what failed there."""
        result = dataclasses.replace(result, out_dir=None if self._out_dir is None else str(self._out_dir))
        if self._out_dir is not None and self._log is not None:
            try:
                self.close()
                write_result(self._out_dir, result)
            except (OSError, StorageError) as error:
                self._give_up(error)
        return result if self._failure is None else with_log_error(result, self._failure)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def discard(self) -> None:
        """Closes the log and removes it, for a search that begins anew."""
        self.close()
        if self._log is not None:
            self._log.path.unlink(missing_ok=True)
        self._log = None

    def _give_up(self, error: OSError | StorageError) -> None:
        self._failure = warn_incomplete(self._out_dir, error)
        if self._log is not None:
            with suppress(OSError):  # what it still holds does not fit either
                self._log.close()
        self._log = None


def warn_incomplete(out_dir: Path | None, error: OSError | StorageError) -> str:
    """Warns that a log is incomplete; returns the warning's text for the result."""
    failure = f"the log in {out_dir} is incomplete: {reason_of(error)}"
    warnings.warn(failure, GambitWarning, stacklevel=3)
    return failure


def with_log_error(result: SearchResult, failure: str) -> SearchResult:
    return dataclasses.replace(result, warnings=(*result.warnings, failure), log_error=failure)


def write_result(out_dir: Path, result: SearchResult) -> None:
    text = json.dumps(result.to_json(), indent=2) + "\n"
    write_whole(out_dir / "result.json", text.encode())


def check_free(out_dir: Path) -> None:
    """Raises UserError if a folder holds a run already."""
    path = out_dir / LOG_FILE
    if path.exists() or path.is_symlink():  # a link that leads nowhere, too
        raise UserError(f"{path} exists already: an event log is never overwritten, choose another --out")


def check_writable(folder: Path) -> None:
    """Raises UserError if a folder, existing or not, cannot be written to, before hours of work depend on it."""
    with made_folder(folder):
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise refusal(folder, error) from error


def check_new_file(path: Path) -> None:
    """Raises UserError if a file exists or cannot be written."""
    if path.exists():
        raise UserError(f"{path} exists already: choose another name, or remove it")
    check_writable(path.parent)


def check_replaceable(path: Path, suffix: str) -> None:
    """Raises UserError if a file cannot be written at a path, or would replace one of another kind."""
    if path.is_dir():
        raise UserError(f"{path} is a folder: give the name of a {suffix} file")
    if path.exists() and path.suffix.lower() != suffix:
        raise UserError(f"{path} exists and is no {suffix} file: choose another name, or remove it")
    check_writable(path.parent)


def check_replaceable_folder(path: Path, what: str, *, is_own: bool) -> None:
    """Raises UserError if a folder cannot be written to, or holds files of another kind."""
    if path.is_dir() and any(path.iterdir()) and not is_own:
        raise UserError(f"{path} holds something else than {what}: choose another --out")
    check_writable(path)


def find_logs(run: Path) -> list[Path]:
    """Returns the event logs that `run` names: the file itself, plain or .gz, or all in a folder, sorted."""
    if run.is_file():
        return [run]
    found = sorted(path for pattern in (LOG_FILE, f"{LOG_FILE}.gz") for path in run.rglob(pattern) if path.is_file())
    if not found:
        raise UserError(f"no {LOG_FILE} in {run}: give the folder of a run, or its log")
    return found


def find_log(run: Path) -> Path:
    """Returns the only event log that `run` names; raises UserError if there are several."""
    found = find_logs(run)
    if len(found) > 1:
        some = ", ".join(str(path.parent) for path in found[:3])
        raise UserError(f"{run} holds {len(found)} runs: name one of them ({some}{', …' if len(found) > 3 else ''})")
    return found[0]
