"""Tasks of lm-evaluation-harness: every answer is that of its own backend, in each layout."""
import importlib.util
import json
import random
import re
from types import SimpleNamespace

import pytest

from helpers import run_forked, run_script

MISSING = [name for name in ('lm_eval', 'rustbpe', 'accelerate') if not importlib.util.find_spec(name)]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    bool(MISSING), reason=f'{", ".join(MISSING)} missing: pip install lm-eval rustbpe accelerate')]

COMMON = 'dataset_path: json\ntest_split: test\ndataset_kwargs: {{data_files: {{test: {path}}}}}\n'
FIGURE = '  - {{metric: {}, aggregation: {}, higher_is_better: true}}\n'
# The contexts of some questions end in spaces, which belong to the continuation, or are empty.
TASKS = dict(
    choosing='output_type: multiple_choice\ndoc_to_text: "{{context}}"\ndoc_to_target: answer\n'
             'doc_to_choice: choices\nmetric_list:\n'
             + FIGURE.format('acc', 'mean') + FIGURE.format('acc_norm', 'mean'),
    guessing='output_type: loglikelihood\ndoc_to_text: "{{context}}"\ndoc_to_target: "{{word}}"\n'
             'metric_list:\n' + FIGURE.format('acc', 'mean') + FIGURE.format('perplexity', 'perplexity'),
    rolling='output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\nmetric_list:\n'
            + FIGURE.format('byte_perplexity', 'weighted_perplexity'),
    writing='output_type: generate_until\ndoc_to_text: "{{context}}"\ndoc_to_target: "{{word}}"\n'
            'generation_kwargs: {until: [" remem", ". The"], max_gen_toks: 24}\nmetric_list:\n'
            + FIGURE.format('exact_match', 'mean'))
FIGURES = {'task/choosing/acc', 'task/choosing/acc_norm', 'task/guessing/acc', 'task/guessing/perplexity',
           'task/rolling/byte_perplexity', 'task/writing/exact_match'}
# Sentences of few words, which a small model learns to end.
DRAW = random.Random(0)
SUBJECTS, VERBS = ('miller baker sailor farmer doctor'.split(), 'sells counts paints hides remembers'.split())
OBJECTS = 'apples', 'green apples', 'every letter', 'two old clocks', 'bread', 'all of the stones'
WORDS = ' '.join(f'The {DRAW.choice(SUBJECTS)} {DRAW.choice(VERBS)} {DRAW.choice(OBJECTS)}.'
                 for _ in range(300)).split()
HERE_ONLY = dict(HF_HUB_OFFLINE='1', HF_DATASETS_OFFLINE='1')


@pytest.fixture(scope='module')
def model(train, tmp_path_factory):
    """A model of a vocabulary of its own: `run` is its folder, and `exported` one for transformers."""
    folder = tmp_path_factory.mktemp('model')
    (folder / 'text.txt').write_text(' '.join(WORDS), encoding='utf-8')
    text = f'--input={folder}/text.txt'
    run_forked('data/text/train_tokenizer.py', text, '--vocab_size=320', f'--out={folder}/tokenizer')
    run_forked('data/text/prepare.py', text, f'--tokenizer={folder}/tokenizer', f'--out={folder}/data',
               '--num_proc=1')
    run = train(f'--dataset={folder}/data', '--block_size=96', '--max_iters=200', '--lr_decay_iters=200')
    run_forked('kilogpt.convert', 'export', run.out_dir, folder / 'hf')
    return SimpleNamespace(run=run.out_dir, exported=folder / 'hf')


@pytest.fixture(scope='module')
def include(tmp_path_factory):
    """A folder of task files, with lines of the model's own text."""
    folder = tmp_path_factory.mktemp('include')
    documents = {name: [] for name in TASKS}
    for i in range(8):
        begin, count = 37 * i, 3 + 9 * (i % 4)  # lengths differ, and the longest exceed block_size
        context, space = ' '.join(WORDS[begin:begin + count]), ' ' * (i % 3)
        places = begin + count, 5 * i + 9, 8 * i + 50, 400 + i
        following = [' '.join(WORDS[place:place + 1 + i % 3]) for place in places]
        documents['choosing'].append(dict(context=context + space, choices=following, answer=i % 4))
        documents['guessing'].append(dict(context=context if i else '', word=WORDS[begin + count]))
        documents['rolling'].append(dict(text=' '.join(WORDS[begin:begin + 4 * count])))
        documents['writing'].append(dict(context=context, word=WORDS[begin + count]))
    for name, lines in documents.items():
        path = folder / f'{name}.jsonl'
        path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
        (folder / f'{name}.yaml').write_text(f'task: {name}\n' + COMMON.format(path=path) + TASKS[name])
    # A question without an answer, and the same questions without it
    whole = [dict(context=f'The {subject}', word=' sells') for subject in SUBJECTS]
    for name, lines in dict(whole=whole, broken=[*whole[:2], dict(context='The miller', word=''), *whole[2:]]).items():
        (folder / f'{name}.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
        (folder / f'{name}.yaml').write_text(f'task: {name}\ntarget_delimiter: ""\n' + COMMON.format(
            path=folder / f'{name}.jsonl') + TASKS['guessing'])
    (folder / 'absent.yaml').write_text('task: absent\n' + TASKS['writing'] + 'dataset_path: nobody/absent\n'
                                        'test_split: test\n')
    return folder


@pytest.fixture(scope='module')
def answers(model, include, tmp_path_factory):
    """A function that runs tests/harness_samples.py: {task: [answer]} and {task: {figure: value}}."""
    def answers(source, *arguments, runner=run_forked, **options):
        out = tmp_path_factory.mktemp('answers') / 'answers.json'
        env = HERE_ONLY | dict(HF_HOME=str(out.parent))
        runner('tests/harness_samples.py', source, include, out, *TASKS, *arguments, env=env, timeout=900,
               **options)
        return json.loads(out.read_text())
    return answers


@pytest.fixture(scope='module')
def theirs(model, answers):
    """The answers of the harness's own backend."""
    return answers(model.exported, '--hf', runner=run_script)


def assert_same_answers(ours, theirs):
    for task, expected in theirs['answers'].items():
        assert len(ours['answers'][task]) == len(expected) > 0
        for answer, other in zip(ours['answers'][task], expected):
            assert_same(answer[0], other[0])
        figures = {key: value for key, value in theirs['results'][task].items() if isinstance(value, float)}
        assert figures
        assert {key: ours['results'][task][key] for key in figures} == pytest.approx(figures, rel=1e-4)


def assert_same(answer, other):
    """Assert that two answers agree: [log-likelihood, is_greedy], a log-likelihood or a text."""
    if isinstance(other, str):
        assert answer == other
    else:
        assert answer == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize('source', ['run', 'exported'])
def test_every_answer_is_that_of_transformers(source, model, answers, theirs):
    assert_same_answers(answers(getattr(model, source)), theirs)
    texts = [text for text, in theirs['answers']['writing']]
    assert len(set(texts)) > 2 and any(len(text) < 20 for text in texts)  # some reach a stop string


@pytest.mark.parametrize('layout', [[], ['--zero_stage=3'], ['--tp=2']])
def test_two_processes_give_the_same_answers(layout, model, answers, theirs):
    assert_same_answers(answers(model.run, *layout, nproc=2), theirs)


def test_command_writes_the_figures_of_the_harness(model, include, theirs, tmp_path):
    env = HERE_ONLY | dict(HF_HOME=str(tmp_path))
    done = run_forked('kilogpt.evaluate', model.run, f'--lm_eval={",".join(TASKS)}',
                      '--device=cpu', '--dtype=float32', f'--lm_eval_include={include}',
                      f'--out={tmp_path}/scores.json', env=env, nproc=2)
    scores = json.loads((tmp_path / 'scores.json').read_text())
    assert {key for key in scores if not key.endswith('_stderr')} == FIGURES | {'source', 'iter', 'tokens'}
    for key in FIGURES:
        _, task, figure = key.split('/')
        assert scores[key] == pytest.approx(theirs['results'][task][f'{figure},none'], rel=1e-4)
    assert 'task/choosing/acc_stderr' in scores and done.outputs[1].strip() == 'exit code 0'
    line = re.search(r'^choosing +8  acc +([\d.]+) ± ', done.stdout, re.M)
    assert float(line[1]) == pytest.approx(scores['task/choosing/acc'], abs=1e-4)


@pytest.mark.parametrize('task, error', [
    ('chosing', "error: lm-evaluation-harness has no task 'chosing': "),
    ('absent', "error: the data of absent cannot be had (Couldn't reach 'nobody/absent' on the Hub")])
def test_task_that_cannot_run_is_one_sentence(task, error, model, include, tmp_path):
    env = HERE_ONLY | dict(HF_HOME=str(tmp_path))
    done = run_forked('kilogpt.evaluate', model.run, f'--lm_eval={task}', f'--lm_eval_include={include}',
                      env=env, check=False)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(error), done.stderr


def test_limit_and_shots_reach_the_harness(model, include, tmp_path):
    env = HERE_ONLY | dict(HF_HOME=str(tmp_path))

    def score(*arguments):
        done = run_forked('kilogpt.evaluate', model.run, '--lm_eval=guessing', f'--lm_eval_include={include}',
                          f'--out={tmp_path}/scores.json', *arguments, env=env)
        questions = [line.split()[1] for line in done.stdout.splitlines() if line.startswith('guessing')]
        return questions, json.loads((tmp_path / 'scores.json').read_text())['task/guessing/perplexity']

    (whole, perplexity), (some, _), (_, with_example) = score(), score('--limit=3'), score('--shots=1')
    assert set(whole) == {'8'} and set(some) == {'3'} and with_example != pytest.approx(perplexity, rel=1e-3)


def test_question_that_cannot_be_scored_is_left_out_and_named(model, include, tmp_path):
    """The harness's own backend ends there with an AssertionError."""
    done = run_forked('kilogpt.evaluate', model.run, '--lm_eval=broken,whole,writing', f'--lm_eval_include={include}',
                      f'--out={tmp_path}/scores.json', env=HERE_ONLY | dict(HF_HOME=str(tmp_path)), nproc=2)
    scores = json.loads((tmp_path / 'scores.json').read_text())
    for figure in ('acc', 'perplexity'):
        assert scores[f'task/broken/{figure}'] == scores[f'task/whole/{figure}']
    assert 'warning: question 2 of broken is left out: ' in done.stdout + done.stderr
    assert re.search(r'^broken +5 ', done.stdout, re.M) and re.search(r'^writing +8 ', done.stdout, re.M)


def test_comparison_script_prints_equal_log_likelihoods(model, tmp_path):
    (tmp_path / 'text.txt').write_text(' '.join(WORDS), encoding='utf-8')
    questions = tmp_path / 'questions.jsonl'
    run_script('data/tasks/make.py', f'--input={tmp_path}/text.txt', f'--out={questions}', '--count=4',
               '--context_words=8', '--choice_words=4')
    done = run_script('dev/versus_lm_eval.py', model.exported, questions, '--rounds=1', '--batch_sizes=1,4',
                      f'--text={tmp_path}/text.txt', '--text_bytes=2000')
    table, theirs, ours = map(str.split, done.stdout.splitlines()[-3:])
    assert table[5].rstrip(',') == table[6] and float(table[7]) < 1e-3
    assert (theirs[0], ours[0]) == ('transformers', 'kiloGPT')
    assert float(theirs[1]) == pytest.approx(float(ours[1]), abs=1e-5)
