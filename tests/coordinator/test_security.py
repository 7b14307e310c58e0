"""With a token or certificates all else is refused."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from phalanx.coordinator import link, loop, security, wire, words
from phalanx.coordinator.security import Security
from phalanx.rendezvous import model as m


def test_a_token(agents: Any, port: int) -> None:
    where = f"127.0.0.1:{port}"
    first = agents("a", where, security=Security("secret"))
    first.until(m.Park)
    second = agents("b", where, security=Security("secret"))
    second.until(m.Park)
    for token in ("", "other", "secre", "secretsecret"):
        stranger = agents("c", where, security=Security(token), is_host=False)
        assert "--token-file" in stranger.until(m.Refuse).reason
    assert first.node._server.refused["unauthenticated"] == 4
    thread = loop.acquire()
    try:
        with pytest.raises(link.Refused, match="token"):
            thread.call(link.call(where, "Status", words.StatusRequest(), wire.STATUS), 30)
        term, reply = thread.call(
            link.call(
                where,
                "Status",
                words.StatusRequest(),
                wire.STATUS,
                security=Security("secret"),
            ),
            30,
        )
    finally:
        loop.release()
    assert term == 1 and '"unauthenticated": 5' in reply.text
    second.node.say(m.Succeeded(1))
    assert first.until(m.Over) and second.until(m.Over)


def test_a_warning_without_one(agents: Any, port: int, wait: Any) -> None:
    quiet = agents("a", f"127.0.0.1:{port}")
    quiet.until(m.Park)
    assert quiet.lines == []
    own = os.popen("hostname -I").read().split()
    if not own:
        pytest.skip("this machine has no address but loopback")
    loud = agents("a", f"{own[0]}:{port}", is_host=True)
    loud.until(m.Park)
    assert len(loud.lines) == 1 and "--token-file" in loud.lines[0]


def pair(folder: Path, name: str) -> Security:
    """A certificate that is its own authority, as one for all agents of a job may be."""
    key, cert = str(folder / f"{name}.key"), str(folder / f"{name}.pem")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-keyout {key} -out {cert} -subj /CN=job -addext subjectAltName=DNS:job"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    return security.load(certificate=cert, key=key, ca=cert, name="job")


@pytest.mark.process
def test_certificates_on_both_sides(agents: Any, port: int, tmp_path: Path) -> None:
    ours, theirs = pair(tmp_path, "ours"), pair(tmp_path, "theirs")
    where = f"127.0.0.1:{port}"
    first = agents("a", where, security=ours)
    first.until(m.Park)
    second = agents("b", where, security=ours)
    second.until(m.Park)
    strangers = [
        agents("c", where, security=wrong, is_host=False, options=m.Options(join=0.5))
        for wrong in (
            Security(),
            theirs,
            dataclasses.replace(theirs, ca=ours.ca),
            dataclasses.replace(ours, name="another"),
        )
    ]
    for stranger in strangers:
        assert "there was no coordinator" in stranger.until(m.Refuse).reason
    second.node.say(m.Succeeded(1))
    assert first.until(m.Over) and second.until(m.Over)


def test_what_is_given_must_make_sense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHALANX_TOKEN", raising=False)
    assert security.load() == security.OPEN
    monkeypatch.setenv("PHALANX_TOKEN", "from the environment")
    assert security.load().token == "from the environment"
    file = tmp_path / "token"
    file.write_text("from a file\n")
    assert security.load(token_file=str(file)).token == "from a file"
    file.write_text("\n")
    with pytest.raises(security.SecurityError, match="is empty"):
        security.load(token_file=str(file))
    with pytest.raises(security.SecurityError, match="cannot read the token"):
        security.load(token_file=str(tmp_path / "none"))
    with pytest.raises(security.SecurityError, match="all three"):
        security.load(certificate="x")
    assert "secret" not in repr(Security("secret"))
