"""The store inside the process, and barriers over it."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

import phalanx.elastic.utils.store as store_util
from phalanx.elastic.rendezvous.store import InProcessStore, PrefixStore

SOON = 0.05


def test_values_are_bytes_and_text_is_encoded():
    store = InProcessStore()
    store.set("a", "text")
    store.set("b", b"\0raw")
    assert store.get("a") == b"text"
    assert store.multi_get(["b", "a"]) == [b"\0raw", b"text"]
    assert store.num_keys() == 2
    assert store.check(["a", "b"]) and not store.check(["a", "c"])
    assert store.delete_key("a") and not store.delete_key("a")


def test_add_append_multi_set():
    store = InProcessStore()
    assert [store.add("n", 2), store.add("n", -3)] == [2, -1]
    assert store.get("n") == b"-1"
    store.append("log", "a")
    store.append("log", b"b")
    assert store.get("log") == b"ab"
    store.multi_set(["x", "y"], ["1", b"2"])
    assert store.multi_get(["x", "y"]) == [b"1", b"2"]
    with pytest.raises(ValueError, match="1 keys, but 2 values"):
        store.multi_set(["x"], ["1", "2"])
    store.set("word", "w")
    with pytest.raises(ValueError):
        store.add("word", 1)


@pytest.mark.parametrize(
    ("present", "expected", "desired", "answer", "after"),
    [
        (None, "", "new", b"new", b"new"),
        (None, "other", "new", b"other", None),
        ("old", "old", "new", b"new", b"new"),
        ("old", "other", "new", b"old", b"old"),
        ("old", "", "new", b"old", b"old"),
    ],
)
def test_compare_set(present, expected, desired, answer, after):
    store = InProcessStore()
    if present is not None:
        store.set("k", present)
    assert store.compare_set("k", expected, desired) == answer
    assert (store.get("k") if store.check(["k"]) else None) == after


@pytest.mark.parametrize("wait", ["get", "multi_get", "wait", "wait_own"])
def test_waiting_ends_with_the_torch_kind_of_error(wait):
    store = InProcessStore(timedelta(seconds=SOON))
    calls = {
        "get": lambda: store.get("nothing"),
        "multi_get": lambda: store.multi_get(["nothing"]),
        "wait": lambda: store.wait(["nothing"]),
        "wait_own": lambda: store.wait(["nothing"], timedelta(0)),
    }
    with pytest.raises(RuntimeError, match="nothing") as caught:
        calls[wait]()
    assert type(caught.value).__name__ == "DistStoreError"


def test_waiting_ends_when_the_key_comes():
    store = InProcessStore(30)
    with ThreadPoolExecutor() as pool:
        got = [pool.submit(store.get, "k") for _ in range(4)]
        store.set("other", "x")
        store.set("k", "v")
        assert [each.result(10) for each in got] == [b"v"] * 4


def test_prefix_store_shares_and_separates():
    store = InProcessStore()
    one, two = PrefixStore("one", store), PrefixStore("two", PrefixStore("deep", store))
    one.set("k", "1")
    two.multi_set(["k"], ["2"])
    one.add("n", 1)
    one.append("k", "+")
    assert (one.get("k"), two.multi_get(["k"])) == (b"1+", [b"2"])
    assert store.get("one/k") == b"1+" and store.get("deep/two/k") == b"2"
    assert one.compare_set("k", "1+", "3") == b"3"
    assert one.check(["k"]) and not one.check(["gone"])
    one.wait(["k"])
    one.set_timeout(timedelta(seconds=7))
    assert two.timeout == store.timeout == timedelta(seconds=7)
    assert one.delete_key("k") and one.num_keys() == 2


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=40), st.integers(1, 6))
def test_additions_from_many_threads_are_all_counted(amounts, threads):
    store = InProcessStore()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda amount: store.add("n", amount), amounts))
    assert int(store.get("n")) == sum(amounts)


def test_store_timeout_is_restored_after_an_error():
    store = InProcessStore(9)
    inside = []

    def body():
        with store_util.store_timeout(store, 1):
            inside.append(store.timeout)
            raise KeyError

    with pytest.raises(KeyError):
        body()
    assert inside == [timedelta(seconds=1)]
    assert store.timeout == timedelta(seconds=9)


def test_barrier_keys_and_passage():
    store = InProcessStore()
    with ThreadPoolExecutor(3) as pool:
        for each in [
            pool.submit(store_util.barrier, store, 3, "here", barrier_timeout=10) for _ in range(3)
        ]:
            each.result(20)
    assert store.get("here/num_members") == b"3" and store.check(["here/last_member"])


def test_the_timeout_after_a_barrier():
    store = InProcessStore(9)
    store_util.barrier(store, 1, "alone", barrier_timeout=5)
    assert store.timeout == timedelta(seconds=9)
    with pytest.raises(RuntimeError):
        store_util.barrier(store, 2, "nobody", barrier_timeout=0)
    assert store.timeout == timedelta(0)  # as PyTorch's: what went wrong is left as it was


def test_barrier_names_the_missing():
    store = InProcessStore()

    def come(rank):
        with pytest.raises(store_util.DistStoreError) as caught:
            store_util.barrier(
                store,
                4,
                "b",
                SOON,
                rank=rank,
                rank_tracing_decoder="node{}".format,
                trace_timeout=SOON,
            )
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(come, [0, 2])
    assert "missing_ranks=[node1, node3]" in first
    assert "check rank 0 (node0)" in second or "wait timeout" in second


def test_barrier_tracing_needs_a_rank():
    with pytest.raises(AssertionError, match="rank"):
        store_util.barrier(InProcessStore(), 1, "b", rank_tracing_decoder=str)


class TorchLikeStore:
    """A store whose error is another package's class of the same name."""

    class DistStoreError(RuntimeError):
        pass

    timeout = timedelta(seconds=1)

    def set_timeout(self, timeout):
        pass

    def set(self, key, value):
        pass

    def add(self, key, amount):
        return 1

    def wait(self, keys, timeout=None):
        raise self.DistStoreError("torch gave up")


def test_a_foreign_store_error_is_recognised_and_kept():
    with pytest.raises(TorchLikeStore.DistStoreError, match=r"missing_ranks=\[1\]"):
        store_util.barrier(TorchLikeStore(), 2, "b", 0, rank=0, trace_timeout=0)


def test_synchronize_and_get_all():
    store = InProcessStore()
    with ThreadPoolExecutor(3) as pool:
        rows = list(
            pool.map(
                lambda rank: store_util.synchronize(store, b"%d" % rank, rank, 3, "p", timeout=10),
                range(3),
            )
        )
    assert rows == [[b"0", b"1", b"2"]] * 3


def test_synchronize_gives_up_together():
    store = InProcessStore()
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        store_util.synchronize(store, b"x", 0, 2, "p", timeout=SOON)
    assert time.monotonic() - start < 10


def test_waiters_do_not_hold_the_store():
    store = InProcessStore(30)
    waiting = threading.Thread(target=store.get, args=("late",))
    waiting.start()
    store.set("k", "v")
    assert store.get("k") == b"v"
    store.set("late", "now")
    waiting.join(10)
    assert not waiting.is_alive()
