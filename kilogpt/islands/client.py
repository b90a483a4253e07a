"""The client of an island that is a job of its own: how it talks to the server of server.py.

Client and server first prove to each other that they know KILOGPT_SECRET. After that, a message is the length
of a JSON object, the object, and raw bytes whose sizes the object names. Nothing that arrives is unpickled.
Messages are neither encrypted nor signed, which is the task of a tunnel (docs/islands.md).
"""
import hashlib
import hmac
import json
import os
import socket
import struct
import threading
import time
import uuid

MAGIC = b'kiloGPT islands 2\n'
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

class IslandClient:
    """The connection of an island to the server, through which it exchanges with the others.

    address: HOST:PORT of the server. island: the number of this island.
    settings: plain values in which all islands must agree, `islands` and `outer_timeout` among them.
    number, history: the next exchange, and the `history` that a checkpoint kept; 0 and () at the beginning.
    say(text): prints.
    ValueError if the secret is missing; `register` raises it if the server cannot be reached or refuses.
    """

    def __init__(self, address, island, settings, number=0, history=(), say=print):
        self.address, self.secret = parse_address(address), read_secret()
        # Of two jobs of one island, the one that has registered later counts.
        self.introduction = dict(island=island, job=uuid.uuid4().hex, settings=settings)
        self.island, self.say = island, say
        self.position = [number, list(history or (0, ''))]  # the next exchange, and the history before it
        self.last_progress = time.monotonic()  # when the server last sent or took a byte
        self.is_waiting_for_server = False  # whether the log says that the server does not answer
        self.is_member = False  # whether the other islands may expect this one at the next exchange
        self.payload = None  # what this island has sent in the last exchange
        self.answer = None  # (header, payloads) for the request under way, once they have arrived
        self.state_sender = None  # the thread of `send_state`

    @property
    def history(self):
        """What a checkpoint keeps of the exchanges so far, besides the number of the next one."""
        return self.position[1]

    def register(self, patience=10):
        """Introduce this island to the server.

        Returns whether the island continues from its own state. If not, other islands are ahead of it, and it
        has to join them. patience: seconds in which the server must be reached.
        """
        deadline = time.monotonic() + patience
        while True:
            try:
                with self._connect() as connection:
                    header, _ = self._ask(connection, dict(kind='hello', position=self.position))
                break
            except Refused as error:
                raise ValueError(f'outer_store={self._name()} refuses this island: {error}') from None
            except (OSError, ValueError) as error:
                if time.monotonic() > deadline:
                    raise ValueError(
                        f'outer_store={self._name()} cannot be reached ({error}): start '
                        'python -m kilogpt.islands there, or set another --outer_store') from None
                time.sleep(0.5)
        self.is_member = header['status'] == 'start'
        threading.Thread(target=self._send_signs_of_life, daemon=True).start()
        return self.is_member

    def start(self, number, payload):
        """Start exchange `number` with a payload, a 1-D uint8 CPU tensor that must not change."""
        assert number == self.position[0]
        self.payload = payload
        self._start_request('exchange', payload)

    def start_joining(self):
        """Start to wait for the next exchange of the others, and for the state to take over after it."""
        self.is_member = False
        self._start_request('join')

    def has_arrived(self):
        """Whether the server has answered what was started."""
        return self.answer is not None

    def result(self):
        """Take the answer that has arrived: (facts, payloads), the payloads as uint8 tensors.

        After `start`: the facts are `islands`, whose payloads these are, and `joining`. They are None if the
        others continued without this island, which has to join.
        After `start_joining`: the facts are the state to take over, with one payload. They are None if nobody
        is ahead any more, so that the island continues from its own state.
        """
        header, payloads = self.answer
        payloads = [_as_tensor(payload) for payload in payloads]
        self.is_member = header['status'] != 'behind'
        if header['status'] in ('behind', 'start'):
            return None, []
        self.position = header['position']
        if header['status'] == 'state':
            return header['state'], payloads
        by_island = dict(zip(header['islands'], payloads))
        by_island.setdefault(self.island, self.payload)  # which the server does not send back
        islands = sorted(by_island)
        return dict(islands=islands, joining=header['joining']), [by_island[island] for island in islands]

    def send_state(self, state, payload):
        """Send the state after the last exchange to the islands that join, while training continues.

        state: plain values. payload: a uint8 CPU tensor, which must not change. After the next exchange the
        state is out of date, and is not sent any more.
        """
        position = self.position

        def is_wanted():
            return position == self.position

        self.state_sender = threading.Thread(target=self._request, daemon=True,
                                             args=('state', payload, is_wanted, dict(state=state)))
        self.state_sender.start()

    def wait_until_state_is_sent(self):
        """Wait until the server has the state of `send_state`, for SILENCE_TIMEOUT seconds at most."""
        if self.state_sender:
            self.state_sender.join(SILENCE_TIMEOUT)

    def seconds_silent(self):
        """Seconds since the server last sent or took a byte, while a request is pending."""
        return time.monotonic() - self.last_progress

    # --- in threads -----------------------------------------------------------------------------------------

    def _start_request(self, kind, payload=None):
        self.answer, self.last_progress = None, time.monotonic()

        def wait_for_answer():
            self.answer = self._request(kind, payload)

        threading.Thread(target=wait_for_answer, daemon=True).start()

    def _request(self, kind, payload=None, is_wanted=lambda: True, fields={}):
        """Repeat a request until it is answered; returns (header, payloads), or None if not wanted any more.

        The server asks for the payload unless it has one with this digest already.
        """
        message, parts = dict(kind=kind, position=self.position, **fields), []
        if payload is not None:
            parts = [memoryview(payload.numpy())]
            message |= dict(digest=hashlib.sha256(parts[0]).hexdigest())
        while is_wanted():
            try:
                with self._connect() as connection:
                    header, payloads = self._ask(connection, message)
                    while header['status'] in ('wait', 'send'):
                        is_asked = header['status'] == 'send'
                        header, payloads = self._ask(connection, message, parts if is_asked else ())
                return header, payloads
            except (OSError, ValueError) as error:
                if not self.is_waiting_for_server:
                    self.is_waiting_for_server = True
                    self.say(f'outer_store {self._name()} does not answer ({error}): trying again')
                time.sleep(1)
        return None

    def _send_signs_of_life(self):
        """Tell the server every PERIOD that this island is alive, and at which exchange."""
        while True:
            try:
                with self._connect() as connection:
                    while True:
                        if self.is_member:
                            message = dict(kind='here', position=self.position)
                            send(connection, message)
                            _raise_if_refused(receive(connection)[0])
                        time.sleep(PERIOD)
            except (OSError, ValueError):
                time.sleep(PERIOD)

    def _connect(self):
        """Connect and introduce this island to the server; returns the socket."""
        connection = socket.create_connection(self.address, HANDSHAKE_TIMEOUT)
        try:
            authenticate(connection, self.secret, is_server=False)
            send(connection, self.introduction)
        except BaseException:
            connection.close()
            raise
        return connection

    def _ask(self, connection, message, parts=()):
        """(header, payloads) of the server's answer to a message; Refused if it refuses this island."""
        send(connection, message, parts, self._note_progress)
        header, payloads = receive(connection, self._note_progress)
        _raise_if_refused(header)
        if self.is_waiting_for_server:
            self.is_waiting_for_server = False
            self.say(f'outer_store {self._name()} answers again')
        return header, payloads

    def _note_progress(self):
        self.last_progress = time.monotonic()

    def _name(self):
        return '{}:{}'.format(*self.address)


def _raise_if_refused(header):
    if header['status'] == 'refused':
        raise Refused(header['reason'])


def _as_tensor(buffer):
    import torch  # here, since torch is slow to import and the server does not need it
    return torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else torch.empty(0, dtype=torch.uint8)
