"""Special tokens that the files beside tokenizer.json name are those of transformers' AutoTokenizer."""
import json
import random
import shutil

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from data.tokens.json_tokenizer import JsonTokenizer
from data.tokens.special_tokens import ADDED, CONFIG, MAP
from drawing import check_draws

AutoTokenizer = pytest.importorskip('transformers').AutoTokenizer
NAMES = '<|a|>', '<b>', '[C]', 'dd', '<|e|>'
TEXTS = 'x <|a|>  <b> [C]dd add <|e|> z', '<|a|><b>[C]dd<|e|>', 'x dd'
FLAGS = 'lstrip', 'rstrip', 'single_word', 'normalized', 'special'
ROLES = 'bos_token', 'eos_token', 'unk_token', 'cls_token'
BASE = dict(tokenizer_class='PreTrainedTokenizerFast')


def draw(generator):
    """The content of each file; of tokenizer.json only its added tokens. Two files do not contradict each other."""
    def some(values, share):
        return [value for value in values if generator.random() < share]

    def flags():
        return {flag: generator.random() < 0.3 for flag in FLAGS}

    def roles():
        return {role: generator.choice(NAMES) for role in some(ROLES, 0.25)}

    form = dict(own={name: flags() for name in some(NAMES, 0.4)}, config=roles())
    own_roles = [*some(['x_token'], 0.2), *some(['y_token'], 0.2)]
    form['config'] |= {role: dict(content=generator.choice(NAMES), __type='AddedToken', **flags()) for role in own_roles}
    more = generator.choice(['', 'extra_special_tokens', 'additional_special_tokens', 'named'])
    if more == 'named':
        form['config']['extra_special_tokens'] = dict(z_token=generator.choice(NAMES))
    elif more:
        form['config'][more] = some(NAMES, 0.3)
    if generator.random() < 0.4:
        names = some(NAMES, 0.6)
        form['config']['added_tokens_decoder'] = {str(256 + i): dict(content=name) | flags()
                                                  for i, name in enumerate(names)}
    if generator.random() < 0.2:
        form['config']['split_special_tokens'] = True
    if generator.random() < 0.4:
        form['map'] = roles()
    if generator.random() < 0.4:
        form['added'] = {name: 270 + i for i, name in enumerate(some(NAMES, 0.3))}
    return form


def byte_tokens():
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
                                     merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write(form, folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    tokenizer = byte_tokens()
    tokenizer.add_tokens([AddedToken(name, **flags) for name, flags in form.get('own', {}).items()])
    tokenizer.save(str(folder / 'tokenizer.json'))
    for part, name in dict(config=CONFIG, map=MAP, added=ADDED).items():
        if part in form or part == 'config':
            content = form.get(part, {}) | (BASE if part == 'config' else {})
            (folder / name).write_text(json.dumps(content))
    return folder


@pytest.fixture
def difference(tmp_path):
    def compare(form):
        folder = str(write(form, tmp_path / 'tokenizer'))
        theirs, ours = AutoTokenizer.from_pretrained(folder), JsonTokenizer(folder)
        for text in TEXTS:
            expected, found = theirs(text).input_ids, ours.encode_prompt(text)
            if found != expected:
                return f'{text!r} has the ids {found}, in transformers {expected}'
        if theirs.eos_token_id not in (None, ours.eot):
            return f'the end-of-text token is {ours.eot}, in transformers {theirs.eos_token_id}'
        if theirs.bos_token_id not in (None, ours.bos):
            return f'the beginning token is {ours.bos}, in transformers {theirs.bos_token_id}'
        return ''
    return compare


def test_drawn_files_name_the_tokens_of_transformers(difference):
    check_draws(draw, difference, seed=1, seconds=0, at_least=100)


@pytest.mark.slow
def test_files_of_a_new_seed_name_the_tokens_of_transformers(difference):
    check_draws(draw, difference, seed=random.randrange(10 ** 6), seconds=15)


def test_padding_that_only_other_files_add_stays_text(difference, tmp_path):
    """Models that were trained without it have no row for it."""
    folder = write(dict(own={'<|a|>': {}}, config=dict(eos_token='<|a|>', pad_token='<pad>')), tmp_path / 'padded')
    assert JsonTokenizer(str(folder)).vocab_size == 257
    assert difference(dict(own={'<|a|>': {}}, config=dict(eos_token='<|a|>', pad_token='<|a|>'))) == ''


def test_digest_changes_only_with_what_the_files_add(tmp_path):
    plain, same, more = (JsonTokenizer(str(write(form, tmp_path / name))) for name, form in dict(
        plain=dict(own={'<|a|>': dict(special=True)}),
        same=dict(own={'<|a|>': dict(special=True)}, config=dict(eos_token='<|a|>')),
        more=dict(own={'<|a|>': dict(special=True)}, config=dict(eos_token='<b>'))).items())
    assert plain.digest == same.digest != more.digest
    assert (more.eot, more.vocab_size) == (257, 258)


def test_two_tokens_with_one_id_are_refused(tmp_path):
    """tokenizers gives a new token the number of tokens as its id, which is taken if an id is left out."""
    vocabulary = {chr(97 + i): i for i in range(5)} | dict(z=6)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(['<|a|>'])
    tokenizer.save(str(tmp_path / 'tokenizer.json'))
    with pytest.raises(ValueError, match=r"gives the id 6 to '<\|a\|>' and to 'z': give each token an id of its own"):
        JsonTokenizer(str(tmp_path))


@pytest.mark.parametrize('single, named, warning', [
    ('<|a|> $A', {}, ''), ('<|a|> $A', dict(bos_token='<|a|>'), ''),
    ('<|a|> <b> $A', {}, 'puts <|a|> <b> before each text'), ('$A <b>', dict(eos_token='<|a|>'), 'puts <b> after each'),
])
def test_gguf_has_the_beginning_that_only_the_post_processor_adds(tmp_path, capsys, single, named, warning):
    from kilogpt.weights.gguf.tokenizer import tokenizer_from_gguf, tokenizer_to_gguf
    folder = write(dict(own={name: dict(special=True) for name in NAMES[:2]}, config=named), tmp_path / 'brought')
    ours = JsonTokenizer(str(folder))
    ours.backend.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(name, ours.backend.token_to_id(name)) for name in NAMES[:2]])
    ours.backend.save(str(folder / 'tokenizer.json'))
    files = tokenizer_from_gguf(tokenizer_to_gguf(str(folder), 260))
    printed = capsys.readouterr().out
    if warning:
        assert warning in printed
    else:
        back = tmp_path / 'back'
        back.mkdir()
        for name, text in files.items():
            (back / name).write_text(text)
        expected = AutoTokenizer.from_pretrained(str(folder))('Hi').input_ids
        assert JsonTokenizer(str(back)).encode_prompt('Hi') == expected and len(expected) == 3
        assert printed == ''


def test_gguf_says_what_it_cannot_keep_of_special_tokens(tmp_path, capsys):
    from kilogpt.weights.gguf.tokenizer import tokenizer_to_gguf
    folder = write(dict(own={'<b>': dict(special=True, lstrip=True)}), tmp_path / 'strips')
    tokenizer_to_gguf(str(folder), 260)
    assert 'warning: <b> swallow the white space beside them' in capsys.readouterr().out
