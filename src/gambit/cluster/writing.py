"""Writes what an engine elsewhere has found, as a search on this machine would have written it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from gambit.cluster.jobs import FinishedSearch
from gambit.errors import StorageError
from gambit.results.result import SearchResult
from gambit.storage.run_folder import LOG_FILE, warn_incomplete, with_log_error, write_result


def write_search(found: FinishedSearch, folder: Path) -> SearchResult:
    """Log and result into `folder`; gives the result as a local search gives it."""
    if found.log is None:  # refused before it began
        return found.result
    result = dataclasses.replace(found.result, out_dir=str(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOG_FILE).write_bytes(found.log)
        write_result(folder, result)
    except (OSError, StorageError) as error:
        return with_log_error(result, warn_incomplete(folder, error))
    return result
