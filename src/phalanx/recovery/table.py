"""The rules, as a table: state, event, guard, next state, what happens.

The first row whose state, event and guard match applies. ``rows`` adds, after a state's own
rows, the common ones, so that every event has an answer in every state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from phalanx.recovery import model as m
from phalanx.recovery.model import Event, State

S = State


class _Decided:
    """Stands for: whatever was chosen."""

    value = "as chosen"


DECIDED: Final = _Decided()

CHOICES = (
    S.ROUTING,
    S.RETRYING,
    S.RESTARTING,
    S.REPLACING,
    S.SHRINKING,
    S.DUMPING,
    S.EXITING,
)
"""Where ``as chosen`` may lead."""


@dataclass(frozen=True)
class Row:
    """One rule. ``next`` None: the state stays."""

    state: State | None  # None: every state
    event: type[Event]
    guard: str
    next: State | _Decided | None
    does: str


SENDS: dict[State, str] = {
    S.STOPPING: "stopTrain [stop_train]",
    S.AGREEING: "globalFault [on_global_rank, fault_nodes_exit]",
    S.RETRYING: "changeStrategy retry",
    S.RESTARTING: "changeStrategy recover + recover-in-place [fault_nodes_restart]",
    S.REPLACING: "changeStrategy recover",
    S.SHRINKING: "changeStrategy downgrade",
    S.ISOLATING: "faultNodesExit [fault_nodes_exit]",
    S.GROWING: "changeStrategy upgrade",
    S.SAVING: "saveAndExit [save_and_exit]",
    S.DUMPING: "changeStrategy dump",
    S.EXITING: "changeStrategy exit (after a dump: dump_exit)",
    S.KILLING: "killMaster",
    S.PAUSING: "stopTrain [pause_train]",
    S.SWITCHING: "SwitchRankList, to the workers",
    S.TESTING: "StressTestRankParams, to the workers",
    S.CONTINUING: "changeStrategy continue",
    S.PREPARING: "hot-switch [hot switch]",
    S.SPARE_RUNNING: "hot-switch [new pod running]",
    S.MIGRATING: "changeStrategy migration",
}

AWAITS: dict[State, tuple[str, str]] = {
    S.STOPPING: ("ReportStopComplete", "report_timeout"),
    S.CLEARING: ("hardware faults that may clear by themselves", "clear_wait"),
    S.AGREEING: ("ReportRecoverStrategy", "report_timeout"),
    S.ROUTING: ("the faulty link's end", "routing_wait"),
    S.RETRYING: ("ReportRecoverStatus", "report_timeout"),
    S.RESTARTING: ("ReportRecoverStatus", "report_timeout"),
    S.REPLACING: ("ReportRecoverStatus; a new node", "report_timeout; reschedule_timeout"),
    S.SHRINKING: ("ReportRecoverStatus 201", "report_timeout"),
    S.ISOLATING: ("ReportRecoverStatus 0", "report_timeout"),
    S.SMALLER: ("the missing nodes (training goes on)", "none"),
    S.GROWING: ("ReportRecoverStatus", "report_timeout"),
    S.SAVING: ("ReportRecoverStatus dump", "report_timeout"),
    S.DUMPING: ("ReportRecoverStatus dump", "report_timeout"),
    S.EXITING: ("a new subscriber, or ReportRecoverStatus exit", "exit_wait"),
    S.KILLING: ("delivery", "kill_wait"),
    S.PAUSING: ("ReportStopComplete", "report_timeout"),
    S.SWITCHING: ("ReplySwitchNicResult", "report_timeout"),
    S.TESTING: ("ReplyStressTestResult", "report_timeout"),
    S.CONTINUING: ("ReportRecoverStatus", "report_timeout"),
    S.PREPARING: ("the spare node", "spare_wait"),
    S.SPARE_RUNNING: ("ReportRecoverStrategy", "report_timeout"),
    S.OLD_LEAVING: ("the old node's end", "leave_wait"),
    S.MIGRATING: ("ReportRecoverStatus", "report_timeout"),
}


def _row(
    state: State | None, event: type[Event], guard: str, next_: State | _Decided | None, does: str
) -> Row:
    return Row(state, event, guard, next_, does)


def _fixing(state: State) -> list[Row]:
    """What retrying, restarting and replacing have in common."""
    return [
        _row(state, m.Status, "fits, 0, faults waiting", S.STOPPING, "waiting faults, next round"),
        _row(state, m.Status, "fits, 0", S.IDLE, "succeed"),
        *(
            [_row(state, m.Status, "fits, 405", S.AGREEING, "faults are normal, ask again")]
            if state is S.RETRYING
            else []
        ),
        _row(state, m.Status, "fits", DECIDED, "rule out, choose"),
        _row(
            state,
            m.FaultSeen,
            "worse, keyed client",
            S.STOPPING,
            "old and new faults, next round",
        ),
        _row(
            state,
            m.FaultSeen,
            "worse, keyed client, no round left",
            DECIDED,
            "enough rounds, choose",
        ),
        _row(state, m.FaultSeen, "new fault", None, "keep for the next round"),
        _row(state, m.Timeout, "client there", DECIDED, "rule out (late), choose"),
        _row(state, m.Timeout, "", DECIDED, "silent, choose"),
        _row(state, m.NodeReplaced, "", None, "note the new node"),
    ]


def _maintaining(state: State) -> list[Row]:
    return [_row(state, m.FaultSeen, "new fault", S.STOPPING, "faults end it")]


ROWS: tuple[Row, ...] = (
    # nothing going on
    _row(S.IDLE, m.FaultSeen, "new fault, dump only", S.SAVING, "begin an episode"),
    _row(S.IDLE, m.FaultSeen, "new fault", S.STOPPING, "begin an episode"),
    _row(S.IDLE, m.FaultSeen, "sub-health, hot switch", S.PREPARING, "start hot switch"),
    _row(S.IDLE, m.SwitchNic, "", S.PAUSING, "start maintenance"),
    _row(S.IDLE, m.StressTest, "", S.PAUSING, "start maintenance"),
    _row(S.IDLE, m.HotSwitch, "switch allowed", S.PREPARING, "start hot switch"),
    _row(S.IDLE, m.HotSwitch, "", None, "refuse"),
    # stop, agree, choose
    _row(S.STOPPING, m.StopComplete, "fits, 0, may clear", S.CLEARING, "nothing"),
    _row(S.STOPPING, m.StopComplete, "fits, 0", S.AGREEING, "nothing"),
    _row(S.STOPPING, m.StopComplete, "fits, 404", S.KILLING, "give up"),
    _row(S.STOPPING, m.StopComplete, "fits", DECIDED, "cannot stop, choose"),
    _row(S.STOPPING, m.FaultSeen, "new fault", None, "merge"),
    _row(S.STOPPING, m.Timeout, "", DECIDED, "silent, choose"),
    _row(S.CLEARING, m.FaultCleared, "nothing left to clear", S.AGREEING, "forget the fault"),
    _row(S.CLEARING, m.FaultSeen, "new fault", None, "merge"),
    _row(S.CLEARING, m.Timeout, "", S.AGREEING, "nothing"),
    _row(S.AGREEING, m.Strategies, "fits", DECIDED, "take the offer, choose"),
    _row(S.AGREEING, m.FaultSeen, "worse, keyed client", S.AGREEING, "merge, ask again"),
    _row(S.AGREEING, m.FaultSeen, "new fault", None, "merge"),
    _row(S.AGREEING, m.Timeout, "", DECIDED, "silent, choose"),
    _row(S.ROUTING, m.FaultCleared, "routes are back", S.RETRYING, "forget the fault"),
    _row(S.ROUTING, m.FaultSeen, "new fault", DECIDED, "merge, choose"),
    _row(S.ROUTING, m.Timeout, "", S.RETRYING, "nothing"),
    # the repairs
    *_fixing(S.RETRYING),
    *_fixing(S.RESTARTING),
    *_fixing(S.REPLACING),
    _row(S.REPLACING, m.NodeTimeout, "", DECIDED, "rule out (no node), choose"),
    # fewer nodes, and back
    _row(S.SHRINKING, m.Status, "fits, 201", S.ISOLATING, "note the isolated nodes"),
    _row(S.SHRINKING, m.Status, "fits, 0", S.SMALLER, "smaller world"),
    _row(S.SHRINKING, m.Status, "fits", DECIDED, "rule out, choose"),
    _row(S.SHRINKING, m.FaultSeen, "new fault", None, "keep for the next round"),
    _row(S.SHRINKING, m.Timeout, "client there", DECIDED, "rule out (late), choose"),
    _row(S.SHRINKING, m.Timeout, "", DECIDED, "silent, choose"),
    _row(
        S.ISOLATING, m.Status, "fits, 0, faults waiting", S.STOPPING, "waiting faults, next round"
    ),
    _row(S.ISOLATING, m.Status, "fits, 0", S.SMALLER, "smaller world"),
    _row(S.ISOLATING, m.Status, "fits", DECIDED, "rule out, choose"),
    _row(S.ISOLATING, m.FaultSeen, "new fault", None, "keep for the next round"),
    _row(S.ISOLATING, m.Timeout, "client there", DECIDED, "rule out (late), choose"),
    _row(S.ISOLATING, m.Timeout, "", DECIDED, "silent, choose"),
    _row(S.SMALLER, m.NodeReplaced, "all back", S.GROWING, "note the new node, grow"),
    _row(S.SMALLER, m.NodeReplaced, "", None, "note the new node"),
    _row(S.SMALLER, m.FaultSeen, "new fault elsewhere", S.STOPPING, "new faults, next round"),
    _row(S.GROWING, m.Status, "fits, 0, faults waiting", S.STOPPING, "waiting faults, next round"),
    _row(S.GROWING, m.Status, "fits, 0", S.IDLE, "succeed"),
    _row(S.GROWING, m.Status, "fits", DECIDED, "rule out, choose"),
    _row(
        S.GROWING, m.FaultSeen, "worse, keyed client", S.STOPPING, "old and new faults, next round"
    ),
    _row(S.GROWING, m.FaultSeen, "new fault", None, "keep for the next round"),
    _row(S.GROWING, m.Timeout, "client there", DECIDED, "rule out (late), choose"),
    _row(S.GROWING, m.Timeout, "", DECIDED, "silent, choose"),
    # the ends
    _row(S.SAVING, m.Status, "fits", S.EXITING, "note the dump"),
    _row(S.SAVING, m.Timeout, "", S.EXITING, "leave"),
    _row(S.DUMPING, m.Status, "fits", S.EXITING, "note the dump"),
    _row(S.DUMPING, m.Timeout, "", S.EXITING, "leave"),
    _row(S.EXITING, m.Status, "fits", S.IDLE, "the job has left"),
    _row(S.EXITING, m.Subscribed, "restarted", S.IDLE, "note the subscriber, the job has left"),
    _row(S.EXITING, m.Timeout, "", S.IDLE, "the job has left"),
    _row(S.KILLING, m.Delivered, "awaited", S.IDLE, "the master is dead"),
    _row(S.KILLING, m.Timeout, "", S.IDLE, "the master is dead"),
    _row(S.KILLING, m.GiveUp, "", None, "nothing"),
    # a pause for a NIC switch or a stress test
    _row(S.PAUSING, m.StopComplete, "fits, 499", S.KILLING, "give up"),
    _row(S.PAUSING, m.StopComplete, "NIC", S.SWITCHING, "nothing"),
    _row(S.PAUSING, m.StopComplete, "stress", S.TESTING, "nothing"),
    _row(S.PAUSING, m.Timeout, "", S.KILLING, "give up"),
    *_maintaining(S.PAUSING),
    _row(S.SWITCHING, m.NicSwitched, "switched", S.CONTINUING, "nothing"),
    _row(S.SWITCHING, m.NicSwitched, "", S.STOPPING, "it failed"),
    _row(S.SWITCHING, m.Status, "not 0", S.STOPPING, "it failed"),
    _row(S.SWITCHING, m.Timeout, "", S.STOPPING, "it failed"),
    *_maintaining(S.SWITCHING),
    _row(S.TESTING, m.StressTested, "sound", S.CONTINUING, "resume agents"),
    _row(S.TESTING, m.StressTested, "", S.STOPPING, "it failed"),
    _row(S.TESTING, m.Status, "not 0", S.STOPPING, "it failed"),
    _row(S.TESTING, m.Timeout, "", S.STOPPING, "it failed"),
    *_maintaining(S.TESTING),
    _row(S.CONTINUING, m.Status, "fits, 499", S.KILLING, "give up"),
    _row(S.CONTINUING, m.Status, "fits", S.IDLE, "maintenance done"),
    _row(S.CONTINUING, m.Timeout, "", S.KILLING, "give up"),
    *_maintaining(S.CONTINUING),
    # a node replaced while it still runs
    _row(S.PREPARING, m.NodeReady, "awaited node", S.SPARE_RUNNING, "nothing"),
    _row(S.PREPARING, m.Timeout, "", S.IDLE, "no spare"),
    *_maintaining(S.PREPARING),
    _row(S.SPARE_RUNNING, m.Strategies, "fits, only exit", S.EXITING, "leave, no more switches"),
    _row(S.SPARE_RUNNING, m.Strategies, "fits", S.OLD_LEAVING, "nothing"),
    _row(S.SPARE_RUNNING, m.Timeout, "", S.EXITING, "leave, no more switches"),
    *_maintaining(S.SPARE_RUNNING),
    _row(S.OLD_LEAVING, m.NodeGone, "awaited node", S.MIGRATING, "nothing"),
    _row(S.OLD_LEAVING, m.Timeout, "", S.EXITING, "leave, no more switches"),
    *_maintaining(S.OLD_LEAVING),
    _row(
        S.MIGRATING, m.Status, "fits, 0, faults waiting", S.STOPPING, "waiting faults, next round"
    ),
    _row(S.MIGRATING, m.Status, "fits, 0", S.IDLE, "migrated"),
    _row(S.MIGRATING, m.Status, "fits", S.EXITING, "leave, no more switches"),
    _row(S.MIGRATING, m.FaultSeen, "new fault", None, "keep for the next round"),
    _row(S.MIGRATING, m.Timeout, "", S.EXITING, "leave, no more switches"),
)

COMMON: tuple[Row, ...] = (
    _row(None, m.FaultSeen, "", None, "note the fault"),
    _row(None, m.FaultCleared, "", None, "forget the fault"),
    _row(None, m.StopComplete, "", None, "stale"),
    _row(None, m.Strategies, "", None, "stale"),
    _row(None, m.Status, "", None, "stale"),
    _row(None, m.Timeout, "", None, "nothing"),
    _row(None, m.NodeTimeout, "", None, "nothing"),
    _row(None, m.NodeReplaced, "", None, "nothing"),
    _row(None, m.NodeReady, "", None, "nothing"),
    _row(None, m.NodeGone, "", None, "nothing"),
    _row(None, m.Subscribed, "", None, "repeat the open signal"),
    _row(None, m.Unsubscribed, "", None, "note the loss"),
    _row(None, m.Delivered, "awaited", None, "note the delivery"),
    _row(None, m.Delivered, "", None, "nothing"),
    _row(None, m.SwitchNic, "", None, "busy"),
    _row(None, m.NicSwitched, "", None, "stale"),
    _row(None, m.StressTest, "", None, "busy"),
    _row(None, m.StressTested, "", None, "stale"),
    _row(None, m.HotSwitch, "", None, "busy"),
    _row(None, m.Configured, "", None, "configure"),
    _row(None, m.GiveUp, "", S.KILLING, "give up"),
)
"""What an event does in a state that has no row of its own for it."""

EVENTS: tuple[type[Event], ...] = tuple(dict.fromkeys(row.event for row in COMMON))

_INDEX: dict[tuple[State, type[Event]], tuple[Row, ...]] = {
    (state, event): tuple(
        row for row in (*ROWS, *COMMON) if row.event is event and row.state in (state, None)
    )
    for state in State
    for event in EVENTS
}


def rows(state: State, event: type[Event]) -> tuple[Row, ...]:
    """The rules for this event in this state, in the order in which they are tried."""
    return _INDEX[state, event]
