"""The small parts of the worker side, in this process."""

from __future__ import annotations

import os
import random
import select
import time
from collections import Counter, OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

from phalanx.process.channel import Channel  # noqa: E402
from phalanx.process.slate import Slate  # noqa: E402
from phalanx.recovery.ladder import Kind  # noqa: E402
from phalanx.training import DeviceFault, NetworkFault, codec, rng, state  # noqa: E402
from phalanx.training.checkpoint import Checkpoints, NotCommitted  # noqa: E402
from phalanx.training.data import Batches  # noqa: E402
from phalanx.training.faults import classify  # noqa: E402
from phalanx.training.groups import GroupBroken  # noqa: E402
from phalanx.training.link import AgentGone, Join, Link, NoWord, Permit  # noqa: E402
from phalanx.training.session import Job  # noqa: E402

pytestmark = pytest.mark.torch

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
    ),
    max_leaves=12,
)


@given(plain)
def test_packed_state_comes_back(value):
    assert repr(codec.unpack(codec.pack(value))) == repr(value)


def test_packed_tensors_arrays_and_containers_come_back():
    value = {
        "t": torch.arange(6, dtype=torch.int32).reshape(2, 3),
        "b": torch.tensor([1.5], dtype=torch.bfloat16),
        "e": torch.empty(0),
        "n": numpy.arange(4.0),
        "s": {3, 1},
        "c": Counter({2: 5}),
        "o": OrderedDict(a=1),
        "q": deque([1, 2], 5),
        "y": torch.float16,
        "g": numpy.float64(2.5),
    }
    back = codec.unpack(codec.pack(value))
    assert torch.equal(back["t"], value["t"])
    assert torch.equal(back["b"], value["b"])
    assert back["e"].shape == (0,)
    assert (back["n"] == value["n"]).all()
    for name in "scoqyg":
        assert back[name] == value[name]
        if name != "g":
            assert type(back[name]) is type(value[name])
    assert back["q"].maxlen == 5


def test_what_cannot_be_packed_is_named():
    with pytest.raises(codec.NotPackable, match=r"\['a'\]\[1\] is a .*\.Link"):
        codec.pack({"a": [1, Link.__new__(Link)]})


@given(st.binary(max_size=40))
def test_garbage_is_refused(data):
    try:
        codec.unpack(data)
    except ValueError:
        pass


@given(st.lists(st.sampled_from(["python", "gauss", "numpy", "normal", "torch"]), max_size=8))
def test_random_states_come_back(draws):
    def draw(kind):
        return {
            "python": random.random,
            "gauss": lambda: random.gauss(0, 1),
            "numpy": lambda: float(numpy.random.rand()),
            "normal": lambda: float(numpy.random.normal()),
            "torch": lambda: float(torch.rand(1)),
        }[kind]()

    for kind in draws:
        draw(kind)
        saved = rng.capture()
        first = [draw(kind) for kind in draws]
        rng.restore(saved)
        assert [draw(kind) for kind in draws] == first


def test_slate_keeps_two_steps_and_outlives_its_writer():
    slate = Slate.create("test", 1000)
    for step in range(5):
        slate.write(step, [b"step", bytes([step])], kind=1)
    assert slate.steps() == {3: 1, 4: 1}
    slate.write(4, [b"again"], kind=2)
    copy = Slate.attach(os.dup(slate.fd))
    slate.close()
    assert copy.read(3) == (b"step\x03", 1)
    assert copy.read(4) == (b"again", 2)
    assert copy.read(5) is None
    with pytest.raises(ValueError, match="do not fit"):
        copy.write(9, [bytes(2000)])
    copy.close()


def test_slate_whose_writer_died_half_way():
    slate = Slate.create("test", 1000)
    slate.write(1, [b"one"])
    slate.write(2, [b"two"])
    slate.begin(slate.slot_for(3))  # and no more
    copy = Slate.attach(os.dup(slate.fd))
    assert copy.steps() == {2: 0}
    copy.write(3, [b"three"])
    assert copy.steps() == {2: 0, 3: 0}
    copy.close()
    slate.close()


def test_slate_puts_the_next_step_where_nothing_is():
    slate = Slate.create("test", 1000)
    slate.write(1, [b"one"])
    slate.write(2, [b"two"])
    slate.forget_after(1)  # the newer one is void, though it was written later
    slate.write(3, [b"three"])
    assert slate.steps() == {1: 0, 3: 0}
    slate.close()


def test_slate_tells_whether_a_step_was_written_anew():
    slate = Slate.create("test", 1000)
    slate.write(1, [b"one"])
    seal = slate.seal(1)
    assert seal == slate.seal(1) and slate.seal(2) is None
    slate.write(1, [b"two"])
    assert slate.seal(1) != seal
    slate.close()


def test_not_a_slate():
    fd = os.memfd_create("test")
    os.write(fd, bytes(500))
    with pytest.raises(ValueError, match="not a slate"):
        Slate.attach(fd)
    os.close(fd)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (DeviceFault("x"), Kind.DEVICE),
        (RuntimeError("HBM MULTI BIT ECC at 3"), Kind.DEVICE),
        (NetworkFault("x"), Kind.NETWORK),
        (ConnectionResetError("x"), Kind.NETWORK),
        (GroupBroken("x"), Kind.PEER),
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"), Kind.PEER),
        (MemoryError(), Kind.MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory"), Kind.MEMORY),
        (RuntimeError("shapes do not match"), Kind.BUG),
        (KeyError("gloo/"), Kind.BUG),
        (OSError("x"), Kind.BUG),
        (FileNotFoundError("x"), Kind.BUG),
    ],
)
def test_classes_of_exceptions(error, kind):
    assert classify(error) is kind


def test_the_class_of_a_wrapped_exception_is_that_of_its_cause():
    error = ValueError("my own")
    error.__cause__ = GroupBroken("x")
    assert classify(error) is Kind.PEER
    error.__cause__ = error  # a loop ends
    assert classify(error) is Kind.BUG


class Loader:
    """Shuffles with torch's global generator, augments with Python's."""

    def __iter__(self):
        for index in torch.randperm(6).tolist():
            yield index, random.random()


def test_batches_come_again_and_leave_the_random_states_the_same():
    torch.manual_seed(1)
    random.seed(2)
    batches = Batches(Loader())
    for _ in range(8):
        next(batches)
    position, before = batches.state_dict(), rng.capture()
    first = [next(batches) for _ in range(3)]
    after = rng.capture()
    batches.load_state_dict(position)
    rng.restore(before)
    assert [next(batches) for _ in range(3)] == first
    assert rng.capture() == after
    rest = [next(batches) for _ in range(5)]

    # Another process: a fresh one at the same position.
    torch.manual_seed(9)
    fresh = Batches(Loader())
    fresh.load_state_dict(codec.unpack(codec.pack(position)))
    rng.restore(before)
    assert [next(fresh) for _ in range(8)] == first + rest


def test_an_empty_loader_is_an_error():
    with pytest.raises(ValueError, match="no batches"):
        next(Batches([]))


def test_batch_norm_buffers_are_put_back():
    """Its kernels change them without moving the version counters."""
    norm = torch.nn.BatchNorm1d(4)
    other = torch.nn.Module()
    other.register_buffer("table", torch.arange(3.0))
    models = [norm, other]
    guard = state.BufferGuard(models)
    norm(torch.randn(3, 4))
    for _ in range(3):
        guard.begin()
        saved = guard.save()
        expected = [buffer.clone() for model in models for buffer in model.buffers()]
        norm(torch.randn(3, 4))
        other.table.add_(1)
        guard.load(saved)
        now = [buffer for model in models for buffer in model.buffers()]
        assert all(map(torch.equal, expected, now))
    assert guard.covers(models)
    other.table = other.table + 1
    assert not guard.covers(models)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "generation is None"),
        ({"generation": 2, "rank": True, "world": 4, "store": "a:1"}, "rank is True"),
        ({"generation": 2, "rank": 4, "world": 4, "store": "a:1"}, "rank 4 of 4"),
        ({"generation": 2, "rank": 1, "world": 4, "store": "a"}, "host:port"),
    ],
)
def test_a_wrong_join_is_named(fields, text):
    with pytest.raises(ValueError, match=text):
        Join.of(fields)


@pytest.fixture
def linked():
    mine, theirs = Channel.pair()
    left: list[int] = []
    link = Link(theirs, left.append)
    link.start()
    yield mine, link, left
    mine.close()
    link.close()


JOIN = {"rank": 1, "world": 4, "store": "127.0.0.1:5", "previous_rank": 1}


def test_the_newest_join_counts_and_old_words_do_not(linked):
    agent, link, left = linked
    agent.send("leave", generation=1)
    agent.send("join", generation=2, **JOIN)
    agent.send("nonsense", x=1)
    agent._socket.send(b"not json")
    agent.send("leave", generation=1)
    agent.send("leave", generation=2)
    agent.send("join", generation=3, **JOIN)
    assert link.await_over(2, 5)
    assert link.await_word(1, 5).generation == 3
    assert left == [1, 2]
    with pytest.raises(NoWord):
        link.await_word(3, 0.01)
    agent.send("exit", code=7)
    with pytest.raises(SystemExit) as end:
        link.await_word(3, 5)
    assert end.value.code == 7


def test_a_dump_is_a_word_too(linked):
    agent, link, _ = linked
    agent.send("dump", generation=1, step="x", writers=[0])
    agent.send("dump", generation=1, step=3, writers=[0, 2])
    order = link.await_word(1, 5)
    assert (order.step, order.writers, order.commit) == (3, (0, 2), False)


def test_the_agent_s_end_is_heard(linked):
    agent, link, _ = linked
    agent.close()
    with pytest.raises(AgentGone):
        link.await_word(0, 5)
    assert not link.say("good_step")


def test_a_checkpoint_is_asked_for(linked):
    agent, link, _ = linked
    asked = time.monotonic()
    agent.send("commit", generation=2, step=6, within=5.0)  # of another question
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(link.may_commit, 2, 7, 30.0)
        while (question := agent.receive()) is None:
            select.select([agent.fileno()], [], [], 30)
        assert (question.type, question.fields["step"]) == ("prepared", 7)
        agent.send("commit", generation=1, step=7, within=9.0)
        agent.send("commit", generation=2, step=7, within=5)
        permit = waiting.result(30)
    assert permit.until is not None and asked + 5 <= permit.until <= time.monotonic() + 5


def test_a_checkpoint_is_refused(linked):
    agent, link, _ = linked
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(link.may_commit, 2, 7, 30.0)
        while agent.receive() is None:
            select.select([agent.fileno()], [], [], 30)
        agent.send("refused", generation=2, step=7, reason="cut off")
        assert waiting.result(30) == Permit(None, "cut off")
        waiting = other.submit(link.may_commit, 3, 8, 30.0)
        agent.send("leave", generation=3)
        assert waiting.result(30) == Permit(None, "generation 3 is over")
    assert link.may_commit(4, 9, 0.01) == Permit(None, "nobody answered")


@pytest.mark.parametrize("answer", [Permit(None, "cut off"), Permit(0.0)])
def test_what_may_not_count_has_no_name(tmp_path, answer):
    (tmp_path / "draft-0000000003-1").mkdir()
    checkpoints = Checkpoints(tmp_path)
    asked = []

    def ask(generation, step):
        asked.append((generation, step))
        return answer

    checkpoints.ask = ask
    with pytest.raises(NotCommitted):
        checkpoints.commit_dump(3, 1, 2)
    assert asked == [(1, 3)]
    assert checkpoints.committed() == {}
    checkpoints.ask = lambda generation, step: Permit(time.monotonic() + 60)
    checkpoints.commit_dump(3, 1, 2)
    assert checkpoints.newest() == 3


@pytest.mark.parametrize("own", [DeviceFault("UCE ERROR at device 0"), None])
def test_told_to_exit_a_program_ends_with_its_own_fault(own):
    """Also when the order is there before the main thread comes to wait for one."""
    ours, theirs = Channel.pair()
    link = Link(ours, lambda generation: False)
    link.exit_code = 3
    job = Job(
        backend=None,
        timeout=1.0,
        checkpoint=None,
        checkpoint_every=0,
        keep_checkpoints=1,
        snapshot_every=None,
        regroup_timeout=1.0,
        decision_timeout=1.0,
        elastic="off",
    )
    job._link, job._own_error = link, own
    with pytest.raises(DeviceFault if own else SystemExit):
        job._must_recover(10)
    link.close()
    theirs.close()
