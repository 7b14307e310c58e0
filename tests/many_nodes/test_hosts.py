"""The hosts themselves: the tests of this room stand on them."""

from __future__ import annotations

import subprocess

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

SERVE = (
    "import socket as s; l = s.create_server(('', 7)); print('up', flush=True)\nwhile 1: l.accept()"
)
CALL = "import socket, sys; socket.create_connection((sys.argv[1], 7), timeout=5)"


def test_hosts_reach_each_other_until_the_link_is_cut_and_are_gone_at_the_end(cluster) -> None:
    made = cluster(2)
    one, two = made.hosts[0], made.hosts[1]
    names = "import socket; print(socket.gethostname(), socket.gethostbyname('host1'))"
    assert one.run(["python3", "-c", names]).split() == ["host0", two.address]
    server = two.start(["python3", "-c", SERVE], stdout=subprocess.PIPE)
    assert server.stdout is not None and server.stdout.readline() == "up\n"
    one.run(["python3", "-c", CALL, two.address])
    two.cut()
    with pytest.raises(subprocess.CalledProcessError):
        one.run(["python3", "-c", CALL, two.address])
    two.mend()
    one.run(["python3", "-c", CALL, two.address])
    assert two.pids() == [server.pid]
    made.close()
    assert server.wait(10) < 0
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert one.namespace not in listed
