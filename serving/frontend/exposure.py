"""A server's certificates, and warnings about settings that expose it."""

import logging
import os
from pathlib import Path

from serving.cluster.addresses import is_loopback
from serving.config import ServerConfig
from serving.frontend.tls import Certificates, Files

log = logging.getLogger(__name__)


def certificates(config: ServerConfig) -> Certificates | None:
    """Loads the certificates of the client ports; None without TLS. Raises SettingsError."""
    if not config.tls_cert:
        return None
    client_ca = Path(config.tls_client_ca) if config.tls_client_ca else None
    return Certificates(Files(Path(config.tls_cert), Path(config.tls_key), client_ca))


def warn(config: ServerConfig) -> None:
    """Warns about ports that other machines can reach without encryption or access control."""
    others_may_call = not is_loopback(config.host)
    others_may_administer = not is_loopback(config.admin_host)
    if config.keys_file and not config.tls_cert and (others_may_call or others_may_administer):
        log.warning(
            "keys travel in the clear: keys_file is set, and %s is reached by others without "
            "encryption; set tls_cert and tls_key, or let a proxy that encrypts be the only one to "
            "reach it",
            f"host {config.host}" if others_may_call else f"admin_host {config.admin_host}",
        )
    if config.keys_file or config.tls_client_ca:
        return
    for name in ("VLLM_API_KEY", "JMOE_API_KEY"):
        if os.environ.get(name):
            log.warning("%s is set, and this server asks for no key: give --keys-file", name)
    if others_may_call:
        may = "use"
        if others_may_administer or config.admin_on_main_port:
            may = "use and administer"
        log.warning(
            "--host is %s, and no key is asked for: whoever reaches it may %s this server; give "
            "--keys-file (made by `jmoe keys new`) or --tls-client-ca, or keep it to this machine "
            "with --host 127.0.0.1",
            *(config.host, may),
        )
    elif others_may_administer:
        log.warning(
            "--admin-host is %s, and no key is asked for: whoever reaches it may administer this "
            "server; give --keys-file or --tls-client-ca, or keep it to 127.0.0.1",
            config.admin_host,
        )
