"""The server of islands that are separate jobs: who joins, leaves and returns, and who is refused."""
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch

from helpers import ROOT, free_port
from kilogpt.islands.client import MAGIC, IslandClient, authenticate, parse_address, receive_bytes, send

SECRET = 'a secret of the tests'


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv('KILOGPT_SECRET', SECRET)


class Server:
    """A process of python -m kilogpt.islands, which may be killed and started again."""

    def __init__(self, folder):
        self.port, self.log = free_port(), folder / 'server.log'
        self.address = f'127.0.0.1:{self.port}'
        self.start()

    def start(self):
        with open(self.log, 'a') as file:
            self.process = subprocess.Popen([sys.executable, '-m', 'kilogpt.islands', f'--port={self.port}'],
                                            cwd=ROOT, stdout=file, stderr=file)
        self.wait_for_connection()

    def wait_for_connection(self):
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                return socket.create_connection(('127.0.0.1', int(self.port)), 10).close()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path)
    yield server
    assert server.process.poll() is None and 'Traceback' not in server.log.read_text(), server.log.read_text()
    server.kill()


def register(server, island, islands=3, timeout=60.0, **options):
    """The client of an island that has registered; `continues` is what its `register` returned."""
    client = IslandClient(server.address, island, dict(islands=islands, outer_timeout=timeout), **options)
    client.continues = client.register()
    return client


def upload(island, *values):
    """Start the next exchange of an island, with a payload of these bytes."""
    island.start(island.position[0], torch.tensor(values, dtype=torch.uint8))


def results_of(*islands, seconds=60):
    """Wait for the results of what these islands have started: (facts, [values of a payload]) of each."""
    deadline = time.monotonic() + seconds
    while not all(island.has_arrived() for island in islands):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    results = [island.result() for island in islands]
    return [(facts, [payload.tolist() for payload in payloads]) for facts, payloads in results]


def values_of(result):
    """{island: values of its payload} of the result of an exchange."""
    facts, payloads = result
    return dict(zip(facts['islands'], payloads))


# --- exchanges and joins --------------------------------------------------------------------------------

def test_islands_get_the_payloads_of_all(server):
    islands = [register(server, island) for island in range(3)]
    for number in range(3):
        for client in islands:
            upload(client, number, client.island)
        for result in results_of(*islands):
            assert values_of(result) == {island: [number, island] for island in range(3)}
            assert result[0] == dict(islands=[0, 1, 2], joining=[])
    assert len({str(client.position) for client in islands}) == 1 and islands[0].position[0] == 3


def test_others_continue_without_a_lost_island_which_joins_when_it_returns(server):
    islands = [register(server, island, timeout=2.0) for island in range(3)]
    for number in range(2):  # exchange 0 waits for island 2, and exchange 1 does not expect it any more
        upload(islands[0], 1)
        upload(islands[1], 2)
        for result in results_of(*islands[:2]):
            assert values_of(result) == {0: [1], 1: [2]}
    assert server.log.read_text().count('without islands [2]') == 1
    upload(islands[2], 3)  # like an island that was suspended and continued
    assert results_of(islands[2]) == [(None, [])]
    returned = register(server, 2, timeout=2.0)
    assert not returned.continues
    returned.start_joining()
    while 'join' not in server.log.read_text():
        upload(islands[0], 1)
        upload(islands[1], 2)
        joining = [facts['joining'] for facts, _ in results_of(*islands[:2])]
        assert joining in ([[], []], [[2], [2]])
    islands[0].send_state(dict(iteration=40), torch.tensor([7, 7], dtype=torch.uint8))
    assert results_of(returned) == [(dict(iteration=40), [[7, 7]])]
    assert returned.position == islands[0].position
    for client in (*islands[:2], returned):
        upload(client, client.island)
    for result in results_of(*islands[:2], returned):
        assert values_of(result) == {0: [0], 1: [1], 2: [2]}


def test_island_joins_at_the_next_exchange_if_it_gets_no_state(server):
    """As if the island that should have sent its state was killed."""
    member = register(server, 0, islands=2, timeout=0.5)
    upload(member, 1)
    results_of(member)
    newcomer = register(server, 1, islands=2, timeout=0.5)
    newcomer.start_joining()
    joining = []
    while len(joining) < 2:
        upload(member, 1)
        (facts, _), = results_of(member)
        joining += facts['joining']
    assert joining == [1, 1] and not newcomer.has_arrived()
    member.send_state(dict(iteration=8), torch.zeros(0, dtype=torch.uint8))
    assert results_of(newcomer) == [(dict(iteration=8), [[]])]


def test_island_that_was_killed_in_an_exchange_gets_the_result_again(server):
    """The result includes its own payload as the others have it: the island may now compute another one."""
    islands = [register(server, island) for island in range(3)]
    for client in islands:
        upload(client, client.island)
    results_of(*islands[:2])
    returned = register(server, 2)
    assert returned.continues
    upload(returned, 99)
    assert values_of(*results_of(returned)) == {0: [0], 1: [1], 2: [2]}
    assert returned.position == islands[0].position


@pytest.mark.slow
def test_if_all_islands_return_from_checkpoints_the_furthest_leads(server):
    islands = [register(server, island, timeout=5.0) for island in range(3)]
    positions = [islands[0].position]
    for number in range(4):
        for client in islands:
            upload(client, number)
        results_of(*islands)
        positions.append(islands[0].position)
    for client in islands:
        client.is_member = False  # the client sends no more signs of life, as if its process had ended
    returned = [register(server, island, timeout=5.0, number=positions[saved][0], history=positions[saved][1])
                for island, saved in enumerate((1, 2, 1))]
    assert [client.continues for client in returned] == [False] * 3
    for client in returned:
        client.start_joining()
    assert results_of(returned[1]) == [(None, [])]  # nobody is ahead of this island
    upload(returned[1], 1)
    result, = results_of(returned[1])
    assert values_of(result) == {1: [1]} and result[0]['joining'] == [0, 2]
    returned[1].send_state({}, torch.tensor([5], dtype=torch.uint8))
    assert results_of(returned[0], returned[2]) == [({}, [[5]]), ({}, [[5]])]


# --- a server that is killed ----------------------------------------------------------------------------

def test_restarted_server_learns_from_the_islands_which_exchange_comes_next(server):
    islands = [register(server, island) for island in range(3)]
    for client in islands:
        upload(client, 0)
    results_of(*islands)
    upload(islands[0], 1)
    server.kill()
    upload(islands[1], 2)
    time.sleep(0.1)
    server.start()
    upload(islands[2], 3)
    for result in results_of(*islands):
        assert values_of(result) == {0: [1], 1: [2], 2: [3]}


@pytest.mark.slow
def test_island_that_missed_an_exchange_by_a_restart_takes_over_the_state(server):
    """The server is killed when one island has the result of an exchange and the other island does not."""
    first, second = [register(server, island, islands=2, timeout=20.0) for island in range(2)]
    upload(first, 1)
    # The payload of the second island arrives, but the answer is lost with the server.
    message = dict(kind='exchange', position=second.position, digest='')
    with second._connect() as connection:
        second._ask(connection, message)
        send(connection, message, [b'\2'])
        assert values_of(*results_of(first)) == {0: [1], 1: [2]}
        server.kill()
    server.start()
    upload(second, 2)
    assert results_of(second) == [(None, [])]  # the first island's sign of life says that it is ahead
    second.start_joining()
    joining = []
    while not joining:
        upload(first, 1)
        (facts, _), = results_of(first)
        joining = facts['joining']
    first.send_state({}, torch.tensor([9], dtype=torch.uint8))
    assert results_of(second) == [({}, [[9]])]


# --- strangers ------------------------------------------------------------------------------------------

def test_strangers_are_refused_and_the_islands_continue(server, monkeypatch):
    islands = [register(server, island) for island in range(3)]
    upload(islands[0], 1)
    upload(islands[1], 1)
    strangers = []
    for garbage in (b'', b'GET / HTTP/1.1\r\nHost: islands\r\n\r\n' * 10, os.urandom(10_000), MAGIC,
                    MAGIC + bytes(32), MAGIC + bytes(64)):
        strangers.append(socket.create_connection(('127.0.0.1', int(server.port)), 10))
        with contextlib.suppress(ConnectionError):
            strangers[-1].sendall(garbage)
    reflected = socket.create_connection(('127.0.0.1', int(server.port)), 10)
    reflected.sendall(receive_bytes(reflected, len(MAGIC) + 32))  # the server's own challenge
    reflected.sendall(bytes(32))
    assert receive_bytes(reflected, 32) == bytes(32)
    monkeypatch.setenv('KILOGPT_SECRET', 'another secret of the tests')
    with pytest.raises(ValueError, match='refuses this island: it has another KILOGPT_SECRET'):
        register(server, 2)
    upload(islands[2], 1)
    for result in results_of(*islands):
        assert values_of(result) == {0: [1], 1: [1], 2: [1]}
    assert 'refused 127.0.0.1' in server.log.read_text()


@pytest.mark.slow
def test_connection_that_is_slow_or_silent_is_closed(server):
    with socket.create_connection(('127.0.0.1', int(server.port)), 60) as slow:
        with pytest.raises(ConnectionError):
            for byte in MAGIC + bytes(100):
                slow.send(bytes([byte]))
                time.sleep(1)
    assert 'too slow' in server.log.read_text()
    with socket.create_connection(('127.0.0.1', int(server.port)), 60) as mute:
        receive_bytes(mute, len(MAGIC) + 32)
        assert mute.recv(1) == b''


def test_bad_message_from_one_who_knows_the_secret_ends_only_that_connection(server):
    client = register(server, 0, islands=1)
    for content in (b'\0\0\0\2{}', b'\0\0\0\2[]', b'\xff' * 40, b'\0\0\0\4null',
                    b'\0\0\0\x0f{"sizes": [-1]}', b'\0\0\0\x0d{"sizes": []}', b'[' * 50_000):
        with socket.create_connection(('127.0.0.1', int(server.port)), 10) as connection:
            authenticate(connection, SECRET.encode(), is_server=False)
            send(connection, client.introduction)
            connection.sendall(content)
            connection.settimeout(20)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b''
    upload(client, 1)
    assert values_of(*results_of(client)) == {0: [1]}


def test_second_job_of_an_island_replaces_the_first(server):
    first = register(server, 0, islands=1)
    second = register(server, 0, islands=1)
    printed = []
    first.say = printed.append
    upload(first, 1)
    upload(second, 2)
    assert values_of(*results_of(second)) == {0: [2]}
    while not printed:
        time.sleep(0.01)
    assert 'another job has come as island 0' in printed[0] and not first.has_arrived()


# --- bad input ------------------------------------------------------------------------------------------

@pytest.mark.parametrize('secret, message', [('', 'KILOGPT_SECRET is not set'),
                                             ('short', 'KILOGPT_SECRET has 5 characters')])
def test_secret_must_be_set_and_long(monkeypatch, secret, message):
    monkeypatch.setenv('KILOGPT_SECRET', secret)
    with pytest.raises(ValueError, match=message):
        IslandClient('127.0.0.1:1', 0, {})
    done = subprocess.run([sys.executable, '-m', 'kilogpt.islands'], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and message in done.stderr and done.stderr.count('\n') == 1


@pytest.mark.parametrize('text', ['', 'host', ':1', 'host:', 'host:port', 'host:0', 'host:70000'])
def test_address_must_be_host_and_port(text):
    with pytest.raises(ValueError, match=f"outer_store is '{text}': use HOST:PORT"):
        parse_address(text)


def test_server_must_be_reachable():
    client = IslandClient(f'127.0.0.1:{free_port()}', 0, {})
    with pytest.raises(ValueError, match='cannot be reached .*start python -m kilogpt.islands there'):
        client.register(patience=0)


def test_another_kind_of_server_is_not_taken_for_a_server_of_islands():
    with socket.create_server(('127.0.0.1', 0)) as other:
        client = IslandClient(f'127.0.0.1:{other.getsockname()[1]}', 0, {})

        threading.Thread(target=lambda: other.accept()[0].sendall(b'SSH-2.0-OpenSSH_9.2p1\r\n' * 9)).start()
        with pytest.raises(ValueError, match='the other end is not a kiloGPT of this version'):
            client.register(patience=0)


def test_settings_of_islands_must_agree(server):
    register(server, 0)
    with pytest.raises(ValueError, match='islands is 4 here and 3 on the island that came first'):
        register(server, 1, islands=4)
    with pytest.raises(ValueError, match='island is 3, but islands is 3'):
        register(server, 3)
