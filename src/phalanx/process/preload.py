"""What a keeper imports before it forks workers, and whether forking is safe afterwards.

`plan_for` decides from what a program imports (`phalanx.process.scan`); `perform` does it in
the keeper. Plan and report are plain data with a JSON form: they cross the socket between
agent and keeper.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from phalanx.process.scan import ImportScan

_OUTPUT_LIMIT = 4096
_TRIAL_SECONDS = 20.0


# ---------------------------------------------------------------------------------------
# The plan
# ---------------------------------------------------------------------------------------

# Packages that may be imported in the keeper: slow enough to be worth it, and their import
# neither initialises a device nor starts threads that survive a fork. Not here, on purpose:
# jax, tensorflow, ray, grpc (threads at import), deepspeed, flash_attn, xformers, bitsandbytes,
# apex, transformer_engine (look at the device when imported), wandb, mlflow (services), cv2,
# matplotlib (gain little, keep state outside of the process).
PACKAGES = frozenset(
    {
        "accelerate",
        "datasets",
        "einops",
        "huggingface_hub",
        "lightning",
        "numpy",
        "pandas",
        "peft",
        "PIL",
        "pyarrow",
        "pytorch_lightning",
        "safetensors",
        "scipy",
        "sklearn",
        "timm",
        "tokenizers",
        "torch",
        "torchaudio",
        "torchdata",
        "torchmetrics",
        "torchtext",
        "torchvision",
        "transformers",
        "trl",
    }
)

# Of these, the parts that a program imports by name are imported too.
_PARTS_OF = frozenset({"torch", "numpy", "scipy", "lightning", "pytorch_lightning", "torchvision"})

# ... but not these parts: tensorboard brings tensorflow with it where that is installed,
# inductor and the profiler's daemon start processes or threads.
_NOT_PARTS = (
    "torch.utils.tensorboard",
    "torch._inductor",
    "torch.utils.cpp_extension",
    "torch.distributed.elastic.timer",
)

# Each of these imports torch, and steps an optimizer for the program.
TRAINERS = frozenset(
    {
        "accelerate",
        "fastai",
        "ignite",
        "lightning",
        "peft",
        "pytorch_lightning",
        "sentence_transformers",
        "timm",
        "transformers",
        "trl",
    }
)

_NEEDS_TORCH = TRAINERS | {"torchvision", "torchaudio", "torchdata", "torchmetrics", "torchtext"}

# A variable that a program sets before it imports something, and that is read during that
# import: prefix of the name -> packages that read it.
_READ_BY: tuple[tuple[tuple[str, ...], frozenset[str]], ...] = (
    (
        ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_"),
        PACKAGES,
    ),
    (
        ("TORCH", "PYTORCH_", "TRITON_", "ATEN_", "GLOO_"),
        _NEEDS_TORCH | {"torch"},
    ),
    (
        ("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "ACCELERATE_", "TOKENIZERS_", "DATASETS_", "XDG_"),
        frozenset({"accelerate", "datasets", "huggingface_hub", "peft", "timm", "tokenizers"})
        | {"transformers", "trl"},
    ),
    (("NUMEXPR_",), frozenset({"pandas", "scipy", "sklearn"})),
)


class PreloadPlan(NamedTuple):
    """What to import before forking.

    ``modules`` in this order; ``optimizer_step``: run one step of a torch optimizer, which
    pulls in what torch loads at a program's first step (2 s and more); ``why`` for a
    person; ``first_path`` is what the program has first on ``sys.path``; ``environment`` are
    variables that the program sets before it imports what reads them (name, value, whether
    only as a default).
    """

    modules: tuple[str, ...] = ()
    optimizer_step: bool = False
    why: str = ""
    first_path: str | None = None
    environment: tuple[tuple[str, str, bool], ...] = ()

    @property
    def empty(self) -> bool:
        return not self.modules

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return self._asdict()

    @classmethod
    def from_json(cls, data: object) -> PreloadPlan:
        """Raises ValueError for anything but what `to_json` made."""
        with _reading(cls, data) as given:
            path = given.get("first_path")
            return cls(
                modules=tuple(_text(m) for m in given.get("modules", ())),
                optimizer_step=bool(given.get("optimizer_step", False)),
                why=_text(given.get("why", "")),
                first_path=None if path is None else _text(path),
                environment=tuple(
                    (_text(k), _text(v), bool(d)) for k, v, d in given.get("environment", ())
                ),
            )


def plan_for(scan: ImportScan, extra: Sequence[str] = (), auto: bool = False) -> PreloadPlan:
    """Decide what to preload for a scanned program.

    ``extra`` are modules that the user named (``--preload``): they are taken as they are.
    With ``auto`` everything that the script itself imports at its top level is taken, local
    modules too. Nothing worth it: an empty plan, whose ``why`` says so.
    """
    local = scan.local
    wanted: list[str] = []
    left_out: dict[str, str] = {}
    chosen = {n for n in scan.imports - local if n in PACKAGES}
    if chosen & _NEEDS_TORCH:
        chosen.add("torch")
    if scan.changes_path:
        for name in sorted(chosen - {"torch", "numpy"}):
            left_out[name] = "the program changes sys.path, so it may mean another package"
    used: dict[str, tuple[str, str, bool]] = {}
    for setting in scan.settings:
        readers = {n for n in _readers(setting.name) & chosen if setting.line < _loaded(n, scan)}
        if setting.value is not None:
            if readers:
                used[setting.name] = (setting.name, setting.value, setting.default)
            continue
        for name in sorted(readers):
            left_out.setdefault(
                name,
                f"the program sets {setting.name} ({setting.where}), which is read when {name} "
                "is imported; set it in the environment instead",
            )
    if "torch" in left_out:
        for name in chosen & _NEEDS_TORCH:
            left_out.setdefault(name, "it imports torch")
    chosen -= left_out.keys()
    # torch first: it brings numpy along, and libraries bind to the first OpenMP they find.
    for name in sorted(chosen, key=lambda n: (n != "torch", n != "numpy", n)):
        wanted.append(name)
        if name in _PARTS_OF:
            wanted += sorted(
                d
                for d in scan.dotted
                if d.startswith(name + ".") and not (d + ".").startswith(_dotted(_NOT_PARTS))
            )
    if "phalanx" in scan.imports - local and "torch" in chosen:
        wanted += sorted(d for d in scan.dotted if d.startswith("phalanx.training"))
    if auto:
        wanted += [m for m in scan.direct if m.partition(".")[0] not in left_out]
    wanted += extra
    modules = tuple(dict.fromkeys(wanted))
    step = scan.uses_optimizer and "torch" in modules
    return PreloadPlan(
        modules=modules,
        optimizer_step=step,
        why=_explain(scan, modules, step, left_out),
        first_path=scan.first_path,
        environment=tuple(used.values()) if modules else (),
    )


def _readers(variable: str) -> frozenset[str]:
    for prefixes, packages in _READ_BY:
        if variable.startswith(prefixes):
            return packages
    return frozenset()


def _loaded(name: str, scan: ImportScan) -> float:
    """The line of the main file at which a package is imported at the latest."""
    carriers = {name}
    if name in ("torch", "numpy"):
        carriers |= _NEEDS_TORCH | {"torch"}
    return min((scan.lines[c] for c in carriers if c in scan.lines), default=float("inf"))


def _dotted(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(n + "." for n in names)


def _explain(
    scan: ImportScan, modules: Sequence[str], step: bool, left_out: Mapping[str, str]
) -> str:
    parts = []
    if scan.problem is not None:
        parts.append(str(scan.problem))
    if modules:
        parts.append(f"imports {', '.join(modules[:4])}{', ...' if len(modules) > 4 else ''}")
    elif not left_out and scan.problem is None:
        parts.append("imports nothing that is slow to import")
    if step:
        parts.append("uses an optimizer")
    parts += [f"not {name}: {reason}" for name, reason in left_out.items()]
    return "; ".join(parts)


def unlike(keeper: Mapping[str, str], worker: Mapping[str, str]) -> list[str]:
    """Names of variables that take effect only when an interpreter or a library starts.

    Given are two environments. A program whose environment differs from its keeper's in one
    of these cannot be warm: it would silently run with the keeper's value.
    """
    names = {n for n in {*keeper, *worker} if keeper.get(n) != worker.get(n)}
    return sorted(n for n in names if n == "LANG" or n.startswith(_AT_START))


_AT_START = (
    *("PYTHON", "LD_", "MALLOC_", "GLIBC_", "LC_", "OMP_", "GOMP_", "KMP_", "MKL_"),
    *("OPENBLAS_", "GOTO_", "BLIS_", "NUMEXPR_"),
)


# ---------------------------------------------------------------------------------------
# Doing it, in the keeper
# ---------------------------------------------------------------------------------------


class PreloadReport(NamedTuple):
    """What came of a plan.

    ``imported``: the modules of the plan that are there; ``failed``: the others, each with its
    error (the program will meet the same one and report it); ``safe``: whether workers may
    be forked from this process; ``why_not`` if not, in one line; ``seconds`` it took;
    ``output``: the end of what the imports wrote to the standard streams.
    """

    imported: tuple[str, ...] = ()
    failed: Mapping[str, str] = {}
    safe: bool = True
    why_not: str = ""
    seconds: float = 0.0
    output: str = ""

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return self._asdict()

    @classmethod
    def from_json(cls, data: object) -> PreloadReport:
        """Raises ValueError for anything but what `to_json` made."""
        with _reading(cls, data) as given:
            return cls(
                imported=tuple(_text(m) for m in given.get("imported", ())),
                failed={_text(k): _text(v) for k, v in dict(given.get("failed", {})).items()},
                safe=bool(given.get("safe", False)),
                why_not=_text(given.get("why_not", "")),
                seconds=float(given.get("seconds", 0.0)),
                output=_text(given.get("output", "")),
            )


@contextmanager
def _reading(kind: type[PreloadPlan | PreloadReport], data: object) -> Iterator[Mapping[str, Any]]:
    if not isinstance(data, dict) or not data.keys() <= set(kind._fields):
        raise ValueError(f"not a {kind.__name__}: {str(data)[:80]}")
    try:
        yield data
    except (TypeError, ValueError) as error:
        raise ValueError(f"not a {kind.__name__}: {error}") from None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def perform(plan: PreloadPlan) -> PreloadReport:
    """Import what the plan says, here, and find out whether this process can still be forked.

    Never raises for what an import does, SystemExit included. What imports print is kept
    from the standard streams. Leaves the garbage collector's objects frozen, so that
    collections in workers leave their pages shared. Random generators are no concern here:
    each worker seeds them anew. Uses the environment as it is: variables such as
    ``OMP_NUM_THREADS`` have to be there before.
    """
    import gc

    from phalanx.process import bootstrap

    started = time.monotonic()
    if plan.empty:
        return PreloadReport()
    if plan.first_path is not None:
        bootstrap.search_path.first = plan.first_path
    before = _Surroundings.now()
    environment = dict(os.environ)
    # torch asks the driver's management library, not the driver, whether there is a device:
    # the driver, once asked, does not survive a fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for variable, value, default in plan.environment:
        if not (default and variable in os.environ):
            os.environ[variable] = value
    asked = dict(os.environ)
    failed: dict[str, str] = {}
    imported: list[str] = []
    collecting = gc.isenabled()
    gc.disable()
    known = frozenset(map(id, sys.modules.values()))
    try:
        with _quiet() as output:
            for name in plan.modules:
                error = _try(_import(name))
                if error is None:
                    imported.append(name)
                else:
                    failed[name] = error
            if plan.optimizer_step and "torch" in imported:
                error = _try(_optimizer_step)
                if error is not None:
                    failed["torch.optim (one step)"] = error
            changed = {
                name: (asked.get(name), os.environ.get(name))
                for name in {*asked, *os.environ}
                if asked.get(name) != os.environ.get(name)
            }
            os.environ.clear()
            os.environ.update(environment)
            ourselves = any(_is_ours(name) for name in imported) or _are_used(known)
            bootstrap.inherit(changed, ourselves)
            why_not = _trial()
        why_not = why_not or before.what_changed()
    finally:
        if collecting:
            gc.enable()
    gc.collect()
    gc.freeze()
    return PreloadReport(
        imported=tuple(imported),
        failed=failed,
        safe=not why_not,
        why_not=why_not,
        seconds=time.monotonic() - started,
        output=output(),
    )


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == "phalanx"


def _are_used(known: frozenset[int]) -> bool:
    """Whether a module imported since ``known`` (ids of modules) uses this package.

    Then our modules must stay loaded in a worker: the program's own imports would make them a
    second time, and what is preloaded would use other classes than the program does.
    """
    for name, module in list(sys.modules.items()):
        if id(module) in known:  # whatever its name: multiprocessing gives the main one another
            continue
        if _is_ours(name):
            return True
        for value in list(getattr(module, "__dict__", {}).values()):
            # of these kinds only: to ask others for an attribute may run anything
            kind = type(value)
            if kind is ModuleType:
                owner = value.__dict__.get("__name__")
            elif kind is FunctionType or kind is type:
                owner = value.__module__
            else:
                continue
            if isinstance(owner, str) and _is_ours(owner):
                return True
    return False


def _import(name: str) -> Callable[[], object]:
    def act() -> None:
        import importlib

        importlib.import_module(name)

    return act


def _try(act: Callable[[], object]) -> str | None:
    try:
        act()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__}: {error}"[:500]
    return None


def _optimizer_step() -> None:
    """One step of AdamW on two numbers, on the CPU, without a backward pass.

    (A backward pass would start a thread for each device there is.)
    """
    import torch

    available = torch.cuda.is_available
    # The step asks it, to see whether it is being recorded. The answer may initialise.
    torch.cuda.is_available = lambda: False
    try:
        weight = torch.nn.Parameter(torch.zeros(2, device="cpu"))
        weight.grad = torch.zeros(2, device="cpu")
        optimizer = torch.optim.AdamW([weight], lr=1e-3)
        optimizer.step()
        optimizer.zero_grad()
    finally:
        torch.cuda.is_available = available


@contextmanager
def _quiet() -> Iterator[Callable[[], str]]:
    """Descriptors 1 and 2 go to memory; yields a function that gives the end of it.

    The stream objects stay in place, for log handlers made meanwhile keep them.
    """
    memory = os.memfd_create("phalanx-preload", os.MFD_CLOEXEC)
    saved: dict[int, int | None] = {}
    text = ""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                pass

    flush()
    for fd in (1, 2):
        try:
            saved[fd] = os.dup(fd)
        except OSError:
            saved[fd] = None
        os.dup2(memory, fd)
    try:
        yield lambda: text
    finally:
        flush()
        for fd, copy in saved.items():
            if copy is None:
                os.close(fd)
            else:
                os.dup2(copy, fd)
                os.close(copy)
        size = os.fstat(memory).st_size
        start = max(0, size - _OUTPUT_LIMIT)
        text = os.pread(memory, _OUTPUT_LIMIT, start).decode(errors="replace")
        os.close(memory)


# ---------------------------------------------------------------------------------------
# Is it safe to fork?
# ---------------------------------------------------------------------------------------

# Threads that do no harm, by name, because their library restarts them in a child itself.
_HARMLESS_THREADS = frozenset({"jemalloc_bg_thd"})

_DEVICES = (
    "/dev/nvidia-uvm",  # opened with a context; the management library does without
    "/dev/davinci",
    "/dev/kfd",
    "/dev/dri/",
    "/dev/accel",
    "/dev/infiniband/",
    "/dev/habanalabs",
    "/dev/xpu",
)

_ACCELERATORS = ("cuda", "xpu", "mps", "npu", "mtia", "hpu", "mlu", "musa")


class _Surroundings(NamedTuple):
    """Descriptors and children of this process at one time."""

    descriptors: Mapping[int, str]
    children: frozenset[int]

    @classmethod
    def now(cls) -> _Surroundings:
        return cls(_descriptors(), _children())

    def what_changed(self) -> str:
        """What imports left behind that a forked worker must not share; empty if nothing."""
        threads = _threads()
        if threads:
            return f"imports left threads running: {', '.join(threads)}"
        for fd, target in _descriptors().items():
            if self.descriptors.get(fd) == target:
                continue
            if target.startswith(_DEVICES):
                return f"imports opened the device {target}"
            if target.startswith(("socket:", "pipe:", "anon_inode:")):
                return f"imports opened a descriptor that workers would share: {target}"
        started = _children() - self.children
        if started:
            return f"imports started a process ({min(started)})"
        return ""


def _threads() -> list[str]:
    names = []
    for task in os.listdir("/proc/self/task"):
        if int(task) != os.getpid():
            try:
                with open(f"/proc/self/task/{task}/comm") as file:
                    names.append(file.read().strip())
            except OSError:  # it has just ended
                pass
    return sorted(n for n in names if n not in _HARMLESS_THREADS)


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the one that lists
            pass
    return found


def _children() -> frozenset[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return frozenset(int(pid) for pid in file.read().split())
    except OSError:  # a kernel without it
        return frozenset()


def _trial() -> str:
    """Fork once and let the child compute; why workers must not be forked, or empty.

    Some libraries (OpenBLAS) end their threads themselves when the process forks, so this
    comes before threads are counted.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            os.write(write, (_try_out() or "-").encode()[:1000])
        finally:
            os._exit(0)
    os.close(write)
    try:
        return _verdict(read, pid)
    finally:
        os.close(read)


def _verdict(read: int, pid: int) -> str:
    import select
    import signal

    poller = select.poll()
    poller.register(read, select.POLLIN)
    answered = poller.poll(_TRIAL_SECONDS * 1000)
    answer = os.read(read, 1000).decode(errors="replace") if answered else ""
    try:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):  # children are not waited for here
        status = -1
    if not answered:
        return f"a forked child did not answer within {_TRIAL_SECONDS:g} s"
    if not answer:
        return f"a forked child died (wait status {status})"
    return "" if answer == "-" else answer


def _try_out() -> str:
    torch = sys.modules.get("torch")
    if torch is None:
        return ""
    for name in _ACCELERATORS:
        accelerator = getattr(torch, name, None)
        if accelerator is None:
            continue
        bad_fork = getattr(accelerator, "_is_in_bad_fork", None)
        if bad_fork is not None and bad_fork():
            return f"imports made {name} ready for use, which a forked worker cannot undo"
        initialised = getattr(accelerator, "is_initialized", None)
        if initialised is not None and initialised():
            return f"imports initialised {name}"
    # Large enough to go to the thread pools.
    error = _try(lambda: torch.ones(256, 256) @ torch.ones(256, 256))
    return f"torch does not compute in a forked child: {error}" if error else ""
