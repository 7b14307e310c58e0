"""NUMA binding, on machines made of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.process import numa
from phalanx.process.numa import (
    AffinityMode,
    Machine,
    NumaError,
    NumaOptions,
    format_cpus,
    parse_cpus,
    processors,
)

# Two packages of two nodes each; a node has 4 cores of 2 threads: node n has 8n to 8n+7,
# siblings are neighbours, and two cores each share a level 3 cache.
NODES = 4
PER_NODE = 8


@pytest.fixture
def root(tmp_path) -> Path:
    cpus = tmp_path / "sys/devices/system/cpu"
    nodes = tmp_path / "sys/devices/system/node"
    for node in range(NODES):
        (nodes / f"node{node}").mkdir(parents=True)
        first = node * PER_NODE
        (nodes / f"node{node}/cpulist").write_text(f"{first}-{first + PER_NODE - 1}\n")
        for cpu in range(first, first + PER_NODE):
            topology, cache = cpus / f"cpu{cpu}/topology", cpus / f"cpu{cpu}/cache"
            topology.mkdir(parents=True)
            (topology / "physical_package_id").write_text(f"{node // 2}\n")
            even = cpu - cpu % 2
            (topology / "thread_siblings_list").write_text(f"{even}-{even + 1}\n")
            complex_ = cpu - cpu % 4
            for index, (level, shared) in enumerate(
                [(1, f"{even}-{even + 1}"), (3, f"{complex_}-{complex_ + 3}")]
            ):
                (cache / f"index{index}").mkdir(parents=True)
                (cache / f"index{index}/level").write_text(f"{level}\n")
                (cache / f"index{index}/shared_cpu_list").write_text(f"{shared}\n")
    (nodes / "possible").write_text(f"0-{NODES - 1}\n")
    for number, node in enumerate([1, 1, 1, 2, -1]):
        gpu = f"0000:0{number}:00.0"
        (tmp_path / f"proc/driver/nvidia/gpus/{gpu}").mkdir(parents=True)
        (tmp_path / f"proc/driver/nvidia/gpus/{gpu}/information").write_text(
            f"Model: \t X\nGPU UUID: \t GPU-{number}a\n"
        )
        (tmp_path / f"sys/bus/pci/devices/{gpu}").mkdir(parents=True)
        (tmp_path / f"sys/bus/pci/devices/{gpu}/numa_node").write_text(f"{node}\n")
    return tmp_path


def bound(root: Path, mode: str, index: int, allowed=range(NODES * PER_NODE), visible=None):
    machine = Machine(str(root), allowed)
    return format_cpus(processors(mode, index, machine.gpus(visible), machine))


@pytest.mark.parametrize(
    ("mode", "index", "expected"),
    [
        ("node", 0, "8-15"),
        ("node", 3, "16-23"),
        ("node", 4, "0-7"),  # the kernel does not know where: node 0
        ("socket", 0, "0-15"),
        ("socket", 3, "16-31"),
        # Four cores for three GPUs: the first gets two.
        ("exclusive", 0, "8-11"),
        ("exclusive", 1, "12-13"),
        ("exclusive", 2, "14-15"),
        ("exclusive", 3, "16-23"),
        ("core-complex", 0, "8-11"),
        ("core-complex", 1, "12-15"),
        ("core-complex", 2, "8-11"),
    ],
)
def test_modes(root, mode, index, expected):
    assert bound(root, mode, index) == expected


def test_what_is_not_allowed_is_left_out(root):
    allowed = {0, 9, 12, 13, 14}
    assert bound(root, "node", 0, allowed) == "9,12-14"
    assert bound(root, "core-complex", 0, allowed) == "12-14"  # the larger one first
    with pytest.raises(NumaError, match="no processor of NUMA node 2"):
        bound(root, "node", 3, allowed)
    with pytest.raises(NumaError, match="2 cores for 3 GPUs"):
        bound(root, "exclusive", 0, {8, 9, 12})


def test_visible_devices(root):
    assert bound(root, "node", 0, visible="3,0") == "16-23"
    assert bound(root, "node", 1, visible="GPU-3,GPU-0a") == "8-15"
    for visible in ("", "7", "0,99,3"):
        with pytest.raises(NumaError, match="has no GPU"):
            bound(root, "node", 1, visible=visible)


def test_no_gpu_no_binding(tmp_path):
    with pytest.raises(NumaError, match="no GPU"):
        Machine(str(tmp_path)).gpus(None)
    strict = NumaOptions(AffinityMode.NODE)
    lax = NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)
    machine = Machine(str(tmp_path))
    with pytest.raises(NumaError, match="NUMA binding is not possible: there is no GPU"):
        numa.choose(strict, 0, machine)
    assert numa.choose(lax, 0, machine) is None
    assert numa.choose(None, 0, machine) is None


def test_unknown_mode(root):
    with pytest.raises(NumaError, match="core-complex"):
        bound(root, "wherever", 0)


def test_command_and_process(root, monkeypatch, tmp_path):
    mine = sorted(os.sched_getaffinity(0))
    real = Machine(str(root), range(64))
    monkeypatch.setattr(numa, "Machine", lambda: real)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    options = NumaOptions(AffinityMode.NODE)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NumaError, match="numactl is not on the PATH"):
        numa.command(["prog", "arg"], options, 0)
    (tmp_path / "numactl").touch(0o755)
    expected = ("numactl", "--physcpubind=8-15", "prog", "arg")
    assert numa.command(["prog", "arg"], options, 0) == expected
    assert numa.command(["prog"], None, 0) == ("prog",)
    asked = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: asked.append((pid, cpus)))
    numa.bind_this_process(options, 0)
    assert asked[0] == (0, set(range(8, 16)))
    assert sorted(os.sched_getaffinity(0)) == mine


@given(st.sets(st.integers(0, 300)))
def test_lists_of_processors(cpus):
    assert parse_cpus(format_cpus(cpus)) == cpus
