"""The client of an island that is a job of its own: how its processes talk to the server of server.py.

Client and server first prove to each other that they know KILOGPT_SECRET. After that, a message is the length
of a JSON object, the object, and raw bytes whose sizes the object names. Nothing that arrives is unpickled.
Messages are neither encrypted nor signed, which is the task of a tunnel (docs/islands.md).
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
HANDSHAKE_TIMEOUT = 10  # seconds in which the other end must prove that it knows the secret
SILENCE_TIMEOUT = 60  # seconds without a byte after which a connection counts as lost
PERIOD = 2  # seconds within which the server answers each request, and an island sends a sign of life
HEADER_LIMIT = 2 ** 24  # bytes of JSON in a message
PAYLOAD_LIMIT = 2 ** 38  # bytes of a payload
CHUNK = 2 ** 20  # bytes to send or receive in one call


class Refused(OSError):
    """The other end refuses this one, which has another secret or other settings."""


# --- messages -----------------------------------------------------------------------------------------------

def read_secret():
    """The environment variable KILOGPT_SECRET as bytes; ValueError if it is missing or short."""
    secret = os.environ.get('KILOGPT_SECRET', '')
    if len(secret) < 16:
        problem = f'has {len(secret)} characters' if secret else 'is not set'
        raise ValueError(f'the environment variable KILOGPT_SECRET {problem}: set it to the same 16 or more '
                         'random characters for python -m kilogpt.islands and for every island')
    return secret.encode()


def parse_address(text):
    """(host, port) of HOST:PORT; ValueError otherwise."""
    host, _, port = text.rpartition(':')
    if not host or not port.isdecimal() or not 0 < int(port) < 2 ** 16:
        raise ValueError(f'outer_store is {text!r}: use HOST:PORT, such as 10.0.0.1:29400')
    return host.strip('[]'), int(port)


def authenticate(connection, secret, is_server):
    """Prove to the other end of a connection that this end knows the secret, and check its proof.

    Each end answers the random challenge of the other by an HMAC of both challenges and of its own role, so
    that no answer can be used twice or sent back. The client answers first: a stranger learns nothing from
    the server. Refused if the other end does not know the secret, OSError if it is silent or speaks
    otherwise.
    """
    deadline = time.monotonic() + HANDSHAKE_TIMEOUT

    def check_deadline():  # single bytes, sent at intervals, must not keep the connection open
        if time.monotonic() > deadline:
            raise TimeoutError('the other end is too slow')

    connection.settimeout(HANDSHAKE_TIMEOUT)
    own_challenge = os.urandom(32)
    connection.sendall(MAGIC + own_challenge)
    greeting = receive_bytes(connection, len(MAGIC) + 32, check_deadline)
    if not greeting.startswith(MAGIC):
        raise OSError('the other end is not a kiloGPT of this version')
    other_challenge = bytes(greeting[len(MAGIC):])
    challenges = own_challenge + other_challenge if is_server else other_challenge + own_challenge

    def answer(role):
        return hmac.digest(secret, role + challenges, 'sha256')

    if not is_server:
        connection.sendall(answer(b'client'))
    expected = answer(b'client' if is_server else b'server')
    if not hmac.compare_digest(receive_bytes(connection, len(expected), check_deadline), expected):
        if is_server:
            connection.sendall(bytes(len(expected)))
        raise Refused('it has another KILOGPT_SECRET')
    if is_server:
        connection.sendall(answer(b'server'))
    connection.settimeout(SILENCE_TIMEOUT)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def send(connection, header, payloads=(), on_progress=lambda: None):
    """Send a message. header: a dict of plain values. payloads: buffers of bytes.

    on_progress(): called whenever some bytes have left.
    """
    content = json.dumps(header | dict(sizes=[len(payload) for payload in payloads])).encode()
    for buffer in (struct.pack('!I', len(content)) + content, *payloads):
        view = memoryview(buffer)
        while view:  # sendall would have to send the whole buffer within the timeout
            view = view[connection.send(view[:CHUNK]):]
            on_progress()


def receive(connection, on_progress=lambda: None):
    """(header, payloads) of a message; OSError if the connection is lost, ValueError if it is not a message.

    on_progress(): called whenever some bytes have arrived.
    """
    length, = struct.unpack('!I', receive_bytes(connection, 4, on_progress))
    if length > HEADER_LIMIT:
        raise ValueError(f'a message of {length} bytes')
    header = json.loads(receive_bytes(connection, length, on_progress))
    sizes = header.pop('sizes')
    if not all(type(size) is int and 0 <= size <= PAYLOAD_LIMIT for size in sizes):
        raise ValueError(f'payloads of {sizes} bytes')
    return header, [receive_bytes(connection, size, on_progress) for size in sizes]


def receive_bytes(connection, size, on_progress=lambda: None):
    """Receive `size` bytes, as a bytearray; OSError if the connection ends early."""
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        count = connection.recv_into(view[:CHUNK])
        if not count:
            raise ConnectionResetError('the connection was closed')
        view = view[count:]
        on_progress()
    return buffer


# --- an island ----------------------------------------------------------------------------------------------

class ExchangeResult(NamedTuple):
    """The result of an exchange: {island: uint8 tensor} of its members, and the islands that join."""
    payloads: dict
    joining: list


class JoinState(NamedTuple):
    """What a joining island takes over from a member: plain values, and a payload, a uint8 tensor."""
    state: dict
    payload: object


class PendingRequest:
    """A request that a thread repeats until the island has taken the answer. kind: 'exchange' or 'join'."""

    def __init__(self, kind, payload=None):
        self.kind, self.payload = kind, payload
        self.answers = {}  # {mark: (header, payloads)}; several if the server was restarted
        self.mark = 0  # the mark of the newest answer
        self.is_taken = threading.Event()


class IslandClient:
    """The connection of one rank to the ranks of the other islands that hold the same part of the parameters.

    address: HOST:PORT of the server. island: the number of this island.
    place, places: the ranks of an island that exchange have the places 0, 1, ..., places - 1.
    job: a random name, the same on all ranks of the island. Of two jobs of one island, the later one counts.
    settings: plain values in which all islands must agree, `islands` and `outer_timeout` among them.
    number, history: the next exchange, and the `history` that a checkpoint kept; 0 and () at the beginning.
    say(text): prints.
    ValueError if the secret is missing; `register` raises it if the server cannot be reached or refuses.

    Each answer of the server has a mark, a number that names the decision in it: after a restart, the server
    may decide an exchange again. All ranks of an island must take an answer of the same mark.
    """

    def __init__(self, address, island, place, places, job, settings, number=0, history=(), say=print):
        self.address, self.secret = parse_address(address), read_secret()
        self.introduction = dict(island=island, place=place, job=job, settings=settings | dict(places=places))
        self.island, self.places, self.say = island, places, say
        self.position = number, list(history or (0, ''))  # the next exchange, and the history before it
        self.last_progress = time.monotonic()  # when the server last sent or took a byte
        self.is_waiting_for_server = False  # whether the log says that the server does not answer
        self.request, self.mark = None, 0
        self.is_member = False  # whether the other islands may expect this one at the next exchange
        self.state_sender = None  # the thread of `send_state`

    @property
    def history(self):
        """What a checkpoint keeps of the exchanges so far, besides the number of the next one."""
        return self.position[1]

    def register(self, patience=10):
        """Introduce this rank to the server.

        Returns whether the island continues from its own state. If not, other islands are ahead of it, and it
        has to join them. patience: seconds in which the server must be reached.
        """
        deadline = time.monotonic() + patience
        while True:
            try:
                with self._connect() as connection:
                    send(connection, self._message('hello'))
                    header, _ = receive(connection)
                self._raise_if_refused(header)
                break
            except Refused as error:
                raise ValueError(f'outer_store={self._name()} refuses this island: {error}') from None
            except (OSError, ValueError) as error:
                if time.monotonic() > deadline:
                    raise ValueError(
                        f'outer_store={self._name()} cannot be reached ({error}): start '
                        'python -m kilogpt.islands there, or set another --outer_store') from None
                time.sleep(0.5)
        self.last_progress = time.monotonic()
        self.is_member = header['status'] == 'start'
        if self.introduction['place'] == 0:
            threading.Thread(target=self._send_signs_of_life, daemon=True).start()
        return self.is_member

    def start(self, number, payload):
        """Start exchange `number` with this rank's payload, a 1-D uint8 CPU tensor that must not change."""
        assert number == self.position[0]
        self._start_request(PendingRequest('exchange', memoryview(payload.numpy())))

    def start_joining(self):
        """Start to wait for the next exchange of the others, and for the state to take over after it."""
        self.is_member = False
        self._start_request(PendingRequest('join'))

    def arrived_mark(self):
        """The mark of the newest answer, or 0 without one. The ranks of an island must compare these."""
        self.mark = self.request.mark
        return self.mark

    def result(self):
        """Take the answer of the last `arrived_mark`, which must be the same on all ranks of the island.

        After `start`: an ExchangeResult, or None if the others continued without this island, which has to
        join. After `start_joining`: a JoinState, or None if nobody is ahead any more, so that the island
        continues from its own state.
        """
        request, self.request = self.request, None
        request.is_taken.set()
        header, payloads = request.answers[self.mark]
        if header['status'] == 'behind':
            return None
        self.is_member = True
        if header['status'] == 'start':
            return None
        self.position = header['number'], header['history']
        if header['status'] == 'state':
            return JoinState(header['state'], _as_tensor(payloads[0]))
        members = header['members']
        if len(payloads) < len(members):  # the answer leaves out the island's own payload
            others = [island for island in members if island != self.island]
            by_island = dict(zip(others, map(_as_tensor, payloads)))
            by_island[self.island] = _as_tensor(request.payload)
        else:
            by_island = dict(zip(members, map(_as_tensor, payloads)))
        return ExchangeResult({island: by_island[island] for island in sorted(by_island)}, header['joining'])

    def send_state(self, state, payload):
        """Send the state after the last exchange to the islands that join, while training continues.

        state: plain values. payload: a uint8 CPU tensor, which must not change. After the next exchange the
        state is out of date, and is not sent any more.
        """
        self.state_sender = threading.Thread(target=self._send_state, args=(self.position, state, payload),
                                             daemon=True)
        self.state_sender.start()

    def wait_until_state_is_sent(self):
        """Wait until the server has the state of `send_state`, for SILENCE_TIMEOUT seconds at most."""
        if self.state_sender:
            self.state_sender.join(SILENCE_TIMEOUT)

    def seconds_silent(self):
        """Seconds since the server last sent or took a byte, while a request is pending."""
        return time.monotonic() - self.last_progress

    # --- in threads -----------------------------------------------------------------------------------------

    def _start_request(self, request):
        self.request, self.last_progress = request, time.monotonic()
        threading.Thread(target=self._repeat, args=(request,), daemon=True).start()

    def _repeat(self, request):
        """Repeat a request until it is answered, or, with several ranks, until the answer is taken."""
        while not request.is_taken.is_set():
            try:
                with self._connect() as connection:
                    while not request.is_taken.is_set() and not (request.mark and self.places == 1):
                        self._ask(connection, request)
                    return
            except (OSError, ValueError) as error:
                self._report_silence(error)
                request.is_taken.wait(1)

    def _ask(self, connection, request):
        send(connection, self._message(request.kind, have=request.mark))
        header, payloads = receive(connection, self._note_progress)
        self._raise_if_refused(header)
        if self.is_waiting_for_server:
            self.is_waiting_for_server = False
            self.say(f'outer_store {self._name()} answers again')
        if header['status'] == 'send':
            send(connection, self._message('payload'), [request.payload], self._note_progress)
        elif header['status'] == 'same':  # another rank of this island is still waiting for the answer
            request.is_taken.wait(PERIOD)
        elif header['status'] != 'wait':
            request.answers[header['mark']] = header, payloads
            request.mark = header['mark']

    def _send_signs_of_life(self):
        """Tell the server every PERIOD that this island is alive, and at which exchange."""
        while True:
            try:
                with self._connect() as connection:
                    while True:
                        if self.is_member:
                            send(connection, self._message('here'))
                            self._raise_if_refused(receive(connection)[0])
                        time.sleep(PERIOD)
            except (OSError, ValueError):
                time.sleep(PERIOD)

    def _send_state(self, position, state, payload):
        message = dict(kind='state', number=position[0], history=position[1], state=state)
        while position == self.position:
            try:
                with self._connect() as connection:
                    send(connection, message, [memoryview(payload.numpy())])
                    self._raise_if_refused(receive(connection)[0])
                return
            except (OSError, ValueError) as error:
                self._report_silence(error)
                time.sleep(1)

    def _connect(self):
        """Connect and introduce this rank to the server; returns the socket."""
        connection = socket.create_connection(self.address, HANDSHAKE_TIMEOUT)
        try:
            authenticate(connection, self.secret, is_server=False)
            send(connection, self.introduction)
        except BaseException:
            connection.close()
            raise
        return connection

    def _message(self, kind, **fields):
        number, history = self.position
        return dict(kind=kind, number=number, history=history, **fields)

    def _note_progress(self):
        self.last_progress = time.monotonic()

    def _raise_if_refused(self, header):
        if header['status'] == 'refused':
            raise Refused(header['reason'])

    def _report_silence(self, error):
        if not self.is_waiting_for_server:
            self.is_waiting_for_server = True
            self.say(f'outer_store {self._name()} does not answer ({error}): trying again')

    def _name(self):
        return '{}:{}'.format(*self.address)


def _as_tensor(buffer):
    import torch  # here, since torch is slow to import and the server does not need it
    return torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else torch.empty(0, dtype=torch.uint8)
