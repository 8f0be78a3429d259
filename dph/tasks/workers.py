"""A small pool of processes that grade: an answer that hangs or crashes costs its own reward and nothing else.

A worker is a plain `python -c` child that imports one grading function, never torch, and speaks JSON lines over its
pipes: it reads a chunk of jobs as one line and answers each job with one line. The parent watches the clock. A job
over the limit gets its worker killed and replaced; its outcome is `timeout`. There is no signal handler and no
thread, so the pool works from any thread (POSIX only: it waits on pipes). Results come in the order of the jobs.

No process outlives the pool: `close`, garbage collection and the interpreter's exit kill them; if the parent itself
is killed, an idle worker sees its pipe end and a hanging one is stopped by its own limit of processor time.
"""

import contextlib
import importlib
import json
import math
import os
import resource
import selectors
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

START_SECONDS = 120.0  # until a worker has imported its function, on a busy machine
MEMORY = 4 << 30  # bytes of address space: 9**9**9 ends as a MemoryError, not in swap
CHUNK = 64  # jobs sent at once; a worker never holds more
ROOT = Path(__file__).resolve().parents[2]
COMMAND = "import sys; sys.path.insert(0, sys.argv[1]); from dph.tasks.workers import serve; serve(*sys.argv[2:])"


@dataclass(frozen=True)
class Verdict:
    """What became of one job: `value` is the function's result if `outcome` is ok, else what went wrong."""

    outcome: Literal["ok", "timeout", "grader_error"]
    value: Any


class GraderPool:
    """Runs `handler`, a function of one JSON value to another given as "module:function", in worker processes.

    Args:
        handler: e.g. "dph.tasks.math:judge".
        workers: how many processes.
        limit: seconds of wall-clock time for one job.
    """

    def __init__(self, handler: str, workers: int, limit: float) -> None:
        self.handler, self.workers, self.limit = handler, workers, limit
        self._lock = threading.Lock()
        self._running: list[_Worker] = []  # all that live, a spare one included
        weakref.finalize(self, _end, self._running)

    def run(self, jobs: Sequence[Any]) -> list[Verdict]:
        """The verdicts on `jobs`, in their order. Raises RuntimeError if a worker cannot start at all."""
        results: list[Verdict | None] = [None] * len(jobs)
        with self._lock:
            try:
                self._run(jobs, deque(range(len(jobs))), results)
            except BaseException:  # Ctrl-C too: replies under way must not meet the next batch
                _end(self._running)
                raise
        return [verdict for verdict in results if verdict is not None]

    def close(self) -> None:
        """Kills the workers. The next `run` starts new ones."""
        with self._lock:
            _end(self._running)

    def _run(self, jobs: Sequence[Any], queue: deque[int], results: list[Verdict | None]) -> None:
        share = max(1, min(CHUNK, len(jobs) // (4 * self.workers)))
        while queue or any(worker.pending for worker in self._running):
            busy = sum(bool(worker.pending) for worker in self._running)
            for worker in self._idle(min(self.workers - busy, len(queue))):
                if queue:
                    worker.send([queue.popleft() for _ in range(min(share, len(queue)))], jobs)
            for worker in self._wait():
                for verdict in worker.receive():
                    results[worker.pending.popleft()] = verdict
            for worker in list(self._running):
                lost = worker.lost(self.limit)
                if lost is not None:
                    self._running.remove(worker)
                    worker.kill()
                    if worker.pending:
                        results[worker.pending.popleft()] = lost
                    queue.extendleft(reversed(worker.pending))

    def _idle(self, count: int) -> list["_Worker"]:
        """`count` workers without work, started if need be."""
        idle = [worker for worker in self._running if not worker.pending]
        while len(idle) < count:
            idle.append(self._start())
        return idle[:count]

    def _start(self) -> "_Worker":
        worker = _Worker(self.handler, self.limit)
        self._running.append(worker)
        return worker

    def _wait(self) -> list["_Worker"]:
        """The workers that have something to say, after waiting for one no longer than the clock allows."""
        busy = [worker for worker in self._running if worker.pending]
        # Halfway to a limit a spare worker starts, so that the one to be killed is replaced without a wait.
        if len(self._running) == len(busy) and any(worker.left(self.limit) <= self.limit / 2 for worker in busy):
            self._start()
        half = self.limit / 2 if len(self._running) == len(busy) else 0.0
        patience = min((worker.left(self.limit) - half * worker.ready for worker in busy), default=0.0)
        with selectors.DefaultSelector() as selector:
            for worker in self._running:
                selector.register(worker.output, selectors.EVENT_READ, worker)
            return [key.data for key, _ in selector.select(max(0.0, patience))]


def _end(workers: list["_Worker"]) -> None:
    while workers:
        workers.pop().kill()


class _Worker:
    """One child process; `pending` are the numbers of the jobs it has yet to answer."""

    def __init__(self, handler: str, limit: float) -> None:
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", COMMAND, str(ROOT), handler, str(limit)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        self.pending: deque[int] = deque()
        self.buffer = b""
        self.ready = self.ended = False
        self.since = time.monotonic()  # start of the process, then of the job under way

    def send(self, numbers: list[int], jobs: Sequence[Any]) -> None:
        """Sends a chunk. The worker is idle, hence reading: however long the line, it cannot deadlock."""
        self.pending.extend(numbers)
        if self.ready:
            self.since = time.monotonic()
        try:
            self.input.write(json.dumps([jobs[number] for number in numbers]).encode() + b"\n")
            self.input.flush()
        except BrokenPipeError:
            self.ended = True

    def receive(self) -> list[Verdict]:
        """The replies that have come."""
        data = os.read(self.output.fileno(), 1 << 16)
        self.ended = not data
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        if lines:
            self.since = time.monotonic()
            if not self.ready:
                self.ready = True
                lines = lines[1:]
        return [Verdict(**json.loads(line)) for line in lines]

    def left(self, limit: float) -> float:
        """Seconds until its job, or its start, has taken too long."""
        return self.since + (limit if self.ready else START_SECONDS) - time.monotonic()

    def lost(self, limit: float) -> Verdict | None:
        """The verdict on the job under way if this worker has ended or is over the limit, else None."""
        late = bool(self.pending) and self.left(limit) <= 0
        if not (self.ended or late):
            return None
        if not self.ready:
            self.errors.seek(0)
            message = self.errors.read().decode(errors="replace").strip() or f"nothing after {START_SECONDS:g} s"
            raise RuntimeError(f"a grader's worker process could not start: {message}")
        if late:
            return Verdict("timeout", f"over {limit:g} s")
        return Verdict("grader_error", f"the worker ended with code {self.process.wait()}")

    def kill(self) -> None:
        """Ends the process, whatever it does."""
        self.process.kill()
        self.process.wait()
        for stream in (self.output, self.errors):
            stream.close()
        with contextlib.suppress(BrokenPipeError):  # what was still buffered has no reader any more
            self.input.close()


def serve(handler: str, limit: str) -> None:
    """The worker's side: answers chunks of jobs until its input ends."""
    replies = os.fdopen(os.dup(1), "wb")
    module, _, name = handler.partition(":")
    function: Callable[[Any], Any] = getattr(importlib.import_module(module), name)
    getattr(sys.modules[module], "load", int)()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a process stopped for its time leaves no dump
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # what a library prints is no reply
    os.dup2(nowhere, 2)
    replies.write(b"ready\n")
    replies.flush()
    for line in sys.stdin.buffer:
        for job in json.loads(line):
            used = resource.getrusage(resource.RUSAGE_SELF)
            seconds = math.ceil(used.ru_utime + used.ru_stime + float(limit)) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
            replies.write(_answer(function, job) + b"\n")
            replies.flush()


def _answer(function: Callable[[Any], Any], job: Any) -> bytes:
    try:
        return json.dumps({"outcome": "ok", "value": function(job)}).encode()
    except Exception as error:
        # Never str(error): the text of a half-made expression can hang just as its evaluation did.
        detail = error.args[0] if error.args and isinstance(error.args[0], str) else ""
        return json.dumps({"outcome": "grader_error", "value": f"{type(error).__name__}: {detail[:200]}"}).encode()
