"""A server and its clients in one process: what is asked comes back, and strangers get nothing."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch

from phalanx.cluster import (
    Answer,
    Connection,
    Endpoint,
    Message,
    Secret,
    Server,
    frames,
    server,
    tag_of,
)
from phalanx.cluster.frames import MAX_BYTES, Kind, Stream
from phalanx.cluster.secret import make_secret
from phalanx.errors import ConfigError, InternalError, PeerTimeout
from phalanx.ipc import wait_until

pytestmark = pytest.mark.promise("files-and-messages-hold-no-code")

ECHO, FAIL, REFUSE = range(1, 4)
DEADLINE_S = 30.0
MOST = 1 << 20
TAG = tag_of("run")


class Echo:
    """Gives back what it is given."""

    def __init__(self) -> None:
        self.answered: list[int] = []

    def answer(self, asked: Message, link: Stream) -> Answer:
        self.answered.append(asked.operation)
        if asked.operation == REFUSE:
            raise ConfigError("`x` must be y, but is z.")
        if asked.operation == FAIL:
            raise ZeroDivisionError("with a path /srv/models in it")
        return Answer((7, 8), asked.text.upper(), asked.tensors)

    def ended(self, link: Stream) -> None:
        pass


class Served:
    def __init__(self, server: Server, echo: Echo, secret: Secret | None) -> None:
        self.server = server
        self.echo = echo
        self._secret = secret

    def endpoint(self, secret: Secret | None = None) -> Endpoint:
        secret = secret or self._secret
        tls = None if secret is None else secret.tls(server=False)
        return Endpoint(1, "Host 1 (b)", self.server.address, "run", tls)

    def connect(self, secret: Secret | None = None) -> Connection:
        return Connection(self.endpoint(secret))


@contextmanager
def serving(secret: Secret | None) -> Iterator[Served]:
    echo = Echo()
    with Server(echo, "127.0.0.1:0", "run", secret) as server:
        yield Served(server, echo, secret)


@pytest.fixture
def secret(tmp_path) -> Secret:
    make_secret(tmp_path / "secret")
    return Secret.read(tmp_path / "secret")


def there_and_back(connection: Connection, count: int) -> None:
    sent, back = torch.randn(count), torch.empty(count)
    reply = connection.call(
        ECHO,
        "an echo",
        DEADLINE_S,
        text="abc",
        tensors=[sent],
        out=[back],
    )
    assert (reply.args[:2], reply.text) == ((7, 8), "ABC")
    assert torch.equal(sent, back)


@pytest.mark.parametrize("encrypted", [True, False])
def test_arrays_of_any_length_come_back(secret, encrypted):
    with serving(secret if encrypted else None) as served:
        connection = served.connect()
        for count in (0, 1, 1000, 1 << 14, (1 << 14) + 1, 700_001):
            there_and_back(connection, count)


def test_refusals_are_our_errors_and_faults_tell_nothing_of_the_server(secret):
    with serving(secret) as served:
        connection = served.connect()
        given = [torch.zeros(50_000)]
        with pytest.raises(ConfigError, match="`x` must be y, but is z"):
            connection.call(REFUSE, "a refusal", DEADLINE_S, tensors=given)
        with pytest.raises(InternalError, match="met a ZeroDivisionError") as caught:
            connection.call(FAIL, "a fault", DEADLINE_S)
        assert "/srv" not in str(caught.value)
        there_and_back(connection, 3)


def test_who_has_no_secret_or_another_gets_nothing(secret, tmp_path):
    make_secret(tmp_path / "other")
    with serving(secret) as served:
        stranger = served.connect(Secret.read(tmp_path / "other"))
        with pytest.raises(ConfigError, match="must have the secret of this run, but has another"):
            stranger.call(ECHO, "an echo", 0.5, text="abc")
        head = Message(Kind.REQUEST, ECHO).encode(TAG)
        anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
        host, _, port = served.server.address.rpartition(":")
        for tls in (None, anybody):
            with socket.create_connection((host, int(port)), 5.0) as end:
                told = b""
                with suppress(OSError):
                    told = exchange(end if tls is None else tls.wrap_socket(end), head)
                assert len(told) < 100  # an alert
        there_and_back(served.connect(), 3)
        assert served.echo.answered == [ECHO]


def test_ends_that_verify_nothing_would_serve_and_trust_strangers(secret, tmp_path, monkeypatch):
    """The mutation: a certificate is asked for, and none is checked."""
    tls = Secret.tls

    def lax(self: Secret, *, server: bool) -> ssl.SSLContext:
        context = tls(self, server=server)
        context.verify_mode = ssl.CERT_NONE
        return context

    monkeypatch.setattr(Secret, "tls", lax)
    make_secret(tmp_path / "other")
    with serving(secret) as served:
        there_and_back(served.connect(Secret.read(tmp_path / "other")), 3)


def exchange(end: socket.socket, sent: bytes) -> bytes:
    """Send, and return what comes until the other side hangs up."""
    end.sendall(sent)
    told = bytearray()
    while data := end.recv(4096):
        told += data
    return bytes(told)


def test_strangers_that_say_nothing_do_not_keep_others_out(secret, monkeypatch):
    monkeypatch.setattr(server, "_HANDSHAKE_S", 0.3)
    with serving(secret) as served:
        host, _, port = served.server.address.rpartition(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(100)]
        there_and_back(served.connect(), 3)
        for end in silent:
            end.close()


def ask_and_read_nothing(served: Served) -> Stream:
    """Return a client whose answer is longer than what the kernel keeps for it."""
    deaf = served.endpoint().connect(DEADLINE_S)
    deaf.send(Message(Kind.REQUEST, ECHO, tensors=[torch.zeros(8 << 20)]))
    assert wait_until(lambda: served.echo.answered == [ECHO], DEADLINE_S)
    return deaf


def test_a_client_that_reads_nothing_holds_nobody_up():
    with serving(None) as served:
        deaf = ask_and_read_nothing(served)
        there_and_back(served.connect(), 1000)
        deaf.close()


def test_where_answers_wait_for_each_other_it_would(monkeypatch):
    """The mutation: a server that sends one answer at a time."""
    send, turn = Server._send, threading.Lock()

    def send_in_turn(self: Server, *given: object) -> None:
        with turn:
            send(self, *given)

    monkeypatch.setattr(Server, "_send", send_in_turn)
    with serving(None) as served:
        deaf = ask_and_read_nothing(served)
        with pytest.raises(PeerTimeout):
            served.connect().call(ECHO, "an echo", 1.0)
        deaf.close()


@pytest.mark.parametrize("lost_ms", [300, 0])  # 0 is the mutation: the kernel waits on
def test_a_client_that_reads_nothing_is_cut_off(monkeypatch, lost_ms):
    monkeypatch.setattr(frames, "_LOST_MS", lost_ms)
    with serving(None) as served:
        deaf = ask_and_read_nothing(served)
        is_cut_off = wait_until(lambda: not served.server._streams, DEADLINE_S if lost_ms else 3.0)
        assert is_cut_off is bool(lost_ms)
        deaf.close()


@pytest.mark.parametrize("shape", [(MOST,), (1 << 62, 1 << 62), (0, 1 << 62), (-1,)])
def test_a_tensor_that_is_too_large_is_not_made(shape):
    like = frames.described(torch.zeros((1,) * len(shape)))[:4]
    sizes = b"".join(size.to_bytes(8, "little", signed=True) for size in (*shape, 1)[:2])
    with pytest.raises(frames.BadFrame):
        frames.empty_tensors(like + sizes, MOST)


def test_what_is_announced_beyond_the_cap_is_not_allocated_and_ends_the_connection():
    with serving(None) as served:
        stream = served.endpoint().connect(DEADLINE_S)
        many = torch.zeros(1).expand(MAX_BYTES // 4 + 1)  # takes no memory here
        stream._socket.sendall(Message(Kind.REQUEST, ECHO, tensors=[many]).encode(TAG))
        stream.wait_for_end()
        assert served.server.num_dropped == 1
