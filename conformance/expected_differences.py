"""Where Phalanx differs from torch 2.13 on purpose, and why.

A difference that is not listed is a failure; so is a listed one that is no longer there, or
that shows other values than listed. `on` names the case and gives the reason for all that
follow in the braces: place in the observation -> (torch's, ours).
"""

from __future__ import annotations

from typing import Any

from compare import MISSING, Difference

EXPECTED: list[Difference] = []


def on(case: str, why: str, differences: dict[str, tuple[Any, Any]]) -> None:
    EXPECTED.extend(Difference(case, at, t, o, why) for at, (t, o) in differences.items())


# ------------------------------------------------------------------ names and shapes

on(
    "T0.torch_not_imported",
    "The agent starts in a fraction of a second and runs where torch is not installed.",
    {"torch imported": (True, False)},
)
NEWER = "As in torch after 2.13: given, else TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT, else 300."
on(
    "T0.signatures",
    NEWER,
    {
        "elastic/agent/server:SimpleElasticAgent.exit_barrier_timeout": ("1 = 300", "1 = None"),
        "elastic/agent/server/local_elastic_agent:LocalElasticAgent.exit_barrier_timeout": (
            "3 = 300",
            "3 = None",
        ),
        "launcher:LaunchConfig.exit_barrier_timeout": (MISSING, "23 = None"),
    },
)
on(
    "T0.dataclass_fields",
    NEWER,
    {"launcher:LaunchConfig.exit_barrier_timeout": (MISSING, "23 = None")},
)
on(
    "T0.signatures",
    "Releases between 2.4 and 2.13 passed is_restart; it is accepted and ignored.",
    {
        "elastic/agent/server/local_elastic_agent:LocalElasticAgent/_shutdown.is_restart": (
            MISSING,
            "3 = False",
        )
    },
)
on(
    "T0.signatures",
    "Older callers leave numa_options out.",
    {
        "elastic/multiprocessing/api:_wrap.numa_options": ("8", "8 = None"),
        "elastic/multiprocessing/subprocess_handler:SubprocessHandler.numa_options": (
            "6",
            "6 = None",
        ),
    },
)
on(
    "T0.signatures",
    "Not given: the context's own shutdown timeout, so that one setting holds on every path.",
    {"elastic/multiprocessing:PContext/close.timeout": ("2 = 30", "2 = None")},
)
on(
    "T0.dataclass_fields",
    "Whole seconds cannot tell a cause from its echo; the time in nanoseconds stands beside.",
    {"elastic/multiprocessing:ProcessFailure.timestamp_ns": (MISSING, "7")},
)

# ------------------------------------------------------------------ the agent

UNHEALTHY = "A job that ended unhealthy did not succeed: exit status 0 would hide the failure."
on(
    "T14.always_failing",
    UNHEALTHY,
    {
        f"UNHEALTHY {n}.result.returned": (["UNHEALTHY", False, {}], ["FAILED", True, {}])
        for n in (0, 3)
    },
)
on(
    "T16.unknown_state",
    "The same failure with a name: RuntimeError is an Exception.",
    {
        f"{state}.result.raised": ("Exception", "RuntimeError")
        for state in ("INIT", "STOPPED", "UNKNOWN")
    },
)
GRACEFUL = "A node told that it is not needed leaves with success and no results; torch crashes."
on(
    "T25.graceful_exit",
    GRACEFUL,
    {f"{k}.result.returned": (None, ["SUCCEEDED", False, {}]) for k in ("first", "later")},
)
on(
    "T125.torch_signals",
    GRACEFUL,
    {"graceful.result.returned": (None, ["SUCCEEDED", False, {}])},
)
on("T26.graceful", GRACEFUL, {"raised": ("AttributeError", MISSING), "returned": (MISSING, {})})
WHEN = "Events carry the time they happened (ms since the epoch) instead of 0."
on("T27.agent_events", WHEN, {f"{k}.timestamp": ("0", "a time") for k in ("failed", "succeeded")})
on(
    "T28.worker_event",
    WHEN,
    {f"{k}.timestamp": ("0", "a time") for k in ("duration", "full", "plain")},
)
on(
    "T33.store_helpers",
    "The store's timeout is put back after an error too.",
    {"after an error": (1.5, 5.0)},
)
on(
    "T36.stop_timeout",
    "The shutdown timeout asked for holds for restarts too, not only at the end.",
    {"stop": ([[15, 30], {}], [[15, 7], {}])},
)

# ------------------------------------------------------------------ workers

on(
    "T40.nothing_else",
    "How a worker finds its channel and progress page; removed with them.",
    {"": ([], ["PHALANX_CHANNEL_FD", "PHALANX_PROGRESS_FD", "PHALANX_WORKER"])},
)
on(
    "T55.subprocess_group",
    "Function workers lead sessions of their own as programs do, so that all they started can "
    "be found and ended.",
    {"function": ([True, True], [False, False])},
)
on(
    "T61.macros",
    "Arguments are the program's: only ${local_rank} and $local_rank are replaced.",
    {
        f"strings.{r}": (
            [str(r), str(r), "a$b", "$other", "${rank}", "100%", "x"],
            [str(r), str(r), "a$$b", "$other", "${rank}", "100%", "x"],
        )
        for r in (0, 1)
    },
)
on(
    "T62.dstate",
    "A worker that the kernel holds is a failure of the job, told as one.",
    {
        "end.failed": (False, True),
        "end.state": ("UNHEALTHY", "FAILED"),
        "end.failures.0": (
            MISSING,
            {
                "local": 0,
                "code": -9,
                "signal": "SIGKILL",
                "file": "N/A",
                "message": "str",
                "text": [
                    (
                        "stuck in uninterruptible sleep (state D) for <N> s: the kernel holds it, "
                        "most often for a device or a network file system"
                    )
                ],
                "data": "<NONE>",
            },
        ),
    },
)
_EXIT_3 = {
    "state": "FAILED",
    "failed": True,
    "values": {},
    "failures": {
        "0": {
            "local": 0,
            "code": 3,
            "signal": "<N/A>",
            "file": "N/A",
            "message": "str",
            "text": [
                "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
            ],
            "data": "<NONE>",
        }
    },
}
on(
    "T99.garbage_error_file",
    "An error file a dying worker left half written must not end the agent; restarts go on.",
    {
        label: ([{"raised": error}, 1], [_EXIT_3, 0])
        for label, error in (
            ("empty", "JSONDecodeError"),
            ("half", "JSONDecodeError"),
            ("keys", "KeyError"),
            ("list", "TypeError"),
        )
    },
)
on(
    "T91.vanishing_function",
    "A function worker that leaves with 0 and no value has the value None; torch waits for ever.",
    {"state": ("HEALTHY for ever", "SUCCEEDED")},
)
on(
    "T90.grandchild",
    "What a dead worker had started is ended with it.",
    {"ended with its parent": (False, True)},
)
on(
    "T89.function_pdeathsig",
    "No worker outlives its agent, whatever the agent dies of.",
    {"program": ([False, False], [True, True])},
)
on(
    "T93.same_attempt_twice",
    "Logs of an earlier start are never deleted.",
    {"kept": (False, True), "same path": (True, False)},
)
on(
    "T70.std_from_str",
    "Ranks of two and more digits can be named.",
    {
        "0:1,10:3.raised": ("ValueError", MISSING),
        "0:1,10:3.returned": (MISSING, {"0": 1, "10": 3}),
        "10:1.raised": ("ValueError", MISSING),
        "10:1.returned": (MISSING, {"10": 1}),
    },
)
on(
    "T86.handlers",
    "A signal that cannot be caught is skipped with a warning, like an unknown one.",
    {"kill.raised": ("OSError", None)},
)
RESTORED = "The caller's handlers are put back, and a hang-up that nohup ignores stays ignored."
on(
    "T86.restored_afterwards",
    RESTORED,
    {
        "after.SIGHUP": ("handled", "ignored"),
        "after.SIGTERM": ("handled", "default"),
        "during.SIGHUP": ("handled", "ignored"),
    },
)
on("T86.handlers_afterwards", RESTORED, {"SIGTERM": ("changed", "default")})
on(
    "T95.tail_logfile",
    "Without a filter all lines are wanted.",
    {"none": ("", "h:a\nh:b\n")},
)

# ------------------------------------------------------------------ errors

EXACT = "The time of the error in nanoseconds stands beside torch's whole seconds."
on(
    "T76.raising",
    EXACT,
    {
        "keys": (
            [["message"], ["extraInfo", "message"], ["py_callstack", "timestamp"]],
            [["message"], ["extraInfo", "message"], ["py_callstack", "timestamp", "timestamp_ns"]],
        )
    },
)
on(
    "T96.record",
    EXACT,
    {
        f"{k}.file.message.extraInfo.timestamp_ns": (MISSING, "[str, True]")
        for k in ("bad", "chained", "lines", "no text", "old file")
    },
)
on(
    "T46.agent_error_file",
    EXACT,
    {"file.message.extraInfo.timestamp_ns": (MISSING, "[str, True]")},
)
_TRAITS = {"category": "system_terminated_error", "retryability": "False"}
on(
    "T98.failures",
    "These traits are for a failure with a status; torch's later failures get an earlier one's.",
    {
        f"none, {code}.returned.data.errorTraits": (_TRAITS, MISSING)
        for code in ("-11", "-127", "-9")
    },
)
on(
    "T98.failures",
    "A file without a time is as old as the file, not of 1970 and so always the root cause.",
    {"flat, no time.returned.timestamp": (0, "now")},
)
on(
    "T99.garbage",
    "A file that is no JSON object is as none: the failure itself must not get lost.",
    {
        "empty": ("JSONDecodeError", None),
        "half": ("JSONDecodeError", None),
        "list": ("TypeError", None),
        "no extraInfo": ("KeyError", None),
        "not json": ("JSONDecodeError", None),
    },
)
on(
    "T101.collateral",
    "In one second: a crash is a cause, an exception perhaps its echo, one ended by the agent "
    "never a cause; torch takes the first polled.",
    {"ended first in dict": (2, 0), "exception first in dict": (0, 1)},
)
on(
    "T97.handler_methods",
    "A root cause whose file is gone does not hide the error that is being passed on.",
    {"missing root": ("FileNotFoundError", None)},
)
_TWO = (
    "\n{0}\ntrain.py FAILED\n{1}\nFailures:\n[0]:\n  time      : <TIME>\n  host      : <HOST>\n"
    "  rank      : 0 (local_rank: 0)\n  exitcode  : 1 (pid: <PID>) \n  error_file: <N/A>\n"
    "  traceback : Traceback:\n{2}  line\n{2}ValueError: x\n{1}\n"
    "Root Cause (first observed failure):\n[1]:\n  time      : <TIME>\n  host      : <HOST>\n"
    "  rank      : 3 (local_rank: 1)\n  exitcode  : -9 (pid: <PID>)  (SIGKILL)\n"
    "  error_file: <N/A>\n  traceback : Signal 9 (SIGKILL) received by PID <PID>\n{0}"
)
on(
    "T100.message",
    "A traceback is indented below its heading whichever form its file had.",
    {
        place: tuple(_TWO.format(a * 52, b * 52, indent) for indent in ("", "  "))  # type: ignore[misc]
        for place, a, b in (("two", "=", "-"), ("format", "#", "~"))
    },
)

# ------------------------------------------------------------------ timers

on(
    "T119.default_scopes",
    "The default scope names the caller's line, as its documentation says; torch's always names "
    "one line of contextlib, so that an inner block replaces an outer one.",
    {"names this file": (False, True), "other place, different": (False, True)},
)
on("T104.server_life", "Only the job's user may end its workers.", {"mode": ("0o644", "0o600")})
on(
    "T117.stop_without_client",
    "The server's thread ends with it.",
    {"thread ended": (False, True)},
)
KILLED = "An expired timer ends the worker and nobody else; torch's server then kills the agent."
on(
    "T107.expiry",
    KILLED,
    {
        "SIGKILL.signals to the server's own process": ([9], []),
        "SIGTERM.signals to the server's own process": ([15], []),
    },
)
on(
    "T109.one_kill_per_process",
    KILLED,
    {"reaped": ([[True, 9], [False, 9]], [[True, 9]])},
)
on(
    "T113.junk",
    "A malformed line costs itself, not the good ones that came with it.",
    {f"{k}.kept": (["b"], ["a", "b"]) for k in ("empty", "half", "no pid", "text")},
)
on(
    "T114.idle_writer",
    "Somebody who holds the pipe open does not stop the clock.",
    {"idle": (0, 1), "partial line": (0, 1)},
)

# ------------------------------------------------------------------ rendezvous

ALONE = (
    "Without torch the agent speaks no TCPStore; the worker of rank 0 hosts it, on a new port in "
    "each round, so that nothing of an earlier attempt is found there."
)
on("T124.one_node", ALONE, {"use_agent_store": (True, False)})
on("T128.sharing_off", ALONE, {"0": ([True, True], [False, True])})
on("T131.static_rounds", ALONE, {"agent store": (True, False)})
on(
    "T138.static_master",
    ALONE,
    {"launch.returned.0.TORCHELASTIC_USE_AGENT_STORE": ("True", "False")},
)
on(
    "T40.launcher_environment",
    ALONE,
    {f"{r}.TORCHELASTIC_USE_AGENT_STORE": ("True", "False") for r in (0, 1)},
)
on(
    "T129.min_never_reached",
    "Jobs of several nodes are refused at once for now.",
    {"": (["RendezvousError", "RendezvousTimeoutError"], ["RendezvousError", "RendezvousError"])},
)
on(
    "T132.endpoints",
    "A bare IPv6 address is one; torch reads host ':' and port 1.",
    {"::1.returned": ([":", 1], ["::1", 7])},
)

# ------------------------------------------------------------------ launcher

on(
    "T143.config",
    "The caller's dictionary is the caller's.",
    {"caller's dict.timeout": (5, MISSING)},
)
on(
    "T139.shutdown_of_rendezvous",
    "Trouble in leaving the rendezvous hides neither a failure nor a success.",
    {
        "bad, shutdown fails": ([{"raised": "OSError"}, 1], [{"raised": "ChildFailedError"}, 1]),
        "good, shutdown fails": ([{"raised": "OSError"}, 1], [{"returned": {"0": 5}}, 1]),
    },
)
on("T15.unhealthy_end", UNHEALTHY, {"success": (True, False)})

# ------------------------------------------------------------------ command line

on(
    "T136.defaults",
    "Phalanx is there to keep a job running; torchrun gives up at the first fault by default.",
    {"max_restarts": (0, 3)},
)
on(
    "T138.module_runs",
    "What follows the script is the script's, whatever it looks like; the exit status of the "
    "command is the first failing worker's.",
    {
        "code.said.0": (MISSING, "2 __main__ a --log=x"),
        "code.said.1": (MISSING, "2 __main__ a --log=x"),
        "code.status": (2, 0),
        "module fails.status": (1, 7),
    },
)
USAGE = "Exit status 2: the command line is wrong and nothing was started."
on("T136.kinds_of_program", USAGE, {"module and command": ([1, []], [2, []])})
on(
    "T144.exit_codes",
    USAGE,
    dict.fromkeys(
        (
            "bad backend",
            "bad filter",
            "bad handler",
            "bad interval",
            "bad logs specs",
            "bad nnodes",
            "bad redirects",
            "bad restarts",
            "log dir is file",
            "negative timeout",
            "nnodes backwards",
            "no such script",
            "nproc 0",
            "nproc gpu",
            "nproc nonsense",
        ),
        (1, 2),
    ),
)
on(
    "T144.exit_codes",
    "The exit status says what happened: the first failed worker's own, 128 + n for signal n, "
    "127 for no such program.",
    {
        "SIGKILL": (1, 137),
        "SIGSEGV": (1, 139),
        "exit 7": (1, 7),
        "no such command": (1, 127),
    },
)
on(
    "T145.bad_variables",
    "A switch may be spelt true; a value that no option takes is refused with exit status 2.",
    {
        "PET_STANDALONE=true.raised": ("ValueError", MISSING),
        "PET_STANDALONE=true.standalone": (MISSING, True),
        "PET_STANDALONE=true.training_script": (MISSING, "s_py"),
        "PET_STANDALONE=x.raised": ("ValueError", "SystemExit"),
        "PET_START_METHOD=bogus.raised": (MISSING, "SystemExit"),
        "PET_START_METHOD=bogus.start_method": ("bogus", MISSING),
        "PET_START_METHOD=bogus.training_script": ("s_py", MISSING),
    },
)
on(
    "T87.signals",
    "128 + n says which signal stopped the job.",
    {
        "SIGHUP.code": (1, 129),
        "SIGINT.code": (1, 130),
        "SIGQUIT.code": (1, 131),
        "SIGTERM.code": (1, 143),
    },
)
on(
    "T87.stubborn_workers",
    "128 + n says which signal stopped the job; more signals hurry the end and leave nobody.",
    {
        "one.code": (1, 143),
        "three.code": (1, 143),
        "three.workers left": ([True, True], [False, False]),
    },
)
on(
    "T88.other_endings",
    "No worker outlives its agent; SIGUSR1 is passed on to the workers and does not end the job.",
    {
        "SIGKILL.workers left": ([True, True], [False, False]),
        "SIGUSR1.code": (-10, None),
    },
)
on(
    "T85.worker_fails_sibling_stubborn",
    "--shutdown-timeout holds on every path.",
    {"ended within 10 s": (False, True)},
)
on(
    "T118.watchdog",
    KILLED,
    {
        "code": (-9, 0),
        "out": (["R attempt 0"], ["R attempt 0", "R attempt 1", "R attempt 1"]),
    },
)
on(
    "T118.expiry_in_agent",
    KILLED,
    {
        "code": (-9, 0),
        "pipe left": (True, False),
        "result": (
            None,
            [
                {
                    "state": "SUCCEEDED",
                    "failed": False,
                    "values": {"0": "attempt 1", "1": "attempt 1"},
                    "failures": {},
                },
                0,
            ],
        ),
    },
)
on(
    "T120.health_server",
    "The health check is there: HTTP, on loopback unless told otherwise.",
    {"answers": ("nothing listens", "HTTP 200")},
)
on(
    "T138.backends",
    "The workers of one node meet on the loopback address.",
    {
        "c10d": (
            [0, ["R 2 job12 False False"] * 2],
            [0, ["R 2 job12 True False"] * 2],
        )
    },
)
on(
    "T136.real_script",
    "A command without torch costs a tenth.",
    {"under 1.2 processor seconds": (False, True)},
)
