"""The words of the recovery protocol: codes, strategies, fault types, signals.

Pure constants; the spelling is the wire's (ClusterD's), blanks included.
"""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """Return codes of the protocol (field ``code`` of ``Status``), by what they mean here."""

    OK = 0
    SUCCESS = 200  # GetFaultMsgSignal
    EXIT_ISOLATE_RANKS = 201  # client: scale-in wants these ranks' nodes gone
    UNREGISTERED = 400
    ORDER_MIX = 401  # ours, to clients that send keys: the report is stale
    JOB_NOT_EXIST = 402
    RECOVER_OFF = 403
    NOT_READY = 404  # client: workers have not come up yet
    RECOVERABLE = 405  # client: retry failed, everything below it is still possible
    UNRECOVERABLE = 406  # client: repair failed; dump or exit
    DUMP_ERROR = 407  # client: the checkpoint could not be saved
    NOT_INITIALISED = 408
    INVALID_PARAMETER = 409
    INVALID_RATE = 410
    OM_RUNNING = 411
    OM_PARAMETER_INVALID = 413
    RATE_LIMITED = 429
    CLIENT_ERROR = 499  # client: nothing but exit is possible
    TOO_MANY_JOBS = 500
    JOB_UNKNOWN_YET = 502
    SERVER_ERROR = 599


RETRY = "retry"
IN_PLACE = "recover-in-place"
RECOVER = "recover"
ELASTIC = "elastic-training"
DUMP = "dump"
EXIT = "exit"
LADDER = (RETRY, IN_PLACE, RECOVER, ELASTIC, DUMP, EXIT)
"""The strategies a job may enable, in the order in which they are tried."""

DOWNGRADE = "downgrade"
UPGRADE = "upgrade"
MIGRATION = "migration"
CONTINUE = "continue"
DUMP_EXIT = "dump_exit"

# faultType on the wire
UCE, NORMAL, NETWORK = 0, 1, 2

# signalType on the wire
KEEP_ALIVE = "keep-alive"
STOP_TRAIN = "stopTrain"
GLOBAL_FAULT = "globalFault"
CHANGE_STRATEGY = "changeStrategy"
SAVE_AND_EXIT = "saveAndExit"
FAULT_NODES_EXIT = "faultNodesExit"
KILL_MASTER = "killMaster"
HOT_SWITCH = "hot-switch"
PAUSE_START_AGENT = "pauseStartAgent"
CONTINUE_START_AGENT = "continueStartAgent"

# actions on the wire
A_STOP_TRAIN = "stop_train"
A_PAUSE_TRAIN = "pause_train"
A_GLOBAL = "on_global_rank"
A_CHANGE = "change_strategy"
A_SAVE_AND_EXIT = "save_and_exit"
A_NODES_EXIT = "fault_nodes_exit"
A_NODES_RESTART = "fault_nodes_restart"
A_HOT_SWITCH = "hot switch"
A_STOP_SWITCH = "stop switch"
A_NEW_POD_RUNNING = "new pod running"
A_PAUSE_START = "pause_start_agent"
A_CONTINUE_START = "continue_start_agent"

SHORT_LEVELS = ("RestartRequest", "RestartBusiness")
"""Levels of hardware faults that may clear by themselves, so that ranks can stay in place."""

IGNORED_LEVELS = ("NotHandleFault", "PreSeparateNPU")
SUB_HEALTH_LEVELS = ("SubHealthFault",)

RETRY_CODES = {"80E01801": UCE, "8C1F860B": NETWORK}
"""Device fault codes that can be repaired without replacing a process."""
