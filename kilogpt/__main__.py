"""`python -m kilogpt`: list the commands."""
import ast
import pathlib
import sys

from kilogpt.configurator import expect_closed_pipe

FOLDER = pathlib.Path(__file__).resolve().parent
SCRIPTS = 'train.py', 'sample.py', 'bench.py'


def first_sentence(path):
    """What a script says of itself in the first line of its docstring."""
    return ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))).splitlines()[0]


expect_closed_pipe()
if wrong := [argument for argument in sys.argv[1:2] if argument not in ('-h', '--help')]:
    is_command = (FOLDER / wrong[0] / '__main__.py').is_file()
    advice = f'write python -m kilogpt.{wrong[0]}' if is_command else 'without arguments it lists the commands'
    sys.exit(f'error: python -m kilogpt takes no arguments, but is given {wrong[0]!r}: {advice}')
for name in SCRIPTS:
    print(f'python {name:<20} {first_sentence(FOLDER.parent / name)}')
for path in sorted(FOLDER.glob('*/__main__.py')):
    print(f'python -m kilogpt.{path.parent.name:<9} {first_sentence(path)}')
