"""TLS on every port for clients: who gets in with what, new certificates, who stalls."""

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvloop
from certificates import Authority, Pair, client_context, openssl
from served import CODE, Setup, failure, until

from serving.bench.scrape import free_port
from serving.client import Client
from serving.client.connection import Connection
from serving.config import ServerConfig
from serving.errors import SettingsError
from serving.frontend import handshake
from serving.frontend.exposure import certificates, warn
from serving.frontend.server import Server
from serving.frontend.tls import Certificates, Files
from serving.settings import reading as settings

PORTS = ("main", "admin", "web", "page", "metrics")
GRPC, HTTP = PORTS[:2], PORTS[2:]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> SimpleNamespace:
    """Makes two authorities, each with certificates for a server and a client."""
    folder = tmp_path_factory.mktemp("certificates")
    first, second = Authority(folder, "first"), Authority(folder, "second")
    return SimpleNamespace(
        first=first,
        second=second,
        server=first.signs("server"),
        other_server=second.signs("other-server"),
        client=first.signs("client"),
        other_client=second.signs("other-client"),
    )


class Deployed:
    """The files of a server, as an operator puts and replaces them."""

    def __init__(self, folder: Path, pair: Pair, client_ca: Path | None = None) -> None:
        self.folder, self.mutual = folder, client_ca is not None
        self.put(pair, client_ca)

    def put(self, pair: Pair, client_ca: Path | None = None) -> None:
        for name, source in (("cert", pair.cert), ("key", pair.key), ("client-ca", client_ca)):
            if source is not None:
                part = self.folder / "part"
                part.write_bytes(source.read_bytes())
                part.chmod(0o600)
                part.replace(self.folder / f"{name}.pem")

    @property
    def settings(self) -> dict[str, str]:
        own = {"tls_cert": "cert", "tls_key": "key"}
        own |= {"tls_client_ca": "client-ca"} if self.mutual else {}
        return {name: str(self.folder / f"{file}.pem") for name, file in own.items()}

    @property
    def files(self) -> Files:
        ca = self.folder / "client-ca.pem"
        return Files(self.folder / "cert.pem", self.folder / "key.pem", ca if self.mutual else None)


@contextlib.asynccontextmanager
async def encrypted(deployed: Deployed, **fields):
    """Yields an encrypted server with all of its ports."""
    metrics_port = free_port()
    config = ServerConfig(port=0, metrics_port=metrics_port, **deployed.settings, **fields)
    async with Setup(config) as setup:
        server = setup.server
        setup.ports = {
            "main": server.main.port,
            "admin": server.front_ends["admin"].port,
            "web": server.front_ends["http"].port,
            "page": server.front_ends["page"].port,
            "metrics": metrics_port,
        }
        yield await setup.ready()


def shake(port: int, context: "Caller", name: str | None = "localhost", session=None):
    """Does a handshake and reads an answer; returns the name that the server showed, and a session.

    Raises OSError where the server ends it: by TLS 1.3 a client hears of that only as it reads.
    """
    http = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
    with (
        socket.create_connection(("127.0.0.1", port), 20) as plain,
        context.wrap_socket(plain, server_hostname=name, session=session) as secured,
    ):
        secured.sendall(http if context.http else http2)
        if not secured.recv(9):  # of its answer, or its own settings
            raise ConnectionResetError("ended")
        shown = dict(part[0] for part in secured.getpeercert()["subject"])["commonName"]
        return shown, secured.session


class Caller(ssl.SSLContext):
    """A client's context, for ports of a kind."""

    http: bool


def caller(port_name: str, ca: Authority, own: Pair | None = None, version=None) -> Caller:
    context = Caller(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca.cert)
    if own is not None:
        context.load_cert_chain(own.cert, own.key)
    if version is not None:
        context.maximum_version = version
    context.http = port_name in HTTP
    context.set_alpn_protocols(["http/1.1"] if context.http else ["h2"])
    return context


async def meet(setup, port_name: str, context: Caller, **options):
    return await asyncio.to_thread(shake, setup.ports[port_name], context, **options)


# -- who gets in ---------------------------------------------------------------------------------


@pytest.mark.parametrize("port", PORTS)
async def test_every_port_shows_its_certificate_and_talks_to_nobody_in_the_clear(
    made, tmp_path, port
):
    async with encrypted(Deployed(tmp_path, made.server)) as s:
        assert (await meet(s, port, caller(port, made.first)))[0] == "server"
        with pytest.raises(ssl.SSLCertVerificationError):
            await meet(s, port, caller(port, made.second))
        for line in (b"GET /healthz HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", s.ports[port])
            writer.write(line)
            # Its end comes at once: neither an answer nor a wait for more.
            got = b""
            with contextlib.suppress(ConnectionError):
                got = await asyncio.wait_for(reader.read(), 5)
            assert b"HTTP" not in got
            writer.close()
        old = caller(port, made.first)
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(ssl.SSLError):
            await meet(s, port, old)
        assert (await meet(s, port, caller(port, made.first, version=ssl.TLSVersion.TLSv1_2)))[
            0
        ] == "server"


@pytest.mark.parametrize("port", PORTS)
async def test_with_a_client_ca_who_has_no_certificate_of_it_stays_out(made, tmp_path, port):
    async with encrypted(Deployed(tmp_path, made.server, made.first.cert)) as s:
        assert (await meet(s, port, caller(port, made.first, made.client)))[0] == "server"
        for own in (None, made.other_client):
            with pytest.raises(OSError):  # noqa: PT011
                await meet(s, port, caller(port, made.first, own))


async def test_clients_of_jmoe_connect_with_files(made, tmp_path):
    first = made.first.cert
    async with encrypted(Deployed(tmp_path, made.server, first)) as s:
        own = Connection("", str(first), str(made.client.cert), str(made.client.key))
        async with Client(s.server.address, connection=own) as client:
            await client.wait_ready(30)
            outputs = [out async for out in client.generate([1, 2, 3])]
            assert [token for out in outputs for token in out.token_ids][:2] == [4, 5]
            assert (await client.get_brownout()).way == 8  # on the port that the server names
        for stranger in (
            Connection("", str(first)),
            Connection("", str(made.second.cert), str(made.client.cert), str(made.client.key)),
            Connection("", str(first), str(made.other_client.cert), str(made.other_client.key)),
            Connection(),
        ):
            async with Client(s.server.address, connection=stranger) as client:
                error = await failure(client.server_info(timeout_s=20))
                assert error.code() == CODE.UNAVAILABLE


async def test_addresses_say_that_they_are_encrypted(made, tmp_path, caplog):
    caplog.set_level("INFO")
    from serving.frontend.server import _log_addresses

    async with encrypted(Deployed(tmp_path, made.server)) as s:
        assert s.server.scheme == "https"
        _log_addresses(s.server)
    assert f"on https://127.0.0.1:{s.ports['metrics']}/metrics" in caplog.text
    assert Server(ServerConfig(port=0)).scheme == "http"


# -- new certificates ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["localhost", None])
@pytest.mark.parametrize("port", PORTS)
async def test_new_connections_see_new_certificates_and_a_new_client_ca(made, tmp_path, port, name):
    deployed = Deployed(tmp_path, made.server, made.first.cert)
    async with encrypted(deployed) as s:
        before, after = (
            caller(port, ca, own)
            for ca, own in ((made.first, made.client), (made.second, made.other_client))
        )
        for context in (before, after):
            context.check_hostname = name is not None
        assert (await meet(s, port, before, name=name))[0] == "server"
        deployed.put(made.other_server, made.second.cert)
        assert s.server.certificates.reload()
        assert (await meet(s, port, after, name=name))[0] == "other-server"
        with pytest.raises(OSError):  # noqa: PT011
            await meet(s, port, before, name=name)
        # Who trusts the new server, and has no more than a certificate of the old CA.
        mixed = caller(port, made.second, made.client)
        mixed.check_hostname = name is not None
        with pytest.raises(OSError):  # noqa: PT011
            await meet(s, port, mixed, name=name)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("port", PORTS)
async def test_who_had_a_session_with_the_old_ca_does_not_resume_it(made, tmp_path, port, version):
    deployed = Deployed(tmp_path, made.server, made.first.cert)
    async with encrypted(deployed) as s:
        context = caller(port, made.first, made.client, version)
        context.load_verify_locations(made.second.cert)
        _, session = await meet(s, port, context)
        deployed.put(made.other_server, made.second.cert)
        assert s.server.certificates.reload()
        with pytest.raises(OSError):  # noqa: PT011
            await meet(s, port, context, session=session)


async def test_a_connection_that_is_there_outlives_its_certificate(made, tmp_path):
    deployed = Deployed(tmp_path, made.server)
    own = Connection("", str(made.first.cert))
    async with encrypted(deployed) as s, Client(s.server.address, connection=own) as client:
        await client.server_info()
        deployed.put(made.other_server)
        assert s.server.certificates.reload()
        assert (await client.server_info()).status == "ready"


async def test_a_server_reads_them_again_by_itself(made, tmp_path, monkeypatch):
    monkeypatch.setattr(Certificates.watch, "__defaults__", (0.01,))
    deployed = Deployed(tmp_path, made.server)
    async with encrypted(deployed) as s:
        before = s.server.certificates.context
        deployed.put(made.other_server)
        # The pair changes file by file, so that a moment may have halves of two.
        await until(lambda: s.server.certificates.context is not before)
        assert (await meet(s, "main", caller("main", made.second)))[0] == "other-server"
        assert (await meet(s, "web", caller("web", made.second)))[0] == "other-server"


async def test_a_pair_that_does_not_load_leaves_the_old_one_and_is_one_error(
    made, tmp_path, caplog
):
    deployed = Deployed(tmp_path, made.server)
    async with encrypted(deployed) as s:
        deployed.put(Pair(made.other_server.cert, made.server.key))
        assert not s.server.certificates.reload()
        assert not s.server.certificates.reload()
        for port in ("main", "web", "metrics"):
            assert (await meet(s, port, caller(port, made.first)))[0] == "server"
        deployed.put(made.other_server)
        assert s.server.certificates.reload()
        assert (await meet(s, "main", caller("main", made.second)))[0] == "other-server"
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "certificates stay as they were" in record.getMessage()
    assert "key values mismatch" in record.getMessage()


# -- at the start --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tls_cert": "c"}, "tls_key is ''; it must be a file where tls_cert is one"),
        ({"tls_key": "k"}, "tls_cert is ''; it must be a file where tls_key is one"),
        ({"tls_client_ca": "k"}, "tls_client_ca is 'k'; it must be empty without tls_cert"),
    ],
)
def test_settings_that_do_not_go_together(given, said):
    with pytest.raises(SettingsError) as caught:
        settings.load(None, given)
    assert said in str(caught.value)


def test_files_that_do_not_load_are_errors_that_name_them(made, tmp_path):
    good = Deployed(tmp_path, made.server, made.first.cert).files
    missing, empty = tmp_path / "missing.pem", tmp_path / "empty.pem"
    empty.write_text("")
    locked = tmp_path / "locked.pem"
    openssl("pkey", "-in", made.server.key, "-aes256", "-passout", "pass:x", "-out", locked)
    for bad, named, said in (
        (good._replace(cert=missing), missing, "No such file or directory"),
        (good._replace(key=missing), missing, "tls_key is"),
        (good._replace(client_ca=missing), missing, "tls_client_ca is"),
        (good._replace(cert=empty), empty, "give a certificate and its own private key"),
        (good._replace(key=made.client.key), made.client.key, "key values mismatch"),
        (good._replace(client_ca=empty), empty, "give certificates of CAs in PEM format"),
        (good._replace(key=locked), locked, "take it away with `openssl pkey"),
        (good._replace(cert=tmp_path), tmp_path, "Is a directory"),
    ):
        with pytest.raises(SettingsError) as caught:
            Certificates(bad)
        assert str(named) in str(caught.value)
        assert said in str(caught.value)


def test_a_private_key_that_others_may_read_is_a_warning(made, tmp_path, caplog):
    files = Deployed(tmp_path, made.server).files
    Certificates(files)
    assert not caplog.records
    files.key.chmod(0o644)
    Certificates(files)
    (record,) = caplog.records
    assert f"{files.key} has mode 0644: others may read it" in record.getMessage()


def test_ports_that_show_much_are_warnings(made, tmp_path, caplog):
    own = Deployed(tmp_path, made.server, made.first.cert).settings
    pair = {name: value for name, value in own.items() if name != "tls_client_ca"}
    clear, administer = "keys travel in the clear", "may administer this server"
    use = "--host is 0.0.0.0, and no key is asked for: whoever reaches it may use this server"
    both = "--host is ::, and no key is asked for: whoever reaches it may use and administer"
    for fields, said in (
        ({}, None),
        ({"host": "127.0.0.1"}, None),
        ({"host": "0.0.0.0"}, use),
        ({"host": "0.0.0.0", **pair}, use),
        ({"host": "0.0.0.0", **own}, None),
        ({"host": "a.name"}, "--host is a.name"),
        ({"host": "::", "admin_on_main_port": True}, both),
        ({"host": "::", "admin_host": "::"}, both),
        ({"admin_host": "::"}, administer),
        ({"admin_host": "[::1]"}, None),
        ({"admin_host": "localhost"}, None),
        ({"admin_host": "10.0.0.1", "keys_file": "k", **pair}, None),
        ({"admin_host": "10.0.0.1", **pair}, administer),
        ({"admin_host": "10.0.0.1", **own}, None),
        ({"keys_file": "k"}, None),
        ({"keys_file": "k", "host": "10.0.0.1"}, clear),
        ({"keys_file": "k", "admin_host": "a.name"}, clear),
    ):
        caplog.clear()
        warn(ServerConfig(**fields))
        assert [said in r.getMessage() for r in caplog.records] == [True] * (said is not None)


def test_a_key_of_the_environment_that_nobody_asks_for_is_said(caplog, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    warn(ServerConfig(keys_file="k"))
    assert not caplog.records
    warn(ServerConfig())
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("VLLM_API_KEY is set, and this server asks for no key")
    assert "secret" not in said


def test_without_settings_nothing_is_encrypted():
    assert certificates(ServerConfig()) is None


# -- who stalls ------------------------------------------------------------------------------------


@pytest.mark.parametrize("port", HTTP)
async def test_a_handshake_that_never_ends_is_ended(made, tmp_path, monkeypatch, port):
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.2)
    async with encrypted(Deployed(tmp_path, made.server)) as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.ports[port])
        writer.write(b"\x16\x03\x01\x02\x00\x01")  # a hello that stops after six bytes
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()


async def test_more_handshakes_than_may_be_end_the_oldest_and_nobody_waits(
    made, tmp_path, monkeypatch
):
    monkeypatch.setattr(handshake, "MOST_AT_ONCE", 4)
    async with encrypted(Deployed(tmp_path, made.server)) as s:
        door = s.web.door
        stalled = []
        for count in range(1, 10):
            stalled.append(await asyncio.open_connection("127.0.0.1", s.ports["web"]))
            await until(lambda count=count: door.num_handshakes == min(count, 4))
        assert (await meet(s, "web", caller("web", made.first)))[0] == "server"
        for reader, _ in stalled[:5]:
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 20) == b""
        for _, writer in stalled:
            writer.close()


@pytest.mark.parametrize("port", ["web", "page"])
async def test_a_stop_ends_handshakes(made, tmp_path, port):
    async with encrypted(Deployed(tmp_path, made.server)) as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.ports[port])
        door = getattr(s, port).door
        await until(lambda: door.num_handshakes == 1)
        await getattr(s, port).stop()
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()


async def test_what_comes_with_the_end_of_a_handshake_is_not_lost(made, tmp_path):
    """A client's last message of the handshake, its request and its end, in one write."""
    async with encrypted(Deployed(tmp_path, made.server)) as s:
        answer = await asyncio.to_thread(in_one_write, s.ports["web"], made.first)
    assert answer.startswith(b"HTTP/1.1 ")


def in_one_write(port: int, ca: Authority) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = client_context(ca.cert).wrap_bio(incoming, outgoing, server_hostname="localhost")
    with socket.create_connection(("127.0.0.1", port), 20) as plain:
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                plain.sendall(outgoing.read())
                incoming.write(plain.recv(65536))
        tls.write(b"GET /x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        plain.sendall(outgoing.read())
        got = b""
        with contextlib.suppress(ssl.SSLError):
            while True:
                try:
                    if not (part := tls.read(65536)):
                        break
                    got += part
                except ssl.SSLWantReadError:
                    if not (raw := plain.recv(65536)):
                        break
                    incoming.write(raw)
        return got


@pytest.mark.parametrize(
    ("test", "more"),
    [
        (test_every_port_shows_its_certificate_and_talks_to_nobody_in_the_clear, ()),
        (test_new_connections_see_new_certificates_and_a_new_client_ca, ("localhost",)),
        (test_who_had_a_session_with_the_old_ca_does_not_resume_it, (ssl.TLSVersion.TLSv1_3,)),
        (test_a_stop_ends_handshakes, ()),
    ],
)
def test_in_the_event_loop_that_servers_have(made, tmp_path, test, more):
    uvloop.run(test(made, tmp_path, "web", *more))


def test_nothing_is_lost_in_that_loop_either(made, tmp_path):
    uvloop.run(test_what_comes_with_the_end_of_a_handshake_is_not_lost(made, tmp_path))
