"""How the processes that vLLM starts behave: they end with the process that started them and leave signals to it."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.process import BaseProcess

SWITCH_SECONDS = 0.0002


def ignore_interrupts() -> None:
    """In a process of vLLM's: the front decides what Ctrl-C does."""
    if multiprocessing.parent_process() is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@functools.cache  # scheduler and worker may share a process
def join_front() -> None:
    """In a process of vLLM's: end when the front ends, and give way to the thread that launches steps."""
    ignore_interrupts()
    if (parent := multiprocessing.parent_process()) is None:
        return
    os.setpgid(0, 0)  # `timeout` signals a whole group, and the front would have no engine to end its searches with
    # A thread that unpacks and hashes new traces gives way to the one that launches steps after 5 ms by default, half
    # a step of a GPU, and again each time that one has waited for the device.
    sys.setswitchinterval(SWITCH_SECONDS)
    # Not prctl(PR_SET_PDEATHSIG): that watches the thread which started the process, and a thread may end earlier.
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
