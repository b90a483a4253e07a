#!/usr/bin/env bash
# llama.cpp routes DeepSeek-V2's expert groups by DeepSeek-V3's rule, so that other experts answer.
#
#     bash findings/deepseek_v2_groups.sh
#
# The script installs torch, transformers==5.24.0, gguf==0.19.0 and xllamacpp==2026.10.11549 (llama.cpp's server) in a
# temporary folder, makes a tiny random DeepSeek-V2, writes it by gguf's writer with the metadata that llama.cpp's own
# converter writes, and compares the log-probabilities of 24 tokens. No code of kiloGPT runs. DeepSeek-V2 and Coder-V2
# (236B) choose 3 of 8 groups of experts by the best expert of each (group_limited_greedy; arXiv 2405.04434, 2.1.2). V3
# takes the sum of the two best. The file has the architecture (deepseek2 for both), the number of groups, and that the
# router has a softmax, which V3's has not. With one group the programs agree; with four they do not, unless
# transformers is made to take the sum too.
#
# Exit code: 0 if the surprise is still there, 1 if they agree with groups too, or the script fails.
#
# Variables: XLLAMACPP=VERSION tries another version, and PYTHON=path uses a Python that has all, without a venv.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMP_NUM_THREADS=1

if [ -z "${PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    PYTHON="$folder/venv/bin/python"
    "$PYTHON" -m pip install --quiet torch==2.13.0 transformers==5.24.0 gguf==0.19.0 \
        "xllamacpp==${XLLAMACPP:-2026.10.11549}"
fi

cat > "$folder/script.py" <<'SCRIPT'
import importlib.metadata
import json
import pathlib
import subprocess
import sys
import urllib.request

import gguf
import torch
import transformers

FOLDER = pathlib.Path(sys.argv[1])
SERVE = '''
import json, sys, urllib.request
import xllamacpp
options = xllamacpp.CommonParams()
options.model.path, options.n_ctx, options.n_parallel, options.warmup = sys.argv[1], 128, 1, False
options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(options)
body = dict(prompt=json.loads(sys.argv[2]), n_predict=24, samplers=['top_k'], top_k=1, n_probs=1, return_tokens=True)
request = urllib.request.Request(server.listening_address + '/completion', json.dumps(body).encode(),
                                 {'Content-Type': 'application/json'})
answer = json.loads(urllib.request.urlopen(request).read())
print(json.dumps([answer['tokens'], [step['logprob'] for step in answer['completion_probabilities']]]))
'''
WORDS = 64
PROMPT = [(5 * i) % WORDS for i in range(1, 13)]


def make_model(groups):
    options = dict(n_group=groups, topk_group=groups // 2, topk_method='group_limited_greedy') if groups > 1 else {}
    config = transformers.DeepseekV2Config(
        vocab_size=WORDS, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=16, v_head_dim=16, n_routed_experts=16, num_experts_per_tok=4, n_shared_experts=1,
        first_k_dense_replace=1, routed_scaling_factor=1.0, max_position_embeddings=128, rms_norm_eps=1e-6,
        **dict(dict(topk_method='greedy'), **options))
    torch.manual_seed(0)
    model = transformers.DeepseekV2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = 'norm' in name
            parameter.copy_(is_norm + (0.1 if is_norm else 0.2) * torch.randn(parameter.shape))
    return model


def write(model, path):
    """The file that llama.cpp's converter makes of the model: its metadata, and keys and values of MLA apart."""
    config, tensors = model.config, {name: tensor.detach() for name, tensor in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, 'deepseek2')
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(False)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    if config.topk_method != 'greedy':
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    writer.add_tokenizer_model('llama')
    writer.add_token_list([f'w{i}' for i in range(WORDS)])
    writer.add_token_scores([0.0] * WORDS)
    writer.add_token_types([gguf.TokenType.NORMAL] * WORDS)
    writer.add_add_bos_token(False)

    def add(name, tensor):
        writer.add_tensor(name, tensor.float().contiguous().numpy())

    add('token_embd.weight', tensors['model.embed_tokens.weight'])
    add('output_norm.weight', tensors['model.norm.weight'])
    add('output.weight', tensors['lm_head.weight'])
    plain = dict(input_layernorm='attn_norm', post_attention_layernorm='ffn_norm')
    plain |= {f'self_attn.{theirs}': own for theirs, own in dict(
        q_a_proj='attn_q_a', q_a_layernorm='attn_q_a_norm', q_b_proj='attn_q_b', kv_a_proj_with_mqa='attn_kv_a_mqa', kv_a_layernorm='attn_kv_a_norm', o_proj='attn_output').items()}
    for layer in range(config.num_hidden_layers):
        old, new = f'model.layers.{layer}.', f'blk.{layer}.'
        for theirs, own in plain.items():
            add(f'{new}{own}.weight', tensors[f'{old}{theirs}.weight'])
        both = tensors[f'{old}self_attn.kv_b_proj.weight'].view(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, values = both.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        add(f'{new}attn_k_b.weight', keys.mT)
        add(f'{new}attn_v_b.weight', values)
        dense = layer < config.first_k_dense_replace
        for part in ('gate', 'up', 'down'):
            name = f'{old}mlp.{part}_proj.weight' if dense else f'{old}mlp.shared_experts.{part}_proj.weight'
            add(f'{new}ffn_{part}.weight' if dense else f'{new}ffn_{part}_shexp.weight', tensors[name])
        if not dense:
            add(f'{new}ffn_gate_inp.weight', tensors[f'{old}mlp.gate.weight'])
            gate, up = tensors[f'{old}mlp.experts.gate_up_proj'].chunk(2, dim=1)
            add(f'{new}ffn_gate_exps.weight', gate)
            add(f'{new}ffn_up_exps.weight', up)
            add(f'{new}ffn_down_exps.weight', tensors[f'{old}mlp.experts.down_proj'])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def by_the_two_best(router, _, outputs):
    """What the router would say if a group were as good as the sum of its two best experts."""
    scores = outputs[0].softmax(-1)
    groups = scores.view(len(scores), router.num_group, -1)
    best = groups.topk(2).values.sum(-1).topk(router.topk_group).indices
    is_allowed = torch.zeros(groups.shape[:2]).scatter(1, best, 1)[..., None]
    return outputs[0], *(groups * is_allowed).flatten(1).topk(router.top_k)


@torch.no_grad()
def difference(groups, sums_two=False):
    """By how much log-probabilities of the tokens that llama.cpp writes differ in transformers."""
    model, path = make_model(groups), str(FOLDER / f'{groups}.gguf')
    write(model, path)
    done = subprocess.run([sys.executable, '-c', SERVE, path, json.dumps(PROMPT)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    tokens, found = json.loads(done.stdout)
    for layer in model.model.layers[1:] if sums_two else ():
        layer.mlp.gate.register_forward_hook(by_the_two_best)
    expected = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1:-1].log_softmax(-1)
    return (expected[torch.arange(len(tokens)), torch.tensor(tokens)] - torch.tensor(found)).abs().max().item()


for name in ('torch', 'transformers', 'gguf', 'xllamacpp'):
    print(name, importlib.metadata.version(name))
plain, grouped, by_sums = difference(1), difference(4), difference(4, sums_two=True)
print(f'log-probabilities of 24 tokens differ by {plain:.2g} with one group of experts, by {grouped:.2g} with four')
print(f'if transformers took the sum of the two best experts of a group, as for DeepSeek-V3: by {by_sums:.2g}')
print('expected: both are below 1e-3, since the architecture and the number of groups are in the file')
is_so = plain < 1e-3 and by_sums < 1e-3 and grouped > 0.05
print('seen: other experts with groups' if is_so else 'seen: no longer so')
sys.exit(not is_so)
SCRIPT
"$PYTHON" "$folder/script.py" "$folder"
