"""Names on the Hugging Face hub, through each command that takes them. The hub is on loopback (hub_server.py)."""
import hashlib
import itertools
import json
import os
import shutil
import signal

import pyarrow
import pyarrow.parquet
import pytest
import torch
from huggingface_hub import try_to_load_from_cache
from safetensors.torch import save_file

from helpers import FAULTS, ROOT, newest_state, run_forked, run_script, start_script, wait_until
from hub_server import COMMIT, Hub

WIDTH, HIDDEN, TOKENS = 128, 512, 257
SAMPLE = '--device=cpu', '--dtype=float32', '--num_samples=1', '--max_new_tokens=8', '--start=A'
LLAMA = dict(architectures=['LlamaForCausalLM'], model_type='llama', vocab_size=TOKENS, hidden_size=WIDTH,
             intermediate_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=True,
             hidden_act='silu', attention_bias=False, mlp_bias=False)


def make_tensors(hidden=HIDDEN):
    torch.manual_seed(0)
    shapes = {'self_attn.q_proj': (WIDTH, WIDTH), 'self_attn.k_proj': (WIDTH // 2, WIDTH),
              'self_attn.v_proj': (WIDTH // 2, WIDTH), 'self_attn.o_proj': (WIDTH, WIDTH), 'mlp.gate_proj': (hidden, WIDTH),
              'mlp.up_proj': (hidden, WIDTH), 'mlp.down_proj': (WIDTH, hidden), 'input_layernorm': (WIDTH,),
              'post_attention_layernorm': (WIDTH,)}
    tensors = {f'model.layers.{i}.{name}.weight': torch.randn(shape) / 8
               for i, (name, shape) in itertools.product(range(2), shapes.items())}
    return tensors | {'model.embed_tokens.weight': torch.randn(TOKENS, WIDTH), 'model.norm.weight': torch.ones(WIDTH)}


def write_tokenizer(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(['<|endoftext|>'])
    tokenizer.save(str(folder / 'tokenizer.json'))
    (folder / 'tokenizer_config.json').write_text(json.dumps(dict(eos_token='<|endoftext|>')))


@pytest.fixture(scope='module')
def repositories(tmp_path_factory):
    """A folder that a Hub serves: a model in one file and in shards, others that are none, and datasets."""
    root = tmp_path_factory.mktemp('hub')
    one, shards, bert, packed = (root / 'models' / 'org' / name for name in ('tiny', 'shards', 'bert', 'packed'))
    for folder in (one, shards, bert, packed):
        folder.mkdir(parents=True)
    for folder in (one, shards):
        (folder / 'config.json').write_text(json.dumps(LLAMA))
        write_tokenizer(folder)
        for name in ('README.md', 'pytorch_model.bin', 'model.onnx', 'consolidated.safetensors'):
            (folder / name).write_text('not needed')
    tensors = make_tensors()
    save_file(tensors, one / 'model.safetensors')
    names = sorted(tensors)
    for number, part in enumerate((names[:9], names[9:]), 1):
        save_file({name: tensors[name] for name in part}, shards / f'model-0000{number}-of-00002.safetensors')
    weight_map = {name: f'model-0000{1 + (name in names[9:])}-of-00002.safetensors' for name in names}
    (shards / 'model.safetensors.index.json').write_text(json.dumps(dict(weight_map=weight_map)))
    (bert / 'config.json').write_text(json.dumps(LLAMA | dict(architectures=['LlamaForSequenceClassification'])))
    (bert / 'model.safetensors').write_text('never read')
    (packed / 'tiny-q8_0.gguf').write_text('never read')
    for name in ('texts/data/train-00000-of-00002', 'texts/data/train-00001-of-00002', 'texts/data/test-00000-of-00001',
                 'two/one/train-00000-of-00001', 'two/other/train-00000-of-00001', 'two/other/test-00000-of-00001'):
        path = root / 'datasets' / 'org' / f'{name}.parquet'
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table(dict(text=[f'{name} {i}' for i in range(50)])), path)
    return root


@pytest.fixture
def hub(repositories, tmp_path):
    """A Hub, whose `env` lets commands use it with an empty cache."""
    server = Hub(repositories)
    server.env = dict(HF_ENDPOINT=server.url, HF_HOME=str(tmp_path / 'cache'), HF_TOKEN='', HF_TOKEN_PATH=str(tmp_path / 'none'))
    yield server
    server.shutdown()


def without_network(hub):
    """The environment for the cache alone; nobody listens at that port."""
    return hub.env | dict(HF_ENDPOINT='http://127.0.0.1:9')


def failure_of(*command, env):
    """The one sentence with which a command ends."""
    run = run_forked(*command, env=env, check=False)
    assert run.returncode == 1 and run.stderr.startswith('error: ') and run.stderr.count('\n') == 1, run.stderr
    return run.stderr


# --- downloads ----------------------------------------------------------------------------------------------

def test_weights_are_downloaded_once_and_come_from_the_cache_without_a_network(hub):
    command = 'sample.py', '--init_from=org/tiny', *SAMPLE
    first = run_forked(*command, env=hub.env)
    assert 'downloading org/tiny: 3 file(s), 2.1 MB, into ' in first.stderr
    needed = {'config.json', 'tokenizer.json', 'tokenizer_config.json', 'model.safetensors'}
    assert hub.downloads().keys() == needed
    cache = os.path.join(hub.env['HF_HOME'], 'hub')
    assert isinstance(try_to_load_from_cache('org/tiny', 'model.safetensors', cache), str)  # as transformers looks for it
    again = run_forked(*command, env=hub.env)
    assert all(spans == [None] for spans in hub.downloads().values()) and again.stdout == first.stdout
    gone = run_forked(*command, env=without_network(hub))
    assert gone.stdout == first.stdout and gone.stderr.count('\n') == 1
    assert 'org/tiny is taken from the cache, since the hub does not give it (ConnectError' in gone.stderr
    assert len(first.stdout) > 8


def test_interrupted_download_continues(hub, repositories, tmp_path):
    """What a killed command has left is a part of the file; test_killed_... leaves it so."""
    weights = (repositories / 'models' / 'org' / 'tiny' / 'model.safetensors').read_bytes()
    part = tmp_path / 'cache' / 'hub' / 'models--org--tiny' / 'blobs' / f'{hashlib.sha256(weights).hexdigest()}.incomplete'
    part.parent.mkdir(parents=True)
    part.write_bytes(weights[:1_500_000])
    run = run_forked('kilogpt.convert', 'inspect', 'org/tiny', env=hub.env)
    assert '3 file(s), 607.3 kB' in run.stderr and 'model.safetensors, 2.1 MB, of which 1.5 MB are here' in run.stderr
    assert hub.downloads()['model.safetensors'] == ['bytes=1500000-']
    assert part.with_suffix('').read_bytes() == weights and not part.exists()


@pytest.mark.slow
def test_part_that_does_not_fit_is_thrown_away(hub, repositories, tmp_path):
    weights = (repositories / 'models' / 'org' / 'tiny' / 'model.safetensors').read_bytes()
    part = tmp_path / 'cache' / 'hub' / 'models--org--tiny' / 'blobs' / f'{hashlib.sha256(weights).hexdigest()}.incomplete'
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(1_500_000))
    run = run_forked('kilogpt.convert', 'inspect', 'org/tiny', env=hub.env, check=False)
    assert 'model.safetensors of org/tiny could not be downloaded completely (OSError: its parts do not fit' in run.stderr
    assert 'parameters in' in run_forked('kilogpt.convert', 'inspect', 'org/tiny', env=hub.env).stdout


@pytest.mark.slow
def test_killed_download_continues_where_it_ended(hub, repositories, tmp_path):
    """huggingface_hub writes 10 MB at a time."""
    folder = shutil.copytree(repositories / 'models' / 'org' / 'tiny', repositories / 'models' / 'org' / 'large')
    (folder / 'config.json').write_text(json.dumps(LLAMA | dict(intermediate_size=8192)))
    save_file(make_tensors(8192), folder / 'model.safetensors')
    hub.stall = 15_000_000
    with start_script('kilogpt.convert', 'inspect', 'org/large', env=hub.env) as process:
        process.output = str
        blobs = tmp_path / 'cache' / 'hub' / 'models--org--large' / 'blobs'
        wait_until(lambda: any(path.stat().st_size >= 5e6 for path in blobs.glob('*.incomplete')), process)
        process.send_signal(signal.SIGKILL)
    hub.stall = None
    run = run_script('kilogpt.convert', 'inspect', 'org/large', env=hub.env)
    first, second = hub.downloads()['model.safetensors']
    assert first is None and 5e6 <= int(second.removeprefix('bytes=').rstrip('-')) <= 15e6
    assert 'parameters in' in run.stdout


def test_shards_and_their_index_are_downloaded_and_no_other_form(hub):
    run = run_forked('sample.py', '--init_from=org/shards', *SAMPLE, env=hub.env)
    assert run.stdout == run_forked('sample.py', '--init_from=org/tiny', *SAMPLE, env=hub.env).stdout
    assert {name for name in hub.downloads() if 'model' in name} == {
        'model.safetensors.index.json', 'model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors',
        'model.safetensors'}


def test_what_is_on_this_machine_wins(hub, repositories, tmp_path):
    shutil.copytree(repositories / 'models' / 'org' / 'tiny', tmp_path / 'org' / 'absent')
    run_forked('sample.py', '--init_from=org/absent', *SAMPLE, env=hub.env, cwd=tmp_path)
    assert hub.requests == []


def test_one_process_downloads_and_the_others_wait(hub, train, prepared):
    run = train(f'--dataset={prepared}', '--init_from=org/tiny', '--max_iters=1', nproc=3, env=hub.env)
    assert list(run.lines) == [1] and all(spans == [None] for spans in hub.downloads().values())
    assert run.stderr.count('downloading org/tiny') == 1


# --- what the hub refuses -----------------------------------------------------------------------------------

@pytest.mark.parametrize('name, sentence', [
    ('org/absent', 'org/absent does not exist here, and there is no model {url}/org/absent: check the name, or if it is '
                   'private, set HF_TOKEN'),
    ('org/tiny@v2', "org/tiny@v2 does not exist: {url}/org/tiny has no revision 'v2'"),
    ('org/bert', 'org/bert is of the kind LlamaForSequenceClassification (architectures in its config.json), which'),
    ('org/packed', 'org/packed has no weights that are read (model.safetensors or pytorch_model.bin): name one of its '
                   'GGUF files, such as ORG/NAME/tiny-q8_0.gguf'),
    ('org/packed/absent.gguf', 'org/packed/absent.gguf has no file absent.gguf'),
])
def test_wrong_names_are_refused_in_one_sentence_before_anything_large_comes(hub, name, sentence):
    failure = failure_of('kilogpt.convert', 'inspect', name, env=hub.env)
    assert failure.startswith('error: ' + sentence.format(url=hub.url))
    assert not any(name.endswith(('.safetensors', '.gguf')) for name in hub.downloads())


def test_gated_weights_refused_tokens_and_no_network_get_one_sentence(hub):
    failure = failure_of('kilogpt.convert', 'inspect', 'org/tiny', env=without_network(hub))
    assert 'org/tiny is neither a folder nor in the Hugging Face cache, and could not be downloaded (ConnectError' in failure
    hub.gated = ['org/tiny']
    failure = failure_of('kilogpt.convert', 'inspect', 'org/tiny', env=hub.env)
    assert f'org/tiny is gated: accept its terms at {hub.url}/org/tiny, and set HF_TOKEN' in failure
    hub.token = 'right'
    failure = failure_of('kilogpt.convert', 'inspect', 'org/tiny', env=hub.env | dict(HF_TOKEN='wrong'))
    assert f'{hub.url} refuses the token with which org/tiny was asked for (status 401)' in failure


# --- the commands -------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def prepared(repositories, tmp_path_factory):
    """A dataset in the tokens of org/tiny."""
    folder = tmp_path_factory.mktemp('prepared')
    (folder / 'a.txt').write_text('a text of some words, ' * 200)
    run_forked('data/text/prepare.py', f'--input={folder}/a.txt', f'--out={folder}/data', '--num_proc=1',
               f'--tokenizer={repositories}/models/org/tiny')
    return folder / 'data'


DOORS = {
    'train': ['train.py', '--init_from=org/tiny@v1', '--dataset={data}', '--out_dir={tmp}/out', '--device=cpu',
              '--compile=False', '--max_iters=1', '--eval_iters=1', '--batch_size=1', '--block_size=32',
              '--gradient_accumulation_steps=1'],
    'evaluate': ['kilogpt.evaluate', 'org/tiny', '--tasks=capitals', '--limit=2', '--device=cpu'],
    'import': ['kilogpt.convert', 'import', 'org/tiny', '{tmp}/imported'],
    'load': ['{tmp}/load.py'],
    'prepare': ['data/text/prepare.py', '--tokenizer=org/tiny', '--input={tmp}/load.py', '--out={tmp}/data', '--num_proc=1'],
    'conversations': ['data/conversations/prepare.py', '--tokenizer=org/tiny', '--input={tmp}/chats.jsonl',
                      '--out={tmp}/chats', '--num_proc=1', '--val_fraction=0'],
}


@pytest.mark.parametrize('door', DOORS)
def test_each_command_takes_a_name(hub, prepared, tmp_path, door):
    (tmp_path / 'load.py').write_text(f'import sys\nsys.path.append({ROOT!r})\nimport kilogpt\n'
                                      'print(kilogpt.load("org/tiny").loss("some words"))\n')
    (tmp_path / 'chats.jsonl').write_text(json.dumps(dict(prompt='Hello!', completion='Hi!')) + '\n')
    command = [part.format(data=prepared, tmp=tmp_path) for part in DOORS[door]]
    run_forked(*command, env=hub.env)
    assert 'tokenizer.json' in hub.downloads()
    assert ('model.safetensors' in hub.downloads()) == ('--tokenizer=org/tiny' not in command)


@pytest.mark.slow
def test_plan_needs_the_config_alone(hub):
    run = run_forked('kilogpt.plan', '--init_from=org/tiny', '--gpus=1', '--block_size=32', '--as_given', env=hub.env)
    assert 'the model is that of org/tiny' in run.stderr and list(hub.downloads()) == ['config.json']
    missing = run_forked('kilogpt.plan', '--init_from=org/absent', '--gpus=1', '--as_given', env=hub.env)
    assert 'which is not here: the model is that of the keys' in missing.stderr


@pytest.mark.slow
def test_adapters_name_the_commit_of_their_base(hub, repositories, train, prepared, tmp_path):
    run = train(f'--dataset={prepared}', '--init_from=org/tiny', '--lora_rank=2', '--max_iters=1', env=hub.env)
    assert newest_state(run.out_dir)['base']['source'] == f'org/tiny@{COMMIT}'
    gone = without_network(hub)
    sampled = run_forked('sample.py', f'--out_dir={run.out_dir}', *SAMPLE, env=gone)
    assert sampled.stdout.startswith('A') and 'from the cache' not in sampled.stderr  # a commit is not asked for again
    run_forked('kilogpt.convert', 'export', run.out_dir, tmp_path / 'adapter', '--adapter', env=gone)
    entries = json.loads((tmp_path / 'adapter' / 'adapter_config.json').read_text())
    assert (entries['base_model_name_or_path'], entries['revision']) == ('org/tiny', COMMIT)
    run_forked('kilogpt.convert', 'import', tmp_path / 'adapter', tmp_path / 'again', env=gone)
    assert newest_state(tmp_path / 'again')['base'] == newest_state(run.out_dir)['base']
    shutil.copytree(tmp_path / 'adapter', repositories / 'models' / 'org' / 'adapter')
    run_forked('kilogpt.convert', 'import', 'org/adapter', tmp_path / 'by_name', env=hub.env)
    assert newest_state(tmp_path / 'by_name')['base'] == newest_state(run.out_dir)['base']


@pytest.mark.slow
def test_gguf_file_of_a_repository_is_taken_by_its_path(hub, repositories, prepared, tmp_path):
    place = repositories / 'models' / 'org' / 'gguf'
    place.mkdir()
    (place / 'other.gguf').write_text('never read')
    run_forked('kilogpt.convert', 'import', 'org/tiny', tmp_path / 'run', env=hub.env)
    run_forked('kilogpt.convert', 'export', tmp_path / 'run', place / 'tiny.gguf')
    text = run_forked('sample.py', '--init_from=org/gguf/tiny.gguf@v1', *SAMPLE, env=hub.env).stdout
    assert text == run_forked('sample.py', '--init_from=org/tiny', *SAMPLE, env=hub.env).stdout
    prepare(f'--input={prepared.parent}/a.txt', f'--out={tmp_path}/data', '--tokenizer=org/gguf/tiny.gguf', env=hub.env)
    assert (tmp_path / 'data' / 'train.bin').read_bytes() == (prepared / 'train.bin').read_bytes()
    assert 'other.gguf' not in hub.downloads() and hub.downloads()['tiny.gguf'] == [None]


# --- datasets -----------------------------------------------------------------------------------------------

def prepare(*arguments, env, check=True):
    return run_forked('data/text/prepare.py', '--num_proc=1', '--tokenizer=bytes', *arguments, env=env, check=check)


@pytest.mark.slow
def test_dataset_is_prepared_by_its_name_from_its_training_split(hub, tmp_path):
    run = prepare('--input=org/texts', f'--out={tmp_path}/data', env=hub.env)
    assert 'org/texts: 2 file(s), data/train-*.parquet' in run.stdout
    assert hub.downloads().keys() == {f'data/train-0000{i}-of-00002.parquet' for i in range(2)}
    text = bytes((tmp_path / 'data' / 'train.bin').read_bytes()[::2]).decode()
    assert text.startswith('texts/data/train-00000-of-00002 0\n') and 'train-00001-of-00002 0\n' in text
    prepare('--input=org/texts', f'--out={tmp_path}/data', env=without_network(hub))
    run_forked('data/corpus/prepare.py', '--input=org/texts', f'--out={tmp_path}/corpus', '--tokenizer=bytes',
               '--num_proc=1', '--val_fraction=0', env=without_network(hub))
    prepare('--input=org/texts/data/test-*', f'--out={tmp_path}/other', env=hub.env)
    assert 'data/test-00000-of-00001.parquet' in hub.downloads()


def test_dataset_of_several_sets_or_without_a_network_asks_in_one_sentence(hub, tmp_path):
    failure = prepare('--input=org/two', f'--out={tmp_path}/data', env=hub.env, check=False).stderr
    assert failure == ('error: org/two has no single set of texts, but 2 (one/train-*.parquet, other/train-*.parquet): '
                       'name one, such as --input=org/two/one/train-*.parquet\n')
    prepare('--input=org/two/other', f'--out={tmp_path}/data', env=hub.env)
    assert list(hub.downloads()) == ['other/train-00000-of-00001.parquet']
    failure = prepare('--input=org/none', f'--out={tmp_path}/none', env=without_network(hub), check=False).stderr
    assert failure.startswith('error: org/none is neither a file nor in the Hugging Face cache, and could not be')


def test_cache_that_cannot_be_written_gives_what_is_there(hub):
    """As clusters share one."""
    run_forked('kilogpt.convert', 'inspect', 'org/tiny', env=hub.env)
    hub.requests.clear()
    options = dict(env=hub.env, faults=[FAULTS / 'read_only_cache.py'])
    assert 'parameters in' in run_forked('kilogpt.convert', 'inspect', 'org/tiny', **options).stdout
    absent = run_forked('kilogpt.convert', 'inspect', 'org/shards', check=False, **options)
    assert 'error: org/shards is not in the cache, and ' in absent.stderr and 'set HF_HOME to a folder' in absent.stderr
    assert not hub.requests
