"""kilogpt.load: trained models in Python, and models that do not name their tokenizer."""
import doctest
import json
import math
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, run_forked

from data.tokens.tokenizer import ByteTokenizer
import kilogpt
from kilogpt.loading import sum_bits
from kilogpt.run import checkpoint
from kilogpt.weights.exporting import export_weights

PAGE = pathlib.Path(ROOT, 'docs', 'text.md')


@pytest.fixture(scope='module')
def trained(train):
    """A short run with two evaluations, as the page's run has, and two checkpoints."""
    return train('--max_iters=3', '--lr_decay_iters=3', '--eval_interval=3', '--save_interval=2')


def load(source, **options):
    return kilogpt.load(str(source), device='cpu', **options)


def expected_loss(run, text):
    """The loss of a text from the model's logits, one piece of block_size tokens at a time."""
    tokens = run.tokenizer.encode(text)
    losses = []
    for start in range(0, len(tokens) - 1, run.model.config.block_size):
        piece = tokens[start:start + run.model.config.block_size + 1]
        log_probabilities = run.model(torch.tensor([piece[:-1]]))[0].log_softmax(-1)
        losses += [-log_probabilities[i, token].item() for i, token in enumerate(piece[1:])]
    return sum(losses) / len(losses)


@pytest.mark.quick
def test_import_does_not_import_torch():
    code = 'import sys, kilogpt; sys.exit("torch" in sys.modules or "numpy" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], cwd=ROOT).returncode == 0


def test_run_has_its_model_config_and_metrics(trained):
    run = load(trained.out_dir)
    assert run.path == checkpoint.find_best(trained.out_dir)
    assert run.config == json.loads((trained.out_dir / 'config.json').read_text()) | vars(run.model.config)
    assert [line['iter'] for line in run.metrics] == [0, 1, 2, 3]
    last = trained.evals[3] | trained.lines[3]
    assert {key: run.metrics[3][key] for key in last} == last and {'loss', 'val_loss'} <= last.keys()
    assert run.metrics[0]['val_loss'] == trained.evals[0]['val_loss']
    assert repr(run).startswith(f"LoadedRun('{run.path}': ") and repr(run).endswith('char, 4 iterations in metrics)')
    assert not run.model.training and run.model.transformer.wte.weight.dtype == torch.float32
    latest, first = checkpoint.find(trained.out_dir)[0], checkpoint.find(trained.out_dir)[-1]
    assert load(trained.out_dir, which='latest').path == latest
    one = load(f'{first}/')
    assert one.path == first != latest and one.metrics == run.metrics


def test_loss_is_the_mean_over_all_tokens_but_the_first(trained):
    run = load(trained.out_dir)
    for text in ('AB', 'A' * 33, 'HELLO ' * 20):  # block_size is 32
        assert run.loss(text) == pytest.approx(expected_loss(run, text), abs=1e-5)


def test_generated_texts_are_those_of_sample(trained):
    run = load(trained.out_dir)
    sampled = run_forked('sample.py', f'--init_from={trained.out_dir}', '--device=cpu', '--dtype=float32',
                         '--start=AB', '--num_samples=3', '--max_new_tokens=40')
    texts = run.generate('AB', max_new_tokens=40, num_samples=3)
    assert sampled.stdout == ''.join(text + '\n---------------\n' for text in texts) and len(set(texts)) == 3
    assert run.generate('AB', max_new_tokens=5) == run.generate('AB', max_new_tokens=5, num_samples=1)[0]


@pytest.mark.parametrize('shape, dtype', [((3, 5), torch.float32), ((7,), torch.bfloat16), ((2, 4), torch.float64)])
def test_change_of_any_single_number_is_noticed(shape, dtype):
    buffer = torch.randn(math.prod(shape) + 1, dtype=dtype, generator=torch.Generator().manual_seed(0))
    for tensor in (buffer[1:].view(shape), buffer[:-1].view(shape), buffer[:-1].view(shape).transpose(0, -1)):
        before = sum_bits(tensor)
        assert sum_bits(tensor) == before
        for number in buffer[1:-1]:
            kept = number.clone()
            number.neg_()
            assert sum_bits(tensor) != before
            number.copy_(kept)
        assert sum_bits(tensor) == before


def test_text_is_that_of_the_weights_as_they_are_now(trained):
    run = load(trained.out_dir)
    before = run.generate('AB', 20, temperature=0)
    with torch.no_grad():
        run.model.lm_head.weight.neg_()
    assert run.generate('AB', 20, temperature=0) != before
    with torch.no_grad():
        run.model.lm_head.weight.neg_()
    assert run.generate('AB', 20, temperature=0) == before


def test_text_ends_at_the_end_of_text_token(trained):
    run = load(trained.out_dir)
    text = run.generate('AB', temperature=0, max_new_tokens=20)
    run.tokenizer.eot = run.tokenizer.encode(text[6])[0]
    assert run.generate('AB', temperature=0, max_new_tokens=20, stop=True) == text[:text.index(text[6], 2)]


def test_weights_of_other_programs_have_the_model_and_the_tokenizer(trained, tmp_path):
    run = load(trained.out_dir)
    shutil.copy(trained.out_dir / 'metrics.jsonl', tmp_path)  # which says nothing of the weights
    (tmp_path / 'weights').mkdir()
    for target in (tmp_path / 'weights' / 'hf', tmp_path / 'weights' / 'ckpt.pt'):
        export_weights(str(trained.out_dir), str(target))
        exported = load(target)
        assert exported.loss('HELLO') == pytest.approx(run.loss('HELLO'), abs=1e-5)
        assert exported.path == str(target) and exported.metrics == []
        assert exported.config['n_layer'] == 2 and exported.config['vocab_size'] == 65


def test_damaged_checkpoint_is_left_out(trained, tmp_path, capsys):
    copy = shutil.copytree(trained.out_dir, tmp_path / 'copy')
    best, *others = dict.fromkeys([checkpoint.find_best(copy), *checkpoint.find(copy)])
    pathlib.Path(best, 'state.json').write_text(pathlib.Path(best, 'state.json').read_text() + ' ')
    assert load(copy).path in others
    assert f'{best} is damaged' in capsys.readouterr().err
    with pytest.raises(ValueError, match='every checkpoint of .*copy.*is damaged'):
        for path in others:
            pathlib.Path(path, 'state.json').unlink()
        load(copy)


@pytest.mark.parametrize('source, options, words', [
    ('nowhere', {}, "'nowhere' does not exist: name a run's folder"),
    (ROOT, {}, 'has no .*safetensors.* no checkpoint in ckpt/'),
    (None, dict(which='first'), "which is 'first': choose best or latest"),
    (None, dict(tokenizer='latin'), "unknown tokenizer 'latin'"),
    (None, dict(tokenizer='char'), "'char' needs its alphabet.*set tokenizer to a dataset"),
    (None, dict(tokenizer='bytes'), 'bytes has 256 tokens, but the model .* has 65: set --tokenizer'),
    (None, dict(device='gpu'), "device is 'gpu'"),
])
def test_bad_input_is_an_exception(trained, source, options, words):
    with pytest.raises((ValueError, OSError), match=words):
        kilogpt.load(str(source or trained.out_dir), **dict(device='cpu') | options)


@pytest.mark.parametrize('call, words', [
    (lambda run: run.loss('A'), "'A' has 1 token"),
    (lambda run: run.loss('a'), "character 'a' is not among the 65"),
    (lambda run: run.generate('a'), "character 'a' is not among the 65"),
    (lambda run: run.generate('A', temperature=-1), 'temperature is -1: it must be'),
    (lambda run: run.generate('A', num_samples=0), 'num_samples is 0: it must be at least 1'),
])
def test_bad_text_is_an_exception(trained, call, words):
    with pytest.raises(ValueError, match=words):
        call(load(trained.out_dir))


# --- models that do not name their tokenizer ----------------------------------------------------------------

@pytest.fixture(scope='module')
def nameless(train, dataset, tmp_path_factory):
    """A run on a dataset whose meta.json names no tokenizer."""
    copy = shutil.copytree(dataset, tmp_path_factory.mktemp('data') / 'nameless')
    (copy / 'meta.json').write_text(json.dumps(dict(vocab_size=65, dtype='uint16')))
    return train('--max_iters=1', f'--dataset={copy}').out_dir


def test_prompts_and_texts_are_ids_without_a_tokenizer(nameless):
    arguments = (f'--out_dir={nameless}', '--device=cpu', '--num_samples=1', '--max_new_tokens=5')
    done = run_forked('sample.py', *arguments, '--start=7 64')
    assert re.fullmatch(r'7 64( \d+){5}\n-+\n', done.stdout)
    assert 'does not name a tokenizer' in done.stderr and 'set tokenizer' in done.stderr
    refused = run_forked('sample.py', *arguments, '--start=7 65', check=False)
    assert refused.returncode == 1 and "'65' is not a token id below 65" in refused.stderr
    assert 'Traceback' not in refused.stderr
    run = load(nameless)
    assert run.loss('7 64 3') > 0 and run.generate('7', max_new_tokens=2).count(' ') == 2


def test_tokenizer_can_be_named_later(nameless, dataset, tmp_path):
    """By sample.py, by kilogpt.load, by export and by import."""
    done = run_forked('sample.py', f'--out_dir={nameless}', f'--tokenizer={dataset}', '--device=cpu',
                      '--dtype=float32', '--num_samples=1', '--max_new_tokens=5', '--start=AB')
    text = load(nameless, tokenizer=str(dataset)).generate('AB', max_new_tokens=5)
    assert done.stdout == f'{text}\n---------------\n' and 'does not name' not in done.stderr
    export_weights(str(nameless), str(tmp_path / 'ids'))
    assert not (tmp_path / 'ids' / 'tokenizer.json').exists()
    assert load(tmp_path / 'ids').tokenizer.name is None
    export_weights(str(nameless), str(tmp_path / 'named'), tokenizer=str(dataset))
    assert (tmp_path / 'named' / 'tokenizer.json').exists()
    assert load(tmp_path / 'named').generate('AB', max_new_tokens=5) == text


def test_ids_that_a_smaller_tokenizer_does_not_have_are_left_out():
    assert ByteTokenizer().decode([72, 105, 256, 300]) == 'Hi'


# --- the page -----------------------------------------------------------------------------------------------

def without_values(output):
    """An output without what differs between models and machines: numbers, and what follows a prompt."""
    output = re.sub(r'\d[\d.,]*\d|\d', '0', output)
    return re.sub('(ROMEO:).*', r'\1', output, flags=re.S)


class Checker(doctest.OutputChecker):
    def check_output(self, want, got, flags):
        return without_values(want) == without_values(got)


def test_examples_of_the_page_print_what_it_shows(trained, tmp_path, monkeypatch):
    """As printed, but of a smaller run."""
    (tmp_path / 'out-quickstart').symlink_to(trained.out_dir)
    monkeypatch.chdir(tmp_path)
    blocks = '\n'.join(re.findall(r'^```python\n(.*?)^```', PAGE.read_text('utf-8'), re.M | re.S))
    test = doctest.DocTestParser().get_doctest(blocks, {}, PAGE.name, str(PAGE), 0)
    assert len(test.examples) >= 10
    report = []
    result = doctest.DocTestRunner(Checker()).run(test, out=report.append)
    assert result.failed == 0, ''.join(report)
