"""Tokenizers that come with weights have the ids of the library, in datasets, runs and exports."""
import json
import shutil

import numpy as np
import pytest
from helpers import run_forked, run_script
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from data.tokens import until_end
from data.tokens.json_tokenizer import JsonTokenizer
from data.tokens.tokenizer import describe_tokenizer, get_tokenizer
import kilogpt
from kilogpt.weights.any_tokenizer import find_meta
from kilogpt.weights.exporting import export_weights
from kilogpt.weights.importing import import_weights

WORDS = "the quick brown fox's 12345 words.\nIt was a dark and stormy night\nÄÖ are not in it\n" * 20
TEXT = 'It was <|end|> a fox\'s "night" 🙂 \x00 foo\n'
BYTES = [f'<0x{byte:02X}>' for byte in range(256)]


def byte_level():
    """A tokenizer like those of GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=['<|end|>', '<|pad|>'], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([WORDS], trainer)
    return tokenizer


def sentence_piece():
    """A tokenizer like those of Llama 1 and 2: a space before each text, <s>, bytes of unknown characters."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token='<unk>', fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=['<unk>', '<s>', '</s>', *BYTES],
                                  show_progress=False)
    tokenizer.train_from_iterator(WORDS.split('\n'), trainer)
    content = json.loads(tokenizer.to_str())
    content['added_tokens'] = content['added_tokens'][:3]  # the bytes are ordinary tokens
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.decoder = decoders.Sequence([decoders.Replace('▁', ' '), decoders.ByteFallback(),
                                           decoders.Fuse(), decoders.Strip(' ', 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single='<s> $A', pair='<s> $A <s> $B', special_tokens=[('<s>', 1)])
    return tokenizer


@pytest.fixture(scope='module', params=[byte_level, sentence_piece])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp('weights')
    request.param().save(str(folder / 'tokenizer.json'))
    end = '<|end|>' if request.param is byte_level else '</s>'
    (folder / 'tokenizer_config.json').write_text(json.dumps(dict(
        eos_token=end, tokenizer_class='PreTrainedTokenizerFast')))
    (folder / 'chat_template.jinja').write_text('{{ messages }}')
    return folder


def test_ids_are_those_of_the_library(folder):
    tokenizer = get_tokenizer({'tokenizer': str(folder)})
    library = Tokenizer.from_file(str(folder / 'tokenizer.json'))
    assert tokenizer.encode_prompt(TEXT) == library.encode(TEXT).ids
    library.encode_special_tokens = True
    ids = tokenizer.encode(TEXT)
    assert ids == library.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.eot not in ids and tokenizer.decode(ids) == TEXT
    streamed = b''.join(tokenizer.decode_bytes([i]) for i in ids).decode()
    assert streamed.removeprefix(' ') == TEXT  # SentencePiece's space before the text
    assert tokenizer.encode_prompt(f'a{library.id_to_token(tokenizer.eot)}')[-1] == tokenizer.eot
    assert tokenizer.decode_bytes([tokenizer.vocab_size]) == b''  # a padded model can draw this
    assert tokenizer.encode('a\ud800') == tokenizer.encode('a?')
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_same_tokenizer_has_the_same_digest_wherever_it_is(folder, tmp_path):
    tokenizer = JsonTokenizer(folder)
    again = JsonTokenizer(shutil.copyfile(folder / 'tokenizer.json', tmp_path / 'other.json'))
    assert describe_tokenizer(again.meta()) == describe_tokenizer(tokenizer.meta()) == (
        f'tokenizer.json ({tokenizer.vocab_size} tokens, digest {tokenizer.digest[:8]})')
    content = json.loads((folder / 'tokenizer.json').read_text())
    content['added_tokens'].pop()
    (tmp_path / 'other.json').write_text(json.dumps(content))
    assert JsonTokenizer(tmp_path / 'other.json').digest != tokenizer.digest


@pytest.mark.parametrize('content, message', [
    (b'{}', 'is not a tokenizer.json'), (b'\xff', 'is not UTF-8'), (b'[1', 'is not a tokenizer.json')])
def test_file_that_is_no_tokenizer_is_named(tmp_path, content, message):
    (tmp_path / 'tokenizer.json').write_bytes(content)
    with pytest.raises(ValueError, match=f'^{tmp_path}/tokenizer.json {message}[^\n]*$'):
        get_tokenizer({'tokenizer': str(tmp_path)})


def test_tokenizer_that_is_gone_or_another_one_is_named(folder, tmp_path):
    path = tmp_path / 'copy'
    shutil.copytree(folder, path)
    meta = JsonTokenizer(path).meta()
    (path / 'tokenizer.json').write_text(json.dumps(json.loads(Tokenizer(models.BPE()).to_str()) | {
        'model': {'type': 'BPE', 'vocab': {'a': 0}, 'merges': []}}))
    with pytest.raises(ValueError, match=f'digest .*{meta["digest"][:8]}: set tokenizer to a folder'):
        get_tokenizer(meta)
    shutil.rmtree(path)
    with pytest.raises(ValueError, match=f'the tokenizer is not in {path}.*set tokenizer to a folder'):
        get_tokenizer(meta)


def test_prepare_train_sample_export_and_import_keep_the_tokenizer(train, folder, tmp_path):
    """Dataset and run have copies, and stay complete when they and the folder of the weights are moved."""
    tokenizer, source, data = JsonTokenizer(folder), tmp_path / 'weights', tmp_path / 'data'
    shutil.copytree(folder, source)
    (tmp_path / 'a.txt').write_text(WORDS)
    run_script('data/text/prepare.py', f'--input={tmp_path}/a.txt', f'--tokenizer={source}',
               f'--out={data}', '--num_proc=1', '--val_fraction=0.2')
    shutil.rmtree(source)
    text = WORDS[:int(len(WORDS) * 0.8)]
    assert np.fromfile(data / 'train.bin', '<u2').tolist() == tokenizer.encode(text)
    meta = json.loads((data / 'meta.json').read_text())
    assert 'folder' not in meta and meta['digest'] == tokenizer.digest
    assert find_meta(str(data)) == meta | dict(folder=str(data))

    run = train('--pos=rope', '--norm=rmsnorm', '--mlp=swiglu', '--max_iters=3', f'--dataset={data}')
    shutil.move(data, tmp_path / 'moved-data')
    out_dir, exported, imported = tmp_path / 'moved-out', tmp_path / 'exported', str(tmp_path / 'imported')
    shutil.move(run.out_dir, out_dir)
    asked, device = dict(prompt='It was', max_new_tokens=4, temperature=0), 'cpu'
    text = kilogpt.load(str(out_dir), device=device).generate(**asked)
    assert text.startswith('It was')

    export_weights(str(out_dir), str(exported))
    for name in 'tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja':
        assert (exported / name).read_text() == (folder / name).read_text()
    assert kilogpt.load(str(exported), device=device).generate(**asked) == text
    import_weights(str(exported), imported)
    shutil.rmtree(exported)
    assert kilogpt.load(imported, device=device).generate(**asked) == text

    resumed = train('--max_iters=4', '--init_from=resume', f'--dataset={tmp_path}/moved-data',
                    out_dir=out_dir)
    assert list(resumed.lines) == [1, 2, 3, 4]
    assert kilogpt.load(str(out_dir), device=device).tokenizer.digest == tokenizer.digest


@pytest.mark.slow
def test_prepare_takes_the_tokenizer_of_a_run_a_gguf_file_and_a_dataset(train, tmp_path):
    """Also data/corpus, whose processes open it again."""
    byte_level().save(str(tmp_path / 'tokenizer.json'))
    (tmp_path / 'a.txt').write_text(WORDS)

    def prepare(tokenizer, out, kind='text'):
        run_forked(f'data/{kind}/prepare.py', f'--input={tmp_path}/a.txt', f'--tokenizer={tokenizer}',
                   f'--out={tmp_path}/{out}', '--num_proc=1', '--val_fraction=0')
        tokens = next((tmp_path / out).glob('train*.bin')).read_bytes()
        return tokens, json.loads((tmp_path / out / 'meta.json').read_text())

    data, meta = prepare(tmp_path / 'tokenizer.json', 'data')
    run = train('--pos=rope', '--norm=rmsnorm', '--mlp=swiglu', '--max_iters=1', '--eval_iters=0',
                f'--dataset={tmp_path}/data')
    export_weights(str(run.out_dir), str(tmp_path / 'run.gguf'))
    assert prepare(run.out_dir, 'of_run') == (data, meta)
    assert prepare(tmp_path / 'data', 'of_dataset') == (data, meta)
    of_gguf, meta_of_gguf = prepare(tmp_path / 'run.gguf', 'of_gguf')
    assert of_gguf == data and meta_of_gguf['vocab_size'] == meta['vocab_size']
    assert prepare(tmp_path / 'run.gguf', 'corpus', 'corpus')[0].startswith(data)
    (tmp_path / 'a.txt').write_text('IT WAS A DARK NIGHT\n')
    _, meta = prepare(train('--max_iters=1').out_dir, 'of_characters')
    assert (meta['tokenizer'], meta['vocab_size']) == ('char', 65)
    (tmp_path / 'empty').mkdir()
    failure = run_forked('data/text/prepare.py', f'--input={tmp_path}/a.txt', f'--tokenizer={tmp_path}/empty',
                         check=False)
    assert f'error: {tmp_path}/empty has no tokenizer: it is neither a run that names one, nor a data' in failure.stderr


def test_every_token_that_ends_a_text_ends_it(tmp_path):
    """generation_config.json may name several, at which transformers stops too."""
    byte_level().save(str(tmp_path / 'tokenizer.json'))
    (tmp_path / 'generation_config.json').write_text(json.dumps(dict(eos_token_id=[7, 9])))
    tokenizer = JsonTokenizer(tmp_path)
    assert tokenizer.end_ids == {7, 9} | ({tokenizer.eot} - {None})
    assert until_end([1, 2, 9, 3, 7], tokenizer) == [1, 2] and until_end([1, 2], tokenizer) == [1, 2]


def test_tokens_before_each_text_are_those_of_the_post_processor(folder):
    tokenizer = JsonTokenizer(folder)
    assert tokenizer.encode_prompt('a fox') == tokenizer.begin_ids + tokenizer.encode('a fox')
    assert len(tokenizer.begin_ids) == ('<s>' in tokenizer.files['tokenizer.json'])


@pytest.mark.parametrize('decoder', [decoders.WordPiece(), None])
def test_text_of_tokens_that_are_not_side_by_side(tmp_path, decoder):
    """The library decides: WordPiece puts spaces between words, and so does no decoder between all tokens."""
    tokenizer = Tokenizer(models.WordPiece(unk_token='[UNK]'))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder:
        tokenizer.decoder = decoder
    tokenizer.train_from_iterator([WORDS], trainers.WordPieceTrainer(
        vocab_size=120, special_tokens=['[UNK]', '<|end|>'], show_progress=False))
    tokenizer.save(str(tmp_path / 'tokenizer.json'))
    ours = JsonTokenizer(tmp_path)
    ids = ours.encode('It was a dark night') + [1] + ours.encode("fox's words.")
    expected = tokenizer.decode(ids, skip_special_tokens=False)
    stream = ours.text_stream()
    assert ''.join(map(stream, ids)) + stream() == ours.decode_bytes(ids).decode() == expected
    assert ' ' in expected and ours.bytes_of_tokens() is None
