"""Turns of a conversation: what is read, what is generated, and what a person sees on the terminal."""
import json
import select
import signal
import string
import threading

import pytest
import torch
from helpers import continue_texts, run_forked, start_script

from data.tokens.chat_template import ChatTemplate
from data.tokens.tokenizer import CharTokenizer
from kilogpt.chat import terminal
from kilogpt.chat.conversation import Conversation
from kilogpt.generate import engine as module
from kilogpt.generate.engine import Engine, ModelReader
from model import GPT, GPTConfig

LENGTH = 96
MODELS = {
    'learned positions': dict(),
    'rope': dict(pos='rope', n_kv_head=2),
    'windows': dict(pos='rope', window=8, window_pattern='SL'),
    'only windows': dict(pos='rope', window=24),
    'convolution': dict(pos='rope', attention_conv=3),
    'convolution before the MLP': dict(mlp_conv=4),
}
GREEDY = 0, None, None, 0  # temperature, top_k, top_p, seed


def build(options, separator=None):
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=LENGTH, vocab_size=100, n_layer=2, n_head=4, n_embd=32, tie_weights=False,
                          **options), seed=3).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or 'convolution' in name:
            torch.nn.init.normal_(parameter, std=0.5)  # so that the likeliest token depends on the text
    conversation = Conversation(Engine(ModelReader(model, 1), separator), ChatTemplate(CharTokenizer(string.printable)))
    conversation.template.stop_ids = ()
    return conversation


def count_read(conversation, counts):
    """Append to counts the number of tokens of each forward pass."""
    conversation.engine.reader.model.transformer.wte.register_forward_hook(lambda _, inputs, __: counts.append(inputs[0].numel()))


@pytest.mark.parametrize('separator', [None, 5])
@pytest.mark.parametrize('name', MODELS)
def test_cached_turns_give_the_tokens_that_uncached_ones_give(name, separator, monkeypatch):
    """With turns that continue the last, that change its end, and that begin another text; the cache grows."""
    monkeypatch.setattr(module, 'SHORTEST_CACHE', 16)
    cached = build(MODELS[name], separator)
    text, drawn = [], []
    for turn in ([1, 2, 5, 3], [7, 8], [9, 5, 9, 9, 9], 'change', [4], 'reset', [1, 2, 9], [6] * 20):
        if turn == 'change':
            text = text[:-3] + [11, 12]
        elif turn == 'reset':
            text = [1, 2]
        else:
            text = text + turn
        tokens = list(cached.generate(text, 6, *GREEDY))
        assert tokens == list(build(MODELS[name], separator).generate(text, 6, *GREEDY))
        idx = torch.tensor([text])
        expected = continue_texts(cached.engine.reader.model, idx, 6, temperature=0, separator=separator)
        assert text + tokens == expected[0].tolist()
        text = text + tokens
        drawn += tokens
    assert len(set(drawn)) > 8 and cached.engine.reader.size == 64


@pytest.mark.quick
def test_only_new_tokens_are_read():
    talk, counts = build(MODELS['rope']), []
    count_read(talk, counts)
    text = [1, 2, 3] + list(talk.generate([1, 2, 3], 4, *GREEDY))
    assert counts == [3, 1, 1, 1]
    list(talk.generate([*text, 8, 9], 2, *GREEDY))
    assert counts[4:] == [3, 1]  # the last token that was drawn, and the two new ones
    list(talk.generate([1, 2], 1, *GREEDY))
    assert counts[6:] == [1]


def test_answer_ends_before_a_stop_token_and_at_the_end_of_the_context():
    talk = build(MODELS['rope'])
    tokens = list(talk.generate([1], 10, *GREEDY))
    assert talk.reason == 'length' and len(tokens) == 10
    stop = tokens[4]
    talk.template.stop_ids = {stop}
    assert list(talk.generate([1], 10, *GREEDY)) == tokens[:tokens.index(stop)]
    assert talk.reason == 'stop'
    talk.template.stop_ids = ()
    assert len(list(talk.generate([1] * (LENGTH - 3), 10, *GREEDY))) == 3 and talk.reason == 'length'


@pytest.mark.parametrize('name', ['rope', 'windows', 'convolution', 'convolution before the MLP'])
def test_reading_that_was_interrupted_leaves_a_usable_cache(name, monkeypatch):
    talk = build(MODELS[name])
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] * 3
    text += list(talk.generate(text, 3, *GREEDY))[:2]  # all that it has read
    expected = list(build(MODELS[name]).generate([*text, 7], 6, *GREEDY))
    block = talk.engine.reader.model.transformer.h['1']

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = block.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(talk.generate([*text, *range(20, 40)], 6, *GREEDY))
    hook.remove()
    assert list(talk.generate([*text, 7], 6, *GREEDY)) == expected


def test_oldest_turns_are_left_out_but_the_system_message_stays():
    talk = build(MODELS['rope'])
    system = dict(role='system', content='Be kind')
    messages = [system]
    for i in range(4):
        messages += [dict(role='user', content=f'question {i}'), dict(role='assistant', content=f'answer {i}')]
    ids, seen = talk.fit([*messages, dict(role='user', content='last')], 20)
    assert seen == [system, *messages[7:], dict(role='user', content='last')]
    assert len(ids) + 20 <= LENGTH
    with pytest.raises(ValueError, match=r'the message takes 10\d tokens, but the model sees 96 and needs 20'):
        talk.fit([dict(role='user', content='x' * 85)], 20)


# --- sample.py --chat ---------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def trained(train, tmp_path_factory):
    """The folder of a short run with an alphabet in which conversations can be written."""
    data = tmp_path_factory.mktemp('data')
    text = [ord(character) - 32 for character in 'User: HI\nAssistant: HO\n'.replace('\n', '~')] * 400
    for split in ('train', 'val'):
        torch.tensor(text, dtype=torch.int16).numpy().astype('<u2').tofile(data / f'{split}.bin')
    chars = [*map(chr, range(32, 126)), '\n']
    (data / 'meta.json').write_text(json.dumps(dict(vocab_size=95, dtype='uint16', tokenizer='char', chars=chars)))
    return train('--max_iters=60', '--lr_decay_iters=60', '--eval_interval=60', '--block_size=64',
                 f'--dataset={data}').out_dir


def chat(out_dir, stdin, *arguments, **options):
    return run_forked('sample.py', f'--out_dir={out_dir}', '--device=cpu', '--chat', '--max_new_tokens=8', *arguments,
                      stdin=stdin, **options)


@pytest.mark.quick
@pytest.mark.parametrize('arguments, numbers', [
    ([], 'float32'), (['--quantize=int8'], 'int8'), (['--dtype=bfloat16'], 'bfloat16')])
def test_conversation_is_answered_saved_and_begun_again(trained, tmp_path, arguments, numbers):
    path = tmp_path / 'saved.jsonl'
    done = chat(trained, f'HI\n\n/save {path}\n/reset\n/save {path}\n/save /nonexistent/a\n/what\nHI\n/save {path}\n/quit\nHI\n',
                '--system=S', '--temperature=0', *arguments)
    assert done.stdout.startswith('> ') and done.stdout.count('> ') == 10
    one, two, three = [json.loads(line)['messages'] for line in path.read_text().splitlines()]
    assert [message['role'] for message in one] == ['system', 'user', 'assistant']
    assert one[-1]['content'] and '\n' not in one[-1]['content'] and f'> {one[-1]["content"]}' in done.stdout
    assert two == one[:1] and three == one
    assert f' parameters, {numbers}\n' in done.stderr
    assert '/what is not a command' in done.stderr and '/nonexistent/a' in done.stderr


def test_long_conversation_forgets_its_beginning_and_says_so_once(trained, tmp_path):
    done = chat(trained, 'HI\n' * 6 + f'{"x" * 60}\n', '--temperature=0')
    assert done.stderr.count('no longer sees the oldest turns') == 1
    assert 'error: the message takes' in done.stderr and done.stdout.count('> ') == 8


@pytest.mark.quick
def test_answer_is_printed_as_it_grows(capsys):
    talk, printed = build(MODELS['rope']), []
    generate = talk.generate

    def watched(*arguments):
        for token in generate(*arguments):
            yield token
            printed.append(capsys.readouterr().out)

    talk.generate = watched
    answer = terminal.show(talk, [1, 2, 3], 6, *GREEDY)
    assert len(printed) == 6 and all(len(piece) == 1 for piece in printed[1:])
    assert ''.join(printed) == answer


def test_character_outside_the_alphabet_does_not_end_the_conversation(trained):
    done = chat(trained, 'é\nHI\n', '--temperature=0')
    assert "the character 'é' is not among" in done.stderr and 'Traceback' not in done.stderr
    assert len(done.stdout.splitlines()) == 2


def test_ctrl_c_ends_only_the_answer(trained):
    """At the prompt it ends nothing."""
    command = f'--out_dir={trained}', '--device=cpu', '--chat', '--temperature=0'
    # A shell that starts the tests in the background lets them ignore this signal, which children inherit.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with start_script('sample.py', *command) as process:
        signal.signal(signal.SIGINT, before)
        give_up = threading.Timer(120, process.kill)
        give_up.start()
        assert process.stdout.read(2) == '> '
        process.send_signal(signal.SIGINT)
        # A signal between the prompt and the reading of a line is noticed only with the next signal.
        while not select.select([process.stdout], [], [], 1)[0]:
            process.send_signal(signal.SIGINT)
        assert process.stdout.read(2) == '> '
        out, err = process.communicate('HI\n', timeout=60)
        give_up.cancel()
    assert process.returncode == 0 and '/quit ends the conversation' in err and 'Traceback' not in err
    assert out.count('> ') == 1 and len(out) > 4


@pytest.mark.quick
@pytest.mark.parametrize('arguments, words', [
    (['--num_samples=2'], 'num_samples is 2, but a conversation has one answer at a time'),
    (['--serve'], 'error: interactive=False, chat=True and serve=True are three ways to give prompts: set one of them'),
])
def test_bad_input_is_refused_in_one_sentence(trained, arguments, words):
    done = chat(trained, '', *arguments, check=False)
    assert done.returncode == 1 and words in done.stderr and 'Traceback' not in done.stderr


def test_message_that_nobody_reads_is_refused(tmp_path):
    done = run_forked('sample.py', f'--out_dir={tmp_path}', '--device=cpu', '--system=Be kind', check=False)
    assert done.returncode == 1 and "system is 'Be kind', but only --chat reads it" in done.stderr
