"""The worker channel: its messages, and what is none."""

from __future__ import annotations

import os
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.process.channel import (
    MAX_BYTES,
    MAX_FDS,
    Channel,
    ChannelClosed,
    ChannelFull,
    MalformedMessage,
    Message,
)

WORDS = st.text(max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture
def pair():
    one, other = Channel.pair()
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def raw():
    """A bare socket and the channel at its other end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(theirs)
    yield ours, channel
    ours.close()
    channel.close()


def fields(names: st.SearchStrategy[str]) -> st.SearchStrategy[dict]:
    return st.dictionaries(names.filter(lambda n: n not in ("v", "type", "fds")), JSON, max_size=4)


@given(kind=st.text(min_size=1, max_size=10), data=fields(st.text(max_size=10)))
@settings(max_examples=100, deadline=None)
def test_what_is_sent_is_received(kind, data):
    one, other = Channel.pair()
    try:
        one.send(kind, **{name: value for name, value in data.items() if name != "self"})
        expected = {name: value for name, value in data.items() if name != "self"}
        assert other.receive() == Message(kind, expected, ())
        assert other.receive() is None
    finally:
        one.close()
        other.close()


def test_nothing_there(pair):
    assert pair[0].receive() is None
    assert pair[0].wait(0) is False


def test_descriptors_travel(pair):
    one, other = pair
    read, write = os.pipe()
    one.send("take", fds=(write,))
    os.close(write)
    message = other.receive()
    assert message is not None and len(message.fds) == 1
    assert os.get_inheritable(message.fds[0]) is False
    os.write(message.fds[0], b"x")
    assert os.read(read, 1) == b"x"
    os.close(message.fds[0])
    os.close(read)


def test_end_of_file_comes_after_the_messages(pair):
    one, other = pair
    one.send("left", step=3, clean=True)
    one.close()
    assert other.wait(0) is True
    assert other.receive() == Message("left", {"step": 3, "clean": True}, ())
    for _ in range(2):
        with pytest.raises(ChannelClosed):
            other.receive()
    with pytest.raises(ChannelClosed):
        other.send("leave", generation=1)
    with pytest.raises(ChannelClosed):
        one.receive()
    with pytest.raises(ChannelClosed):
        one.send("leave")


def test_too_much_is_refused_before_it_is_sent(pair):
    one, other = pair
    with pytest.raises(ValueError, match=f"{MAX_BYTES} are allowed"):
        one.send("fault", text="x" * MAX_BYTES)
    with pytest.raises(ValueError, match="descriptors"):
        one.send("take", fds=(0,) * (MAX_FDS + 1))
    with pytest.raises(ValueError):
        one.send("fault", value=float("nan"))
    one.send("fault", text="x" * (MAX_BYTES - 100))
    message = other.receive()
    assert message is not None and len(message.fields["text"]) == MAX_BYTES - 100


def test_a_reader_that_does_not_read_is_no_reason_to_wait(pair):
    def flood():
        for _ in range(10_000):
            pair[0].send("stop_at", step=1, padding="x" * 1000)

    with pytest.raises(ChannelFull):
        flood()


MALFORMED = {
    "not JSON": b"{",
    "not an object": b"[1]",
    "no version": b'{"type":"hello"}',
    "other version": b'{"v":2,"type":"hello"}',
    "true is not 1": b'{"v":true,"type":"hello"}',
    "no type": b'{"v":1}',
    "type is no text": b'{"v":1,"type":3}',
    "empty type": b'{"v":1,"type":""}',
    "not UTF-8": b'{"v":1,"type":"\xff\xfe"}',
    "empty": b"",
    "deep": b"[" * 60_000,
    "too long": b'{"v":1,"type":"' + b"x" * MAX_BYTES + b'"}',
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_costs_nobody_else_anything(raw, name):
    ours, channel = raw
    ours.send(MALFORMED[name])
    ours.send(b'{"v":1,"type":"hello","capabilities":[]}')
    with pytest.raises(MalformedMessage):
        channel.receive()
    assert channel.receive() == Message("hello", {"capabilities": []}, ())


def test_descriptors_of_a_malformed_message_are_closed(raw):
    ours, channel = raw
    count = len(os.listdir("/proc/self/fd"))
    socket.send_fds(ours, [b"{"], [0, 1])
    socket.send_fds(ours, [b'{"v":1,"type":"t"}'], [0] * (MAX_FDS + 4))
    for _ in range(2):
        with pytest.raises(MalformedMessage):
            channel.receive()
    assert channel.receive() is None
    assert len(os.listdir("/proc/self/fd")) == count


@given(data=st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_a_message_or_malformed(data):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(theirs)
    try:
        ours.send(data)
        try:
            assert isinstance(channel.receive(), Message)
        except MalformedMessage:
            pass
        assert channel.receive() is None
    finally:
        ours.close()
        channel.close()


def test_from_the_environment(monkeypatch):
    monkeypatch.delenv("PHALANX_CHANNEL_FD", raising=False)
    assert Channel.from_environment() is None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fd = os.dup(theirs.fileno())
    theirs.close()
    os.set_inheritable(fd, True)
    monkeypatch.setenv("PHALANX_CHANNEL_FD", str(fd))
    channel = Channel.from_environment()
    assert channel is not None
    assert os.get_inheritable(fd) is False
    channel.send("hello", capabilities=["join"])
    assert b'"hello"' in ours.recv(1000)
    channel.close()
    ours.close()
