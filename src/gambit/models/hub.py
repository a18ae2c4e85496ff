"""The model hub: one short probe of its address, and what follows when it does not answer.

Libraries try again for half a minute for every file that they miss, which is minutes for a model without a network.
"""

from __future__ import annotations

import os
import ssl
import warnings
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from gambit.errors import GambitWarning, UserError, first_line

OFFLINE = "HF_HUB_OFFLINE"
SECONDS = 5.0  # in which a hub that can be reached at all answers


def address() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def is_offline() -> bool:
    """Returns True if the user set it so, or if the hub was silent."""
    from huggingface_hub import is_offline_mode

    return is_offline_mode()


def fetch_config(model: str) -> None:
    """Fetches config.json of a model that is not on this disk; raises if the hub does not send it."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if is_offline():
        raise _refused(model, f"the hub is not asked: {OFFLINE} is set")
    if (reason := _silence()) is not None:
        raise _refused(model, f"the hub cannot be reached: {address()} does not answer ({reason})")
    try:
        hf_hub_download(model, "config.json")
    except LocalEntryNotFoundError as error:
        raise _refused(model, f"the hub cannot be reached: {address()} has stopped answering") from error
    except (OSError, ValueError) as error:
        raise _refused(model, f"the hub says: {first_line(error)}") from error


def work_offline_if_silent(model: str) -> None:
    """Keeps libraries from requesting optional files of a cached model from a hub that does not answer."""
    from huggingface_hub import constants

    if is_offline() or (reason := _silence()) is None:
        return
    os.environ[OFFLINE] = "1"  # of the processes that an engine starts
    constants.HF_HUB_OFFLINE = True
    warnings.warn(f"{address()} does not answer ({reason}): {model} is used as it lies in this machine's cache",
                  GambitWarning, stacklevel=2)  # fmt: skip


def _refused(model: str, reason: str) -> UserError:
    return UserError(f"cannot load model {model!r}: there is no such folder, and {reason}")


def _silence() -> str | None:
    """Returns the reason why nothing answers; None if something does, even with an error."""
    try:
        with urlopen(Request(address(), method="HEAD"), timeout=SECONDS):
            return None
    except HTTPError:
        return None
    except URLError as error:
        return None if isinstance(error.reason, ssl.SSLError) else str(error.reason)
    except OSError as error:
        return first_line(error)
