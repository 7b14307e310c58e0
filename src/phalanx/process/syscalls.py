"""The few system and C library calls that Python does not offer. Linux only.

``ctypes`` and the C library are loaded at the first call, once per process.
"""

from __future__ import annotations

import errno
import os
import signal
from functools import lru_cache

TYPE_CHECKING = False  # the keeper imports this module and can do without ``typing``
if TYPE_CHECKING:
    from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37
PR_SET_PTRACER = 0x59616D61

# The same numbers on every architecture (they were added after the numbering was unified).
_NR_PIDFD_SEND_SIGNAL = 424
_NR_PIDFD_OPEN = 434
_NR_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_FUTEX_WAKE = 1
_FUTEX_OWNER_DIED = 0x40000000
_FUTEX_TID_MASK = 0x3FFFFFFF


@lru_cache(maxsize=1)
def _libc() -> Any:
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        import ctypes

        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def prctl(option: int, value: int) -> None:
    """``prctl(option, value)``; raises OSError."""
    import ctypes

    # prctl is variadic: every argument must be passed as an unsigned long.
    zero = ctypes.c_ulong(0)
    _checked(
        _libc().prctl(ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero),
        f"prctl({option}, {value})",
    )


def set_death_signal(signum: int) -> None:
    """Have the kernel send ``signum`` to the caller when the thread that made it ends."""
    prctl(PR_SET_PDEATHSIG, signum)


def set_tracer(pid: int) -> None:
    """Let this process and its descendants look into the caller, where that is restricted."""
    prctl(PR_SET_PTRACER, pid)


def set_name(name: str) -> None:
    """Set the calling thread's name, 15 bytes; for a main thread it is the process's."""
    import ctypes

    buffer = ctypes.create_string_buffer(name.encode()[:15])
    prctl(PR_SET_NAME, ctypes.addressof(buffer))


def set_subreaper(on: bool) -> None:
    """Make the caller the adoptive parent of its orphaned descendants, or stop being that."""
    prctl(PR_SET_CHILD_SUBREAPER, int(on))


def is_subreaper() -> bool:
    """Whether the caller adopts its orphaned descendants."""
    import ctypes

    flag = ctypes.c_int(0)
    zero = ctypes.c_ulong(0)
    _checked(
        _libc().prctl(ctypes.c_int(PR_GET_CHILD_SUBREAPER), ctypes.byref(flag), zero, zero, zero),
        "prctl(PR_GET_CHILD_SUBREAPER)",
    )
    return bool(flag.value)


def is_open(fd: int) -> bool:
    """Whether the caller has a descriptor of that number."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _no_pidfd(error: OSError) -> OSError:
    if error.errno == errno.ENOSYS:
        return OSError(
            errno.ENOSYS,
            "this kernel has no pidfd_open (Linux 5.3 or newer is needed, and a seccomp "
            f"profile that allows it); running on {os.uname().release}",
        )
    return error


def pidfd_open(pid: int) -> int:
    """A descriptor for the process ``pid``; close-on-exec. Raises OSError (ESRCH, ENOSYS)."""
    native = getattr(os, "pidfd_open", None)
    try:
        if native is not None:
            return int(native(pid))
        return _checked(_libc().syscall(_NR_PIDFD_OPEN, pid, 0), f"pidfd_open({pid})")
    except OSError as error:
        raise _no_pidfd(error) from None


def pidfd_send_signal(pidfd: int, signum: int) -> None:
    """Signal the process behind ``pidfd``. Raises OSError, ESRCH if it has been reaped."""
    native = getattr(signal, "pidfd_send_signal", None)
    if native is not None:
        native(pidfd, signum)
    else:
        _checked(
            _libc().syscall(_NR_PIDFD_SEND_SIGNAL, pidfd, int(signum), None, 0),
            f"pidfd_send_signal({signum})",
        )


class RobustMutex:
    """Calls on a ``pthread_mutex_t`` that lives in shared memory and outlives its holder.

    The caller keeps the memory mapped for as long as any call runs. ``lock`` releases
    the interpreter lock while it waits.
    """

    SIZE = 64  # room for pthread_mutex_t: 40 bytes on x86-64, 48 on AArch64

    def __init__(self, buffer: Any, offset: int) -> None:
        import ctypes

        self._memory = (ctypes.c_char * self.SIZE).from_buffer(buffer, offset)
        self._pointer = ctypes.byref(self._memory)

    def initialise(self) -> None:
        """Make the mutex robust and process-shared; raises OSError if the C library cannot."""
        import ctypes

        libc = _libc()
        attributes = (ctypes.c_char * 64)()
        for result in (
            libc.pthread_mutexattr_init(attributes),
            libc.pthread_mutexattr_setpshared(attributes, 1),  # PTHREAD_PROCESS_SHARED
            libc.pthread_mutexattr_setrobust(attributes, 1),  # PTHREAD_MUTEX_ROBUST
            libc.pthread_mutex_init(self._pointer, attributes),
        ):
            if result != 0:
                raise OSError(result, f"no robust mutex: {os.strerror(result)}")

    def try_lock(self) -> int:
        """0 or an error number, as ``pthread_mutex_trylock``."""
        return int(_libc().pthread_mutex_trylock(self._pointer))

    def lock(self) -> int:
        """0 or an error number, as ``pthread_mutex_lock``; blocks."""
        return int(_libc().pthread_mutex_lock(self._pointer))

    def recover(self) -> None:
        """After EOWNERDEAD: make it usable again and let it go."""
        _libc().pthread_mutex_consistent(self._pointer)
        _libc().pthread_mutex_unlock(self._pointer)

    def pin(self) -> None:
        """Keep the memory mapped until the process ends, whatever becomes of this object.

        At the end of an interpreter objects go before threads do, and the kernel finds the
        mutex of a dead thread only where it was.
        """
        import ctypes

        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._memory))

    def abandon(self, owner: int) -> None:
        """Do as the kernel does at the death of ``owner``, a thread, if it still holds it."""
        import ctypes

        word = ctypes.c_uint32.from_buffer(self._memory)  # glibc's and musl's lock word
        if word.value & _FUTEX_TID_MASK == owner:
            word.value = _FUTEX_OWNER_DIED
            number = _NR_FUTEX.get(os.uname().machine)
            if number is not None:
                _libc().syscall(number, self._pointer, _FUTEX_WAKE, 1 << 30, None, None, 0)

    def unlock(self) -> None:
        """Let it go."""
        _libc().pthread_mutex_unlock(self._pointer)
