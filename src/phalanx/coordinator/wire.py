"""Values to bytes and back: JSON of frozen dataclasses, checked against their annotations.

A body holds the fields that differ from their defaults. What comes in must fit exactly: an
unknown kind or field, a missing one, a wrong type, a number beyond 64 bits, NaN, data nested
deeper than 16, or a body above the limit raises :class:`WireError`; nothing is guessed.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Final

from phalanx.coordinator import words
from phalanx.proto import coordinator_pb2 as pb
from phalanx.rendezvous import model

MAX_BODY: Final = 1 << 20
"""Bytes of the largest body either side takes."""

MAX_SAYING: Final = 256 << 10
"""Bytes of the largest body that an agent may say."""

_DEPTH = 16
_INT = 1 << 63


class WireError(ValueError):
    """Bytes that are no value of ours; the text says why, in a clause."""


def kinds(union: object) -> dict[str, type]:
    """The members of a union of dataclasses by name."""
    members = typing.get_args(union) or (union,)
    return {kind.__name__: kind for kind in members}


SAYINGS: Final[Mapping[str, type]] = {**kinds(model.Saying), **kinds(words.Beat)}
TELLINGS: Final[Mapping[str, type]] = {
    **kinds(model.Telling),
    **kinds(words.Welcome | words.Moved | words.Beat),
}
HELLO: Final[Mapping[str, type]] = kinds(words.Hello)
COPIES: Final[Mapping[str, type]] = kinds(words.Copy | words.Piece | words.CopyEnd)
WANTED: Final[Mapping[str, type]] = kinds(words.Wanted)
HELD: Final[Mapping[str, type]] = kinds(words.Held)
STATUS: Final[Mapping[str, type]] = kinds(words.StatusRequest | words.StatusReply)


# --- one value ------------------------------------------------------------------------------


def encode(value: object) -> bytes:
    """The body of a dataclass of this vocabulary. WireError: it is too large, or not plain."""
    try:
        text = json.dumps(_writer_of(value)(value), separators=(",", ":"), allow_nan=True)
    except (TypeError, ValueError, RecursionError, AttributeError) as error:
        raise WireError(f"{type(value).__name__} cannot be written: {error}") from None
    if len(text) > MAX_BODY:
        raise WireError(f"{type(value).__name__} has {len(text)} bytes, more than {MAX_BODY}")
    return text.encode("ascii")


def decode(kind: str, body: bytes, known: Mapping[str, type], limit: int = MAX_BODY) -> Any:
    """The value of ``kind``, which must be among ``known``. Raises WireError."""
    cls = known.get(kind)
    if cls is None:
        raise WireError(f"there is no {kind[:40]!r} here")
    if len(body) > limit:
        raise WireError(f"{kind} has {len(body)} bytes, more than {limit}")
    try:
        data = json.loads(body.decode("ascii"), parse_constant=_constant)
        return _reader(cls)(data)
    except WireError as error:
        raise WireError(f"{kind}: {error}") from None
    except RecursionError:
        raise WireError(f"{kind}: nested too deep") from None
    except ValueError as error:
        raise WireError(f"{kind}: not JSON ({str(error)[:80]})") from None


def _constant(text: str) -> float:
    if text == "NaN":
        raise WireError("NaN is no number")
    return float(text)


def _writer_of(value: object) -> Callable[[Any], Any]:
    kind: Any = type(value)
    return _writer(kind)


@cache
def _writer(kind: Any) -> Callable[[Any], Any]:
    if kind in (bool, int, float, str, type(None)):
        return _same
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        plan = [(f.name, _default(f), _writer(hints[f.name])) for f in fields(kind)]

        def write(value: Any) -> dict[str, Any]:
            out = {}
            for name, default, writer in plan:
                item = getattr(value, name)
                if item is not default and (default is MISSING or item != default):
                    out[name] = writer(item)
            return out

        return write
    arguments = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (a for a in arguments if a is not type(None))
        writer = _writer(inner)
        return lambda value: None if value is None else writer(value)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        if arguments[0] in (bool, int, float, str):
            return list
        writer = _writer(arguments[0])
        return lambda value: [writer(item) for item in value]
    if origin is tuple:
        writers = [_writer(a) for a in arguments]
        return lambda value: [w(item) for w, item in zip(writers, value, strict=True)]
    if kind is object or _is_mapping(origin):
        return _same
    raise TypeError(f"{kind} has no form on the wire")


def _same(value: Any) -> Any:
    return value


def _default(field: Any) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def _is_mapping(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Mapping)


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    if kind in _SCALARS:
        return _SCALARS[kind]
    if is_dataclass(kind):
        return _fields_reader(kind)
    arguments = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (a for a in arguments if a is not type(None))
        reader = _reader(inner)
        return lambda data: None if data is None else reader(data)
    if origin is tuple:
        return _tuple_reader(arguments)
    if _is_mapping(origin):
        return _mapping
    if kind is object:
        return _plain
    raise TypeError(f"{kind} has no form on the wire")


def _fields_reader(kind: Any) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(kind)
    readers = {f.name: _reader(hints[f.name]) for f in fields(kind)}
    needed = {f.name for f in fields(kind) if _default(f) is MISSING}

    def read(data: Any) -> Any:
        if type(data) is not dict:
            raise WireError(f"{kind.__name__} is an object, not {_show(data)}")
        for name in needed:
            if name not in data:
                raise WireError(f"{name} is missing")
        values = {}
        for name, item in data.items():
            reader = readers.get(name)
            if reader is None:
                raise WireError(f"{kind.__name__} has no {name[:40]!r}")
            try:
                values[name] = reader(item)
            except WireError as error:
                raise WireError(f"{name}: {error}") from None
        return kind(**values)

    return read


def _tuple_reader(arguments: tuple[Any, ...]) -> Callable[[Any], Any]:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        reader = _reader(arguments[0])

        def read_many(data: Any) -> Any:
            if type(data) is not list:
                raise WireError(f"a list, not {_show(data)}")
            return tuple([reader(item) for item in data])

        return read_many
    readers = [_reader(a) for a in arguments]

    def read_some(data: Any) -> Any:
        if type(data) is not list or len(data) != len(readers):
            raise WireError(f"a list of {len(readers)}, not {_show(data)}")
        return tuple([r(item) for r, item in zip(readers, data, strict=True)])

    return read_some


def _show(data: Any) -> str:
    return repr(data)[:40]


def _bool(data: Any) -> bool:
    if data is True or data is False:
        return bool(data)
    raise WireError(f"true or false, not {_show(data)}")


def _int(data: Any) -> int:
    if type(data) is int and -_INT <= data < _INT:
        return data
    raise WireError(f"a whole number of 64 bits, not {_show(data)}")


def _float(data: Any) -> float:
    if type(data) is float:
        return data
    return float(_int(data))


def _str(data: Any) -> str:
    if type(data) is str:
        return data
    raise WireError(f"a text, not {_show(data)}")


def _none(data: Any) -> None:
    if data is not None:
        raise WireError(f"nothing, not {_show(data)}")


def _plain(data: Any, depth: int = _DEPTH) -> Any:
    """JSON's own values; a list is a tuple."""
    if data is None or type(data) in (bool, str, float):
        return data
    if type(data) is int:
        return _int(data)
    if depth <= 0:
        raise WireError("nested too deep")
    if type(data) is list:
        return tuple([_plain(item, depth - 1) for item in data])
    return {key: _plain(item, depth - 1) for key, item in data.items()}


def _mapping(data: Any) -> Any:
    if type(data) is not dict:
        raise WireError(f"an object, not {_show(data)}")
    return _plain(data)


_SCALARS: dict[Any, Callable[[Any], Any]] = {
    bool: _bool,
    int: _int,
    float: _float,
    str: _str,
    type(None): _none,
}


# --- envelopes --------------------------------------------------------------------------------


def seal(
    value: object, *, term: int, generation: int = 0, seq: int = 0, body: bytes | None = None
) -> bytes:
    """An envelope with this value; ``body`` is what it was encoded to before. Raises WireError."""
    return pb.Envelope(
        term=term,
        generation=generation,
        seq=seq,
        kind=type(value).__name__,
        body=encode(value) if body is None else body,
    ).SerializeToString()


def bundle(sealed: Sequence[bytes]) -> bytes:
    """Envelopes in one message: the further ones ride on the first."""
    return sealed[0] + pb.Envelope(more=sealed[1:]).SerializeToString()


def unseal(data: bytes) -> pb.Envelope:
    """The envelope in these bytes, its body unread. Raises WireError."""
    if len(data) > MAX_BODY + 1024:
        raise WireError(f"a message of {len(data)} bytes, more than {MAX_BODY}")
    try:
        envelope = pb.Envelope.FromString(data)
    except Exception:  # protobuf's DecodeError, whichever implementation is loaded
        raise WireError("not an envelope") from None
    if envelope.term < 0 or envelope.generation < 0 or envelope.seq < 0 or not envelope.kind:
        raise WireError("an envelope without a kind, or with a number below 0")
    return envelope


def unbundle(data: bytes) -> list[pb.Envelope]:
    """All envelopes of a message. Raises WireError."""
    first = unseal(data)
    return [first, *map(unseal, first.more)] if first.more else [first]
