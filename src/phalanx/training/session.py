"""The session: what a training program uses.

    with training.session() as job:
        model, optim, data = build(job)
        job.protect(model=model, optim=optim, data=data)
        for step in job.steps(total):
            with step:
                ...                     # forward, backward, optim.step()

A step that was interrupted comes again, from the state it began with. See docs/training.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from phalanx.process.channel import HELD
from phalanx.process.page import ProgressPage
from phalanx.recovery.ladder import RETRYABLE, Kind
from phalanx.recovery.repair import Holding, Origin, Plan, choose
from phalanx.training import codec, rng, state
from phalanx.training.checkpoint import Checkpoints
from phalanx.training.data import Batches
from phalanx.training.faults import classify
from phalanx.training.groups import BACKEND, Fabric, install
from phalanx.training.link import AgentGone, Dump, Join, Link, NoWord
from phalanx.training.slate import Slate
from phalanx.training.wrappers import LayoutMismatch, UnsupportedTorch, Wrappers, missing_names

log = logging.getLogger("phalanx.training")
dist: Any = torch.distributed

CAPABILITIES = ("leave", "join", "retry", "recover-in-place", "stop_at", "dump", "keep")
_NONE = -(1 << 40)
_ROW = 7
_SLATE_BYTES = 64 << 10
_MOST_TRIES = 100


class LostState(RuntimeError):
    """No rank, snapshot or checkpoint holds a whole state to go on with."""


class Step(int):
    """The number of a step, and the block that does it: ``with step: ...``."""

    #: whether the step is finished; false when it was interrupted and will come again
    done: bool
    _job: Job

    def __new__(cls, number: int, job: Job) -> Step:
        step = super().__new__(cls, number)
        step._job = job
        step.done = False
        return step

    def __enter__(self) -> Step:
        self._job._begin(self)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        return self._job._leave(self, error)


@dataclass
class Recovery:
    """One recovery, as this rank saw it. Times in seconds since the fault was known here."""

    generation: int
    origin: str = Origin.NONE.value
    source: int | None = None
    step: int = -1
    lost_steps: int = 0
    why: str = ""
    local_state: str = ""
    bytes: int = 0
    times: dict[str, float] = field(default_factory=dict)


class Job:
    """See `session`."""

    def __init__(
        self,
        *,
        backend: str | None,
        timeout: float,
        checkpoint: str | os.PathLike[str] | None,
        checkpoint_every: int,
        keep_checkpoints: int,
        snapshot_every: int | None,
        regroup_timeout: float,
        decision_timeout: float,
    ) -> None:
        self._timeout = timedelta(seconds=timeout)
        self._decision_timeout = decision_timeout
        self._backend = backend
        self._snapshot_every = snapshot_every
        self._regroup_timeout = regroup_timeout
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", str(self.rank)))
        self.generation = int(os.environ.get("PHALANX_GENERATION", "1"))
        #: whether this process replaces another and has not been let in yet
        self.joining = False
        #: whether the loop ended because the agent asked for it
        self.stopped = False
        #: the recoveries this rank has been through
        self.recoveries: list[Recovery] = []
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
        self._kept: dict[str, int] = {}
        self._checkpoints: Checkpoints | None = None
        if checkpoint is not None:
            self._checkpoints = Checkpoints(checkpoint, keep=keep_checkpoints)
        self._checkpoint_every = checkpoint_every
        self._finished: int | None = None  # last finished step; None: no state yet
        self._finished_here = 0  # steps that this process has finished
        self._whole = True  # False while state is being received
        self._current: Step | None = None  # the step that is open or was interrupted
        self._grads_none = True
        self._updates = 0
        self._update_open = False
        self._after_written = False
        self._updates_per_step = 0
        self._interrupted = False
        self._own_error: BaseException | None = None
        self._recovery: Recovery | None = None
        self._fault_at = 0.0
        self._in_loop = False
        self._hooks: list[Any] = []
        self._schedules: dict[str, tuple[int, int]] = {}

    # -- opening and closing ---------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where this rank computes: its accelerator if there is one, else the CPU."""
        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank % torch.cuda.device_count())
        return torch.device("cpu")

    @property
    def recoverable(self) -> bool:
        """Whether an agent is there that can replace ranks."""
        return self._link is not None

    def _open(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        link = Link.from_environment(self._on_leave)
        if link is None or dist.is_initialized():
            if link is not None:
                link.close()
                log.warning(
                    "the process group was made before session(): it cannot be exchanged, "
                    "so ranks are not recovered in place"
                )
            self._open_plain()
            return
        self._link = link
        self._page = ProgressPage.from_environment()
        if self._page is not None:
            if self._page.hold():
                link.say(HELD)
            self._page.beat(phase="start", generation=self.generation)
        self._fabric = Fabric(self.rank, self.world, connect_timeout=self._regroup_timeout)
        link.start()
        if os.environ.get("PHALANX_KEPT"):
            self._kept = link.await_kept(30.0)
        install(self._fabric)
        dist.init_process_group(
            BACKEND,
            store=dist.HashStore(),
            rank=self.rank,
            world_size=self.world,
            timeout=self._timeout,
        )
        self.joining = os.environ.get("PHALANX_JOIN") == "1"
        if not self.joining:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            self._fabric.connect(self.generation, where)

    def _open_plain(self) -> None:
        if not dist.is_initialized():
            backend = self._backend or ("nccl" if self.device.type == "cuda" else "gloo")
            if "MASTER_ADDR" in os.environ and "WORLD_SIZE" in os.environ:
                dist.init_process_group(backend, timeout=self._timeout)
            else:
                dist.init_process_group(
                    backend, store=dist.HashStore(), rank=0, world_size=1, timeout=self._timeout
                )
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()

    def _close(self, error: BaseException | None) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        link, self._link = self._link, None
        if link is not None:
            if isinstance(error, Exception) and error is not self._own_error:
                kind = classify(error)
                if kind is not Kind.PEER:
                    link.fault(self.generation, kind.value, _text(error), self._step_number())
            link.close()
        if dist.is_initialized():
            if self._fabric is not None:
                # Nobody waits for anybody here: a peer may be gone already.
                self._fabric.close()
                with contextlib.suppress(Exception):
                    dist.destroy_process_group()
            elif error is None:
                dist.destroy_process_group()
        for slate in (self._slate, self._snapshots):
            if slate is not None:
                slate.close()

    # -- what the program says ---------------------------------------------------

    def protect(
        self,
        *,
        replicas: Sequence[Sequence[int]] | None = None,
        each_rank: Iterable[str] = (),
        rebuild: Callable[[], None] | None = None,
        **things: Any,
    ) -> None:
        """Name what a replacement needs to go on: models, optimizers, schedulers, scalers,
        samplers, data, anything with ``state_dict`` and ``load_state_dict``.

        ``replicas``: groups of ranks that hold the same model and optimizer state (default:
        found; see `state.Protected.shard`). ``each_rank``: names of things whose state is each
        rank's own, not the same on all (default: samplers, loaders and `batches`).
        ``rebuild``: called after the groups have been rebuilt, on a torch whose wrappers cannot
        be brought back to idle; it must leave models and optimizers fit for a step.

        :raises TypeError: something that cannot be protected.
        :raises UnsupportedTorch: this torch needs ``rebuild``.
        """
        own = set(each_rank)
        if unknown := own - set(things):
            raise TypeError(f"each_rank names {sorted(unknown)}, which are not protected")
        for name, thing in things.items():
            self._protected.add(name, thing, True if name in own else None)
        if replicas is not None:
            self._replicas = replicas
        if rebuild is not None:
            self._rebuild = rebuild
        self._wrappers = Wrappers(list(self._protected.models.values()))
        if self._link is None:
            return
        for model in self._protected.models.values():
            if (missing := missing_names(model)) and self._rebuild is None:
                raise UnsupportedTorch(
                    f"torch {torch.__version__} lacks {', '.join(missing)}, so its wrappers cannot "
                    f"be brought back to idle after a fault: give protect(rebuild=...), or run "
                    f"without an agent"
                )
        for thing in things.values():
            if isinstance(thing, torch.nn.Module):
                self._hooks.append(thing.register_forward_hook(self._forward_ended))
            elif isinstance(thing, torch.optim.Optimizer):
                self._hooks.append(thing.register_step_pre_hook(self._update_begins))
                self._hooks.append(thing.register_step_post_hook(self._update_ends))

    def batches(self, loader: Iterable[Any], sampler: Any = None) -> Batches:
        """A protected endless run over ``loader``: `Batches`."""
        batches = Batches(loader, sampler, again=self._link is not None)
        name = f"batches{sum(isinstance(t, Batches) for t in self._protected.small.values())}"
        self._protected.add(name, batches)
        return batches

    # -- the loop ------------------------------------------------------------------

    def steps(self, total: int, start: int = 0) -> Iterator[Step]:
        """Steps ``start`` to ``total - 1``; an interrupted one comes again.

        ``start`` is where a state that the program has loaded itself goes on. A newer
        checkpoint of the session's own wins.
        """
        if self._in_loop:
            raise RuntimeError("steps() inside steps()")
        self._in_loop = True
        try:
            self._enter(start)
            while True:
                if self._must_recover():
                    self._recover()
                if self._last() + 1 >= total or self.stopped:
                    if self._end():
                        break
                    continue
                step = Step(self._last() + 1, self)
                self._current = None
                yield step
                if self._current is None:
                    raise RuntimeError("a step was not done: write `with step:` around its work")
        except GeneratorExit:
            self._say_finished()  # the program has broken off its loop
            raise
        else:
            self._say_finished()
        finally:
            self._in_loop = False

    def _say_finished(self) -> None:
        if self._link is not None:
            self._link.say("finished", step=self._last())

    @contextlib.contextmanager
    def phase(self, name: str = "evaluation") -> Iterator[None]:
        """Say what goes on outside of a step (evaluation, a long save), so that its silence is
        judged by the time limit of that phase and not by that of a step."""
        if self._page is not None:
            self._page.beat(phase=name)
        try:
            yield
        finally:
            if self._page is not None:
                self._page.beat(phase="between")

    def run(self, do: Callable[[int], Any], total: int, start: int = 0) -> None:
        """The same for programs whose loop is not a ``for``: ``do(step)`` for each step."""
        for step in self.steps(total, start):
            with step:
                do(int(step))

    def _last(self) -> int:
        return -1 if self._finished is None else self._finished

    def _step_number(self) -> int | None:
        return None if self._current is None else int(self._current)

    def _enter(self, start: int) -> None:
        link = self._link
        self._guard = state.BufferGuard(self._protected.models.values())
        if link is None:
            self._finished = start - 1
            if self._checkpoints is not None:
                self._resume_plain(start)
            return
        self._open_slates()
        # The state before the first step is one like any other: a newcomer gets it from others.
        self._finished = None if self.joining else start - 1
        link.say(
            "hello",
            generation=self.generation,
            rank=self.rank,
            capabilities=list(CAPABILITIES),
            waiting=self.joining,
        )
        self._fault_at = time.monotonic()
        self._come_together(connected=not self.joining, first=not self.joining)
        self.joining = False

    def _open_slates(self) -> None:
        assert self._link is not None
        fd = self._kept.pop("slate", -1)
        self._slate = _attach(fd)
        if self._slate is None:
            self._slate = Slate.create(f"phalanx-slate-{self.rank}", _SLATE_BYTES)
            self._link.say("keep", (self._slate.fd,), name="slate", size=self._slate.size)
        self._snapshots = _attach(self._kept.pop("snapshots", -1))
        for rest in self._kept.values():
            os.close(rest)
        self._kept.clear()

    # -- one step --------------------------------------------------------------------

    def _begin(self, step: Step) -> None:
        self._current = step
        self._interrupted = False
        self._updates = 0
        self._update_open = False
        self._after_written = False
        if self._link is None:
            return
        if self._page is not None:
            self._page.beat(step=int(step), phase="step")
        assert self._guard is not None
        self._guard.begin()
        self._write_slate(int(step), self._record(), state.BEGIN)
        self._grads_none = True
        for parameter in self._protected.parameters():
            if parameter.requires_grad:
                self._grads_none = parameter.grad is None
                break

    def _record(self, own_only: bool = False) -> list[bytes]:
        assert self._guard is not None
        return state.record(self._protected, self._guard, own_only=own_only)

    def _write_slate(self, step: int, parts: list[bytes], kind: int) -> None:
        assert self._slate is not None and self._link is not None
        try:
            self._slate.write(step, parts, kind)
        except ValueError:
            old = self._slate
            size = max(2 * sum(map(len, parts)), 2 * old.capacity)
            self._slate = Slate.create(f"phalanx-slate-{self.rank}", size)
            for held in old.steps():
                if (record := old.read(held)) is not None:
                    self._slate.write(held, [record[0]], record[1])
            self._slate.write(step, parts, kind)
            self._link.say("keep", (self._slate.fd,), name="slate", size=self._slate.size)
            old.close()

    # If the others finish a step in which this rank dies, its successor needs what was this
    # rank's own at the end of it. After the forward pass nothing random happens any more; what
    # comes then is backward and update. So that is written down here, or at the update at
    # the latest.

    def _forward_ended(self, *_: Any) -> None:
        if self._guard is None:
            return
        self._guard.forward_ran()
        if self._current is not None and not self._current.done and torch.is_grad_enabled():
            self._after_written = True
            self._write_slate(int(self._current) + 1, self._record(own_only=True), state.AFTER)

    def _update_begins(self, *_: Any) -> None:
        self._update_open = True
        if self._current is not None and not self._after_written:
            self._after_written = True
            self._write_slate(int(self._current) + 1, self._record(own_only=True), state.AFTER)

    def _update_ends(self, *_: Any) -> None:
        self._update_open = False
        self._updates += 1

    def _leave(self, step: Step, error: BaseException | None) -> bool:
        if error is None:
            self._commit(step)
            return False
        link = self._link
        if link is None or not isinstance(error, Exception):
            return False
        kind = classify(error)
        if kind not in RETRYABLE:
            return False  # the program's own: `_close` tells the agent
        self._interrupted = True
        self._fault_at = link.heard_leave or time.monotonic()
        if not link.over(self.generation):
            self._fault_at = time.monotonic()
            link.fault(self.generation, kind.value, _text(error), int(step))
            self._own_error = error
        if self._tail_only():
            # The update is whole; what was cut off came after it.
            self._advance_schedules()
            self._commit(step)
        return True

    def _tail_only(self) -> bool:
        wanted = self._updates_per_step or len(self._protected.optims)
        return not self._update_open and 0 < wanted <= self._updates

    def _commit(self, step: Step) -> None:
        self._finished = int(step)
        self._finished_here += 1
        step.done = True
        if self._link is None:
            self._after_step()
            return
        self._updates_per_step = self._updates
        self._learn_schedules()
        self._wrappers.stepped()
        if self._recovery is not None and not self._interrupted:
            self._say_good_step()
        if self._page is not None:
            self._page.beat(step=int(step), phase="between")
        self._after_step()

    def _after_step(self) -> None:
        done = self._last() + 1
        link = self._link
        every = 0 if link is None or self._interrupted else self._snapshot_every
        if every and done % every == 0:
            self._snapshot()
        if link is not None and link.stop_at is not None and self._last() >= link.stop_at:
            self.stopped = True
        if (
            self._checkpoints is not None
            and self._checkpoint_every
            and done % self._checkpoint_every == 0
            and not self._interrupted
        ):
            self._save_or_interrupt()

    # Schedulers stand between the update and the end of the step. When only what comes after the
    # update was cut off, one that has moved by one in each of the last two steps is moved.

    def _counters(self) -> dict[str, int]:
        return {
            name: int(thing.last_epoch)
            for name, thing in self._protected.small.items()
            if isinstance(thing, torch.optim.lr_scheduler.LRScheduler)
        }

    def _learn_schedules(self) -> None:
        for name, count in self._counters().items():
            before, steady = self._schedules.get(name, (count - 1, 0))
            self._schedules[name] = (count, steady + 1 if count == before + 1 else 0)

    def _advance_schedules(self) -> None:
        for name, count in self._counters().items():
            before, steady = self._schedules.get(name, (count, 0))
            if steady and count == before:
                self._protected.small[name].step()

    # -- leaving and coming together ----------------------------------------------------

    def _on_leave(self, generation: int) -> None:
        if self._fabric is not None:
            self._fabric.cut(generation)

    def _must_recover(self) -> bool:
        if self._link is None:
            return False
        if self._link.exit_code is not None:
            raise SystemExit(self._link.exit_code)
        return self._interrupted or self._link.over(self.generation)

    def _end(self) -> bool:
        """Wait until all ranks have come to the end: none leaves while another could still
        need it. False if a fault came instead."""
        if self._link is None or self._fabric is None:
            return True
        try:
            dist.barrier()
        except RuntimeError as error:
            self._interrupted = True
            if not self._link.over(self.generation):
                self._link.fault(self.generation, Kind.PEER.value, _text(error), self._last())
            return False
        if self.stopped:
            self._link.say("stopped_at", step=self._last())
        return True

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
        link.say(
            "left",
            generation=self.generation,
            step=self._last(),
            clean=self._clean(),
            shard=self._shard(),
            shards=self._protected.shards(self.world, self._replicas),
        )
        self._come_together(connected=False, first=False)

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
                return
            except LostState as error:
                lost = str(error)
                link.fault(self.generation, Kind.LOST_STATE.value, lost, self._last())
            except RuntimeError as error:
                if isinstance(error, (AgentGone, NoWord)):
                    raise self._own_error or error from None
                if not link.over(self.generation):
                    kind = classify(error)
                    word = kind if kind is Kind.PEER else Kind.REGROUP
                    link.fault(self.generation, word.value, _text(error), self._last())
            except SystemExit:
                if self._own_error is not None:
                    raise self._own_error from None
                raise
            connected = False
            first = False
            fabric.cut(self.generation)
            if self._recovery is None:
                self._recovery = Recovery(self.generation)
        raise LostState(f"the ranks did not come together in {_MOST_TRIES} tries")

    def _word(self, lost: str) -> Join:
        assert self._link is not None
        beyond = self.generation - 1 if self.joining else self.generation
        while isinstance(join := self._link.await_word(beyond, self._decision_timeout), Dump):
            self._dump(join)
        if join.rank != self.rank or join.world != self.world:
            raise LostState(
                f"called as rank {join.rank} of {join.world}, but this process was built as rank "
                f"{self.rank} of {self.world}"
            )
        if self._recovery is None:
            self._recovery = Recovery(join.generation)
            self._fault_at = time.monotonic()
        return join

    def _shard(self) -> int:
        return self._protected.shard(self.rank, self.world, self._replicas)

    def _dump(self, order: Dump) -> None:
        """Write this rank's part of a last checkpoint, or give the whole its name. With no word
        to any other rank: they may be dead."""
        assert self._link is not None and self._guard is not None
        text = ""
        try:
            if self._checkpoints is None:
                raise LostState("no checkpoint directory was given to session()")
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
            text = _text(error)
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
        plan = choose([_holding(rank, row) for rank, row in enumerate(rows)])
        if plan.origin is Origin.NONE:
            raise LostState(plan.why)
        note = self._recovery
        if note is not None:
            note.origin, note.step, note.lost_steps = plan.origin.value, plan.step, plan.lost
            note.why, note.source = plan.why, plan.source_of(self.rank)
        saved = self._restore(group, plan)
        if not (plan.origin is not Origin.REPLICA and self._saved_layouts(group, plan, saved)):
            self._agree_layouts(group, rows)
        if self._rebuild is not None and not first:
            self._rebuild()
        if first and self._slate is not None:
            self._slate.erase()  # of an earlier start of the whole group

    def _rows(self, group: Any) -> list[list[int]]:
        """What every rank holds."""
        steps = sorted(self._snapshots.steps()) if self._snapshots is not None else []
        snapshots = [*steps, _NONE, _NONE][:2]
        newest = self._checkpoints.newest() if self._checkpoints is not None else None
        mine = torch.tensor(
            [
                self._shard(),
                _NONE if self._finished is None or not self._whole else self._finished,
                int(self._clean()),
                snapshots[0],
                snapshots[1],
                _NONE if newest is None else newest,
                int(self._wrappers.settled),
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
        done = self._finished_here >= 2 and self._wrappers.ddp and self._rebuild is None
        return {"layouts": self._wrappers.layouts(self._fabric) if done else []}

    def _agree_layouts(self, group: Any, rows: list[list[int]]) -> None:
        """All DDP wrappers to one bucket layout: that of those who have run a step."""
        if not self._wrappers.ddp or self._rebuild is not None:
            return
        assert self._fabric is not None
        settled = [rank for rank, row in enumerate(rows) if row[6]]
        if len(settled) == self.world:
            return
        if not settled:
            self._wrappers.renew(self._fabric)
            return
        source = settled[0]
        text = b""
        if self.rank == source:
            text = codec.pack(self._wrappers.layouts(self._fabric))
        text = _broadcast(group, source, self.rank, text)
        if self.rank in settled:
            if self.rank != source:
                # The same move as at the source: to execution order, if that is still to come.
                self._wrappers.settle(self._fabric)
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
            "step": note.step + 1,
            "lost_steps": note.lost_steps,
            "why": note.why,
            "local_state": note.local_state,
            "bytes": note.bytes,
            "times": note.times,
        }
        self._link.say("good_step", generation=self.generation, step=self._last(), report=report)
        log.warning(
            "rank %d goes on at step %d in generation %d (%s)",
            self.rank,
            note.step + 1,
            self.generation,
            note.why,
        )

    # -- snapshots and checkpoints ------------------------------------------------------------

    def _make_snapshots(self) -> Slate:
        assert self._link is not None
        size = state.snapshot_size(self._protected)
        slate = Slate.create(f"phalanx-snapshots-{self.rank}", size)
        self._link.say("keep", (slate.fd,), name="snapshots", size=slate.size)
        return slate

    def _snapshot(self) -> None:
        small = self._record()
        if self._snapshots is None:
            self._snapshots = self._make_snapshots()
        try:
            state.take_snapshot(
                self._snapshots, self._last(), self._protected, small, self._extra()
            )
        except ValueError:  # optimizer state has grown
            self._snapshots.close()
            self._snapshots = self._make_snapshots()
            state.take_snapshot(
                self._snapshots, self._last(), self._protected, small, self._extra()
            )

    def _save_or_interrupt(self) -> None:
        try:
            self.save()
        except RuntimeError as error:
            if self._link is None or classify(error) not in RETRYABLE:
                raise
            self._interrupted = True
            if not self._link.over(self.generation):
                self._link.fault(self.generation, classify(error).value, _text(error), self._last())

    def save(self) -> None:
        """Write a checkpoint of the last finished step. On all ranks, between steps.

        :raises RuntimeError: no checkpoint directory was given.
        """
        if self._checkpoints is None:
            raise RuntimeError("save() needs session(checkpoint=...)")
        if self._guard is None:
            raise RuntimeError("save() is for inside the loop of steps()")
        if self._page is not None:
            self._page.beat(phase="checkpoint")
        self._checkpoints.save(
            self._last(),
            self.generation,
            self._protected,
            self._guard,
            self.rank,
            self.world,
            self._extra(),
        )
        if self._page is not None:
            self._page.beat(phase="between")

    def _resume_plain(self, start: int) -> None:
        assert self._checkpoints is not None and self._guard is not None
        step = torch.tensor([self._newest_or_none()], dtype=torch.int64)
        dist.all_reduce(step, op=dist.ReduceOp.MIN)
        newest = int(step.item())
        if newest >= start:
            saved = self._checkpoints.load(
                newest, self._protected, self._guard, self.rank, self._shard()
            )
            self._finished = newest
            if saved.get("layouts"):
                self._adopt_saved(saved["layouts"])

    def _newest_or_none(self) -> int:
        assert self._checkpoints is not None
        newest = self._checkpoints.newest()
        return _NONE if newest is None else newest


def _holding(rank: int, row: list[int]) -> Holding:
    return Holding(
        rank=rank,
        shard=row[0],
        step=None if row[1] == _NONE else row[1],
        clean=bool(row[2]),
        snapshots=frozenset(step for step in row[3:5] if step != _NONE),
        checkpoint=None if row[5] == _NONE else row[5],
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


def _attach(fd: int) -> Slate | None:
    if fd < 0:
        return None
    try:
        return Slate.attach(fd)
    except ValueError as error:
        log.warning("memory kept for this rank cannot be used: %s", error)
        os.close(fd)
        return None


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def session(
    *,
    backend: str | None = None,
    timeout: float = 1800.0,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 0,
    keep_checkpoints: int = 2,
    snapshot_every: int | None = None,
    regroup_timeout: float = 600.0,
    decision_timeout: float = 120.0,
) -> Iterator[Job]:
    """The process group, and a loop that outlives the death of ranks.

    Started by ``phalanx run`` ranks are replaced in place; under torchrun or alone the same
    program runs without recovery and gives the same results.

    ``timeout``: of collectives, seconds. ``checkpoint``: a directory that all ranks see; there
    a checkpoint is written each ``checkpoint_every`` steps (0: only by ``job.save()``) and
    training resumes from the newest. ``snapshot_every``: steps between copies of the whole state
    into memory that outlives the worker (None or 0: none). ``regroup_timeout``,
    ``decision_timeout``: seconds to wait for the other ranks and for the agent's word.
    """
    job = Job(
        backend=backend,
        timeout=timeout,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
        snapshot_every=snapshot_every,
        regroup_timeout=regroup_timeout,
        decision_timeout=decision_timeout,
    )
    job._open()
    error: BaseException | None = None
    try:
        yield job
    except BaseException as raised:
        error = raised
        raise
    finally:
        job._close(error)
