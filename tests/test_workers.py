"""Jobs in processes: answers, exceptions, deaths, and that no process is left behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from specbench.bench.workers import carry_out
from specbench.errors import NotMeasured, UsageError


def squares() -> Callable[[int], tuple[int, int]]:
    """Return a job that squares, and tells its process."""
    return lambda number: (number * number, os.getpid())


def moody() -> Callable[[str], str]:
    """Return a job that does as it is told."""

    def work(order: str) -> str:
        if order == "exit":
            os._exit(7)
        if order == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if order == "refuse":
            raise UsageError("it was refused", hint="ask for less")
        if order == "sleep":
            time.sleep(3600)
        return order

    return work


def unmakeable() -> Callable[[int], int]:
    """Fail before the first job."""
    raise NotMeasured("there is nothing to work with")


def test_every_job_is_done_once_in_fresh_processes() -> None:
    """Each job comes back with its own answer; two processes shared them, and neither was this one."""
    found = dict(carry_out(squares, range(9), 2))
    assert {job: answer for job, (answer, _) in found.items()} == {n: n * n for n in range(9)}
    processes = {process for _, process in found.values()}
    assert len(processes) == 2
    assert os.getpid() not in processes
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(("jobs", "workers"), [((3, 1, 2), 1), ((3,), 8), ((), 4)])
def test_one_worker_is_this_process(jobs: tuple[int, ...], workers: int) -> None:
    """Jobs are done in their order and no process is started; so are those that are no more than one."""
    assert list(carry_out(squares, jobs, workers)) == [(n, (n * n, os.getpid())) for n in jobs]


@pytest.mark.parametrize(("order", "how"), [("exit", "exit code 7"), ("kill", "signal SIGKILL")])
def test_a_death_is_an_error_and_no_hang(order: str, how: str) -> None:
    """The error says how it died and at what, and ends the workers that are busy."""
    with pytest.raises(NotMeasured, match=rf"a worker process died \({how}\) at {order}") as caught:
        list(carry_out(moody, ["sleep", "well", order], 2))
    assert caught.value.exit_code == 3
    assert caught.value.hint is not None
    assert multiprocessing.active_children() == []


def test_an_exception_is_raised_where_the_caller_is() -> None:
    """It is the same, with its hint, and says where it came from."""
    with pytest.raises(UsageError, match="it was refused") as caught:
        list(carry_out(moody, ["sleep", "refuse"], 2))
    assert caught.value.hint == "ask for less"
    assert "in a worker process, at refuse" in caught.value.__notes__[0]
    with pytest.raises(NotMeasured, match="nothing to work with"):
        list(carry_out(unmakeable, range(3), 2))
    assert multiprocessing.active_children() == []


def test_leaving_ends_busy_workers() -> None:
    """Who wants no more answers leaves no process behind."""
    with contextlib.closing(carry_out(moody, ["sleep", "well"], 2)) as answers:
        assert next(answers) == ("well", "well")
        assert len(multiprocessing.active_children()) == 1
    assert multiprocessing.active_children() == []


def run_alone(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process group of its own, until nothing is left that could print."""
    here = Path(__file__).parent
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent), str(here)])},
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,
        check=False,
    )


INTERRUPTED = """
import contextlib, multiprocessing, os, signal
from specbench.bench.workers import carry_out
from test_workers import moody
signal.signal(signal.SIGINT, signal.default_int_handler)  # where this runs in the background it is ignored
with contextlib.closing(carry_out(moody, ["sleep", "well", "sleep", "sleep"], 3)) as answers:
    try:
        next(answers)
        os.killpg(0, signal.SIGINT)  # as a terminal does: to the workers too
        next(answers)
    except KeyboardInterrupt:
        print("interrupted")
print(multiprocessing.active_children())
"""


def test_a_terminals_interrupt_ends_all_in_silence() -> None:
    """Workers, even those still starting, print nothing at Ctrl-C and are ended by their caller."""
    done = run_alone(INTERRUPTED)
    assert done.stdout == "interrupted\n[]\n"
    assert (done.returncode, done.stderr) == (0, "")


KILLED = """
import os, signal
from specbench.bench.workers import carry_out
from test_workers import moody
print(*next(carry_out(moody, ["sleep", "well"], 2)), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_with_a_caller_that_is_killed() -> None:
    """One that sleeps for an hour does not outlive it."""
    done = run_alone(KILLED)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "well well\n")
