r"""Keep the place where islands meet that are jobs of their own: they exchange parameters through it.

    export KILOGPT_SECRET=$(openssl rand -hex 16)     # the same for this command and for every island
    python -m kilogpt.meet --port=29400

    torchrun --nproc_per_node=8 train.py --islands=3 --island=0 --outer_store=HOST:29400 ...   # and 1, and 2

This process decides which islands take part in an exchange, so that all of them act alike. It keeps the
payloads of the last exchange in memory and nothing on disk: started again, it learns from the islands where
they are. It needs no GPU and no PyTorch. docs/islands.md says more.
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
from kilogpt.islands.client import PERIOD, Refused, prove, read_secret, receive, send

MOST_CONNECTIONS = 10_000  # each has a thread
ABSENCE = 10  # seconds; islands that wait or train are heard of in every PERIOD
BEHIND, START = 1, 2  # the marks of answers that are not of one exchange


class Decision(NamedTuple):
    """An exchange that is over."""
    number: int
    before: list  # the history that its members had
    mark: int  # random: an exchange decided again by a server that was started again is another one
    members: list
    joining: list
    payloads: dict  # {(island, place): bytes}


class Meet:
    """What the islands of one run have told, and what is decided from it.

    A history is [members of all exchanges so far, mark of the last one]. The server takes over the greater
    history wherever it meets one, and islands with a smaller one join: after the server was killed, islands
    may have finished an exchange of which it knows nothing.
    """

    def __init__(self, say=print):
        self.say = say
        self.changed = threading.Condition()
        self.began = time.monotonic()
        self.settings = None  # of the first island; all others must have the same
        self.jobs = {}  # {island: name of its last job}
        self.number, self.history = None, [0, '']  # the exchange under way, and the history before it
        self.expected = set()  # islands that should come to it
        self.payloads = {}  # {(island, place): bytes} that have come
        self.deadline = None  # when it is decided without the others; set once an island is complete
        self.last = None  # the Decision before
        self.states = {}  # {place: (state, payload)} after it, for the islands that joined
        self.lived = {}  # {island: when a member was heard of last}
        self.asked = {}  # {(island, place): (time, history, number)} of those that want to join

    def admit(self, introduction):
        """Check an island's introduction; Refused if it does not belong to this run."""
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
        """(header, payloads) of the answer to a request; None where none is expected.

        has_sent: whether the present payload of this rank came over this connection.
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
                    self._take(island, place, payloads[0])
                return None
            if kind == 'state':
                if self.last and (number, history) == (self.number, self.history):
                    self.states[place] = request['state'], payloads[0]
                    self.changed.notify_all()
                return dict(status='thanks'), []
            if kind in ('hello', 'here'):
                return self._greet(island, number, history), []
            deadline = time.monotonic() + PERIOD
            while True:
                if kind == 'exchange':
                    header, found = self._exchange(island, place, number, history, request['have'], has_sent)
                else:
                    header, found = self._join(island, place, number, history, request['have'])
                now = time.monotonic()
                if header['status'] != 'wait' or now >= deadline:
                    return header, found
                until = min(deadline, self.deadline or deadline)
                self.changed.wait(max(0.01, until - now))

    # --- with the lock held ---------------------------------------------------------------------------------

    def _take(self, island, place, payload):
        sizes = {len(other) for (_, other_place), other in self.payloads.items() if other_place == place}
        if sizes - {len(payload)}:
            raise Refused(f'its payload has {len(payload)} bytes, those of other islands {sizes.pop()}')
        self.payloads[island, place] = payload
        self.changed.notify_all()

    def _greet(self, island, number, history):
        """Whether an island continues from what it has, or has to join."""
        self._follow(number, history)
        if not self._is_member(island, number, history):
            self.lived.pop(island, None)
            return dict(status='join')
        self.lived[island] = time.monotonic()
        for key in [key for key in self.asked if key[0] == island]:
            del self.asked[key]
        return dict(status='start')

    def _is_member(self, island, number, history):
        if (number, history) == (self.number, self.history):
            return True
        return self._was_decided(island, number, history)

    def _was_decided(self, island, number, history):
        """Whether an island took part in the last exchange, and has not merged it yet."""
        last = self.last
        return last is not None and (number, history) == (last.number, last.before) and island in last.members

    def _follow(self, number, history):
        """Take over the position of an island whose history is greater."""
        if self.number is None or history > self.history:
            self._move(number, history)

    def _move(self, number, history):
        if self.number is not None:
            self.say(f'going on at exchange {number} of an island that is ahead')
        self.number, self.history = number, history
        self.expected = set(range(self.settings['islands']))
        self.payloads, self.deadline, self.last, self.states = {}, None, None, {}
        self.changed.notify_all()

    def _exchange(self, island, place, number, history, have, has_sent):
        self._follow(number, history)
        self.lived[island] = time.monotonic()
        if (number, history) == (self.number, self.history):
            if (island, place) not in self.payloads:
                return dict(status='send'), []
            self._decide()
        if self._was_decided(island, number, history):
            return self._payloads_for(island, place, have, has_sent)
        if (number, history) == (self.number, self.history):
            return dict(status='wait'), []
        self.lived.pop(island)
        return dict(status='same' if have == BEHIND else 'behind', mark=BEHIND), []

    def _payloads_for(self, island, place, have, has_sent):
        last = self.last
        if have == last.mark:
            return dict(status='same'), []
        # Its own payload too, unless it has sent that over this connection: an island that was killed in
        # between may have computed another one.
        islands = [member for member in last.members if not (has_sent and member == island)]
        return (dict(status='decided', mark=last.mark, number=self.number, history=self.history,
                     members=last.members, joining=last.joining),
                [last.payloads[member, place] for member in islands])

    def _complete(self, ranks):
        """Islands of which all places are among these (island, place)."""
        places = range(self.settings['places'])
        return {island for island, _ in ranks if all((island, place) in ranks for place in places)}

    def _decide(self):
        """Decide the exchange under way if all that are expected have come, or time is up."""
        now = time.monotonic()
        members = self._complete(self.payloads.keys())
        if not members:
            return
        if self.deadline is None:
            self.deadline = now + self.settings['outer_timeout']
        recently = {rank for rank, (when, *_) in self.asked.items() if now - when < ABSENCE}
        joining = self._complete(recently) - members
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
        for island in self.lived.keys() - members:
            del self.lived[island]
        self.changed.notify_all()

    def _join(self, island, place, number, history, have):
        now = time.monotonic()
        last = self.last
        if self.number is not None and history > self.history:
            self._move(number, history)
        if self.number is not None and (number, history) == (self.number, self.history):
            self.asked.pop((island, place), None)
            self.lived[island] = now
            return dict(status='same' if have == START else 'start', mark=START), []
        self.lived.pop(island, None)
        if last and island in last.joining and place in self.states:
            self.asked.pop((island, place), None)
            if have == last.mark:
                return dict(status='same'), []
            state, payload = self.states[place]
            return dict(status='state', mark=last.mark, number=self.number, history=self.history,
                        state=state), [payload]
        self.asked[island, place] = now, history, number
        self._find_furthest(now)
        return dict(status='wait'), []

    def _find_furthest(self, now):
        """If no member lives, go on from the island that is the furthest of those that want to join."""
        timeout = max(self.settings['outer_timeout'], ABSENCE)
        alive = [when for when in self.lived.values() if now - when < timeout]
        if alive or now - self.began < timeout:
            return
        waiting = {rank: (history, number) for rank, (when, history, number) in self.asked.items()
                   if now - when < ABSENCE}
        complete = self._complete(waiting.keys())
        if complete:
            history, number = max(position for (island, _), position in waiting.items() if island in complete)
            self._move(number, history)


class Strangers:
    """Counts connections that were refused, and says so now and then."""

    def __init__(self):
        self.count = 0

    def add(self, address, reason):
        self.count += 1
        if self.count & (self.count - 1) == 0:  # 1, 2, 4, 8, ...: garbage must not fill the log
            print(f'refused {address[0]}: {reason} ({self.count} refused so far)', flush=True)


def serve(peer, address, secret, meet, strangers):
    """Answer one rank until its connection ends."""
    with peer, contextlib.suppress(OSError):
        try:
            prove(peer, secret, is_server=True)
        except OSError as error:
            return strangers.add(address, error)
        try:
            introduction, _ = receive(peer)
            sent = None  # the number of the exchange whose payload came over this connection
            while True:
                request, payloads = receive(peer)
                try:
                    meet.admit(introduction)
                    answer = meet.answer(introduction, request, payloads, sent == request['number'])
                except Refused as error:
                    strangers.add(address, error)
                    answer = dict(status='refused', reason=str(error)), []
                if request['kind'] == 'payload':
                    sent = request['number']
                if answer:
                    send(peer, *answer)
        except OSError:
            raise
        except Exception as error:  # whatever one sends that knows the secret ends its own connection alone
            strangers.add(address, f'a message that is not of an island ({error!r})')


def main():
    parser = argparse.ArgumentParser('python -m kilogpt.meet', description=__doc__, allow_abbrev=False,
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
    print(f'islands meet at {options.host}:{options.port}', flush=True)
    meet, strangers = Meet(say=lambda text: print(text, flush=True)), Strangers()
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            try:
                peer, address = listener.accept()
            except OSError as error:  # too many open files, for example: those of strangers are soon closed
                print(f'warning: {error}', file=sys.stderr, flush=True)
                time.sleep(1)
                continue
            if threading.active_count() > MOST_CONNECTIONS:
                peer.close()
                continue
            threading.Thread(target=serve, args=(peer, address, secret, meet, strangers), daemon=True).start()
