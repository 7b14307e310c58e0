"""Std, to_map, LogsSpecs: masks, paths, and that nothing is written over."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from phalanx.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs, Std, to_map

ENV = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2"}


def envs(count: int = 2, **more: str) -> dict[int, dict[str, str]]:
    return {rank: {**ENV, **more} for rank in range(count)}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", Std.NONE),
        ("1", Std.OUT),
        ("2", Std.ERR),
        ("3", Std.ALL),
        ("0:1", {0: Std.OUT}),
        ("0:1,1:2", {0: Std.OUT, 1: Std.ERR}),
        ("10:1,123:3", {10: Std.OUT, 123: Std.ALL}),
    ],
)
def test_std_from_str(text, value):
    assert Std.from_str(text) == value


@pytest.mark.parametrize(
    "text", ["", "4", "11", "0:1,", "0:1,1", "1,0:1", "0:4", "a:1", "-1:1", " 1", "1\n", "0:1\n"]
)
def test_std_from_bad_str(text):
    with pytest.raises(ValueError, match="says no streams"):
        Std.from_str(text)


def test_to_map():
    assert to_map(Std.OUT, 2) == {0: Std.OUT, 1: Std.OUT}
    assert to_map({1: Std.OUT, 7: Std.ERR}, 2) == {0: Std.NONE, 1: Std.OUT}
    assert to_map(Std.ALL, 0) == {}


def test_paths(tmp_path):
    specs = DefaultLogsSpecs(str(tmp_path / "new"), redirects=Std.OUT, tee={1: Std.ERR})
    given = envs()
    dest = specs.reify(given)
    run = Path(dest.error_files[0]).parents[2]
    assert run.parent == tmp_path / "new" and run.name.startswith("job_")
    attempt = run / "attempt_2"
    assert dest == LogsDest(
        stdouts={0: f"{attempt}/0/stdout.log", 1: f"{attempt}/1/stdout.log"},
        stderrs={0: "", 1: f"{attempt}/1/stderr.log"},
        tee_stdouts={},
        tee_stderrs={1: f"{attempt}/1/stderr.log"},
        error_files={0: f"{attempt}/0/error.json", 1: f"{attempt}/1/error.json"},
        filtered_stdout=f"{attempt}/filtered_stdout.log",
        filtered_stderr=f"{attempt}/filtered_stderr.log",
    )
    assert given[1]["TORCHELASTIC_ERROR_FILE"] == dest.error_files[1]
    assert (attempt / "0").is_dir() and (attempt / "1").is_dir()
    # The next attempt is in the same run directory, another object has its own.
    later = specs.reify(envs(TORCHELASTIC_RESTART_COUNT="3"))
    assert Path(later.error_files[0]).parents[2] == run
    other = DefaultLogsSpecs(str(tmp_path / "new")).reify(envs())
    assert Path(other.error_files[0]).parents[2] != run


def test_an_attempt_that_is_there_keeps_its_files(tmp_path):
    specs = DefaultLogsSpecs(str(tmp_path), redirects=Std.ALL)
    first = specs.reify(envs())
    Path(first.stdouts[1]).write_text("what rank 1 said")
    given = envs()
    second = specs.reify(given)
    assert Path(first.stdouts[1]).read_text() == "what rank 1 said"
    # All files of one incarnation have one number, those of ranks that wrote nothing too.
    assert second.stdouts[0] == first.stdouts[0] + ".1"
    assert second.error_files[1] == first.error_files[1] + ".1"
    assert second.filtered_stderr == first.filtered_stderr + ".1"
    assert given[0]["TORCHELASTIC_ERROR_FILE"].endswith("/0/error.json.1")
    Path(second.error_files[0]).write_text("{}")
    assert specs.reify(envs()).stderrs[0] == first.stderrs[0] + ".2"


def test_later_agents_of_a_run_go_on_in_its_directory(tmp_path):
    def reify(node=None):
        specs = DefaultLogsSpecs(str(tmp_path), redirects=Std.ALL, own_directory=False, node=node)
        return specs.reify(envs(1)).stderrs[0]

    first = reify()
    assert first == str(tmp_path / "job/attempt_2/0/stderr.log")
    Path(first).touch()
    assert reify() == first + ".1"
    assert reify("node7") == str(tmp_path / "job/node7/attempt_2/0/stderr.log")


def test_ranks_filter(tmp_path):
    specs = DefaultLogsSpecs(
        str(tmp_path), redirects={0: Std.OUT}, tee={0: Std.ERR, 1: Std.ERR}, local_ranks_filter={1}
    )
    dest = specs.reify(envs(3))
    assert sorted(dest.tee_stderrs) == [1]  # rank 0's goes to its file only
    assert dest.stderrs[0].endswith("/0/stderr.log")
    assert dest.stdouts[1] == ""
    assert dest.stdouts[2] == dest.stderrs[2] == os.devnull
    everybody = DefaultLogsSpecs(str(tmp_path), local_ranks_filter=set()).reify(envs(2))
    assert set(everybody.stdouts.values()) == {""}


def test_dev_null():
    specs = DefaultLogsSpecs(os.devnull, redirects=Std.ALL, tee=Std.ALL, local_ranks_filter={0})
    given = envs()
    dest = specs.reify(given)
    assert dest.stdouts == dest.stderrs == {0: "", 1: ""}
    assert dest.tee_stdouts == dest.error_files == {0: os.devnull, 1: os.devnull}
    assert given[0]["TORCHELASTIC_ERROR_FILE"] == ""
    open(dest.filtered_stdout, "w").close()  # whoever writes there writes to nowhere


def test_log_dir_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file"):
        DefaultLogsSpecs(str(tmp_path / "file"))


@pytest.mark.parametrize("run_id", ["../../evil", "a/b", "..", ""])
def test_a_run_id_does_not_lead_out_of_the_directory(tmp_path, run_id):
    for own in (True, False):
        specs = DefaultLogsSpecs(str(tmp_path / "logs"), own_directory=own)
        path = Path(specs.reify(envs(1, TORCHELASTIC_RUN_ID=run_id)).error_files[0])
        assert path.resolve().parents[3] == tmp_path / "logs"


def test_temporary_directory_is_made_late_and_removed_if_empty(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    specs = DefaultLogsSpecs()
    assert os.listdir(tmp_path) == []
    assert os.path.isdir(specs.root_log_dir)
    dest = specs.reify(envs())
    assert dest.error_files[0].startswith(f"{tmp_path}/torchelastic_")
    del specs
    gc.collect()
    assert os.listdir(tmp_path) == []
    specs = DefaultLogsSpecs()
    dest = specs.reify(envs())
    Path(dest.error_files[1]).write_text("{}")
    del specs
    gc.collect()
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["error.json"]
    assert not Path(dest.error_files[0]).parent.exists()


def test_equality_and_repr(tmp_path):
    one = DefaultLogsSpecs(str(tmp_path), redirects=Std.OUT, tee={0: Std.ERR})
    assert one == DefaultLogsSpecs(str(tmp_path), redirects=Std.OUT, tee={0: Std.ERR})
    assert one != DefaultLogsSpecs(str(tmp_path), redirects=Std.ERR, tee={0: Std.ERR})
    assert one != "something else"
    assert str(tmp_path) in repr(one) and "local_ranks_filter=None" in repr(one)


def test_specs_of_the_users_own(tmp_path):
    class Mine(LogsSpecs):
        def reify(self, envs):
            return LogsDest()

        @property
        def root_log_dir(self):
            return str(self._root_log_dir)

    mine = Mine("dir", Std.OUT, Std.ERR, {3})
    assert (mine._redirects, mine._tee, mine._local_ranks_filter) == (Std.OUT, Std.ERR, {3})
    with pytest.raises(TypeError):
        LogsSpecs()  # type: ignore[abstract]
