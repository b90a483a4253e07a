r"""The server through which islands that are jobs of their own exchange parameters.

    export KILOGPT_SECRET=$(openssl rand -hex 16)     # the same for this command and for every island
    python -m kilogpt.islands --port=29400

    torchrun --nproc_per_node=8 train.py --islands=3 --island=0 --outer_store=HOST:29400 ...   # and 1, and 2

The server decides which islands take part in an exchange, so that all of them act on the same decision. It
keeps the payloads of the last exchange in memory and nothing on disk: after a restart, it learns from the
islands which exchange comes next. It needs no GPU and no PyTorch. See docs/islands.md.
"""
import argparse
import contextlib
import secrets
import socket
import sys
import threading
import time
from typing import NamedTuple

from kilogpt.configurator import exit_on_error
from kilogpt.islands.client import PERIOD, Refused, authenticate, read_secret, receive, send

MAX_CONNECTIONS = 10_000  # each connection has a thread
ABSENCE_TIMEOUT = 10  # seconds without a message after which an island counts as absent; PERIOD is usual


class Decision(NamedTuple):
    """An exchange that has been decided."""
    position: list  # that of its members before the exchange
    members: list
    joining: list
    payloads: dict  # {island: (digest, bytes)}


class Coordinator:
    """What the islands of one run have told the server, and what the server decides from it.

    A position is [the number of the next exchange, the history before it]. A history is [the sum of the
    numbers of members of all exchanges so far, a random name of the last exchange]. If two islands have
    different histories, the greater one counts: the server takes it over, and the island with the smaller one
    has to join. This happens after the server was killed, since islands may have finished an exchange that
    the new server does not know.
    """

    def __init__(self, say=print):
        self.say = say
        self.changed = threading.Condition()
        self.start_time = time.monotonic()
        self.settings = None  # the settings of the first island; the others must have the same
        self.jobs = {}  # {island: name of its latest job}
        self.position = None  # the exchange under way, and the history before it
        self.expected = set()  # islands that should take part in the exchange under way
        self.payloads = {}  # {island: (digest, bytes)} that have arrived for it
        self.deadline = None  # when to decide without the missing islands; set once a payload has arrived
        self.last = None  # the Decision of the previous exchange
        self.state = None  # (state, payload) after that exchange, for the islands that join
        self.last_seen = {}  # {island: time of the last message of a member}
        self.join_requests = {}  # {island: (time, position)}

    def answer(self, introduction, request, payloads):
        """(header, payloads) of the answer to a request; Refused if the island does not belong to this run.

        An answer with the status 'send' asks for the same request again, with its payload.
        """
        island, kind, position = introduction['island'], request['kind'], request['position']
        with self.changed:
            self._check_settings(island, introduction['settings'])
            if kind == 'hello':
                self.jobs[island] = introduction['job']
            if self.jobs.setdefault(island, introduction['job']) != introduction['job']:
                raise Refused(f'another job has come as island {island}: each needs an --island of its own')
            if kind in ('hello', 'here'):
                return self._answer_sign_of_life(island, position), []
            if kind == 'state':
                return self._answer_state(position, request['state'], payloads), []
            if kind == 'exchange' and payloads and position == self.position:
                self._store_payload(island, request['digest'], payloads[0])
            deadline = time.monotonic() + PERIOD
            while True:
                if kind == 'exchange':
                    header, payloads = self._answer_exchange(island, position, request['digest'])
                else:
                    header, payloads = self._answer_join(island, position)
                now = time.monotonic()
                if header['status'] != 'wait' or now >= deadline:
                    return header, payloads
                until = min(deadline, self.deadline or deadline)
                self.changed.wait(max(0.01, until - now))

    # --- with the lock held ---------------------------------------------------------------------------------

    def _check_settings(self, island, settings):
        self.settings = self.settings or settings
        for key in sorted(settings.keys() | self.settings.keys()):
            ours, theirs = self.settings.get(key), settings.get(key)
            if ours != theirs:
                raise Refused(f'{key} is {theirs!r} here and {ours!r} on the island that came first')
        if not 0 <= island < settings['islands']:
            raise Refused(f'island is {island}, but islands is {settings["islands"]}')

    def _answer_sign_of_life(self, island, position):
        """Tell an island whether it continues from its own state ('start') or has to join ('join')."""
        self._catch_up(position)
        if position != self.position and not self._was_decided(island, position):
            self.last_seen.pop(island, None)
            return dict(status='join')
        self.last_seen[island] = time.monotonic()
        self.join_requests.pop(island, None)
        return dict(status='start')

    def _was_decided(self, island, position):
        """Whether an island took part in the last exchange but does not have the result yet."""
        return self.last is not None and island in self.last.members and position == self.last.position

    def _catch_up(self, position):
        """Take over the position of an island whose history is greater."""
        if self.position is None or position[1] > self.position[1]:
            self._move_to(position)

    def _move_to(self, position):
        """Continue at another exchange, as if the server had just started."""
        if self.position is not None:
            self.say(f'continuing at exchange {position[0]}, which an island that is ahead has reached')
        self.position = position
        self.expected = set(range(self.settings['islands']))
        self.payloads, self.deadline, self.last, self.state = {}, None, None, None
        self.changed.notify_all()

    def _store_payload(self, island, digest, payload):
        sizes = {len(other) for _, other in self.payloads.values()}
        if sizes - {len(payload)}:
            raise Refused(f'its payload has {len(payload)} bytes, those of other islands {sizes.pop()}')
        self.payloads[island] = digest, payload
        self.changed.notify_all()

    def _answer_exchange(self, island, position, digest):
        """(header, payloads) for an island in an exchange. digest: that of its payload."""
        self._catch_up(position)
        self.last_seen[island] = time.monotonic()
        if position == self.position:
            stored, _ = self.payloads.get(island, (None, None))
            if stored != digest:
                return dict(status='send'), []
            self._decide_if_complete()
        if self._was_decided(island, position):
            # An island that was killed and restarted may have computed another payload than the others got.
            payloads = {member: payload for member, (its_digest, payload) in self.last.payloads.items()
                        if member != island or its_digest != digest}
            header = dict(status='decided', position=self.position, joining=self.last.joining)
            return header | dict(islands=list(payloads)), list(payloads.values())
        if position == self.position:
            return dict(status='wait'), []
        self.last_seen.pop(island)
        return dict(status='behind'), []

    def _decide_if_complete(self):
        """Decide the exchange under way if all expected islands have sent their payloads, or time is up."""
        now = time.monotonic()
        members = set(self.payloads)
        if self.deadline is None:
            self.deadline = now + self.settings['outer_timeout']
        joining = self._recent_join_requests(now).keys() - members
        missing = self.expected - members - joining
        if missing and now < self.deadline:
            return
        number, (total, _) = self.position
        if missing:
            self.say(f'exchange {number}: without islands {sorted(missing)}')
        if joining:
            self.say(f'exchange {number}: islands {sorted(joining)} join')
        self.last = Decision(self.position, sorted(members), sorted(joining), self.payloads)
        self.position = [number + 1, [total + len(members), secrets.token_hex(6)]]
        self.expected = members | joining
        self.payloads, self.deadline, self.state = {}, None, None
        for island in self.last_seen.keys() - members:
            del self.last_seen[island]
        self.changed.notify_all()

    def _recent_join_requests(self, now):
        """{island: position} of the islands that wait to join."""
        return {island: position for island, (when, position) in self.join_requests.items()
                if now - when < ABSENCE_TIMEOUT}

    def _answer_state(self, position, state, payloads):
        """Take the state for islands that join from a member, unless it is out of date."""
        if self.last is None or position != self.position:
            return dict(status='thanks')
        if not payloads:
            return dict(status='send')
        self.state = state, payloads[0]
        self.changed.notify_all()
        return dict(status='thanks')

    def _answer_join(self, island, position):
        """(header, payloads) for an island that waits to join."""
        now = time.monotonic()
        if self.position is not None and position[1] > self.position[1]:
            self._move_to(position)
        if position == self.position:
            self.join_requests.pop(island, None)
            self.last_seen[island] = now
            return dict(status='start'), []
        self.last_seen.pop(island, None)
        if self.last and self.state and island in self.last.joining:
            self.join_requests.pop(island, None)
            state, payload = self.state
            return dict(status='state', position=self.position, state=state), [payload]
        self.join_requests[island] = now, position
        self._follow_furthest_if_alone(now)
        return dict(status='wait'), []

    def _follow_furthest_if_alone(self, now):
        """If no member is left, continue at the exchange of the furthest island that waits to join."""
        timeout = max(self.settings['outer_timeout'], ABSENCE_TIMEOUT)
        alive = [when for when in self.last_seen.values() if now - when < timeout]
        if not alive and now - self.start_time >= timeout:
            waiting = self._recent_join_requests(now).values()
            self._move_to(max(waiting, key=lambda position: position[1]))


class RefusalLog:
    """Counts the connections that were refused, and prints some of them."""

    def __init__(self):
        self.count = 0

    def add(self, address, reason):
        """Note a refusal. The 1st, 2nd, 4th, 8th, ... are printed, so that strangers cannot fill the log."""
        self.count += 1
        if self.count & (self.count - 1) == 0:
            print(f'refused {address[0]}: {reason} ({self.count} refused so far)', flush=True)


def serve(connection, address, secret, coordinator, refusals):
    """Answer the requests of an island until its connection ends."""
    with connection, contextlib.suppress(OSError):
        try:
            authenticate(connection, secret, is_server=True)
        except OSError as error:
            return refusals.add(address, error)
        try:
            introduction, _ = receive(connection)
            while True:
                request, payloads = receive(connection)
                try:
                    answer = coordinator.answer(introduction, request, payloads)
                except Refused as error:
                    refusals.add(address, error)
                    answer = dict(status='refused', reason=str(error)), []
                send(connection, *answer)
        except OSError:
            raise
        except Exception as error:  # a bad message from one who knows the secret ends that connection alone
            refusals.add(address, f'a message that an island does not send ({error!r})')


def main():
    """Run the server until Ctrl-C."""
    parser = argparse.ArgumentParser('python -m kilogpt.islands', description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--port', type=int, default=29400, help='port to listen at (29400)')
    parser.add_argument('--host', default='127.0.0.1',
                        help='address to listen at: 127.0.0.1 for tunnels (the default), 0.0.0.0 for all')
    options = parser.parse_args()
    with exit_on_error():
        secret = read_secret()
        try:
            listener = socket.create_server((options.host, options.port), backlog=128)
        except (OSError, OverflowError) as error:
            raise ValueError(f'cannot listen at {options.host}:{options.port} ({error}): '
                             'set another --port or --host') from None
    print(f'serving islands at {options.host}:{options.port}', flush=True)
    coordinator, refusals = Coordinator(say=lambda text: print(text, flush=True)), RefusalLog()
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            try:
                connection, address = listener.accept()
            except OSError as error:  # for example too many open files, until some connections are closed
                print(f'warning: {error}', file=sys.stderr, flush=True)
                time.sleep(1)
                continue
            if threading.active_count() > MAX_CONNECTIONS:
                connection.close()
                continue
            arguments = connection, address, secret, coordinator, refusals
            threading.Thread(target=serve, args=arguments, daemon=True).start()
