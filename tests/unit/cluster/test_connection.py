"""A server and its clients in one process: what is asked comes back, and strangers get nothing."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import zmq

from phalanx.clock import now_s
from phalanx.cluster import Answer, Caps, Connection, Endpoint, Head, Request, Secret, Server
from phalanx.cluster.frames import PIECE_BYTES, Kind
from phalanx.cluster.secret import make_secret
from phalanx.errors import ConfigError, InternalError, PeerTimeout
from phalanx.ipc import wait_until
from tests.chaos.proxy import Proxy, replay
from tests.unit.cluster.mutations import mutated_message

pytestmark = pytest.mark.promise("files-and-messages-hold-no-code")

ECHO, WAIT, FAIL, REFUSE = range(1, 5)
DEADLINE_S = 30.0


class Echo:
    """Gives back what it is given."""

    def __init__(self) -> None:
        self.answered: list[int] = []
        self.num_looks = 0
        self.go_on = threading.Event()

    def hear(self, head: Head) -> None:
        pass

    def payload_bytes(self, head: Head) -> int:
        if head.operation == REFUSE:
            raise ConfigError("`x` must be y, but is z.")
        return head.args[0]

    def waits(self, head: Head) -> bool:
        return head.operation == WAIT

    def answer(self, request: Request) -> Answer:
        self.answered.append(request.head.operation)
        if request.head.operation == FAIL:
            raise ZeroDivisionError("with a path /srv/models in it")
        if request.head.operation == WAIT:
            assert self.go_on.wait(DEADLINE_S)
        return Answer((7, 8), [request.payload], request.head.text.upper())


class Served:
    def __init__(self, server: Server, echo: Echo, context: zmq.Context, secret: Secret | None):
        self.server = server
        self.echo = echo
        self._context = context
        self._secret = secret

    def connect(self, secret: Secret | None = None, address: str | None = None) -> Connection:
        secret = secret or self._secret
        public = None if self._secret is None else self._secret.keys("server").public
        keys = None if secret is None else secret.keys("client")
        endpoint = Endpoint(1, "Host 1 (b)", address or self.server.address, public)
        return Connection(self._context, endpoint, keys, worker=3)


@contextmanager
def serving(secret: Secret | None, caps: Caps = Caps()) -> Iterator[Served]:  # noqa: B008
    echo, ended = Echo(), threading.Event()
    server = Server(
        echo,
        "tcp://127.0.0.1:*",
        keys=secret and secret.keys("server"),
        client_public=secret and secret.keys("client").public,
        caps=caps,
    )

    def go_on() -> bool:
        echo.num_looks += 1
        return not ended.is_set()

    thread = threading.Thread(target=server.serve, args=(go_on,))
    thread.start()
    context = zmq.Context()
    try:
        yield Served(server, echo, context, secret)
    finally:
        ended.set()
        echo.go_on.set()
        thread.join(DEADLINE_S)
        server.close()
        context.destroy(linger=0)


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
        args=(4 * count,),
        text="abc",
        payload=[memoryview(sent.numpy())],
        out=[memoryview(back.numpy())],
    )
    assert (reply.args[:2], reply.text) == ((7, 8), "ABC")
    assert torch.equal(sent, back)


@pytest.mark.parametrize("encrypted", [True, False])
def test_payloads_of_any_length_come_back(secret, encrypted):
    with serving(secret if encrypted else None) as served:
        connection = served.connect()
        for count in (0, 1, 1000, PIECE_BYTES // 4, PIECE_BYTES // 4 + 1, 3 * PIECE_BYTES // 4 + 7):
            there_and_back(connection, count)


def test_whether_to_go_on_is_asked_by_the_clock_and_not_by_the_request(secret):
    with serving(secret) as served:
        connection, started_s = served.connect(), now_s()
        for _ in range(100):
            connection.call(ECHO, "an echo", DEADLINE_S)
        assert served.echo.num_looks <= 2 + (now_s() - started_s) / 0.1


def test_several_requests_are_under_way_and_one_that_waits_holds_nobody_up(secret):
    with serving(secret) as served:
        connection = served.connect()
        waiting = connection.begin(WAIT, "a wait", text="w")
        others = [connection.begin(ECHO, "an echo", text=str(i)) for i in range(20)]
        assert [connection.wait(o, DEADLINE_S).text for o in reversed(others)] == [
            str(i) for i in reversed(range(20))
        ]
        served.echo.go_on.set()
        assert connection.wait(waiting, DEADLINE_S).text == "W"


def test_a_request_that_is_asked_again_while_it_waits_is_answered_once(secret, monkeypatch):
    monkeypatch.setattr("phalanx.cluster.connection._RETRY_S", 0.05)
    with serving(secret) as served:
        connection = served.connect()
        waiting = connection.begin(WAIT, "a wait", text="w")
        with pytest.raises(PeerTimeout, match=r"Host 1 \(b\) \(server at tcp://127\.0\.0\.1"):
            connection.wait(waiting, 0.4)
        assert connection.num_retries > 2
        served.echo.go_on.set()
        there_and_back(connection, 5)
        assert served.echo.answered.count(WAIT) == 1


def wait_over_a_link_that_is_cut(secret: Secret) -> int:
    """Return how often a request was answered whose link was cut while it waited."""
    with serving(secret) as served, Proxy(served.server.address) as proxy:
        connection = served.connect(address=proxy.address)
        replies: list[str] = []
        asking = threading.Thread(
            target=lambda: replies.append(connection.call(WAIT, "a wait", 5.0, text="w").text)
        )
        asking.start()
        assert wait_until(lambda: served.echo.answered == [WAIT], DEADLINE_S)
        first = list(served.server._links.values())
        proxy.cut()
        assert wait_until(lambda: list(served.server._links.values()) != first, DEADLINE_S)
        served.echo.go_on.set()
        asking.join()
        assert replies == ["W"]
        return served.echo.answered.count(WAIT)


def test_who_was_cut_off_asks_again_and_gets_the_answer_of_the_first_try(secret):
    assert wait_over_a_link_that_is_cut(secret) == 1


def test_a_server_that_knows_a_request_by_its_link_answers_it_twice(secret, monkeypatch):
    take = Server._take_request

    def by_link(self, link, head, frames):
        take(self, link, head._replace(client=link.ljust(16)), frames)

    monkeypatch.setattr(Server, "_take_request", by_link)
    assert wait_over_a_link_that_is_cut(secret) == 2


def test_refusals_are_our_errors_and_faults_tell_nothing_of_the_server(secret):
    with serving(secret) as served:
        connection = served.connect()
        with pytest.raises(ConfigError, match="`x` must be y, but is z"):
            connection.call(REFUSE, "a refusal", DEADLINE_S)
        with pytest.raises(InternalError, match="met a ZeroDivisionError") as caught:
            connection.call(FAIL, "a fault", DEADLINE_S)
        assert "/srv" not in str(caught.value)
        there_and_back(connection, 3)


def test_who_has_no_secret_or_another_gets_nothing(secret, tmp_path):
    make_secret(tmp_path / "other")
    with serving(secret) as served:
        stranger = served.connect(Secret.read(tmp_path / "other"))
        with pytest.raises(PeerTimeout):
            stranger.call(ECHO, "an echo", 0.5, text="abc")
        plain = zmq.Context()
        socket = plain.socket(zmq.DEALER)
        socket.connect(served.server.address)
        socket.send_multipart([Head(0, ECHO, 0, 0, bytes(16), 1, 0, (0,) * 4, 0).encode()])
        assert socket.poll(500) == 0
        plain.destroy(linger=0)
        there_and_back(served.connect(), 3)
        assert served.echo.answered == [ECHO]


def test_recorded_traffic_gets_nothing_and_changes_nothing(secret):
    with serving(secret) as served, Proxy(served.server.address) as proxy:
        connection = served.connect(address=proxy.address)
        there_and_back(connection, 1000)
        (session,) = proxy.sessions
        assert len(session) > 4000
        answered = list(served.echo.answered)
        told = replay(served.server.address, bytes(session), 2.0)
        assert len(told) < 512  # the server's half of a handshake that comes to nothing
        assert served.echo.answered == answered
        there_and_back(connection, 1000)
        assert len(proxy.sessions) == 1


def test_mutated_messages_do_no_harm_to_good_clients():
    """Ten thousand of them, from a peer that is admitted."""
    chance, caps = random.Random(1), Caps(payload_bytes=1 << 16, in_flight_bytes=1 << 17)
    head = Head(Kind.REQUEST, ECHO, 3, 0, bytes(16), 9, 0, (8, 0, 0, 0), 8, "abc")
    with serving(None, caps) as served:
        connection = served.connect()
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.connect(served.server.address)
        for number in range(10_000):
            socket.send_multipart(mutated_message(chance, [head.encode(), bytes(8)]))
            if number % 1000 == 0:
                there_and_back(connection, 100)
        there_and_back(connection, 100)
        assert wait_until(lambda: served.server.num_dropped > 1000, DEADLINE_S)
        held = sum(len(each.payload) for each in served.server._assemblies.values())
        assert held <= caps.in_flight_bytes
        context.destroy(linger=0)
