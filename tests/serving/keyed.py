"""Files with keys whose text a test knows, and a server that asks for them."""

import hashlib
from pathlib import Path

from served import Setup

from serving.config import ServerConfig
from serving.frontend import keys
from serving.frontend.keys import Key
from serving.frontend.metrics_http import MetricsPort

WRONG = "jmoe_" + "W" * 43


class KeysFile:
    """A file with keys whose text a test knows: `jmoe_NAME...`."""

    def __init__(self, path: Path, **allowed: dict) -> None:
        self.path, self.found = path, {}
        self.write(**allowed)

    def text(self, name: str) -> str:
        return f"jmoe_{name}".ljust(48, "x")

    def write(self, **allowed: dict) -> None:
        """Replaces all keys."""
        self.found = {
            name: Key(hashlib.sha256(self.text(name).encode()).hexdigest(), **limits)
            for name, limits in allowed.items()
        }
        keys.write(self.path, self.found)

    def says(self, name: str) -> str:
        return f"Bearer {self.text(name)}"


class Clock:
    """A clock in nanoseconds that a test sets."""

    def __init__(self) -> None:
        self.now_ns = 1000

    def __call__(self) -> int:
        return self.now_ns


class keyed:
    """A server that asks for keys, ready, with its metrics served."""

    def __init__(self, file: KeysFile, **fields) -> None:
        config = ServerConfig(port=0, keys_file=str(file.path), **fields)
        self.setup = Setup(config)

    async def __aenter__(self) -> Setup:
        setup = await self.setup.__aenter__()
        server = setup.server
        server.front_ends["metrics"] = metrics = MetricsPort(server, "127.0.0.1", 0)
        await metrics.start()
        return await setup.ready()

    async def __aexit__(self, *how) -> None:
        await self.setup.__aexit__(*how)
