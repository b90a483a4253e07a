"""What llama.cpp makes of a GGUF file, in a process of its own: PyPI's xllamacpp is a wheel with its server."""
import importlib.util
import json
import subprocess
import sys

import pytest
import torch

needs_llama_cpp = pytest.mark.skipif(not importlib.util.find_spec('xllamacpp'), reason='xllamacpp is not installed')
# Argument: JSON of a file, ids of a prompt, a number of tokens, texts, and what /apply-template gets, or null.
RUN = """
import json, sys, urllib.request
import xllamacpp
path, prompt, count, texts, chat = json.loads(sys.argv[1])
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

answer = post('/completion', prompt=prompt, n_predict=count, samplers=['top_k'], top_k=1, n_probs=1, return_tokens=True)
if chat:
    texts.append(post('/apply-template', **chat)['prompt'])
print(json.dumps(dict(
    tokens=answer['tokens'], logprobs=[step['logprob'] for step in answer['completion_probabilities']],
    texts=[post('/tokenize', content=text, add_special=True, parse_special=True)['tokens'] for text in texts])))
"""


def in_llama_cpp(path, prompt, count, texts=(), chat=None):
    """What llama.cpp makes of a file: {'tokens', 'logprobs', 'texts'}; None if it does not read it.

    tokens: the likeliest ones after the ids `prompt`, up to one that ends texts. logprobs: theirs, without those of parts of characters.
    texts: the ids of each text. The last one is that of `chat`, the `messages` and `tools` of a conversation.
    """
    done = subprocess.run([sys.executable, '-c', RUN, json.dumps([path, prompt, count, [*texts], chat])],
                          capture_output=True, text=True, timeout=300)
    return json.loads(done.stdout) if done.returncode == 0 else None


@torch.no_grad()
def worst_difference(model, prompt, theirs):
    """By how much our log-probabilities of the tokens of in_llama_cpp differ, or are below the largest."""
    tokens, logprobs = theirs['tokens'], torch.tensor(theirs['logprobs'])
    logits = model(torch.tensor([prompt + tokens]))
    logits = getattr(logits, 'logits', logits)[0, len(prompt) - 1:-1].log_softmax(-1)
    found = logits[torch.arange(len(tokens)), tokens]
    worst = (logits.max(-1).values - found).max().item()
    if len(logprobs) == len(tokens):  # the server leaves out those of parts of a character
        worst = max(worst, (found - logprobs).abs().max().item())
    return worst
