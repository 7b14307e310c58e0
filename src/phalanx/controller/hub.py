"""The controller without its gRPC shell: jobs, timers, the journal, who listens.

Everything runs in one event loop's thread. An event changes a job's state in memory; at the
end of the loop's turn all changed jobs go into the journal in one transaction; only then
signals leave and reports are answered.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.controller import wire
from phalanx.controller.etcd import EtcdJournal
from phalanx.controller.faultview import fault_signal
from phalanx.controller.journal import Journal, StoredJob, WriteFailed
from phalanx.controller.metrics import Metrics
from phalanx.controller.resetfile import ResetFiles
from phalanx.proto import recover_pb2 as pb
from phalanx.recovery import codec, devices
from phalanx.recovery import model as m
from phalanx.recovery.machine import due, step
from phalanx.recovery.model import Job, JobConfig, State
from phalanx.recovery.words import Code

log = logging.getLogger("phalanx.controller")

_QUEUE = 256  # signals a stream may be behind
_CLOSE_GRACE = 2.0
_BEAT_MOMENT = 0.005
_BEAT_BATCH = 25
_JOURNAL_RETRY = 1.0
_LINGER = 0.001  # a write this soon after the last one waits for more to write


@dataclass(frozen=True)
class Options:
    """What the controller is told at its start. Times in seconds."""

    defaults: JobConfig = field(default_factory=JobConfig)
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)  # fixed settings per job
    known_only: bool = False
    keep_alive: float = 5.0
    idle_expiry: float = 3600.0
    resume_grace: float = 30.0
    max_jobs: int = 20_000
    max_jobs_per_peer: int = 20_000
    max_streams: int = 25_000
    max_faults: int = 50_000


class Feed:
    """One open server stream: bytes to be written, and how it is to end."""

    __slots__ = ("end", "limit", "owner", "queue", "task", "waiter")

    def __init__(self, owner: Any = None, limit: int = _QUEUE) -> None:
        self.queue: deque[tuple[bytes, m.Key | None]] = deque()
        self.waiter: asyncio.Future[None] | None = None
        self.task: asyncio.Task[Any] | None = None
        self.end: str | None = None  # None: open; "": ends well; text: ends with it
        self.owner = owner
        self.limit = limit

    def put(self, data: bytes, key: m.Key | None = None) -> None:
        """Queues a message; a reader that is too far behind loses its stream."""
        if len(self.queue) >= self.limit:
            self.close("too slow: the stream is ended; subscribe again")
            return
        self.queue.append((data, key))
        self._wake()

    def close(self, reason: str = "") -> None:
        """Ends the stream after what is queued."""
        if self.end is None:
            self.end = reason
            self._wake()
            if self.task is not None and self.waiter is None:
                # It is in the middle of a write, which a reader that reads nothing never ends.
                self.task.get_loop().call_later(_CLOSE_GRACE, self.task.cancel)

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def run(
        self,
        write: Callable[[bytes], Any],
        written: Callable[[m.Key], None] | None = None,
    ) -> str:
        """Writes until the end; returns its reason."""
        self.task = asyncio.current_task()
        while True:
            while self.queue:
                data, key = self.queue.popleft()
                await write(data)
                if key is not None and written is not None:
                    written(key)
            if self.end is not None:
                return self.end
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
            self.waiter = None


class Subscriber(Feed):
    """The stream that a job's signals go to, and who holds it."""

    __slots__ = ("beat", "client", "incarnation", "keyed", "spoke")

    def __init__(self, owner: str, client: str, incarnation: int, keyed: bool, beat: float) -> None:
        super().__init__(owner)
        self.client = client
        self.incarnation = incarnation
        self.keyed = keyed
        self.beat = beat  # seconds between keep-alives; 0: none
        self.spoke = 0.0


class Entry:
    """One job as the controller holds it."""

    __slots__ = (
        "declared",
        "job",
        "operators",
        "peer",
        "refused",
        "registered",
        "seen",
        "subscriber",
        "timer",
        "workers",
    )

    def __init__(self, job: Job, registered: bool, now: float, peer: str = "") -> None:
        self.job = job
        self.registered = registered
        self.subscriber: Subscriber | None = None
        self.refused: set[str] = set()  # owners that were superseded while the new one lives
        self.seen = now
        self.peer = peer
        self.timer: float | None = None
        self.declared: dict[str, Any] = {}
        self.workers: dict[str, list[Feed]] = {}
        self.operators: dict[str, list[Feed]] = {}


class Unavailable(RuntimeError):
    """The journal could not be written; nothing was promised."""


class Hub:
    """All jobs of one controller."""

    def __init__(
        self,
        journal: Journal | EtcdJournal,
        options: Options | None = None,
        *,
        metrics: Metrics | None = None,
        reset: ResetFiles | None = None,
        record: Callable[..., None] | None = None,
        catalogue: devices.Catalogue | None = None,
    ) -> None:
        self.options = options or Options()
        self.metrics = metrics or Metrics()
        self.catalogue = catalogue or devices.Catalogue()
        self.entries: dict[str, Entry] = {}
        self.inited: dict[str, Entry] = {}
        self.devices: dict[str, devices.DeviceFault] = {}
        self.closing = False
        self._journal = journal
        self._reset = reset
        self._record = record
        self._dirty: set[str] = set()
        self._dirty_faults: dict[str, str | None] = {}
        self._outbox: list[tuple[str, m.Effect]] = []
        self._flushed: asyncio.Future[None] | None = None
        self._flush_handle: asyncio.Handle | None = None
        self._wrote = 0.0
        self._timers: list[tuple[float, str]] = []
        self._timer_handle: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._offset = time.time() - time.monotonic()
        self._beats: list[tuple[float, int, Subscriber]] = []
        self._beat: asyncio.Future[None] | None = None
        self._subscriptions = 0
        self._streams = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._later: dict[str, asyncio.TimerHandle] = {}
        self._fault_feeds: dict[tuple[str, str], FaultFeed] = {}
        self._fault_jobs: dict[str, set[tuple[str, str]]] = {}
        self._per_peer: dict[str, int] = {}
        gauges = self.metrics.gauges
        gauges["jobs"] = lambda: len(self.entries)
        gauges["streams"] = lambda: self._streams
        gauges["device_faults"] = lambda: len(self.devices)
        gauges["busy_jobs"] = lambda: sum(
            e.job.state is not State.IDLE for e in self.entries.values()
        )

    # ---------------------------------------------------------------- life

    def now(self) -> float:
        """Wall-clock seconds that never go back while this process lives."""
        return self._offset + time.monotonic()

    def open(self) -> None:
        """Reads the journal, sets the timers. Call in the event loop's thread."""
        self._loop = asyncio.get_running_loop()
        now = self.now()
        for key, body in self._journal.faults().items():
            try:
                data = json.loads(body)
                data["devices"] = tuple(data["devices"])
                self.devices[key] = devices.DeviceFault(**data)
            except (ValueError, TypeError, KeyError):
                log.error("the journal's fault %r cannot be read; it is left out", key)
        for job_id, stored in self._journal.jobs().items():
            try:
                job = codec.load(stored.body)
            except ValueError as error:
                log.error("the journal's job %r cannot be read (%s); left out", job_id, error)
                continue
            # Nobody is connected yet; whoever was gets time to come back.
            grace = now + self.options.resume_grace
            job = replace(
                job,
                subscribed=False,
                deadline=None if job.deadline is None else max(job.deadline, grace),
                node_deadline=(
                    None if job.node_deadline is None else max(job.node_deadline, grace)
                ),
            )
            entry = Entry(job, stored.registered, now)
            self.entries[job_id] = entry
            self._arm(job_id, entry)
        self._tasks = [
            self._loop.create_task(self._keep_alives()),
            self._loop.create_task(self._expire()),
        ]

    async def close(self) -> None:
        """Ends the streams and the timers; writes what is left."""
        self.closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for handle in self._later.values():
            handle.cancel()
        if self._timer_handle is not None:
            self._timer_handle.cancel()
        for entry in self.entries.values():
            for feed in (
                entry.subscriber,
                *(f for feeds in entry.workers.values() for f in feeds),
                *(f for feeds in entry.operators.values() for f in feeds),
            ):
                if feed is not None:
                    feed.close()
        for fault_feed in self._fault_feeds.values():
            fault_feed.close()
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush()

    # ---------------------------------------------------------------- events

    def apply(self, entry: Entry, event: m.Event) -> m.Outcome:
        """One event now; its effects after the next journal write."""
        job_id = entry.job.job_id
        out = step(entry.job, event, self.now())
        if out.changed:
            entry.job = out.job
            self._dirty.add(job_id)
            self._outbox += [(job_id, effect) for effect in out.effects]
            self._arm(job_id, entry)
            self._schedule()
        return out

    async def tell(self, entry: Entry, event: m.Event) -> m.Outcome:
        """The same, and waits until the journal has it. Raises Unavailable."""
        out = self.apply(entry, event)
        if out.changed or entry.job.job_id in self._dirty:  # a repetition may overtake the write
            await self.settled()
        return out

    async def settled(self) -> None:
        """Until everything that has been changed so far is in the journal."""
        if self._flushed is not None:
            await asyncio.shield(self._flushed)

    def _schedule(self) -> None:
        assert self._loop is not None
        if self._flushed is None:
            self._flushed = self._loop.create_future()
        if self._flush_handle is None:
            if self._loop.time() - self._wrote < _LINGER:
                self._flush_handle = self._loop.call_later(_LINGER, self._flush)
            else:
                self._flush_handle = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_handle = None
        done = self._flushed
        jobs: dict[str, StoredJob | None] = {}
        for job_id in self._dirty:
            entry = self.entries.get(job_id)
            jobs[job_id] = StoredJob(codec.dump(entry.job), entry.registered) if entry else None
        started = time.perf_counter()
        try:
            self._journal.write(jobs, self._dirty_faults)
        except WriteFailed as error:
            log.error("the journal cannot be written: %s", error)
            self.metrics.count("journal_errors")
            self._flushed = None
            if done is not None:
                done.set_exception(Unavailable(f"the journal cannot be written: {error}"))
                done.exception()  # nobody may have waited
            if not self.closing and self._loop is not None:
                self._flushed = self._loop.create_future()
                self._flush_handle = self._loop.call_later(_JOURNAL_RETRY, self._flush)
            return
        if self._loop is not None:
            self._wrote = self._loop.time()
        self.metrics.count("journal_writes")
        self.metrics.count("journal_seconds", time.perf_counter() - started)
        self._dirty = set()
        self._dirty_faults = {}
        self._flushed = None
        outbox, self._outbox = self._outbox, []
        for job_id, effect in outbox:
            try:
                self._do(job_id, effect)
            except Exception:
                log.exception("job %s: %s failed", job_id, type(effect).__name__)
        if done is not None and not done.done():
            done.set_result(None)

    def _do(self, job_id: str, effect: m.Effect) -> None:
        entry = self.entries.get(job_id)
        if isinstance(effect, m.Send | m.Tell):
            if entry is None or entry.subscriber is None:
                return
            signal = effect.signal
            if isinstance(effect, m.Send):
                if entry.job.open is None or entry.job.open.key != signal.key:
                    return  # overtaken within the same batch
                again = effect.again
                entry.subscriber.put(wire.signal(job_id, signal, again), signal.key)
            else:
                again = False
                entry.subscriber.put(wire.signal(job_id, signal))
            entry.subscriber.spoke = self.now()
            self.metrics.count("signals", type=signal.key.signal, again=str(again).lower())
        elif isinstance(effect, m.ToWorkers):
            if entry is not None:
                data = worker_order(job_id, effect.maintenance)
                for feed in entry.workers.get(effect.maintenance.kind, ()):
                    feed.put(data)
        elif isinstance(effect, m.ToOperator):
            if entry is not None:
                data = operator_answer(job_id, effect)
                for feed in entry.operators.pop(effect.kind, []):
                    feed.put(data)
                    feed.close()
        elif isinstance(effect, m.ResetFile):
            if self._reset is not None:
                try:
                    self._reset.write(job_id, effect.operation, effect.ranks, effect.in_place)
                except OSError as error:
                    log.error("job %s: reset.json cannot be written: %s", job_id, error)
                    self.metrics.count("reset_file_errors")
        elif isinstance(effect, m.Record):
            self._note(job_id, effect)

    def _note(self, job_id: str, effect: m.Record) -> None:
        data = dict(effect.data)
        if effect.kind == "episode.end":
            self.metrics.count("episodes", outcome=str(data["outcome"]))
            self.metrics.count("episode_seconds", float(data["seconds"]))  # type: ignore[arg-type]
        elif effect.kind == "strategy.chosen":
            self.metrics.count("strategies", chosen=str(data["strategy"]))
        if log.isEnabledFor(logging.INFO):
            log.info("job %s: %s %s", job_id, effect.kind, json.dumps(data, default=str))
        if self._record is not None:
            self._record(effect.kind, job=job_id, **data)

    # ---------------------------------------------------------------- timers

    def _arm(self, job_id: str, entry: Entry) -> None:
        at = due(entry.job)
        if at == entry.timer:
            return
        entry.timer = at
        if at is None:
            return
        heapq.heappush(self._timers, (at, job_id))
        if self._timers[0] == (at, job_id):
            self._set_timer()

    def _set_timer(self) -> None:
        assert self._loop is not None
        if self._timer_handle is not None:
            self._timer_handle.cancel()
            self._timer_handle = None
        if self._timers:
            delay = max(0.0, self._timers[0][0] - self.now())
            self._timer_handle = self._loop.call_later(delay, self._fire)

    def _fire(self) -> None:
        self._timer_handle = None
        now = self.now()
        while self._timers and self._timers[0][0] <= now:
            at, job_id = heapq.heappop(self._timers)
            entry = self.entries.get(job_id)
            if entry is None or entry.timer != at:
                continue  # an older alarm
            entry.timer = None
            late = entry.job.node_deadline is not None and entry.job.node_deadline <= now
            self.apply(entry, m.NodeTimeout() if late else m.Timeout())
            self._arm(job_id, entry)
        if len(self._timers) > 64 and len(self._timers) > 4 * len(self.entries):
            live = ((e.timer, j) for j, e in self.entries.items() if e.timer is not None)
            self._timers = [(at, j) for at, j in live if at is not None]
            heapq.heapify(self._timers)
        self._set_timer()

    async def _keep_alives(self) -> None:
        loop = asyncio.get_running_loop()
        beats = self._beats
        while True:
            # Those due within a moment go together; a few at a time, so that nobody waits
            # behind them. A new subscriber that is due first ends the wait.
            self._beat = loop.create_future()
            wait = max(0.0, beats[0][0] - self.now()) + _BEAT_MOMENT if beats else None
            await asyncio.wait({self._beat}, timeout=wait)
            now, few = self.now(), _BEAT_BATCH
            if len(beats) > 64 + 4 * self._streams:
                beats[:] = [b for b in beats if b[2].end is None]
                heapq.heapify(beats)
            while beats and beats[0][0] <= now and few:
                few -= 1
                _, number, subscriber = heapq.heappop(beats)
                if subscriber.end is not None:
                    continue
                if not subscriber.queue and now - subscriber.spoke >= subscriber.beat - 0.05:
                    subscriber.spoke = now
                    job_id = subscriber.owner[0]
                    entry = self.entries.get(job_id)
                    subscriber.put(wire.keep_alive(job_id, entry.job.uuid if entry else ""))
                heapq.heappush(beats, (subscriber.spoke + subscriber.beat, number, subscriber))

    async def _expire(self) -> None:
        expiry = self.options.idle_expiry
        while True:
            await asyncio.sleep(max(1.0, min(60.0, expiry / 4)))
            old = self.now() - expiry
            for job_id, entry in list(self.entries.items()):
                if (
                    entry.subscriber is None
                    and entry.job.state in (State.IDLE, State.SMALLER)
                    and entry.seen < old
                    and not any(entry.workers.values())
                ):
                    self.forget(job_id)
                    log.info("job %s: forgotten, nobody has asked for it", job_id)
            for job_id, entry in list(self.inited.items()):
                if entry.seen < old:
                    self._drop_inited(job_id)

    # ---------------------------------------------------------------- jobs

    def config_for(self, job_id: str, declared: dict[str, Any]) -> JobConfig:
        """What this job is configured as. Raises BadMessage."""
        return wire.config(declared, self.options.defaults, self.options.jobs.get(job_id, {}))

    def reconfigure(self, options: Options) -> None:
        """New options; each job's take effect at its next episode."""
        self.options = options
        for job_id, entry in self.entries.items():
            self.apply(entry, m.Configured(self.config_for(job_id, entry.declared)))

    def init(self, job_id: str, declared: dict[str, Any], peer: str) -> tuple[int, str]:
        """The Init call: (code, text)."""
        now = self.now()
        entry = self.entries.get(job_id) or self.inited.get(job_id)
        if entry is not None:
            entry.seen = now
            self._redeclare(entry, declared)
            return Code.OK, f"job(uid={job_id}) init success"
        if self.options.known_only and job_id not in self.options.jobs:
            return Code.JOB_UNKNOWN_YET, f"job {job_id} is not in the jobs file (yet); ask again"
        config = self.config_for(job_id, declared)
        if not config.enabled and config.sub_healthy != "hotSwitch":
            return Code.RECOVER_OFF, f"recovery is switched off for job {job_id}"
        if len(self.inited) >= self.options.max_jobs:
            return Code.JOB_UNKNOWN_YET, "too many jobs that never registered; ask again"
        if self._per_peer.get(peer, 0) >= self.options.max_jobs_per_peer:
            return Code.JOB_UNKNOWN_YET, f"{peer} has too many jobs; let some end first"
        entry = Entry(Job(job_id, config), False, now, peer)
        entry.declared = declared
        self.inited[job_id] = entry
        self._per_peer[peer] = self._per_peer.get(peer, 0) + 1
        return Code.OK, f"job(uid={job_id}) init success"

    async def register(self, job_id: str, declared: dict[str, Any]) -> tuple[int, str]:
        """The Register call: (code, text)."""
        now = self.now()
        entry = self.entries.get(job_id)
        gone = self.options.known_only and job_id not in self.options.jobs
        if entry is not None:
            if gone:
                return Code.JOB_NOT_EXIST, f"job {job_id} is no longer in the jobs file"
            entry.seen = now
            self._redeclare(entry, declared)
            return Code.OK, "register success"
        entry = self.inited.get(job_id)
        if entry is None:
            return Code.NOT_INITIALISED, f"job {job_id} has not called Init"
        if gone:
            self._drop_inited(job_id)
            return Code.JOB_NOT_EXIST, f"job {job_id} is no longer in the jobs file"
        if len(self.entries) >= self.options.max_jobs:
            return Code.TOO_MANY_JOBS, f"{self.options.max_jobs} jobs are served already"
        self._redeclare(entry, declared)
        del self.inited[job_id]
        entry.registered = True
        entry.seen = now
        # What is broken already is known, and is no reason to begin with a recovery.
        present = tuple(
            f for d in self.devices.values() for f in devices.on_job(entry.job.config, d)
        )
        entry.job = replace(entry.job, present=present)
        self.entries[job_id] = entry
        self._dirty.add(job_id)
        self._schedule()
        await self.settled()
        return Code.OK, "register success"

    def _redeclare(self, entry: Entry, declared: dict[str, Any]) -> None:
        if not declared or declared == entry.declared:
            return
        config = self.config_for(entry.job.job_id, declared)
        entry.declared = declared
        if entry.registered:
            self.apply(entry, m.Configured(config))
        else:
            entry.job = replace(entry.job, config=config)

    def _drop_inited(self, job_id: str) -> None:
        self._lessen(self.inited.pop(job_id).peer)

    def _lessen(self, peer: str) -> None:
        left = self._per_peer.get(peer, 0) - 1
        if left > 0:
            self._per_peer[peer] = left
        else:
            self._per_peer.pop(peer, None)

    def forget(self, job_id: str) -> bool:
        """Drops a job and its journal entry; False: there is none."""
        entry = self.entries.pop(job_id, None)
        if entry is None:
            return False
        self._lessen(entry.peer)
        if entry.subscriber is not None:
            entry.subscriber.close("the job was removed")
        for feeds in (*entry.workers.values(), *entry.operators.values()):
            for feed in feeds:
                feed.close("the job was removed")
        self._dirty.add(job_id)
        self._schedule()
        return True

    # ---------------------------------------------------------------- subscribers

    def subscribe(
        self,
        entry: Entry,
        identity: str,
        client: str = "",
        incarnation: int = 0,
        keyed: bool = False,
        beat: int = 0,
    ) -> Subscriber | str:
        """A new owner of the job's signals; a text says why not.

        The newer owner wins, the older one is told and is kept out while the newer lives.
        Between clients of ours the greater incarnation is the newer; an original client is
        known by its connection.
        """
        now = self.now()
        entry.seen = now
        old = entry.subscriber
        if self._streams >= self.options.max_streams:
            return f"{self.options.max_streams} streams are open already"
        if old is not None and old.owner[1] != identity:
            if keyed and old.keyed and incarnation < old.incarnation:
                return (
                    f"superseded: {old.client} (incarnation {old.incarnation}) holds job "
                    f"{entry.job.job_id} and is newer"
                )
            if identity in entry.refused:
                return f"superseded: a newer client holds job {entry.job.job_id}"
            entry.refused.add(old.owner[1])
            if len(entry.refused) > 16:
                entry.refused = {old.owner[1]}
        if old is not None:
            same = old.owner[1] == identity
            old.close(
                "replaced by a newer stream of the same client"
                if same
                else f"superseded: {client or identity} holds job {entry.job.job_id} now"
            )
        interval = self.options.keep_alive if beat == 0 else float(max(0, min(beat, 300)))
        new = Subscriber((entry.job.job_id, identity), client, incarnation, keyed, interval)  # type: ignore[arg-type]
        new.spoke = now
        self._subscriptions += 1
        if interval > 0:
            heapq.heappush(self._beats, (now + interval, self._subscriptions, new))
            first = self._beats[0][2] is new
            if first and self._beat is not None and not self._beat.done():
                self._beat.set_result(None)
        self._streams += 1
        entry.subscriber = new
        self.apply(entry, m.Subscribed(client or identity, incarnation, keyed))
        return new

    def unsubscribe(self, entry: Entry, subscriber: Subscriber) -> None:
        """The stream has ended."""
        self._streams -= 1
        if subscriber.end is None:
            subscriber.end = ""  # its keep-alives end too
        if entry.subscriber is subscriber:
            entry.subscriber = None
            entry.refused.clear()
            entry.seen = self.now()
            if not self.closing:
                self.apply(entry, m.Unsubscribed())

    def delivered(self, entry: Entry, key: m.Key) -> None:
        """A signal was handed to the transport, or acknowledged."""
        self.apply(entry, m.Delivered(key))

    def listen(self, feeds: dict[str, list[Feed]], kind: str) -> Feed:
        """A stream of the worker or operator side."""
        feed = Feed()
        feeds.setdefault(kind, []).append(feed)
        return feed

    # ---------------------------------------------------------------- devices

    def device_fault(self, fault: devices.DeviceFault) -> bool:
        """A device is broken. False: there are too many faults already."""
        key = fault.key
        if self._cancel_clear(key):
            pass  # it came back before it was taken off
        if key in self.devices:
            if self.devices[key] == fault:
                return True
        elif len(self.devices) >= self.options.max_faults:
            return False
        self.devices[key] = fault
        body = {name: getattr(fault, name) for name in fault.__dataclass_fields__}
        self._dirty_faults[key] = json.dumps(body)
        self._schedule()
        for entry in list(self.entries.values()):
            if found := devices.on_job(entry.job.config, fault):
                self.apply(entry, m.FaultSeen(found))
        self._tell_fault_feeds(fault)
        return True

    def clear_device(self, key: str, after: float = 0.0) -> bool:
        """A device works again, now or in ``after`` seconds. False: it was not known."""
        if key not in self.devices:
            return False
        if after > 0:
            assert self._loop is not None
            self._cancel_clear(key)
            self._later[key] = self._loop.call_later(after, self.clear_device, key)
            return True
        self._cancel_clear(key)
        fault = self.devices.pop(key)
        self._dirty_faults[key] = None
        self._schedule()
        for entry in list(self.entries.values()):
            if any(f.source == key for f in entry.job.present):
                self.apply(entry, m.FaultCleared(key))
        self._tell_fault_feeds(fault)
        return True

    def _cancel_clear(self, key: str) -> bool:
        handle = self._later.pop(key, None)
        if handle is not None:
            handle.cancel()
        return handle is not None

    def faults_of(self, config: JobConfig) -> list[devices.DeviceFault]:
        """The device faults on a job's nodes."""
        return [d for d in self.devices.values() if _touches(config, d)]

    def fault_feed(self, job_id: str, role: str) -> FaultFeed | None:
        """The stream registered for this job and role."""
        return self._fault_feeds.get((job_id, role))

    def register_fault_feed(self, job_id: str, role: str) -> FaultFeed:
        """A new publisher; the old one of the same job and role ends."""
        if old := self._fault_feeds.get((job_id, role)):
            old.close()
        feed = FaultFeed(job_id, role)
        self._fault_feeds[job_id, role] = feed
        return feed

    def drop_fault_feed(self, feed: FaultFeed) -> None:
        """Its stream has ended."""
        if self._fault_feeds.get((feed.job_id, feed.role)) is feed:
            del self._fault_feeds[feed.job_id, feed.role]

    @property
    def fault_feeds(self) -> int:
        return len(self._fault_feeds)

    def _tell_fault_feeds(self, changed: devices.DeviceFault) -> None:
        if not self._fault_feeds:
            return
        touched = [
            (job_id, entry)
            for job_id, entry in self.entries.items()
            if _touches(entry.job.config, changed)
        ]
        for feed in list(self._fault_feeds.values()):
            for job_id, entry in touched:
                if feed.job_id in (job_id, "-1"):
                    feed.show(job_id, self.faults_of(entry.job.config), entry.job.config)
            if feed.job_id == "-1" and not touched:
                feed.show("-1", list(self.devices.values()), None)


class FaultFeed(Feed):
    """A stream of the Fault service."""

    __slots__ = ("job_id", "last", "role", "started")

    def __init__(self, job_id: str, role: str) -> None:
        super().__init__(limit=1000)
        self.job_id = job_id
        self.role = role
        self.started = False
        self.last: dict[str, bytes] = {}

    def show(
        self, job_id: str, faults: Iterable[devices.DeviceFault], config: JobConfig | None
    ) -> None:
        """Queues the present picture unless it was the last one sent."""
        picture, data = fault_signal(job_id, list(faults), config)
        if self.started and self.last.get(job_id) != picture:
            self.last[job_id] = picture
            self.put(data)


def _touches(config: JobConfig, fault: devices.DeviceFault) -> bool:
    return any(
        (fault.node_name and fault.node_name == n.name) or (fault.node_sn and fault.node_sn == n.sn)
        for n in config.nodes
    )


def worker_order(job_id: str, maintenance: m.Maintenance) -> bytes:
    """The order for the workers' stream."""
    if maintenance.kind == "nic":
        return pb.SwitchRankList(
            rankID=maintenance.ranks, op=maintenance.ops, jobId=job_id
        ).SerializeToString()
    return pb.StressTestRankParams(
        stressParam={rank: pb.StressOpList(ops=ops) for rank, ops in maintenance.stress},
        jobId=job_id,
    ).SerializeToString()


def operator_answer(job_id: str, effect: m.ToOperator) -> bytes:
    """The end of a maintenance, for whoever asked for it."""
    if effect.kind == "nic":
        return pb.SwitchNicResponse(jobID=job_id, msg=effect.message).SerializeToString()
    return pb.StressTestResponse(jobID=job_id, msg=effect.message).SerializeToString()
