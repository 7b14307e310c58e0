"""The names of ``torch.distributed.elastic.multiprocessing.subprocess_handler``."""

from phalanx.elastic.multiprocessing.subprocess_handler.handlers import get_subprocess_handler
from phalanx.elastic.multiprocessing.subprocess_handler.subprocess_handler import (
    SubprocessHandler,
)

__all__ = ["SubprocessHandler", "get_subprocess_handler"]
