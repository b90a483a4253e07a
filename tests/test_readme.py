"""README says what is so: its commands, its table of keys and its files."""
import os
import re

from conftest import ROOT, run

README = open(os.path.join(ROOT, 'README.md'), encoding='utf-8').read()


def test_every_key_is_in_the_table():
    lines = run('train.py', '--help').stdout.splitlines()
    keys = [re.match(r'  --(\w+)=(.+?)\s{2,}(?:int|float|bool|str)\s+(.*)', line) for line in lines]
    expected = [(m[1], m[2], m[3]) for m in keys if m]
    assert len(expected) > 40
    table = re.findall(r'^\| `(\w+)` \| `(.+?)` \| (.*) \|$', README, re.M)
    assert table == expected


def test_files_it_names_are_there():
    commands = re.findall(r'python ([\w/]+\.py)(?: (config/\w+\.py))?|train\.py (config/\w+\.py)', README)
    names = {name for command in commands for name in command if name} | set(re.findall(r'\]\((assets/\S+)\)', README))
    assert len(names) > 8
    assert [name for name in names if not os.path.exists(os.path.join(ROOT, name))] == []


def test_opens_with_the_two_commands():
    first, second = re.findall(r'^```\n(.*?)\n```', README, re.M | re.S)[:2]
    assert first == ('pip install -r requirements.txt && python train.py config/quickstart.py && '
                     'python sample.py --out_dir=out-quickstart')
    assert second == 'pip install -r requirements-dev.txt && python -m pytest'
