"""Make a dataset of conversations, to finetune a model on the answers in them:

    python data/conversations/prepare.py --input='chats/*.jsonl' --tokenizer=HuggingFaceTB/SmolLM2-135M-Instruct --out=mychats

A line of a .jsonl file (or a row of a .parquet file) is a conversation, in one of the forms that data/make/messages.py
lists, such as {"messages": [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hi!"}]}.
"""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
from data.make.messages import ConversationEncoder, conversation_splits
from data.make.prepare import check_unused, write_dataset
from data.make.readers import file_versions, find_files
from kilogpt.configurator import configure, exit_on_error
from kilogpt.devices.cpus import available_cpus
from kilogpt.weights.any_tokenizer import find_tokenizer

input = ''  # files, globs, folders of .jsonl or .parquet files, datasets on the hub (org/name); by commas
out = 'conversations'  # output folder: a name in data/, or a path; train.py's --dataset
overwrite = False  # replace the dataset in that folder even if it has other texts or another tokenizer
tokenizer = 'gpt2'  # that of the model to finetune: its folder, run or org/name, whose chat template is used
roles = 'assistant'  # roles whose messages the model learns; separated by commas
val_fraction = 0.1  # share of val: conversations drawn by their text, so that copies are in one split
num_proc = available_cpus()  # number of processes that tokenise
configure(globals())

if __name__ == '__main__':
    with exit_on_error():
        if not input:
            raise ValueError("no conversations given: set --input, such as --input='chats/*.jsonl'")
        if not 0 <= val_fraction < 1:
            raise ValueError(f'val_fraction is {val_fraction}, but must be at least 0 and below 1')
        encoder = ConversationEncoder(find_tokenizer(tokenizer), roles)
        check_unused(out, encoder, input, overwrite)
        paths = find_files(input)
        splits = conversation_splits(paths, val_fraction)
        write_dataset(out, encoder, splits, num_proc=num_proc, source=[file_versions(paths), val_fraction, roles],
                      origin=input, overwrite=overwrite)
