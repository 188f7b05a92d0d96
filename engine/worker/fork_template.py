"""Starts the process that workers are forked from. Importing this module is fast: a start begins with it."""

import signal
from multiprocessing import forkserver, resource_tracker


def start_template(module: str) -> None:
    """Start the template process unless it runs, and return at once."""
    forkserver.set_forkserver_preload([module])
    resource_tracker.ensure_running()  # before the signal is blocked, because it would unblock it
    # SIGINT goes to every process of a terminal; the template must not end while it imports.
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
