"""`python -m kilogpt`: list the commands."""
import ast
import pathlib

from kilogpt.configurator import expect_closed_pipe

FOLDER = pathlib.Path(__file__).resolve().parent
SCRIPTS = 'train.py', 'sample.py', 'bench.py'


def first_sentence(path):
    """What a script says of itself in the first line of its docstring."""
    return ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))).splitlines()[0]


expect_closed_pipe()
for name in SCRIPTS:
    print(f'python {name:<20} {first_sentence(FOLDER.parent / name)}')
for path in sorted(FOLDER.glob('*/__main__.py')):
    print(f'python -m kilogpt.{path.parent.name:<9} {first_sentence(path)}')
