"""Prepare 2,025 short conversations in English, from the package chatterbot-corpus on PyPI:

    python data/chatterbot/prepare.py --tokenizer=HuggingFaceTB/SmolLM2-135M-Instruct
    python data/chatterbot/prepare.py --tokenizer=HuggingFaceTB/SmolLM2-135M-Instruct --pairs --out=chatterbot_pairs

The second command makes pairs for DPO: the rejected answer is the one to another question.
"""
import json
import os
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
from data.fetch import CHATTERBOT_WHEEL, download_from_pypi
from data.make.messages import ConversationEncoder, conversation_splits
from data.make.pairs import PairEncoder, read_pairs
from data.make.prepare import write_dataset
from kilogpt.configurator import configure, exit_on_error
from kilogpt.weights.any_tokenizer import find_tokenizer

tokenizer = 'gpt2'  # that of the model to finetune: its folder, run or org/name, whose chat template is used
out = 'chatterbot'  # output folder: a name in data/, or a path
overwrite = False  # replace the dataset in that folder even if it has other texts or another tokenizer
pairs = False  # pairs of the last answer of each conversation and one of another conversation
val_fraction = 0.1  # share of val, drawn by the texts
configure(globals())


def to_messages(turns):
    """The messages of a list of texts, of which the user says the first."""
    turns = turns[:len(turns) // 2 * 2]  # an answer ends the conversation
    return [dict(role=('user', 'assistant')[i % 2], content=str(text).strip()) for i, text in enumerate(turns)]


def to_rows(conversations):
    """The rows of the file: conversations, or pairs."""
    if not pairs:
        return [dict(messages=messages) for messages in conversations]
    answers = [messages[-1] for messages in conversations]
    others = answers[len(answers) // 2:] + answers[:len(answers) // 2]  # which are about something else
    return [dict(prompt=messages[:-1], chosen=[messages[-1]], rejected=[other])
            for messages, other in zip(conversations, others) if messages[-1] != other]


if __name__ == '__main__':
    with exit_on_error():
        import yaml  # comes with the library gguf
        kind = PairEncoder if pairs else ConversationEncoder
        encoder = kind(find_tokenizer(tokenizer), 'assistant')
        files = download_from_pypi(*CHATTERBOT_WHEEL, 'chatterbot_corpus/data/english/*.yml')
        conversations = [to_messages(turns) for name in sorted(files)
                         for turns in yaml.safe_load(files[name])['conversations']
                         if all(str(text).strip() for text in turns)]  # a few have empty texts
        print(f'{len(conversations):,} conversations from PyPI ({CHATTERBOT_WHEEL[0]})')
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, 'chatterbot.jsonl')
            with open(path, 'w', encoding='utf-8') as file:
                file.writelines(json.dumps(row) + '\n' for row in to_rows(conversations))
            write_dataset(out, encoder, conversation_splits([path], val_fraction, read_pairs if pairs else None),
                          source=[*CHATTERBOT_WHEEL, val_fraction, pairs], overwrite=overwrite,
                          origin=f'{"pairs" if pairs else "conversations"} of {CHATTERBOT_WHEEL[0]}')
