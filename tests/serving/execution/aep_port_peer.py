"""A process with a port that answers. Run by test_aep_port_processes.py."""

import json
import sys
from itertools import count
from typing import Any, NamedTuple

from serving.cluster.port import Peer, Port

FLOOD = -1
KEY = bytes(range(32))


class Note(NamedTuple):
    number: int
    rows: Any


def as_json(peer):
    return json.dumps(peer)


def from_json(text):
    return Peer(*json.loads(text))


def main():
    """Reports its address, connects to its peer and confirms it; then adds one to each note, or
    counts without end.
    """
    port = Port("other", [Note], KEY)
    print(as_json(port.peer), flush=True)
    port.connect(from_json(sys.stdin.readline()))
    print("connected", flush=True)
    while True:
        for sender, note in port.receive(None):
            if note.number == FLOOD:
                for number in count():
                    port.send(sender, note._replace(number=number))
            port.send(sender, note._replace(number=note.number + 1))


if __name__ == "__main__":
    main()
