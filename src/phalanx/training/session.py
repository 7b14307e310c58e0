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
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from phalanx.process.channel import HELD
from phalanx.process.page import ProgressPage
from phalanx.process.slate import Slate
from phalanx.recovery.ladder import RETRYABLE, Kind
from phalanx.training import state
from phalanx.training.checkpoint import Checkpoints, NotCommitted
from phalanx.training.data import Batches
from phalanx.training.faults import classify
from phalanx.training.groups import BACKEND, Fabric, install
from phalanx.training.link import Link
from phalanx.training.member import NOTHING, Member, text_of
from phalanx.training.wrappers import UnsupportedTorch, Wrappers, missing_names

log = logging.getLogger("phalanx.training")
dist: Any = torch.distributed

ELASTIC = ("off", "step", "batch")
CAPABILITIES = ("leave", "join", "retry", "recover-in-place", "stop_at", "dump", "keep", "resize")


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


class Job(Member):
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
        elastic: str,
    ) -> None:
        if elastic not in ELASTIC:
            raise ValueError(f"elastic={elastic!r}: give one of {', '.join(ELASTIC)}")
        super().__init__(
            rank=int(os.environ.get("RANK", "0")),
            world=int(os.environ.get("WORLD_SIZE", "1")),
            generation=int(os.environ.get("PHALANX_GENERATION", "1")),
            checkpoints=None
            if checkpoint is None
            else Checkpoints(checkpoint, keep=keep_checkpoints),
            decision_timeout=decision_timeout,
        )
        self._elastic = elastic
        self._timeout = timedelta(seconds=timeout)
        self._backend = backend
        self._snapshot_every = snapshot_every
        self._regroup_timeout = regroup_timeout
        self._checkpoint_every = checkpoint_every
        #: whether the loop ended because the agent asked for it
        self.stopped = False
        self._after_written = False
        self._updates_per_step = 0
        self._in_loop = False
        self._failed = False  # an exception of the program's own has left a step
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
        if self._checkpoints is not None and os.environ.get("PHALANX_FENCED") == "1":
            limit = self._decision_timeout
            self._checkpoints.ask = lambda g, step: link.may_commit(g, step, limit)
        self._page = ProgressPage.from_environment()
        if self._page is not None:
            if self._page.hold():
                link.say(HELD)
            self._page.beat(phase="start", generation=self.generation)
        self._fabric = Fabric(self.rank, self.world, connect_timeout=self._regroup_timeout)
        link.start()
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
            if os.environ.get("PHALANX_KEPT"):
                self._kept = link.await_kept(30.0)
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
                    link.fault(self.generation, kind.value, text_of(error), self._step_number())
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
        on_resize: Callable[[int, int], None] | None = None,
        **things: Any,
    ) -> None:
        """Name what a replacement needs to go on: models, optimizers, schedulers, scalers,
        samplers, data, anything with ``state_dict`` and ``load_state_dict``.

        ``replicas``: groups of ranks that hold the same model and optimizer state (default:
        found; see `state.Protected.shard`). ``each_rank``: names of things whose state is each
        rank's own, not the same on all (default: samplers, loaders and `batches`).
        ``rebuild``: called after the groups have been rebuilt, on a torch whose wrappers cannot
        be brought back to idle; it must leave models and optimizers fit for a step.
        ``on_resize(before, now)``: called on all ranks, newcomers too, when the world has another
        size than the one that the state is from, before the next step; it may change what is
        protected (a learning rate), on all ranks alike.

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
        if on_resize is not None:
            self._on_resize = on_resize
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
        batches = Batches(
            loader,
            sampler,
            again=self._link is not None,
            rank=self.rank,
            world=self.world,
            keep=self._elastic == "batch",
        )
        name = f"batches{sum(isinstance(t, Batches) for t in self._protected.small.values())}"
        self._protected.add(name, batches)
        return batches

    def parts(self, batches: Batches) -> Iterator[tuple[Any, float]]:
        """The batches of this rank for this step, each with the factor for its loss::

            optim.zero_grad()
            for batch, weight in job.parts(batches):
                (loss_of(model, batch) * weight).backward()
            optim.step()

        One with the factor 1, but for a world of another size than at first and
        ``elastic="batch"``. Gradients are exchanged in the last one only.
        """
        some, weight = batches.parts()
        for left, batch in zip(range(len(some) - 1, -1, -1), some, strict=True):
            if len(some) > 1:
                self._sync_gradients(not left)
            yield batch, weight

    def _sync_gradients(self, on: bool) -> None:
        for wrapper in self._wrappers.ddp:
            wrapper.ddp.require_backward_grad_sync = on

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
                if self._must_recover(total):
                    self._recover()
                self.stopped = self._reached_stop()
                if self._last() + 1 >= total or self.stopped:
                    if self.stopped and self._checkpoints is not None:
                        # even if it was just saved: whether it was, not all may know alike
                        self._or_interrupt(self.save)
                        if self._interrupted:
                            continue
                    if self._end():
                        break
                    continue
                step = Step(self._last() + 1, self)
                self._current = None
                yield step
                if self._current is None:
                    raise RuntimeError("a step was not done: write `with step:` around its work")
        except GeneratorExit:
            # The program has broken off its loop. An exception does that too, but who ends by
            # one has not finished: its rank can be replaced.
            if not self._failed:
                self._say_finished()
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
        if not self.joining:
            self._open_slates()
        # The state before the first step is one like any other: a newcomer gets it from others.
        self._finished = None if self.joining else start - 1
        if not self.joining:
            self._fits = (self.generation, self.world)
        if self._elastic != "off" and (why := self._inelastic()) and self.rank == 0:
            log.warning("the world of this program keeps its size: %s", why)
        link.say(
            "hello",
            generation=self.generation,
            rank=self.rank,
            capabilities=[
                word
                for word in CAPABILITIES
                if (word != "dump" or self._checkpoints is not None)
                and (word != "resize" or not self._inelastic())
            ],
            waiting=self.joining,
            any_rank=self._any_rank(),
        )
        self._fault_at = time.monotonic()
        self._come_together(connected=not self.joining, first=not self.joining)
        self.joining = False

    # -- one step --------------------------------------------------------------------

    def _begin(self, step: Step) -> None:
        self._current = step
        self._in_step = True
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
        self._protected.forget()
        if self._elastic == "batch":
            self._sync_gradients(True)  # a step that broke off may have left it off
        self._write_slate(int(step), self._record(), state.BEGIN)
        self._grads_none = True
        for parameter in self._protected.parameters():
            if parameter.requires_grad:
                self._grads_none = parameter.grad is None
                break

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
        self._in_step = False
        if error is None:
            self._commit(step)
            return False
        link = self._link
        if link is None or not isinstance(error, Exception):
            return False
        kind = classify(error)
        if kind not in RETRYABLE:
            self._failed = True
            return False  # the program's own: `_close` tells the agent
        self._interrupted = True
        self._fault_at = link.heard_leave or time.monotonic()
        if not link.over(self.generation):
            self._fault_at = time.monotonic()
            link.fault(self.generation, kind.value, text_of(error), int(step))
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
        step.done = True
        self._wrappers.stepped()
        if self._link is None:
            self._after_step()
            return
        self._updates_per_step = self._updates
        self._learn_schedules()
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
            self._or_interrupt(self._snapshot)
        self.stopped = self._reached_stop()
        regular = self._checkpoint_every and done % self._checkpoint_every == 0
        if self._checkpoints is not None and not self._interrupted and regular:
            self._or_interrupt(self.save)

    def _reached_stop(self) -> bool:
        at = self._link.stop_at if self._link is not None else None
        return at is not None and self._last() >= at

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

    # -- the end of a step, the end of the loop -------------------------------------------

    def _must_recover(self, total: int) -> bool:
        if self._link is None:
            return False
        last = self._last()
        self._link.finished(last if last + 1 < total else None)
        if self._link.exit_code is not None:
            # Whoever has a fault of its own ends with that, however early the word came.
            raise self._own_error or SystemExit(self._link.exit_code)
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
                self._link.fault(self.generation, Kind.PEER.value, text_of(error), self._last())
            return False
        if self._recovery is not None:
            self._say_good_step()  # there was no step left to do
        if self.stopped:
            saved = self._checkpoints is not None
            self._link.say("stopped_at", step=self._last(), saved=saved)
        return True

    # -- snapshots and checkpoints ------------------------------------------------------------

    def _make_snapshots(self) -> Slate:
        assert self._link is not None
        size = state.snapshot_size(self._protected)
        slate = Slate.create(f"phalanx-snapshots-{self.rank}", size)
        self._link.say("keep", (slate.fd,), name="snapshots", size=slate.size)
        return slate

    def _snapshot(self) -> None:
        if self._apart() and self._copies_travel():
            return  # each rank has to have one of a step that all have copies of
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
        self._say_snapshot(self._last(), back=False)

    def _or_interrupt(self, do: Callable[[], None]) -> None:
        """Something that all ranks do between two steps: a fault in it is one of the job's."""
        try:
            do()
        except RuntimeError as error:
            if self._link is None or classify(error) not in RETRYABLE:
                raise
            self._interrupted = True
            if not self._link.over(self.generation):
                self._link.fault(
                    self.generation, classify(error).value, text_of(error), self._last()
                )

    def save(self) -> None:
        """Write a checkpoint of the last finished step. On all ranks, between steps.

        On several nodes one that may not count is left without its name, with a warning: the
        job may have gone on without this node.

        :raises RuntimeError: no checkpoint directory was given.
        """
        if self._checkpoints is None:
            raise RuntimeError("save() needs session(checkpoint=...)")
        if self._guard is None:
            raise RuntimeError("save() is for inside the loop of steps()")
        if self._page is not None:
            self._page.beat(phase="checkpoint")
        try:
            self._checkpoints.save(
                self._last(),
                self.generation,
                self._protected,
                self._guard,
                self.rank,
                self.world,
                self._extra(),
            )
        except NotCommitted as error:
            log.warning("%s", error)
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
        return NOTHING if newest is None else newest


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
    elastic: str = "off",
) -> Iterator[Job]:
    """The process group, and a loop that outlives the death of ranks.

    Started by ``phalanx run`` ranks are replaced in place; under torchrun or alone the same
    program runs without recovery and gives the same results.

    ``timeout``: of collectives, seconds. ``checkpoint``: a directory that all ranks see; there
    a checkpoint is written each ``checkpoint_every`` steps (0: only by ``job.save()``) and
    training resumes from the newest. ``snapshot_every``: steps between copies of the whole state
    into memory that outlives the worker (None or 0: none). ``regroup_timeout``,
    ``decision_timeout``: seconds to wait for the other ranks and for the agent's word.
    ``elastic``: what becomes of the others when a node is lost that nobody replaces, or more come:
    "off": all start again. "step": they keep their processes and go on as a smaller or larger
    world, each rank with its batch, so that the global batch changes with the world
    (``protect(on_resize=...)`` may scale the learning rate). "batch": so too, but the global batch
    stays: ranks take over the batches of those that are gone (`Job.parts`). Data parallel programs
    only.

    :raises ValueError: ``elastic`` is another word.
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
        elastic=elastic,
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
