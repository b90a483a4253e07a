"""GGUF files with entries of their metadata moved or missing: ids and next tokens are those of llama.cpp, or it is refused."""
import json
import random
import subprocess
import sys

import pytest
import torch

from data.json_tokenizer import JsonTokenizer
from drawing import check_draws
from helpers import ROOT
from kilogpt.convert.gguf_files import read_gguf, write_gguf

pytest.importorskip('xllamacpp', reason='xllamacpp, which has llama.cpp, is not installed')
sys.path[:0] = [f'{ROOT}/tests/convert', f'{ROOT}/tests']
from test_chat_template import FAMILIES, write_folder  # noqa: E402
from test_gguf import FORMS, PROMPT, change, make_model, save  # noqa: E402
from test_weights import model_from  # noqa: E402

TEXTS = 'the quick  brown fox 12345', " <|im_end|>a </s> fox's", 'ÄÖ 🙂\n\n words', 'Hi', '  x'
N_TOKENS, N_WORDS = 8, 375
# {entry of the architecture: other values; None if it is missing}
VALUES = {
    'rope.freq_base': [None, 500.0, 1e6], 'rope.dimension_count': [None, 8], 'attention.key_length': [None],
    'attention.value_length': [None], 'attention.head_count_kv': [None], 'vocab_size': [None], 'context_length': [48, 128],
    'attention.layer_norm_rms_epsilon': [1e-2], 'attention.layer_norm_epsilon': [1e-2], 'rope.scaling.type': [None],
    'rope.scaling.factor': [None, 3.0], 'rope.scaling.original_context_length': [None, 24], 'expert_used_count': [1, 3],
    'expert_group_count': [None], 'expert_group_used_count': [None], 'expert_shared_count': [None],
    'leading_dense_block_count': [None], 'expert_weights_scale': [None, 0.5], 'expert_weights_norm': [None, False],
    'expert_gating_func': [None, 1], 'attention.sliding_window': [None, 5], 'rope.scaling.attn_factor': [None, 1.3],
    'final_logit_softcapping': [None, 5.0], 'attn_logit_softcapping': [None, 5.0], 'rope.freq_base_swa': [None, 300.0],
    'attention.scale': [None, 0.1], 'embedding_scale': [None, 3.0], 'residual_scale': [None, 0.2],
    'logit_scale': [None, 2.0], 'use_parallel_residual': [None, True], 'expert_feed_forward_length': [None],
}
OF_TOKENIZER = {'tokenizer.ggml.add_bos_token': [None, True, False], 'tokenizer.ggml.bos_token_id': [None, 1, 2],
                'tokenizer.ggml.eos_token_id': [None, 0, 1], 'tokenizer.ggml.add_eos_token': [True, False],
                'tokenizer.ggml.add_space_prefix': [None, True, False], 'tokenizer.ggml.unknown_token_id': [None, 2],
                'tokenizer.chat_template': [None, 'x'], 'general.file_type': [None], 'general.name': [None, 'other']}
# Arguments: a file, as JSON ids of a prompt, and texts. Prints the next ids, their log-probabilities, and ids of texts.
RUN = """
import json, sys, urllib.request
import xllamacpp
path, prompt, texts, count = json.loads(sys.argv[1])
options = xllamacpp.CommonParams()
options.model.path, options.n_ctx, options.n_parallel, options.warmup = path, 256, 1, False
options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(options)

def post(place, **body):
    request = urllib.request.Request(server.listening_address + place, json.dumps(body).encode(),
                                     {'Content-Type': 'application/json'})
    return json.loads(urllib.request.urlopen(request).read())

answer = post('/completion', prompt=prompt, n_predict=count, samplers=['top_k'], top_k=1, n_probs=1, ignore_eos=True,
              return_tokens=True)
print(json.dumps(dict(
    tokens=answer['tokens'], logprobs=[step['logprob'] for step in answer['completion_probabilities']],
    texts=[post('/tokenize', content=text, add_special=True, parse_special=True)['tokens'] for text in texts])))
"""


def draw(generator):
    """A form of test_gguf, a kind of tokenizer, and the entries that are moved; None if one is missing."""
    form = generator.choice([*FORMS])
    moved = {key: generator.choice(VALUES[key]) for key in generator.sample(sorted(VALUES), generator.choice([1, 2, 4, 8]))}
    moved |= {key: generator.choice(OF_TOKENIZER[key]) for key in generator.sample(sorted(OF_TOKENIZER), generator.choice([0, 1, 2]))}
    return dict(form=form, sentence_piece=generator.random() < 0.4, moved=moved)


def in_llama_cpp(path, prompt):
    """What llama.cpp makes of a file, or None if it does not read it."""
    done = subprocess.run([sys.executable, '-c', RUN, json.dumps([path, prompt, TEXTS, N_TOKENS])],
                          capture_output=True, text=True, timeout=60)
    return json.loads(done.stdout) if done.returncode == 0 else None


@pytest.fixture(scope='module')
def difference(tmp_path_factory):
    """Function (form) -> what differs, or ''. It counts what was refused."""
    folder = tmp_path_factory.mktemp('gguf')
    counts = dict(same=0, refused=0, invalid=0)
    families = {False: FAMILIES['chatml'], True: FAMILIES['zephyr']}
    tokenizers = {kind: write_folder(folder / str(kind), *family, is_sentence_piece=kind)
                  for kind, family in families.items()}
    files = {}

    def file_of(form, kind):
        if (form, kind) not in files:
            files[form, kind] = str(folder / f'{form} {kind}.gguf')
            write_gguf(files[form, kind], *save(make_model(form, vocab_size=N_WORDS), folder / 'hf'), str(tokenizers[kind]), 'float32')
        return files[form, kind]

    def compare(form):
        if 'form' not in form:
            return ''
        original = file_of(form['form'], form.get('sentence_piece', False))
        arch = read_gguf_entry(original, 'general.architecture')
        present = read_gguf_keys(original)
        moved = {key if key in OF_TOKENIZER else f'{arch}.{key}': value for key, value in form.get('moved', {}).items()}
        moved = {key: value for key, value in moved.items() if key in present}
        path = change(original, str(folder / 'moved.gguf'), metadata=moved)
        prompt = PROMPT[0, :24].tolist()
        theirs = in_llama_cpp(path, prompt)
        if theirs is None:
            counts['invalid'] += 1
            return ''
        try:
            ours, ids = model_from(path), ids_of_texts(path, folder)
        except ValueError:
            counts['refused'] += 1
            return ''
        counts['same'] += 1
        if ids != theirs['texts']:
            return f'the ids are {ids}, in llama.cpp {theirs["texts"]}'
        tokens, logprobs = theirs['tokens'], torch.tensor(theirs['logprobs'])
        with torch.no_grad():
            logits = ours(torch.tensor([prompt + tokens]))[0, len(prompt) - 1:-1, :N_WORDS].log_softmax(-1)
        found = logits[torch.arange(len(tokens)), tokens]
        # llama.cpp looks GELU up in a table of float16.
        limit = 0.05 if form['form'].startswith(('gemma', 'gpt')) else 1e-3
        worst = (logits.max(-1).values - found).max().item()
        if len(logprobs) == len(tokens):  # the server leaves out those of parts of a character
            worst = max(worst, (found - logprobs).abs().max().item())
        return '' if worst < limit else f'log-probabilities differ by {worst:.2g}'

    yield compare
    print(counts)


def read_gguf_keys(path):
    import gguf
    return gguf.GGUFReader(path).fields.keys()


def read_gguf_entry(path, key):
    import gguf
    return gguf.GGUFReader(path).fields[key].contents()


def ids_of_texts(path, folder):
    """The ids of TEXTS, by the tokenizer that our reader makes."""
    (folder / 'read').mkdir(exist_ok=True)
    for file in (folder / 'read').iterdir():
        file.unlink()
    read_gguf(path)[2](folder / 'read')
    tokenizer = JsonTokenizer(str(folder / 'read'))
    return [tokenizer.encode_prompt(text) for text in TEXTS]


@pytest.mark.slow
def test_drawn_gguf_files_continue_as_in_llama_cpp(difference):
    check_draws(draw, difference, seed=random.randrange(10 ** 6), seconds=60)
