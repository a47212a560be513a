"""Forms a mesh over several processes, and checks that they agree on settings and versions."""

import hashlib
import logging
import socket
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import jax
from pydantic import TypeAdapter

from jmoe.api import resolve
from jmoe.checkpoint import UNITED_FILE, is_native, weights_digest
from jmoe.config import CONFIG_FILES
from jmoe.digests import file_digests
from jmoe.model_files import regular
from jmoe.parallel.probe import PROBE_FILE
from serving.cluster.addresses import is_loopback
from serving.cluster.followers import Followers, Leader
from serving.cluster.secret import HOW_TO_MAKE_ONE, ClusterSecret
from serving.config import EngineConfig
from serving.errors import SettingsError
from serving.execution.executables import sources
from serving.settings.reading import keys

log = logging.getLogger(__name__)

OWN = frozenset(
    {
        "model",  # compared by what is in the directory
        "hub_revision",
        "chat_template",  # process 0 alone makes prompts
        "coordinator",  # process 0 may listen on all addresses
        "process_index",
        "secret_file",  # process 0 has checked that it is the same secret
        "join_timeout_s",
        "peer_timeout_s",
        "compilation_cache",
        "cpu_threads",
        "watchdog_s",
        "plugin_slow_ms",
        "check_weights",
        "allow_unknown_config",
    }
)
"""Engine settings that may differ between processes; all others must be equal."""


def facts(config: EngineConfig) -> dict[str, str]:
    """Returns what must be equal in all processes, by name: settings but `OWN`, versions, files.

    The first start with a model reads all of its weights for it (`jmoe.digests`). Raises
    CheckpointError, and SettingsError for files that cannot be read.
    """
    found = {}
    config = TypeAdapter(EngineConfig).validate_python(asdict(config))  # 1 may stand for 1.0
    for name in keys(EngineConfig).keys() - OWN:
        value: object = config
        for part in name.split("."):
            value = getattr(value, part)
        found[f"engine.{name}"] = repr(value)
    found["the version of jax"] = jax.__version__
    found["the version of jaxlib"] = version("jaxlib")
    found["the code of jmoe"] = sources(Path(__file__).parents[1])[:12]
    found["the model in engine.model"] = _fingerprint(resolve(config.model, config.hub_revision))
    return found


def _fingerprint(directory: Path) -> str:
    """Hashes a model's configuration, its weights, and the united experts and probes beside it."""
    names = (*CONFIG_FILES, UNITED_FILE, PROBE_FILE)
    beside = [path for name in names if (path := directory / name).exists()]
    try:
        digests = file_digests(map(regular, beside))
    except OSError as error:
        raise SettingsError(f"engine.model cannot be read: {error}") from None
    found = [weights_digest(directory), *(path.name for path in beside), *digests]
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:12]


def secret_of(config: EngineConfig) -> ClusterSecret | None:
    """Reads the secret that the processes share; None where all of them are on one machine.

    Raises SettingsError for a coordinator that other machines can reach without a secret, and as
    `ClusterSecret.of`.
    """
    secret = ClusterSecret.of(config)
    if secret is None and not is_loopback(config.coordinator.rpartition(":")[0]):
        raise SettingsError(
            f"engine.coordinator is {config.coordinator!r}, which other machines can reach, and "
            "the processes share no secret, so that anybody could join or end this server; "
            f"{HOW_TO_MAKE_ONE}"
        )
    return secret


def check(config: EngineConfig) -> None:
    """Raises SettingsError for settings that several processes do not support yet."""
    if is_native(resolve(config.model, config.hub_revision)):
        raise SettingsError(
            f"engine.model is {config.model!r}, in jmoe's own format, which is read onto one device"
            f" before it is spread; {config.num_processes} processes load Hugging Face directories"
        )


def lead(config: EngineConfig) -> Followers:
    """Runs in process 0: waits for the other processes, and connects the devices of all.

    Raises SettingsError and Unavailable, each with what to do.
    """
    secret = secret_of(config)
    check(config)
    followers = Followers(
        config.coordinator,
        config.num_processes,
        facts(config),
        peer_timeout_s=config.peer_timeout_s,
        secret=secret,
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
    """Runs in the other processes: joins process 0. Raises as `lead` does."""
    secret = secret_of(config)
    check(config)
    leader = Leader(
        config.coordinator,
        config.process_index,
        facts(config),
        peer_timeout_s=config.peer_timeout_s,
        secret=secret,
    )
    port = leader.join(config.join_timeout_s).rpartition(":")[2]
    # Process 0 may listen on all addresses: this process knows which of them it reaches.
    connect(config, f"{config.coordinator.rpartition(':')[0]}:{port}")
    return leader


def connect(config: EngineConfig, address: str) -> None:
    """Lets jax know the devices of all processes; `address` is jax's service in process 0.

    That service is needed only at the start (`Device.ready`). When a process is lost, it would kill
    the others without an explanation, so its timeout is longer than the time in which jmoe itself
    notices.
    """
    jax.config.update("jax_enable_preemption_service", False)  # it swallows SIGTERM
    jax.distributed.initialize(
        address,
        config.num_processes,
        config.process_index,
        cluster_detection_method="deactivate",
        coordinator_bind_address=address,  # otherwise its service would listen on all addresses
        initialization_timeout=int(config.join_timeout_s) + 1,
        heartbeat_timeout_seconds=2 * int(config.peer_timeout_s) + 10,
        shutdown_timeout_seconds=int(config.join_timeout_s) + 1,
    )


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]
