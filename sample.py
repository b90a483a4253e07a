"""Generate text from a trained model.

    python sample.py --out_dir=out-quickstart
    python sample.py --init_from=gpt2-xl --start="What is the answer to life?" --num_samples=5
    python sample.py --out_dir=out-quickstart --interactive
    python sample.py --init_from=HuggingFaceTB/SmolLM2-135M-Instruct --chat
    python sample.py --init_from=HuggingFaceTB/SmolLM2-135M-Instruct --serve
"""
import itertools
import os
import pathlib
import sys

import torch

from kilogpt.configurator import configure, exit_on_error
from kilogpt.devices.compiler import compile_failure
from kilogpt.devices.cpu import Int8Linear
from kilogpt.devices.cpu_step import prepare_for_text
from kilogpt.devices.host import prepare as prepare_host
from kilogpt.devices.parts import replace_all
from kilogpt.generate.engine import Engine, ModelReader, Request
from kilogpt.loading import load_model, separator_in
from kilogpt.parallel.processes import find_device, resolve_dtype
from kilogpt.run import checkpoint
from kilogpt.run.metrics import describe_size
from kilogpt.settings import check_sampling

# --- configuration ------------------------------------------------------------------------------------------
# model
init_from = 'resume'  # 'resume' (out_dir), a run, a checkpoint, org/name on the hub, a folder, GGUF or ckpt.pt
out_dir = 'out'  # folder of the run to sample from
which = 'best'  # checkpoint to take: 'best' (least validation loss) or 'latest'
tokenizer = ''  # for models that do not name theirs: 'gpt2', or a dataset, run, folder, GGUF or org/name with it
# prompt
start = '\n'  # text to continue; '<|endoftext|>' is a token, but letters in 'FILE:prompt.txt' or '-' (stdin)
interactive = False  # read prompts line by line and continue each, until the end of the input
# conversations, by the chat template of the tokenizer
chat = False  # talk with the model, which keeps what it has read: /reset, /save FILE, /quit
system = ''  # what a conversation tells the model first
serve = False  # answer programs that speak OpenAI's protocol, and show a page at the same address
host = '127.0.0.1'  # address of the server; '0.0.0.0' lets other machines in
port = 8000  # port of the server; 0 = any that is free
served_name = ''  # name of the model for clients of the server; '' = its folder's
api_key = ''  # what clients of the server must know; '' = nothing
# sampling
num_samples: int | None = None  # samples, in one batch, the first shown live; None = 10, or 1 to interact
max_new_tokens = 500  # tokens in each sample, fewer where `stop` ends it
temperature = 0.8  # below 1: more likely text; above 1: more varied; 0 = always the likeliest token
top_k: int | None = 200  # draw from the k likeliest tokens; 0 or None = all
top_p: float | None = 1.0  # draw from the fewest tokens that together reach this probability; 1 or None = all
stop = False  # end a sample at the tokenizer's end-of-text token
seed = 1337  # the same seed gives the same text
# system
device = 'auto'  # 'cpu', 'cuda', 'cuda:1' or 'mps'; 'auto' = CUDA if available, then MPS, then CPU
dtype = 'auto'  # 'float32', 'bfloat16' (on CPUs: only linear layers) or 'float16'; 'auto' follows the device
quantize = 'none'  # 'int8': read weights in 8 bits, on a CPU
compile: bool | None = None  # compile the step from token to token; None = on a GPU, for 4,000 tokens or more
# ------------------------------------------------------------------------------------------------------------
config = configure(globals())
# A model with fewer parameters talks in float32 on a CPU: its tokens are often so near in likelihood that bfloat16
# decides between them, and SmolLM2-135M-Instruct no longer knows the capital of France.
SMALL = 500e6


def read_prompt():
    """(text, tokens) of the prompt given by `start`: itself, the content of a file, or standard input."""
    if start != '-' and not start.startswith('FILE:'):
        return start, tokenizer.encode_prompt(start)
    try:
        if start == '-':
            text = sys.stdin.read()
        else:
            text = pathlib.Path(start.removeprefix('FILE:')).read_text(encoding='utf-8')
    except OSError as error:
        raise ValueError(f'start is {start!r}, but that file cannot be read: {error.strerror}') from None
    except UnicodeDecodeError as error:
        raise ValueError(f'start is {start!r}, but that text is not UTF-8 ({error}): convert it') from None
    return text, tokenizer.begin_ids + tokenizer.encode(text)  # special tokens in a file are ordinary text


with exit_on_error():
    check_sampling(config)
    if interactive + chat + serve > 1:
        raise ValueError(f'interactive={interactive}, chat={chat} and serve={serve} are three ways to give prompts: '
                         'set one of them')
    if system and not chat:
        raise ValueError(f'system is {system!r}, but only --chat reads it' + (
            ': clients of the server send their own' if serve else ''))
    if quantize not in ('none', 'int8'):
        raise ValueError(f'quantize is {quantize!r}: choose none or int8')
    device = find_device(device)
    prepare_host(lambda line: print(line.strip(), file=sys.stderr))
    if quantize == 'int8' and device.type != 'cpu':
        raise ValueError(f'quantize=int8 works only on CPUs, but the device is {device}: '
                         'set --dtype=bfloat16 instead, or --device=cpu')
    dtype = getattr(torch, resolve_dtype(dtype, device))
    if serve:  # before the model is read: a port may be taken
        from kilogpt.chat import server
        listening = server.bind(host, port)
    if init_from == 'resume' and not checkpoint.choose(out_dir):
        raise ValueError(f'there is no checkpoint to sample from in {out_dir}/ckpt: '
                         'train one, or set --out_dir')
    source = out_dir if init_from == 'resume' else init_from
    model, tokenizer, path, state = load_model(source, which, tokenizer)
    if 'val_loss' in state:
        print(f'{path}, val loss {state["val_loss"]}', file=sys.stderr)
    separator = separator_in(state)
    template = None
    if chat or serve:
        from data.tokens.chat_template import ChatTemplate
        from kilogpt.chat import terminal
        template = ChatTemplate(tokenizer)
    if template and config['dtype'] == 'auto' and device.type == 'cpu' and model.num_params() < SMALL:
        dtype = torch.float32
    if template:
        numbers = quantize if quantize != 'none' else str(dtype).removeprefix('torch.')
        print(f'{describe_size(model)}, {numbers}', file=sys.stderr)
    if template and num_samples not in (None, 1):
        raise ValueError(f'num_samples is {num_samples}, but a conversation has one answer at a time: leave '
                         'num_samples out')
    prompt = None if interactive or template else read_prompt()
if num_samples is None:
    num_samples = 1 if interactive or template else 10
n_rows = server.ROWS if serve else num_samples  # texts at a time
if compile is None:
    # Compiling takes a minute and saves milliseconds for each token. After block_size tokens, the compiled
    # step is not used, since the whole window is read again for each token.
    compile = device.type == 'cuda' and min(max_new_tokens, model.config.block_size) >= 4000
if compile and (failure := compile_failure(device)):
    print(f'torch.compile does not work here ({failure}): continuing without it', file=sys.stderr)
    compile = False
model.eval()
if device.type == 'cpu' and not compile:
    if note := prepare_for_text(model, dtype, quantize, n_rows):
        print(f'text could be faster: {note}', file=sys.stderr)
else:
    if quantize == 'int8':
        replace_all(model, torch.nn.Linear, Int8Linear)
    model.to(device, dtype)  # weights are cast once: autocast would cast them for each token
cache = None  # one that grows with the texts
if compile:
    cache = model.new_cache(n_rows)
    model.compile(mode='reduce-overhead', fullgraph=True, dynamic=False)
    # Without this mark, a CUDA graph would write into a copy of the cache.
    for tensor in (cache.lengths, *itertools.chain(*cache.layers)):
        torch._dynamo.mark_static_address(tensor)
is_exact = dtype == torch.float32 and quantize == 'none'
engine = Engine(ModelReader(model, n_rows, cache, is_exact), separator)


def show(prompt, tokens):
    """Print num_samples continuations of the prompt: the first as it grows, the others when all are done."""
    tokens = tokens or [tokenizer.eot or 0]  # the model needs at least one token
    requests = [Request(tokens, max_new_tokens, temperature, top_k, top_p, tokenizer.end_ids if stop else (),
                        seed=(seed, i)) for i in range(num_samples)]
    text_of = tokenizer.text_stream()
    print(prompt, end='', flush=True)
    for request in requests[1:]:
        engine.submit(request)
    try:
        for token in engine.generate(requests[0]):
            if token not in requests[0].stop_ids:
                print(text_of(token), end='', flush=True)
        engine.complete(requests[1:])
    finally:
        for request in requests:
            engine.cancel(request)
    print(text_of() + '\n---------------')
    for request in requests[1:]:
        print(prompt + tokenizer.decode(request.text_ids()) + '\n---------------')


if template:
    sampling = max_new_tokens, temperature, top_k, top_p, seed
    with exit_on_error():
        if serve:
            name = served_name or os.path.basename(os.path.abspath(source))
            server.run(engine, template, name, listening, host, api_key, *sampling)
        else:
            terminal.talk(engine, template, system, *sampling)
elif interactive:
    while True:
        try:
            line = input('> ')
        except EOFError:
            break
        try:
            show(line, tokenizer.encode_prompt(line))
        except KeyboardInterrupt:  # Ctrl-C ends only this text
            print()
        except ValueError as error:  # a character outside the model's alphabet
            print(f'error: {error}', file=sys.stderr)
else:
    with exit_on_error():
        show(*prompt)
