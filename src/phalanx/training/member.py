"""One rank's part in a generation: leaving one, coming together in the next, repair.

`Member` holds what a rank has and knows; `phalanx.training.session.Job` adds the program's side
and keeps the books of each step.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed

from phalanx.process.page import ProgressPage
from phalanx.process.slate import Slate
from phalanx.recovery.ladder import Kind
from phalanx.recovery.repair import Holding, Origin, Plan, choose
from phalanx.training import codec, rng, state
from phalanx.training.abort import main_thread_ticks
from phalanx.training.checkpoint import Checkpoints
from phalanx.training.faults import classify
from phalanx.training.groups import Fabric, size_can_change
from phalanx.training.link import NEVER, AgentGone, Dump, Join, Link, NoWord
from phalanx.training.wrappers import LayoutMismatch, Wrappers

log = logging.getLogger("phalanx.training")
dist: Any = torch.distributed

NOTHING = -(1 << 40)  # in a row of numbers: none
_ROW = 9
_SLATE_BYTES = 64 << 10
_MOST_TRIES = 100
_STUCK_SECONDS = 3.0


class LostState(RuntimeError):
    """No rank, snapshot or checkpoint holds a whole state to go on with."""


@dataclass
class Recovery:
    """One recovery, as this rank saw it. Times in seconds since the fault was known here."""

    generation: int
    origin: str = Origin.NONE.value
    source: int | None = None
    holder: str = ""  # the node that held this rank's snapshot, if it was another
    step: int = -1
    lost_steps: int = 0
    why: str = ""
    local_state: str = ""
    bytes: int = 0
    times: dict[str, float] = field(default_factory=dict)


class OpenStep(Protocol):
    """What a member knows of the step that is open or was interrupted."""

    done: bool

    def __int__(self) -> int: ...


class Member:
    """What one rank holds, and how it comes to hold what the others do."""

    def __init__(
        self,
        rank: int,
        world: int,
        generation: int,
        checkpoints: Checkpoints | None,
        decision_timeout: float,
    ) -> None:
        self.rank = rank
        self.world = world
        self.generation = generation
        self.local_rank = int(os.environ.get("LOCAL_RANK", str(rank)))
        #: whether this process replaces another and has not been let in yet
        self.joining = False
        #: the recoveries this rank has been through
        self.recoveries: list[Recovery] = []
        self._decision_timeout = decision_timeout
        self._link: Link | None = None
        self._page: ProgressPage | None = None
        self._fabric: Fabric | None = None
        self._protected = state.Protected()
        self._replicas: Sequence[Sequence[int]] | None = None
        self._rebuild: Callable[[], None] | None = None
        self._wrappers = Wrappers([])
        self._guard: state.BufferGuard | None = None
        self._slate: Slate | None = None
        self._snapshots: Slate | None = None
        self._sent_copy = NEVER  # the snapshot that the agent was told of last
        self._kept: dict[str, int] = {}
        self._checkpoints = checkpoints
        self._finished: int | None = None  # last finished step; None: no state yet
        self._main_ticks = -1  # what the main thread had used when it was last seen to move
        self._main_since = 0.0
        self._in_step = False  # the main thread is inside a step's block
        self._whole = True  # False while state is being received
        self._current: OpenStep | None = None
        self._grads_none = True
        self._updates = 0
        self._update_open = False
        self._elastic = "off"
        self._on_resize: Callable[[int, int], None] | None = None
        # The size of the world that the state in memory is made for (see `_resized`), and since
        # which generation.
        self._fits = (NOTHING, NOTHING)
        self._interrupted = False
        self._own_error: BaseException | None = None
        self._recovery: Recovery | None = None
        self._fault_at = 0.0

    def _last(self) -> int:
        return -1 if self._finished is None else self._finished

    def _record(self, own_only: bool = False) -> list[bytes]:
        assert self._guard is not None
        return state.record(self._protected, self._guard, own_only=own_only)

    # -- leaving and coming together ----------------------------------------------------

    def _on_leave(self, generation: int) -> bool:
        """In the link's thread. True as long as the main thread is in that generation."""
        if self._fabric is None or self._fabric.generation > generation:
            return False
        self._fabric.cut(generation)
        inside = self._in_step and self._fabric.condition == "broken"
        if inside:
            self._watch_main_thread()
        return inside

    def _watch_main_thread(self) -> None:
        """Give this process up when its main thread stays in a collective that was cut.

        A send that meets the death of its peer before gloo's own thread does is forgotten by gloo
        and blocks until the time limit of the group. Nothing gets a thread out of that, so the
        process ends; the agent replaces it like any that died.
        """
        now, ticks = time.monotonic(), main_thread_ticks()
        if ticks < 0 or ticks != self._main_ticks or not self._main_in_torch():
            self._main_ticks, self._main_since = ticks, now
        elif now - self._main_since > _STUCK_SECONDS:
            sys.stderr.write(
                f"rank {self.rank}: a collective did not end {_STUCK_SECONDS:.0f} s after its "
                f"connections were cut; this process gives up and is replaced\n"
            )
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    @staticmethod
    def _main_in_torch() -> bool:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is None:
            return False
        path = frame.f_code.co_filename
        return f"{os.sep}torch{os.sep}" in path or __file__.rpartition(os.sep)[0] in path

    def _recover(self) -> None:
        link, fabric = self._link, self._fabric
        assert link is not None and fabric is not None
        if self._page is not None:
            self._page.beat(phase="recover")
        self._recovery = Recovery(self.generation)
        if not self._interrupted:
            self._fault_at = link.heard_leave
        fabric.cut(self.generation)
        self._rest()
        self._mark("left")
        self._say_left()
        self._come_together(connected=False, first=False)

    def _say_left(self) -> None:
        assert self._link is not None
        self._link.say(
            "left",
            generation=max(self.generation, self._link.left),
            step=self._last(),
            clean=self._clean(),
            shard=self._shard(),
            shards=self._protected.shards(self.world, self._replicas),
        )

    def _mark(self, name: str) -> None:
        if self._recovery is not None:
            self._recovery.times[name] = round(time.monotonic() - self._fault_at, 6)

    def _rest(self) -> None:
        """Everything that the broken step left half way is brought to idle."""
        assert self._fabric is not None
        if self._rebuild is None:
            self._wrappers.rest(self._fabric)
        if self._interrupted and not (self._current is not None and self._current.done):
            for parameter in self._protected.parameters():
                if parameter.grad is not None:
                    if self._grads_none:
                        parameter.grad = None
                    else:
                        parameter.grad.zero_()

    def _clean(self) -> bool:
        """Whether memory holds the whole state after the last finished step."""
        if not self._whole or self._finished is None:
            return False
        if not self._interrupted or self._current is None or self._current.done:
            return True
        if self._updates or self._update_open:
            return False
        assert self._guard is not None
        return self._guard.covers(self._protected.models.values())

    def _come_together(self, *, connected: bool, first: bool) -> None:
        """Until this rank is in a generation whose members all hold the same step."""
        link, fabric = self._link, self._fabric
        assert link is not None and fabric is not None
        lost = ""
        for _ in range(_MOST_TRIES):
            try:
                if not connected:
                    self._take(self._word(lost))
                    connected = True
                self._mark("regrouped")
                self._repair(first)
                self._mark("restored")
                self._interrupted = False
                self._own_error = None
            except LostState as error:
                lost = str(error)
                link.fault(self.generation, Kind.LOST_STATE.value, lost, self._last())
            except RuntimeError as error:
                if isinstance(error, (AgentGone, NoWord)):
                    raise self._own_error or error from None
                if not link.over(self.generation):
                    kind = classify(error)
                    word = kind if kind is Kind.PEER else Kind.REGROUP
                    link.fault(self.generation, word.value, text_of(error), self._last())
            except SystemExit:
                if self._own_error is not None:
                    raise self._own_error from None
                raise
            else:
                self._resized()
                return
            connected = False
            first = False
            fabric.cut(self.generation)
            self._say_left()
            if self._recovery is None:
                self._recovery = Recovery(self.generation)
        raise LostState(f"the ranks did not come together in {_MOST_TRIES} tries")

    def _word(self, lost: str) -> Join:
        assert self._link is not None
        beyond = self.generation - 1 if self.joining else self.generation
        # Who waits to be let in for the first time may be a standby: that takes as long as
        # nothing happens.
        limit = None if self.joining else self._decision_timeout
        while isinstance(join := self._link.await_word(beyond, limit), Dump):
            self._dump(join)
        if self.joining and (seat := self._link.seat()) is not None:
            seat.sit()
            self.local_rank = int(os.environ.get("LOCAL_RANK", str(join.rank)))
        if (join.rank, join.world) != (self.rank, self.world) and (
            why := self._assume(join.rank, join.world)
        ):
            raise LostState(
                f"called as rank {join.rank} of {join.world}, but this process was built as rank "
                f"{self.rank} of {self.world}: {why}"
            )
        if self._slate is None:
            self._kept = self._link.await_kept(0.0)
            self._open_slates()
        if self._recovery is None:
            self._recovery = Recovery(join.generation)
            self._fault_at = time.monotonic()
        return join

    def _fixed(self) -> str:
        """What binds this process to the rank and the world it was built for; "": nothing."""
        if self._fabric is None:
            return "there is no agent"
        if any(group.members for group in self._fabric.groups.values()):
            return "it has groups of its own making (new_group, a mesh)"
        if any(state._is_dtensor(parameter) for parameter in self._protected.parameters()):
            return "its parameters are sharded"
        if self._replicas is not None:
            return "protect(replicas=...) names ranks"
        return ""

    def _any_rank(self) -> bool:
        """Whether this process, as it was built, could be any rank: nothing in it depends on it
        (a device is chosen by the local rank).
        """
        on_cpu = all(p.device.type == "cpu" for p in self._protected.parameters())
        return on_cpu and not self._fixed()

    def _inelastic(self) -> str:
        """Why it cannot go on as another rank in a world of another size; "": it can."""
        if self._elastic == "off":
            return 'session(elastic="off")'
        if not size_can_change():
            return f"the process groups of torch {torch.__version__} keep their size"
        return self._fixed()

    def _assume(self, rank: int, world: int) -> str:
        """Become ``rank`` of ``world``. Returns why this process cannot; "": it is."""
        assert self._fabric is not None
        same = world == self.world and self.joining
        if why := self._fixed() if same else self._inelastic():
            return why
        if not self._fabric.assume(rank, world):
            return "its groups are connected"
        before, self.rank, self.world = self.world, rank, world
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
        self._protected.assume(rank, world, before)
        if world != before and self._rebuild is None:
            self._wrappers.resize(self._fabric)
        return ""

    def _open_slates(self) -> None:
        """What earlier processes of this rank have kept, or fresh memory."""
        assert self._link is not None
        self._slate = _attach(self._kept.pop("slate", -1))
        if self._slate is None:
            self._slate = Slate.create(f"phalanx-slate-{self.rank}", _SLATE_BYTES)
            self._link.say("keep", (self._slate.fd,), name="slate", size=self._slate.size)
        self._snapshots = _attach(self._kept.pop("snapshots", -1))
        for rest in self._kept.values():
            os.close(rest)
        self._kept.clear()

    def _shard(self) -> int:
        return self._protected.shard(self.rank, self.world, self._replicas)

    def _dump(self, order: Dump) -> None:
        """Write this rank's part of a last checkpoint, or give the whole its name. With no word
        to any other rank: they may be dead."""
        assert self._link is not None and self._guard is not None
        if self._page is not None:
            self._page.beat(step=max(0, self._last()), phase="checkpoint")
        text = ""
        records = {rank: _read(fd, order.step + 1) for rank, fd in order.records.items()}
        try:
            if self._checkpoints is None:
                raise LostState("no checkpoint directory was given to session()")
            if not order.commit:
                self._checkpoints.dump_records(order.step, order.generation, records)
            if order.commit:
                self._checkpoints.commit_dump(order.step, order.generation, self.world)
            elif self._clean() and self._last() == order.step:
                self._put_back(order.step + 1)
                shard = self._shard() if self.rank in order.writers else None
                self._checkpoints.dump(
                    order.step,
                    order.generation,
                    self._protected,
                    self._guard,
                    self.rank,
                    shard,
                    self._extra(),
                )
            elif self.rank in order.writers:
                raise LostState(f"this rank does not hold step {order.step}")
        except (OSError, RuntimeError) as error:
            text = text_of(error)
        self._link.say(
            "dumped",
            generation=order.generation,
            step=order.step,
            commit=order.commit,
            complete=not text,
            text=text,
            path=str(self._checkpoints.path) if self._checkpoints else "",
        )

    def _take(self, join: Join) -> None:
        assert self._fabric is not None and self._link is not None
        self.joining = False
        self.generation = join.generation
        assert self._recovery is not None
        self._recovery.generation = join.generation
        self._mark("joined")
        if self._page is not None:
            self._page.beat(generation=join.generation)
        self._fabric.connect(join.generation, join.store)

    # -- repair ---------------------------------------------------------------------------

    def _repair(self, first: bool) -> None:
        fabric = self._fabric
        assert fabric is not None
        group = dist.group.WORLD
        rows = self._rows(group)
        fits = _fitting(rows)
        plan = choose([_holding(rank, row, fits[1]) for rank, row in enumerate(rows)])
        if plan.origin is Origin.NONE:
            raise LostState(plan.why)
        note = self._recovery
        if note is not None:
            note.origin, note.step, note.lost_steps = plan.origin.value, plan.step, plan.lost
            note.why, note.source = plan.why, plan.source_of(self.rank)
            if self.rank in plan.load and self._link is not None:
                note.holder = self._link.holder
        saved = self._restore(group, plan)
        if plan.origin is not Origin.REPLICA and self._elastic != "off":
            fits = (self.generation - 1, self._saved_world(group, plan, saved))
        self._fits = fits
        self._protected.redeal()
        if not (plan.origin is not Origin.REPLICA and self._saved_layouts(group, plan, saved)):
            self._agree_layouts(group, rows)
        if self._rebuild is not None and not first:
            self._rebuild()
        if first and self._slate is not None:
            self._slate.erase()  # of an earlier start of the whole group
        if self._snapshots is not None:
            # Later ones are of a past that did not happen.
            self._snapshots.forget_after(plan.step)
            self._say_snapshot(plan.step, back=True)

    def _say_snapshot(self, step: int, *, back: bool) -> None:
        """For the agent, which has a copy of it made at another node, and says ``copied`` then.
        ``back``: those of later steps are void."""
        if os.environ.get("PHALANX_COPIES") == "1" and self._link is not None and self._apart():
            self._sent_copy = step
            self._link.say("snapshot", generation=self.generation, step=step, back=back)

    def _apart(self) -> bool:
        """Whether the ranks hold different parts of the state. Else it is on other nodes anyway."""
        return self.world > 1 and self._protected.shards(self.world, self._replicas) > 1

    def _copies_travel(self) -> bool:
        """Whether some rank's last snapshot is still on its way. The same on all ranks, whose
        agents may have been started with different options."""
        assert self._link is not None
        travels = torch.tensor([int(self._link.copied != self._sent_copy)])
        dist.all_reduce(travels, op=dist.ReduceOp.MAX)
        return bool(travels.item())

    def _rows(self, group: Any) -> list[list[int]]:
        """What every rank holds."""
        steps = sorted(self._snapshots.steps()) if self._snapshots is not None else []
        snapshots = [*steps, NOTHING, NOTHING][:2]
        newest = self._checkpoints.newest() if self._checkpoints is not None else None
        mine = torch.tensor(
            [
                self._shard(),
                NOTHING if self._finished is None or not self._whole else self._finished,
                int(self._clean()),
                snapshots[0],
                snapshots[1],
                NOTHING if newest is None else newest,
                self._layout_mark(),
                *self._fits,
            ],
            dtype=torch.int64,
        )
        rows = [torch.zeros(_ROW, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(rows, mine, group=group)
        return [row.tolist() for row in rows]

    def _restore(self, group: Any, plan: Plan) -> Any:
        """Bring this rank to the start of the step after ``plan.step``. Returns what else was
        saved in a snapshot or checkpoint."""
        begin = plan.step + 1
        if plan.origin is Origin.CHECKPOINT:
            assert self._checkpoints is not None and self._guard is not None
            self._whole = False
            saved = self._checkpoints.load(
                plan.step,
                self._protected,
                self._guard,
                self.rank,
                self._shard(),
                self._own_part(begin),
            )
            self._set(plan.step)
            return saved
        mine = self._own_part(begin)
        loaded: bytes | None = None
        saved = None
        if self.rank in plan.load:
            assert self._snapshots is not None
            self._whole = False
            loaded, saved = state.load_snapshot(self._snapshots, plan.step, self._protected)
            self._set(plan.step)
            self._put_small(loaded)
        receives = plan.source_of(self.rank)
        sends = plan.receivers_of(self.rank)
        if receives is None and loaded is None:
            self._put_back(begin)
        if sends:
            extra = {
                "small": self._protected.small_state(),
                "random": rng.capture(),
                "step": plan.step,
            }
            sent = state.send(group, sends, self._protected, extra)
            if self._recovery is not None:
                self._recovery.bytes = sent * len(sends)
        if receives is not None:
            self._whole = False
            assert self._guard is not None
            live = None
            if mine is None and self._finished is not None and self._current is not None:
                # One step behind, cut off after its last collective: what is this rank's own has
                # moved on as far as it does in that step.
                live = self._guard.save()
            extra = state.receive(group, receives, self._protected)
            if extra["step"] != plan.step:
                raise LostState(f"rank {receives} handed over step {extra['step']}")
            self._take_small(extra, mine, live, receives)
            self._set(plan.step)
        return saved

    def _set(self, step: int) -> None:
        self._finished = step
        self._whole = True
        self._interrupted = False
        self._current = None
        self._guard = state.BufferGuard(self._protected.models.values())

    def _own_part(self, begin: int) -> bytes | None:
        """This rank's own record for the start of step ``begin``, to be put over what a replica
        gives; None: what is in memory now is right (it has done all but the update)."""
        assert self._slate is not None
        record = self._slate.read(begin)
        if record is None:
            return None
        return record[0]

    def _put_back(self, begin: int) -> None:
        """A clean rank that stays with its own tensors: to the start of the step."""
        if self._current is None or self._current.done or int(self._current) != begin:
            return
        if not self._interrupted:
            return
        assert self._slate is not None
        record = self._slate.read(begin)
        if record is None or record[1] != state.BEGIN:
            raise LostState(f"the record of the start of step {begin} is gone")
        self._put_small(record[0])

    def _put_small(self, body: bytes) -> None:
        assert self._guard is not None
        random, small, buffers = state.split_record(body)
        self._guard.load(buffers)
        self._protected.load_small(small)
        rng.restore(random)

    def _take_small(
        self, extra: dict[str, Any], mine: bytes | None, live: bytes | None, source: int
    ) -> None:
        """Small state of a rank that got its tensors from another."""
        assert self._guard is not None
        given = extra["small"]
        if live is not None:
            self._guard.load(live)
            self._protected.load_small({**given, "own": {}})
            self._note_local("live")
            return
        if mine is not None:
            random, small, buffers = state.split_record(mine)
            self._guard.load(buffers)
            self._protected.load_small({**given, "own": small.get("own", {})})
            rng.restore(random)
            self._note_local("kept")
            return
        # Nobody knows this rank's own random states: make them from the source's and the rank.
        self._protected.load_small(given)
        rng.restore(extra["random"])
        seed = int(torch.randint(1 << 31, (1,)).item()) ^ (self.rank << 8)
        torch.manual_seed(seed)
        self._note_local("derived")
        log.warning(
            "random states of rank %d are lost; made anew from rank %d's", self.rank, source
        )

    def _saved_world(self, group: Any, plan: Plan, saved: Any) -> int:
        """The size of the world that what was saved is from."""
        source = plan.load[0] if plan.load else 0
        mine = saved.get("world") if isinstance(saved, dict) else None
        text = _broadcast(group, source, self.rank, codec.pack(mine))
        world = codec.unpack(text)
        return world if isinstance(world, int) else self.world

    def _resized(self) -> None:
        """All ranks hold the same state: it is made to fit the size of the world, if it does not.
        Who comes to this later than others (another fault is between) gets their state."""
        before = self._fits[1]
        if before not in (NOTHING, self.world) and self._on_resize is not None:
            self._on_resize(before, self.world)
        self._fits = (self.generation, self.world)

    def _note_local(self, how: str) -> None:
        if self._recovery is not None:
            self._recovery.local_state = how

    def _saved_layouts(self, group: Any, plan: Plan, saved: Any) -> bool:
        """Take the bucket layouts that were saved with the state, so that sums are made in the
        same order as before. False if there are none, or this program's do not fit them."""
        if not self._wrappers.ddp or self._rebuild is not None:
            return False
        source = plan.load[0] if plan.load else 0
        text = b""
        if self.rank == source and saved and saved.get("layouts"):
            text = codec.pack(saved["layouts"])
        text = _broadcast(group, source, self.rank, text)
        return bool(text) and self._adopt_saved(codec.unpack(text))

    def _adopt_saved(self, layouts: Any) -> bool:
        try:
            self._wrappers.adopt(layouts, self._fabric)
        except LayoutMismatch as error:
            log.warning("DDP buckets are not those of the saved state: %s", error)
            return False
        return True

    def _extra(self) -> dict[str, Any]:
        """What is saved besides the state."""
        done = self._wrappers.ddp and self._wrappers.settled and self._rebuild is None
        return {
            "layouts": self._wrappers.layouts(self._fabric) if done else [],
            "world": self.world,
        }

    def _layout_mark(self) -> int:
        """A number for the bucket layouts of this rank's DDP wrappers; 0: they have not run a
        whole step yet. A step that broke off can leave some ranks with buckets in the order of
        execution and others still about to move there, so they are moved first."""
        if not self._wrappers.ddp or not self._wrappers.settled or self._rebuild is not None:
            return 0
        text = codec.pack(self._wrappers.layouts(self._fabric))
        return int.from_bytes(hashlib.sha256(text).digest()[:7], "big") | 1

    def _agree_layouts(self, group: Any, rows: list[list[int]]) -> None:
        """All DDP wrappers to one bucket layout: that of those who have run a step."""
        if not self._wrappers.ddp or self._rebuild is not None:
            return
        assert self._fabric is not None
        settled = [rank for rank, row in enumerate(rows) if row[6]]
        if len(settled) == self.world and len({row[6] for row in rows}) == 1:
            return
        if not settled:
            self._wrappers.renew(self._fabric)
            return
        source = settled[0]
        text = b""
        if self.rank == source:
            text = codec.pack(self._wrappers.layouts(self._fabric))
        text = _broadcast(group, source, self.rank, text)
        if self.rank == source:
            return
        self._wrappers.adopt(codec.unpack(text), self._fabric)

    def _say_good_step(self) -> None:
        note, self._recovery = self._recovery, None
        assert note is not None and self._link is not None
        note.times["stepped"] = round(time.monotonic() - self._fault_at, 6)
        self.recoveries.append(note)
        report = {
            "origin": note.origin,
            "source": note.source,
            "holder": note.holder,
            "step": note.step + 1,
            "lost_steps": note.lost_steps,
            "why": note.why,
            "local_state": note.local_state,
            "bytes": note.bytes,
            "times": note.times,
        }
        self._link.say("good_step", generation=self.generation, step=self._last(), report=report)
        log.info(
            "rank %d goes on at step %d in generation %d (%s)",
            self.rank,
            note.step + 1,
            self.generation,
            note.why,
        )


def _fitting(rows: list[list[int]]) -> tuple[int, int]:
    """Since which generation, and for which size of the world, the state is made that training
    goes on with: the newest of those that hold one."""
    held = [row for row in rows if row[1] != NOTHING and row[2]] or rows
    newest = max(held, key=lambda row: row[7])
    return newest[7], newest[8]


def _holding(rank: int, row: list[int], world: int) -> Holding:
    return Holding(
        rank=rank,
        shard=row[0],
        step=None if row[1] == NOTHING else row[1],
        clean=bool(row[2]) and row[8] == world,
        snapshots=frozenset(step for step in row[3:5] if step != NOTHING),
        checkpoint=None if row[5] == NOTHING else row[5],
    )


def _broadcast(group: Any, source: int, rank: int, text: bytes) -> bytes:
    """``text`` of rank ``source``, on all."""
    size = torch.tensor([len(text)], dtype=torch.int64)
    dist.broadcast(size, source, group=group)
    length = int(size.item())
    if not length:
        return b""
    data = torch.empty(length, dtype=torch.uint8)
    if rank == source:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    dist.broadcast(data, source, group=group)
    return data.numpy().tobytes()


def text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _read(fd: int, step: int) -> bytes | None:
    """The record of the start of ``step`` in the slate behind ``fd``, which is closed."""
    slate = _attach(fd)
    if slate is None:
        return None
    record = slate.read(step)
    slate.close()
    return None if record is None else record[0]


def _attach(fd: int) -> Slate | None:
    if fd < 0:
        return None
    try:
        return Slate.attach(fd)
    except ValueError as error:
        log.warning("memory kept for this rank cannot be used: %s", error)
        os.close(fd)
        return None
