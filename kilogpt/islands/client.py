"""An island's side of the place where islands meet that are jobs of their own (kilogpt/islands/server.py keeps it).

Both ends first prove to each other that they know KILOGPT_SECRET. After that a message is the length of a
JSON object, the object, and raw bytes whose sizes the object names: nothing that arrives is unpickled. What
follows is neither encrypted nor signed, which is the task of a tunnel (docs/islands.md).
"""
import hmac
import json
import os
import socket
import struct
import threading
import time
from typing import NamedTuple

MAGIC = b'kiloGPT islands 1\n'
HANDSHAKE = 10  # seconds in which the other end must prove that it knows the secret
SILENCE = 60  # seconds without a byte after which a connection counts as lost
PERIOD = 2  # seconds after which the server answers at the latest, and in which an island shows that it lives
HEADER_LIMIT = 2 ** 24  # bytes of JSON in a message
PAYLOAD_LIMIT = 2 ** 38  # bytes of a payload
CHUNK = 2 ** 20  # bytes that are sent or received at a time


class Refused(OSError):
    """The other end does not want this one: another secret, other settings."""


# --- messages -----------------------------------------------------------------------------------------------

def read_secret():
    """The environment variable KILOGPT_SECRET as bytes; ValueError if it is missing or short."""
    secret = os.environ.get('KILOGPT_SECRET', '')
    if len(secret) < 16:
        found = f'has {len(secret)} characters' if secret else 'is not set'
        raise ValueError(f'the environment variable KILOGPT_SECRET {found}: set it to the same 16 or more '
                         'random characters for kilogpt.meet and for every island')
    return secret.encode()


def parse_address(text):
    """(host, port) of HOST:PORT; ValueError otherwise."""
    host, _, port = text.rpartition(':')
    if not host or not port.isdecimal() or not 0 < int(port) < 2 ** 16:
        raise ValueError(f'outer_store is {text!r}: use HOST:PORT, such as 10.0.0.1:29400')
    return host.strip('[]'), int(port)


def prove(peer, secret, is_server):
    """Show that this end of a connection knows the secret, and see that the other one does.

    Each end answers the other's random challenge by an HMAC of both challenges and of its own role, so that
    no answer can be used twice or sent back. The client answers first: a stranger learns nothing from the
    server. Refused if the other end does not know the secret, OSError if it is silent or no island.
    """
    deadline = time.monotonic() + HANDSHAKE

    def check_time():  # a byte now and then must not keep the connection open
        if time.monotonic() > deadline:
            raise TimeoutError('the other end is too slow')

    peer.settimeout(HANDSHAKE)
    mine = os.urandom(32)
    peer.sendall(MAGIC + mine)
    hello = receive_bytes(peer, len(MAGIC) + 32, check_time)
    if not hello.startswith(MAGIC):
        raise OSError('the other end is not a kiloGPT of this version')
    theirs = bytes(hello[len(MAGIC):])
    challenges = mine + theirs if is_server else theirs + mine

    def answer(role):
        return hmac.digest(secret, role + challenges, 'sha256')

    if not is_server:
        peer.sendall(answer(b'client'))
    expected = answer(b'client' if is_server else b'server')
    if not hmac.compare_digest(receive_bytes(peer, len(expected), check_time), expected):
        if is_server:
            peer.sendall(bytes(len(expected)))
        raise Refused('it has another KILOGPT_SECRET')
    if is_server:
        peer.sendall(answer(b'server'))
    peer.settimeout(SILENCE)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def send(peer, header, payloads=(), progress=lambda: None):
    """Send a message. header: a dict of plain values. payloads: buffers of bytes. progress: as of receive."""
    content = json.dumps(header | dict(sizes=[len(payload) for payload in payloads])).encode()
    for buffer in (struct.pack('!I', len(content)) + content, *payloads):
        view = memoryview(buffer)
        while view:  # sendall would have to send all of it within the timeout
            view = view[peer.send(view[:CHUNK]):]
            progress()


def receive(peer, progress=lambda: None):
    """(header, payloads) of a message; OSError if the connection is lost, ValueError if it is not a message.

    progress(): called whenever some bytes have arrived.
    """
    length, = struct.unpack('!I', receive_bytes(peer, 4, progress))
    if length > HEADER_LIMIT:
        raise ValueError(f'a message of {length} bytes')
    header = json.loads(receive_bytes(peer, length, progress))
    sizes = header.pop('sizes')
    if not all(type(size) is int and 0 <= size <= PAYLOAD_LIMIT for size in sizes):
        raise ValueError(f'payloads of {sizes} bytes')
    return header, [receive_bytes(peer, size, progress) for size in sizes]


def receive_bytes(peer, size, progress=lambda: None):
    """That many bytes, a bytearray; OSError if the connection ends before."""
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        count = peer.recv_into(view[:CHUNK])
        if not count:
            raise ConnectionResetError('the connection was closed')
        view = view[count:]
        progress()
    return buffer


# --- an island ----------------------------------------------------------------------------------------------

class Exchanged(NamedTuple):
    """What an exchange brought: {island: uint8 tensor} of the members, and the islands that join after it."""
    payloads: dict
    joining: list


class Joined(NamedTuple):
    """What an island takes over that joins: the giver's plain values, and its payload, a uint8 tensor."""
    state: dict
    payload: object


class Task:
    """One question to the server, which a thread asks until it has the answer and the island has taken it."""

    def __init__(self, question, payload=None):
        self.question, self.payload = question, payload
        self.answers = {}  # {mark: (header, payloads)}; a second one if the server was started again
        self.mark = 0  # of the newest answer
        self.is_taken = threading.Event()


class Meeting:
    """One rank's connection to the ranks at the same place of all other islands.

    address: HOST:PORT of the server. island: this island's number.
    place, places: the number of this rank among those of its island that exchange, and their number.
    job: a random name, the same on all ranks of the island. Of two jobs of one island the later counts.
    settings: plain values in which all islands must agree, with `islands` and `outer_timeout` among them.
    number, history: the next exchange, and the `history` of a checkpoint; 0 and () at the beginning.
    say(text): prints.
    ValueError if the secret is missing; `hello` raises it if the server cannot be reached or refuses.

    All ranks of an island must act alike: they take a result only when `done()` is the same on all.
    """

    def __init__(self, address, island, place, places, job, settings, number=0, history=(), say=print):
        self.address, self.secret = parse_address(address), read_secret()
        self.introduction = dict(island=island, place=place, job=job, settings=settings | dict(places=places))
        self.island, self.places, self.say = island, places, say
        self.position = number, list(history or (0, ''))  # the next exchange, and which exchanges led to it
        self.answered = time.monotonic()  # when a byte came from the server last, or went there
        self.is_silent = False  # whether that has been said
        self.task, self.mark = None, 0
        self.is_member = False  # whether others may count on this island
        self.giving = None  # the thread of `give`

    @property
    def history(self):
        """What a checkpoint keeps beside the number of the next exchange."""
        return self.position[1]

    def hello(self, patience=10):
        """Whether this island continues from what it has; False: it has to `join`, since others are ahead."""
        deadline = time.monotonic() + patience
        while True:
            try:
                with self._connect() as peer:
                    send(peer, self._request('hello'))
                    header, _ = receive(peer)
                self._check(header)
                break
            except Refused as error:
                raise ValueError(f'outer_store={self._name()} refuses this island: {error}') from None
            except (OSError, ValueError) as error:
                if time.monotonic() > deadline:
                    raise ValueError(f'outer_store={self._name()} cannot be reached ({error}): start '
                                     'python -m kilogpt.meet there, or set another --outer_store') from None
                time.sleep(0.5)
        self.answered = time.monotonic()
        self.is_member = header['status'] == 'start'
        if self.introduction['place'] == 0:
            threading.Thread(target=self._stay_present, daemon=True).start()
        return self.is_member

    def start(self, number, payload):
        """Begin exchange `number` with this rank's payload, a 1-D uint8 CPU tensor, which must not change."""
        assert number == self.position[0]
        self._begin(Task('exchange', memoryview(payload.numpy())))

    def join(self):
        """Begin to wait for the next exchange of the others, and for the state to take over after it."""
        self.is_member = False
        self._begin(Task('join'))

    def done(self):
        """0, or the number of the answer that has arrived: the ranks of an island must compare these."""
        self.mark = self.task.mark
        return self.mark

    def result(self):
        """Take the answer that the last `done()` told of, which is the same on all ranks of the island.

        After `start`: Exchanged, or None if others went on without this island, which has to `join`.
        After `join`: Joined, or None if nobody is ahead any more: the island continues from what it has.
        """
        task, self.task = self.task, None
        task.is_taken.set()
        header, payloads = task.answers[self.mark]
        if header['status'] == 'behind':
            return None
        self.is_member = True
        if header['status'] == 'start':
            return None
        self.position = header['number'], header['history']
        if header['status'] == 'state':
            return Joined(header['state'], _as_tensor(payloads[0]))
        found = dict(zip(header['members'], map(_as_tensor, payloads)))
        if len(payloads) < len(header['members']):  # all but this island's own
            others = [island for island in header['members'] if island != self.island]
            found = dict(zip(others, map(_as_tensor, payloads)))
            found[self.island] = _as_tensor(task.payload)
        return Exchanged({island: found[island] for island in sorted(found)}, header['joining'])

    def give(self, state, payload):
        """Send the state after the last exchange, for the islands that join, while training continues.

        state: plain values. payload: a uint8 CPU tensor, which must not change. After the next exchange the
        state is out of date, and no longer sent.
        """
        self.giving = threading.Thread(target=self._give, args=(self.position, state, payload), daemon=True)
        self.giving.start()

    def leave(self):
        """Wait until a state that is being given has arrived, for SILENCE seconds at most."""
        if self.giving:
            self.giving.join(SILENCE)

    def seconds_silent(self):
        """Seconds since the server took or sent a byte, while it is being asked."""
        return time.monotonic() - self.answered

    # --- in threads -----------------------------------------------------------------------------------------

    def _begin(self, task):
        self.task, self.answered = task, time.monotonic()
        threading.Thread(target=self._work, args=(task,), daemon=True).start()

    def _work(self, task):
        """Ask until there is an answer; where an island has several ranks, until all have the same one."""
        while not task.is_taken.is_set():
            try:
                with self._connect() as peer:
                    while not task.is_taken.is_set() and not (task.mark and self.places == 1):
                        self._ask(peer, task)
                    return
            except (OSError, ValueError) as error:
                self._say_silent(error)
                task.is_taken.wait(1)

    def _ask(self, peer, task):
        send(peer, self._request(task.question, have=task.mark))
        header, payloads = receive(peer, self._note_progress)
        self._check(header)
        if self.is_silent:
            self.is_silent = False
            self.say(f'outer_store {self._name()} answers again')
        if header['status'] == 'send':
            send(peer, self._request('payload'), [task.payload], self._note_progress)
        elif header['status'] == 'same':  # another rank of this island does not have it yet
            task.is_taken.wait(PERIOD)
        elif header['status'] != 'wait':
            task.answers[header['mark']] = header, payloads
            task.mark = header['mark']

    def _stay_present(self):
        """Tell the server in every period that this island lives, and how far it is."""
        while True:
            try:
                with self._connect() as peer:
                    while True:
                        if self.is_member:
                            send(peer, self._request('here'))
                            self._check(receive(peer)[0])
                        time.sleep(PERIOD)
            except (OSError, ValueError):
                time.sleep(PERIOD)

    def _give(self, position, state, payload):
        request = dict(kind='state', number=position[0], history=position[1], state=state)
        while position == self.position:
            try:
                with self._connect() as peer:
                    send(peer, request, [memoryview(payload.numpy())])
                    self._check(receive(peer)[0])
                return
            except (OSError, ValueError) as error:
                self._say_silent(error)
                time.sleep(1)

    def _connect(self):
        """A socket to the server, which has proved that it knows the secret; introduces this rank."""
        peer = socket.create_connection(self.address, HANDSHAKE)
        try:
            prove(peer, self.secret, is_server=False)
            send(peer, self.introduction)
        except BaseException:
            peer.close()
            raise
        return peer

    def _request(self, kind, **fields):
        number, history = self.position
        return dict(kind=kind, number=number, history=history, **fields)

    def _note_progress(self):
        self.answered = time.monotonic()

    def _check(self, header):
        if header['status'] == 'refused':
            raise Refused(header['reason'])

    def _say_silent(self, error):
        if not self.is_silent:
            self.is_silent = True
            self.say(f'outer_store {self._name()} does not answer ({error}): trying again')

    def _name(self):
        return '{}:{}'.format(*self.address)


def _as_tensor(buffer):
    import torch  # slow, and not needed by the server
    return torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else torch.empty(0, dtype=torch.uint8)
