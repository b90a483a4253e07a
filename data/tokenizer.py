"""Text to token ids and back: GPT-2's BPE (and tiktoken's others), characters, bytes.

A dataset's meta.json says which: get_tokenizer(meta) gives the tokenizer that wrote it.
"""
import functools
import os


class Tokenizer:
    """What tokenizers share. Each has name, vocab_size, eot (the end-of-text id, or None) and

    encode(text): a list of ids; what looks like a special token is ordinary text.
    decode_bytes(ids): UTF-8 bytes. Those of successive lists of ids may be joined; one list may end inside a character.
    """
    eot = quick = None

    def decode(self, ids):
        """The text of a list of ids; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode('utf-8', errors='replace')

    def array(self, text):
        """encode(text), as an array of integers."""
        import numpy as np
        return np.array(self.encode(text), dtype=np.uint32)

    def meta(self):
        """What meta.json says of it, enough for get_tokenizer."""
        dtype = 'uint16' if self.vocab_size <= 65536 else 'uint32'
        return {'vocab_size': self.vocab_size, 'dtype': dtype, 'tokenizer': self.name}

    def hugging_face(self, block_size):
        """{file name: content} of the JSON files that Hugging Face's AutoTokenizer makes the same tokenizer of.

        All are a BPE: characters one without merges, the others one over bytes. What looks like a special token is one there.
        """
        vocab, merges, pattern, special = self.parts()
        coder = dict(type='ByteLevel', add_prefix_space=False, trim_offsets=True, use_regex=False)
        split = [dict(type='Split', pattern=dict(Regex=pattern), behavior='Isolated', invert=False)] if pattern else []
        over_bytes = dict(pre_tokenizer=dict(type='Sequence', pretokenizers=[*split, coder]), decoder=coder)
        over_characters = dict(pre_tokenizer=None, decoder=dict(type='Fuse'))
        added = [dict(id=i, content=content, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
                 for content, i in sorted(special.items(), key=lambda item: item[1])]
        model = dict(type='BPE', dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None,
                     fuse_unk=False, byte_fallback=False, ignore_merges=True, vocab=vocab | special, merges=merges)
        end = next((content for content, i in special.items() if i == self.eot), None)
        return {'tokenizer.json': dict(version='1.0', truncation=None, padding=None, added_tokens=added, normalizer=None,
                                       post_processor=None, model=model, **over_characters if self.name == 'char' else over_bytes),
                'tokenizer_config.json': dict(tokenizer_class='PreTrainedTokenizerFast', model_max_length=block_size,
                                              clean_up_tokenization_spaces=False,
                                              **dict(bos_token=end, eos_token=end, unk_token=end) if end else {})}


# GPT-2's vocab.json writes a byte as a character: itself where it prints, else one from 256 on
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_LETTERS = {byte: chr(byte) for byte in _PRINTABLE}
_LETTERS |= {byte: chr(256 + i) for i, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)}


def _written(token):
    return ''.join(_LETTERS[byte] for byte in token)


class CharTokenizer(Tokenizer):
    name = 'char'

    def parts(self):
        """Vocabulary {written token: id}, merges [[left, right]], pattern that splits the text before, special tokens {text: id}."""
        return self.ids, [], None, {}

    def __init__(self, chars):
        """chars: the alphabet in id order, a string or a list of single characters."""
        self.chars = list(chars)
        self.vocab_size = len(self.chars)
        self.ids = {char: i for i, char in enumerate(self.chars)}

    @classmethod
    def from_text(cls, text):
        """The alphabet of a text (a string, or any iterable of characters), in code point order."""
        return cls(sorted(set(text)))

    def encode(self, text):
        try:
            return [self.ids[char] for char in text]
        except KeyError as error:
            raise ValueError(f'the character {error} is not among the {self.vocab_size} of this alphabet') from None

    def decode_bytes(self, ids):
        return ''.join(self.chars[i] for i in ids).encode()

    def meta(self):
        return super().meta() | {'chars': ''.join(self.chars)}


class ByteTokenizer(Tokenizer):
    name = 'bytes'
    vocab_size = 256

    def encode(self, text):
        return list(text.encode(errors='replace'))  # JSON can carry lone surrogates

    def parts(self):
        return {_written([byte]): byte for byte in range(256)}, [], None, {}

    def decode_bytes(self, ids):
        return bytes(ids)


class BPETokenizer(Tokenizer):
    def __init__(self, name):
        """name: a tiktoken encoding. OSError if its vocabulary is neither on this machine nor to be fetched."""
        try:
            import tiktoken
        except ImportError:
            raise ImportError(f'tokenizer {name!r} needs tiktoken: pip install tiktoken') from None
        from data.fetch import fetch_gpt2_vocabulary
        if name not in tiktoken.list_encoding_names():
            raise ValueError(f"unknown tokenizer {name!r}: take 'char', 'bytes' or one of tiktoken's "
                             f"({', '.join(sorted(tiktoken.list_encoding_names()))})")
        cache = (os.environ.get('TIKTOKEN_CACHE_DIR') or os.environ.get('DATA_GYM_CACHE_DIR')
                 or os.path.expanduser('~/.cache/kilogpt'))
        os.environ['TIKTOKEN_CACHE_DIR'] = cache  # worker processes look there too
        if name == 'gpt2':
            fetch_gpt2_vocabulary(cache)
        try:
            self.encoding = tiktoken.get_encoding(name)
        except OSError as error:
            raise OSError(f'the vocabulary of {name} is not in {cache} and cannot be downloaded ({error})') from None
        self.name, self.vocab_size, self.eot = name, self.encoding.n_vocab, self.encoding.eot_token
        self.quick_bytes = 0  # that self.quick has encoded

    def encode(self, text):
        return self.encoding.encode_ordinary(text)

    def array(self, text):
        try:
            if not self.quick:
                return self.encoding.encode_to_numpy(text, disallowed_special=())
            self.quick_bytes += len(text)
            if self.quick_bytes > 2 ** 30:  # it keeps the ids of each word that it has met, and forgets none
                del self.quick
                self.quick_bytes = 0
            return self.quick.encode(text.encode())
        except UnicodeEncodeError:  # JSON can carry lone surrogates
            return super().array(text)

    @functools.cached_property
    def quick(self):
        """gigatoken's tokenizer of GPT-2's ids, in one process some 20 times as fast as tiktoken; None for other encodings."""
        if self.name != 'gpt2':  # of the others it is not known to have the same ids
            return None
        import base64
        import tempfile
        import gigatoken
        with tempfile.NamedTemporaryFile(suffix='.tiktoken') as file:
            for token, rank in sorted(self.encoding._mergeable_ranks.items(), key=lambda item: item[1]):
                file.write(base64.b64encode(token) + b' %d\n' % rank)
            file.flush()
            return gigatoken.Tokenizer.from_tiktoken(file.name, 'gpt2', {})

    def decode_bytes(self, ids):
        return self.encoding.decode_bytes([i for i in ids if i < self.vocab_size])  # nanoGPT's table has rows for 50304

    def parts(self):
        ranks, merges = self.encoding._mergeable_ranks, []
        for token in sorted(ranks, key=ranks.get):  # a merge joins the last two parts of what becomes a token
            pieces = [bytes([byte]) for byte in token]
            while len(pieces) > 2:
                rank, i = min((ranks.get(a + b, float('inf')), i) for i, (a, b) in enumerate(zip(pieces, pieces[1:])))
                if rank == float('inf'):
                    break
                pieces[i:i + 2] = [pieces[i] + pieces[i + 1]]
            if len(pieces) == 2:
                merges.append([_written(piece) for piece in pieces])
        # Oniguruma takes the + of {1,3}+ for one more repetition, not for a possessive one, which at the end of a branch is idle
        pattern = self.encoding._pat_str.replace('}+', '}')
        return {_written(token): i for token, i in ranks.items()}, merges, pattern, self.encoding._special_tokens


def get_tokenizer(meta):
    """The tokenizer of a dataset.

    meta: the content of its meta.json, or None where weights came without; `tokenizer` and, for 'char', `chars` are read.
    ValueError: no such tokenizer. OSError: its vocabulary cannot be had. ImportError: tiktoken is missing.
    """
    if meta is None:
        raise ValueError('the weights do not say which tokenizer they were trained with: make a run of them with python '
                         'checkpoint.py import WEIGHTS OUT_DIR --dataset=NAME, whose meta.json says it, and take --out_dir=OUT_DIR')
    if meta['tokenizer'] == 'bytes':
        return ByteTokenizer()
    if meta['tokenizer'] != 'char':
        return BPETokenizer(meta['tokenizer'])
    if not meta.get('chars'):
        raise ValueError("tokenizer 'char' needs its alphabet, but there are no `chars` in the dataset's meta.json")
    return CharTokenizer(meta['chars'])
