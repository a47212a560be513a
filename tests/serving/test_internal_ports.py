"""Ports between processes of one server listen where they were told to, and nowhere else."""

import json
import subprocess
import sys
from pathlib import Path

from serving.cluster.followers import Followers
from serving.cluster.port import Port

LISTENING = "0A"
LOOPBACK = {"0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F"}

JAX_SERVICE = """
import json, socket
from serving.config import EngineConfig
from serving.cluster.hosts import connect
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
connect(EngineConfig(num_processes=1, process_index=0), f"127.0.0.1:{port}")
tables = [open(f"/proc/net/{name}").read() for name in ("tcp", "tcp6")]
print(json.dumps({"port": port, "tables": tables}))
"""


def listeners(port: int, tables: list[str]) -> set[str]:
    """Returns the addresses that listen on a port, as the kernel writes them."""
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    found = [row[1].split(":") for row in rows if row[3] == LISTENING]
    return {address for address, number in found if int(number, 16) == port}


def here(port: int) -> set[str]:
    return listeners(port, [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")])


def test_jaxs_own_service_listens_at_the_coordinators_address():
    done = subprocess.run(
        [sys.executable, "-c", JAX_SERVICE], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    found = listeners(said["port"], said["tables"])
    assert found
    assert found <= LOOPBACK


def test_process_0_listens_at_the_coordinators_address():
    followers = Followers("127.0.0.1:0", 2, {}, peer_timeout_s=5.0)
    try:
        found = here(followers.port)
        assert found
        assert found <= LOOPBACK
    finally:
        followers.close(stop=False)


def test_workers_listen_at_the_address_they_are_given():
    port = Port("a", [], bytes(32), bind="tcp://127.0.0.1:0")
    try:
        found = here(int(port.peer.address.rpartition(":")[2]))
        assert found == {"0100007F"}
    finally:
        port.close()
