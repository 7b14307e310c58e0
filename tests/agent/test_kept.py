"""What is kept for a rank goes where the rank goes."""

from __future__ import annotations

import os

import pytest

from phalanx.agent.crew import Crew


def opened() -> int:
    return os.memfd_create("kept", os.MFD_CLOEXEC)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("before", "after", "stay"),
    [
        ((0, 1), (0, 1), {0: 0, 1: 1}),
        ((4, 5), (0, 1), {}),
        ((2, 3), (3, 2), {0: 1, 1: 0}),
        ((2, 3), (1, 2), {1: 0}),
        ((), (0, 1), {}),
    ],
)
def test_kept_memory_follows_its_rank_and_is_never_anothers(before, after, stay) -> None:
    crew = Crew.__new__(Crew)
    crew.ranks = before
    new = opened()  # first, so that it gets no number that was let go
    fds = {n: opened() for n in range(len(before))}
    crew._holders = {}
    crew._kept = {n: {"snapshots": fd} for n, fd in fds.items()}
    crew._keep_for(after)
    assert crew._kept == {now: {"snapshots": fds[was]} for now, was in stay.items()}
    kept = {fds[was] for was in stay.values()}
    assert {fd for fd in fds.values() if is_open(fd)} == kept
    crew.ranks = after
    crew.adopt(after[0], new, "10.0.0.7")
    assert crew._kept[0] == {"snapshots": new}
    assert {fd for fd in fds.values() if is_open(fd)} == kept - {fds[stay[0]] if 0 in stay else -1}
    for fd in {new, *kept}:
        if is_open(fd):
            os.close(fd)
