"""Training that goes on when ranks fail. See ``docs/training.md``."""

from phalanx.training.data import Batches
from phalanx.training.faults import DeviceFault, NetworkFault
from phalanx.training.member import LostState, Recovery
from phalanx.training.session import Job, Step, session
from phalanx.training.state import StateMismatch
from phalanx.training.wrappers import UnsupportedTorch

__all__ = [
    "Batches",
    "DeviceFault",
    "Job",
    "LostState",
    "NetworkFault",
    "Recovery",
    "StateMismatch",
    "Step",
    "UnsupportedTorch",
    "session",
]
