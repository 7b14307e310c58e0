"""What a person reads who gets a verb's options wrong, or asks for help."""

from __future__ import annotations

import pytest

from phalanx import cli

HAVE_OPTIONS = ("coordinator", "status", "controller", "jobs")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("coordinator --silence 0", "'0' is not a number of seconds more than 0"),
        ("coordinator --token-file /none/at/all", "cannot read the token /none/at/all: No such"),
        ("coordinator --tls-cert x", "--tls-cert, --tls-key and --tls-ca go together"),
        ("status --timeout x", "'x' is not a number of seconds more than 0"),
        ("status --watch 0", "'0' is not a number of seconds more than 0"),
        ("status --tls-key x", "--tls-cert, --tls-key and --tls-ca go together"),
        ("status --end x", "unrecognized arguments: --end"),
        ("controller --listen x", "--listen must be HOST:PORT"),
        ("controller --metrics x", "'x' is not HOST:PORT"),
        ("controller --tls-cert x", "--tls-cert and --tls-key go together"),
        ("controller --jobs /none/at/all", "cannot read /none/at/all: No such file or directory\n"),
        ("jobs --timeout 0", "'0' is not a number of seconds more than 0"),
        ("fault", "required: report|clear|list"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(words: str, says: str, capsys) -> None:
    pytest.importorskip("grpc")
    try:
        status = cli.main(words.split())
    except SystemExit as leaving:
        status = leaving.code
    said = capsys.readouterr().err
    assert status == 2
    assert says in said
    assert len(said.splitlines()) <= 2, said


@pytest.mark.parametrize("words", ["jobs", "fault list", "status --timeout 60"])
def test_nobody_answers(words: str, capsys, monkeypatch) -> None:
    pytest.importorskip("grpc")
    monkeypatch.setenv("PHALANX_CONTROLLER", "127.0.0.1:1")  # a port that nobody may listen on
    monkeypatch.setenv("PHALANX_ENDPOINT", "127.0.0.1:1")
    assert cli.main(words.split()) == 1
    said = capsys.readouterr().err
    assert "127.0.0.1:1" in said and "refused" in said
    assert len(said) < 100 and said.count("\n") == 1, said


@pytest.mark.parametrize("verb", HAVE_OPTIONS)
def test_help_begins_with_what_the_verb_is_for(verb: str, capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main([verb, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"usage: phalanx {verb} [options]")
    assert lines[1] == "" and lines[2][0].isupper()
