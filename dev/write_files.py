"""Write docs/files.md, what each file is for, from the first lines of the files: python dev/write_files.py"""
import ast
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / 'docs' / 'files.md'
TITLE = '''# Every file

`python dev/write_files.py` writes this page from the first line of each file. A folder of `kilogpt/` is the files
about one subject; `python -m pydoc kilogpt.parallel`, for example, says which file of it to read first. Who may
import whom is in `tests/test_house.py`.
'''
FOLDERS = '.', 'data', 'data/make', 'data/tokens', 'kilogpt'


def first_line(path):
    """The first line of a Python file's docstring, '' if it has none."""
    text = ast.get_docstring(ast.parse(path.read_text('utf-8'))) or ''
    return text.partition('\n')[0]


def section(folder):
    """A table of the files of a folder, under what its __init__.py says."""
    files = sorted(path for path in folder.glob('*.py') if path.name != '__init__.py')
    init = folder / '__init__.py'
    lines = ['', f'## {folder.relative_to(ROOT).as_posix()}/' if folder != ROOT else '## What people run and edit', '']
    if init.exists() and first_line(init):
        lines += [first_line(init), '']
    lines += ['| file | |', '| --- | --- |']
    lines += [f'| `{path.relative_to(ROOT).as_posix()}` | {first_line(path)} |'.replace('|e', r'\|e') for path in files]
    return '\n'.join(lines) + '\n'


def page():
    """The whole page."""
    rooms = sorted({path.parent for path in (ROOT / 'kilogpt').glob('*/**/*.py')})
    return TITLE + ''.join(map(section, [*(ROOT / name for name in FOLDERS), *rooms]))


if __name__ == '__main__':
    PAGE.write_text(page(), encoding='utf-8')
