"""Drives MindIO TFT's controller (``mindio_ttp``), when that is installed.

Only its documented functions are called: tft_init_controller, tft_start_controller,
tft_register_mindx_callback, tft_query_high_availability_switch,
tft_notify_controller_stop_train, _on_global_rank, _change_strategy, _prepare_action, _dump, and
tft_destroy_controller.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from phalanx.client import reports
from phalanx.client.manager import DLRecoverManager, accepts
from phalanx.recovery import words
from phalanx.recovery.model import Received

log = logging.getLogger("phalanx.client")

_PLACES = ("mindio_ttp.controller_ttp", "mindio_ttp.framework_ttp", "mindio_ttp")
_NIC_PAUSE = 600
_POLL = 5.0
_PATIENCE = 600.0


class Ttp:
    """MindIO's functions, wherever its version keeps them."""

    def __init__(self, modules: list[Any]) -> None:
        self._modules = modules

    def has(self, name: str) -> bool:
        return any(hasattr(module, name) for module in self._modules)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        for module in self._modules:
            if hasattr(module, name):
                return getattr(module, name)  # type: ignore[no-any-return]
        raise AttributeError(f"this version of mindio_ttp has no {name}")


def find() -> Ttp | None:
    """MindIO's modules; None when it is not installed."""
    if importlib.util.find_spec("mindio_ttp") is None:
        return None
    modules = []
    for place in _PLACES:
        try:
            modules.append(importlib.import_module(place))
        except ImportError:
            continue
    return Ttp(modules) if modules else None


def _environment(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise ValueError(f"{name} is not set; MindIO's controller needs it")
    return value


def register_callbacks(ttp: Ttp) -> None:
    """MindIO calls these; a call that raises makes it exit, so that they try hard not to."""

    def guard(name: str, report: Callable[..., int]) -> Callable[..., int]:
        def call(*args: Any) -> int:
            try:
                return report(*args)
            except Exception:
                log.exception("%s could not be reported", name)
                return 1

        return call

    for name, report in (
        ("report_fault_ranks", reports.report_process_fault),
        ("report_stop_complete", reports.report_stop_complete),
        ("report_strategies", reports.report_recover_strategy),
        ("report_result", reports.report_recover_status),
    ):
        ttp.tft_register_mindx_callback(name, guard(name, report))


def start_controller(ttp: Ttp, frame: str) -> None:
    """Starts MindIO's controller in this process. ValueError names a missing variable."""
    world = int(_environment("MS_WORKER_NUM" if frame == "mindspore" else "WORLD_SIZE"))
    arf = os.environ.get("PROCESS_RECOVER") == "on"
    ttp.tft_init_controller(-1, world, False, arf)
    ttp.tft_start_controller(_environment("POD_IP"), int(_environment("TTP_PORT")), False, "")


def register_actions(manager: DLRecoverManager, ttp: Ttp) -> None:
    """What each action of a signal makes MindIO's controller do."""

    def stop(signal: Received) -> None:
        if accepts(ttp.tft_notify_controller_stop_train, 2):
            ttp.tft_notify_controller_stop_train(signal.ranks, "stop")
        else:
            ttp.tft_notify_controller_stop_train(signal.ranks)

    def pause(signal: Received) -> None:
        ttp.tft_notify_controller_stop_train(signal.ranks, "pause", signal.timeout or nic_pause())

    def everywhere(signal: Received) -> None:
        if signal.timeout and accepts(ttp.tft_notify_controller_on_global_rank, 2):
            # MindIO takes 1 to 3600 seconds.
            ttp.tft_notify_controller_on_global_rank(signal.ranks, min(signal.timeout, 3600))
        else:
            ttp.tft_notify_controller_on_global_rank(signal.ranks)

    def change(signal: Received) -> None:
        if signal.extra and accepts(ttp.tft_notify_controller_change_strategy, 2):
            ttp.tft_notify_controller_change_strategy(signal.strategy, signal.extra)
        else:
            ttp.tft_notify_controller_change_strategy(signal.strategy)

    def prepare(action: str) -> Callable[[Received], None]:
        return lambda signal: ttp.tft_notify_controller_prepare_action(action, signal.ranks)

    manager.on_action(words.A_STOP_TRAIN, stop)
    manager.on_action(words.A_PAUSE_TRAIN, pause)
    manager.on_action(words.A_GLOBAL, everywhere)
    manager.on_action(words.A_CHANGE, change)
    manager.on_action(words.A_SAVE_AND_EXIT, lambda signal: ttp.tft_notify_controller_dump())
    for action in (words.A_HOT_SWITCH, words.A_STOP_SWITCH):
        manager.on_action(action, prepare(action))
    manager.on_action(words.A_NEW_POD_RUNNING, lambda signal: log.info("the new node runs"))
    manager.on_action(words.KILL_MASTER, lambda signal: ttp.tft_destroy_controller())


def nic_pause() -> int:
    """How long a NIC switch may keep the job paused, in seconds (HCCL_CONNECT_TIMEOUT x 2.5)."""
    try:
        return min(int(2.5 * int(os.environ["HCCL_CONNECT_TIMEOUT"])), 7200)
    except (KeyError, ValueError):
        return _NIC_PAUSE


def drive(manager: DLRecoverManager, ttp: Ttp, frame: str = "pytorch") -> bool:
    """Starts MindIO's controller and waits until it has processors.

    False: it had none within ten minutes; it is destroyed again.
    """
    register_callbacks(ttp)
    start_controller(ttp, frame)
    register_actions(manager, ttp)
    until = time.monotonic() + _PATIENCE
    while not ttp.tft_query_high_availability_switch():
        # MindIO tells nobody; it has to be asked.
        if time.monotonic() > until or manager._closed.wait(_POLL):
            log.error("MindIO did not become highly available in %d s", _PATIENCE)
            ttp.tft_destroy_controller()
            return False
    return True
