"""Jobs in processes of their own, which are fresh, keep nothing to themselves, and end with their caller."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Generic, TypeVar

from specbench.errors import NotMeasured

Job = TypeVar("Job")
Answer = TypeVar("Answer")


def carry_out(
    make: Callable[[], Callable[[Job], Answer]], jobs: Sequence[Job], workers: int
) -> Generator[tuple[Job, Answer], None, None]:
    """Do every job; yield each with its answer as it is done, in whatever order.

    Every worker calls `make` once and does with the result one job after another; its exceptions are raised
    here. One worker is this process, and then the order is that of the jobs. Leave the iterator by
    `contextlib.closing`: however it is left, no worker outlives it.

    Args:
        make: importable by name, as are jobs and answers by pickle.
        jobs: begun in this order.
        workers: processes at most; no more than jobs are started.

    Raises:
        NotMeasured: a worker died.
    """
    workers = min(workers, len(jobs))
    if workers <= 1:
        if jobs:
            work = make()
            yield from ((job, work(job)) for job in jobs)
        return
    waiting = deque(jobs)
    team: dict[Connection, _Worker[Job, Answer]] = {}
    try:
        with _deaf_to_interrupts():
            for _ in range(workers):
                worker = _Worker(make, waiting.popleft())
                team[worker.connection] = worker
        while team:
            for ready in wait(list(team)):
                assert isinstance(ready, Connection)
                worker = team[ready]
                job, answer = worker.job, worker.answer()
                if waiting:
                    worker.begin(waiting.popleft())
                else:
                    team.pop(ready).end()
                yield job, answer
    finally:
        for worker in team.values():
            worker.end()


class _Worker(Generic[Job, Answer]):
    """A process and the job it is at."""

    def __init__(self, make: Callable[[], Callable[[Job], Answer]], job: Job) -> None:
        # Spawned, not forked: a copy of a process whose libraries run threads may wait for them forever.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_work, args=(make, theirs), daemon=True)
        self.process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        self.begin(job)

    def begin(self, job: Job) -> None:
        """Hand it the next job; that it is dead shows when its answer is read."""
        self.job = job
        with contextlib.suppress(OSError):
            self.connection.send(job)

    def answer(self) -> Answer:
        """Return what came of its job."""
        try:
            answer: Answer | _Failure = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            raise NotMeasured(
                f"a worker process died ({_last_words(self.process.exitcode)}) at {self.job}",
                hint="try fewer --workers: each needs memory of its own",
            ) from None
        if isinstance(answer, _Failure):
            raise answer.problem
        return answer

    def end(self) -> None:
        """Stop it at once, whatever it is at."""
        self.process.kill()
        self.process.join()
        self.connection.close()


@dataclass(frozen=True, slots=True)
class _Failure:
    problem: Exception


def _work(make: Callable[[], Callable[[Job], Answer]], connection: Connection) -> None:
    """Do jobs until the caller is gone."""
    threading.Thread(target=_end_with_caller, daemon=True).start()
    work = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            job = connection.recv()
            try:
                work = work or make()
                answer: Answer | _Failure = work(job)
            except Exception as problem:  # noqa: BLE001 - it is raised again where the caller is
                problem.add_note(f"in a worker process, at {job}:\n{traceback.format_exc()}")
                answer = _Failure(problem)
            connection.send(answer)


def _end_with_caller() -> None:
    """End this process, in the middle of a job, when its caller was killed and could not do so."""
    caller = multiprocessing.parent_process()
    assert caller is not None
    caller.join()
    os._exit(1)


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Let processes be born ignoring Ctrl-C, which a terminal sends to all: they end by their caller's hand.

    A handler that they set themselves would come too late for one that is still importing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _last_words(code: int | None) -> str:
    """Say how a process ended."""
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
