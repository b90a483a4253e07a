"""A conversation on the terminal."""
import contextlib
import json
import sys

from kilogpt.chat.conversation import Conversation

HELP = '/reset begins again, /save FILE writes the conversation, /quit ends it'


def talk(engine, template, system, max_new_tokens, *sampling):
    """Read lines and print answers until /quit or the end of the input. Ctrl-C ends an answer.

    engine: an Engine. template: a ChatTemplate. system: the system message, '' = none.
    sampling: temperature, top_k, top_p and seed, as in a Request. An answer depends on them and on what the
    model sees.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  input() then has a history, and keys that move the cursor
    opening = [dict(role='system', content=system)] if system else []
    conversation, messages, forgotten = Conversation(engine, template), list(opening), 0
    print(HELP, file=sys.stderr)
    while True:
        try:
            line = input('> ').strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print('\n/quit ends the conversation', file=sys.stderr)
            continue
        command, _, rest = line.partition(' ')
        if command == '/quit':
            return
        elif command == '/reset':
            messages, forgotten = list(opening), 0
        elif command == '/save':
            save(messages, rest)
        elif line.startswith('/'):
            print(f'{command} is not a command: {HELP}', file=sys.stderr)
        elif line:
            messages.append(dict(role='user', content=line))
            try:
                room = min(max_new_tokens, conversation.block_size // 4)
                ids, seen = conversation.fit(messages, room)
            except ValueError as error:  # a message that is too long, or has a character that the model lacks
                messages.pop()
                print(f'error: {error}', file=sys.stderr)
                continue
            if not forgotten and len(seen) < len(messages):
                print(f'the conversation is longer than the {conversation.block_size} tokens that the model '
                      'sees, so the model no longer sees the oldest turns', file=sys.stderr)
            forgotten = len(messages) - len(seen)
            answer = show(conversation, ids, max_new_tokens, *sampling)
            if answer.strip():
                messages.append(dict(role='assistant', content=answer))
            else:
                messages.pop()  # templates do not have an empty answer


def show(conversation, ids, max_new_tokens, *sampling):
    """Print an answer as it grows; returns its text."""
    answer = ''
    tokens = conversation.generate(ids, max_new_tokens, *sampling)
    with contextlib.suppress(KeyboardInterrupt):
        for piece in conversation.decode(tokens):
            answer += piece
            print(piece, end='', flush=True)
    print(flush=True)
    return answer


def save(messages, path):
    """Append a conversation to a file, as the line of JSON that data for finetuning has."""
    try:
        with open(path, 'a', encoding='utf-8') as file:
            file.write(json.dumps(dict(messages=messages), ensure_ascii=False) + '\n')
        print(f'saved in {path}', file=sys.stderr)
    except OSError as error:
        print(f'error: {error}', file=sys.stderr)
