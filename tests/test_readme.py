"""README.md and docs/: every command they show runs here at a small scale, or is named with what it needs."""
import json
import os
import pathlib
import re
import shlex
import shutil
import string
import subprocess
from types import SimpleNamespace

import pytest
from helpers import ROOT, copy_repository, run_forked

from data.make.prepare import write_random_tokens

PAGES = [pathlib.Path(ROOT, 'README.md'), *sorted(pathlib.Path(ROOT, 'docs').glob('*.md'))]
FENCE = re.compile(r'^```(\w*)\n(.*?)^```$', re.M | re.S)

SHAPE = '--device=cpu --compile=False --n_layer=2 --n_head=4 --n_embd=32 --block_size=64 --batch_size=2 '
ITERATIONS = '--max_iters=2 --lr_decay_iters=0 --eval_interval=2 --eval_iters=1 --log_interval=1 '
SMALL = f'{SHAPE} {ITERATIONS} --gradient_accumulation_steps=1 --wandb_log=False'
SMALL_REWARDS = '--device=cpu --max_iters=2 --batch_size=16 --eval_iters=1 --rl_eval_prompts=4'
MANY = f'{SMALL} --gradient_accumulation_steps=8'
FEW_TOKENS = '--device=cpu --num_samples=2 --max_new_tokens=8'
ONE_LAYOUT = '--layouts="dp1 zero3"'  # of kilogpt.prove
BENCH = f'{SHAPE} --gradient_accumulation_steps=8 --iters=2 --warmup=0'


# --- the commands -------------------------------------------------------------------------------------------

def step(command, extra='', nproc=1, stdin=''):
    """A command as a page shows it, with the arguments that make it small, run in nproc processes.

    CHECKOUT in these arguments stands for the folder of the copy in which the command runs.
    """
    return SimpleNamespace(command=command, extra=extra, nproc=nproc, stdin=stdin)


# what someone types one after the other, in a copy of the repository with small datasets
QUICK_START = [
    step('python train.py config/quickstart.py', SMALL),
    step('python sample.py --out_dir=out-quickstart', FEW_TOKENS),
    step('python train.py config/quickstart.py --init_from=resume', SMALL + ' --max_iters=3'),
    step('python sample.py --out_dir=out-quickstart --start="ROMEO:" --num_samples=3 --max_new_tokens=200',
         FEW_TOKENS),
    step('python sample.py --out_dir=out-quickstart --interactive', FEW_TOKENS, stdin='ROMEO:\n'),
    step('python -m kilogpt.convert export out-quickstart quickstart-hf'),
    step('python sample.py --init_from=quickstart-hf --start="ROMEO:"', FEW_TOKENS),
    step('python -m kilogpt.convert import quickstart-hf out-imported-hf'),
]
FIGURE = [
    step('python train.py config/quickstart.py', SMALL),
    step('python train.py config/shakespeare_cpu.py', SMALL),
    step('python train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 '
         '--log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 '
         '--max_iters=2000 --lr_decay_iters=2000 --dropout=0.0', SMALL),
    step('python -m kilogpt.plot "nanoGPT=nanogpt.log" "the same command line=out-shakespeare-char" '
         '"quick start=out-quickstart" "shakespeare_cpu=out-shakespeare-cpu" '
         '--title="Loss of nanoGPT and of three runs of kiloGPT on tiny Shakespeare" --out=assets/loss.png'),
]
SESSIONS = dict(
    own_settings=[
        step('python train.py config/train_shakespeare_char.py --n_layer=4 --dropout=0.1 --compile=False',
             SMALL),
        step('python train.py out-shakespeare-char/config.json --seed=1 --out_dir=out-seed-1'),
        step('python -m kilogpt.convert export out-shakespeare-char ckpt.pt'),
        step('python -m kilogpt.convert import ckpt.pt out-imported'),
        step('python -m kilogpt.convert inspect out-imported'),
        step('python train.py config/finetune_shakespeare.py --init_from=nanoGPT/out/ckpt.pt', SMALL),
        step('python sample.py --init_from=nanoGPT/out/ckpt.pt --start="Once"', FEW_TOKENS),
        step('python -m kilogpt.convert import nanoGPT/out/ckpt.pt out-from-nanogpt '
             '--tokenizer=shakespeare_char'),
        step('python sample.py --init_from=nanoGPT/out/ckpt.pt --tokenizer=shakespeare_char', FEW_TOKENS),
    ],
    help=[
        step('python -m kilogpt'),
        step('python train.py --help islands'),
    ],
    many_processes=[
        step('torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py', MANY, nproc=2),
    ],
)
SLOW_SESSIONS = dict(
    learning=[
        step('python data/sums/prepare.py', '--lines=400'),
        step('python train.py config/sums.py', SMALL),
        step('python train.py config/sums_rewards.py', SMALL_REWARDS),
        step('python train.py config/sums.py --n_layer=6 --max_iters=1000 --out_dir=out-sums-large', SMALL),
        step('python train.py config/sums_rewards.py --rl_reward= --teacher=out-sums-large --rl_kl=1', SMALL_REWARDS),
        step('python train.py config/sums.py --n_layer=3 --n_embd=128 --max_iters=700', SMALL),
        step('python -m kilogpt.evaluate out-sums --teach=sums --top_k=8', '--device=cpu'),
        step('python train.py config/sums.py --loss=distill --distill_top_k=8 --n_layer=1 --n_embd=64 '
             '--out_dir=out-student', SMALL),
        step('python train.py config/sums.py --loss=distill --teacher=out-sums --n_layer=1 --n_embd=64 '
             '--out_dir=out-student', SMALL),
    ],
    evaluate=[
        step('python train.py config/quickstart.py --eval_tasks=capitals --eval_tasks_interval=70 --sample_interval=70 '
             '--sample_prompts="ROMEO:||My lord"', SMALL + ' --eval_tasks_interval=1'),
        step('python -m kilogpt.evaluate out-quickstart --tasks=capitals', '--device=cpu'),
        step('torchrun --standalone --nproc_per_node=4 -m kilogpt.evaluate out-quickstart --tasks=capitals --tp=2 '
             '--pp=2', '--device=cpu --limit=3', nproc=4),
    ],
    lora=[
        step('python train.py config/quickstart.py', SMALL),
        step('python -m kilogpt.convert export out-quickstart quickstart-hf'),
        step('python train.py config/quickstart.py --init_from=quickstart-hf --lora_rank=8 --learning_rate=1e-3 '
             '--out_dir=out-lora', SMALL),
        step('python sample.py --out_dir=out-lora --start="ROMEO:"', FEW_TOKENS),
        step('python -m kilogpt.convert export out-lora lora-merged'),
        step('python -m kilogpt.convert export out-lora lora-adapter --adapter'),
        step('python -m kilogpt.convert import lora-adapter out-lora-imported'),
    ],
    own_text=[
        step("python data/text/prepare.py --input='books/*.txt' --tokenizer=gpt2 --out=mybooks",
             '--num_proc=1'),
        step('python train.py config/quickstart.py --dataset=mybooks --out_dir=out-mybooks', SMALL),
        step('python train.py config/finetune_shakespeare.py --init_from=out-mybooks --block_size=64', SMALL),
        step('python -m kilogpt.convert export out-mybooks mybooks.gguf --dtype=q8_0'),
        step('python -m kilogpt.convert import mybooks.gguf out-from-gguf'),
        step('python sample.py --init_from=mybooks.gguf --start="Once"', FEW_TOKENS),
        step("python data/text/prepare.py --input='books/*.txt' --tokenizer=mybooks.gguf --out=mybooks-gguf",
             '--num_proc=1'),
    ],
    own_tokenizer=[
        step("python data/text/train_tokenizer.py --input='books/*.txt' --vocab_size=4096 --out=mytokenizer"),
        step("python data/text/prepare.py --input='books/*.txt' --tokenizer=mytokenizer --out=mybooks",
             '--num_proc=1'),
        step('python train.py config/words_cpu.py', SMALL),
    ],
    models=[
        step('python train.py config/quickstart.py --window=16 --window_pattern=SSSL --out_dir=out-windows',
             SMALL),
        step('python train.py config/quickstart.py --norm_place=both --mlp=geglu --attention_softcap=30 '
             '--out_dir=out-gemma', SMALL),
        step('python train.py config/quickstart.py --init_from=out-windows --rope_scaling=yarn,factor=2,'
             'original_max_position_embeddings=64 --block_size=128 --out_dir=out-longer',
             SMALL + ' --block_size=128'),
        step('python train.py config/quickstart.py --value_pattern=NV --out_dir=out-values', SMALL),
        step('python train.py config/quickstart.py --attention_gate --out_dir=out-gates', SMALL),
        step('python train.py config/quickstart.py --n_kv_head=0 --qk_norm=False --kv_latent=64 --rope_width=16 '
             '--out_dir=out-latent',
             SMALL + ' --rope_width=4'),
        step('python train.py config/quickstart.py --attention_sinks --window=16 --window_pattern=SL '
             '--out_dir=out-sinks', SMALL),
        step('python train.py config/quickstart.py --mlp_conv=3 --lr_factors=vector:3 --out_dir=out-convolution',
             SMALL),
    ],
    experts=[
        step('torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_moe.py', MANY + ' --ep=2',
             nproc=2),
        step('python train.py config/quickstart.py --mlp=moe --n_experts=4 --expert_hidden=192 '
             '--out_dir=out-moe', SMALL),
        step('python -m kilogpt.plan config/qwen3_30b_a3b.py --gpus=64 --gpu=H100', '--gpus=8 --n_layer=4'),
        step('python -m kilogpt.plan config/qwen3_30b_a3b.py --gpus=64 --as_given --ep=8 '
             '--load_imbalance=1.5'),
        step('python train.py config/shakespeare_moe.py', SMALL + ' --out_dir=out-first'),
        step('OMP_NUM_THREADS=1 python train.py config/shakespeare_moe.py --seed=1', SMALL),
        step('OMP_NUM_THREADS=1 python train.py config/shakespeare_moe.py --seed=1 --mlp=swiglu '
             '--out_dir=out-dense', SMALL),
        step('OMP_NUM_THREADS=1 python train.py config/shakespeare_moe.py --seed=1 --mlp=swiglu '
             '--out_dir=out-longer --max_iters=770 --lr_decay_iters=770 --eval_interval=770', SMALL),
        step('python -m kilogpt.plan config/qwen3_30b_a3b.py --gpus=64 --as_given --check --ranks=63',
             '--n_layer=4 --moe_every=2 --ep=8'),
    ],
    keys=[
        step('python dev/write_keys.py'),
    ],
    prove=[
        step('python -m kilogpt.prove config/train_gpt2.py --quick', ONE_LAYOUT),
        step('python -m kilogpt.prove config/quickstart.py --norm_place=both --window=16 --attention_softcap=30',
             ONE_LAYOUT),
        step('python -m kilogpt.prove config/train_gpt2.py', ONE_LAYOUT),
        step('python -m kilogpt.prove config/train_gpt2.py --documents=pack --pos=rope --window=512 '
             '--window_pattern=SSSL', ONE_LAYOUT),
        step('python -m kilogpt.prove config/train_gpt2_moe.py --layouts="ep2; ep2 tp2 zero3; pp2 zbv" '
             '--json', ONE_LAYOUT),
        step('python -m kilogpt.prove config/train_gpt2.py --layouts="tp2; cp2" --keep=n_head,n_embd',
             ONE_LAYOUT + ' --n_head=4 --n_embd=32'),
        step('python -m kilogpt.prove config/train_gpt2.py --layouts="dp1 compile=True; tp2 compile=True"',
             ONE_LAYOUT),
    ],
    documents=[
        step('python data/text/prepare.py --input=documents --out=mydocuments', '--num_proc=1'),
        step('python data/text/prepare.py --input=documents --tokenizer=gpt2 --out=mydocuments', '--num_proc=1'),
        step('python -m data.look mydocuments'),
        step('python data/corpus/prepare.py --input=documents --out=mycorpus', '--num_proc=1'),
        step('python train.py config/quickstart.py --dataset=mydocuments --documents=pack --out_dir=out-documents',
             SMALL),
        step('python train.py config/quickstart.py --dataset=mydocuments --documents=mask --window=16 '
             '--window_pattern=SSSL --out_dir=out-short', SMALL),
        step('python sample.py --out_dir=out-documents --start="<|endoftext|>"', FEW_TOKENS),
        step('python train.py --dataset=mydocuments --n_layer=3 --n_head=4 --n_embd=128 --pos=rope --norm=rmsnorm '
             '--mlp=relu2 --qk_norm=True --block_size=256 --batch_size=16 --gradient_accumulation_steps=1 '
             '--max_iters=300 --warmup_iters=40 --lr_decay_iters=300 --learning_rate=3e-3 --min_lr=0 '
             '--eval_interval=300 --eval_iters=60 --device=cpu --dtype=float32 --compile=False --documents=pack '
             '--seed=1 --out_dir=out-pack', SMALL),
    ],
    mixtures=[
        step("python data/text/prepare.py --input='books/*.txt' --tokenizer=gpt2 --out=mybooks",
             '--num_proc=1'),
        step('python data/text/prepare.py --input=documents --tokenizer=gpt2 --out=mydocuments', '--num_proc=1'),
        step("python train.py config/quickstart.py --dataset='mybooks:0.7, mydocuments:0.3' "
             '--out_dir=out-mixture', SMALL),
        step("python train.py config/quickstart.py --dataset='mybooks:0.7, mydocuments:0.3' "
             "--mixture_phases='1e5: mybooks:0.2, mydocuments:0.8; 2e5: mydocuments:1' --out_dir=out-phases", SMALL),
    ],
    layouts=[
        step('torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py --batch_size=8 '
             '--gradient_accumulation_steps=32 --grad_clip=1.0 --dtype=bfloat16 --zero_stage=3', MANY, nproc=2),
        step('torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_modern.py --tp=2 --pp=2 '
             '--zero_stage=2', MANY, nproc=4),
        step('torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py --zero_stage=2',
             MANY, nproc=2),
        step('torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_modern.py --tp=2 --cp=2 '
             '--zero_stage=3', MANY, nproc=4),
        step('torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_modern.py --pp=4 '
             '--pp_schedule=zbv', MANY + ' --n_layer=6', nproc=4),
        step('torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py --islands=4 '
             '--outer_interval=100', MANY + ' --outer_interval=1', nproc=4),
        step('torchrun --standalone --nproc_per_node=4 train.py --dataset=shakespeare_char --device=cpu '
             '--compile=False --dtype=float32 --n_layer=2 --n_head=4 --n_embd=48 --block_size=64 '
             '--batch_size=4 --gradient_accumulation_steps=4 --max_iters=2600 --lr_decay_iters=2600 '
             '--warmup_iters=50 --learning_rate=3e-3 --min_lr=3e-4 --beta2=0.99 --eval_interval=2600 '
             '--eval_iters=100 --islands=4 --outer_interval=26 --outer_compress=int4',
             MANY + ' --outer_interval=1', nproc=4),
        step('torchrun --standalone --nproc_per_node=8 --max-restarts=3 train.py config/train_gpt2.py '
             '--init_from=auto --save_minutes=10', MANY, nproc=2),
    ],
    plan=[
        step('python -m kilogpt.plan config/gpt_70b_3d.py --gpus=1024 --gpu=H100 --price=2.5'),
        step('python -m kilogpt.plan config/llama_7b_tp_fsdp.py --gpus=64 --gpu=A100 --link=200 --as_given'),
        step('python -m kilogpt.plan config/llama_7b_tp_fsdp.py --gpus=1 --gpu=H100 --lora_rank=16 '
             '--lora_base_dtype=bfloat16 --block_size=1024 --batch_size=8 --gradient_accumulation_steps=1'),
        step('python -m kilogpt.plan config/finetune_lora.py --gpus=1 --gpu=H100'),
        step('python -m kilogpt.plan config/gpt_70b_3d.py --gpus=1024 --as_given --check',
             '--n_layer=16 --ranks=1023'),
        step('python -m kilogpt.plan --calibrate=here.json'),
        step('python -m kilogpt.plan config/quickstart.py --gpus=2 --gpus_per_node=2 --gpu=here.json'),
    ],
    logs=[
        step('python train.py config/train_shakespeare_char.py --wandb_log=True --wandb_project=mine '
             '--wandb_run_name=first', f'{SHAPE} {ITERATIONS}'),
        step('torchrun --standalone --nproc_per_node=2 train.py config/quickstart.py --events=True', SMALL +
             ' --gradient_accumulation_steps=2', nproc=2),
        step('python -m kilogpt.report events out-quickstart'),
        # a whole path, because kilogpt.replay runs the train.py of this repository, not that of the copy
        step('python train.py config/quickstart.py --profile',
             SMALL + ' --max_iters=140 --eval_interval=70 --dataset=CHECKOUT/data/shakespeare_char'),
        step('python -m kilogpt.replay out-quickstart 140'),
        step('python -m kilogpt.replay out-quickstart all'),
        step('python -m kilogpt.plot out-quickstart out-shakespeare-char --out=runs.png'),
        step('python -m kilogpt.plot "nanoGPT=nanogpt.log" "quick start=out-quickstart" --out=runs.png '
             '--x=seconds'),
    ],
    compare=[
        step('python train.py config/quickstart.py --eval_interval=20 --seed=1 --out_dir=out-base-s1', SMALL),
        step('python train.py config/quickstart.py --eval_interval=20 --seed=2 --out_dir=out-base-s2', SMALL),
        step('python train.py config/quickstart.py --eval_interval=20 --seed=1 --mlp=relu2 '
             '--out_dir=out-relu2-s1', SMALL),
        step('python train.py config/quickstart.py --eval_interval=20 --seed=2 --mlp=relu2 '
             '--out_dir=out-relu2-s2', SMALL),
        step("python -m kilogpt.compare 'base=out-base-s*' 'relu2=out-relu2-s*' --table=compare.md"),
        step("python -m kilogpt.compare.recipes out-recipes 'base=config/quickstart.py' "
             "'relu2=config/quickstart.py --mlp=relu2'", "--no_sweep --seeds=1 --size='small: max_iters=2 eval_iters=1 "
             "device=cpu n_layer=2 n_head=4 n_embd=32 block_size=64 batch_size=2'"),
    ],
    bench=[
        step('python bench.py config/train_gpt2.py --random_tokens=50257 --sweep="batch_size=8,16 '
             'compile=True,False"', BENCH + ' --sweep="batch_size=1 compile=False"'),
        step('python bench.py config/train_gpt2.py --random_tokens=50257 --layouts="dp8; zero3 dp8; '
             'zero3 dp8 full; tp2 pp2 dp2 zbv"', BENCH + ' --layouts="zero3 dp2 full; dp1 pp2 zbv"'),
        step('python bench.py config/train_gpt2.py --random_tokens=50257 --scaling=1,2,4,8 --zero_stage=2',
             BENCH + ' --scaling=1,2'),
        step('python bench.py config/train_gpt2.py --random_tokens=50257 --saves=10 --iters=40',
             BENCH + ' --saves=1 --iters=3'),
        step('python bench.py config/train_gpt2.py --random_tokens=50257 --document_length=256 --documents=mask',
             BENCH),
        step('python bench.py config/quickstart.py --profile', BENCH),
        step('python dev/versus.py --part=start config/quickstart.py', f'{SHAPE} --rounds=1'),
    ],
)
RUN = [step for steps in (QUICK_START, FIGURE, *SESSIONS.values(), *SLOW_SESSIONS.values()) for step in steps]

# what a command that does not run here begins with, and why
NEEDS = {
    'pip install': 'a package index: .ci/run installs both requirements files',
    'python -m pytest': 'to be this very program: .ci/run runs the default tests and the slow ones',
    **dict.fromkeys(('python -m kilogpt.prove --random=', 'python -m kilogpt.prove --minutes='),
                    'minutes: tests/prove/test_random_draws.py has fewer draws'),
    'python -m kilogpt.prove config/quickstart.py --n_kv_head=0':
        'nothing else than other models: random draws have these',
    **dict.fromkeys(('python bench.py config/train_gpt2.py --random_tokens=50257 --saves=8',
                     'python bench.py --device=cpu --compile=False',
                     'OMP_NUM_THREADS=1 python bench.py --device=cpu'),
                    'nothing else than the commands with --saves=10, --scaling and --layouts'),
    'bash findings/': 'to show what other programs do, which is not for CI',
    'python data/text/prepare.py --input=roneneldan/TinyStories': 'a download: test_hub.py has a small hub',
    "python data/text/prepare.py --input='books/*.txt' --tokenizer=HuggingFaceTB":
        'a download: test_json_tokenizer.py has a folder',
    'python train.py --dataset=mybooks --init_from=HuggingFaceTB/SmolLM2-135M':
        'a download: test_json_tokenizer.py has a folder',
    'python train.py config/finetune_shakespeare.py --init_from=gpt2':
        'a download: test_train.py has a folder',
    'python train.py config/eval_gpt2.py': 'a download: test_train.py has a folder',
    'python data/openwebtext/prepare.py': 'hours and 72 GB: test_prepare.py does it with local files',
    'python data/fineweb/prepare.py': 'hours and 20 GB: test_prepare.py does it with local files',
    'python sample.py --init_from=HuggingFaceTB/SmolLM2': 'a download: tests/chat has a small model',
    'python -m kilogpt.evaluate HuggingFaceTB/SmolLM2': 'a download: docs/log has its figures',
    'python data/conversations/prepare.py': 'files of conversations: test_conversations.py has some',
    'python data/chatterbot/prepare.py': 'a package and a tokenizer of weights: test_tuning.py has a small one',
    **dict.fromkeys(('python sample.py --out_dir=out-chat', 'python sample.py --out_dir=out-lora-chat'),
                    'the run of the command before'),
    'python -m data.look mychats': 'the dataset of the command before',
    **dict.fromkeys(('python train.py config/finetune_chat.py', 'python train.py config/finetune_lora.py',
                     'python dev/versus_trl.py'), 'weights of a real model: docs/finetune.md has figures'),
    'python data/reasoning_gym/prepare.py': 'a package and a tokenizer of weights: test_rewards.py has small ones',
    'python data/preferences/prepare.py': 'files of pairs: test_preferences.py has some',
    'python -m data.look mypairs': 'the dataset of the command before',
    'python train.py config/dpo.py': 'weights of a real model: docs/finetune.md has figures, test_tuning.py a small model',
    'python sample.py --out_dir=out-dpo': 'the run of the command before',
    'python train.py config/quickstart.py --optimizer=muon': 'no more than the quick start, which has it on CPUs',
    'python data/tasks/make.py': 'no more than test_make_tasks.py does',
    'python -m kilogpt.evaluate out-quickstart --tasks=core:': 'files of 160 MB: test_tasks.py has small ones',
    'python dev/versus.py ../nanoGPT': 'a checkout of nanoGPT: test_versus.py has a stand-in',
    'python dev/versus.py --part=start config/quickstart.py --rounds=5': 'no more than the command without --rounds',
    'python dev/versus.py tinyllama': 'a GPU',
    'python bench.py --init_from=tinyllama': 'a GPU',
    'python dev/versus.py ../smollm2': 'weights of a real model, and ten minutes: docs/log has its figures',
    'python dev/english.py': 'packages of Debian',
    'python data/text/train_tokenizer.py --input=english.txt': 'that text',
    'python data/text/prepare.py --input=english.txt': 'that text',
    'python dev/peers.py': 'checkouts of other repositories: test_peers.py has a stand-in',
    'python -m kilogpt.plot out-peers': 'the runs of the command before',
    'python -m kilogpt.plan config/gpt_70b_3d.py --gpus=1024 --gpu=H100 --as_given --mtbf': 'no more than '
    'tests/plan/test_failures.py does',
    **dict.fromkeys(('python -m kilogpt.replicas', 'RUST_LOG=error torchft_lighthouse', 'export TORCHFT_LIGHTHOUSE',
                     'torchrun --nproc_per_node=8 --max-restarts=100'), 'torchft: tests/replicas starts them'),
    'python train.py config/quickstart.py --mixer_pattern=DDDA': 'trained by the draws of prove, and read by tests/test_delta.py',
    'python sample.py --out_dir=out-hybrid': 'the run of the command before',
    **dict.fromkeys(('python -m kilogpt.convert export RUN', 'python dev/versus_llama.py'),
                    'weights of a real model and llama.cpp: docs/log has its figures'),
    'docker': 'Docker and a registry: docs/log says how the Dockerfile was built',
    'kubectl': 'a cluster: test_kubernetes.py runs the pods of the manifests',
    'python launch/ray_train.py': 'Ray: test_ray.py starts a cluster',
    'python -m kilogpt.scaling': 'sixteen runs: test_scaling.py writes their logs',
    'python dev/far_data.py': 'an idle machine: docs/log has its figures',
    'python dev/loss_and_bytes.py': 'an hour: docs/log has its figures',
    'python dev/thin_wire.py': 'root, and ten minutes of slow wires: docs/log has its figures',
    'bash tests/gpu': 'a GPU',
    'python -m venv ../venv-cuda': 'a package index, and 5 GB',
    '../venv-cuda/bin/pip': 'a package index, and 5 GB',
    'PYTHON=../venv-cuda/bin/python bash dev/cuda_without_gpu': 'a CUDA build of torch: tests/cuda_dry is for it',
    'python tests/gpu_checks.py': 'a GPU',
    'python bench.py --random_tokens=50257 --batch_size=48': 'a GPU',
    **dict.fromkeys(('python bench.py --n_layer=4', 'python bench.py --n_layer=6',
                     'python bench.py --random_tokens=50257 --batch_size=4'), 'no more than bench.py --profile above'),
    'python bench.py --random_tokens=50257 --document_length=256 --documents=mask --batch_size=48': 'a GPU',
    'python bench.py config/gpt2_xl_fsdp.py --zero_stage=0 --random_tokens=50257': 'a GPU',
    'python bench.py config/train_gpt2_moe.py --ep=1': 'a GPU',
    'python train.py config/quickstart.py --dataset=s3://': 'a bucket: test_storage.py has one',
    'python sample.py --out_dir=s3://': 'a bucket: test_storage.py has one',
    'python -m kilogpt.convert export s3://': 'a bucket: test_storage.py has one',
    'python train.py config/finetune_shakespeare.py --init_from=s3://': 'a bucket: test_storage.py has one',
    "python data/corpus/prepare.py --input='s3://": 'a bucket and Ray: test_corpus.py has Ray',
    **dict.fromkeys(('sbatch', 'CONTAINER=kilogpt.sif sbatch'), 'Slurm: test_slurm.py starts one'),
    'python -m kilogpt.plan config/gpt_70b_3d.py --gpus=64 --gpu=cluster.json':
        'two nodes: test_nodes.py has two namespaces',
    'apptainer build': 'Apptainer and a registry: test_slurm.py has a stand-in',
    **dict.fromkeys(('mpirun', 'srun'), 'eight processes: test_launchers.py starts two of mpirun and four of srun'),
    'curl http://127.0.0.1': 'a server: tests/chat/test_chat_server.py has it',
    'bash launch/ssh.sh': 'two hosts: test_ssh.py has them',
    'torchrun --standalone --nproc_per_node=8 launch/bandwidth.py':
        'a session of its own: test_nodes.py runs it',
    'torchrun --nnodes=': 'several nodes: test_configs.py lays out for them, test_faults.py has two',
    'export KILOGPT_SECRET': 'a server and islands: tests/islands/test_jobs.py has them',
    'python -m kilogpt.islands': 'a server and islands: tests/islands/test_jobs.py has them',
    'torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py --islands=3':
        'a server and islands: tests/islands/test_jobs.py has them',
    'torchrun ...': 'a tunnel between two machines',
    'ssh -N': 'a tunnel between two machines',
    'export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1': 'several nodes: test_faults.py sets it',
}


def commands():
    """{command: page} of every command in the fenced blocks without a language, and in running text."""
    found = {}
    for page in PAGES:
        if page.name == 'files.md':  # whose lines are those of the files
            continue
        text = page.read_text(encoding='utf-8')
        blocks = [block for language, block in FENCE.findall(text) if not language]
        lines = '\n'.join(blocks).replace('\\\n', ' ').splitlines()
        lines = [line for line in lines if line.strip() and not line.startswith('#')]
        lines += re.findall(r'`((?:python|torchrun|pip|bash) [^`]+)`', FENCE.sub('', text))
        for line in lines:
            for command in line.split(' && '):
                found[' '.join(command.split())] = page.name
    return found


def test_every_command_is_run_or_needs_what_ci_lacks():
    shown = commands()
    assert len(shown) > 50
    run = {step.command for step in RUN}
    unknown = [f'{page}: {command}' for command, page in shown.items()
               if command not in run and not command.startswith(tuple(NEEDS))]
    assert unknown == [], 'add these to a session above, or to NEEDS'
    assert run - shown.keys() == set(), 'no page shows these any more'
    assert [start for start in NEEDS if not any(command.startswith(start) for command in shown)] == []


RUN_MODULE = """# What python -m does, for processes that are forked
import runpy, sys
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of the repository, with small random datasets of a hundred tokens, a book and documents."""
    folder = copy_repository(tmp_path / 'kiloGPT', 'assets', 'bench.py', 'dev', 'docs', 'LICENSE', 'sample.py')
    for name in ('shakespeare_char', 'shakespeare', 'openwebtext'):
        write_random_tokens(folder / 'data' / name, len(string.printable), count=2 ** 13)
    meta = dict(vocab_size=len(string.printable), dtype='uint16', tokenizer='char', chars=string.printable)
    (folder / 'data' / 'shakespeare_char' / 'meta.json').write_text(json.dumps(meta))
    for name in ('books', 'documents', 'nanoGPT/out'):
        (folder / name).mkdir(parents=True)
    (folder / 'books' / 'book.txt').write_text((folder / 'LICENSE').read_text() * 4)
    (folder / 'documents' / 'some.jsonl').write_text(
        ''.join(f'{{"text": "document {i % 3000}"}}\n' for i in range(4000)))
    (folder / 'nanogpt.log').write_text(
        'step 0: train loss 4.2, val loss 4.2\niter 0: loss 4.2, time 50.00ms, mfu 1.00%\n'
        'step 1: train loss 2.4, val loss 2.4\niter 1: loss 2.4, time 50.00ms, mfu 1.00%\n')
    (folder / 'nanoGPT' / 'out' / 'ckpt.pt').symlink_to(folder / 'ckpt.pt')  # a step exports it
    (folder / 'run_module.py').write_text(RUN_MODULE)
    return folder


def run_step(step, checkout, **env):
    """Run a step in a copy of the repository, as a user would type it there.

    Return what helpers.run_forked returns.
    """
    words = shlex.split(step.command) + shlex.split(step.extra.replace('CHECKOUT', str(checkout)))
    while '=' in words[0]:
        name, _, env[name] = words.pop(0).partition('=')
    env.pop('OMP_NUM_THREADS', None)  # run_forked sets it
    program = words.pop(0)
    while program == 'torchrun' and words[0].startswith('--'):
        words.pop(0)  # test_faults.py tests its options; here processes are forked as it starts them
    if words[0] == '-m':
        words[0] = 'run_module.py'
    script, *arguments = words
    return run_forked(checkout / script, *arguments, nproc=step.nproc, stdin=step.stdin, cwd=checkout,
                      env=env)


def shape_of(line):
    """A line of a log without its numbers.

    bfloat16 and float32 are the same, because the default depends on the CPU.
    """
    return re.sub(r'\d[\d.,:]*(e[+-]\d+)?', '#', line.replace('bfloat', 'float'))


# --- tests --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name', SESSIONS)
def test_commands_run(name, checkout, vocabulary):
    for step in SESSIONS[name]:
        run_step(step, checkout, TIKTOKEN_CACHE_DIR=vocabulary)


@pytest.mark.slow
@pytest.mark.parametrize('name', SLOW_SESSIONS)
def test_slow_commands_run(name, checkout, vocabulary):
    for step in SLOW_SESSIONS[name]:
        run_step(step, checkout, TIKTOKEN_CACHE_DIR=vocabulary, WANDB_MODE='offline')


def test_quick_start_prints_what_readme_shows_and_transformers_loads_its_model(checkout, monkeypatch, capsys):
    printed = [run_step(step, checkout).stdout for step in QUICK_START]
    blocks = dict(reversed(FENCE.findall(PAGES[0].read_text('utf-8'))))  # the first of each language
    log, _, sample = blocks['text'].partition('\n\n')
    shown = {shape_of(line) for line in log.splitlines()} - {'...'}
    assert len(shown) > 3 and sample
    assert shown - {shape_of(line) for line in printed[0].splitlines()} == set()

    monkeypatch.chdir(checkout)
    page = (checkout / 'docs' / 'weights.md').read_text('utf-8')
    exec(dict(FENCE.findall(page))['python'], {})
    text = capsys.readouterr().out
    assert text.startswith('ROMEO:') and 10 < len(text) <= 64 + 1


@pytest.mark.slow
def test_readmes_figure_is_drawn(checkout):
    picture = checkout / 'assets' / 'loss.png'
    picture.unlink(missing_ok=True)
    for step in FIGURE:
        run_step(step, checkout)
    assert picture.read_bytes().startswith(b'\x89PNG')


def test_copy_has_the_files_that_git_lists_and_nothing_that_commands_leave(tmp_path):
    """As in a checkout where README's commands were typed, with new files of whoever works there."""
    before = copy_repository(tmp_path / 'before')
    shutil.copy(pathlib.Path(ROOT, '.gitignore'), before)
    new = 'config/mine.py', 'kilogpt/outer.py', 'data/mine/prepare.py', 'data/mine/books.txt'
    left = ('data/mine/train.bin', 'data/a/b/val.bin', 'data/mine/meta.json', 'data/mine/input.txt',
            'data/mine/.partial/0', 'data/train.bin', 'kilogpt/__pycache__/run.pyc', 'config/out-mine/config.json',
            'out-quickstart/ckpt/0', 'books/book.txt', '.venv/bin/python', 'trace-0.json', 'ckpt.pt')
    for name in (*new, *left):
        (before / name).parent.mkdir(parents=True, exist_ok=True)
        (before / name).write_text('')
    (before / 'data' / 'elsewhere').symlink_to(tmp_path)
    after = copy_repository(tmp_path / 'after', root=before)
    copied = {path.relative_to(after).as_posix() for path in after.rglob('*')
              if path.is_symlink() or not path.is_dir()}
    assert copied >= {*new, 'model.py', 'data/loader.py'} and not copied.intersection(left)
    assert os.readlink(after / 'data' / 'elsewhere') == str(tmp_path)
    if shutil.which('git'):
        git = ['git', '-C', before]
        subprocess.run([*git, 'init', '-q'], check=True)
        listed = subprocess.check_output([*git, 'ls-files', '-o', '--exclude-standard'], text=True).splitlines()
        assert copied ^ {*listed} <= {'.gitignore', 'books/book.txt'}


def test_readme_opens_with_the_two_commands():
    blocks = [block.strip() for language, block in FENCE.findall(PAGES[0].read_text('utf-8')) if not language]
    first, second = blocks[:2]
    assert first == ('pip install -r requirements.txt && python train.py config/quickstart.py && '
                     'python sample.py --out_dir=out-quickstart')
    assert second == 'pip install -r requirements-dev.txt && python -m pytest'


def test_nanogpts_command_line_for_a_cpu(dataset, tmp_path):
    """The command of nanoGPT's README as it is, but for the dataset and the number of iterations."""
    arguments = ('config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 '
                 '--log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 '
                 '--max_iters=2000 --lr_decay_iters=2000 --dropout=0.0').split()
    done = run_forked('train.py', *arguments, f'--dataset={dataset}', f'--out_dir={tmp_path}',
                      '--max_iters=2')
    assert 'step 2: train loss' in done.stdout and (tmp_path / 'ckpt' / 'iter_00000002').exists()
