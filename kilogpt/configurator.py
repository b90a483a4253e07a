"""Config files and --key=value arguments override a script's globals.

    python train.py config/train_shakespeare_char.py --batch_size=32 --compile=false

Arguments apply in order, and the last one wins. A config file is Python and is executed: run only files that
you trust. A `.json` file, such as the `config.json` that a run writes to its out_dir, works as well.
"""
import ast
import atexit
import contextlib
import difflib
import functools
import io
import json
import os
import re
import sys
import time
import tokenize
import traceback
import types
import typing
import zlib
from typing import NamedTuple

from data.storage import StorageError
from kilogpt.keys import with_resuming

_FORMER_KEYS = {'replay'}  # of earlier versions, which the config.json of an old run may still name
_FOREIGN_NAMES = dict(lr='learning_rate', prompt='start', steps='max_iters')  # of other programs
_CONFIG_TYPES = (bool, int, float, str, type(None))


@contextlib.contextmanager
def exit_on_error():
    """A context in which an error that is not a bug ends the script: one sentence, exit code 1."""
    expect_closed_pipe()
    try:
        yield
    except (ValueError, OSError, ImportError, StorageError) as error:
        sys.last_value = error  # as Python does with what ends a session; kilogpt/run/events.py asks for it
        if isinstance(sys.stderr, io.TextIOWrapper):
            # With Python's -u, as torchrun runs it, another process could write between a line and its end.
            sys.stderr.reconfigure(write_through=False)
        sentence = f'error: {_sentence_of(error)}'
        sys.exit(1 if is_of_closed_pipe(error) or not is_to_say(sentence) else sentence)


def is_to_say(sentence):
    """Whether no other process of the same torchrun on this machine says the sentence that ends this one.

    torchrun's own last lines, on why the run has failed, then have the sentence.
    """
    path = os.environ.get('TORCHELASTIC_ERROR_FILE')
    if not path:
        return True
    # torchrun takes the earliest error for the cause, in whole seconds, and ends other processes at once.
    about = dict(message=sentence, extraInfo=dict(timestamp=str(int(time.time()) - 1)))
    said = os.path.join(os.path.dirname(path), '..', f'said-{zlib.crc32(sentence.encode()):08x}')
    try:
        with open(path, 'w', encoding='utf-8') as file:
            json.dump(dict(message=about), file)
        os.close(os.open(said, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:  # then twice rather than not at all
        pass
    return True


def _sentence_of(error):
    """The message of an exception, without the number of an error of the operating system."""
    if isinstance(error, OSError) and error.filename is not None and str(error).startswith('[Errno'):
        if isinstance(error, FileExistsError):
            return f'{error.filename} exists already: choose another name, or move it away'
        return f'{error.filename}: {error.strerror}'
    return error


@functools.cache  # once is enough
def expect_closed_pipe():
    """Make the script end without a word when the reader of its output, such as `head`, has closed the pipe.

    `configure` and `exit_on_error` call this.
    """
    sys.excepthook = _report_error
    atexit.register(_flush_output)


def _report_error(kind, error, trace):
    """sys.excepthook: print the traceback, or a sentence if memory is lacking; nothing for a closed pipe or Ctrl-C."""
    if sentence := lack_of_memory(error):
        print(f'error: {sentence}', file=sys.stderr)
    elif not issubclass(kind, KeyboardInterrupt) and not is_of_closed_pipe(error):
        sys.__excepthook__(kind, error, trace)


def lack_of_memory(error):
    """A sentence if an exception is that a GPU has too little memory, else None."""
    if type(error).__name__ != 'OutOfMemoryError':  # PyTorch's, which is not imported here
        return None
    lack, size = str(error).partition('\n')[0], r'([\d.]+ \w+)'
    if found := re.search(rf'allocate {size}\. (GPU \d+) has a total capacity of {size} of which {size}', lack):
        wanted, gpu, total, free = found.groups()
        lack = f'{gpu} is out of memory: {wanted} are wanted, but of its {total} only {free} are free.'
    return (f'{lack} train.py takes less with a lower batch_size and a higher gradient_accumulation_steps, with '
            'activation_checkpoint=selective or full, and on several GPUs with zero_stage=3: '
            'python -m kilogpt.plan predicts how much')


def is_of_closed_pipe(error):
    """Whether an exception is that the reader of the output has closed the pipe. It could be of a socket."""
    if isinstance(error, BrokenPipeError):
        try:
            print(flush=True)
        except BrokenPipeError:
            return True
    return False


def _flush_output():
    """Flush stdout, into nothing if the pipe is closed."""
    try:
        sys.stdout.flush()
    except OSError:  # BrokenPipeError, or on Windows EINVAL
        # Python flushes stdout again at exit, which would print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Page(NamedTuple):
    """A file or class with keys."""
    name: str  # by which --help shows it alone: islands for islands.py, expert for the class ExpertOptions
    title: str  # the first line of its docstring
    path: str
    body: list  # its statements
    values: dict  # {key: default}
    types: dict  # {key: the types that it takes}


def configure(script, *places, argv=None):
    """Override the config globals of a script from the command line, in place; returns all keys as a dict.

    script: the caller's globals(). Its keys are the public globals of plain type that are defined so far. The
        name of a helper variable above the call therefore starts with _.
    places: files with more keys, relative to the script: 'keys/islands.py' or a folder 'keys' for its globals,
        'model.py:GPTConfig' for the fields of a class and of its bases. They are read, not imported: a key is
        what a literal is assigned to. The script's own default of a key wins.
    argv: config files and `--key=value`, `--key value` or `--flag` arguments (default: sys.argv[1:]).
    A key takes values of the type of its default, or of the types in its annotation (`top_k: int | None =
    200`). An unknown key or a value of the wrong type ends the script with one sentence.
    """
    expect_closed_pipe()
    argv = list(sys.argv[1:] if argv is None else argv)
    config = {key: value for key, value in script.items()
              if not key.startswith('_') and isinstance(value, _CONFIG_TYPES)}
    key_types = _types_of_keys(config, script.get('__annotations__', {}))
    pages = read_pages(os.path.dirname(script['__file__']), places) if places else []
    for page in pages:
        config |= {key: value for key, value in page.values.items() if key not in config}
        key_types |= {key: kinds for key, kinds in page.types.items() if key not in key_types}
    if '--help' in argv or '-h' in argv:
        with contextlib.suppress(OSError):  # the reader of a pipe may stop before the end
            own = {key: value for key, value in config.items() if key in script}
            print(_help(script['__file__'], own, pages, key_types, argv))
        sys.exit(0)
    with exit_on_error():
        given = set()  # keys of the command line so far
        while argv:
            argument = argv.pop(0)
            if argument.startswith('--'):
                key, text = _read_argument(argument, argv, config, key_types)
                value = _parse(text, key_types.get(key, ()))
                config[key] = _check(key, value, config, key_types, 'the command line')
                given.add(key)
            else:
                changed = _read_file(argument, config)
                changed = {key: _check(key, value, config, key_types, argument) for key, value in changed.items()}
                _warn_of_replaced(given & changed.keys(), config, changed, argument)
                config |= changed
    script.update({key: value for key, value in config.items() if key in script})
    return config


def _warn_of_replaced(keys, config, changed, path):
    """Print which keys of the command line a config file after them sets to another value."""
    lost = ', '.join(f'{key}={config[key]!r} by {changed[key]!r}' for key in sorted(keys) if config[key] != changed[key])
    if lost and os.environ.get('RANK', '0') == '0':
        print(f'warning: {path} replaces {lost}: write the config file before the keys', file=sys.stderr)


def read_pages(folder, places):
    """The pages of keys at some places, as `configure` takes them, in a folder. A class stands before its bases."""
    pages = []
    for place in places:
        path, _, class_name = place.partition(':')
        path = os.path.join(folder, path)
        if os.path.isdir(path):
            files = sorted(name for name in os.listdir(path) if name.endswith('.py'))
            pages += [_read_module(os.path.join(path, name)) for name in files]
        elif class_name:
            pages += _read_class(folder, path, class_name)
        else:
            pages.append(_read_module(path))
    return [page for page in pages if page.values]


def _parse_file(path):
    with tokenize.open(path) as file:
        return ast.parse(file.read(), path)


def _read_module(path):
    module = _parse_file(path)
    return _read_page(path, module, os.path.splitext(os.path.basename(path))[0])


def _read_class(folder, path, class_name):
    """The pages of a class and of its bases, whose modules lie in `folder`."""
    module, place_of = _parse_file(path), {}  # {imported name: path}
    for node in module.body:
        if isinstance(node, ast.ImportFrom):
            imported = os.path.join(folder, *node.module.split('.')) + '.py'
            place_of |= {alias.name: imported for alias in node.names}
    node = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    pages = [_read_page(path, node, re.sub('(Config|Options)$', '', class_name).lower())]
    for base in node.bases:
        pages += _read_class(folder, place_of[base.id], base.id)
    return pages


def _read_page(path, node, name):
    """The page of a module or class. node: what ast.parse made of it."""
    values, types = {}, {}
    for statement in node.body:
        key = _assigned_name(statement)
        if not key or key.startswith('_'):
            continue
        with contextlib.suppress(ValueError):  # not a literal, hence no key
            value = ast.literal_eval(statement.value)
            if isinstance(value, _CONFIG_TYPES) and not key.isupper():
                values[key], types[key] = value, (type(value),)
    title = (ast.get_docstring(node) or name).partition('\n')[0]
    return Page(name, title, path, node.body, values, types)


@contextlib.contextmanager
def announced(what):
    """A context in which a terminal, for the first of torchrun's processes, shows what the script is doing."""
    is_shown = sys.stderr.isatty() and os.environ.get('RANK', '0') == '0'
    if is_shown:
        print(f'{what} ...', end='\r', file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if is_shown:
            print('\033[K', end='', file=sys.stderr, flush=True)  # clears the line


def config_of(path, argv):
    """The config that the script at `path` would have with these arguments. The script does not run.

    Of the script, only the assignments to public names above `config = configure(globals(), ...)` are
    executed.
    """
    script = {'__file__': path}
    for node in _parse_file(path).body:
        target = _assigned_name(node)
        if target == 'config':
            return configure(script, *map(ast.literal_eval, node.value.args[1:]), argv=argv)
        if target and not target.startswith('_'):
            exec(compile(ast.Module([node], []), path, 'exec'), script)


def _assigned_name(node):
    """The name that a statement assigns to, or None."""
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, 'target', None)
    return target.id if isinstance(target, ast.Name) else None


def _types_of_keys(config, annotations):
    """{key: tuple of the types that it takes}."""
    kinds = {key: annotations.get(key, type(value)) for key, value in config.items()}
    # The parts of a union such as int | None, or the type itself.
    return {key: typing.get_args(kind) or (kind,) for key, kind in kinds.items()}


def _read_argument(argument, argv, config, key_types):
    """(key, text of its value) of a `--` argument. If the value is the next of argv, it is removed there."""
    key, equals, text = argument[2:].partition('=')
    if equals:
        return key, text
    is_flag = key_types.get(key) == (bool,)
    next_is_value = bool(argv) and not argv[0].startswith('--')
    if is_flag:
        next_is_value = next_is_value and argv[0].lower() in ('true', 'false')
    if next_is_value:
        return key, argv.pop(0)
    if is_flag:
        return key, 'true'
    if key in config:
        raise ValueError(f'--{key} needs a value: --{key}={config[key]!r}, for example')
    return key, ''


def _read_file(path, config):
    """{key: value} of the keys that a config file sets. A .py file can read the values so far."""
    _check_config_file(path, config)
    is_json = path.endswith('.json')
    try:
        with open(path, encoding='utf-8') as file:
            source = json.load(file) if is_json else compile(file.read(), path, 'exec')
    except (ValueError, SyntaxError) as error:
        raise ValueError(f'{path} cannot be read: {error}') from None
    if is_json:
        if not isinstance(source, dict):
            raise ValueError(f'{path} does not hold a JSON object of keys and values')
        return {key: value for key, value in source.items() if key not in _FORMER_KEYS}
    namespace = dict(config, __file__=path)
    try:
        exec(source, namespace)
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        raise ValueError(f'{path}, line {lines[-1]}: {type(error).__name__}: {error}') from None
    changed = {}
    for key, value in namespace.items():
        is_helper = key.startswith('_') or isinstance(value, types.ModuleType) or callable(value)
        is_unchanged = key in config and type(value) is type(config[key]) and value == config[key]
        if not is_helper and not is_unchanged:
            changed[key] = value
    return changed


def _check_config_file(path, config):
    """ValueError, with what was probably meant, unless the path is an existing .py or .json file."""
    key, equals, _ = path.partition('=')
    if equals and key in config:
        raise ValueError(f'{path!r} is not a config file; did you mean --{path}?')
    if os.path.isfile(path + '.py'):
        raise ValueError(f'config file {path!r} does not exist; did you mean {path}.py?')
    if not os.path.exists(path):
        raise ValueError(f'config file {path!r} does not exist (a key is set as --key=value)')
    if os.path.isdir(path) or not path.endswith(('.py', '.json')):  # a text would be executed as Python
        example = next((f' For example, --{key}={path}' for key in ('input', 'out_dir') if key in config), '')
        raise ValueError(f'{path!r} is not a config file, whose name ends in .py or .json: a key is set as '
                         f'--key=value.{example}')


def _parse(text, accepted_types):
    """The value of these types that a text of the command line stands for, or the text itself."""
    if bool in accepted_types and text.lower() in ('true', 'false'):
        return text.lower() == 'true'
    with contextlib.suppress(ValueError, SyntaxError):
        value = _as_number(ast.literal_eval(text), accepted_types)
        if type(value) in accepted_types:
            return value
    if float in accepted_types:
        with contextlib.suppress(ValueError):
            return float(text)  # 'inf' is not a literal of Python
    return text


def _as_number(value, accepted_types):
    """3 as 3.0 if only floats are accepted, 1e3 as 1000 if only integers are; any other value as it is."""
    if type(value) is int and int not in accepted_types and float in accepted_types:
        return float(value)
    if type(value) is float and float not in accepted_types and int in accepted_types and value.is_integer():
        return int(value)
    return value


def _check(key, value, config, key_types, where):
    """The value, a number as a number of the key's type. ValueError if the key or the type is wrong."""
    if key not in config:
        same = {_FOREIGN_NAMES.get(key)} & config.keys()
        similar = [*same, *difflib.get_close_matches(key, config, n=1, cutoff=0.6)]
        hint = f'; did you mean {similar[0]}?' if similar else '; --help lists them all'
        if where != 'the command line':
            hint += ' (a helper variable in a config file must start with _)'
        raise ValueError(f'unknown key {key!r} in {where}{hint}')
    value = _as_number(value, key_types[key])
    if isinstance(value, dict) and str in key_types[key]:
        value = _table_as_text(value)
    if (key, value) == ('init_from', 'auto'):
        value = with_resuming(config[key])  # weights that a config file names stay what a run begins with
    if type(value) not in key_types[key]:
        expected = ' or '.join(key_type.__name__ for key_type in key_types[key])
        raise ValueError(f'{key} takes {expected}, but {where} gives {value!r}')
    return value


def _table_as_text(table):
    """{'web': 0.7, 'code': 0.3} as 'web:0.7, code:0.3', and {5e9: {'code': 1}} as '5000000000.0: code:1'."""
    if any(isinstance(value, dict) for value in table.values()):
        return '; '.join(f'{begin}: {_table_as_text(value)}' for begin, value in table.items())
    return ', '.join(f'{name}:{value}' for name, value in table.items())


def _help(path, own, pages, key_types, argv):
    """The text of --help: every key with its default, type and comment, grouped as in the script and its pages.

    own: {key: default} of the script itself. argv: of a page that it names (`--help islands`), or a word, the keys alone.
    """
    words = [argument for argument in argv if not argument.startswith('-') and not argument.endswith('.py')]
    for page in pages:
        if difflib.get_close_matches(page.name, words, cutoff=0.8):
            return '\n'.join([page.title, *_help_on_keys(page.path, page.body, page.values, key_types)])
    if words:
        lines = [line for line in _help(path, own, pages, key_types, []).splitlines() if line.startswith('  --')]
        found = '\n'.join(line for line in lines if any(word in line for word in words))
        return found or f'no key has {words[0]} in its line: --help alone lists them all'
    module, name = _parse_file(path), os.path.relpath(path)
    lines = [ast.get_docstring(module) or '', '', f'usage: python {name} [config_file ...] [--key=value ...]']
    if pages:
        lines.append(f'       --help NAME shows a part, or the keys with a word: {", ".join(page.name for page in pages)}')
    lines += _help_on_keys(path, module.body, own, key_types)
    for page in pages:
        rest = {key: value for key, value in page.values.items() if key not in own}
        lines += ['\n' + page.title, *_help_on_keys(page.path, page.body, rest, key_types)]
    return '\n'.join(lines)


def _help_on_keys(path, nodes, config, key_types):
    """Lines of --help on the keys that statements of a file assign. nodes: these statements and others."""
    comments = {}  # {line number: token}
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                comments[token.start[0]] = token
    definitions = {}  # {key: (first line, last line)}
    for node in nodes:
        target = _assigned_name(node)
        if target in config:
            definitions.setdefault(target, (node.lineno, node.end_lineno))
    lines = []
    previous = min((first for first, _ in definitions.values()), default=1) - 1
    for key, (first, last) in definitions.items():
        for number in range(previous, first):
            # A comment on a line of its own begins a group, unless the comment only draws a line.
            comment = comments.get(number)
            if comment and comment.start[1] == 0 and comment.string.strip('# -'):
                lines.append('\n' + comment.string.lstrip('# '))
        previous = last + 1
        type_names = ' or '.join(key_type.__name__ for key_type in key_types[key]).replace('NoneType', 'None')
        comment = comments[last].string.lstrip('# ') if last in comments else ''
        setting = f'  --{key}={config[key]!r}'
        lines.append(f'{setting:<35} {type_names:<8} {comment}'.rstrip())
    return lines
