"""The states of the random generators: Python's, numpy's, torch's."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from array import array
from typing import Any

import torch

_HEAD = struct.Struct("<BBdHBdII")
# version, has Python gauss, gauss, numpy position (0xFFFF: none), has numpy gauss, gauss,
# bytes of torch's CPU state, number of accelerators


class _Numpy:
    """numpy's global generator. Its ``get_state`` takes 40 microseconds, so it is only asked when
    the generator's memory has changed, or when a second half of a pair of normal values was
    left over (which can be used up without a change there)."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._address = 0
        self._raw = b""
        self._state: tuple[int, int, float, bytes] = (0xFFFF, 0, 0.0, b"")

    def forget(self) -> None:
        """The state was set: the same memory can now go with another left-over value."""
        self._raw = b""

    def state(self) -> tuple[int, int, float, bytes]:
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return (0xFFFF, 0, 0.0, b"")
        generator: Any = getattr(numpy.random.mtrand._rand, "_bit_generator", None)
        if generator is not self._generator:
            self._generator, self._raw, self._address = generator, b"", 0
            if type(generator).__name__ == "MT19937":
                self._address = int(generator.ctypes.state_address)
        if self._address:
            raw = ctypes.string_at(self._address, 2500)
            if raw == self._raw and not self._state[1]:
                return self._state
            self._raw = raw
        name, keys, place, has_gauss, gauss = numpy.random.get_state()
        if name == "MT19937":
            self._state = (int(place), int(has_gauss), float(gauss), keys.tobytes())
        else:
            self._state = (0xFFFF, 0, 0.0, b"")
        return self._state


_numpy = _Numpy()
_WORDS = struct.Struct("625I")


def capture() -> bytes:
    """All states of this process. About 10 kB and 20 microseconds without an accelerator."""
    version, words, gauss = random.getstate()
    python = _WORDS.pack(*words)
    position, has_gauss, numpy_gauss, numpy_words = _numpy.state()
    cpu = torch.get_rng_state().numpy().tobytes()
    devices = []
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices = [torch.cuda.get_rng_state().numpy().tobytes()]
    parts = [
        _HEAD.pack(
            version,
            gauss is not None,
            gauss or 0.0,
            position,
            has_gauss,
            numpy_gauss,
            len(cpu),
            len(devices),
        ),
        python,
        numpy_words,
        cpu,
    ]
    for device in devices:
        parts += [struct.pack("<I", len(device)), device]
    return b"".join(parts)


def restore(data: bytes) -> None:
    """:raises ValueError: these bytes were not made by `capture`."""
    try:
        (
            version,
            has_python_gauss,
            gauss,
            position,
            has_gauss,
            numpy_gauss,
            size,
            devices,
        ) = _HEAD.unpack_from(data)
    except struct.error as error:
        raise ValueError(f"not a random state: {error}") from None
    at = _HEAD.size
    words = array("I", data[at : at + 2500])
    at += 2500
    random.setstate((version, tuple(words), gauss if has_python_gauss else None))
    if position != 0xFFFF:
        import numpy

        keys = numpy.frombuffer(data[at : at + 2496], dtype=numpy.uint32)
        at += 2496
        numpy.random.set_state(("MT19937", keys, position, has_gauss, numpy_gauss))
        _numpy.forget()
    torch.set_rng_state(torch.frombuffer(bytearray(data[at : at + size]), dtype=torch.uint8))
    at += size
    for _ in range(devices):
        (length,) = struct.unpack_from("<I", data, at)
        at += 4
        state = torch.frombuffer(bytearray(data[at : at + length]), dtype=torch.uint8)
        at += length
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(state)
