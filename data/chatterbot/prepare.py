"""Prepare 2,025 short conversations in English, from the package chatterbot-corpus on PyPI:

    python data/chatterbot/prepare.py --tokenizer=SmolLM2-135M-Instruct
"""
import json
import os
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
from kilogpt.configurator import configure, exit_on_error
from data.fetch import CHATTERBOT_WHEEL, download_from_pypi
from data.messages import ConversationEncoder, conversation_splits
from data.prepare import write_dataset
from data.tokenizer import get_tokenizer

tokenizer = 'gpt2'  # that of the model to finetune: its folder or tokenizer.json, whose chat template is used
out = 'chatterbot'  # output folder: a name in data/, or a path
val_fraction = 0.1  # share of val, drawn by the texts
configure(globals())


def to_messages(turns):
    """The messages of a list of texts, of which the user says the first."""
    turns = turns[:len(turns) // 2 * 2]  # an answer ends the conversation
    return [dict(role=('user', 'assistant')[i % 2], content=str(text).strip()) for i, text in enumerate(turns)]


if __name__ == '__main__':
    with exit_on_error():
        import yaml  # comes with the library gguf
        encoder = ConversationEncoder(get_tokenizer({'tokenizer': tokenizer}), 'assistant')
        files = download_from_pypi(*CHATTERBOT_WHEEL, 'chatterbot_corpus/data/english/*.yml')
        conversations = [turns for name in sorted(files) for turns in yaml.safe_load(files[name])['conversations']
                         if all(str(text).strip() for text in turns)]  # a few have empty texts
        print(f'{len(conversations):,} conversations from PyPI ({CHATTERBOT_WHEEL[0]})')
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, 'chatterbot.jsonl')
            with open(path, 'w', encoding='utf-8') as file:
                file.writelines(json.dumps(dict(messages=to_messages(turns))) + '\n' for turns in conversations)
            write_dataset(out, encoder, conversation_splits([path], val_fraction),
                          source=[*CHATTERBOT_WHEEL, val_fraction])
