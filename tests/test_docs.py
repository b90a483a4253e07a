"""What README.md and docs/ say of files, links and keys is so."""
import json
import pathlib
import re

import pytest
import write_files
import write_keys
from helpers import ROOT, run_forked

from data.datasets import read_meta

PAGES = [pathlib.Path(ROOT, 'README.md'), *sorted(pathlib.Path(ROOT, 'docs').glob('*.md'))]
FENCE = re.compile(r'^```.*?^```$', re.M | re.S)
# a key of docs/keys.md and its default
KEY_ROW = re.compile(r'^\| `(\w+)` \| `(.+?)` \|', re.M)


def anchors(text):
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r'^#+ (.*)$', FENCE.sub('', text), re.M)
    return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    text = page.read_text('utf-8')
    links = [link for link in re.findall(r'\]\((\S+?)\)', FENCE.sub('', text)) if not link.startswith('http')]
    for link in links:
        path, _, anchor = link.partition('#')
        target = page.parent / path if path else page
        assert target.exists(), f'{page.name} links to {link}'
        assert not anchor or anchor in anchors(target.read_text('utf-8')), f'{page.name} links to {link}'


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_headings_stand_apart(page):
    assert not re.findall(r'[^\n]\n#+ .*', FENCE.sub('', page.read_text('utf-8')))


def test_readme_links_to_every_page():
    readme = PAGES[0].read_text('utf-8')
    assert [page.name for page in PAGES[1:] if f'](docs/{page.name})' not in readme] == []


def test_readme_is_read_in_three_minutes():
    text = PAGES[0].read_text('utf-8')
    words = re.sub(r'\]\([^)]*\)|[|]|---', ' ', text).split()
    assert len(words) <= 1100 and text.count('\n') <= 170


def test_readme_counts_the_lines_of_the_core():
    readme = PAGES[0].read_text('utf-8')
    block = readme.split('## The files, in reading order')[1].split('```text\n')[1].split('```')[0]
    lines = 0
    for name in re.findall(r'^\S+', block, flags=re.M):
        path = pathlib.Path(ROOT, name)
        for file in path.glob('*.py') if path.is_dir() else [path]:
            lines += file.read_text('utf-8').count('\n')
    assert f'the core, about {round(lines, -2):,} lines' in readme


def test_readme_says_how_large_the_repository_is():
    def lines_of(*patterns):
        paths = {path for pattern in patterns for path in pathlib.Path(ROOT).glob(pattern)}
        return round(sum(path.read_text('utf-8').count('\n') for path in paths), -3)
    product, tests = lines_of('*.py', 'kilogpt/**/*.py', 'data/**/*.py'), lines_of('tests/**/*.py')
    text = ' '.join(PAGES[0].read_text('utf-8').split())
    assert f'all of kiloGPT is {product:,} lines, and {tests:,} of tests' in text


def test_files_that_pages_name_exist():
    """Programs and configs in the text, commands and lists of files; their folder may be left out."""
    missing, written = set(), {'compare.md'}  # by a command
    for page in PAGES:
        if page.name == 'files.md':  # written from the files
            continue
        names = set(re.findall(r'(?<![\w./*])[\w/-]+\.(?:py|sh|md)\b', page.read_text('utf-8')))
        for name in names - written:
            folders = '', 'config', 'data', 'data/text', 'docs', 'launch'
            if not any(pathlib.Path(ROOT, folder, name).exists() for folder in folders):
                missing.add(f'{page.name}: {name}')
    assert missing == set()


def test_pages_that_configs_name_exist():
    """A comment that sends its reader to docs/ leads somewhere; no config refers to README."""
    text = ''.join(path.read_text('utf-8') for path in pathlib.Path(ROOT, 'config').glob('*.py'))
    named = set(re.findall(r'docs/\w+\.md', text))
    assert named and [name for name in named if not pathlib.Path(ROOT, name).exists()] == []
    assert 'README' not in text


def test_files_page_is_what_the_files_say():
    page = write_files.page()
    assert write_files.PAGE.read_text('utf-8') == page, 'run python dev/write_files.py'
    assert not re.findall(r'^\| `\S+` \|  \|$', page, flags=re.M), 'a file says nothing in its first line'


def test_keys_page_is_what_help_says():
    page = write_keys.page(lambda script: run_forked(script, '--help').stdout)
    assert write_keys.PAGE.read_text('utf-8') == page, 'run python dev/write_keys.py'


def train_keys():
    """{key: default, as Python writes it} of train.py's part of docs/keys.md."""
    return dict(KEY_ROW.findall(write_keys.PAGE.read_text('utf-8').split('## sample.py')[0]))


def test_keys_of_a_run_are_those_of_the_page(train):
    config = json.loads((train('--max_iters=1').out_dir / 'config.json').read_text())
    assert list(config) == list(train_keys()) and len(config) > 60


def test_nanogpts_keys_keep_their_names_and_defaults():
    """nanoGPT's configs and command lines run unmodified; device, dtype and backend follow the machine."""
    theirs = dict(
        out_dir='out', eval_interval=2000, log_interval=1, eval_iters=200, eval_only=False,
        always_save_checkpoint=True, init_from='scratch', wandb_log=False, wandb_project='owt',
        wandb_run_name='gpt2', dataset='openwebtext', gradient_accumulation_steps=40, batch_size=12,
        block_size=1024, n_layer=12, n_head=12, n_embd=768, dropout=0.0, bias=False, learning_rate=6e-4,
        max_iters=600000, weight_decay=1e-1, beta1=0.9, beta2=0.95, grad_clip=1.0, decay_lr=True,
        warmup_iters=2000, lr_decay_iters=600000, min_lr=6e-5, backend='auto', device='auto', dtype='auto',
        compile=True)
    ours = train_keys()
    assert {key: ours.get(key) for key in theirs} == {key: repr(value) for key, value in theirs.items()}


def test_keys_that_pages_mention_exist():
    """Every `key=value` in running text is a key of train.py or sample.py, or another command's option."""
    keys = {key for key, _ in KEY_ROW.findall(write_keys.PAGE.read_text('utf-8'))}
    options = {'document_length', 'key', 'tokenizer', 'family', 'input', 'out', 'val_fraction', 'nproc_per_node',
               'random', 'random_tokens', 'distribution', 'switches', 'reshard_after_forward', 'saves',
               'signal', 'special_tokens', 'gpu', 'handle', 'host', 'logdir', 'num_workers', 'ranks', 'x', 'tasks', 'shots',
               'details', 'y', 'loss', 'params', 'tokens', 'bootstrap', 'limit', 'lm_eval', 'roles', 'reference', 'seeds',
               'size', 'jobs', 'base', 'relu2', 'table', 'scaling', 'max_restarts', 'mtbf', 'units_first'}
    for page in PAGES:
        if page.name == 'elsewhere.md':  # test_elsewhere.py tells our keys from those of others
            continue
        text = re.sub(r'<!-- pairs.*?<!-- end -->', '', page.read_text('utf-8'), flags=re.S)  # of keys of draws
        spans = ' '.join(re.findall(r'`([^`]+)`', FENCE.sub('', text)))
        mentioned = set(re.findall(r'(?<![\w.])([a-z]\w*)=(?!=)', spans))
        assert mentioned - keys - options == set(), page.name


def test_lines_of_metrics_have_the_keys_that_the_page_names(train):
    text = pathlib.Path(ROOT, 'docs', 'measuring.md').read_text('utf-8')
    expected = {kind: set(re.findall(r'`(\w+)`', row.replace('`log_interval`', '').replace('on GPUs `mfu`', '')))
                for kind, row in re.findall(r'^\| (training|evaluation|save)(.*)$', text, re.M)}
    out_dir = train('--max_iters=1', nproc=2).out_dir
    lines = [set(json.loads(line)) for line in (out_dir / 'metrics.jsonl').read_text().splitlines()]
    kinds = dict(training='loss', evaluation='val_loss', save='ckpt_stall_ms')
    for kind, key in kinds.items():
        assert expected[kind] in lines and all(line == expected[kind] for line in lines if key in line), kind


def test_meta_that_the_page_shows_is_read(tmp_path):
    text = pathlib.Path(ROOT, 'docs', 'data.md').read_text('utf-8')
    block, = re.findall(r'^```json\n(.*?)^```$', text, re.M | re.S)
    (tmp_path / 'meta.json').write_text(block)
    assert read_meta(tmp_path) == dict(
        vocab_size=50257, dtype='uint16', tokenizer='gpt2', separator=50256)
