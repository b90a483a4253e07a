"""Compare learning from rewards with TRL's GRPOTrainer: seconds of a whole step (texts, rewards, update), and memory.

    python data/chatterbot/prepare.py --tokenizer=../smollm2
    OMP_NUM_THREADS=2 python dev/versus_grpo.py ../smollm2 --dataset=chatterbot
    OMP_NUM_THREADS=2 python dev/versus_grpo.py ../smollm2 --dataset=chatterbot --dtype=bfloat16

Both train all weights by AdamW, on the same prompts, with the same reward and as many texts of as many tokens; none
ends early. TRL's options are set to what loss=rl does: no division by the deviation, no reference, one update. Each
draws by its own random numbers, so the texts differ (tests/test_rewards.py compares losses and gradients of the same
ones). Further arguments are keys of train.py.
"""
import argparse
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import torch

from kilogpt.launch_train import as_arguments, train
from kilogpt.run.metrics import peak_memory_gb

SAMPLES, TOKENS = 8, 64
WORDS = 'the of a river stone bread over under green seven letter window water quickly house and morning'.split()


def reward(row, text):
    return text.count('e') / max(1, len(text))


def prompts(count):
    return [' '.join(WORDS[(7 * number + 3 * i + i * i) % len(WORDS)] for i in range(24)) for number in range(count)]


def train_theirs(options):
    """Print JSON: when each step ended, and the memory."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    ends = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **__):
            ends.append(time.perf_counter())

    def rewards(completions, **_):
        return [reward(None, text) for text in completions]

    count = options.texts // SAMPLES
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            folder, per_device_train_batch_size=options.texts, num_generations=SAMPLES, max_completion_length=TOKENS,
            generation_kwargs=dict(min_new_tokens=TOKENS), max_steps=options.iters, learning_rate=1e-5,
            scale_rewards='none', loss_type='dapo', beta=0.0, max_grad_norm=1.0, gradient_checkpointing=False,
            use_cpu=True, bf16=options.dtype == 'bfloat16', save_strategy='no', report_to=[], disable_tqdm=True)
        tokenizer = AutoTokenizer.from_pretrained(options.weights)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        trainer = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(options.weights), rewards, arguments, processing_class=tokenizer,
            train_dataset=Dataset.from_list([dict(prompt=text) for text in prompts(count * options.iters)]),
            callbacks=[Clock()])
        trainer.train()
    print(json.dumps(dict(ends=ends, gb=peak_memory_gb(torch.device('cpu')))))


def main():
    parser = argparse.ArgumentParser('python dev/versus_grpo.py', '%(prog)s WEIGHTS [options] [--key=value ...]',
                                     __doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('weights', help='a Hugging Face folder')
    parser.add_argument('--iters', type=int, default=6, help='steps (6)')
    parser.add_argument('--texts', type=int, default=16, help=f'texts of a step, {SAMPLES} of each prompt (16)')
    parser.add_argument('--dtype', default='float32', help='float32 or bfloat16 (float32)')
    parser.add_argument('--theirs', action='store_true', help=argparse.SUPPRESS)  # in a process of its own
    options, more = parser.parse_known_args()
    if options.theirs:
        return train_theirs(options)
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, 'reward.py'), 'w', encoding='utf-8') as file:
            file.write(inspect.getsource(reward))
        with open(os.path.join(folder, 'prompts.jsonl'), 'w', encoding='utf-8') as file:
            file.writelines(json.dumps(dict(prompt=text)) + '\n' for text in prompts(1000))
        keys = dict(loss='rl', init_from=os.path.abspath(options.weights), rl_prompts=f'{folder}/prompts.jsonl',
                    rl_reward=f'{folder}/reward.py', rl_samples=SAMPLES, rl_tokens=TOKENS, block_size=96,
                    batch_size=options.texts, gradient_accumulation_steps=1, learning_rate=1e-5, decay_lr=False,
                    weight_decay=0.0, dropout=0.0, dtype=options.dtype, device='cpu', compile=False,
                    max_iters=options.iters)
        ours = train([*as_arguments(**keys), *more], os.path.join(folder, 'ours'))
        output = subprocess.run([sys.executable, __file__, *sys.argv[1:], '--theirs'], check=True,
                                stdout=subprocess.PIPE, text=True).stdout
    theirs = json.loads(output.strip().split('\n')[-1])
    seconds = statistics.median(end - begin for begin, end in zip(theirs['ends'], theirs['ends'][1:]))
    ms, gb = ours.median('dt_ms', 1), ours.median('mem_gb', options.iters - 1)
    print(f'a step of {options.texts} texts: TRL {seconds:.2f} s, ours {ms / 1000:.2f} s, ratio '
          f'{seconds / ms * 1000:.2f}; memory: {theirs["gb"]:.2f} GB and {gb:.2f} GB, ratio {gb / theirs["gb"]:.2f}')


if __name__ == '__main__':
    main()
