"""Config files and command lines override a script's globals by type, in order; errors are one sentence."""
import contextlib
import functools
import io
import json
import os
import re
import subprocess
import sys

import pytest
from helpers import ROOT, run_script

from kilogpt.configurator import announced, config_of, configure, exit_on_error, read_pages

SCRIPT = '''"""What the script does."""
import os
# ----------------------------------------
# I/O
out_dir = 'out'  # where it goes
steps = 5 * 8  # how many
# numbers
rate = 6e-4  # a # in a comment
_private = 1  # not a group
flag = False
prompt = '# no comment'
long = ('a string '
        'in two parts')  # the comment of its last line
top_k: int | None = 200  # 0 or None = all
top_p: float | None = None
# ----------------------------------------
config = configure(globals())
later = 1  # not a key
'''


def result(*argv, path='script.py'):
    """The keys of SCRIPT after these arguments."""
    namespace = dict(configure=lambda script: configure(script, argv=[str(a) for a in argv]), __file__=str(path))
    exec(SCRIPT, namespace)
    assert all(namespace[key] == value for key, value in namespace['config'].items())
    return namespace['config']


def test_defaults_are_kept_and_only_plain_globals_are_keys():
    assert result() == dict(out_dir='out', steps=40, rate=6e-4, flag=False, prompt='# no comment',
                            long='a string in two parts', top_k=200, top_p=None)


@pytest.mark.parametrize('arguments, key, value', [
    ('--steps=3', 'steps', 3), ('--steps 3', 'steps', 3),
    ('--steps=1_000', 'steps', 1000), ('--steps -3', 'steps', -3), ('--steps=1 --steps=2', 'steps', 2),
    ('--steps=1e3', 'steps', 1000), ('--steps=2.0', 'steps', 2), ('--top_k=1e2', 'top_k', 100),
    ('--out_dir=1e3', 'out_dir', '1e3'), ('--rate=1e-3', 'rate', 1e-3), ('--rate=1', 'rate', 1.0),
    ('--rate -1', 'rate', -1.0), ('--rate=inf', 'rate', float('inf')),
    ('--flag', 'flag', True), ('--flag=TRUE', 'flag', True), ('--flag=true', 'flag', True),
    ('--flag True', 'flag', True), ('--flag --steps=3', 'flag', True),
    ('--flag --flag=False', 'flag', False), ('--flag --flag false', 'flag', False),
    ('--out_dir=a=b=c', 'out_dir', 'a=b=c'), ('--out_dir=a-b/c.d', 'out_dir', 'a-b/c.d'),
    ('--out_dir=5', 'out_dir', '5'), ('--out_dir=None', 'out_dir', 'None'),
    ('--out_dir=true', 'out_dir', 'true'), ('--out_dir=', 'out_dir', ''),
    ('--top_k=None', 'top_k', None), ('--top_k=5', 'top_k', 5),
    ('--top_p=1', 'top_p', 1.0), ('--top_p 0.5', 'top_p', 0.5),
])
def test_command_line(arguments, key, value):
    found = result(*arguments.split())[key]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize('arguments, message', [
    ('--stepz=3', "unknown key 'stepz' in the command line; did you mean steps\\?"),
    ('--ratee', "unknown key 'ratee' .*did you mean rate\\?"),
    ('--lr=3', "unknown key 'lr' .*--help lists them all"),
    ('--qqq=1', "unknown key 'qqq' .*--help lists them all"),
    ('--later=2', "unknown key 'later'"), ('--os=2', "unknown key 'os'"),
    ('--steps=3.5', "steps takes int, but the command line gives '3.5'"),
    ('--steps=1e-3', "steps takes int, .*'1e-3'"), ('--steps=1e999', "steps takes int, .*'1e999'"),
    ('--steps=many', "steps takes int, .*'many'"),
    ('--steps=true', 'steps takes int'), ('--steps=', 'steps takes int'),
    ('--rate=fast', "rate takes float, .*'fast'"),
    ('--flag=1', 'flag takes bool'), ('--flag=yes', "flag takes bool.*'yes'"),
    ('--steps', '--steps needs a value'), ('--steps --flag', '--steps needs a value'),
    ('--top_k=1.5', "top_k takes int or None.*'1.5'"),
    ('no/such/file.py', "config file 'no/such/file.py' does not exist"),
    ('steps=3', "'steps=3' is not a config file; did you mean --steps=3"),
])
def test_bad_arguments_end_in_one_sentence(arguments, message):
    with pytest.raises(SystemExit, match=f'^error: [^\n]*(?:{message})[^\n]*$'):
        result(*arguments.split())


def test_files_and_arguments_apply_in_order(tmp_path):
    one, two = tmp_path / 'one.py', tmp_path / 'two.py'
    one.write_text('steps = 1\nrate = 1\n')
    two.write_text('steps = steps + 1e1\n')  # reads the value so far, as in nanoGPT
    assert result(one, two)['steps'] == 11 and result(two, one)['steps'] == 1
    assert result(one, '--steps=5', two)['steps'] == 15 and result(one, two, '--steps=5')['steps'] == 5
    assert result('--steps=5', one)['steps'] == 1
    assert type(result(two)['steps']) is int
    assert result(one)['rate'] == 1.0 and type(result(one)['rate']) is float


def test_key_before_a_config_file_that_replaces_it_is_named(tmp_path, capsys):
    (tmp_path / 'a.py').write_text('steps = 1\nrate = 2.0\n')
    assert result('--steps=5', '--rate=2', '--flag', tmp_path / 'a.py')['steps'] == 1
    assert capsys.readouterr().err == (
        f'warning: {tmp_path}/a.py replaces steps=5 by 1: write the config file before the keys\n')
    result(tmp_path / 'a.py', '--steps=5')
    assert not capsys.readouterr().err


@pytest.mark.parametrize('script, argument, key', [('train.py', '--lr=1', 'learning_rate'),
                                                   ('train.py', '--steps=1', 'max_iters'),
                                                   ('sample.py', '--prompt=a', 'start')])
def test_name_that_other_programs_have_for_a_key_leads_to_it(script, argument, key):
    with pytest.raises(SystemExit) as ended:
        config_of(os.path.join(ROOT, script), [argument])
    assert ended.value.code.endswith(f'in the command line; did you mean {key}?')


def test_config_file_of_nanogpt_works(tmp_path):
    path = tmp_path / 'config.py'
    path.write_text("import time\nimport os.path as p\nfrom math import sqrt\n_half = 2\n"
                    "def name():\n    return 'ft-' + str(time.time())\n"
                    "out_dir = name()  # a comment\nsteps = 5 * 8 // _half\nrate = sqrt(4)\n"
                    "flag = True\ntop_p = None\n")
    config = result(path)
    assert re.fullmatch(r'ft-\d+\.\d+', config['out_dir'])
    assert config == result() | dict(out_dir=config['out_dir'], steps=20, rate=2.0, flag=True)


@pytest.mark.parametrize('name, text, message', [
    ('a.py', 'stepz = 3',
     r"unknown key 'stepz' in .*a.py; did you mean steps\? \(a helper variable .* must start with _\)"),
    ('a.py', 'helper = 3', "unknown key 'helper' in .*a.py"),
    ('a.py', 'steps = "3"', "steps takes int, but .*a.py gives '3'"),
    ('a.py', 'steps = 2.5', 'steps takes int, but .*a.py gives 2.5'),
    ('a.py', 'flag = 1', 'flag takes bool, but .*a.py gives 1'),
    ('a.py', 'steps = None', 'steps takes int, but .*a.py gives None'),
    ('a.py', 'steps = [1]', 'steps takes int'),
    ('a.py', 'import no_such_module', "a.py, line 1: ModuleNotFoundError.* 'no_such_module'"),
    ('a.py', 'def half(x):\n    return x / 0\nsteps = half(3)', 'a.py, line 2: ZeroDivisionError: division by zero'),
    ('a.py', 'step_of_mine = 3', "unknown key 'step_of_mine' in .*a.py; --help lists them all"),
    ('a.json', '{"stepz": 3}', "unknown key 'stepz' in .*a.json; did you mean steps"),
    ('a.json', '{"steps": null}', 'steps takes int'),
    ('a.json', '{"steps": 3', 'a.json'), ('a.json', '[1]', 'a.json'), ('a.py', 'steps = = 3', 'a.py'),
])
def test_bad_files_end_in_one_sentence(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit, match=f'^error: [^\n]*(?:{message})[^\n]*$'):
        result(tmp_path / name)


@pytest.mark.parametrize('argument, message', [
    ('steps=5', "'steps=5' is not a config file; did you mean --steps=5?"),
    ('{}/a', 'did you mean {}/a.py?'),
    ('{}/text.txt', "{}/text.txt' is not a config file, whose name ends in .py or .json"),
    ('{}', "For example, --out_dir={}"),
])
def test_argument_that_is_not_a_config_file_is_not_executed(tmp_path, argument, message):
    (tmp_path / 'a.py').touch()
    (tmp_path / 'text.txt').write_text('import sys; sys.exit("error: executed")')
    with pytest.raises(SystemExit) as ended:
        result(argument.format(tmp_path))
    assert message.format(tmp_path) in ended.value.code


def test_errors_of_the_system_are_sentences_without_a_number(tmp_path):
    for act, message in ((os.mkdir, f'error: {tmp_path} exists already: choose another name, or move it away'),
                         (os.rmdir, f'error: {tmp_path}/none: No such file or directory')):
        with pytest.raises(SystemExit) as ended, exit_on_error():
            act(tmp_path if act is os.mkdir else tmp_path / 'none')
        assert ended.value.code == message


def test_resolved_config_works_as_a_config_file(tmp_path):
    config = result('--steps=3', '--flag', '--rate=inf', '--top_k=None', '--out_dir=a "b" \\ é')
    (tmp_path / 'config.json').write_text(json.dumps(config))
    assert result(tmp_path / 'config.json') == config
    assert result(tmp_path / 'config.json', '--steps=4') == config | dict(steps=4)


@pytest.mark.parametrize('flag', ['--help', '-h'])
def test_help_has_every_key_with_default_type_comment_and_group(tmp_path, capsys, flag):
    path = tmp_path / 'script.py'
    path.write_text(SCRIPT)
    with pytest.raises(SystemExit) as exit:
        result('--steps=7', flag, path=path)
    assert exit.value.code == 0
    lines = [' '.join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == 'What the script does.'
    assert lines[lines.index('I/O'):] == [
        'I/O', "--out_dir='out' str where it goes", '--steps=40 int how many', '',
        'numbers', '--rate=0.0006 float a # in a comment', '--flag=False bool', "--prompt='# no comment' str",
        "--long='a string in two parts' str the comment of its last line",
        '--top_k=200 int or None 0 or None = all',
        '--top_p=None float or None']


def test_config_is_known_without_running_the_script(tmp_path):
    path = tmp_path / 'script.py'
    path.write_text(SCRIPT.replace('later = 1', 'raise AssertionError("the script ran")'))
    arguments = ['--steps=3', '--top_k=None', '--flag']
    assert config_of(path, arguments) == result(*arguments)
    with pytest.raises(SystemExit, match="^error: unknown key 'stepz' .*did you mean steps"):
        config_of(path, ['--stepz=3'])
    assert config_of(f'{ROOT}/train.py', ['--tp=2'])['tp'] == 2
    assert config_of(f'{ROOT}/sample.py', ['--top_k=None'])['top_k'] is None


@pytest.mark.parametrize('arguments, value', [
    (['--init_from=auto'], 'auto'), (['WEIGHTS'], 'gpt2'), (['WEIGHTS', '--init_from=auto'], 'auto:gpt2'),
    (['WEIGHTS', '--init_from=auto', '--init_from=auto'], 'auto:gpt2'), (['--init_from=auto:gpt2'], 'auto:gpt2'),
    (['WEIGHTS', '--init_from=resume', '--init_from=auto'], 'auto'), (['WEIGHTS', '--init_from=scratch'], 'scratch')])
def test_automatic_resuming_keeps_the_weights_that_a_run_begins_with(tmp_path, arguments, value):
    path = tmp_path / 'weights.py'
    path.write_text("init_from = 'gpt2'")
    given = [str(path) if argument == 'WEIGHTS' else argument for argument in arguments]
    assert config_of(f'{ROOT}/train.py', given)['init_from'] == value


def test_help_whose_reader_stops_shows_no_traceback(tmp_path):
    path = tmp_path / 'script.py'
    keys = ''.join(f'key_{i} = {i}  # several pipe buffers of text\n' for i in range(5000))
    path.write_text(f'import sys\nsys.path.insert(0, {ROOT!r})\n{keys}'
                    'from kilogpt.configurator import configure\nconfigure(globals())\n')
    with subprocess.Popen([sys.executable, str(path), '--help'], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == '\n'  # the script has no docstring
        process.stdout.close()  # as `head` does
        assert process.stderr.read() == ''
    assert process.returncode == 0


@pytest.mark.parametrize('statement, code', [
    ('print("text")', 0),  # written when Python exits
    ('print("text", flush=True)', 1), ('with exit_on_error(): print("text", flush=True)', 1)])
def test_output_whose_reader_has_gone_ends_a_script_without_a_word(statement, code):
    script = f"""from kilogpt.configurator import configure, exit_on_error
configure(globals(), argv=[])
input()
{statement}
"""
    with subprocess.Popen([sys.executable, '-c', script], text=True, cwd=ROOT, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env=os.environ | dict(PYTHONUNBUFFERED='')) as process:
        process.stdout.close()  # as `head` does
        process.stdin.write('go on\n')
        process.stdin.close()
        assert process.stderr.read() == ''
    assert process.returncode == code


def test_broken_pipe_of_a_socket_is_an_error():
    with pytest.raises(SystemExit, match='error: of a socket'), exit_on_error():
        raise BrokenPipeError('of a socket')


@functools.cache
def help_of(script):
    """The finished process of a script's --help, which lists every import on stderr."""
    return run_script(script, '--help', env=dict(PYTHONPROFILEIMPORTTIME='1'))


@pytest.mark.parametrize('word, first, last', [
    ('island', 'Islands: ', '  --'), ('lora_rank', '  --lora_rank=', '  --lora_'),
    ('qqq', 'no key has qqq in its line', 'no key has qqq in its line')])
def test_help_on_a_word_is_short(word, first, last):
    lines = run_script('train.py', '--help', word).stdout.splitlines()
    assert lines[0].startswith(first) and lines[-1].startswith(last) and len(lines) < 20


@pytest.mark.parametrize('script', ['train.py', 'sample.py'])
def test_help_of_the_scripts_explains_every_key(script):
    """Every global before configure(), which a regular expression finds, has a line and a comment."""
    with open(f'{ROOT}/{script}') as file:
        head = re.split(r'^(?:\w+ = )?configure\(globals\(\)', file.read(), flags=re.M)[0]
    keys = re.findall(r'^([a-z]\w*)(?:: [^=]+)? = ', head, flags=re.M)
    if script == 'train.py':
        pages = read_pages(ROOT, ['model.py:GPTConfig', 'kilogpt/keys'])
        keys += [key for page in pages for key in page.values if key not in keys]
    listed = dict(re.findall(r'^  --(\w+)=(.*)$', help_of(script).stdout, flags=re.M))
    assert list(listed) == keys and len(keys) > 5
    for key, rest in listed.items():
        assert re.search(r' (str|int|float|bool)( or None)? +\S.*', rest), f'--{key}={rest}'


@pytest.mark.parametrize('script', ['train.py', 'sample.py'])
def test_scripts_import_a_library_only_where_they_need_it(script):
    imported = {line.split('|')[2].strip().partition('.')[0]
                for line in help_of(script).stderr.splitlines() if line.startswith('import time:')}
    optional = {'datasets', 'wandb', 'matplotlib', 'tiktoken', 'gigatoken', 'transformers', 'torchao'}
    assert not imported & optional and ('torch' in imported) == (script == 'sample.py')


def test_announcement_is_for_terminals_of_the_first_process_and_is_cleared(monkeypatch):
    def shown(is_terminal, rank):
        stderr = io.StringIO()
        stderr.isatty = lambda: is_terminal
        monkeypatch.setattr(sys, 'stderr', stderr)
        monkeypatch.setenv('RANK', rank)
        with contextlib.suppress(ValueError), announced('waiting'):
            assert stderr.getvalue() == 'waiting ...\r' * (is_terminal and rank == '0')
            raise ValueError
        return stderr.getvalue()
    assert shown(True, '0') == 'waiting ...\r\033[K'
    assert shown(False, '0') == shown(True, '1') == ''
