"""Shared memory that outlives its worker.

A `Slate` is a memfd with two slots, each holding one step's record. The worker writes; the
agent holds the descriptor and hands it to the next process of the same rank, which reads what
its predecessor had. A slot has no step while it is being written, so a writer that dies at any
moment leaves the other slot whole and this one empty.

Two are used: a small one for what belongs to the rank alone (random states, sampler), written
each step, and a large one for snapshots of the tensors.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence

_MAGIC = 0x544C5350  # "PSLT"
_HEAD = struct.Struct("<IIQ")  # magic, slots, bytes of one slot
_MARK = struct.Struct("<qQIQ")  # step, length, kind, write counter
_HEAD_BYTES = 64
_MARK_BYTES = 64
NOTHING = -(1 << 62)


class Slate:
    """Two slots of ``capacity`` bytes each."""

    def __init__(self, fd: int, capacity: int) -> None:
        self.fd = fd
        self.capacity = capacity
        self._stride = _MARK_BYTES + _round(capacity)
        self.size = _HEAD_BYTES + 2 * self._stride
        self._map = mmap.mmap(fd, self.size, mmap.MAP_SHARED)
        self._writes = max(self._mark(slot)[3] for slot in (0, 1))

    @classmethod
    def create(cls, name: str, capacity: int) -> Slate:
        """:raises OSError: not enough memory."""
        capacity = _round(capacity)
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _HEAD_BYTES + 2 * (_MARK_BYTES + capacity))
            os.pwrite(fd, _HEAD.pack(_MAGIC, 2, capacity), 0)
            for slot in (0, 1):
                at = _HEAD_BYTES + slot * (_MARK_BYTES + capacity)
                os.pwrite(fd, _MARK.pack(NOTHING, 0, 0, 0), at)
            return cls(fd, capacity)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int) -> Slate:
        """:raises ValueError: not a slate."""
        head = os.pread(fd, _HEAD.size, 0)
        if len(head) < _HEAD.size:
            raise ValueError("not a slate: too short")
        magic, slots, capacity = _HEAD.unpack(head)
        size = _HEAD_BYTES + 2 * (_MARK_BYTES + _round(capacity))
        if magic != _MAGIC or slots != 2 or os.fstat(fd).st_size != size:
            raise ValueError("not a slate")
        return cls(fd, capacity)

    def _at(self, slot: int) -> int:
        return _HEAD_BYTES + slot * self._stride

    def _mark(self, slot: int) -> tuple[int, int, int, int]:
        step, length, kind, writes = _MARK.unpack_from(self._map, self._at(slot))
        return step, length, kind, writes

    def _slot_for(self, step: int) -> int:
        """Where ``step`` goes: its own slot if it has one, else an empty one, else the one written
        longer ago."""
        marks = [self._mark(0), self._mark(1)]
        for slot, mark in enumerate(marks):
            if mark[0] == step:
                return slot
        for slot, mark in enumerate(marks):
            if mark[0] == NOTHING:
                return slot
        return 0 if marks[0][3] <= marks[1][3] else 1

    def write(self, step: int, parts: Sequence[bytes], kind: int = 0) -> None:
        """One record.

        :raises ValueError: larger than `capacity`.
        """
        length = sum(map(len, parts))
        if length > self.capacity:
            raise ValueError(f"{length} bytes do not fit into {self.capacity}")
        slot = self._slot_for(step)
        start = at = self.begin(slot)
        for part in parts:
            self._map[at : at + len(part)] = part
            at += len(part)
        self.commit(slot, step, at - start, kind)

    def begin(self, slot: int) -> int:
        """Make a slot void and return where its body starts in `buffer`."""
        _MARK.pack_into(self._map, self._at(slot), NOTHING, 0, 0, self._mark(slot)[3])
        return self._at(slot) + _MARK_BYTES

    def commit(self, slot: int, step: int, length: int, kind: int) -> None:
        self._writes += 1
        _MARK.pack_into(self._map, self._at(slot), NOTHING, length, kind, self._writes)
        struct.pack_into("<q", self._map, self._at(slot), step)

    @property
    def buffer(self) -> mmap.mmap:
        return self._map

    def slot_for(self, step: int) -> int:
        return self._slot_for(step)

    def steps(self) -> dict[int, int]:
        """Steps that are held, and their kinds."""
        marks = [self._mark(0), self._mark(1)]
        return {mark[0]: mark[2] for mark in marks if mark[0] != NOTHING}

    def where(self, step: int) -> tuple[int, int] | None:
        """Offset and length of a step's body in `buffer`."""
        for slot in (0, 1):
            mark = self._mark(slot)
            if mark[0] == step:
                return self._at(slot) + _MARK_BYTES, mark[1]
        return None

    def seal(self, step: int) -> tuple[int, int, int, int] | None:
        """Offset, length and kind of a step's body, and the count of writes: equal before and
        after reading it, nobody wrote it anew meanwhile."""
        for slot in (0, 1):
            held, length, kind, writes = self._mark(slot)
            if held == step and length <= self.capacity:
                return self._at(slot) + _MARK_BYTES, length, kind, writes
        return None

    def read(self, step: int) -> tuple[bytes, int] | None:
        """Body and kind of what `write` wrote for ``step``; None if it is not there."""
        for slot in (0, 1):
            held, length, kind, _ = self._mark(slot)
            if held == step and length <= self.capacity:
                start = self._at(slot) + _MARK_BYTES
                return self._map[start : start + length], kind
        return None

    def put(self, step: int, length: int, kind: int) -> Writing:
        """Begin a record of ``length`` bytes that comes in pieces.

        :raises ValueError: larger than `capacity`.
        """
        if length > self.capacity:
            raise ValueError(f"{length} bytes do not fit into {self.capacity}")
        return Writing(self, step, length, kind)

    def erase(self) -> None:
        for slot in (0, 1):
            self.begin(slot)

    def forget_after(self, step: int) -> None:
        """Let go of what is held of later steps."""
        for slot in (0, 1):
            if self._mark(slot)[0] > step:
                self.begin(slot)

    def close(self) -> None:
        """Unmap and close; whoever else holds the descriptor keeps the memory."""
        try:
            self._map.close()
        except BufferError:
            pass  # a tensor still looks into it; goes with that
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Writing:
    """A record on its way into a slot, which is void until `done`."""

    def __init__(self, slate: Slate, step: int, length: int, kind: int) -> None:
        self.step = step
        self._slate, self._kind, self._length = slate, kind, length
        self._slot = slate.slot_for(step)
        self._start = self._at = slate.begin(self._slot)

    def add(self, piece: bytes) -> None:
        """:raises ValueError: more than was said."""
        if self._at + len(piece) > self._start + self._length:
            raise ValueError("more bytes than were announced")
        self._slate.buffer[self._at : self._at + len(piece)] = piece
        self._at += len(piece)

    def done(self) -> None:
        """:raises ValueError: less than was said."""
        if self._at != self._start + self._length:
            raise ValueError(f"{self._at - self._start} bytes of {self._length}")
        self._slate.commit(self._slot, self.step, self._length, self._kind)


def _round(size: int) -> int:
    return (size + 63) // 64 * 64
