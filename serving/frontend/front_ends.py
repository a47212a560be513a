"""What a front end is, and those that every server has.

A front end is one protocol: its methods, its limits, and where it listens. One more is an entry of
`FRONT_ENDS`, or of the setting `frontends`, and touches nothing else. It may add services to the
gRPC port for clients (`server.main`), or listen on a port of its own.

It shares with the others what the server has: `ready_engine` generates, `access` knows callers'
keys, `guard` counts calls against the limits, and `metrics`, `tracer` and `outputs.noted` observe.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from serving.frontend import kserve, metrics_http, services
from serving.frontend.openai import app as openai
from serving.frontend.page import app as page
from serving.settings import plugins

if TYPE_CHECKING:
    from serving.frontend.server import Server


class FrontEnd(Protocol):
    """A port of its own, made with the server, which loads its model later."""

    async def start(self) -> str:
        """Starts to listen. Returns where, to be printed; nothing is printed if it is empty.

        Raises OSError if the address cannot be bound.
        """
        ...

    async def stop(self) -> None:
        """Ends what is under way, and closes the port; the engine has stopped."""
        ...


Make = Callable[["Server"], FrontEnd | None]
"""Makes a front end; None if it is off, or has no port of its own."""

FRONT_ENDS: dict[str, Make] = {
    "admin": services.front_end,
    "kserve": kserve.front_end,
    "metrics": metrics_http.front_end,
    "http": openai.front_end,
    "page": page.front_end,
}
"""By the name under which the server prints where they listen; started in this order."""


def make_all(server: "Server") -> dict[str, FrontEnd]:
    """Makes a server's front ends. Raises ValueError for one of the settings that cannot be."""
    made = {name: make(server) for name, make in FRONT_ENDS.items()}
    for name in server.config.frontends:
        made[name] = plugins.make("front end", name, {}, ["start", "stop"], server)
    return {name: one for name, one in made.items() if one is not None}
