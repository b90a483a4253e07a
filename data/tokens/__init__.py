"""Text as tokens and back: tokenizers, special tokens and chat templates.

This file has the base class of all tokenizers, and the files of those that have files. tokenizer.py finds the tokenizer
that a dataset or a model names; bpe.py and json_tokenizer.py have the kinds that need a library; special_tokens.py and
chat_template.py read what comes with weights.
"""
import codecs
import contextlib
import json
import os
import shutil

# What describes a tokenizer in a folder of weights. Only the first file is required. The others name the
# special tokens, and say how a conversation becomes text, and at which tokens and how text is generated.
FILES = ('tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json', 'chat_template.jinja',
         'generation_config.json')


class Tokenizer:
    """Base class. A tokenizer has a name, a vocab_size, eot (the end-of-text id, or None), bos (the id that
    comes before a text, or None), special_ids (ids that stand for no text), end_ids, and these methods:

    encode(text): a list of ids. Text that looks like a special token is ordinary text.
    encode_prompt(text): the same, except that text that looks like a special token becomes that token.
    decode_bytes(ids): UTF-8 bytes. A list of ids may end inside a character, so join the bytes of successive
        lists before decoding.
    describe_as_bpe(): vocabulary {token as Hugging Face writes it: id}, merges [[left, right]], the pattern
        that splits the text before merging (or None), special tokens {text: id}.
    """
    eot = bos = None
    special_ids = frozenset()
    files = {}  # {name: text} of the files that a dataset must have to use this tokenizer
    can_cut = True  # whether the parts of a text, as data.make.prepare cuts it, have the ids of the text
    gains_from_processes = True  # False = encoding takes no longer than sending the text to another process

    @property
    def end_ids(self):
        """The ids at which generation ends: eot, and others that come with the weights."""
        return frozenset() if self.eot is None else frozenset([self.eot])

    @property
    def document_end(self):
        """The ids that end a document: eot, or those of a line break if there is none."""
        return self.encode('\n') if self.eot is None else [self.eot]

    @property
    def begin_ids(self):
        """The ids that `encode_prompt` puts before each text, such as Llama's <s>."""
        return []

    def encode_prompt(self, text):
        return self.encode(text)

    def encode_places(self, text, is_text=False):
        """Return (ids, [(start, end)]): the characters of the text that each id stands for, or is a part of.

        is_text: as in `encode`; otherwise text that looks like a special token becomes that token.
        """
        ids = self.encode(text) if is_text else self.encode_prompt(text)
        characters = []  # of each byte
        for i, character in enumerate(text):
            characters += [i] * len(character.encode())
        places, end = [], 0
        for token in ids:
            start, end = end, end + len(self.decode_bytes([token]))
            places.append((characters[start], characters[end - 1] + 1))
        return ids, places

    def text_stream(self):
        """A function that returns the text that an id adds to the ids before it, and without an id what is left."""
        decoder = codecs.getincrementaldecoder('utf-8')(errors='replace')  # '' while a character is not complete
        return lambda token=None: decoder.decode(b'' if token is None else self.decode_bytes([token]), token is None)

    def bytes_of_tokens(self):
        """Return the number of bytes of text that each id stands for, an array: 0 for special tokens.

        None if the text of several ids is not that of each, one after the other.
        """
        import numpy as np
        sizes = [0 if i in self.special_ids else len(self.decode_bytes([i])) for i in range(self.vocab_size)]
        return np.array(sizes, dtype=np.int64)

    def encode_to_numpy(self, text):
        """Return encode(text) as an array of integers."""
        import numpy as np
        return np.array(self.encode(text), dtype=np.uint32)

    def decode(self, ids):
        """Return the text of a list of ids; invalid UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids).decode('utf-8', errors='replace')

    def meta(self):
        """Return the tokenizer's part of meta.json, from which get_tokenizer creates the tokenizer."""
        dtype = 'uint16' if self.vocab_size <= 65536 else 'uint32'
        return {'vocab_size': self.vocab_size, 'dtype': dtype, 'tokenizer': self.name}

    def hugging_face(self, block_size):
        """Return {file name: text} of the files that describe this tokenizer to Hugging Face's libraries.

        Every tokenizer becomes a BPE: without merges for characters, over bytes for the others. Unlike in
        `encode`, text that looks like a special token becomes that token.
        """
        vocab, merges, pattern, special = self.describe_as_bpe()
        if self.name == 'char':
            steps = dict(pre_tokenizer=None, decoder=dict(type='Fuse'))
        else:
            byte_level = dict(type='ByteLevel', add_prefix_space=False, trim_offsets=True, use_regex=False)
            sequence = [byte_level]
            if pattern:
                split = dict(type='Split', pattern=dict(Regex=pattern), behavior='Isolated', invert=False)
                sequence = [split, byte_level]
            steps = dict(pre_tokenizer=dict(type='Sequence', pretokenizers=sequence), decoder=byte_level)
        model = dict(type='BPE', dropout=None, unk_token=None, continuing_subword_prefix=None,
                     end_of_word_suffix=None, fuse_unk=False, byte_fallback=False, ignore_merges=True,
                     vocab=vocab | special, merges=merges)
        added_tokens = []
        end_tokens = {}
        for content, i in sorted(special.items(), key=lambda item: item[1]):
            added_tokens.append(dict(id=i, content=content, single_word=False, lstrip=False, rstrip=False,
                                     normalized=False, special=True))
            if i == self.eot:
                end_tokens = dict(bos_token=content, eos_token=content, unk_token=content)
        tokenizer = dict(version='1.0', truncation=None, padding=None, added_tokens=added_tokens,
                         normalizer=None, post_processor=None, model=model, **steps)
        config = dict(tokenizer_class='PreTrainedTokenizerFast', model_max_length=block_size,
                      clean_up_tokenization_spaces=False, **end_tokens)
        contents = {'tokenizer.json': tokenizer, 'tokenizer_config.json': config}
        return {name: json.dumps(content, ensure_ascii=False, indent=1) for name, content in contents.items()}

    def save(self, folder, block_size):
        """Write the files of `hugging_face` into a folder that exists."""
        for name, text in self.hugging_face(block_size).items():
            with open(os.path.join(folder, name), 'w', encoding='utf-8') as file:
                file.write(text)


def until_end(ids, tokenizer):
    """The ids before the first that ends a text."""
    return ids[:next((i for i, token in enumerate(ids) if token in tokenizer.end_ids), None)]


# GPT-2's vocab.json writes a byte as a character: its own if that is printable, otherwise one from 256 on.
_PRINTABLE_BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHER_BYTES = [byte for byte in range(256) if byte not in _PRINTABLE_BYTES]
BYTE_TO_UNICODE = {byte: chr(byte) for byte in _PRINTABLE_BYTES}
BYTE_TO_UNICODE |= {byte: chr(256 + i) for i, byte in enumerate(_OTHER_BYTES)}


def bytes_to_unicode(token):
    """Write a token's bytes as GPT-2's vocab.json does."""
    return ''.join(BYTE_TO_UNICODE[byte] for byte in token)


def portable(meta):
    """A meta for a file that lies beside the tokenizer's own files: without their folder."""
    return meta and {key: value for key, value in meta.items() if key != 'folder'}


def tokenizer_folder(out_dir):
    """Where a run keeps the files of its tokenizer, if the tokenizer has files."""
    return os.path.join(out_dir, 'tokenizer')


def copy_tokenizer(meta, target):
    """Copy the files of a meta's tokenizer, if it has any, into the folder `target`."""
    if not (meta and meta.get('folder')) or os.path.abspath(meta['folder']) == os.path.abspath(target):
        return
    os.makedirs(target, exist_ok=True)
    for name in FILES:
        path = os.path.join(meta['folder'], name)
        if os.path.exists(path):
            shutil.copyfile(path, os.path.join(target, name))
        else:  # of an earlier run
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(target, name))
