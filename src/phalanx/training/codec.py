"""Small state as bytes and back, without pickle.

What samplers, schedulers and scalers give as ``state_dict()`` is trees of plain values. They
travel between processes and lie in shared memory, so they are written as JSON with tags and
nothing is ever evaluated when they are read.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict, deque
from typing import Any

import torch

_PLAIN = (str, int, bool, type(None))


class NotPackable(TypeError):
    """A value that has no representation here; the text says where it is."""


def pack(value: Any) -> bytes:
    """:raises NotPackable: something in ``value`` is neither plain data nor a tensor."""
    return json.dumps(_out(value, ""), separators=(",", ":")).encode()


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """:raises ValueError: these bytes were not made by `pack`."""
    try:
        return _in(json.loads(bytes(data)))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not packed state: {error!r}") from None


def _out(value: Any, where: str) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"f": repr(value)}
    if kind is list:
        return [_out(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        tag = "c" if kind is Counter else "o" if kind is OrderedDict else "d"
        return {
            tag: [[_out(k, f"{where} key"), _out(v, f"{where}[{k!r}]")] for k, v in value.items()]
        }
    if isinstance(value, tuple):
        return {"t": [_out(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, (set, frozenset)):
        return {"s": [_out(item, where) for item in sorted(value, key=repr)]}
    if isinstance(value, deque):
        return {"q": [_out(item, where) for item in value], "m": value.maxlen}
    if isinstance(value, (bytes, bytearray)):
        return {"b": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        local = value.detach().cpu().contiguous()
        return {"T": [dtype_name(local.dtype), list(local.shape), _raw(local)]}
    if isinstance(value, torch.dtype):
        return {"y": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"D": str(value)}
    if kind.__module__ == "numpy":
        if kind.__name__ == "ndarray" and value.dtype.kind in "biufc":
            return {
                "N": [
                    value.dtype.str,
                    list(value.shape),
                    base64.b64encode(value.tobytes()).decode(),
                ]
            }
        if hasattr(value, "item") and getattr(value, "shape", None) == ():
            return _out(value.item(), where)
    if isinstance(value, (bool, int, str, float)):  # an enum or another subclass
        for base in (bool, int, str, float):
            if isinstance(value, base):
                return _out(base(value), where)
    raise NotPackable(f"{where or 'the value'} is a {kind.__module__}.{kind.__qualname__}")


def _raw(tensor: torch.Tensor) -> str:
    return base64.b64encode(as_bytes(tensor).numpy().tobytes()).decode()


def _in(value: Any) -> Any:
    if isinstance(value, list):
        return [_in(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value))
    body = value[tag]
    if tag == "d":
        return {_in(k): _in(v) for k, v in body}
    if tag == "o":
        return OrderedDict((_in(k), _in(v)) for k, v in body)
    if tag == "c":
        return Counter({_in(k): _in(v) for k, v in body})
    if tag == "t":
        return tuple(_in(item) for item in body)
    if tag == "s":
        return {_in(item) for item in body}
    if tag == "q":
        return deque((_in(item) for item in body), value["m"])
    if tag == "b":
        return base64.b64decode(body)
    if tag == "f":
        return float(body)
    if tag == "T":
        name, shape, raw = body
        data = bytearray(base64.b64decode(raw))
        flat = (
            torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        )
        return flat.view(dtype_of(name)).reshape(shape).clone()
    if tag == "y":
        return dtype_of(body)
    if tag == "D":
        return torch.device(body)
    if tag == "N":
        import numpy

        name, shape, raw = body
        return (
            numpy.frombuffer(base64.b64decode(raw), dtype=numpy.dtype(name)).reshape(shape).copy()
        )
    raise ValueError(f"unknown tag {tag!r}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no dtype {name!r}")
    return found


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, as a flat tensor of bytes that shares it."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
