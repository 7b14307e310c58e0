"""``patch_torch_methods``: torch's agent with the recovery protocol.

Importing this module is enough: the patch is applied at once when torch's launcher is loaded,
else when it is imported. Nothing here imports torch.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

__all__ = ["UnknownTorch", "patch_torch_methods", "patched", "set_device_check", "unpatch"]

LAUNCHER = "torch.distributed.launcher.api"
AGENT = "torch.distributed.elastic.agent.server.api"


class UnknownTorch(RuntimeError):
    """This torch is not one whose agent is known; nothing was changed."""


_undo: list[tuple[Any, str, Any]] = []

device_check: tuple[Callable[[], Mapping[int, int]], float] | None = None


def set_device_check(check: Callable[[], Mapping[int, int]] | None, interval: float = 5.0) -> None:
    """Has ``check`` asked every ``interval`` seconds on this node: it gives the local ranks whose
    device is broken with their fault type (0 memory, 1 other, 2 network). None: no check."""
    global device_check
    device_check = None if check is None else (check, interval)


def patched() -> bool:
    """Whether torch's agent is patched in this process."""
    return bool(_undo)


def patch_torch_methods() -> None:
    """Patches torch's launcher and agent (imports them if need be). Idempotent.

    Raises UnknownTorch on a torch other than 2.6 to 2.13, or one whose agent looks different.
    """
    if _undo:
        return
    from importlib import import_module

    launcher, agent = import_module(LAUNCHER), import_module(AGENT)
    _apply(launcher, agent)


def unpatch() -> None:
    """Puts torch's own methods back, and no longer waits for its import."""
    while _undo:
        owner, name, value = _undo.pop()
        setattr(owner, name, value)
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _Waiting)]


def _apply(launcher: ModuleType, agent: ModuleType) -> None:
    from mindx_elastic import _hooks

    _check(launcher, agent)
    simple = agent.SimpleElasticAgent
    package = sys.modules.get("torch.distributed.launcher")
    launch = _hooks.launch_agent(launcher.launch_agent)
    changes: list[tuple[Any, str, Any]] = [
        (launcher, "launch_agent", launch),
        (simple, "_invoke_run", _hooks.invoke_run(simple._invoke_run)),
        (simple, "_initialize_workers", _hooks.initialize_workers(simple._initialize_workers)),
    ]
    if package is not None and hasattr(package, "launch_agent"):
        changes.append((package, "launch_agent", launch))
    for owner, name, value in changes:
        _undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)


def _check(launcher: ModuleType, agent: ModuleType) -> None:
    import inspect

    import torch

    version = torch.__version__.split("+")[0]
    major, minor = (int(part) for part in version.split(".")[:2])
    if not (2, 6) <= (major, minor) <= (2, 13):
        raise UnknownTorch(
            f"torch {version} is not one this patch knows (2.6 to 2.13); nothing was changed. "
            "Start the job with 'phalanx run' instead, which needs no patch"
        )
    wanted: list[tuple[Any, str, tuple[str, ...]]] = [
        (launcher, "launch_agent", ("config", "entrypoint", "args")),
        (agent.SimpleElasticAgent, "_invoke_run", ("self", "role")),
        (agent.SimpleElasticAgent, "_initialize_workers", ("self", "worker_group")),
        (agent.SimpleElasticAgent, "_restart_workers", ("self", "worker_group")),
        (agent.SimpleElasticAgent, "_stop_workers", ("self", "worker_group")),
        (agent.SimpleElasticAgent, "_monitor_workers", ("self", "worker_group")),
    ]
    for owner, name, parameters in wanted:
        function = getattr(owner, name, None)
        if function is None or not set(parameters) <= set(inspect.signature(function).parameters):
            raise UnknownTorch(
                f"torch {version}: {getattr(owner, '__name__', owner)}.{name} is not what this "
                "patch knows; nothing was changed"
            )


class _Waiting(importlib.abc.MetaPathFinder):
    """Applies the patch when torch's launcher has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != LAUNCHER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        sys.meta_path[:] = [f for f in sys.meta_path if f is not self]
        loader, run = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            try:
                if not _undo:
                    _apply(module, sys.modules[AGENT])
            except UnknownTorch as error:
                print(f"mindx_elastic: {error}", file=sys.stderr)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _activate() -> None:
    if LAUNCHER in sys.modules and hasattr(sys.modules[LAUNCHER], "launch_agent"):
        try:
            patch_torch_methods()
        except UnknownTorch as error:
            print(f"mindx_elastic: {error}", file=sys.stderr)
    elif not any(isinstance(f, _Waiting) for f in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


_activate()
