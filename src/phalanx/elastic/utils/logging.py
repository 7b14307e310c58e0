"""Loggers of the elastic packages; the level is that of ``LOGLEVEL``, or WARNING."""

from __future__ import annotations

import logging
import os
import sys

from .log_level import get_log_level


def get_logger(name: str | None = None) -> logging.Logger:
    """The logger of that name; without one, of the module that calls."""
    return _setup_logger(name or _derive_module_name(depth=2))


def _setup_logger(name: str | None = None) -> logging.Logger:
    logger = logging.getLogger(name)
    wanted = os.environ.get("LOGLEVEL", "") or get_log_level()
    try:
        logger.setLevel(int(wanted) if wanted.isdigit() else wanted.upper())
    except ValueError:
        # A mistyped level must not keep a job from starting.
        logger.setLevel(get_log_level())
    return logger


def _derive_module_name(depth: int = 1) -> str | None:
    """The module ``depth`` frames up (0 is this function); None when there is no such frame."""
    try:
        name = sys._getframe(depth).f_globals.get("__name__")
    except ValueError:
        return None
    return str(name) if name else None
