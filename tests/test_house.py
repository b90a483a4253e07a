"""The house stands: who imports whom, how long files are, and that the scripts start where Unix is not.

A module imports modules of lower floors, or helpers of its own floor; nothing imports a script or a command.
"""
import ast
import graphlib
import pathlib
import sys

import pytest

from helpers import FAULTS, ROOT, run_forked

FLOORS = [
    {'model', 'kilogpt.configurator', 'kilogpt.costs', 'kilogpt.errors', 'kilogpt.forecast',
     'kilogpt.hugging_face',
     'kilogpt.layout', 'kilogpt.machines', 'kilogpt.metrics', 'kilogpt.optim', 'kilogpt.settings',
     'kilogpt.stream', 'kilogpt.times', 'kilogpt.trace', 'kilogpt.updates', 'data.fetch', 'data.loader',
     'data.prepare', 'data.tokenizer'},
    {'kilogpt.advise', 'kilogpt.calibrate', 'kilogpt.checkpoint', 'kilogpt.compare',
     'kilogpt.compiler', 'kilogpt.cpu', 'kilogpt.cpu_kernels', 'kilogpt.cuda', 'kilogpt.ddp',
     'kilogpt.dry_run', 'kilogpt.experts', 'kilogpt.forks', 'kilogpt.health', 'kilogpt.island_jobs',
     'kilogpt.islands', 'kilogpt.launch', 'kilogpt.matrices', 'kilogpt.meeting', 'kilogpt.outer',
     'kilogpt.parallel', 'kilogpt.pipeline', 'kilogpt.processes', 'kilogpt.recorder', 'kilogpt.replay',
     'kilogpt.shards', 'kilogpt.trials', 'kilogpt.weights', 'kilogpt.witness'},
    {'train', 'sample', 'bench', 'kilogpt.convert', 'kilogpt.meet', 'kilogpt.plan', 'kilogpt.plot',
     'kilogpt.prove', 'kilogpt.versus'},
]
LONG_FILES = {  # {path: why it is longer than 500 lines}
    'model.py': 'the GPT and its experts, all of it, in one file that runs without the others',
    'train.py': 'each key of a run is a line here, above a script of 400'}
LONG_CLASSES = {}  # {path:class: why it is longer than 250 lines}

HOME = pathlib.Path(ROOT)
PATHS = sorted([*HOME.glob('*.py'), *HOME.glob('kilogpt/*.py'), *HOME.glob('data/**/*.py')])
TEXTS = {path.relative_to(HOME).as_posix(): path.read_text(encoding='utf-8') for path in PATHS}
TREES = {path: ast.parse(text) for path, text in TEXTS.items()}


def module_name(path):
    return path.removesuffix('.py').replace('/', '.').removesuffix('.__init__')


MODULES = {module_name(path) for path in TREES}


def imports_of(tree):
    """Full names of the modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, 'imports are absolute here'
            inside = {f'{node.module}.{alias.name}' for alias in node.names}  # from kilogpt import checkpoint
            found |= inside & MODULES or {node.module}
    return found


def floor_of(module):
    """0 for the ground floor; a dataset's prepare.py is a script."""
    if module.startswith('data.') and module.count('.') == 2:
        return len(FLOORS) - 1
    numbers = [number for number, modules in enumerate(FLOORS) if module in modules]
    assert len(numbers) == 1, f'{module} wants a place in FLOORS, one'
    return numbers[0]


OURS = {module_name(path): imports_of(tree) & MODULES - {'kilogpt', 'data'} for path, tree in TREES.items()
        if not path.endswith('__init__.py')}
pytestmark = pytest.mark.quick


@pytest.mark.parametrize('module', OURS)
def test_module_imports_nothing_of_a_higher_floor_and_no_script(module):
    floor = floor_of(module)
    for imported in OURS[module]:
        assert floor_of(imported) <= floor, f'{imported} is of a higher floor'
        assert floor_of(imported) < len(FLOORS) - 1, f'{imported} is a script'


def test_imports_run_in_no_circle():
    graphlib.TopologicalSorter(OURS).prepare()


def test_model_is_one_file_that_imports_torch_alone():
    foreign = {name.partition('.')[0] for name in imports_of(TREES['model.py'])} - sys.stdlib_module_names
    assert foreign <= {'torch', 'numpy'}
    machinery = {module for module in OURS if floor_of(module) < len(FLOORS) - 1}
    assert {module for module in machinery if 'model' in OURS[module]} <= {
        'kilogpt.dry_run', 'kilogpt.weights'}


def test_layout_is_arithmetic():
    assert 'torch' not in {name.partition('.')[0] for name in imports_of(TREES['kilogpt/layout.py'])}


def test_files_and_classes_are_short():
    assert {path for path, text in TEXTS.items() if text.count('\n') > 500} == LONG_FILES.keys()
    long_classes = set()
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.end_lineno - node.lineno >= 250:
                long_classes.add(f'{path}:{node.name}')
    assert long_classes == LONG_CLASSES.keys()


def test_scripts_run_where_unix_is_not(train):
    """Without the modules fcntl and resource and the signal SIGUSR1."""
    elsewhere = [FAULTS / 'other_system.py']
    run = train('--max_iters=1', faults=elsewhere)
    assert list(run.lines) == [1]
    sampled = run_forked('sample.py', f'--out_dir={run.out_dir}', '--device=cpu', '--start=A',
                         '--max_new_tokens=3', '--num_samples=1', faults=elsewhere)
    assert sampled.stdout.startswith('A')
