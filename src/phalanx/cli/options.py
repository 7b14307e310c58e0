"""The options of ``phalanx run``: torchrun's, with torchrun's meaning, and our own.

One table. An option may be spelt with dashes or underscores; a value may come from
``PET_<NAME>``; the command line wins. Names are never completed from a prefix, and what
follows the script belongs to the script.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class UsageError(ValueError):
    """The command line or a PET_ variable is wrong; the text says what and what to do."""


@dataclass(frozen=True)
class Option:
    """One option.

    ``names`` are the spellings with dashes; ``take`` turns the text into a value (None: a
    flag); ``env`` is the variable that may give it, "" for none; ``first`` puts it among
    the options that the short help shows; ``repeat`` collects values in a list.
    """

    names: tuple[str, ...]
    default: Any
    help: str
    take: Callable[[str], Any] | None = str
    metavar: str = ""
    group: str = "workers"
    choices: tuple[str, ...] = ()
    env: str | None = None
    first: bool = False
    repeat: bool = False

    @property
    def dest(self) -> str:
        """The attribute that holds the value."""
        long = next((n for n in self.names if n.startswith("--")), self.names[0])
        return long.lstrip("-").replace("-", "_")

    @property
    def variable(self) -> str:
        """The environment variable that may give the value; "" for none."""
        return f"PET_{self.dest.upper()}" if self.env is None else self.env


def _comma_list(text: str) -> list[str]:
    """Split at commas; two commas are one that belongs to the item."""
    parts = text.replace(",,", "\0").split(",")
    return [p.replace("\0", ",") for p in parts if p]


def _seconds(text: str) -> float:
    value = float(text)
    if value != value or value < 0:
        raise ValueError("seconds are zero or more")
    return value


def _codes(text: str) -> frozenset[int]:
    """``3,64-66`` -> {3, 64, 65, 66}."""
    codes: set[int] = set()
    for part in filter(None, text.replace(" ", "").split(",")):
        low, dash, high = part.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise ValueError("exit codes and ranges of them, like 3,64-70")
        codes.update(range(int(low), int(high or low) + 1))
    if not codes or min(codes) < 1 or max(codes) > 255:
        raise ValueError("exit codes from 1 to 255, like 3,64-70")
    return frozenset(codes)


_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"

OPTIONS: tuple[Option, ...] = (
    Option(
        ("--nproc-per-node",),
        "1",
        "workers on this machine: a number, or auto, cpu, gpu, npu (one per device found)",
        metavar="N",
        first=True,
    ),
    Option(
        ("--max-restarts",),
        3,
        "restarts of the whole group after a fault before the job fails",
        int,
        "N",
        "recovery",
        first=True,
    ),
    Option(
        ("--no-retry-exit-codes",),
        frozenset(),
        "exit codes after which the job fails at once: 3,64-70 (128 + N for signal N)",
        _codes,
        "CODE,...",
        "recovery",
    ),
    Option(
        ("--retry-exit-codes",),
        frozenset(),
        "exit codes that are worth a restart though nothing was done yet (2, say)",
        _codes,
        "CODE,...",
        "recovery",
    ),
    Option(
        ("-m", "--module"),
        False,
        "the script is a module name, as for python -m",
        None,
        first=True,
    ),
    Option(
        ("--no-python",), False, "the script is a command, not a Python program", None, first=True
    ),
    Option(("--log-dir",), None, "folder for the workers' logs", str, "DIR", "logs", first=True),
    Option(
        ("-r", "--redirects"),
        "0",
        "streams to write to files only: 0 none, 1 stdout, 2 stderr, 3 both, or RANK:N,...",
        str,
        "STD",
        "logs",
    ),
    Option(
        ("-t", "--tee"),
        "0",
        "streams to show with the rank in front and keep in files: 1 stdout, 2 stderr, 3 both",
        str,
        "STD",
        "logs",
        first=True,
    ),
    Option(
        ("--local-ranks-filter",),
        "",
        "show only these local ranks on the console",
        str,
        "R,...",
        "logs",
    ),
    Option(
        ("--duplicate-stdout-filters",),
        [],
        "copy lines of tee'd stdout that contain one of these texts into one file",
        _comma_list,
        "TEXT,...",
        "logs",
    ),
    Option(
        ("--duplicate-stderr-filters",),
        [],
        "the same for stderr",
        _comma_list,
        "TEXT,...",
        "logs",
    ),
    Option(
        ("--logs-specs",),
        None,
        "name of an entry point in the group torchrun.logs_specs",
        str,
        "NAME",
        "logs",
        env="",
    ),
    Option(
        ("--log-line-prefix-template",),
        None,
        "what stands before each line shown: ${role_name} ${rank} ${local_rank} are replaced",
        str,
        "TEXT",
        "logs",
        env="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
    ),
    Option(
        ("--shutdown-timeout",),
        None,
        "seconds a worker has after SIGTERM before SIGKILL, on every path (default 30)",
        int,
        "S",
        "recovery",
        first=True,
    ),
    Option(
        ("--start-timeout",),
        600.0,
        "seconds that a start of all workers may take, with the imports ahead of it",
        _seconds,
        "S",
        "recovery",
        env="PHALANX_START_TIMEOUT",
    ),
    Option(
        ("--hang-timeout",),
        "auto",
        "silence that counts as a hang: auto, off, seconds, or PHASE=SECONDS,... (docs/hangs.md)",
        str,
        "S",
        "recovery",
        env="PHALANX_HANG_TIMEOUT",
    ),
    Option(
        ("--standby",),
        0,
        "so many replacements are kept built, for programs with a session of phalanx.training "
        "(docs/training.md); each takes the memory of a rank",
        int,
        "N",
        "recovery",
    ),
    Option(
        ("--controller",),
        None,
        "ask this controller what to do about each fault (docs/recovery-protocol.md); the job's "
        "name there is --rdzv-id",
        str,
        "HOST:PORT,...",
        "controller",
    ),
    Option(
        ("--controller-timeout",),
        2.0,
        "seconds its word is waited for before the job decides alone",
        _seconds,
        "S",
        "controller",
    ),
    Option(
        ("--controller-ca",),
        "",
        "speak TLS to it and trust this root certificate (a token goes into "
        "PHALANX_CONTROLLER_TOKEN)",
        str,
        "PEM",
        "controller",
    ),
    Option(("--controller-cert",), "", "this node's own certificate", str, "PEM", "controller"),
    Option(("--controller-key",), "", "and its key", str, "PEM", "controller"),
    Option(
        ("--node-check",),
        None,
        "a command that has to succeed before this node takes part",
        str,
        "CMD",
        "recovery",
    ),
    Option(
        ("--node-check-timeout",),
        300.0,
        "seconds it may take",
        _seconds,
        "S",
        "recovery",
    ),
    Option(
        ("--monitor-interval",),
        0.1,
        "longest wait of the agent's loop in seconds (deaths are noticed at once)",
        float,
        "S",
        "recovery",
    ),
    Option(
        ("--signals-to-handle",),
        _SIGNALS,
        "signals that stop the job; SIGUSR1 and SIGUSR2 are passed on to the workers otherwise",
        str,
        "SIG,...",
        "recovery",
    ),
    Option(
        ("--no-warm",),
        False,
        "start every worker with a fresh interpreter instead of a preloaded one",
        None,
        group="warm start",
        env="",
        first=True,
    ),
    Option(
        ("--preload",),
        [],
        "also import MODULE before workers are forked; auto: all that the script imports",
        str,
        "MODULE",
        "warm start",
        env="",
        repeat=True,
    ),
    Option(
        ("--events",),
        None,
        "write what happens to FILE, one JSON object per line",
        str,
        "FILE",
        "observing",
        env="",
        first=True,
    ),
    Option(
        ("--health-check-port",),
        None,
        "serve /livez, /readyz, /status and /metrics on this port",
        str,
        "PORT",
        "observing",
        env="TORCHELASTIC_HEALTH_CHECK_PORT",
        first=True,
    ),
    Option(
        ("--health-check-host",),
        "127.0.0.1",
        "address the health server listens on",
        str,
        "HOST",
        "observing",
        env="",
    ),
    Option(("--role",), "default", "name of these workers' role", str, "NAME", "torchrun's others"),
    Option(
        ("--start-method",),
        "spawn",
        "taken and of no effect: see --run-path",
        str,
        "HOW",
        "torchrun's others",
        ("spawn", "fork", "forkserver"),
    ),
    Option(
        ("--run-path",),
        False,
        "taken and of no effect: every script runs as __main__ in a process of its own",
        None,
        group="torchrun's others",
    ),
    Option(
        ("--event-log-handler",),
        "null",
        "where torchelastic events go: null or console",
        str,
        "NAME",
        "torchrun's others",
    ),
    Option(
        ("--numa-binding",),
        None,
        "bind each worker to processors near its GPU, by numactl, with a fresh interpreter",
        str,
        "HOW",
        "torchrun's others",
        ("node", "socket", "exclusive", "core-complex"),
        env="",
    ),
    Option(
        ("--virtual-local-rank",),
        False,
        "every worker sees LOCAL_RANK=0 and only its own device",
        None,
        group="torchrun's others",
    ),
    Option(
        ("--nnodes",),
        "1:1",
        "nodes: N or MIN:MAX",
        str,
        "N",
        "several nodes",
    ),
    Option(
        ("--standalone",),
        False,
        "one node, whatever else is said of nodes",
        None,
        group="several nodes",
    ),
    Option(
        ("--spares",),
        0,
        "nodes beyond MAX that wait to take a lost one's place",
        int,
        "N",
        "several nodes",
        env="PHALANX_SPARES",
    ),
    Option(
        ("--rdzv-backend",),
        "static",
        "c10d, static or phalanx (an agent is the coordinator), or etcd",
        str,
        "NAME",
        group="several nodes",
    ),
    Option(
        ("--rdzv-endpoint",),
        "",
        "where nodes meet: of c10d and phalanx the first coordinator; not needed on one node",
        str,
        "HOST:PORT",
        "several nodes",
    ),
    Option(("--rdzv-id",), "none", "name of the job", str, "ID", "several nodes"),
    Option(
        ("--rdzv-conf",),
        "",
        "key=value,... for the backend: join_timeout, last_call_timeout, is_host, ...",
        str,
        "K=V",
        "several nodes",
    ),
    Option(
        ("--node-rank",),
        0,
        "this node's rank; a rank given twice is refused",
        int,
        "N",
        "several nodes",
    ),
    Option(
        ("--master-addr",), "127.0.0.1", "address of rank 0's node", str, "HOST", "several nodes"
    ),
    Option(
        ("--master-port",),
        None,
        "port of the workers' store (default: any free one; 29500 for static on several nodes)",
        int,
        "PORT",
        "several nodes",
    ),
    Option(
        ("--local-addr",),
        None,
        "address of this node (default: the one from which it reaches the endpoint)",
        str,
        "HOST",
        "several nodes",
    ),
    Option(
        ("--coordinator-port",),
        None,
        "port of a coordinator that runs here (default: the endpoint's; for static the master "
        "port plus one)",
        int,
        "PORT",
        "several nodes",
        env="PHALANX_COORDINATOR_PORT",
    ),
    Option(
        ("--port-range",),
        None,
        "all ports that are not named are taken from LOW-HIGH",
        str,
        "LOW-HIGH",
        "several nodes",
        env="PHALANX_PORT_RANGE",
    ),
    Option(
        ("--on-split",),
        "wait",
        "what half of an even number of nodes does when it no longer hears the other half",
        str,
        "HOW",
        "several nodes",
        ("wait", "continue"),
        env="PHALANX_ON_SPLIT",
    ),
    Option(
        ("--snapshot-copies",),
        "1",
        "how many other nodes hold a copy of a session's snapshots",
        str,
        "N",
        "several nodes",
        ("0", "1"),
        env="PHALANX_SNAPSHOT_COPIES",
    ),
    Option(
        ("--isolation-timeout",),
        60.0,
        "seconds that workers run on without a coordinator before they are stopped",
        _seconds,
        "S",
        "several nodes",
        env="PHALANX_ISOLATION_TIMEOUT",
    ),
    Option(
        ("--rejoin-timeout",),
        60.0,
        "seconds that nodes have to stop their workers and to come back after a change",
        _seconds,
        "S",
        "several nodes",
        env="PHALANX_REJOIN_TIMEOUT",
    ),
    Option(
        ("--epoch",),
        0,
        "how often the job was requeued: a verdict holds for one epoch",
        int,
        "N",
        "several nodes",
        env="PHALANX_EPOCH",
    ),
    Option(
        ("--token-file",),
        None,
        "file with the secret that all agents show (or the variable PHALANX_TOKEN)",
        str,
        "FILE",
        "several nodes",
        env="PHALANX_TOKEN_FILE",
    ),
    Option(
        ("--tls-cert",),
        None,
        "this agent's certificate",
        str,
        "PEM",
        "several nodes",
        env="PHALANX_TLS_CERT",
    ),
    Option(("--tls-key",), None, "and its key", str, "PEM", "several nodes", env="PHALANX_TLS_KEY"),
    Option(
        ("--tls-ca",),
        None,
        "the authority that signed those of all agents",
        str,
        "PEM",
        "several nodes",
        env="PHALANX_TLS_CA",
    ),
    Option(
        ("--tls-name",),
        None,
        "the name in the others' certificates, where it is not the host that is dialled",
        str,
        "NAME",
        "several nodes",
        env="PHALANX_TLS_NAME",
    ),
)


@dataclass
class RunArguments:
    """The parsed command line of ``phalanx run``: one attribute per option, then the program."""

    training_script: str = ""
    training_script_args: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None


HELP_WORDS = ("-h", "--help", "--help-all")


def _by_name() -> dict[str, Option]:
    table: dict[str, Option] = {}
    for option in OPTIONS:
        for name in option.names:
            table[name] = option
            if name.startswith("--"):
                table["--" + name[2:].replace("-", "_")] = option
    return table


def _value(option: Option, text: str, source: str) -> Any:
    assert option.take is not None
    try:
        value = option.take(text)
    except ValueError as error:
        kind = {int: "a whole number", float: "a number", _seconds: "seconds"}.get(
            option.take,  # type: ignore[call-overload]
            str(error),
        )
        raise UsageError(f"{source} takes {kind}, not {text!r}") from None
    if option.choices and value not in option.choices:
        raise UsageError(f"{source} is one of {', '.join(option.choices)}, not {text!r}")
    return value


_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "", "false", "no", "off")


def _flag(text: str, source: str) -> bool:
    if text.strip().lower() in _TRUE:
        return True
    if text.strip().lower() in _FALSE:
        return False
    raise UsageError(f"{source} is a switch: 1 or 0, not {text!r}")


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> RunArguments:
    """Parse the words after ``phalanx run``.

    Raises:
        UsageError: an unknown option, a missing or bad value, a bad PET_ variable, no script.
    """
    env = os.environ if environ is None else environ
    table = _by_name()
    out = RunArguments(values={o.dest: o.default for o in OPTIONS})
    for option in OPTIONS:
        text = env.get(option.variable) if option.variable else None
        if text is None:
            continue
        if option.take is None:
            out.values[option.dest] = _flag(text, option.variable)
        else:
            out.values[option.dest] = _value(option, text, option.variable)
        out.given.add(option.dest)

    words = list(argv)
    at = 0
    while at < len(words):
        word = words[at]
        if word == "--":
            at += 1
            break
        if not word.startswith("-") or word == "-":
            break
        name, equals, attached = word.partition("=")
        if not name.startswith("--") and len(name) > 2:  # -r3
            name, equals, attached = word[:2], "=", word[2:]
        found = table.get(name)
        if found is None:
            near = _nearest(name, table)
            hint = f"; did you mean {near}?" if near else ""
            raise UsageError(f"there is no option {name}{hint} (phalanx run --help-all lists all)")
        at += 1
        if found.take is None:
            if equals and not name.startswith("--"):
                at -= 1  # -mx: flags joined
                words[at] = "-" + attached
            elif equals:
                raise UsageError(f"{name} takes no value")
            out.values[found.dest] = True
        else:
            if equals:
                text = attached
            elif at < len(words):
                text = words[at]
                at += 1
            else:
                raise UsageError(f"{name} needs a value: {name} {found.metavar or 'VALUE'}")
            value = _value(found, text, name)
            if found.repeat:
                out.values[found.dest] = [*out.values[found.dest], value]
            else:
                out.values[found.dest] = value
        out.given.add(found.dest)
    if at >= len(words):
        raise UsageError("no script given: phalanx run [options] SCRIPT [arguments of the script]")
    out.training_script = words[at]
    out.training_script_args = words[at + 1 :]
    return out


def _nearest(name: str, table: Mapping[str, Option]) -> str | None:
    from difflib import get_close_matches

    dashed, names = name.replace("_", "-"), [n for n in table if "_" not in n]
    starts = [n for n in names if n.startswith(dashed)] if len(dashed) > 3 else []
    close = starts or get_close_matches(dashed, names, 1, 0.7)
    return close[0] if close else None


def wants_help(argv: Sequence[str]) -> str | None:
    """The help word that stands before the script, if one does."""
    table = _by_name()
    skip = False
    for word in argv:
        if skip:
            skip = False
            continue
        if word in HELP_WORDS:
            return word
        if not word.startswith("-") or word == "--":
            return None
        option = table.get(word)
        skip = option is not None and option.take is not None
    return None


def _line(option: Option) -> list[str]:
    name = ", ".join(option.names) + (f" {option.metavar}" if option.metavar else "")
    default = option.default
    shown = option.take is not None and default not in (None, "", [], "0", "none", frozenset())
    text = option.help + (f" (default {default})" if shown and "default" not in option.help else "")
    if option.choices:
        text += f" [{', '.join(option.choices)}]"
    words, lines, line = text.split(), [], ""
    for word in words:
        if len(line) + len(word) + 1 > 66:
            lines.append(line)
            line = ""
        line = f"{line} {word}" if line else word
    lines.append(line)
    if len(name) > 25:
        return [f"  {name}", *(" " * 28 + row for row in lines)]
    return [f"  {name:<26}{lines[0]}", *(" " * 28 + row for row in lines[1:])]


def help_text(everything: bool = False) -> str:
    """``phalanx run --help`` (the ten options people need first) or ``--help-all``."""
    out = ["usage: phalanx run [options] SCRIPT [arguments of the script]", ""]
    if not everything:
        for option in OPTIONS:
            if option.first:
                out += _line(option)
        out += [
            "",
            "All of torchrun's options work too, with dashes or underscores, or as PET_<NAME>",
            "variables: phalanx run --help-all lists them.",
        ]
        return "\n".join(out)
    groups: dict[str, list[Option]] = {}
    for option in OPTIONS:
        groups.setdefault(option.group, []).append(option)
    for group, members in groups.items():
        out.append(f"{group}:")
        for option in members:
            out += _line(option)
        out.append("")
    out.append("Each may be given as the variable PET_<NAME>; the command line wins.")
    return "\n".join(out)
