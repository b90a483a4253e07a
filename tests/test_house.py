"""The house stands: who imports whom, how long files are, and that the scripts start where Unix is not.

A file imports files of its own room and of rooms on lower floors. Nothing imports a script.
"""
import ast
import graphlib
import pathlib
import re
import sys

import pytest

from helpers import FAULTS, ROOT, run_forked, run_script
from kilogpt.configurator import read_pages

# Rooms from the ground up. A folder is a room, and so are the files of kilogpt/ that share a floor.
FLOORS = [
    {'data/fetch.py', 'data/storage.py', 'kilogpt/devices/cpus.py', 'kilogpt/keys', 'kilogpt/trackers'},
    {'data/tokens'},
    {'data', 'kilogpt/configurator.py', 'kilogpt/learning_rate.py', 'kilogpt/machines.py', 'kilogpt/layers',
     'kilogpt/optim.py', 'kilogpt/settings.py'},
    {'data/make', 'kilogpt/devices', 'model.py'},
    {'kilogpt/parallel'},
    {'kilogpt/generate', 'kilogpt/run', 'kilogpt/launch_train.py'},
    {'kilogpt/plot', 'kilogpt/report', 'kilogpt/weights'},
    {'kilogpt/chat', 'kilogpt/compare', 'kilogpt/convert', 'kilogpt/islands', 'kilogpt/loading.py',
     'kilogpt/plan', 'kilogpt/prove', 'kilogpt/replicas', 'kilogpt/scaling'},
    {'kilogpt/evaluate', 'kilogpt/replay'},
    {'kilogpt/learn'},
    {'kilogpt/training'},
    {'bench.py', 'kilogpt/__main__.py', 'sample.py', 'train.py'},
]
# What one person reads in an evening, and how long it may be.
LONGEST = {'train.py': 195, 'model.py': 470, 'data/loader.py': 220}
LONGEST_OTHERS = 450

HOME = pathlib.Path(ROOT)
PATHS = sorted(path.relative_to(HOME).as_posix()
               for path in [*HOME.glob('*.py'), *HOME.glob('kilogpt/**/*.py'), *HOME.glob('data/**/*.py')])
TEXTS = {path: (HOME / path).read_text(encoding='utf-8') for path in PATHS}
TREES = {path: ast.parse(text) for path, text in TEXTS.items()}
OF_THE_MODEL = {path for path in PATHS if path.startswith('kilogpt/layers/')} | {'model.py'}
pytestmark = pytest.mark.quick


def path_of(module):
    """The path of a module of ours, 'kilogpt.parallel' or 'kilogpt.parallel.apply'; None for any other."""
    base = module.replace('.', '/')
    return next((path for path in (f'{base}.py', f'{base}/__init__.py') if path in TEXTS), None)


def modules_imported(tree):
    """Names of all modules that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = {f'{node.module}.{alias.name}' for alias in node.names}
            found |= {name for name in inside if path_of(name)} or {node.module}
    return found


def room_of(path):
    """The room of a file: its folder, or the file itself where it lies in kilogpt/ or at the top."""
    if path in FLOORS[0]:
        return path
    parts = path.split('/')
    if len(parts) > 2 and (parts[0] == 'kilogpt' or parts[1] in ('make', 'tokens')):
        return '/'.join(parts[:2])
    return parts[0] if len(parts) > 1 and parts[0] != 'kilogpt' else path


def floor_of(path):
    """The number of a file's floor, 0 for the ground floor. A dataset's prepare.py and data/look.py are scripts."""
    if path == 'data/look.py' or path.count('/') == 2 and room_of(path) == 'data':
        return len(FLOORS) - 1
    numbers = [number for number, rooms in enumerate(FLOORS) if room_of(path) in rooms]
    assert len(numbers) == 1, f'{path} needs one place in FLOORS'
    return numbers[0]


OURS = {}  # {path: paths that it imports}
for path, tree in TREES.items():
    imported = {path_of(module) for module in modules_imported(tree)}
    OURS[path] = {other for other in imported - {None} if not other.endswith('__init__.py')}


@pytest.mark.parametrize('path', [path for path in PATHS if not path.endswith('__init__.py')])
def test_file_imports_only_its_own_room_and_lower_floors(path):
    flat = {'data', 'kilogpt', '.'}  # the files of such a folder on one floor form a room together
    for imported in OURS[path]:
        is_own_room = room_of(path) == room_of(imported)
        is_own_room |= str(pathlib.Path(path).parent) in flat and str(pathlib.Path(imported).parent) in flat
        limit = floor_of(path) if is_own_room else floor_of(path) - 1
        assert floor_of(imported) <= limit, f'{imported} is not on a lower floor'
        assert floor_of(imported) < len(FLOORS) - 1, f'{imported} is a script'


def test_imports_run_in_no_circle():
    graphlib.TopologicalSorter(OURS).prepare()


def test_every_room_says_what_happens_in_it_and_where_to_begin():
    rooms = [path for path in PATHS if path.startswith('kilogpt/') and path.endswith('__init__.py')]
    assert len(rooms) > 6
    for path in rooms:
        files = {other.name for other in (HOME / path).parent.glob('*.py')}
        text = ast.get_docstring(TREES[path])
        assert any(name in text for name in files - {'__init__.py'}), f'{path} names no file to read first'


def test_gguf_is_imported_for_its_files_alone():
    for path, tree in TREES.items():
        at_once = ast.Module([node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))], [])
        needs_gguf = any(module.startswith('kilogpt.weights.gguf') for module in modules_imported(at_once))
        assert not needs_gguf or path.startswith('kilogpt/weights/gguf/'), path


def test_commands_are_listed():
    listed = run_script('kilogpt').stdout.splitlines()
    wrong = run_script('kilogpt', 'plot', 'out', check=False)
    assert wrong.returncode == 1 and wrong.stderr == (
        "error: python -m kilogpt takes no arguments, but is given 'plot': write python -m kilogpt.plot\n")
    commands = [f'python -m {path.removesuffix("/__main__.py").replace("/", ".")}' for path in PATHS
                if path.endswith('/__main__.py') and path != 'kilogpt/__main__.py']
    assert len(listed) == 3 + len(commands) and all(line.count(' ') > 4 for line in listed)
    assert all(any(line.startswith(f'{command} ') for line in listed) for command in commands)


def test_model_imports_torch_and_layers_alone():
    for path in OF_THE_MODEL:
        foreign = {name.partition('.')[0] for name in modules_imported(TREES[path])} - sys.stdlib_module_names
        assert foreign <= {'torch', 'kilogpt'}
        assert OURS[path] <= OF_THE_MODEL - {'model.py'}


def test_only_scripts_and_rooms_above_the_layout_import_the_model():
    importers = {path for path, imported in OURS.items() if 'model.py' in imported}
    assert all(floor_of(path) > floor_of('kilogpt/parallel/apply.py') for path in importers)


def test_layout_is_arithmetic():
    names = {name.partition('.')[0] for name in modules_imported(TREES['kilogpt/parallel/layout.py'])}
    assert 'torch' not in names


def test_what_one_reads_in_an_evening_stays_short():
    for path, text in TEXTS.items():
        if path.startswith('kilogpt/') or path in LONGEST:
            assert text.count('\n') <= LONGEST.get(path, LONGEST_OTHERS), path
    assert len(list(HOME.glob('kilogpt/*.py'))) <= 10


def test_classes_and_functions_of_the_machinery_stay_short():
    for path, tree in TREES.items():
        for node in ast.walk(tree) if path.startswith('kilogpt/') else ():
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                limit = 250 if isinstance(node, ast.ClassDef) else 90
                assert node.end_lineno - node.lineno < limit, f'{path}: {node.name}'


def test_model_does_not_ask_tensors_what_they_are():
    """No DTensor, and the type of a device only as the key of autocast's state."""
    for path in OF_THE_MODEL:
        lines = TEXTS[path].splitlines()
        assert not [line for line in lines if re.search(r'placements|DTensor|hasattr|is_cuda', line)]
        assert not [line for line in lines if 'device.type' in line and 'autocast' not in line]


def test_quick_start_loads_what_it_uses(dataset, tmp_path):
    run = run_script('train.py', 'config/quickstart.py', f'--dataset={dataset}', f'--out_dir={tmp_path}/out',
                     '--device=cpu', '--max_iters=1', '--eval_iters=1', env=dict(PYTHONPROFILEIMPORTTIME='1'))
    imported = {path_of(line.split('|')[2].strip()) for line in run.stderr.splitlines()
                if line.startswith('import time:')} - {None}
    assert {'model.py', 'kilogpt/run/state.py'} <= imported
    rooms = {room_of(path) for path in imported if not path.endswith('__init__.py')}
    assert not rooms & {'kilogpt/islands', 'kilogpt/weights', 'kilogpt/evaluate', 'kilogpt/prove', 'kilogpt/chat'}
    assert len(imported) <= 60 and sum(TEXTS[path].count('\n') for path in imported) <= 10000


def test_train_py_imports_few_names_and_its_loop_is_short():
    names = [alias for node in TREES['train.py'].body if isinstance(node, (ast.Import, ast.ImportFrom))
             for alias in node.names]
    loop = next(node for node in TREES['train.py'].body if isinstance(node, ast.While))
    assert len(names) <= 24 and loop.end_lineno - loop.lineno < 40


def test_each_key_is_in_one_file():
    own = {node.targets[0].id for node in TREES['train.py'].body if isinstance(node, ast.Assign)
           and isinstance(node.targets[0], ast.Name) and not node.targets[0].id.startswith('_')
           and node.lineno < TEXTS['train.py'][:TEXTS['train.py'].index('config = configure(')].count('\n') + 1}
    keys = [*own, *(key for page in read_pages(ROOT, ['model.py:GPTConfig', 'kilogpt/keys']) for key in page.values)]
    twice = {key for key in keys if keys.count(key) > 1}
    assert twice == {'bias'}  # nanoGPT's GPTConfig has it, and its train.py has not
    assert 30 < len(own) <= 55


def test_scripts_run_where_unix_is_not(train):
    """Without the modules fcntl and resource and the signal SIGUSR1."""
    elsewhere = [FAULTS / 'other_system.py']
    run = train('--max_iters=1', faults=elsewhere)
    assert list(run.lines) == [1]
    sampled = run_forked('sample.py', f'--out_dir={run.out_dir}', '--device=cpu', '--start=A',
                         '--max_new_tokens=3', '--num_samples=1', faults=elsewhere)
    assert sampled.stdout.startswith('A')


def test_git_ignores_what_commands_write_into_data():
    patterns = pathlib.Path(ROOT, '.gitignore').read_text().split()
    for name in ('train.bin', 'meta.json', 'token_bytes.json', 'chat_template.jinja', 'train.bin.reference'):
        path = pathlib.PurePath('data', 'mine', name)
        assert any(path.match(pattern.replace('**', '*')) for pattern in patterns), name
