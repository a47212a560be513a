"""A parent that starts its child again, with children of a few lines."""

import signal
import subprocess
import sys

import pytest

PARENT = """
import sys
from serving.cli.restart import keep_running
sys.exit(keep_running([sys.executable, "-uc", sys.argv[1]], float(sys.argv[2])))
"""
WAITS = """
import signal, sys
signal.signal(signal.SIGHUP, lambda *_: print("read again"))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
print("up")
while True:
    signal.pause()
"""


@pytest.fixture
def parent():
    """Yields a function that starts a parent of a child's code."""
    started = []

    def start(code, pause_s=0.01):
        command = [sys.executable, "-c", PARENT, code, str(pause_s)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, text=True, **pipes))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate(timeout=60)


def test_who_ends_by_a_fault_is_started_again_until_it_ends_by_itself(parent, tmp_path):
    runs = tmp_path / "runs"
    runs.write_text("")
    child = f"""
import os, signal, sys
with open({str(runs)!r}, "r+") as file:
    number = len(file.read())
    file.write("x")
if number == 1:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit([1, None, 134, 0][number])
"""
    said = (it := parent(child)).communicate(timeout=60)[1]
    assert it.returncode == 0
    assert runs.read_text() == "xxxx"
    ends = ("status 1", "signal 9", "status 134")
    assert said.splitlines() == [
        f"jmoe: the server ended with {end}; it is started again in {pause:g} s"
        for end, pause in zip(ends, (0.01, 0.02, 0.04), strict=True)
    ]


def test_a_setting_that_cannot_be_used_is_final(parent):
    out, err = (it := parent("import sys; print('tried'); sys.exit(2)")).communicate(timeout=60)
    assert (it.returncode, out, err) == (2, "tried\n", "")


def test_signals_are_passed_on_and_after_sigterm_nothing_starts(parent):
    it = parent(WAITS)
    assert it.stdout.readline() == "up\n"
    it.send_signal(signal.SIGHUP)
    assert it.stdout.readline() == "read again\n"
    it.send_signal(signal.SIGTERM)
    assert it.communicate(timeout=60) == ("", "")
    assert it.returncode == 1


def test_sigterm_between_two_starts_ends_it(parent):
    it = parent("import sys; sys.exit(1)", 600)
    assert "again in 600 s" in it.stderr.readline()
    it.send_signal(signal.SIGTERM)
    assert it.wait(60) == 0


def test_no_child_outlives_its_parent(parent):
    it = parent(WAITS)
    assert it.stdout.readline() == "up\n"
    it.kill()
    assert it.communicate(timeout=60)[0] == ""  # its end of the pipe is closed, too
