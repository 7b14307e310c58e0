"""``phalanx controller``: serve the recovery protocol; ``phalanx controller table``: print it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.cli import common

PROG = "phalanx controller"


def _parser() -> argparse.ArgumentParser:
    parser = common.parser(
        PROG,
        "Serves the recovery protocol (Recover, Fault, PubFault) for many jobs. "
        "'phalanx controller table' prints the rules by which it decides.",
    )
    add = parser.add_argument
    add("--listen", default="127.0.0.1:8899", metavar="HOST:PORT", help="default: %(default)s")
    add(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="keep jobs and episodes here, so that a "
        "restarted controller goes on where this one ends (default: nothing is kept)",
    )
    add(
        "--journal-sync",
        choices=("normal", "full"),
        default="normal",
        help="full: survive a loss of power, for a disk flush per decision",
    )
    add(
        "--etcd",
        metavar="HOST:PORT,...",
        help="keep them in etcd instead, so that a controller on another machine can take over",
    )
    add("--etcd-prefix", default="/phalanx/controller", metavar="KEY")
    add(
        "--standby",
        action="store_true",
        help="with --etcd: wait until the controller that owns the journal is gone",
    )
    jobs = parser.add_argument_group("jobs")
    jobs.add_argument(
        "--jobs",
        type=Path,
        metavar="FILE",
        help='JSON: {"defaults": {...}, "jobs": {"ID": {...}}}; read again on SIGHUP',
    )
    jobs.add_argument(
        "--known-jobs-only", action="store_true", help="serve only jobs that are in the file"
    )
    jobs.add_argument(
        "--strategies",
        metavar="A,B,...",
        help="what jobs enable that say nothing: "
        "retry, recover-in-place, recover, elastic-training, dump, exit",
    )
    jobs.add_argument("--devices-per-node", type=int, metavar="N")
    jobs.add_argument(
        "--report-timeout",
        type=float,
        metavar="S",
        help="how long a report of a client is waited for (default: 900)",
    )
    jobs.add_argument(
        "--keep-alive",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds between two keep-alives; 0: none (default: 5)",
    )
    jobs.add_argument(
        "--idle-expiry",
        type=float,
        default=3600.0,
        metavar="S",
        help="forget a job that nobody has asked for so long (default: 3600)",
    )
    jobs.add_argument(
        "--fault-codes",
        type=Path,
        metavar="FILE",
        help='JSON: {"resources": [...], '
        '"codes": {"CODE": "LEVEL"}}: who may report public faults, and which',
    )
    safety = parser.add_argument_group("who may call")
    common.identity(
        safety, "ask every client for a certificate that this one has signed", "client-ca"
    )
    safety.add_argument(
        "--access",
        type=Path,
        metavar="FILE",
        help="JSON: which token (SHA-256) or certificate name is good for which jobs",
    )
    safety.add_argument("--insecure", action="store_true")
    safety.add_argument(
        "--i-know-that-anybody-can-stop-my-jobs",
        dest="twice",
        action="store_true",
        help="with --insecure: serve clear text on an address that other machines can reach",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-jobs", type=int, default=20_000, metavar="N")
    limits.add_argument("--max-jobs-per-peer", type=int, default=20_000, metavar="N")
    limits.add_argument(
        "--calls-per-second",
        type=float,
        default=1000.0,
        metavar="N",
        help="calls one address may make in a second (default: 1000)",
    )
    more = parser.add_argument_group("what it tells")
    more.add_argument(
        "--metrics",
        type=common.address,
        metavar="HOST:PORT",
        help="serve /metrics and /healthz there",
    )
    more.add_argument(
        "--events", type=Path, metavar="FILE", help="append each decision, as JSON lines"
    )
    more.add_argument(
        "--reset-dir",
        type=Path,
        metavar="DIR",
        help="write reset.json per job there, for agents that read only that",
    )
    more.add_argument("--verbose", "-v", action="store_true")
    return parser


class _Wrong(Exception):
    """A command line or file that makes no sense; the text says why."""


def main(argv: Sequence[str]) -> int:
    """Runs until SIGTERM or SIGINT. 0: ended as told; 2: the command line was wrong; 1: failed."""
    if argv and argv[0] == "table":
        return _table(argv[1:])
    args = _parser().parse_args(argv)
    if common.lacks_grpc(PROG):
        return 1
    import asyncio
    import logging

    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        return asyncio.run(_serve(args))
    except _Wrong as error:
        return common.complain(PROG, error, 2)
    except RuntimeError as error:
        return common.complain(PROG, error, 1)
    except KeyboardInterrupt:
        return 0


def _table(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="phalanx controller table", description="Prints the rules of the state machine."
    )
    parser.add_argument("--format", choices=("text", "mermaid", "dot"), default="text")
    args = parser.parse_args(argv)
    from phalanx.recovery import render

    sys.stdout.write(getattr(render, args.format)())
    return 0


def _options(args: argparse.Namespace) -> Any:
    """Hub options from flags and the jobs file. Raises _Wrong."""
    from phalanx.controller.hub import Options
    from phalanx.recovery import codec, words
    from phalanx.recovery.model import JobConfig

    data = _json(args.jobs, {"defaults", "jobs"}) if args.jobs else {}
    flags: dict[str, Any] = {}
    if args.strategies is not None:
        flags["strategies"] = [word.strip() for word in args.strategies.split(",") if word.strip()]
        unknown = [s for s in flags["strategies"] if s not in words.LADDER]
        if unknown:
            raise _Wrong(
                f"there is no strategy {unknown[0]!r}; there are {', '.join(words.LADDER)}"
            )
    if args.devices_per_node is not None:
        flags["devices_per_node"] = args.devices_per_node
    if args.report_timeout is not None:
        flags["report_timeout"] = args.report_timeout
    try:
        base = codec.load_config(flags, JobConfig(strategies=words.LADDER))
        defaults = codec.load_config(data.get("defaults", {}), base)
        jobs = data.get("jobs", {})
        for job_id, settings in jobs.items():
            try:
                codec.load_config(settings, defaults)
            except ValueError as error:
                raise ValueError(f"job {job_id}: {error}") from None
    except (ValueError, AttributeError, TypeError) as error:
        raise _Wrong(f"{args.jobs or 'the settings'}: {error}") from None
    if args.known_jobs_only and not args.jobs:
        raise _Wrong("--known-jobs-only needs --jobs FILE")
    return Options(
        defaults=defaults,
        jobs=jobs,
        known_only=args.known_jobs_only,
        keep_alive=args.keep_alive,
        idle_expiry=args.idle_expiry,
        max_jobs=args.max_jobs,
        max_jobs_per_peer=args.max_jobs_per_peer,
        max_streams=max(args.max_jobs + args.max_jobs // 4, 1000),
    )


def _json(path: Path, known: set[str]) -> dict[str, Any]:
    import json

    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise _Wrong(f"cannot read {path}: {why}") from None
    if not isinstance(data, dict) or set(data) - known:
        raise _Wrong(f"{path} must be a JSON object with {' and '.join(sorted(known))}")
    return data


def _check_address(args: argparse.Namespace) -> None:
    from phalanx.controller.access import is_loopback

    if args.etcd and args.state_dir:
        raise _Wrong("--etcd and --state-dir are two places for one journal; give one")
    if args.standby and not args.etcd:
        raise _Wrong("--standby needs --etcd")
    if (args.tls_cert is None) != (args.tls_key is None):
        raise _Wrong("--tls-cert and --tls-key go together")
    if args.tls_client_ca and not args.tls_cert:
        raise _Wrong("--tls-client-ca needs --tls-cert and --tls-key")
    host, _, port = args.listen.rpartition(":")
    if not args.listen.startswith("unix:") and not (host and port.isdigit()):
        raise _Wrong(f"--listen must be HOST:PORT, not {args.listen!r}")
    if args.tls_cert is None and not is_loopback(args.listen):
        if not (args.insecure and args.twice):
            raise _Wrong(
                f"{args.listen} can be reached from other machines, and without TLS anybody there "
                "can stop any job. Give --tls-cert and --tls-key (and --tls-client-ca or --access),"
                " or listen on 127.0.0.1, or say it twice: --insecure "
                "--i-know-that-anybody-can-stop-my-jobs"
            )
        common.complain(
            PROG, f"clear text on {args.listen}: anybody who reaches it can stop any job", 0
        )


async def _serve(args: argparse.Namespace) -> int:
    import asyncio
    import logging
    import signal

    from phalanx.controller import access, metrics
    from phalanx.controller.etcd import EtcdJournal
    from phalanx.controller.hub import Hub
    from phalanx.controller.journal import Journal, JournalError
    from phalanx.controller.resetfile import ResetFiles
    from phalanx.controller.server import Server, Tls
    from phalanx.controller.service import Services
    from phalanx.recovery.devices import Catalogue

    _check_address(args)
    settings = _options(args)
    try:
        policy = access.Policy.read(args.access) if args.access else access.ANYBODY
    except access.AccessError as error:
        raise _Wrong(str(error)) from None
    if args.tls_client_ca and not args.access:
        # A certificate alone says who, not for what: its names are the jobs it is good for.
        policy = access.OWN_NAME
    catalogue = Catalogue()
    if args.fault_codes:
        data = _json(args.fault_codes, {"resources", "codes"})
        catalogue = Catalogue(
            tuple(data.get("resources", catalogue.resources)), data.get("codes", {})
        )
    journal: Journal | EtcdJournal
    try:
        if args.etcd:
            # A standby waits right here: nothing is served yet, and a signal simply ends it.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            journal = EtcdJournal(
                args.etcd, args.etcd_prefix, wait=float("inf") if args.standby else 0.0
            )
        else:
            journal = Journal(args.state_dir, args.journal_sync)
    except JournalError as error:
        raise RuntimeError(str(error)) from None
    log = None
    record = None
    if args.events:
        from phalanx.events import EventLog

        log = EventLog(args.events, source="controller")

        def record(kind: str, **data: object) -> None:
            assert log is not None
            log.bind(run_id=data.pop("job", None)).record(kind, **data)

    hub = Hub(
        journal,
        settings,
        reset=ResetFiles(args.reset_dir) if args.reset_dir else None,
        record=record,
        catalogue=catalogue,
    )
    services = Services(
        hub, policy, access.Quotas(args.calls_per_second, 2 * args.calls_per_second)
    )
    tls = None
    if args.tls_cert:
        ca = Path(args.tls_client_ca) if args.tls_client_ca else None
        tls = Tls(Path(args.tls_cert), Path(args.tls_key), ca)
    server = Server(hub, services)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)

    def reload() -> None:
        try:
            hub.reconfigure(_options(args))
        except (_Wrong, ValueError) as error:
            logging.getLogger("phalanx.controller").error("kept the old settings: %s", error)

    loop.add_signal_handler(signal.SIGHUP, reload)
    web: asyncio.Server | None = None
    try:
        try:
            address = await server.start(args.listen, tls)
        except access.AccessError as error:
            raise _Wrong(str(error)) from None
        if args.metrics:
            host, _, port = args.metrics.rpartition(":")
            try:
                web = await metrics.serve(hub.metrics, host, int(port))
            except (OSError, ValueError) as error:
                raise RuntimeError(f"cannot listen on {args.metrics}: {error}") from None
        print(f"phalanx controller listens on {address}", flush=True)
        if web is not None:
            where = web.sockets[0].getsockname()
            print(f"metrics on http://{where[0]}:{where[1]}/metrics", flush=True)
        if isinstance(journal, EtcdJournal):
            journal.on_lost = lambda: loop.call_soon_threadsafe(stop.set)
        if not (isinstance(journal, EtcdJournal) and journal.lost):
            await stop.wait()
        if isinstance(journal, EtcdJournal) and journal.lost:
            raise RuntimeError("the journal in etcd has another owner; this controller leaves")
        return 0
    finally:
        if web is not None:
            web.close()
        await server.stop()
        journal.close()
        if log is not None and hasattr(log, "close"):
            log.close()
