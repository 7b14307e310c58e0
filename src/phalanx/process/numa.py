"""Which processors a worker should run on so that they are near its GPU.

Reads sysfs and the driver's list of GPUs; no CUDA. The modes are PyTorch's ``AffinityMode``.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = ["AffinityMode", "NumaOptions"]

logger = logging.getLogger(__name__)


class AffinityMode(str, Enum):
    """How near: see `processors`."""

    NODE = "node"
    SOCKET = "socket"
    EXCLUSIVE = "exclusive"
    CORE_COMPLEX = "core-complex"


@dataclass(frozen=True)
class NumaOptions:
    """PyTorch's ``torch.numa.binding.NumaOptions``, which is accepted in its place."""

    affinity_mode: AffinityMode
    should_fall_back_if_binding_fails: bool = False


class NumaError(RuntimeError):
    """The binding cannot be made; the text says why."""


def parse_cpus(text: str) -> set[int]:
    """For example "0-3,8" -> {0, 1, 2, 3, 8}. Raises ValueError."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def format_cpus(cpus: Iterable[int]) -> str:
    """For example {0, 1, 2, 3, 8} -> "0-3,8"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


class Machine:
    """What the kernel says of processors and GPUs; ``root`` is for tests."""

    def __init__(self, root: str = "/", allowed: Iterable[int] | None = None) -> None:
        self._root = root
        self.allowed = set(os.sched_getaffinity(0) if allowed is None else allowed)

    def _read(self, path: str) -> str:
        try:
            with open(os.path.join(self._root, path)) as file:
                return file.read().strip()
        except OSError as error:
            raise NumaError(f"/{path} cannot be read: {error.strerror}") from None

    def gpus(self, visible: str | None) -> list[str]:
        """PCI addresses of the GPUs in CUDA's order; ``visible``: CUDA_VISIBLE_DEVICES."""
        folder = os.path.join(self._root, "proc/driver/nvidia/gpus")
        try:
            found = sorted(os.listdir(folder))
        except OSError:
            found = []
        if not found:
            raise NumaError("there is no GPU whose driver tells where it is (only NVIDIA's does)")
        if visible is None:
            return found
        chosen = []
        for name in filter(None, (part.strip() for part in visible.split(","))):
            if name.isdigit():
                if int(name) >= len(found):
                    break  # as CUDA does: what follows an unknown one is not visible
                chosen.append(found[int(name)])
            else:
                match = [gpu for gpu in found if self._uuid(gpu).startswith(name)]
                if len(match) != 1:
                    break
                chosen.append(match[0])
        return chosen

    def _uuid(self, gpu: str) -> str:
        text = self._read(f"proc/driver/nvidia/gpus/{gpu}/information")
        match = re.search(r"GPU UUID:\s*(\S+)", text)
        return match.group(1) if match else ""

    def node_of(self, gpu: str) -> int:
        """The NUMA node of a GPU; where the kernel knows none (-1) it is 0."""
        return max(0, int(self._read(f"sys/bus/pci/devices/{gpu.lower()}/numa_node")))

    def cpus_of(self, node: int) -> set[int]:
        """The processors of a node that this process may use."""
        return parse_cpus(self._read(f"sys/devices/system/node/node{node}/cpulist")) & self.allowed

    def _of_cpu(self, cpu: int, path: str) -> str:
        return self._read(f"sys/devices/system/cpu/cpu{cpu}/{path}")

    def package(self, cpu: int) -> int:
        return int(self._of_cpu(cpu, "topology/physical_package_id"))

    def core(self, cpu: int) -> int:
        """The least processor of the same physical core."""
        return min(parse_cpus(self._of_cpu(cpu, "topology/thread_siblings_list")))

    def third_level(self, cpu: int) -> frozenset[int]:
        """Processors with the same level 3 cache; with none of level 3: of the largest level."""
        folder = os.path.join(self._root, f"sys/devices/system/cpu/cpu{cpu}/cache")
        best: tuple[int, str] = (-1, str(cpu))
        for name in os.listdir(folder) if os.path.isdir(folder) else []:
            if name.startswith("index"):
                level = int(self._of_cpu(cpu, f"cache/{name}/level"))
                if level <= 3:
                    best = max(best, (level, self._of_cpu(cpu, f"cache/{name}/shared_cpu_list")))
        return frozenset(parse_cpus(best[1]))

    def nodes(self) -> list[int]:
        return sorted(parse_cpus(self._read("sys/devices/system/node/possible")))


def processors(mode: str, index: int, gpus: Sequence[str], machine: Machine) -> set[int]:
    """The processors for the worker that uses GPU number ``index``.

    ``node``: all of the GPU's NUMA node; ``socket``: all of that node's package;
    ``exclusive``: the node's physical cores split evenly among its GPUs, the first ones get
    the rest; ``core-complex``: one group with a common level 3 cache, the largest first.
    Raises NumaError.
    """
    if index >= len(gpus):
        raise NumaError(f"local rank {index} has no GPU: {len(gpus)} are visible")
    node = machine.node_of(gpus[index])
    cpus = machine.cpus_of(node)
    if not cpus:
        raise NumaError(f"this process may use no processor of NUMA node {node}")
    if mode == AffinityMode.NODE.value:
        return cpus
    if mode == AffinityMode.SOCKET.value:
        package = machine.package(min(cpus))
        found: set[int] = set()
        for other in machine.nodes():
            theirs = machine.cpus_of(other)
            if theirs and machine.package(min(theirs)) == package:
                found |= theirs
        return found
    here = [i for i, gpu in enumerate(gpus) if machine.node_of(gpu) == node]
    place = here.index(index)
    groups: dict[Any, set[int]] = {}
    if mode == AffinityMode.EXCLUSIVE.value:
        for cpu in cpus:
            groups.setdefault(machine.core(cpu), set()).add(cpu)
        cores = [groups[core] for core in sorted(groups)]
        each, rest = divmod(len(cores), len(here))
        if each < 1:
            raise NumaError(
                f"NUMA node {node} has {len(cores)} cores for {len(here)} GPUs: "
                "no core of its own for each"
            )
        start = place * each + min(place, rest)
        return set().union(*cores[start : start + each + (place < rest)])
    if mode == AffinityMode.CORE_COMPLEX.value:
        for cpu in cpus:
            groups.setdefault(machine.third_level(cpu), set()).add(cpu)
        complexes = sorted(groups.values(), key=lambda group: (-len(group), min(group)))
        return complexes[place % len(complexes)]
    raise NumaError(f"there is no binding {mode!r}: use one of {[m.value for m in AffinityMode]}")


def choose(options: Any, index: int, machine: Machine | None = None) -> set[int] | None:
    """`processors` for ``options`` (ours or PyTorch's); None: no binding.

    Raises NumaError unless the options say to go on without.
    """
    if options is None:
        return None
    mode = getattr(options.affinity_mode, "value", options.affinity_mode)
    try:
        machine = machine or Machine()
        gpus = machine.gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return processors(str(mode), index, gpus, machine)
    except (NumaError, ValueError) as error:
        _fall_back(options, error)
        return None


def command(argv: Sequence[str], options: Any, index: int) -> tuple[str, ...]:
    """``argv``, bound with ``numactl`` as the options say. Raises NumaError as `choose` does."""
    cpus = choose(options, index)
    if cpus is None:
        return tuple(argv)
    if shutil.which("numactl") is None:
        _fall_back(options, NumaError("numactl is not on the PATH; it is needed for programs"))
        return tuple(argv)
    return ("numactl", f"--physcpubind={format_cpus(cpus)}", *argv)


def bind_this_process(options: Any, index: int) -> None:
    """Bind this process's threads, but for those that have a binding of their own already."""
    cpus = choose(options, index)
    if cpus is None:
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    for task in os.listdir("/proc/self/task"):
        try:
            if os.sched_getaffinity(int(task)) == before:
                os.sched_setaffinity(int(task), cpus)
        except OSError:
            pass  # the thread has ended


def _fall_back(options: Any, error: Exception) -> None:
    if not options.should_fall_back_if_binding_fails:
        raise NumaError(f"NUMA binding is not possible: {error}") from error
    logger.warning("no NUMA binding, although it was asked for: %s", error)
