"""Values to bytes and back, and bytes that are no values."""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("google.protobuf")

from phalanx.coordinator import wire, words
from phalanx.rendezvous import model as m

ALL = {**wire.SAYINGS, **wire.TELLINGS, **wire.HELLO, **wire.STATUS}
NUMBERS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | FLOATS | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(max_size=5), inner)
    ),
    max_leaves=6,
)


def values(kind: typing.Any) -> st.SearchStrategy[typing.Any]:
    scalars = {bool: st.booleans(), int: NUMBERS, float: FLOATS, str: st.text(max_size=20)}
    if kind in scalars:
        return scalars[kind]
    if hasattr(kind, "__dataclass_fields__"):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{f.name: values(hints[f.name]) for f in fields(kind)})
    arguments, origin = typing.get_args(kind), typing.get_origin(kind)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return st.dictionaries(st.text(max_size=5), PLAIN, max_size=3)
    return st.one_of(*[st.none() if a is type(None) else values(a) for a in arguments])


@pytest.mark.parametrize("kind", ALL)
def test_what_is_written_comes_back(kind: str) -> None:
    @given(values(ALL[kind]))
    def check(value: object) -> None:
        data = wire.seal(value, term=3, generation=2, seq=9)
        envelope = wire.unseal(data)
        assert (envelope.term, envelope.generation, envelope.seq) == (3, 2, 9)
        assert wire.decode(envelope.kind, envelope.body, ALL) == value

    check()


@given(st.binary(max_size=200))
def test_garbage_is_an_error_of_ours(data: bytes) -> None:
    try:
        envelope = wire.unseal(data)
        wire.decode(envelope.kind, envelope.body, ALL)
    except wire.WireError:
        pass


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)


@given(st.sampled_from(sorted(ALL)), st.dictionaries(st.text(max_size=9), JSON))
def test_json_that_does_not_fit(kind: str, data: dict[str, object]) -> None:
    try:
        value = wire.decode(kind, json.dumps(data).encode(), ALL)
    except wire.WireError:
        return
    assert type(value) is ALL[kind]


@pytest.mark.parametrize(
    ("kind", "body", "why"),
    [
        ("Nonsense", b"{}", "no 'Nonsense'"),
        ("Join", b"{}", "node is missing"),
        ("Join", b"[]", "an object"),
        ("Join", b'{"node":{"id":"a","address":"b"},"more":1}', "no 'more'"),
        ("Join", b'{"node":{"id":1,"address":"b"}}', "node: id: a text"),
        ("Succeeded", b'{"generation":true}', "whole number"),
        ("Succeeded", b'{"generation":1.5}', "whole number"),
        ("Succeeded", b'{"generation":9223372036854775808}', "64 bits"),
        ("Succeeded", b'{"generation":1', "not JSON"),
        ("Succeeded", b'{"generation":' + b"9" * 5000 + b"}", "Succeeded"),
        ("Succeeded", b"\xff", "not JSON"),
        ("WorkerEvent", b'{"generation":1,"rank":0,"kind":"x","data":{"a":NaN}}', "NaN"),
        ("WorkerEvent", b"[" * 100_000, "nested too deep"),
        (
            "WorkerEvent",
            b'{"generation":1,"rank":0,"kind":"x","data":{"a":' + b"[" * 20 + b"]" * 20 + b"}}",
            "nested too deep",
        ),
        ("Leave", b'{"reason":"' + b"x" * wire.MAX_BODY + b'"}', "more than"),
    ],
)
def test_why_it_is_refused(kind: str, body: bytes, why: str) -> None:
    with pytest.raises(wire.WireError, match=why):
        wire.decode(kind, body, ALL)


def test_what_is_too_large_is_not_sent() -> None:
    with pytest.raises(wire.WireError, match="more than"):
        wire.encode(m.Leave("x" * wire.MAX_BODY))
    with pytest.raises(wire.WireError, match="cannot be written"):
        wire.encode(m.Note("x", {"a": object()}))


def test_envelopes_in_one_message() -> None:
    said = [m.Offer("h:1"), m.Leave(""), m.Succeeded(3)]
    sealed = [wire.seal(v, term=2, seq=n) for n, v in enumerate(said)]
    found = wire.unbundle(wire.bundle(sealed))
    assert [wire.decode(e.kind, e.body, ALL) for e in found] == said
    assert [e.seq for e in found] == [0, 1, 2]
    assert len(wire.unbundle(sealed[0])) == 1
    with pytest.raises(wire.WireError):
        wire.unbundle(wire.bundle([sealed[0], b"\xff"]))


def test_a_hello_is_small() -> None:
    assert len(wire.encode(words.Hello("job", "node", options=m.Options(2, 3)))) < 100
