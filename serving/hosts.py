"""A mesh over several processes: what has to be alike in them, and how they come together."""

import hashlib
import logging
import socket
from importlib.metadata import version
from pathlib import Path

import jax

from jmoe.api import resolve
from jmoe.checkpoint import is_native
from serving.config import EngineConfig
from serving.execution.executables import sources
from serving.execution.followers import Followers, Leader
from serving.settings import SettingsError, keys

log = logging.getLogger(__name__)

OWN = frozenset(
    {
        "model",  # compared by what is in the directory
        "hub_revision",
        "chat_template",  # process 0 alone makes prompts
        "coordinator",  # process 0 may listen on all addresses
        "process_index",
        "join_timeout_s",
        "peer_timeout_s",
        "compilation_cache",
        "cpu_threads",
        "watchdog_s",
        "check_weights",
        "allow_unknown_config",
    }
)
"""Settings of the engine that a process may have of its own; all others must be alike."""


def facts(config: EngineConfig) -> dict[str, str]:
    """What has to be alike in every process, by name: all settings but `OWN`, versions, files.

    Model files are compared by name and size: whole checkpoints would take minutes to read.
    """
    found = {}
    for name in keys(EngineConfig).keys() - OWN:
        value: object = config
        for part in name.split("."):
            value = getattr(value, part)
        found[f"engine.{name}"] = repr(value)
    found["the version of jax"] = jax.__version__
    found["the version of jaxlib"] = version("jaxlib")
    found["the code of jmoe"] = sources()[:12]
    found["the model in engine.model"] = _fingerprint(resolve(config.model, config.hub_revision))
    return found


def _fingerprint(directory: Path) -> str:
    """Of what is read of a model: `config.json` as it stands, weights by name and size."""
    digest = hashlib.sha256()
    for path in sorted((directory).glob("*")):
        if path.suffix == ".safetensors":
            digest.update(f"{path.name} {path.stat().st_size}".encode())
        elif path.name == "config.json":
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def check(config: EngineConfig) -> None:
    """Refuses what several processes cannot do yet. Raises SettingsError."""
    if is_native(resolve(config.model, config.hub_revision)):
        raise SettingsError(
            f"engine.model is {config.model!r}, in jmoe's own format, which is read onto one device"
            f" before it is spread; {config.num_processes} processes load Hugging Face directories"
        )
    if config.balance.load_file:
        raise SettingsError(
            f"engine.balance.load_file is {config.balance.load_file!r}, and {config.num_processes} "
            "processes would each place experts by a file of their own; leave it empty"
        )


def lead(config: EngineConfig) -> Followers:
    """Process 0: waits for the others, and makes one mesh of the devices of all.

    Raises SettingsError and Unavailable, each with what to do.
    """
    check(config)
    followers = Followers(
        config.coordinator,
        config.num_processes,
        facts(config),
        peer_timeout_s=config.peer_timeout_s,
    )
    log.info("process 0 of %d waits for the others at %s", config.num_processes, config.coordinator)
    try:
        followers.wait_for_all(config.join_timeout_s)
        host = config.coordinator.rpartition(":")[0]
        address = f"{host}:{_free_port()}"
        followers.begin(address)
        followers.lost.unless(lambda: connect(config, address))
    except BaseException:
        followers.close(stop=False)
        raise
    return followers


def join(config: EngineConfig) -> Leader:
    """Any other process: joins process 0. Raises as `lead` does."""
    check(config)
    leader = Leader(
        config.coordinator,
        config.num_processes,
        config.process_index,
        facts(config),
        peer_timeout_s=config.peer_timeout_s,
    )
    address = leader.join(config.join_timeout_s)
    connect(config, address)
    return leader


def connect(config: EngineConfig, address: str) -> None:
    """Makes jax know the devices of all processes. `address` is of its service in process 0.

    That service only serves the start (`Device.ready`). It would end a process without a word about
    it; it is given longer than jmoe itself needs to notice that another one is gone.
    """
    jax.config.update("jax_enable_preemption_service", False)  # it swallows SIGTERM
    jax.distributed.initialize(
        address,
        config.num_processes,
        config.process_index,
        cluster_detection_method="deactivate",
        coordinator_bind_address=address,  # or its service would listen at all addresses
        initialization_timeout=int(config.join_timeout_s) + 1,
        heartbeat_timeout_seconds=2 * int(config.peer_timeout_s) + 10,
        shutdown_timeout_seconds=int(config.join_timeout_s) + 1,
    )


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]
