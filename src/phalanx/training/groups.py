"""Process groups whose inside can be exchanged under the objects that hold them.

DDP's reducer, FSDP2, DeviceMesh and the program itself keep references to process groups.
`Group` is what they get: a Python `ProcessGroup` that passes every collective on to an inner
C++ one. After a fault the inner groups are cut, thrown away and made anew for the next
generation, and nobody outside has to be told.

A group is in one of three conditions:

* *alone*: not connected to anybody; collectives answer as if every peer were exactly as this
  rank is (`Echo`). A replacement builds its whole world like that and waits for nobody.
* *connected*: collectives go to the inner group of the current generation.
* *broken*: the generation is over; every collective raises `GroupBroken` at once.

The `Fabric` holds all groups of the process and moves them together.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from phalanx.training.abort import SocketRecord, new_listeners, sockets

# torch exports only some of these names to type checkers.
dist: Any = torch.distributed

BACKEND = "phalanx"
#: a registration under this name in the arrival entry of a rank is larger than this: refused
_MAX_ARRIVAL = 1 << 20


_STORE_TRY_SECONDS = 2.0
_CLOSE_SECONDS = 5.0


class GroupBroken(RuntimeError):
    """A collective of a generation that is over."""


# What stays with the group itself. Everything else that dist.ProcessGroup offers goes inside.
_OWN = {
    "BackendType",
    "CUSTOM",
    "GLOO",
    "MPI",
    "NCCL",
    "UCC",
    "UNDEFINED",
    "XCCL",
    "abort",
    "bound_device_id",
    "boxed",
    "get_group_store",
    "group_desc",
    "group_name",
    "merge_remote_group",
    "name",
    "rank",
    "set_timeout",
    "shutdown",
    "size",
    "split_group",
    "unbox",
    "use_pg_for_symm_mem_rendezvous",
}


def passed_on() -> tuple[str, ...]:
    """The names of `dist.ProcessGroup` that `Group` passes to its inside, by introspection."""
    names = []
    for name in dir(ProcessGroup):
        if name in _OWN or name.startswith("_"):
            continue
        if callable(getattr(ProcessGroup, name)):
            names.append(name)
    private = (
        "_allgather_base",
        "_reduce_scatter_base",
        "_start_coalescing",
        "_end_coalescing",
        "_get_backend",
        "_get_sequence_number_for_group",
        "_wait_for_pending_works",
    )
    return (*names, *(name for name in private if hasattr(ProcessGroup, name)))


class Transport(Protocol):
    """How a generation's inner groups are made and cut, for one kind of device."""

    devices: tuple[str, ...]

    def open(self) -> set[int]:
        """Get ready; returns the ports this rank listens on."""

    def expect(self, ports: set[int]) -> None:
        """The ports of all ranks."""

    def connect(
        self, store: Any, rank: int, size: int, timeout: timedelta
    ) -> tuple[ProcessGroup.BackendType, Any]:
        """Connect one group; blocks until all its members do the same."""

    def cut(self) -> None:
        """End everything this transport has in flight. From any thread."""


class GlooTransport:
    """gloo over TCP; cut by its connected sockets (see `phalanx.training.abort`)."""

    devices = ("cpu",)

    def __init__(self, host: str | None) -> None:
        self._host = host
        self._record = SocketRecord()
        self._device: Any = None
        self._cut = False

    def open(self) -> set[int]:
        before = sockets()
        loopback = self._host in ("127.0.0.1", "localhost", "::1")
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        if interface:
            self._device = dist.ProcessGroupGloo.create_device(interface=interface.split(",")[0])
        elif loopback:
            self._device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        else:
            self._device = dist.ProcessGroupGloo.create_default_device()
        return new_listeners(before)

    def expect(self, ports: set[int]) -> None:
        self._record.watch(ports)

    def connect(
        self, store: Any, rank: int, size: int, timeout: timedelta
    ) -> tuple[ProcessGroup.BackendType, Any]:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [self._device]
        options._timeout = timeout
        self._record.watch()
        try:
            backend = dist.ProcessGroupGloo(store, rank, size, options)
        finally:
            self._record.note()
        if self._cut:
            raise GroupBroken("the generation ended while its group was being made")
        return ProcessGroup.BackendType.GLOO, backend

    def cut(self) -> None:
        self._cut = True
        self._record.cut()


class NcclTransport:
    """NCCL, cut by its communicators' ``abort``. Written to torch's API; not run (no GPU)."""

    devices = ("cuda",)

    def __init__(self, host: str | None) -> None:
        self._made: list[Any] = []
        self._cut = False

    def open(self) -> set[int]:
        return set()

    def expect(self, ports: set[int]) -> None:
        pass

    def connect(
        self, store: Any, rank: int, size: int, timeout: timedelta
    ) -> tuple[ProcessGroup.BackendType, Any]:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
        self._made.append(backend)
        if self._cut:
            backend.abort()
            raise GroupBroken("the generation ended while its group was being made")
        return ProcessGroup.BackendType.NCCL, backend

    def cut(self) -> None:
        self._cut = True
        for backend in self._made:
            backend.abort()


class HcclTransport:
    """HCCL of torch_npu, after its documented API; not run (no device)."""

    devices = ("npu",)

    def __init__(self, host: str | None) -> None:
        self._made: list[Any] = []

    def open(self) -> set[int]:
        return set()

    def expect(self, ports: set[int]) -> None:
        pass

    def connect(
        self, store: Any, rank: int, size: int, timeout: timedelta
    ) -> tuple[ProcessGroup.BackendType, Any]:
        import torch_npu  # type: ignore[import-not-found, unused-ignore]

        kind = torch_npu._C._distributed_c10d.ProcessGroupHCCL
        options = kind.Options()
        options.op_timeout = timeout
        backend = kind(store, rank, size, options)
        self._made.append(backend)
        return ProcessGroup.BackendType.CUSTOM, backend

    def cut(self) -> None:
        for backend in self._made:
            backend.abort()


def transports() -> tuple[Callable[[str | None], Transport], ...]:
    """The transports this machine has a use for. gloo always."""
    found: list[Any] = [GlooTransport]
    if dist.is_nccl_available() and torch.cuda.is_available():
        found.append(NcclTransport)
    if hasattr(torch, "npu") and torch.npu.is_available():
        found.append(HcclTransport)
    return tuple(found)


def _devices(transport: Any) -> tuple[str, ...]:
    return tuple(transport.devices)


class Echo:
    """Answers collectives as if every peer were exactly as this rank is. Moves no bytes.

    So a broadcast changes nothing, a gather yields copies of one's own, a sum is one's own
    times the size. What DDP's constructor and FSDP's clean-up need is that they neither wait
    nor fail; a state built with it is overwritten from a replica before the first common step.
    """

    def __init__(self, solo: ProcessGroup, rank: int, size: int) -> None:
        self._solo = solo
        self._rank = rank
        self._size = size

    def _done(self, tensors: Any = None) -> Any:
        """A finished work whose future holds ``tensors``: that of a group of one."""
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        tensors = [t for t in tensors or [] if t.device.type == "cpu" and t.numel()]
        return self._solo.allreduce(tensors[:1] or [torch.zeros(1)])

    def _sum(self, tensors: Any, opts: Any, *, copies: int | None = None) -> None:
        op = getattr(opts, "reduceOp", None)
        if op is None or op == dist.ReduceOp.SUM:
            for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
                tensor.mul_(self._size if copies is None else copies)

    def allreduce(self, tensors: Any, opts: Any = None, *rest: Any, **named: Any) -> Any:
        with torch.no_grad():
            self._sum(tensors, opts)
        return self._done(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None, *rest: Any, **named: Any) -> Any:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Any, *rest: Any, **named: Any) -> Any:
        return self._done(tensors)

    def allgather(self, outputs: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        with torch.no_grad():
            if isinstance(inputs, torch.Tensor):
                outputs, inputs = [outputs], [inputs]
            for own, mine in zip(outputs, inputs, strict=False):
                for output in own:
                    output.copy_(mine)
        return self._done()

    gather = allgather

    def allgather_coalesced(self, outputs: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        with torch.no_grad():
            for output_list in outputs:
                for output, mine in zip(output_list, inputs, strict=False):
                    output.copy_(mine)
        return self._done()

    def _allgather_base(self, output: Any, mine: Any, *rest: Any, **named: Any) -> Any:
        with torch.no_grad():
            output.view(self._size, -1).copy_(mine.reshape(1, -1).expand(self._size, -1))
        return self._done()

    all_gather_single = _allgather_base

    def all_gather_single_coalesced(
        self, outputs: Any, inputs: Any, *rest: Any, **named: Any
    ) -> Any:
        for output, mine in zip(outputs, inputs, strict=False):
            self._allgather_base(output, mine)
        return self._done()

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def scatter(self, outputs: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        with torch.no_grad():
            if isinstance(outputs, torch.Tensor):
                outputs, inputs = [outputs], [inputs]
            for output, chunks in zip(outputs, inputs, strict=False):
                if chunks:
                    output.copy_(chunks[self._rank % len(chunks)])
        return self._done()

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, *rest: Any, **named: Any
    ) -> Any:
        self.scatter(outputs, inputs)
        with torch.no_grad():
            self._sum(outputs, opts)
        return self._done()

    def _reduce_scatter_base(
        self, output: Any, source: Any, opts: Any = None, *rest: Any, **named: Any
    ) -> Any:
        with torch.no_grad():
            output.view(-1).copy_(source.reshape(self._size, -1)[self._rank])
            self._sum(output, opts)
        return self._done()

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None, *rest: Any, **named: Any
    ) -> Any:
        for output, source in zip(outputs, inputs, strict=False):
            self._reduce_scatter_base(output, source, opts)
        return self._done()

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        with torch.no_grad():
            for output, source in zip(outputs, inputs, strict=False):
                if output.shape == source.shape:
                    output.copy_(source)
        return self._done()

    def alltoall_base(self, output: Any, source: Any, *rest: Any, **named: Any) -> Any:
        with torch.no_grad():
            if output.shape == source.shape:
                output.copy_(source)
        return self._done()

    all_to_all_single = alltoall_base

    def send(self, tensors: Any, *rest: Any, **named: Any) -> Any:
        return self._done()

    recv = recv_anysource = send

    def barrier(self, *rest: Any, **named: Any) -> Any:
        return self._done()

    def monitored_barrier(self, *rest: Any, **named: Any) -> None:
        return None

    def _start_coalescing(self, *rest: Any) -> None:
        return None

    def _end_coalescing(self, *rest: Any) -> Any:
        return self._done()

    def _get_backend(self, device: torch.device) -> Any:
        return self._solo._get_backend(torch.device("cpu"))

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def _wait_for_pending_works(self) -> None:
        return None


def _pass(name: str) -> Callable[..., Any]:
    def call(self: Group, *args: Any, **named: Any) -> Any:
        inner = self._inner
        if inner is None:
            inner = self._fabric.enter(self)
        return getattr(inner, name)(*args, **named)

    call.__name__ = name
    call.__qualname__ = f"Group.{name}"
    return call


class Group(ProcessGroup):
    """A process group that outlives its connections."""

    def __init__(
        self, fabric: Fabric, name: str, ranks: list[int], rank: int, size: int, timeout: timedelta
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._fabric = fabric
        self._title = name
        self._about = "undefined"
        self._rank = rank
        self._size = size
        #: global ranks, in group order; empty: the whole world
        self.members = ranks
        self.timeout = timeout
        self._inner: Any = None

    def getBackendName(self) -> str:
        return BACKEND

    def name(self) -> str:
        return BACKEND

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    # what torch's C++ calls
    getRank = rank
    getSize = size

    def _set_group_name(self, name: str) -> None:
        self._title = name

    def _set_group_desc(self, text: str) -> None:
        self._about = text

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._title

    @property
    def pg_name(self) -> str:
        return self._title

    @property
    def group_desc(self) -> str:
        return self._about

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(d) for t in transports() for d in _devices(t)]

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout
        if self._inner is not None and hasattr(self._inner, "set_timeout"):
            self._inner.set_timeout(timeout)

    def abort(self) -> None:
        """What torch calls from ``_abort_process_group``: cuts the whole generation."""
        self._fabric.cut()

    def shutdown(self) -> None:
        self._fabric.forget(self)

    def get_group_store(self) -> Any:
        return self._fabric.store_of(self)


for _name in passed_on():
    setattr(Group, _name, _pass(_name))


@cache
def size_can_change() -> bool:
    """Whether torch's C++ (which divides gradients by it) asks a `Group` for its size, and does not
    keep the one it was made with."""
    group = Group(Fabric(0, 1), "probe", [], 0, 1, timedelta(seconds=1))
    group._size = 2
    return bool(ProcessGroup.size(group) == 2)


class _Waiter:
    """Something done in a thread of its own by someone who may stop waiting for it."""

    def __init__(self, do: Callable[[], Any]) -> None:
        self.news = threading.Event()
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._do = do
        threading.Thread(target=self._run, name="phalanx-connect", daemon=True).start()

    def _run(self) -> None:
        try:
            self.result = self._do()
        except BaseException as error:
            self.error = error
        self.done = True
        self.news.set()


class Fabric:
    """All groups of this process, and the generation they belong to."""

    def __init__(self, rank: int, world: int, *, connect_timeout: float = 600.0) -> None:
        self.rank = rank
        self.world = world
        #: seconds that members may wait for each other when groups are made
        self.connect_timeout = connect_timeout
        self.generation = 0
        self.groups: dict[str, Group] = {}
        self._lock = threading.Lock()
        self._making = threading.RLock()
        self._condition = "alone"
        self._store: Any | None = None
        self._store_sockets: SocketRecord | None = None
        self._transports: list[Transport] = []
        self._solo: ProcessGroup | None = None
        self._cut_at = -1
        # Inner groups of a generation that is over. Letting go of one blocks as long as another
        # thread is inside it, so the thread that cuts only puts it here.
        self._over: list[Any] = []
        self._waiters: list[_Waiter] = []

    # -- groups come and go -------------------------------------------------

    def create(self, options: Any, extra: Any = None) -> Group:
        """The creator that torch calls for ``init_process_group`` and ``new_group``."""
        group = Group(
            self,
            str(options.group_id),
            list(options.global_ranks_in_group),
            options.group_rank,
            options.group_size,
            options.timeout,
        )
        self.groups[str(options.group_id)] = group
        if self._condition == "alone":
            group._inner = self._echo(group)
        return group

    def forget(self, group: Group) -> None:
        self.groups.pop(group.group_name, None)
        group._inner = None

    def assume(self, rank: int, world: int) -> bool:
        """Be another rank than the one built for, or in a world of another size; possible while
        there is no group but the world, and not connected. False: it is not."""
        if self._condition == "connected" or any(g.members for g in self.groups.values()):
            return False
        self.rank, self.world = rank, world
        for group in self.groups.values():
            group._rank, group._size = rank, world
            if self._condition == "alone":
                group._inner = self._echo(group)
            known = dist.distributed_c10d._world.pg_group_ranks
            if group in known:
                known[group] = {r: r for r in range(world)}
        return True

    @property
    def condition(self) -> str:
        """``alone``, ``connected`` or ``broken``."""
        return self._condition

    def store_of(self, group: Group) -> Any:
        store = self._store
        if store is None:
            store = dist.HashStore()
        return dist.PrefixStore(f"user/{group.group_name}", store)

    # -- alone ---------------------------------------------------------------

    def _echo(self, group: Group) -> Echo:
        if self._solo is None:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = timedelta(seconds=60)
            store = dist.HashStore()
            backend = dist.ProcessGroupGloo(store, 0, 1, options)
            self._solo = _wrap(store, 0, 1, [("cpu", ProcessGroup.BackendType.GLOO, backend)])
        return Echo(self._solo, group.rank(), group.size())

    @contextmanager
    def alone(self) -> Iterator[None]:
        """All groups answer as if alone; afterwards they are what they were."""
        before = {name: group._inner for name, group in self.groups.items()}
        condition, self._condition = self._condition, "alone"
        for group in self.groups.values():
            group._inner = self._echo(group)
        try:
            yield
        finally:
            self._condition = condition
            for name, group in self.groups.items():
                group._inner = before.get(name) if condition != "alone" else self._echo(group)
            with self._lock:
                if self._cut_at >= self.generation:
                    self._break()

    # -- connected -----------------------------------------------------------

    def connect(self, generation: int, store_at: str) -> dict[str, float]:
        """Join ``generation``: the world group and every group that all its members have.

        A group that only some of its members have (the others were started later and have
        not made it yet) is connected at its first collective. Blocks until all have come, at
        most ``connect_timeout`` seconds; `cut` from another thread ends it at once.

        :raises GroupBroken: the generation was cut meanwhile.
        :raises RuntimeError: the store or a peer could not be reached in time.
        """
        with self._making:
            return self._connect(generation, store_at)

    def _connect_store(self, host: str, port: int, generation: int, limit: timedelta) -> Any:
        """A client of the store, connected in short tries: torch's own retry, which nothing
        interrupts, would go on knocking after the generation was cut.

        :raises GroupBroken: the generation was cut meanwhile.
        :raises RuntimeError: the store could not be reached in time.
        """
        end = time.monotonic() + limit.total_seconds()
        while True:
            with self._lock:
                if self._cut_at >= generation:
                    raise GroupBroken(f"generation {generation} is over")
            left = max(0.0, end - time.monotonic())
            try:
                store = dist.TCPStore(
                    host,
                    port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=min(_STORE_TRY_SECONDS, max(0.1, left))),
                )
            except RuntimeError:
                if left <= 0:
                    raise
                continue
            store.set_timeout(limit)
            return store

    def _connect(self, generation: int, store_at: str) -> dict[str, float]:
        begun = time.monotonic()
        host, _, port = store_at.rpartition(":")
        host = host.strip("[]")
        limit = timedelta(seconds=self.connect_timeout)
        record = SocketRecord()
        with self._lock:
            if self._cut_at >= generation:
                raise GroupBroken(f"generation {generation} is over")
            self._drop()
            self.generation = generation
            self._condition = "broken"
            record.watch({int(port)})
            self._store_sockets = record
        self._store = None
        tcp = self._connect_store(host, int(port), generation, limit)
        record.note()
        store = dist.PrefixStore(f"phalanx/{generation}", tcp)
        ready = [kind(host) for kind in transports()]
        with self._lock:
            if self._cut_at >= generation:
                raise GroupBroken(f"generation {generation} is over")
            self._store = store
            self._transports = list(ready)
        ports: set[int] = set()
        for transport in ready:
            ports |= transport.open()
        names = list(self.groups)
        store.set(f"here/{self.rank}", json.dumps({"ports": sorted(ports), "groups": names}))
        keys = [f"here/{rank}" for rank in range(self.world)]
        store.wait(keys, limit)
        arrived = time.monotonic()
        entries = [_arrival(text) for text in store.multi_get(keys)]
        everyone = {port for entry in entries for port in entry[0]}
        for transport in ready:
            transport.expect(everyone)
        for name in names:
            group = self.groups[name]
            members = group.members or list(range(self.world))
            if all(name in entries[rank][1] for rank in members):
                self._enter(group)
        with self._lock:
            if self._cut_at >= generation:
                self._break()
                raise GroupBroken(f"generation {generation} is over")
            self._condition = "connected"
        return {"arrived": arrived - begun, "connected": time.monotonic() - arrived}

    def enter(self, group: Group) -> Any:
        """The inside of ``group``, connected now if it was not yet."""
        with self._making:
            if group._inner is not None:
                return group._inner
            if self._condition != "connected":
                raise GroupBroken(
                    f"collective on group {group.group_name!r}: generation "
                    f"{self.generation} is over"
                )
            return self._enter(group)

    def _enter(self, group: Group) -> Any:
        assert self._store is not None
        # Two groups of the same ranks have different names, so different prefixes.
        store = dist.PrefixStore(f"group/{group.group_name}", self._store)
        made = []
        for transport in self._transports:
            kind, backend = self._connected(transport, store, group)
            if hasattr(backend, "_set_default_timeout"):
                backend._set_default_timeout(group.timeout)
            for device in transport.devices:
                made.append((device, kind, backend))
        inner = _wrap(store, group.rank(), group.size(), made)
        with self._lock:
            if self._cut_at >= self.generation:
                raise GroupBroken(f"generation {self.generation} is over")
            group._inner = inner
        return inner

    def _connected(self, transport: Transport, store: Any, group: Group) -> Any:
        """Connect one group. Whoever waits here is out at once when the generation is cut: a peer
        that died before it connected leaves gloo waiting without a socket to shut down."""
        waiter = _Waiter(
            lambda: transport.connect(
                dist.PrefixStore(transport.devices[0], store),
                group.rank(),
                group.size(),
                # While it is made: the bound for connecting; then the group's own.
                timedelta(seconds=self.connect_timeout),
            )
        )
        with self._lock:
            over = self._cut_at >= self.generation
            self._waiters.append(waiter)
        if not over:
            waiter.news.wait(self.connect_timeout + 10)
        with self._lock:
            self._waiters.remove(waiter)
        if not waiter.done:
            raise GroupBroken(
                f"generation {self.generation} is over, or its ranks did not connect in time"
            )
        if waiter.error is not None:
            raise waiter.error
        return waiter.result

    # -- broken --------------------------------------------------------------

    def cut(self, generation: int | None = None) -> None:
        """End ``generation`` (default: the current one): whoever waits in it is out at once.

        From any thread. A later `connect` to it or a lower one is refused.
        """
        with self._lock:
            if generation is None:
                generation = self.generation
            self._cut_at = max(self._cut_at, generation)
            if generation < self.generation or self._condition == "alone":
                return
            self._break()

    def _break(self) -> None:
        self._condition = "broken"
        for group in self.groups.values():
            if group._inner is not None:
                self._over.append(group._inner)
                group._inner = None
        for transport in self._transports:
            transport.cut()
        for waiter in self._waiters:
            waiter.news.set()
        if self._store_sockets is not None:
            self._store_sockets.cut()

    def _drop(self) -> threading.Thread:
        """Let go of a generation, in a thread of its own: the end of a group waits for gloo's
        threads, and one of them may be kept for good by an operation that gloo has forgotten.
        """
        over = [group._inner for group in self.groups.values()]
        over += [*self._over, *self._transports, self._store]
        for group in self.groups.values():
            group._inner = None
        self._over.clear()
        self._transports = []
        self._store = None
        self._store_sockets = None
        thread = threading.Thread(target=over.clear, name="phalanx-drop", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Cut everything and let go of it; waits for that, within a bound."""
        with self._lock:
            self._break()
            thread = self._drop()
            self.groups.clear()
            self._solo = None
        thread.join(_CLOSE_SECONDS)


def _arrival(text: bytes) -> tuple[set[int], set[str]]:
    if len(text) > _MAX_ARRIVAL:
        raise ValueError(f"arrival entry of {len(text)} bytes")
    entry = json.loads(text)
    return {int(port) for port in entry["ports"]}, {str(name) for name in entry["groups"]}


def _wrap(store: Any, rank: int, size: int, backends: list[tuple[str, Any, Any]]) -> ProcessGroup:
    inner = ProcessGroup(store, rank, size)
    for device, kind, backend in backends:
        inner._register_backend(torch.device(device), kind, backend)
    inner._set_default_backend(backends[-1][1])
    return inner


_current: Fabric | None = None


def install(fabric: Fabric) -> None:
    """Make ``fabric`` the one whose groups ``init_process_group("phalanx")`` hands out."""
    global _current
    _current = fabric
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(
            BACKEND, _create, extended_api=True, devices=["cpu", "cuda", "npu", "xpu"]
        )


def _create(options: Any, extra: Any = None) -> Group:
    if _current is None:
        raise RuntimeError("the phalanx backend needs phalanx.training.session()")
    return _current.create(options, extra)
