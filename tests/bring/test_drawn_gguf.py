"""GGUF files with entries of their metadata moved or missing: ids and next tokens are those of llama.cpp, or it is refused."""
import random
import sys

import gguf
import pytest

from data.tokens.json_tokenizer import JsonTokenizer
from drawing import check_draws, counted
from helpers import ROOT
from kilogpt.weights.gguf.files import read_gguf, write_gguf
from llama_cpp_runs import in_llama_cpp, worst_difference

pytest.importorskip('xllamacpp', reason='xllamacpp, which has llama.cpp, is not installed')
sys.path[:0] = [f'{ROOT}/tests/weights', f'{ROOT}/tests']
from test_chat_template import FAMILIES, write_folder  # noqa: E402
from test_gguf import FORMS, PROMPT, change, limit_of, make_model, save  # noqa: E402
from test_weights import model_from  # noqa: E402

TEXTS = 'the quick  brown fox 12345', " <|im_end|>a </s> fox's", 'ÄÖ 🙂\n\n words', 'Hi', '  x'
N_TOKENS, N_WORDS = 8, 375  # greedy tokens; rows of the table, of which tokenizers have fewer
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
    'attention.sliding_window_pattern': [None, 1, 3], 'full_attention_interval': [None, 1, 2],
    'attention.q_lora_rank': [None, 0], 'attention.kv_lora_rank': [None], 'attention.key_length_mla': [None],
    'attention.value_length_mla': [None], 'rope.scaling.yarn_log_multiplier': [None, 0.05],
    'expert_shared_feed_forward_length': [None], 'ssm.inner_size': [None], 'ssm.state_size': [None],
    'ssm.group_count': [None, 1], 'ssm.time_step_rank': [None], 'ssm.conv_kernel': [None],
    'rope.dimension_sections': [None, [11, 11, 10, 0], [2, 1, 1, 0], [0, 0, 0, 4]],
}
OF_TOKENIZER = {'tokenizer.ggml.add_bos_token': [None, True, False], 'tokenizer.ggml.bos_token_id': [None, 1, 2],
                'tokenizer.ggml.eos_token_id': [None, 0, 1], 'tokenizer.ggml.add_eos_token': [True, False],
                'tokenizer.ggml.add_space_prefix': [None, True, False], 'tokenizer.ggml.unknown_token_id': [None, 2],
                'tokenizer.chat_template': [None, 'x'], 'general.file_type': [None], 'general.name': [None, 'other']}
def draw(generator):
    """A form of test_gguf, a kind of tokenizer, and the entries that are moved; None if one is missing."""
    form = generator.choice([*FORMS])
    moved = {key: generator.choice(VALUES[key]) for key in generator.sample(sorted(VALUES), generator.choice([1, 3, 6, 12]))}
    moved |= {key: generator.choice(OF_TOKENIZER[key]) for key in generator.sample(sorted(OF_TOKENIZER), generator.choice([0, 1, 2]))}
    if form.startswith('phi3'):  # whose windows llama.cpp does not compute, as it says
        moved.pop('attention.sliding_window', None)
    return dict(form=form, sentence_piece=generator.random() < 0.4, moved=moved)


@pytest.fixture(scope='module')
def difference(tmp_path_factory):
    """Function (form) -> what differs, or ''. It counts what was refused."""
    folder = tmp_path_factory.mktemp('gguf')
    families = {False: FAMILIES['chatml'], True: FAMILIES['zephyr']}
    tokenizers = {kind: write_folder(folder / str(kind), *family, is_sentence_piece=kind)
                  for kind, family in families.items()}
    files = {}

    def file_of(form, kind):
        if (form, kind) not in files:
            files[form, kind] = str(folder / f'{len(files)}.gguf')  # llama.cpp expects tokens of a model named phi3
            write_gguf(files[form, kind], *save(make_model(form, vocab_size=N_WORDS), folder / 'hf'), str(tokenizers[kind]), 'float32')
        return files[form, kind]

    def compare(form, theirs, ours):
        if 'form' not in form:
            return ''
        original = file_of(form['form'], form.get('sentence_piece', False))
        present = gguf.GGUFReader(original).fields
        arch = present['general.architecture'].contents()
        moved = {key if key in OF_TOKENIZER else f'{arch}.{key}': value for key, value in form.get('moved', {}).items()}
        moved = {key: value for key, value in moved.items() if key in present}
        path = change(original, str(folder / 'moved.gguf'), metadata=moved)
        prompt = PROMPT[0, :24].tolist()
        found = in_llama_cpp(path, prompt, N_TOKENS, TEXTS)  # None if it does not read it
        expected = theirs(lambda: found)
        model, ids = ours(lambda: (model_from(path), ids_of_texts(path, folder)))
        if ids != expected['texts']:
            return f'the ids are {ids}, in llama.cpp {expected["texts"]}'
        worst, limit = worst_difference(model, prompt, expected), limit_of(form['form'])
        return '' if worst < limit else f'log-probabilities differ by {worst:.2g}'

    yield from counted(compare)


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
    check_draws(draw, difference, seed=random.randrange(10 ** 6), seconds=40)
