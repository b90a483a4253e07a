"""Convert text to token ids and back: byte-pair encodings, characters, bytes, ids, the tokenizers of weights.

A dataset's meta.json names its tokenizer: get_tokenizer(meta) returns the tokenizer that wrote the dataset.
"""
import hashlib
import json
import os

from data import storage
from data.tokens import FILES, Tokenizer, bytes_to_unicode

JSON = FILES[0]  # the name of the tokenizers that come with weights, and of their file


class CharTokenizer(Tokenizer):
    name = 'char'

    def __init__(self, chars):
        """chars: the alphabet in the order of ids, as a string or a list of single characters."""
        self.chars = list(chars)
        self.vocab_size = len(self.chars)
        self.ids = {char: i for i, char in enumerate(self.chars)}

    @classmethod
    def from_text(cls, text):
        """Use the alphabet of a text (any iterable of characters) in the order of code points."""
        return cls(sorted(set(text)))

    def encode(self, text):
        try:
            return [self.ids[char] for char in text]
        except KeyError as error:
            raise ValueError(f'the character {error} is not among the {self.vocab_size} characters of this '
                             'alphabet') from None

    def decode_bytes(self, ids):
        return ''.join(self.chars[i] for i in ids if i < self.vocab_size).encode()

    def meta(self):
        return super().meta() | {'chars': ''.join(self.chars)}

    def describe_as_bpe(self):
        return self.ids, [], None, {}


class ByteTokenizer(Tokenizer):
    name = 'bytes'
    vocab_size = 256

    def encode(self, text):
        return list(text.encode(errors='replace'))  # JSON can carry lone surrogates

    def decode_bytes(self, ids):
        return bytes(i for i in ids if i < self.vocab_size)

    def describe_as_bpe(self):
        return {bytes_to_unicode([byte]): byte for byte in range(256)}, [], None, {}


class IdTokenizer(Tokenizer):
    """Stands for a tokenizer that is not known: a text is ids with spaces between them, '17 4 0'."""
    name = None

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def encode(self, text):
        for word in text.split():
            if not (word.isdecimal() and int(word) < self.vocab_size):
                raise ValueError(f'{word!r} is not a token id below {self.vocab_size}: write ids with spaces '
                                 'between them, or set tokenizer to the name of the tokenizer')
        return [int(word) for word in text.split()]

    def decode_bytes(self, ids):
        return ''.join(f' {i}' for i in ids).encode()


def get_tokenizer(meta):
    """Return the tokenizer of a dataset or of a model.

    meta: the content of the dataset's meta.json, of which `tokenizer` is read, for 'char' also `chars`, and
        for 'tokenizer.json' also `folder` and `digest`. `tokenizer` may also be 'gpt2-gigatoken', whose own
        meta says 'gpt2', or a folder with a tokenizer.json, or such a file. Without `tokenizer`, the result
        is an IdTokenizer of `vocab_size` ids.
    ValueError if the tokenizer is unknown, OSError without its vocabulary, ImportError without its library.
    """
    if not meta.get('tokenizer'):
        return IdTokenizer(meta['vocab_size'])
    if meta['tokenizer'] == JSON and 'digest' in meta:
        from data.tokens.json_tokenizer import open_tokenizer
        return open_tokenizer(meta)
    if os.path.exists(meta['tokenizer']):
        from data.tokens.json_tokenizer import load_tokenizer
        return load_tokenizer(meta['tokenizer'])
    if meta['tokenizer'] == 'bytes':
        return ByteTokenizer()
    if meta['tokenizer'] == 'gpt2-gigatoken':
        from data.tokens.bpe import GigatokenTokenizer
        return GigatokenTokenizer.named('gpt2')
    if meta['tokenizer'] != 'char':
        from data.tokens.bpe import BPETokenizer
        return BPETokenizer.named(meta['tokenizer'])
    if not meta.get('chars'):
        raise ValueError("tokenizer 'char' needs its alphabet, which is in `chars` of a dataset's meta.json: "
                         'set tokenizer to a dataset that has it')
    return CharTokenizer(meta['chars'])


TOKEN_BYTES = 'token_bytes.json'  # in the folder of a dataset


def bytes_of_tokens(folder, meta):
    """The bytes of text of each token of a dataset, an array, 0 for special tokens; None if they are not known.

    prepare.py writes them beside meta.json, since a machine that trains may not have the vocabulary.
    """
    import numpy as np
    try:
        return np.array(json.loads(storage.read(os.path.join(folder, TOKEN_BYTES))))
    except FileNotFoundError:
        pass
    name = meta.get('tokenizer')
    if name == 'gpt2':
        from data.fetch import has_gpt2_vocabulary
        if not has_gpt2_vocabulary():
            return None
    if name in ('gpt2', 'char', 'bytes') or name == JSON and 'digest' in meta:
        return get_tokenizer(meta).bytes_of_tokens()
    return None  # the vocabulary might have to be downloaded


def describe_tokenizer(meta):
    """The name of a meta's tokenizer, with a digest if the name does not say all; None if there is no name.

    Tokenizers are the same if their descriptions are.
    """
    name = (meta or {}).get('tokenizer')
    if name and 'digest' in meta:
        return f'{name} ({meta["vocab_size"]} tokens, digest {meta["digest"][:8]})'
    if not name or not meta.get('chars'):
        return name
    digest = hashlib.sha256(''.join(meta['chars']).encode(errors='surrogatepass')).hexdigest()
    return f'{name} ({len(meta["chars"])} characters, digest {digest[:8]})'
