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
BEHIND, START = 1, 2  # the marks of answers that do not belong to an exchange


class Decision(NamedTuple):
    """An exchange that has been decided."""
    number: int
    history_before: list  # the history of its members before the exchange
    mark: int  # random, so that a server that was restarted does not give a second decision the same mark
    members: list
    joining: list
    payloads: dict  # {(island, place): bytes}


class Coordinator:
    """What the islands of one run have told the server, and what the server decides from it.

    A history is [the sum of the numbers of members of all exchanges so far, the mark of the last exchange].
    If two islands have different histories, the greater one counts: the server takes it over, and the island
    with the smaller one has to join. This happens after the server was killed, since islands may have
    finished an exchange that the new server does not know.
    """

    def __init__(self, say=print):
        self.say = say
        self.changed = threading.Condition()
        self.start_time = time.monotonic()
        self.settings = None  # the settings of the first island; the others must have the same
        self.jobs = {}  # {island: name of its latest job}
        self.number, self.history = None, [0, '']  # the exchange under way, and the history before it
        self.expected = set()  # islands that should take part in the exchange under way
        self.payloads = {}  # {(island, place): bytes} that have arrived for it
        self.deadline = None  # when to decide without the missing islands; set once one island is complete
        self.last = None  # the Decision of the previous exchange
        self.states = {}  # {place: (state, payload)} after that exchange, for the islands that join
        self.last_seen = {}  # {island: time of the last message of a member}
        self.join_requests = {}  # {(island, place): (time, history, number)}

    def admit(self, introduction):
        """Check the introduction of an island; Refused if the island does not belong to this run."""
        settings, island = introduction['settings'], introduction['island']
        with self.changed:
            self.settings = self.settings or settings
            for key in sorted(settings.keys() | self.settings.keys()):
                ours, theirs = self.settings.get(key), settings.get(key)
                if ours != theirs:
                    raise Refused(f'{key} is {theirs!r} here and {ours!r} on the island that came first')
            if not 0 <= island < settings['islands']:
                raise Refused(f'island is {island}, but islands is {settings["islands"]}')

    def answer(self, introduction, request, payloads, has_sent):
        """(header, payloads) of the answer to a request; None if the request does not expect an answer.

        has_sent: whether this connection has brought the payload of this rank for the exchange under way.
        """
        island, place, kind = introduction['island'], introduction['place'], request['kind']
        number, history = request['number'], request['history']
        with self.changed:
            if kind == 'hello':
                self.jobs[island] = introduction['job']
            if self.jobs.setdefault(island, introduction['job']) != introduction['job']:
                raise Refused(f'another job has come as island {island}: each needs an --island of its own')
            if kind == 'payload':
                if (number, history) == (self.number, self.history):
                    self._store_payload(island, place, payloads[0])
                return None
            if kind == 'state':
                if self.last and (number, history) == (self.number, self.history):
                    self.states[place] = request['state'], payloads[0]
                    self.changed.notify_all()
                return dict(status='thanks'), []
            if kind in ('hello', 'here'):
                return self._answer_sign_of_life(island, number, history), []
            return self._answer_when_decided(island, place, request, has_sent)

    # --- with the lock held ---------------------------------------------------------------------------------

    def _answer_when_decided(self, island, place, request, has_sent):
        """Answer an 'exchange' or a 'join': with the decision, or after PERIOD with the status 'wait'."""
        number, history, have = request['number'], request['history'], request['have']
        deadline = time.monotonic() + PERIOD
        while True:
            if request['kind'] == 'exchange':
                header, payloads = self._answer_exchange(island, place, number, history, have, has_sent)
            else:
                header, payloads = self._answer_join(island, place, number, history, have)
            now = time.monotonic()
            if header['status'] != 'wait' or now >= deadline:
                return header, payloads
            until = min(deadline, self.deadline or deadline)
            self.changed.wait(max(0.01, until - now))

    def _store_payload(self, island, place, payload):
        sizes = {len(other) for (_, other_place), other in self.payloads.items() if other_place == place}
        if sizes - {len(payload)}:
            raise Refused(f'its payload has {len(payload)} bytes, those of other islands {sizes.pop()}')
        self.payloads[island, place] = payload
        self.changed.notify_all()

    def _answer_sign_of_life(self, island, number, history):
        """Tell an island whether it continues from its own state ('start') or has to join ('join')."""
        self._catch_up(number, history)
        if not self._is_member(island, number, history):
            self.last_seen.pop(island, None)
            return dict(status='join')
        self.last_seen[island] = time.monotonic()
        for rank in [rank for rank in self.join_requests if rank[0] == island]:
            del self.join_requests[rank]
        return dict(status='start')

    def _is_member(self, island, number, history):
        if (number, history) == (self.number, self.history):
            return True
        return self._was_decided(island, number, history)

    def _was_decided(self, island, number, history):
        """Whether an island took part in the last exchange but does not have the result yet."""
        last = self.last
        if last is None or island not in last.members:
            return False
        return (number, history) == (last.number, last.history_before)

    def _catch_up(self, number, history):
        """Take over the position of an island whose history is greater."""
        if self.number is None or history > self.history:
            self._move_to(number, history)

    def _move_to(self, number, history):
        """Continue at another exchange, as if the server had just started."""
        if self.number is not None:
            self.say(f'continuing at exchange {number}, which an island that is ahead has reached')
        self.number, self.history = number, history
        self.expected = set(range(self.settings['islands']))
        self.payloads, self.deadline, self.last, self.states = {}, None, None, {}
        self.changed.notify_all()

    def _answer_exchange(self, island, place, number, history, have, has_sent):
        """(header, payloads) for a rank in an exchange. have: the mark of the answer that the rank has."""
        self._catch_up(number, history)
        self.last_seen[island] = time.monotonic()
        if (number, history) == (self.number, self.history):
            if (island, place) not in self.payloads:
                return dict(status='send'), []
            self._decide_if_complete()
        if self._was_decided(island, number, history):
            return self._decision_for(island, place, have, has_sent)
        if (number, history) == (self.number, self.history):
            return dict(status='wait'), []
        self.last_seen.pop(island)
        return dict(status='same' if have == BEHIND else 'behind', mark=BEHIND), []

    def _decision_for(self, island, place, have, has_sent):
        last = self.last
        if have == last.mark:
            return dict(status='same'), []
        # The answer includes the island's own payload, unless it came over this connection: an island that
        # was killed and restarted may have computed another payload.
        islands = [member for member in last.members if not (has_sent and member == island)]
        return (dict(status='decided', mark=last.mark, number=self.number, history=self.history,
                     members=last.members, joining=last.joining),
                [last.payloads[member, place] for member in islands])

    def _complete_islands(self, ranks):
        """The islands of which every place is among the ranks, pairs (island, place)."""
        places = range(self.settings['places'])
        return {island for island, _ in ranks if all((island, place) in ranks for place in places)}

    def _decide_if_complete(self):
        """Decide the exchange under way if all expected islands have sent their payloads, or time is up."""
        now = time.monotonic()
        members = self._complete_islands(self.payloads.keys())
        if not members:
            return
        if self.deadline is None:
            self.deadline = now + self.settings['outer_timeout']
        recent = {rank for rank, (when, *_) in self.join_requests.items() if now - when < ABSENCE_TIMEOUT}
        joining = self._complete_islands(recent) - members
        missing = self.expected - members - joining
        if missing and now < self.deadline:
            return
        if missing:
            self.say(f'exchange {self.number}: without islands {sorted(missing)}')
        if joining:
            self.say(f'exchange {self.number}: islands {sorted(joining)} join')
        self.last = Decision(self.number, self.history, 3 + secrets.randbits(48), sorted(members),
                             sorted(joining), self.payloads)
        self.number, self.history = self.number + 1, [self.history[0] + len(members), str(self.last.mark)]
        self.expected = members | joining
        self.payloads, self.deadline, self.states = {}, None, {}
        for island in self.last_seen.keys() - members:
            del self.last_seen[island]
        self.changed.notify_all()

    def _answer_join(self, island, place, number, history, have):
        """(header, payloads) for a rank that waits to join. have: the mark of the answer that it has."""
        now = time.monotonic()
        last = self.last
        if self.number is not None and history > self.history:
            self._move_to(number, history)
        if self.number is not None and (number, history) == (self.number, self.history):
            self.join_requests.pop((island, place), None)
            self.last_seen[island] = now
            return dict(status='same' if have == START else 'start', mark=START), []
        self.last_seen.pop(island, None)
        if last and island in last.joining and place in self.states:
            self.join_requests.pop((island, place), None)
            if have == last.mark:
                return dict(status='same'), []
            state, payload = self.states[place]
            return dict(status='state', mark=last.mark, number=self.number, history=self.history,
                        state=state), [payload]
        self.join_requests[island, place] = now, history, number
        self._follow_furthest_if_alone(now)
        return dict(status='wait'), []

    def _follow_furthest_if_alone(self, now):
        """If no member is left, continue at the exchange of the furthest island that waits to join."""
        timeout = max(self.settings['outer_timeout'], ABSENCE_TIMEOUT)
        alive = [when for when in self.last_seen.values() if now - when < timeout]
        if alive or now - self.start_time < timeout:
            return
        waiting = {rank: (history, number) for rank, (when, history, number) in self.join_requests.items()
                   if now - when < ABSENCE_TIMEOUT}
        complete = self._complete_islands(waiting.keys())
        if complete:
            history, number = max(position for (island, _), position in waiting.items() if island in complete)
            self._move_to(number, history)


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
    """Answer the requests of one rank until its connection ends."""
    with connection, contextlib.suppress(OSError):
        try:
            authenticate(connection, secret, is_server=True)
        except OSError as error:
            return refusals.add(address, error)
        try:
            introduction, _ = receive(connection)
            sent = None  # the number of the exchange whose payload came over this connection
            while True:
                request, payloads = receive(connection)
                try:
                    coordinator.admit(introduction)
                    answer = coordinator.answer(introduction, request, payloads, sent == request['number'])
                except Refused as error:
                    refusals.add(address, error)
                    answer = dict(status='refused', reason=str(error)), []
                if request['kind'] == 'payload':
                    sent = request['number']
                if answer:
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
