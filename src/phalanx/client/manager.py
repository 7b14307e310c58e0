"""``DLRecoverManager``, as users of the vendor's recover client know it."""

from __future__ import annotations

import inspect
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import grpc

from phalanx.client.channel import Credentials, Stub
from phalanx.client.link import Link
from phalanx.recovery import words
from phalanx.recovery.model import Received
from phalanx.recovery.words import Code

log = logging.getLogger("phalanx.client")

_OLD_NAMES = {
    "tft_notify_controller_stop_train": words.A_STOP_TRAIN,
    "tft_notify_controller_on_global_rank": words.A_GLOBAL,
    "tft_notify_controller_change_strategy": words.A_CHANGE,
    "tft_notify_controller_dump": words.A_SAVE_AND_EXIT,
    "tft_notify_controller_prepare_action": words.A_HOT_SWITCH,
    "tft_destroy_controller": words.KILL_MASTER,
}
_ACTIONS = {
    words.A_STOP_TRAIN,
    words.A_PAUSE_TRAIN,
    words.A_GLOBAL,
    words.A_CHANGE,
    words.A_SAVE_AND_EXIT,
    words.A_NODES_EXIT,
    words.A_NODES_RESTART,
    words.A_HOT_SWITCH,
    words.A_STOP_SWITCH,
    words.A_NEW_POD_RUNNING,
    words.A_PAUSE_START,
    words.A_CONTINUE_START,
    "pre exit process",
    words.KILL_MASTER,
}

Action = Callable[[Received], Any]


class DLRecoverManager(Link):
    """Talks to ClusterD or a Phalanx controller for one job. One per process: asked
    for with the same arguments again it is the same one; with others, the old one is closed.

    ``info`` is a ``ClientInfo`` (see :mod:`phalanx.client.pb`), ``server_addr`` is ``HOST:PORT``
    or a list of them. ``secure_conn`` True asks for TLS with the root certificate at
    ``cert_path``; without one that is a ValueError, and so is a certificate that must not be
    trusted. ``token``, ``client_cert`` and ``client_key`` are for controllers that ask for them.

    What to do on a signal is registered with :meth:`on_action`; with ``mindio_ttp`` installed,
    :func:`phalanx.client.mindio.drive` does it. Actions of one signal run in their order, one
    after the other. An action that nobody has registered goes to ``on_action("unknown", f)``
    and into the log.
    """

    _instance: ClassVar[DLRecoverManager | None] = None
    _asked: tuple[Any, ...]

    def __new__(
        cls, info: Any, server_addr: str | list[str], *args: Any, **more: Any
    ) -> DLRecoverManager:
        old, asked = cls._instance, (info.jobId, str(server_addr), args, tuple(more.items()))
        if old is not None and old._asked == asked and not old._closed.is_set():
            return old
        if old is not None:
            old.close()
        made = super().__new__(cls)
        made._asked = asked
        return made

    def __init__(
        self,
        info: Any,
        server_addr: str | list[str],
        secure_conn: bool = True,
        cert_path: str = "",
        *,
        token: str = "",
        client_cert: str = "",
        client_key: str = "",
        timeout: float = 60.0,
    ) -> None:
        if type(self)._instance is self:
            return  # asked for once more
        if secure_conn and not cert_path:
            raise ValueError(
                "a secure connection needs a root certificate: give cert_path (or set "
                "ELASTIC_GRPC_SECURE_CERTIFICATES_PATH), or ask for clear text with "
                "secure_conn=False (ELASTIC_GRPC_SECURE_CONNECT=off)"
            )
        credentials = Credentials(cert_path if secure_conn else "", client_cert, client_key, token)
        super().__init__(
            server_addr,
            info.jobId,
            self._act,
            role=info.role or "master agent",
            credentials=credentials,
            report_timeout=timeout,
        )
        self._channel()  # a bad certificate is told here, not from a thread
        self._actions: dict[str, Action] = {}
        self._acting = threading.Lock()
        self._killed = threading.Event()
        type(self)._instance = self

    # ---------------------------------------------------------------- the vendor's calls

    def register(self, request: Any) -> Any:
        """One Register call; the Status. gRPC exceptions pass through."""
        return self._stub_now()("Register", request, self._call_timeout)

    def init_clusterd(self, timeout: float = 600.0) -> bool:
        """Calls Init until it is taken. False: recovery is off for this job (403), or nobody
        answered in ``timeout`` seconds."""
        until = time.monotonic() + timeout
        pause = 0.2
        while not self._closed.is_set():
            try:
                answer = self._stub_now()("Init", self.client_info(), self._call_timeout)
                if answer.code == Code.OK:
                    return True
                if answer.code == Code.RECOVER_OFF:
                    log.warning("recovery is switched off for job %s: %s", self.job_id, answer.info)
                    return False
                log.warning("Init answered %s: %s", answer.code, answer.info)
            except grpc.RpcError as error:
                log.warning("Init failed: %s", error.code())
                self._next_address()
            left = until - time.monotonic()
            if left <= 0:
                return False
            self._closed.wait(min(pause, left))
            pause = min(2 * pause, 5.0)
        return False

    def start_subscribe(self, frame: str = "pytorch") -> None:
        """Listens to signals and acts on them until :meth:`close`, killMaster, or the server
        says that a newer client holds the job. ``frame`` is accepted for the vendor's sake."""
        thread = threading.Thread(target=self._dispatch, name="phalanx-actions", daemon=True)
        thread.start()
        self._threads.append(thread)
        try:
            self.run()
        finally:
            self._put(None)

    def close(self, timeout: float = 5.0) -> None:
        """Ends the subscription; a new manager may be made."""
        super().close(timeout)
        if type(self)._instance is self:
            type(self)._instance = None

    @property
    def killed(self) -> bool:
        """killMaster has come: this process is to leave."""
        return self._killed.is_set()

    def _stub_now(self) -> Stub:
        return self._channel()

    # ---------------------------------------------------------------- actions

    def on_action(self, name: str, action: Action) -> None:
        """Registers what to do on an action (the wire's name, ``killMaster``, ``unknown``, or
        the name of MindIO's function for it)."""
        name = _OLD_NAMES.get(name, name)
        if name not in _ACTIONS and name != "unknown":
            raise ValueError(
                f"there is no action {name!r}; there are {', '.join(sorted(_ACTIONS))}"
            )
        self._actions[name] = action

    def _act(self, signal: Received) -> None:
        with self._acting:
            if signal.signal == words.KILL_MASTER:
                self._run(words.KILL_MASTER, signal)
                self._killed.set()
                self._closed.set()
                stream = self._stream
                if stream is not None:
                    stream.cancel()
                return
            for action in dict.fromkeys(signal.actions):
                self._run(action, signal)

    def _run(self, action: str, signal: Received) -> None:
        do = self._actions.get(action) or self._actions.get("unknown")
        if action not in self._actions:
            log.warning("nobody has registered for the action %r of %s", action, signal.signal)
        if do is None:
            return
        try:
            do(signal)
        except Exception:
            log.exception("the action %r failed", action)

    # ---------------------------------------------------------------- environment

    @classmethod
    def from_environment(cls) -> DLRecoverManager:
        """The manager that the environment describes. ValueError names what is missing."""
        job_id = os.environ.get("MINDX_TASK_ID", "")
        if not job_id:
            raise ValueError("MINDX_TASK_ID is not set; it names the job")
        if os.environ.get("LOCAL_PROXY_ENABLE") == "on":
            address = "127.0.0.1"
        else:
            address = os.environ.get("MINDX_SERVER_IP") or os.environ.get("MINDX_SERVER_DOMAIN", "")
        if not address:
            raise ValueError(
                "MINDX_SERVER_IP is not set (nor MINDX_SERVER_DOMAIN); it names the controller"
            )
        from phalanx.client import pb

        return cls(
            pb.ClientInfo(jobId=job_id),
            address,
            os.environ.get("ELASTIC_GRPC_SECURE_CONNECT", "off") == "on",
            os.environ.get("ELASTIC_GRPC_SECURE_CERTIFICATES_PATH", ""),
            token=os.environ.get("PHALANX_CONTROLLER_TOKEN", ""),
        )

    @classmethod
    def current(cls) -> DLRecoverManager:
        """The process's manager; made from the environment when there is none."""
        return cls._instance or cls.from_environment()


def accepts(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with that many positional arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True
