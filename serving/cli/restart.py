"""`jmoe serve --restart`: a process that starts the server again when it has ended by a fault.

A mesh over several processes ends as a whole when one of them is gone. Where nothing else starts
them again (systemd and Kubernetes do), each has such a parent, and they find each other anew.
"""

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from types import FrameType

from serving.telemetry import logs

FINAL = 0, 2
"""Statuses after which nothing starts: it was told to end, or a setting cannot be used."""
PAUSE_S, LONGEST_PAUSE_S = 1.0, 8.0
LASTED_S = 60.0
"""Who has lived for so long ends by something new: pauses are short again."""
_PR_SET_PDEATHSIG = 1


def keep_running(command: Sequence[str], pause_s: float = PAUSE_S) -> int:
    """Runs a command, and again whenever it ends with a status that is not FINAL, or by a signal,
    after `pause_s`, then twice that, up to LONGEST_PAUSE_S. Returns the last status, or 128 + N for
    signal N.

    SIGTERM, SIGINT and SIGHUP are passed on; after one of the first two nothing starts again. If
    this process dies, the command's is killed. Has to be called in the main thread.
    """
    running: subprocess.Popen[bytes] | None = None
    early: list[int] = []  # signals that came while none was running
    ending = threading.Event()

    def pass_on(number: int, _: FrameType | None) -> None:
        if number != signal.SIGHUP:
            ending.set()
        if running is None:
            early.append(number)
        else:
            running.send_signal(number)

    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, pass_on)
    own, pause = os.getpid(), pause_s

    def begin() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it reads keys
        if os.getppid() != own:
            os._exit(1)

    while True:
        began_at = time.monotonic()
        # In a session of its own, or it would get a terminal's Ctrl-C twice.
        started = subprocess.Popen(command, preexec_fn=begin, start_new_session=True)
        running = started
        while early:
            running.send_signal(early.pop(0))
        status = running.wait()
        running = None
        if ending.is_set() or status in FINAL:
            return status if status >= 0 else 128 - status
        if time.monotonic() - began_at > LASTED_S:
            pause = pause_s
        how = f"signal {-status}" if status < 0 else f"status {status}"
        logs.say(f"jmoe: the server ended with {how}; it is started again in {pause:g} s")
        if ending.wait(pause):
            return 0
        pause = min(2 * pause, LONGEST_PAUSE_S)
