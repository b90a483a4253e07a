"""Learning from rewards: the loss against a slow reference and TRL's, texts as data, rewards of others' code, and runs."""
import json
import os
import random
from unittest import mock

import numpy as np
import pytest
import torch

from helpers import FAULTS, assert_same_tensors, curve, newest_weights, run_script
from kilogpt.layers.losses import use_loss
from kilogpt.learn.loaders import TextLoader
from kilogpt.learn.rewards import Rewards
from kilogpt.learn.rollouts import Text, set_advantages
from model import GPT, GPTConfig

V, T = 13, 12
KEYS = dict(loss='rl', rl_kl=0.0, rl_clip=0.2, rl_updates=1)
CONFIG = dict(block_size=T, batch_size=8, gradient_accumulation_steps=1, rl_updates=1)


def some_texts(seed=0, n_prompts=2, n_samples=4):
    rng, texts = np.random.default_rng(seed), []
    for _ in range(n_prompts):
        prompt = rng.integers(0, V, rng.integers(2, 5)).tolist()
        group = [Text(prompt, rng.integers(0, V, rng.integers(1, 6)).tolist(), False, float(rng.integers(0, 3)))
                 for _ in range(n_samples)]
        set_advantages(group, False)
        texts += group
    return texts


def batch_of(texts, config=CONFIG):
    loader = TextLoader(config, None)
    loader.texts = dict(enumerate(texts))
    numbers = np.arange(len(texts))
    return [torch.from_numpy(array) for array in loader.train_batch(numbers)], loader.count_targets(None, numbers)


def build(**keys):
    gpt = GPT(GPTConfig(block_size=T, vocab_size=V, n_layer=1, n_head=2, n_embd=16)).double()
    use_loss(gpt, KEYS | keys)
    return gpt


def slow_loss(gpt, texts, kl=0.0, clip=0.0):
    """The loss of one token after another, each from a forward pass of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for number, text in enumerate(texts):
        for place, token in enumerate(text.ids):
            log_p = gpt(torch.tensor([text.prompt + text.ids[:place]]))[0, -1].log_softmax(dim=-1)[token]
            gain = text.advantage
            if kl:
                gain = gain - kl * (log_p.detach() - text.reference[place])
            if not clip:
                total = total - gain * (log_p - log_p.detach() + 1)  # of the value -gain
            else:
                ratio = torch.exp(log_p - text.old[place])
                total = total - torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain)
    return total


def gradients(gpt, loss):
    return torch.autograd.grad(loss, list(gpt.parameters()))


@pytest.fixture
def in_float64(monkeypatch):
    cast = torch.Tensor.float  # the model casts to float32 in places
    monkeypatch.setattr(torch.Tensor, 'float', lambda self: self if self.dtype == torch.float64 else cast(self))


@pytest.mark.parametrize('keys', [{}, dict(rl_kl=0.3), dict(rl_updates=2), dict(rl_updates=2, rl_kl=0.1)])
def test_loss_and_gradient_are_those_of_the_formulas(keys, in_float64):
    """In float64, except that advantages and known log-probabilities are float32: hence 1e-6."""
    gpt, texts, rng = build(**keys), some_texts(), np.random.default_rng(1)
    for text in texts:
        text.reference = rng.normal(-2.5, 1, len(text.ids)).tolist()
        text.old = rng.normal(-2.5, 0.3, len(text.ids)).tolist()
    batch, n_targets = batch_of(texts)
    assert n_targets == sum(len(text.ids) for text in texts) == (batch[1] >= 0).sum()
    loss = gpt(*batch)
    expected = slow_loss(gpt, texts, keys.get('rl_kl', 0.0), 0.2 if 'rl_updates' in keys else 0.0)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    for found, slow in zip(gradients(gpt, loss), gradients(gpt, expected)):
        torch.testing.assert_close(found, slow, rtol=1e-6, atol=1e-6)


def test_tokens_of_a_prompt_never_count():
    texts = some_texts()
    (x, y, _, advantages, known), _ = batch_of(texts)
    for row, text in enumerate(texts):
        places = torch.nonzero(y[row] >= 0)[:, 0].tolist()
        assert places == list(range(len(text.prompt) - 1, len(text.prompt) + len(text.ids) - 1))
        assert x[row, :len(text.prompt)].tolist() == text.prompt and y[row, places].tolist() == text.ids
        others = [place for place in range(T) if place not in places]
        assert not advantages[row, others].any() and not known[row, others].any()


def test_prompt_token_that_counts_would_be_seen(in_float64):
    """A planted mistake: the last token of each prompt is a target too.

    By itself it gives no gradient, since the advantages of a group, whose texts have one prompt, add up to 0. It shows
    in the number of targets, and with a divergence from a reference.
    """
    gpt, texts = build(rl_kl=0.3), some_texts()
    for text in texts:
        text.reference = [-2.0] * len(text.ids)
    (x, y, starts, advantages, known), _ = batch_of(texts)
    for row, text in enumerate(texts):
        place = len(text.prompt) - 2
        y[row, place], advantages[row, place] = text.prompt[-1], text.advantage
    wrong, right = gpt(x, y, starts, advantages, known), slow_loss(gpt, texts, 0.3)
    assert any(not torch.allclose(found, slow, rtol=1e-3, atol=1e-5)
               for found, slow in zip(gradients(gpt, wrong), gradients(gpt, right)))


@pytest.mark.parametrize('is_scaled', [False, True])
@pytest.mark.parametrize('rewards', [[1.0] * 4, [0.0] * 4, [None] * 4, [2.0, None, None, None]])
def test_equal_rewards_give_no_gradient_and_no_nan(rewards, is_scaled, in_float64):
    gpt, texts = build(), some_texts(n_prompts=1)
    for text, reward in zip(texts, rewards):
        text.reward, text.advantage = reward, 0.0
    set_advantages(texts, is_scaled)
    batch, _ = batch_of(texts)
    loss = gpt(*batch)
    assert loss.item() == 0 and all(not gradient.any() for gradient in gradients(gpt, loss))


@pytest.mark.slow
@pytest.mark.parametrize('updates', [1, 2])
def test_loss_and_gradient_are_those_of_trl(updates, in_float64):
    """GRPOTrainer's own function, with its loss divided by the tokens ('bnpo'), on the same weights and texts."""
    trainers = pytest.importorskip('trl.trainer.grpo_trainer', reason='trl is not installed')
    texts, rng = some_texts(), np.random.default_rng(2)
    for text in texts:
        text.prompt, text.old = texts[0].prompt, rng.normal(-2.5, 0.3, len(text.ids)).tolist()
    longest = max(len(text.ids) for text in texts)

    def padded(values):
        return torch.tensor([row + [0] * (longest - len(row)) for row in values])

    plain = GPT(GPTConfig(block_size=T, vocab_size=V, n_layer=1, n_head=2, n_embd=16)).double()

    def log_p_of(model, ids, mask, count, **options):
        log_p = model(ids)[:, -count - 1:-1].log_softmax(dim=-1)
        return log_p.gather(-1, ids[:, -count:, None])[..., 0], -(log_p.exp() * log_p).sum(-1), None

    trainer = mock.MagicMock(
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=0.0, loss_type='bnpo',
        importance_sampling_level='token', epsilon_low=0.2, epsilon_high=0.2, use_vllm=False, _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1, _get_per_token_logps_and_entropies=log_p_of)
    trainer.args.delta, trainer.accelerator.gather = None, lambda x: x
    inputs = dict(
        prompt_ids=torch.tensor([text.prompt for text in texts]), completion_ids=padded([text.ids for text in texts]),
        prompt_mask=torch.ones(len(texts), len(texts[0].prompt)), completion_mask=padded([[1] * len(text.ids) for text in texts]),
        advantages=torch.tensor([text.advantage for text in texts]),
        **dict(old_per_token_logps=padded([text.old for text in texts])) if updates > 1 else {})
    expected = trainers.GRPOTrainer._compute_loss(trainer, plain, inputs)
    gpt = build(rl_updates=updates)
    batch, n_targets = batch_of(texts)
    loss = gpt(*batch) / n_targets
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)  # advantages are float32
    for found, theirs in zip(gradients(gpt, loss), gradients(plain, expected)):
        torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-7)


# --- rewards of others' code ------------------------------------------------------------------------------

REWARD = '''
import os, time
print('what is printed does not meet the answers')
def reward(row, text):
    if text == 'late':
        time.sleep(60)
    if text == 'exit':
        os._exit(3)
    return dict(good=2, nan=float('nan'), word='high', none=None)[text] + row['more']
'''


def test_rewards_in_a_process_of_its_own_answer_fail_and_are_late(tmp_path):
    path = tmp_path / 'reward.py'
    path.write_text(REWARD)
    rewards, row = Rewards(str(path), 0.5), dict(more=0)
    try:
        assert rewards.score(row, 'good') == (2.0, None)
        for text, problem in (('nan', 'it is nan, not a number'), ('word', 'TypeError: can only concatenate str'),
                              ('other', "KeyError: 'other'"), ('late', 'it took more than 0.5s'),
                              ('exit', 'its process ended')):
            reward, found = rewards.score(row, text)
            assert reward is None and found.startswith(problem), found
            assert rewards.score(dict(more=1), 'good') == (3.0, None)  # in a new process if need be
    finally:
        rewards.close()
    path.write_text('def award(row, text): pass')
    with pytest.raises(ValueError, match="which does not give rewards: KeyError: 'reward'"):
        Rewards(str(path), 1).score(row, 'good')


# --- reasoning-gym, and conversations ----------------------------------------------------------------------

REASONING_GYM = '''
import dataclasses, random, types

@dataclasses.dataclass
class Config:
    seed: int = 0
    size: int = 1
    most: int = 99

class Task:
    def __init__(self, config):
        self.config = config
    def __getitem__(self, i):
        number = random.Random(f'{self.config.seed} {i}').randrange(self.config.most)
        return dict(question=f'{number} + 1?', answer=str(number + 1), metadata=dict(number=number))
    def score_answer(self, answer, entry):
        return len(answer) + float(answer == entry['answer'])

factory = types.SimpleNamespace(DATASETS=dict(next=(Task, Config)))
'''


@pytest.fixture(scope='module')
def reasoning_gym(tmp_path_factory):
    """The environment of processes for which a package of that name has one task."""
    folder = tmp_path_factory.mktemp('site')
    (folder / 'reasoning_gym.py').write_text(REASONING_GYM)
    return dict(PYTHONPATH=str(folder))


def prepare_task(out, *arguments, task='next', env=None, **options):
    return run_script('data/reasoning_gym/prepare.py', f'--out={out}', f'--task={task}', '--tokenizer=bytes', '--size=20',
                      '--val_size=4', *arguments, env=env, **options)


def test_prompts_of_a_task_are_conversations_which_the_task_rewards(train, reasoning_gym, tmp_path):
    out = tmp_path / 'task'
    prepare_task(out, env=reasoning_gym)
    rows = {split: [json.loads(line) for line in (out / f'{split}.jsonl').read_text().splitlines()]
            for split in ('train', 'val')}
    assert [len(rows[split]) for split in ('train', 'val')] == [20, 4]
    assert len({row['question'] for of_split in rows.values() for row in of_split}) == 24
    assert rows['val'][0]['messages'] == [dict(role='user', content=rows['val'][0]['question'])]
    run = train('--loss=rl', '--rl_reward=reasoning_gym:next', f'--rl_prompts={out}/train.jsonl', '--rl_samples=4',
                f'--rl_val_prompts={out}/val.jsonl', '--rl_tokens=5', '--block_size=64', f'--dataset={out}',
                '--max_iters=2', '--rl_eval_prompts=2', '--eval_iters=1', env=reasoning_gym)
    assert all(0 < line['reward'] <= 6 for line in texts_of(run).values()) and list(run.lines) == [1, 2]
    sample = json.loads((run.out_dir / 'samples.jsonl').read_text().splitlines()[0])
    assert sample['prompt'] == rows['val'][0]['question'] and sample['reward'] == pytest.approx(len(sample['text'].strip()))


@pytest.mark.parametrize('arguments, task, sentence', [
    ((), 'nexd', "does not have the task 'nexd': choose one such as next"),
    (['--options=least=3'], 'next', 'its options are most'), (['--options=most'], 'next', 'it must be name=value'),
    (['--options=most=7'], 'next', 'only 7 are different'), (['--size=0'], 'next', 'both must be at least 1')])
def test_tasks_that_cannot_be_get_a_sentence(reasoning_gym, tmp_path, arguments, task, sentence):
    done = prepare_task(tmp_path / 'task', *arguments, task=task, env=reasoning_gym, check=False)
    assert done.returncode == 1 and sentence in done.stderr and 'Traceback' not in done.stderr


def test_answer_in_tags_is_the_one_that_is_scored(reasoning_gym, monkeypatch):
    monkeypatch.setenv('PYTHONPATH', reasoning_gym['PYTHONPATH'])
    rewards = Rewards('reasoning_gym:next', 5)
    try:
        assert rewards.score(dict(answer='25'), ' 25\n') == (3.0, None)
        text = 'I think that <answer>7</answer> is wrong: <answer> 25 </answer>'
        assert rewards.score(dict(answer='25'), text) == (3.0, None)
    finally:
        rewards.close()
    with pytest.raises(ValueError, match="reasoning_gym:no'.*does not have the task 'no'"):
        Rewards('reasoning_gym:no', 5).score({}, '')


@pytest.mark.slow
@pytest.mark.parametrize('task', ['chain_sum', 'word_sorting', 'countdown'])
def test_tasks_of_reasoning_gym_reward_their_own_answers(tmp_path, task):
    pytest.importorskip('reasoning_gym', reason='reasoning-gym is not installed')
    prepare_task(tmp_path / 'task', task=task)
    rewards = Rewards(f'reasoning_gym:{task}', 20)
    try:
        for line in (tmp_path / 'task' / 'train.jsonl').read_text().splitlines():
            row = json.loads(line)
            assert rewards.score(row, row['answer']) == (1.0, None)
            assert rewards.score(row, 'none of these')[0] < 0.5
    finally:
        rewards.close()


# --- runs -------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def start(train, tmp_path_factory):
    """(the folder of a trained run, that of prompts.jsonl and of reward.py, which counts odd letters)."""
    folder = tmp_path_factory.mktemp('prompts')
    rows = [dict(prompt=chr(40 + i % 20) * (1 + i % 3), more=i) for i in range(12)]
    (folder / 'prompts.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    (folder / 'reward.py').write_text("def reward(row, text): return sum(ord(c) % 2 for c in text) + row['more'] * 0.01\n")
    return train('--eval_iters=0').out_dir, folder


def arguments_of(start):
    base, folder = start
    return [f'--init_from={base}', '--loss=rl', f'--rl_prompts={folder}/prompts.jsonl', '--rl_samples=4', '--rl_tokens=6',
            f'--rl_val_prompts={folder}/prompts.jsonl', f'--rl_reward={folder}/reward.py', '--eval_iters=1',
            '--gradient_accumulation_steps=6', '--learning_rate=1e-2']


def texts_of(run):
    """{iteration: the line of its texts}."""
    lines = [json.loads(line) for line in (run.out_dir / 'metrics.jsonl').read_text().splitlines()]
    return {line['iter']: line for line in lines if 'without_reward' in line}


def test_rewards_rise_and_the_log_has_what_one_watches(train, start):
    run = train(*arguments_of(start), '--rl_eval_samples=2')
    texts = texts_of(run)
    assert list(texts) == list(range(12)) and texts[11]['reward'] > texts[0]['reward'] + 0.5
    assert {'reward', 'passed', 'length', 'cut_off'} < texts[0].keys() and 'entropy' in run.lines[1]
    assert 'pass@2' in run.stdout and all('val_loss' in line for line in run.evals.values())
    samples = [json.loads(line) for line in (run.out_dir / 'samples.jsonl').read_text().splitlines()]
    assert {'iter', 'prompt', 'text', 'reward'} <= samples[0].keys()


@pytest.mark.parametrize('keys', [['--rl_updates=3', '--rl_kl=0.2'], pytest.param([], marks=pytest.mark.slow)])
def test_run_that_was_killed_in_a_reward_continues_to_the_bit(train, start, tmp_path, keys):
    arguments = [*arguments_of(start), *keys, '--save_interval=1', '--async_checkpoint=False']
    whole = train(*arguments)
    killer = tmp_path / 'reward.py'  # ends the run once, in a reward of a random iteration
    n_texts = np.random.default_rng(0).integers(40, 120)
    killer.write_text((start[1] / 'reward.py').read_text() + f'''
import os, pathlib
count, plain, flag = 0, reward, pathlib.Path({str(tmp_path / "done")!r})
def reward(row, text):
    global count
    count += 1
    if count == {n_texts} and not flag.exists():
        flag.touch()
        os.kill(os.getppid(), 9)
    return plain(row, text)
''')
    out_dir = tmp_path / 'out'
    killed = train(*arguments, f'--rl_reward={killer}', out_dir=out_dir, check=False, runner=run_script)
    assert killed.returncode and (tmp_path / 'done').exists()
    rest = train(*arguments, '--init_from=resume', out_dir=out_dir)
    assert list(rest.lines) == list(range(1, 13)) and curve(rest) == curve(whole)
    assert_same_tensors(newest_weights(rest.out_dir), newest_weights(whole.out_dir))


LAYOUTS = [(1, []), (2, []), (2, ['--zero_stage=3']), (2, ['--tp=2']), (2, ['--cp=2']), (2, ['--pp=2']),
           (2, ['--pp=2', '--pp_schedule=zbv'])]
# How often, at most, a process enters a phase in two iterations; the main process alone asks for rewards.
PHASES = {'text': 20, 'reward': 48, 'pass': 4, 'update': 2, 'save': 2}


@pytest.mark.slow
def test_run_killed_at_drawn_moments_continues_in_drawn_layouts(train, start):
    """In float64, where rounding decides no draw. RL_KILLS: how often the run is killed."""
    seed = int(os.environ.get('RL_SEED', random.randrange(10 ** 6)))
    draw, kills = random.Random(seed), int(os.environ.get('RL_KILLS', 4))
    arguments = [str(FAULTS / 'double.py'), str(FAULTS / 'killed_once.py'), *arguments_of(start), '--save_interval=1',
                 '--async_checkpoint=False', '--rl_updates=2', '--rl_kl=0.2', f'--max_iters={2 * kills + 4}']
    whole = train(*arguments, env=dict(KILL=''), runner=run_script)
    out_dir, moments = start[1] / f'out-{seed}', []
    for number in range(kills + 1):
        nproc, layout = draw.choice(LAYOUTS)
        phase = draw.choice([*PHASES])
        rank = 0 if phase == 'reward' else draw.randrange(nproc)
        kill = f'{phase} {rank} {draw.randint(1, PHASES[phase])}' if number < kills else ''
        run = train(*arguments, *layout, '--init_from=auto', out_dir=out_dir, nproc=nproc, env=dict(KILL=kill),
                    runner=run_script, check=False)
        moments.append((kill, nproc, *layout, 'ended' if run.returncode else 'to the end'))
        print(seed, moments[-1], run.stderr[-2000:] if not kill and run.returncode else '')
    assert run.returncode == 0
    assert list(run.lines) == list(whole.lines)
    for iteration, line in run.lines.items():
        assert line['loss'] == pytest.approx(whole.lines[iteration]['loss'], abs=1e-9), moments
    rewards, expected = ({i: line['reward'] for i, line in texts_of(each).items()} for each in (run, whole))
    assert rewards == expected, moments
    torch.testing.assert_close(newest_weights(out_dir), newest_weights(whole.out_dir), atol=1e-8, rtol=0)


def test_bad_reward_ends_the_run_in_a_sentence_or_is_left_out(train, start, tmp_path):
    (tmp_path / 'reward.py').write_text("def reward(row, text): return 1 / (row['more'] - 5)\n")
    arguments = [*arguments_of(start), f'--rl_reward={tmp_path}/reward.py']
    ended = train(*arguments, check=False)
    assert ended.returncode == 1 and 'Traceback' not in ended.stderr
    assert 'the reward of row {"prompt": "---", "more": 5}: ZeroDivisionError: division by zero' in ended.stderr
    skipped = train(*arguments, '--rl_reward_errors=skip')
    assert sum(line['without_reward'] for line in texts_of(skipped).values()) >= 4


@pytest.mark.parametrize('row, sentence', [
    (dict(question='A'), 'row 2: it has neither a text `prompt` nor a list `messages`'),
    (dict(messages=[]), 'row 2: messages is []: it must be a list'),
    (dict(messages=[dict(role='user', content='A'), dict(role='assistant', content='B')]), 'leave it out')])
def test_prompts_that_cannot_be_get_a_sentence(train, start, tmp_path, row, sentence):
    (tmp_path / 'prompts.jsonl').write_text('{"prompt": "A"}\n' + json.dumps(row))
    run = train(*arguments_of(start), f'--rl_prompts={tmp_path}/prompts.jsonl', check=False)
    assert run.returncode == 1 and sentence in run.stderr and 'Traceback' not in run.stderr


@pytest.mark.parametrize('keys, sentence', [
    (['--rl_prompts='], 'needs prompts: name a .jsonl file'), (['--rl_samples=5'], 'does not divide the 24 sequences'),
    (['--rl_reward='], 'needs a file with rewards, or a teacher'), (['--rl_tokens=31'], 'leaves room for 1'),
    (['--rl_samples=1'], 'set it to 2 or more'), (['--islands=2'], 'leave both out')])
def test_keys_that_do_not_fit_get_a_sentence(train, start, keys, sentence):
    run = train(*arguments_of(start), *keys, check=False)
    assert run.returncode == 1 and sentence in run.stderr and 'Traceback' not in run.stderr


@pytest.mark.slow
def test_model_learns_to_add_by_rewards_alone(tmp_path):
    """A short form of docs/rewards.md. Each mean is of 5,120 texts, so that its standard error is below 0.006."""
    sums, out = tmp_path / 'sums', tmp_path / 'out'
    run_script('data/sums/prepare.py', f'--out={sums}')
    run_script('train.py', 'config/sums.py', f'--dataset={sums}', f'--out_dir={out}', '--device=cpu', '--max_iters=350')
    run_script('train.py', 'config/sums_rewards.py', f'--init_from={out}', f'--out_dir={out}-rewards', '--device=cpu',
               f'--dataset={sums}', f'--rl_prompts={sums}/train.jsonl', '--rl_val_prompts=', '--max_iters=100',
               '--lr_decay_iters=450', '--eval_interval=100', '--eval_iters=0', '--keep_checkpoints=0')
    lines = [json.loads(line) for line in (tmp_path / 'out-rewards' / 'metrics.jsonl').read_text().splitlines()]
    passed = [line['passed'] for line in lines if 'without_reward' in line]
    assert len(passed) == 100 and np.mean(passed[-10:]) > np.mean(passed[:10]) + 0.05
