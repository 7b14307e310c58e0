"""The command line of ``phalanx run``: torchrun's options, exact names, nothing guessed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cli.options import OPTIONS, UsageError, help_text, parse, wants_help
from phalanx.cli.run import config_from


def test_what_follows_the_script_is_the_scripts() -> None:
    got = parse(
        ["--standalone", "args.py", "--log=x", "--r=16", "-m", "--help", "--", "--nnodes"], {}
    )
    assert got.training_script == "args.py"
    assert got.training_script_args == ["--log=x", "--r=16", "-m", "--help", "--", "--nnodes"]
    assert got.standalone


@given(st.lists(st.text(max_size=8), max_size=6))
def test_any_words_after_the_script_arrive(words: list[str]) -> None:
    assert parse(["--nproc-per-node", "2", "s.py", *words], {}).training_script_args == words


@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: o.dest)
def test_every_option_takes_both_spellings(option) -> None:
    text = option.choices[0] if option.choices else "4"
    for name in option.names:
        for spelling in {name, "--" + name[2:].replace("-", "_") if name[1] == "-" else name}:
            words = [spelling] if option.take is None else [spelling, text]
            got = parse([*words, "s.py"], {})
            assert option.dest in got.given
            assert option.choices or getattr(got, option.dest) != option.default
            if option.take is not None and spelling.startswith("--"):
                assert getattr(parse([f"{spelling}={text}", "s.py"], {}), option.dest) == getattr(
                    got, option.dest
                )


def test_short_options_join_their_value() -> None:
    got = parse(["-r3", "-t", "0:1,1:2", "-m", "mod"], {})
    assert (got.redirects, got.tee, got.module, got.training_script) == (
        "3",
        "0:1,1:2",
        True,
        "mod",
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--nproc 2 s.py", "did you mean --nproc-per-node"),
        ("--redirect 3 s.py", "did you mean --redirects"),
        ("--max-restarts many s.py", "whole number, not 'many'"),
        ("--monitor-interval x s.py", "a number"),
        ("--start-method bogus s.py", "spawn, fork, forkserver"),
        ("--standalone=1 s.py", "takes no value"),
        ("--max-restarts", "needs a value"),
        ("", "no script given"),
        ("--bogus s.py", "no option --bogus"),
    ],
)
def test_a_wrong_word_is_named(words: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse(words.split(), {})


def test_variables_give_values_and_the_command_line_wins() -> None:
    env = {"PET_NPROC_PER_NODE": "4", "PET_MODULE": "1", "PET_STANDALONE": "true"}
    got = parse(["s"], env)
    assert (got.nproc_per_node, got.module, got.standalone) == ("4", True, True)
    assert parse(["--nproc-per-node", "2", "s"], env).nproc_per_node == "2"
    assert parse(["s"], {"PET_MODULE": "0"}).module is False


@pytest.mark.parametrize(
    "env", [{"PET_MAX_RESTARTS": "x"}, {"PET_STANDALONE": "maybe"}, {"PET_START_METHOD": "bogus"}]
)
def test_a_bad_variable_is_named(env: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=next(iter(env))):
        parse(["s.py"], env)


def test_comma_lists() -> None:
    got = parse(["--duplicate-stdout-filters", "a,b,,c", "s"], {})
    assert got.duplicate_stdout_filters == ["a", "b,c"]


def test_preload_repeats() -> None:
    assert parse(["--preload", "a", "--preload", "b.c", "s"], {}).preload == ["a", "b.c"]


def test_help_shows_ten_options_first_and_all_on_request() -> None:
    first = [o for o in OPTIONS if o.first]
    assert len(first) == 10
    short, everything = help_text(), help_text(True)
    assert all(o.names[-1] in short for o in first)
    assert all(name in everything for o in OPTIONS for name in o.names)
    assert max(map(len, everything.splitlines())) <= 100


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("--help", "--help"),
        ("--nnodes 1 -h", "-h"),
        ("s.py --help", None),
        ("--log-dir -h s", None),
    ],
)
def test_help_is_ours_only_before_the_script(words: str, asked: str | None) -> None:
    assert wants_help(words.split()) == asked


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--rdzv-conf foo=1", "there is no option foo; known are "),
        ("--rdzv-conf foo", "'foo' must have a value"),
        ("--rdzv-conf join_timeout=x", "join_timeout"),
        ("--rdzv-conf join_timeout=0", "join_timeout"),
        ("--rdzv-conf store_type=x", "store_type"),
        ("--monitor-interval nan", "not nan"),
        ("--monitor-interval inf", "not inf"),
        ("--monitor-interval 0", "more than zero seconds"),
        ("--max-restarts -1", "--max-restarts"),
        ("--shutdown-timeout -1", "--shutdown-timeout"),
        ("--nnodes 2 --rdzv-backend nonsense", "is one of static, c10d, phalanx, etcd"),
        ("--nnodes 2 --node-rank 2", "ranks are 0 to 1"),
        ("--nnodes 2 --rdzv-conf foo=1", "there is no option foo; known are "),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-conf is_host=x", "is_host"),
        ("--nnodes 2 --port-range 9-x", "two ports"),
        ("--nnodes 2 --port-range 9-8", "two ports"),
        ("--nnodes 2 --on-split maybe", "wait, continue"),
        ("--nnodes 2 --tls-cert x", "go together"),
        ("--nnodes 2 --spares -1", "--spares"),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:0", "a port that all know"),
        ("--nnodes 2:1", "0 < MIN <= MAX"),
        ("--nnodes x", "MIN:MAX"),
        ("--node-rank 1", "one node has rank 0"),
        ("--rdzv-backend etcd", "one machine needs no rendezvous"),
        ("--master-port 70000", "0 to 65535"),
        ("-r 4", "0, 1, 2 or 3"),
        ("--local-ranks-filter a", "numbers with commas"),
        ("--nproc-per-node 0", "one or more"),
        ("--nproc-per-node many", "auto, cpu, gpu or npu"),
        ("--hang-timeout soon", "--hang-timeout"),
        ("-m --no-python", "exclude each other"),
    ],
)
def test_what_is_not_possible_is_named(words: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        config_from(parse([*words.split(), "s.py"], {}), {})
    assert says in str(caught.value)


def test_known_rendezvous_options_are_taken() -> None:
    config_from(parse(["--rdzv-conf", "join_timeout=30,timeout=9", "s.py"], {}), {})


@pytest.mark.process
def test_help_into_a_full_disk_is_an_exit_status_and_no_traceback() -> None:
    import subprocess
    import sys

    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "phalanx", "run", "--help-all"],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=30,
        )
    assert done.returncode == 1
    assert done.stderr == b""


def test_a_static_endpoint_is_where_the_workers_meet(tmp_path) -> None:
    from phalanx.cli.run import config_from

    got = config_from(parse(["--rdzv-endpoint", "127.0.0.1:4567", "s.py"], {}), {})
    assert (got.master_addr, got.master_port) == ("127.0.0.1", 4567)
    with pytest.raises(UsageError, match="--rdzv-endpoint"):
        config_from(parse(["--rdzv-endpoint", "a b", "s.py"], {}), {})


def test_an_interpreter_that_is_a_script_is_never_warm(tmp_path) -> None:
    from phalanx.cli.run import config_from

    wrapper = tmp_path / "python"
    wrapper.write_text('#!/bin/sh\nexec python3 "$@"\n')
    assert not config_from(parse(["s.py"], {}), {"PYTHON_EXEC": str(wrapper)}).warm
    assert config_from(parse(["s.py"], {}), {}).warm


@pytest.mark.parametrize(
    ("words_", "says"),
    [
        ("--controller-ca x", "needs --controller"),
        ("--controller ,", "HOST:PORT"),
        ("--controller h:1 --nnodes 2 --rdzv-endpoint h:2", "for one node so far"),
        ("--controller h:1 --controller-timeout 0", "not 0"),
        ("--controller h:1 --controller-cert x", "go together"),
        ("--controller h:1 --controller-ca /no/such/file", "cannot read /no/such/file"),
    ],
)
def test_a_controller_that_cannot_be_asked(words_: str, says: str) -> None:
    from phalanx.cli.run import config_from

    pytest.importorskip("grpc")
    with pytest.raises(UsageError, match=says):
        config_from(parse([*words_.split(), "x.py"], {}), {})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--nnodes 2:3 --rdzv-backend c10d --rdzv-endpoint h",
            {"least": 2, "most": 3, "endpoint": ("h", 29400), "node_rank": None, "is_host": None},
        ),
        (
            "--nnodes=2 --node_rank=1 --master_addr=h --master_port=1234",
            {"endpoint": ("h", 1235), "store_port": 1234, "node_rank": 1, "is_host": False},
        ),
        (
            "--nnodes 2 --master-addr h --coordinator-port 7",
            {"endpoint": ("h", 7), "store_port": 29500, "node_rank": 0, "is_host": True},
        ),
        (
            ("--nnodes 2 --spares 1 --rdzv-backend phalanx --rdzv-endpoint [::1]:5 "
            "--rdzv-conf join_timeout=30,last_call_timeout=2,keep_alive_interval=1,is_host=1"),
            {"spares": 1, "endpoint": ("::1", 5), "join": 30.0, "last_call": 2.0, "silence": 3.0,
             "is_host": True},
        ),
        (
            ("--nnodes 1 --spares 1 --rdzv-backend c10d --rdzv-endpoint h:1 --node-rank 0 "
            "--port-range 100-200 --on-split continue --epoch 2"),
            {"least": 1, "ports": (100, 200), "on_split": "continue", "epoch": 2, "node_rank": 0},
        ),
    ],
)  # fmt: skip
def test_words_for_several_nodes(words: str, expected: dict[str, object]) -> None:
    nodes = config_from(parse([*words.split(), "s.py"], {}), {}).nodes
    assert nodes is not None
    assert {name: getattr(nodes, name) for name in expected} == expected


def test_one_node_is_no_job_on_several() -> None:
    for words in ("", "--nnodes 1:1", "--nnodes 4 --standalone"):
        assert config_from(parse([*words.split(), "s.py"], {}), {}).nodes is None


def test_exit_codes() -> None:
    got = config_from(parse(["--no-retry-exit-codes", "3,64-66", "s.py"], {}), {})
    assert (got.never_retried, got.always_retried) == ({3, 64, 65, 66}, frozenset())
    for bad in ("", "x", "0", "256", "3-", "-3"):
        with pytest.raises(UsageError, match="like 3,64-70"):
            parse([f"--retry-exit-codes={bad}", "s.py"], {})


def test_another_interpreter_than_the_active_environments_is_told(tmp_path) -> None:
    from phalanx.cli.run import other_environment

    active = {"VIRTUAL_ENV": str(tmp_path)}
    assert other_environment(f"{tmp_path}/bin/python", active) is None
    assert other_environment("/usr/bin/python3", {}) is None
    said = other_environment("/usr/bin/python3", active)
    assert said is not None and f"PYTHON_EXEC={tmp_path}/bin/python" in said
