"""Merges the events of all processes of a run by time, equal ones of many ranks into one line."""
import json
import os
import pathlib
import re
import statistics
from datetime import datetime

from data.storage import local_folder

LINES = 40  # of a page, above which the saves and the slow iterations of a start are one line each
WIDTH = 160  # characters of an error
NAMED = 3  # ranks that a line names
STANDS_OUT = 0.5  # of the additional time of the slowest rank, from which a rank is named beside it


def page(out_dir, shows_all=False):
    """The text about a run. ValueError if its folder has no events.

    shows_all: a line for each iteration, however many lines there are.
    """
    events, torn, signs = read_events(out_dir)
    starts = split_starts(events)
    groups = [group for start in starts for group in group_events(start, signs, is_last=start is starts[-1])]
    if len(groups) > LINES and not shows_all:
        groups = [group for start in starts
                  for group in group_events(start, signs, start is starts[-1], by_iteration=False)]
    ranks, hosts = ({event[key] for event in events} for key in ('rank', 'host'))
    lines = [f'{count(ranks, "rank")} on {count(hosts, "host")}, {count(starts, "start")}, {count(events, "event")}'
             + f' ({count(range(torn), "unfinished line")} left out)' * bool(torn)]
    texts = [describe(group) for group in groups]
    if len(texts) > LINES and not shows_all:
        left_out = f'... {len(texts) - LINES} lines (--all shows them)'
        texts = [*texts[:LINES // 4], left_out, *texts[-(LINES - LINES // 4):]]
    return '\n'.join(lines + texts)


def read_events(out_dir):
    """(all events by time, the number of lines that are no events, {rank: time of the last change of its file})."""
    events, torn, signs = [], 0, {}
    for path in sorted(pathlib.Path(local_folder(out_dir), 'events').glob('rank_*.jsonl')):
        for line in path.read_bytes().splitlines():
            try:
                event = json.loads(line)
                events.append(dict(event) | dict(rank=int(event['rank']), time=float(event['time'])))
            except (ValueError, TypeError, KeyError):  # a process was killed as it wrote
                torn += 1
                continue
            signs[events[-1]['rank']] = path.stat().st_mtime
    if not events:
        raise ValueError(f'{os.path.join(out_dir, "events")} has no events: a run writes them with --events=True')
    return sorted(events, key=lambda event: event['time']), torn, signs


def split_starts(events):
    """The events of each start of the run, [[event]]. A start begins when a rank starts that had started before."""
    starts, seen = [[]], set()
    for event in events:
        if event['event'] == 'start':
            if event['rank'] in seen:
                starts.append([])
                seen.clear()
            seen.add(event['rank'])
        starts[-1].append(event)
    return starts


def group_events(events, signs, is_last, by_iteration=True):
    """The groups of equal events of a start of the run, each a list, by the time of the first.

    The ranks that have left no end form groups of their own, with the event `silent`. signs: of read_events.
    is_last: whether this is the newest start. by_iteration: whether saves and slow iterations of different
    iterations are different events.
    """
    groups = {}
    for event in events:
        what = event.get('what', '')
        if what:  # the same error has other addresses and ports on other ranks
            what = re.sub(r'[0-9a-f]*\d[0-9a-f.:]*', '#', what)
        iteration = event['iter'] if by_iteration or event['event'] not in ('save', 'slow') else None
        groups.setdefault((event['event'], iteration, what), []).append(event)
    last = {event['rank']: event for event in events}
    silent = [event | dict(event='silent', time=max(event['time'], signs[rank]) if is_last else event['time'])
              for rank, event in last.items() if event['event'] not in ('end', 'error', 'lost')]
    found = [*groups.values(), *([sorted(silent, key=lambda event: event['time'])] if silent else [])]
    ranks = {event['rank'] for event in events}
    for group in found:
        group[0]['of'] = len(ranks)  # ranks of this start
    return sorted(found, key=lambda group: group[0]['time'])


# --- in words -------------------------------------------------------------------------------------------

def describe(group):
    """The line of a group of equal events."""
    first, kind = group[0], group[0]['event']
    ranks = list(dict.fromkeys(event['rank'] for event in group))
    who = name_ranks(group) if len(ranks) <= NAMED and len(ranks) < first['of'] else count(ranks, 'rank')
    words = {'start': _late, 'first_step': _first_step, 'save': _iterations, 'slow': _slow,
             'silent': _silent}.get(kind, _what)(group)
    time = datetime.fromtimestamp(first['time']).strftime('%Y-%m-%d %H:%M:%S')
    return f'{time}  {kind.replace("_", " "):<11}  {who}{words}'


def count(things, word):
    """'1,000 ranks' of 1,000 things and the word 'rank'."""
    return f'{len(things):,} {word}' + 's' * (len(things) != 1)


def name_ranks(group):
    """'rank 3 (node-1), rank 7 (node-1) and 2 more' of the ranks of a group."""
    hosts = {event['rank']: event['host'] for event in group}
    names = ', '.join(f'rank {rank} ({host})' for rank, host in list(hosts.items())[:NAMED])
    return names + f' and {len(hosts) - NAMED:,} more' * (len(hosts) > NAMED)


def _late(group):
    """How much later the last of many ranks was than the first."""
    if len(group) == 1:
        return ''
    return f' within {group[-1]["time"] - group[0]["time"]:.1f}s, the last {name_ranks(group[-1:])}'


def _first_step(group):
    return f', {statistics.median(event["seconds"] for event in group):.1f}s after the start{_late(group)}'


def _iterations(group):
    iterations = sorted({event['iter'] for event in group})
    if len(iterations) == 1:
        return f', iteration {iterations[0]}'
    return f', {count(iterations, "iteration")} from {iterations[0]} to {iterations[-1]}'


def _slow(group):
    """How slow the iterations were, and which ranks the others waited for."""
    lost, data, events = {}, {}, {}  # {rank: seconds beyond the usual in which it has not waited for others; ...}
    for event in group:
        rank, seconds = event['rank'], event['seconds'] - event['usual'] - event.get('waited_for_others', 0.0)
        lost[rank] = lost.get(rank, 0.0) + max(0.0, seconds)
        data[rank] = data.get(rank, 0.0) + event.get('waited_for_data', 0.0)
        events[rank] = event
    worst = max(group, key=lambda event: event['seconds'])
    text = f'{_iterations(group)}: up to {worst["seconds"]:.1f}s, usually {worst["usual"]:.1f}s'
    first, *others = sorted(lost, key=lost.get, reverse=True)
    slowest = [first, *(rank for rank in others if lost[rank] > STANDS_OUT * lost[first])]
    if len(slowest) > max(1, group[0]['of'] // 2):
        return f'{text}; no rank stands out'
    why = f'; rank {first} waited {data[first]:.1f}s for data' if data[first] > STANDS_OUT * lost[first] else ''
    return f'{text}; slowest {name_ranks([events[rank] for rank in slowest])}{why}'


def _silent(group):
    newest = max(event['iter'] for event in group)
    first = f', the first {name_ranks(group[:1])}' if group[0]['of'] == len(group) > 1 else ''
    return f' without an end{first}: killed, or still at work; last event at iteration {newest}'


def _what(group):
    what = re.sub(r'\[\S+:\d+\] ', '', str(group[0].get('what', '')))  # without the place in the sources of gloo
    shown = what if len(what) <= WIDTH else what[:WIDTH] + ' ...'
    return f', iteration {group[0]["iter"]}: {shown}'.removesuffix(': ')
