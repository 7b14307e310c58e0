"""Where processes stand: stacks of hung workers, saved before anybody ends them.

Three ways, best first; each file says which one it was:

* **py-spy**, where it is installed and may look into the process. Works whatever the process
  does, stopped ones included, and needs nothing of it.
* **faulthandler**, in a process that was prepared by `phalanx.process.armed.arm` (warm workers
  are, and those that tell their progress): the interpreter itself writes its stacks on a signal.
* **/proc**, always: state, system call and kernel function of each thread.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from phalanx.process import armed

__all__ = ["save_stacks"]

_TEXT_LIMIT = 4 << 20  # bytes of one stack text
_THREADS = 256  # threads described by /proc
_CHILDREN = 16  # descendants tried when a process is no Python itself
_AT_ONCE = 8  # processes looked at at the same time
_SHARE = 0.6  # of the time that is left, for one look by py-spy: some must remain for the rest
_PATIENCE = 5.0  # seconds for an armed process to begin
_QUIET = 0.25  # seconds without another line from it that count as its end


def save_stacks(
    pids: Iterable[int] | Mapping[int, str],
    directory: str | os.PathLike[str],
    timeout: float = 10.0,
) -> list[Path]:
    """Write the stacks of each process to a file of its own, within ``timeout`` seconds.

    ``pids``: processes, or processes and what to call their files (``{4711: "rank_3"}`` makes
    ``stacks_rank_3.txt``; without a name it is the pid). The directory is made if need be. No
    process is changed, halted or ended by this. Returns the files written, in the order of
    ``pids``; processes that do not exist have none. Never raises.
    """
    try:
        names = dict(pids) if isinstance(pids, Mapping) else {pid: str(pid) for pid in pids}
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        spy = _find_py_spy()
        deadline = time.monotonic() + timeout
        paths = {
            pid: folder / f"stacks_{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:100]}.txt"
            for pid, name in names.items()
        }
        work = deque(paths.items())

        def loop() -> None:
            while True:
                try:
                    pid, path = work.popleft()
                except IndexError:
                    return
                try:
                    _save_one(pid, path, spy, deadline)
                except Exception:
                    pass  # what was known by then is in the file

        # Daemons: a look into a process that the kernel holds may itself not come back.
        threads = [
            threading.Thread(target=loop, name="stacks", daemon=True)
            for _ in range(min(_AT_ONCE, len(paths)))
        ]
        written = {pid: _identity(path) for pid, path in paths.items()}
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return [p for pid, p in paths.items() if _identity(p) not in (None, written[pid])]
    except Exception:
        return []


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _save_one(pid: int, path: Path, spy: str | None, deadline: float) -> None:
    state = _state(pid)
    if state is None:
        return
    notes: list[str] = []
    kernel = _proc_text(pid)

    def write(method: str, text: str) -> None:
        head = f"process {pid}, state {state}\nmethod: {method}\ntaken: {_now()}\n"
        head += "".join(f"note: {note}\n" for note in notes)
        body = f"{head}\n{text[:_TEXT_LIMIT]}\n" if text else f"{head}\n"
        draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            draft.write_text(f"{body}\n-- /proc --\n{kernel}", errors="backslashreplace")
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)

    write("/proc", "")
    if spy is None:
        notes.append("py-spy is not installed in this environment (pip install py-spy)")
    else:
        # Without halting: that is quick and works with stopped processes, too. Native frames
        # would need a halt, and the symbols of torch take py-spy longer than a hang may wait.
        text, error = _py_spy(spy, pid, deadline)
        if text:
            write("py-spy", text)
            return
        children = _py_spy_children(spy, pid, deadline)
        if children:
            notes.append("not a Python process that py-spy can read; these are its descendants")
            write("py-spy", children)
            return
        notes.append(f"py-spy: {error}")
    text, error = _ask(pid, state, deadline)
    if text:
        write("faulthandler", text)
        return
    notes.append(f"faulthandler: {error}")
    write("/proc", "")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _find_py_spy() -> str | None:
    import shutil
    import sys
    import sysconfig

    for folder in (os.path.dirname(sys.executable), sysconfig.get_path("scripts")):
        candidate = os.path.join(folder or "", "py-spy")
        if folder and os.access(candidate, os.X_OK):
            return candidate
    return shutil.which("py-spy")


def _py_spy(spy: str, pid: int, deadline: float) -> tuple[str, str]:
    """(stacks, ""), or ("", why not)."""
    import subprocess

    left = (deadline - time.monotonic()) * _SHARE
    if left <= 0:
        return "", "no time left"
    process = subprocess.Popen(
        [spy, "dump", "--pid", str(pid), "--nonblocking"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "RUST_BACKTRACE": "0"},
    )
    try:
        out, err = process.communicate(timeout=left)
    except subprocess.TimeoutExpired:
        process.kill()  # the kernel lets a process that it halts go on
        try:
            process.communicate(timeout=1)
        except subprocess.TimeoutExpired:
            pass
        return "", "timed out"
    text = out.decode("utf-8", "replace")
    if "Thread " in text:
        return text, ""
    said = " ".join(err.decode("utf-8", "replace").split())
    return "", said[:300] or "no stacks"


def _py_spy_children(spy: str, pid: int, deadline: float) -> str:
    """Stacks of the Python processes below one that is none (a shell that wraps the program)."""
    texts: list[str] = []
    queue = deque(_children(pid))
    for _ in range(_CHILDREN):
        if not queue:
            break
        child = queue.popleft()
        text, _why = _py_spy(spy, child, deadline)
        if text:
            texts.append(text)
        else:
            queue.extend(_children(child))
    return "\n".join(texts)


def _ask(pid: int, state: str, deadline: float) -> tuple[str, str]:
    """Have the process write its stacks itself: (stacks, ""), or ("", why not)."""
    if state[0] in "TtXZ":
        return "", "the process is stopped or dead"
    found = armed.file_of(pid)
    if found is None:
        return "", "the process is not prepared for it"
    if not armed.catches(pid):
        return "", "the process takes no signal for it any more"
    path = Path(found)
    before = path.stat().st_size
    os.kill(pid, armed.STACKS_SIGNAL)
    # There is no end mark: it is done when nothing has come for a while.
    size, pause, quiet = before, 0.005, 0.0
    patience = min(deadline, time.monotonic() + _PATIENCE)
    while quiet < _QUIET and time.monotonic() < (deadline if size > before else patience):
        time.sleep(pause)
        pause = min(pause * 2, 0.05)
        now = path.stat().st_size
        quiet = quiet + pause if now == size > before else 0.0
        size = now
    if size == before:
        return "", "no answer to the signal"
    with path.open("rb") as f:
        f.seek(before)
        return f.read(_TEXT_LIMIT).decode("utf-8", "replace"), ""


# -- /proc ----------------------------------------------------------------------------------------


def _read(path: str, limit: int = 65536) -> str:
    try:
        with open(path, "rb") as f:
            return f.read(limit).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def _state(pid: int) -> str | None:
    """As ``/proc/<pid>/status`` says it, as "S (sleeping)"; None: no such process."""
    found = re.search(r"^State:\s*(.+)$", _read(f"/proc/{pid}/status"), re.MULTILINE)
    return found[1] if found else None


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in _tasks(pid):
        found += [int(c) for c in _read(f"/proc/{pid}/task/{task}/children").split()]
    return found


def _tasks(pid: int) -> list[str]:
    try:
        return sorted(os.listdir(f"/proc/{pid}/task"), key=int)[:_THREADS]
    except (OSError, ValueError):
        return []


def _proc_text(pid: int) -> str:
    status = _read(f"/proc/{pid}/status")
    wanted = re.compile(r"^(Name|State|PPid|TracerPid|Threads|VmRSS|Sig\w+|\w+_ctxt_switches):")
    lines = [line for line in status.splitlines() if wanted.match(line)]
    for task in _tasks(pid):
        folder = f"/proc/{pid}/task/{task}"
        fields: dict[str, Any] = {name: _read(f"{folder}/{name}") for name in ("comm", "wchan")}
        fields["state"] = _read(f"{folder}/stat").rpartition(")")[2].split(maxsplit=1)[:1]
        fields["syscall"] = _read(f"{folder}/syscall")
        lines.append(
            f"thread {task} {fields['comm']!r} state {''.join(fields['state'])} "
            f"wchan {fields['wchan'] or '-'} syscall {fields['syscall'] or '-'}"
        )
        lines += [f"    {line}" for line in _read(f"{folder}/stack").splitlines()]
    return "\n".join(lines) + "\n"
