"""A simulated Ray and TransferQueue: processes that die and delayed messages, in one thread and in virtual time, so
that an hour of a run takes milliseconds."""

import asyncio
import contextvars
import pickle
import random
import selectors
from types import SimpleNamespace

from ray.exceptions import ActorUnavailableError, RayActorError

_PROCESS = contextvars.ContextVar("process", default=None)
_HANDLES: dict[int, "Handle"] = {}


class Killed(BaseException):
    """The driver process of the run died."""


class _Selector(selectors.SelectSelector):
    """Clock of virtual time, which passes at once."""

    now, turns = 0.0, 0

    def select(self, timeout=None):
        if timeout is None:
            raise RuntimeError("no event is left, and the run waits")
        self.turns += 1
        if self.turns > 400_000 or self.now > 40_000:
            raise RuntimeError(f"no end is in sight, after {self.now:.0f} s")
        self.now += timeout
        return []


class Clock(asyncio.SelectorEventLoop):
    def __init__(self):
        self._virtual = _Selector()
        super().__init__(self._virtual)
        self.set_task_factory(_of_its_process)

    def time(self):
        return self._virtual.now


def _of_its_process(loop, work, context=None):
    task = asyncio.Task(work, loop=loop, context=context)
    process = _PROCESS.get() if context is None else context.get(_PROCESS)
    if process is not None:
        process.tasks.add(task)
        task.add_done_callback(process.tasks.discard)
        if not process.alive:
            task.cancel()
    return task


class Process:
    def __init__(self):
        self.alive, self.tasks, self.calls, self.object = True, set(), set(), None


class Cluster:
    """Actors and the messages between them. The trainer is plain code on the one thread: :meth:`get` runs all other
    processes until an answer arrives."""

    def __init__(self, seed):
        self.random, self.clock = random.Random(seed), Clock()
        self.actors, self.faults = [], []
        self._latest = {}  # (caller, actor) -> arrival of its latest message: messages keep their order
        self.killed = self.clock.create_future()
        self.clock.set_exception_handler(self._note)

    def _note(self, loop, context):
        error = context.get("exception")
        if error is not None and not context["message"].startswith("Future"):  # of a message without a waiting caller
            self.faults.append(error)

    def latency(self):
        return self.random.choice([0.0005, 0.001, 0.001, 0.02])

    def call_soon(self, seconds, do, *arguments):
        self.clock.call_later(seconds, do, *arguments, context=contextvars.Context())

    # ---- as ``ray`` ----

    def get(self, reference, timeout=None):
        del timeout
        if isinstance(reference, list):
            return [self.get(each) for each in reference]

        async def wait():
            await asyncio.wait({reference, self.killed}, return_when=asyncio.FIRST_COMPLETED)
            if self.faults:
                raise self.faults[0]

        self.clock.run_until_complete(wait())
        if self.killed.done():
            raise Killed
        return reference.result()

    def sleep(self, seconds):
        self.get(self.clock.create_task(asyncio.sleep(seconds)))

    def run(self, work):
        return self.get(self.clock.create_task(work))

    def kill(self, handle, no_restart=True):
        handle.die(restarts=not no_restart)

    def get_runtime_context(self):
        return SimpleNamespace(current_actor=_PROCESS.get().handle)

    def kill_run(self):
        """End all its processes, and drop the messages between them."""
        for actor in self.actors:
            actor.die()
            _HANDLES.pop(actor.number, None)
        self.actors = []
        if not self.killed.done():
            self.killed.set_result(None)

    def begin_run(self):
        self.killed = self.clock.create_future()

    def close(self):
        self.kill_run()
        self.clock.run_until_complete(asyncio.sleep(1))
        self.clock.close()

    # ---- messages ----

    def send(self, actor, method, arguments):
        caller = _PROCESS.get()
        result = self.clock.create_future()
        if caller is None or caller.alive:
            pair, now = (caller, actor), self.clock.time()
            arrives = max(now + self.latency(), self._latest.get(pair, 0.0) + 1e-6)
            self._latest[pair] = arrives
            self.call_soon(arrives - now, actor.receive, method, pickle.dumps(arguments), result)
        return result

    def answer(self, result, value=None, error=None):
        def arrive():
            if result.done() or result.get_loop().is_closed():
                return
            if error is None:
                result.set_result(pickle.loads(value))
            else:
                result.set_exception(error)
                result.exception()  # no caller may read it

        self.call_soon(self.latency(), arrive)


class Handle:
    """Handle of an actor. ``make`` builds it; with ``restarts`` it comes back, empty, after its death."""

    def __init__(self, cluster, make, restarts=False):
        self.cluster, self.make, self.restarts, self.number = cluster, make, restarts, id(self)
        self.waiting, self.process = [], None
        self.hangs = False  # answers no call, and runs on
        _HANDLES[self.number] = self
        cluster.actors.append(self)
        self._start()

    def __reduce__(self):
        return _handle, (self.number,)

    def __getattr__(self, method):
        if method.startswith("_"):
            raise AttributeError(method)
        send = self.cluster.send
        return SimpleNamespace(remote=lambda *args, **kwargs: send(self, method, (args, kwargs)))

    @property
    def alive(self):
        return self.process is not None and self.process.alive

    def _start(self):
        self.process = process = Process()
        process.handle = self
        context = contextvars.Context()
        context.run(_PROCESS.set, process)
        process.object = context.run(self.make)
        waiting, self.waiting = self.waiting, []
        for call in waiting:
            self.receive(*call)

    def _restart(self):
        if self in self.cluster.actors and not self.alive:
            self._start()

    def die(self, restarts=None):
        if not self.alive:
            return
        process, self.process = self.process, None
        process.alive = False
        for task in list(process.tasks):
            task.cancel()
        for result in process.calls:
            self.cluster.answer(result, error=RayActorError())
        if self.restarts if restarts is None else restarts:
            self.cluster.call_soon(self.cluster.random.uniform(0.1, 5.0), self._restart)

    def lose_touch(self):
        """Fail the pending calls, as a lost connection does; the actor lives and completes them."""
        for result in self.process.calls if self.alive else ():
            self.cluster.answer(result, error=ActorUnavailableError("the network was away", None))

    def receive(self, method, message, result):
        process = self.process
        if process is None:
            if self.restarts and self in self.cluster.actors and self.cluster.random.random() < 0.5:
                self.waiting.append((method, message, result))
            else:
                self.cluster.answer(result, error=RayActorError())
            return
        context = contextvars.Context()
        context.run(_PROCESS.set, process)
        process.calls.add(result)
        if self.hangs:
            return
        self.cluster.clock.create_task(self._serve(process, method, message, result), context=context)

    async def _serve(self, process, method, message, result):
        arguments, keywords = pickle.loads(message)
        try:
            value = getattr(process.object, method)(*arguments, **keywords)
            if asyncio.iscoroutine(value):
                value = await value
        except Exception as error:
            done = {"error": error}
        else:
            done = {"value": pickle.dumps(value)}
        if process.alive:
            process.calls.discard(result)
            self.cluster.answer(result, **done)


def _handle(number):
    return _HANDLES[number]


class Queue:
    """TransferQueue: a key is listed before its data and its tag are stored; answers leave out missing keys."""

    def __init__(self, cluster):
        self.cluster, self.partitions, self.written = cluster, {}, {}
        self.most = 0  # maximum number of entries with data so far

    def _pause(self):
        return asyncio.sleep(self.cluster.latency())

    async def put(self, keys, partition_id, fields=None, tags=None):
        data = pickle.dumps((fields, tags))
        await self._pause()
        keep = self.partitions.setdefault(partition_id, {})
        for key in keys:
            keep.setdefault(key, [{}, None])
            self.written[partition_id, key] = self.cluster.clock.time()
        await self._pause()
        fields, tags = pickle.loads(data)
        for number, key in enumerate(keys):
            entry = keep.setdefault(key, [{}, None])
            self.written[partition_id, key] = self.cluster.clock.time()
            if tags is not None:
                entry[0] = {**entry[0], **tags[number]}
            if fields is not None:
                entry[1] = {**(entry[1] or {}), **fields[number]}
        entries = sum(entry[1] is not None for keys in self.partitions.values() for entry in keys.values())
        self.most = max(self.most, entries)

    async def list(self):
        await self._pause()
        found = {p: {key: dict(tag) for key, (tag, _) in keys.items()} for p, keys in self.partitions.items()}
        await self._pause()
        return found

    async def fetch(self, keys, partition_id, select_fields=None):
        assert keys
        await self._pause()
        keep = self.partitions.get(partition_id, {})
        rows = [keep[key][1] for key in keys if key in keep]
        if not rows:
            raise ValueError("keys or partition were not found!")
        names = select_fields or sorted(set.intersection(*(set(row or ()) for row in rows)))
        if any(name not in (row or ()) for row in rows for name in names):
            raise ValueError("Some fields are not ready in all the requested keys!")
        data = pickle.loads(pickle.dumps({name: [row[name] for row in rows] for name in names}))
        await self._pause()
        return data

    async def clear(self, keys, partition_id):
        assert keys
        await self._pause()
        for key in keys:
            self.partitions.get(partition_id, {}).pop(key, None)

    def snapshot(self):
        return pickle.dumps(self.partitions)

    def restore(self, snapshot):
        self.partitions = {} if snapshot is None else pickle.loads(snapshot)
