"""Check on a GPU what the other tests check on CPUs: losses, layouts, exact resume. It takes two minutes.

    python tests/gpu_checks.py

Small models train for a few iterations in each way that a GPU can run, many at once; their losses must be
those of the same model in float32 on the CPU. To try this script itself on a CPU: --device=cpu.
"""
import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from data.flags import BEGIN, CONTEXT, REJECTED, pair_begins_of
from data.make.prepare import write_random_tokens
from kilogpt.run.metrics import read_metrics

SHAPE = ('--n_layer=4 --n_head=4 --n_embd=128 --block_size=256 --batch_size=8 '
         '--gradient_accumulation_steps=2 --max_iters=12 --lr_decay_iters=12 --warmup_iters=2 '
         '--learning_rate=3e-3 --log_interval=1 --eval_iters=0 --keep_checkpoints=0')
BLOCKS = '--pos=rope --norm=rmsnorm --qk_norm=True --n_kv_head=2 --tie_weights=False'
MODELS = {
    'GPT-2': '',
    'modern': f'{BLOCKS} --mlp=swiglu --softcap=30 --optimizer=muon --value_pattern=NV --attention_gate '
              '--attention_conv=4 --mlp_conv=3 --lr_factors=embedding:3',
    'experts': f'{BLOCKS} --mlp=moe --n_experts=4 --router_balance=loss',
    'mask': f'{BLOCKS} --documents=mask',
    'pack': f'{BLOCKS} --documents=pack --window=100 --window_pattern=SL',
    'softcap': f'{BLOCKS} --attention_softcap=20',
    'adapters': f'{BLOCKS} --lora_rank=8 --lora_alpha=64',
    'int8 base': f'{BLOCKS} --lora_rank=8 --lora_alpha=64 --lora_base_dtype=int8',
    'bfloat16 base': f'{BLOCKS} --lora_rank=8 --lora_alpha=64 --lora_base_dtype=bfloat16',
    'answers': '--documents=pack',  # conversations, in which a third of the tokens are targets
    'pairs': f'{BLOCKS} --documents=pack --loss=dpo',  # of the same, to train the model that is the reference
}
# Largest relative difference of a loss. Products of float32 are in TF32 on a GPU, whose fraction has 10 bits.
FLOAT32, SIXTEEN_BITS, FLOAT8 = 2e-3, 1e-2, 3e-2
EAGER, COMPILED = '--compile=False --dtype=float32', '--dtype=float32'
SHARED = f'{EAGER} --backend=gloo'  # which cannot send the tensors of tp, pp and pairs under cp from a GPU
# (model, processes, settings, largest difference), the most important first
RUNS = [
    *((model, 1, '--dtype=bfloat16', SIXTEEN_BITS) for model in MODELS),
    # A token that is almost as near to another expert may go there.
    *((model, 1, COMPILED, 3 * FLOAT32 if model == 'experts' else FLOAT32) for model in MODELS),
    ('GPT-2', 1, EAGER, FLOAT32),
    ('modern', 1, '--dtype=bfloat16 --zero_stage=3 --activation_checkpoint=selective', SIXTEEN_BITS),
    ('adapters', 1, '--dtype=bfloat16 --zero_stage=3 --activation_checkpoint=full', SIXTEEN_BITS),
    ('bfloat16 base', 1, '--dtype=bfloat16 --zero_stage=3', SIXTEEN_BITS),
    ('pairs', 1, '--dtype=bfloat16 --zero_stage=3', SIXTEEN_BITS),
    ('GPT-2', 1, '--dtype=bfloat16 --fp8=True', FLOAT8),
    ('GPT-2', 1, '--dtype=float16', SIXTEEN_BITS),
    ('mask', 2, f'{SHARED} --cp=2', FLOAT32),
    ('experts', 2, f'{SHARED} --ep=2', 3 * FLOAT32),
    ('GPT-2', 2, f'{SHARED} --gradient_accumulation_steps=4 --batch_size=4', FLOAT32),
    ('modern', 2, f'{SHARED} --zero_stage=3', FLOAT32),
    ('GPT-2', 1, f'{EAGER} --zero_stage=3 --cpu_offload=True', FLOAT32),
    ('GPT-2', 1, f'{COMPILED} --activation_checkpoint=full', FLOAT32),
    ('GPT-2', 1, f'{COMPILED} --deterministic=True', FLOAT32),
    ('mask', 1, '--dtype=bfloat16 --zero_stage=3 --activation_checkpoint=selective', SIXTEEN_BITS),
]


def write_data(folder):
    """Tokens that a model can learn to predict: small steps around a circle of 255, and a separator, 0.

    Of the same tokens, folder/answers has conversations, folder/pairs pairs, and folder/questions.jsonl questions.
    """
    write_random_tokens(folder, 256, 2 ** 18)
    characters = ''.join(chr(0x100 + token) for token in range(256))
    update_meta(folder, tokenizer='char', chars=characters)
    generator = np.random.default_rng(0)
    tokens = 1 + generator.integers(1, 4, 2 ** 18).cumsum() % 255
    tokens[generator.random(len(tokens)) < 1 / 60] = 0
    for split, part in (('train', tokens[:-2 ** 15]), ('val', tokens[-2 ** 15:])):
        part.astype('uint16').tofile(os.path.join(folder, f'{split}.bin'))
    is_target = np.repeat(generator.random(len(tokens) // 4) < 1 / 3, 4) & (tokens > 0)
    answers = tokens.astype('uint32') | np.where(is_target, 0, CONTEXT) | np.where(tokens == 0, BEGIN, 0)
    pairs = answers | np.where((tokens == 0).cumsum() % 2 == 0, REJECTED, 0)
    for name, flagged in (('answers', answers), ('pairs', pairs)):
        os.mkdir(os.path.join(folder, name))
        shutil.copy(os.path.join(folder, 'meta.json'), os.path.join(folder, name))
        update_meta(os.path.join(folder, name), dtype='uint32', flags=True, pairs=name == 'pairs', separator=None)
        for split, part in (('train', flagged[:-2 ** 15]), ('val', flagged[-2 ** 15:])):
            begins = np.flatnonzero(pair_begins_of(part))
            part = part[begins[0]:begins[min(len(begins) - 1, 500)]]
            part.astype('uint32').tofile(os.path.join(folder, name, f'{split}.bin'))
    with open(os.path.join(folder, 'questions.jsonl'), 'w', encoding='utf-8') as file:
        file.write(json.dumps(dict(settings=dict(delimiter=''))) + '\n')
        for first in range(0, 2 ** 12, 2 ** 6):
            texts = [''.join(characters[token] for token in tokens[start:start + length])
                     for start, length in ((first, 40), (first + 40, 5), (first, 9), (first + 20, 7))]
            question, *choices = texts
            file.write(json.dumps(dict(question=question, choices=choices, answer=0)) + '\n')


def update_meta(folder, **entries):
    path = os.path.join(folder, 'meta.json')
    with open(path, encoding='utf-8') as file:
        meta = json.load(file) | entries
    with open(path, 'w', encoding='utf-8') as file:
        json.dump({key: value for key, value in meta.items() if value is not None}, file)


def launch(command, processes=1, timeout=280):
    """Run a Python command; RuntimeError with the end of its output if it fails."""
    launcher = ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={processes}']
    done = subprocess.run(
        [sys.executable, *(launcher if processes > 1 else []), *command], cwd=ROOT, timeout=timeout,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | dict(OMP_NUM_THREADS='1', TORCHINDUCTOR_COMPILE_THREADS='1'))
    if done.returncode:
        raise RuntimeError(f'exit {done.returncode}: {done.stdout[-3000:]}')
    return done.stdout


def losses(folder, model, processes, settings):
    """The losses of a run of train.py."""
    out_dir = tempfile.mkdtemp(dir=folder)
    script = ['train.py'] if processes == 1 else ['tests/with_fault.py', 'tests/faults/share_gpu.py']
    dataset = os.path.join(folder, 'answers') if model == 'answers' else folder
    arguments = [f'--out_dir={out_dir}', *SHAPE.split(), *MODELS[model].split()]
    if model in ('adapters', 'int8 base', 'bfloat16 base', 'pairs'):  # which begin with a trained model
        base = tempfile.mkdtemp(dir=folder)
        launch(['train.py', f'--dataset={folder}', f'--out_dir={base}', *SHAPE.split(), *BLOCKS.split(),
                *EAGER.split(), '--device=cpu', '--max_iters=2', '--keep_checkpoints=1'])
        arguments.append(f'--init_from={base}')
    if model == 'pairs':
        dataset = shutil.copytree(os.path.join(folder, 'pairs'), os.path.join(out_dir, 'pairs'))
        launch(['-m', 'kilogpt.evaluate', base, f'--reference={dataset}', '--device=cpu', '--dtype=float32'])
    launch([*script, f'--dataset={dataset}', *arguments, *settings.split()], processes)
    return [line['loss'] for line in read_metrics(out_dir)[0].values()]


def check_curve(folder, reference, device, model, processes, settings, bound):
    """One line of the result, and whether it is right."""
    began = time.perf_counter()
    curve = losses(folder, model, processes, f'{settings} --device={device}')
    expected = reference.result()
    difference = max(abs(loss / other - 1) for loss, other in zip(curve, expected, strict=True))
    text = f'largest difference {difference:.1e} of {bound:.0e}, loss {curve[0]:.4f} to {curve[-1]:.4f}'
    return f'{text} ({time.perf_counter() - began:.0f} s)', difference <= bound


def check_resume(folder, device, settings):
    """Whether 12 iterations give the bits of 6 and then 6 more."""
    runs = {}
    for name, stops in (('straight', [12]), ('resumed', [6, 12])):
        runs[name] = os.path.join(tempfile.mkdtemp(dir=folder), name)
        for stop in stops:
            launch(['train.py', f'--dataset={folder}', f'--out_dir={runs[name]}', *SHAPE.split(),
                    '--eval_iters=2', '--eval_interval=6', '--keep_checkpoints=2', '--dropout=0.1',
                    '--init_from=auto', f'--device={device}', f'--max_iters={stop}', *settings.split()])
    straight, resumed = ([(number, line['loss'], line['grad_norm'])
                          for number, line in read_metrics(out_dir)[0].items()] for out_dir in runs.values())
    launch(['sample.py', f'--out_dir={runs["resumed"]}', '--num_samples=1', '--max_new_tokens=40',
            f'--start={chr(0x101)}{chr(0x102)}{chr(0x104)}', f'--device={device}'])
    return f'{len(straight)} iterations, and a sample', straight == resumed and len(straight) == 12


def check_evaluation(folder, device):
    """Whether questions have the log-likelihoods that they have on the CPU; training asks and samples, too."""
    out_dir = os.path.join(tempfile.mkdtemp(dir=folder), 'run')
    questions = os.path.join(folder, 'questions.jsonl')
    launch(['train.py', f'--dataset={folder}', f'--out_dir={out_dir}', *SHAPE.split(), '--dtype=bfloat16',
            '--eval_interval=6', '--eval_iters=2', '--keep_checkpoints=1', f'--device={device}',
            f'--eval_tasks={questions}', '--eval_tasks_interval=6', '--sample_interval=6',
            f'--sample_prompts={chr(0x105)}', '--sample_tokens=20'])
    scores = []
    for each in (device, 'cpu'):
        details = os.path.join(folder, f'details-{each}')
        launch(['-m', 'kilogpt.evaluate', out_dir, f'--tasks={questions}', f'--device={each}',
                '--dtype=float32', f'--details={details}'])
        with open(details, encoding='utf-8') as file:
            scores.append([score for line in file for score in json.loads(line)['nats']])
    difference = max(abs(score - other) for score, other in zip(*scores, strict=True))
    with open(os.path.join(out_dir, 'samples.jsonl'), encoding='utf-8') as file:
        samples = len(file.readlines())
    return (f'largest difference of {len(scores[0])} log-likelihoods {difference:.1e} of 2e-2, {samples} samples',
            difference <= 2e-2 and samples == 3)


def check_tests(folder, *arguments):
    """pytest on some files."""
    result = re.search(r'(\d+) passed.*', launch(['-m', 'pytest', '-n', '0', *arguments]))
    return result[0] if result else 'no test ran', bool(result)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--device', default='cuda', help='where the models train that are checked (cuda)')
    parser.add_argument('--jobs', type=int, default=os.cpu_count(), help='runs at once (one for each core)')
    parser.add_argument('--only', default='', metavar='TEXT', help='only checks with this text in their name')
    options = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        write_data(folder)
        references, checks = {}, {}

        def start(name, check, *arguments):
            if options.only in name:
                checks[name] = pool.submit(check, folder, *arguments)

        for settings in (
                '--dtype=bfloat16', '--compile=False', '--dtype=bfloat16 --zero_stage=3 --optimizer=muon'):
            start(f'resume {settings}', check_resume, options.device, settings)
        for model, processes, settings, bound in RUNS:
            name = f'{model} {"on 2 processes " if processes > 1 else ""}{settings}'
            if options.only in name and model not in references:
                references[model] = pool.submit(losses, folder, model, 1, f'{EAGER} --device=cpu')
            start(name, check_curve, references.get(model), options.device, model, processes, settings,
                  bound)
        start('evaluation', check_evaluation, options.device)
        start('kernels', check_tests, 'tests/devices/test_flex.py', 'tests/devices/test_loss_kernel.py',
              '-k', 'on_a_gpu or loss_and_gradients')
        names = {check: name for name, check in checks.items()}
        for check in as_completed(names):
            try:
                result, is_right = check.result()
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                result, is_right = str(error), False
            wrong += not is_right
            print(f'{"ok   " if is_right else "WRONG"} {names[check]}: {result}', flush=True)
    print(f'{wrong} of {len(checks)} wrong')
    sys.exit(min(wrong, 1))


if __name__ == '__main__':
    main()
