"""Write docs/keys.md from the --help of train.py and sample.py: python dev/write_keys.py"""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / 'docs' / 'keys.md'
TITLE = '''# Every key

This page is what `--help` prints. `python dev/write_keys.py` writes it.

A value on the command line is read as the type of its key. Integers are accepted where a float is wanted, and
whole numbers such as `1e3` where an integer is. Booleans are `true` or `false` in any case, and `--flag` alone
means true. In a config file a key is an assignment, `n_layer = 6`.
'''
KEY = re.compile(r'  --(?P<key>\w+)=(?P<default>.+?) +'
                 r'(?P<type>(int|float|bool|str)( or None)?) +(?P<meaning>.+)')


def help_of(script):
    command = [sys.executable, script, '--help']
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def section(script, text):
    """The section of a script: a table for each group of keys. text: the script's --help."""
    usage, keys = re.split(r'^usage: .*\n(?: +--help .*\n)?', text, flags=re.M)
    lines = ['', f'## {script}']
    in_table = False
    for line in keys.splitlines():
        found = KEY.fullmatch(line)
        if found and not in_table:
            lines += ['', '| key | default | type | meaning |', '| --- | --- | --- | --- |']
        if found:
            meaning = found['meaning'].replace('|', r'\|')  # as in <|endoftext|>
            lines.append(f'| `{found["key"]}` | `{found["default"]}` | {found["type"]} | {meaning} |')
        elif line:
            lines += ['', f'**{line}**']
        in_table = bool(found)
    return '\n'.join(lines) + '\n'


def page(help_of=help_of):
    """The whole page. help_of(script): returns the script's --help."""
    return TITLE + ''.join(section(script, help_of(script)) for script in ('train.py', 'sample.py'))


if __name__ == '__main__':
    PAGE.write_text(page(), encoding='utf-8')
