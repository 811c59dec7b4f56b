"""Starts Redis, web, worker and batches, watches them, and stops web, batches, worker, Redis in that order."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import time
from queue import Empty, SimpleQueue

from slotline import __version__
from slotline.cli.bench import demo_model
from slotline.up.leftovers import MARK, SIDES, end, find_leftovers, find_marked, mark
from slotline.up.plan import Plan, free_port
from slotline.up.processes import Child
from slotline.up.ready import Readiness, commands, room
from slotline.up.redis import Redis, StopEarly
from slotline.up.server import Server
from slotline.up.state import identity, remove_state, write_state
from slotline.up.stopping import Stopper
from slotline.up.terminal import Terminal

#: A child that ends with this status cannot be helped by another start: its settings or model are to blame.
EXIT_CONFIG = 2

#: How often readiness and children that are due are looked after.
LOOK_S = 0.25

#: How long open streams get to end when the web side stops.
WEB_STOP_S = 15.0

#: How long batches get to write the results they have.
BATCHES_STOP_S = 25.0

#: What a worker may need beyond its drain time, to hand jobs back and unload the model.
WORKER_EXTRA_S = 10.0

Event = Child | Server | signal.Signals


class Up:
    """One run of `slotline up`. The data directory must be held by the caller."""

    def __init__(self, plan: Plan, terminal: Terminal) -> None:
        self._plan = plan
        self._terminal = terminal
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._redis = Redis(plan, self._take, self._events.put, terminal.say)
        self._children: list[Child] = []
        self._due: dict[Child, float] = {}
        self._url = ""

    def run(self) -> int:
        """Run until told to stop; returns the exit status.

        Raises:
            Fault: something needed could not be had. Nothing is left running then.
        """
        self._listen()
        try:
            self._prepare()
            for child in self._children:
                child.start()
            self._save()
            return self._watch()
        except StopEarly:
            return 0
        finally:
            self._stop()
            remove_state(self._plan.directory)

    def _listen(self) -> None:
        def on_signal(number: int, frame: object) -> None:
            self._events.put(signal.Signals(number))

        signal.signal(signal.SIGINT, on_signal)
        signal.signal(signal.SIGTERM, on_signal)
        # Under nohup the end of the terminal means nothing.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, on_signal)

    def _prepare(self) -> None:
        """Everything up to the point where the children can start. What can be refused is, before anything runs."""
        plan = self._plan
        leftovers = find_leftovers(plan.directory)
        if leftovers:
            self._terminal.say(f"ending {len(leftovers)} processes that an earlier `slotline up` left behind")
            end(leftovers)
        port = free_port(plan.web.host, plan.web.port)
        self._url = plan.url(port)
        model_path = plan.worker.model_path
        if plan.demo:
            self._terminal.say(
                "no --model given: using the demo model, SmolLM2-135M-Instruct (first use: some seconds)"
            )
            model_path = demo_model()
        self._redis.start()
        if plan.fresh and plan.own_files is not None and plan.own_files.exists():
            shutil.rmtree(plan.own_files)
        env = plan.environment(port, model_path, self._redis.url)
        for name in SIDES:
            marked = env | {MARK: mark(name, plan.directory)}
            self._children.append(Child(name, marked, self._terminal.relay, self._events.put))

    def _save(self) -> None:
        pids = {"redis": self._redis.pid} | {child.name: child.pid for child in self._children}
        state = {
            **identity(os.getpid()),
            "url": self._url,
            "redis_url": self._redis.url,
            "files_url": self._plan.files_url,
            "processes": {name: identity(pid) for name, pid in pids.items() if pid is not None},
            "versions": {"slotline": __version__, "python": platform.python_version()},
        }
        write_state(self._plan.directory, state)

    def _watch(self) -> int:
        """Handle what happens until a signal comes or a child cannot run; returns the exit status."""
        readiness: Readiness | None = Readiness(self._url, self._terminal.say)
        while True:
            if readiness is not None and readiness.look():
                readiness = None
                self._announce()
            event = self._take(LOOK_S if readiness or self._due else None)
            if isinstance(event, signal.Signals):
                return 0
            if isinstance(event, Child) and not self._may_restart(event):
                return EXIT_CONFIG
            if isinstance(event, Server):
                self._redis.restart()
                self._save()
            self._start_due()

    def _announce(self) -> None:
        model = "the demo model" if self._plan.demo else self._plan.worker.model_path
        ready = f"Slotline is ready at {self._url}, with {model}{room(self._url)}."
        self._terminal.say(f"\n{ready}", "bold")
        self._terminal.say(f"\n{commands(self._url)}\n")

    def _may_restart(self, child: Child) -> bool:
        if child.status == EXIT_CONFIG:
            self._terminal.say(f"{child.name} cannot run: {child.last_line or 'see its message above'}", "red")
            return False
        wait_s = child.backoff_s()
        self._terminal.say(f"{child.name} ended with status {child.status}; it starts again in {wait_s:g} s", "red")
        self._due[child] = time.monotonic() + wait_s
        return True

    def _start_due(self) -> None:
        for child in [c for c, at in self._due.items() if time.monotonic() >= at]:
            del self._due[child]
            # What the dead one had started: a model process holds memory, a web process the port.
            end(find_marked(self._plan.directory, [child.name]))
            child.start()
            self._save()

    def _take(self, wait_s: float | None) -> Event | None:
        try:
            return self._events.get(timeout=wait_s)
        except Empty:
            return None

    def _stop(self) -> None:
        """Stop web and batches, so that nothing new comes in; the worker, which drains; Redis, which has it all."""
        say, drain_s = self._terminal.say, self._plan.worker.drain_s
        stopper = Stopper(self._plan.directory, self._take, say)
        for child in self._children:
            if not child.is_running:
                continue
            if child.name == "web":
                say("stopping the web API")
                stopper.stop(child, WEB_STOP_S)
            elif child.name == "batches":
                say("stopping the batches")
                stopper.stop(child, BATCHES_STOP_S)
            else:
                say(f"stopping the worker: running jobs get {drain_s:g} s, Ctrl-C again hands them back at once")
                stopper.stop(child, drain_s + WORKER_EXTRA_S)
        if self._children:
            end(find_marked(self._plan.directory))
        self._redis.stop()
