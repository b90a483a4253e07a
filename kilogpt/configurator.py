"""Config files and --key=value arguments override a script's globals.

    python train.py config/train_shakespeare_char.py --batch_size=32 --compile=false

Arguments apply in order, the last one wins. A config file is Python and is executed as such: run only those you trust.
A `.json` file, such as the `config.json` a run leaves in its out_dir, works as well.
"""
import ast
import contextlib
import difflib
import json
import os
import sys
import tokenize
import types
import typing

_TYPES = (bool, int, float, str, type(None))


@contextlib.contextmanager
def exit_on_error():
    """Bad input raised inside (ValueError, OSError, ImportError) ends the script with its message alone, exit code 1."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f'error: {error}')


def configure(script, argv=None):
    """Override the config globals of a script from the command line, in place; returns them as a dict.

    script: the caller's globals(); its keys are the public globals of plain type defined so far.
    argv: config files and `--key=value`, `--key value` or `--flag` arguments (default: sys.argv[1:]).
    An annotation (`top_k: int | None = 200`) says what a key takes where its default alone would not.
    Exits with one sentence at an unknown key or a value of the wrong type.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    config = {k: v for k, v in script.items() if not k.startswith('_') and isinstance(v, _TYPES)}
    annotations = script.get('__annotations__', {})
    kinds = {k: typing.get_args(annotations[k]) or (annotations[k],) if k in annotations else (type(v),)
             for k, v in config.items()}
    if '--help' in argv or '-h' in argv:
        print(_help(script['__file__'], config, kinds))
        sys.exit(0)
    with exit_on_error():
        while argv:
            argument = argv.pop(0)
            if not argument.startswith('--'):
                for key, value in _read(argument, config).items():
                    config[key] = _check(key, value, config, kinds, argument)
                continue
            key, equals, text = argument[2:].partition('=')
            if not equals:
                is_flag = kinds.get(key) == (bool,)
                if argv and not argv[0].startswith('--') and (not is_flag or argv[0].lower() in ('true', 'false')):
                    text = argv.pop(0)
                elif is_flag:
                    text = 'true'
                elif key in config:
                    raise ValueError(f'--{key} needs a value: --{key}={config[key]!r}, say')
            config[key] = _check(key, _parse(text, kinds.get(key, ())), config, kinds, 'the command line')
    script.update(config)
    return config


def _read(path, config):
    """The keys that a config file sets: {key: value}. A .py file sees the values so far, as in nanoGPT."""
    if not os.path.isfile(path):
        raise ValueError(f'there is no config file {path!r} (a key is set as --key=value)')
    is_json = path.endswith('.json')
    try:
        with open(path, encoding='utf-8') as file:
            source = json.load(file) if is_json else compile(file.read(), path, 'exec')
    except (ValueError, SyntaxError) as error:
        raise ValueError(f'{path} cannot be read: {error}') from None
    if is_json:
        if not isinstance(source, dict):
            raise ValueError(f'{path} holds no JSON object of keys and values')
        return source
    namespace = dict(config, __file__=path)
    exec(source, namespace)
    return {k: v for k, v in namespace.items() if not k.startswith('_') and not isinstance(v, types.ModuleType)
            and not callable(v) and (k not in config or (type(v), v) != (type(config[k]), config[k]))}


def _parse(text, kinds):
    """The value a command-line text stands for, given the types its key takes; the text itself where none fits."""
    if bool in kinds and text.lower() in ('true', 'false'):
        return text.lower() == 'true'
    with contextlib.suppress(ValueError, SyntaxError):
        value = ast.literal_eval(text)
        if type(value) in kinds or (float in kinds and type(value) is int):
            return value
    if float in kinds:
        with contextlib.suppress(ValueError):
            return float(text)  # 'inf', which is no literal
    return text


def _check(key, value, config, kinds, where):
    """The value, widened from int to float where its key wants one; ValueError if the key or the type is wrong."""
    if key not in config:
        near = difflib.get_close_matches(key, config, n=1, cutoff=0.5)
        hint = f'; did you mean {near[0]}?' if near else '; --help lists them all'
        file_hint = '' if where == 'the command line' else ' (a helper variable in a config file starts with _)'
        raise ValueError(f'unknown key {key!r} in {where}{hint}{file_hint}')
    if type(value) is int and float in kinds[key]:
        return float(value)
    if type(value) not in kinds[key]:
        wanted = ' or '.join(kind.__name__ for kind in kinds[key])
        raise ValueError(f'{key} takes {wanted}, but {where} gives {value!r}')
    return value


def _help(path, config, kinds):
    """Every key with its default, type and comment, under the comment lines that group them in the script."""
    lines, comments = [], {}
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                comments[token.start[0]] = token
    module = ast.parse(open(path, encoding='utf-8').read())
    doc = ast.get_docstring(module)
    defined = {}
    for node in module.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, 'target', None)
        if isinstance(target, ast.Name) and target.id in config:
            defined.setdefault(target.id, (node.lineno, node.end_lineno))
    previous = min((first for first, _ in defined.values()), default=1) - 1
    for key, (first, last) in defined.items():
        for number in range(previous, first):  # a comment on a line of its own opens a group
            if number in comments and comments[number].start[1] == 0 and comments[number].string.strip('# -'):
                lines.append('\n' + comments[number].string.lstrip('# '))
        previous = last + 1
        kind = ' or '.join(k.__name__ for k in kinds[key]).replace('NoneType', 'None')
        comment = comments[last].string.lstrip('# ') if last in comments else ''
        lines.append(f'  --{key}={config[key]!r:<{max(1, 30 - len(key))}} {kind:<8} {comment}'.rstrip())
    return f'{doc or ""}\n\nusage: python {os.path.relpath(path)} [config_file ...] [--key=value ...]\n' + '\n'.join(lines)
