"""Convert text to token ids and back: GPT-2's BPE and tiktoken's other encodings, characters, bytes, ids.

A dataset's meta.json names its tokenizer: get_tokenizer(meta) returns the tokenizer that wrote the dataset.
"""
import base64
import hashlib
import os
import tempfile

# gigatoken 0.10 caches every word it has seen, with up to 5 bytes of memory for each byte of text. To bound
# the cache, its tokenizer is rebuilt after this many bytes of text.
GIGATOKEN_BYTES = 2 ** 28


class Tokenizer:
    """Base class. A tokenizer has a name, a vocab_size, eot (the end-of-text id, or None), and these methods:

    encode(text): a list of ids. Text that looks like a special token is ordinary text.
    encode_prompt(text): the same, except that text that looks like a special token becomes that token.
    decode_bytes(ids): UTF-8 bytes. A list of ids may end inside a character, so join the bytes of successive
        lists before decoding.
    describe_as_bpe(): vocabulary {token as Hugging Face writes it: id}, merges [[left, right]], the pattern
        that splits the text before merging (or None), special tokens {text: id}.
    """
    eot = None
    gains_from_processes = True  # False = encoding takes no longer than sending the text to another process

    def encode_prompt(self, text):
        return self.encode(text)

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
        """Return {file name: content} of the JSON files of this tokenizer for Hugging Face.

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
        return {'tokenizer.json': tokenizer, 'tokenizer_config.json': config}


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
        return {_bytes_to_unicode([byte]): byte for byte in range(256)}, [], None, {}


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


class BPETokenizer(Tokenizer):
    def __init__(self, name):
        """name: an encoding of tiktoken. OSError if its vocabulary is missing and cannot be downloaded."""
        try:
            import tiktoken
        except ImportError:
            raise ImportError(f'tokenizer {name!r} needs tiktoken: pip install tiktoken') from None
        from data.fetch import fetch_gpt2_vocabulary
        encodings = sorted(tiktoken.list_encoding_names())
        if name not in encodings:
            raise ValueError(f"unknown tokenizer {name!r}: choose 'char', 'bytes', 'gpt2-gigatoken' or an "
                             f"encoding of tiktoken ({', '.join(encodings)})")
        cache = (os.environ.get('TIKTOKEN_CACHE_DIR') or os.environ.get('DATA_GYM_CACHE_DIR')
                 or os.path.expanduser('~/.cache/kilogpt'))
        os.environ['TIKTOKEN_CACHE_DIR'] = cache  # read by tiktoken, here and in worker processes
        if name == 'gpt2':
            fetch_gpt2_vocabulary(cache)
        try:
            self.encoding = tiktoken.get_encoding(name)
        except OSError as error:
            raise OSError(f'the vocabulary of {name} is not in {cache} and cannot be downloaded '
                          f'({error})') from None
        self.name = name
        self.vocab_size = self.encoding.n_vocab
        self.eot = self.encoding.eot_token

    def encode(self, text):
        return self.encoding.encode_ordinary(text)

    def encode_prompt(self, text):
        return self.encoding.encode(text, allowed_special='all')

    def encode_to_numpy(self, text):
        try:
            return self.encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:  # JSON can carry lone surrogates, which `encode` replaces
            return super().encode_to_numpy(text)

    def decode_bytes(self, ids):
        # nanoGPT pads the embedding to 50304 rows, so that a model can generate ids without a token.
        return self.encoding.decode_bytes([i for i in ids if i < self.vocab_size])

    def describe_as_bpe(self):
        ranks = self.encoding._mergeable_ranks
        vocab = {_bytes_to_unicode(token): i for token, i in ranks.items()}
        merges = []
        for token in sorted(ranks, key=ranks.get):
            parts = _last_two_parts(token, ranks)
            if parts:
                merges.append([_bytes_to_unicode(part) for part in parts])
        # Oniguruma, which Hugging Face uses, reads the + of a possessive {1,3}+ as one more repetition. Here
        # the possessive quantifiers are at the end of a branch, where removing the + changes nothing.
        pattern = self.encoding._pat_str.replace('}+', '}')
        return vocab, merges, pattern, self.encoding._special_tokens


class GigatokenTokenizer(BPETokenizer):
    """GPT-2's tokenizer by gigatoken: gives the same ids as tiktoken, much faster."""
    gains_from_processes = False

    def __init__(self):
        super().__init__('gpt2')
        self._build_gigatoken()

    def _build_gigatoken(self):
        """Build gigatoken's tokenizer from tiktoken's ranks, with an empty cache. Takes 0.1 s."""
        try:
            import gigatoken
        except ImportError:
            raise ImportError("tokenizer 'gpt2-gigatoken' needs gigatoken: "
                              'pip install gigatoken==0.10.0') from None
        ranks = sorted(self.encoding._mergeable_ranks.items(), key=lambda item: item[1])
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, 'gpt2.tiktoken')
            with open(path, 'wb') as file:
                for token, rank in ranks:
                    file.write(base64.b64encode(token) + b' %d\n' % rank)
            self.gigatoken = gigatoken.Tokenizer.from_tiktoken(path, 'gpt2', {})
        self.encoded_bytes = 0

    def encode_to_numpy(self, text):
        try:
            utf8 = text.encode()
        except UnicodeEncodeError:  # JSON can carry lone surrogates
            return super().encode_to_numpy(text)
        if self.encoded_bytes > GIGATOKEN_BYTES:
            self._build_gigatoken()
        self.encoded_bytes += len(utf8)
        return self.gigatoken.encode(utf8)


def get_tokenizer(meta):
    """Return the tokenizer of a dataset or of a model.

    meta: the content of the dataset's meta.json, of which `tokenizer` and, for 'char', `chars` are read.
        `tokenizer` may also be 'gpt2-gigatoken', whose own meta says 'gpt2'. Without `tokenizer`, the result
        is an IdTokenizer of `vocab_size` ids.
    ValueError if the tokenizer is unknown, OSError without its vocabulary, ImportError without its library.
    """
    if not meta.get('tokenizer'):
        return IdTokenizer(meta['vocab_size'])
    if meta['tokenizer'] == 'bytes':
        return ByteTokenizer()
    if meta['tokenizer'] == 'gpt2-gigatoken':
        return GigatokenTokenizer()
    if meta['tokenizer'] != 'char':
        return BPETokenizer(meta['tokenizer'])
    if not meta.get('chars'):
        raise ValueError("tokenizer 'char' needs its alphabet, which is in `chars` of a dataset's meta.json: "
                         'set tokenizer to a dataset that has it')
    return CharTokenizer(meta['chars'])


def describe_tokenizer(meta):
    """The name of a meta's tokenizer, with the digest of an alphabet; None if the meta does not name one.

    Tokenizers are the same if their descriptions are.
    """
    name = (meta or {}).get('tokenizer')
    if not name or not meta.get('chars'):
        return name
    digest = hashlib.sha256(''.join(meta['chars']).encode(errors='surrogatepass')).hexdigest()
    return f'{name} ({len(meta["chars"])} characters, digest {digest[:8]})'


# GPT-2's vocab.json writes a byte as a character: its own if that is printable, otherwise one from 256 on.
_PRINTABLE_BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHER_BYTES = [byte for byte in range(256) if byte not in _PRINTABLE_BYTES]
_BYTE_TO_UNICODE = {byte: chr(byte) for byte in _PRINTABLE_BYTES}
_BYTE_TO_UNICODE |= {byte: chr(256 + i) for i, byte in enumerate(_OTHER_BYTES)}


def _bytes_to_unicode(token):
    """Write a token's bytes as GPT-2's vocab.json does."""
    return ''.join(_BYTE_TO_UNICODE[byte] for byte in token)


def _last_two_parts(token, ranks):
    """Return the two tokens whose merge makes `token`, or None if no merge does (a single byte, for example).

    ranks: {token: rank}. As in BPE, the bytes are merged in the order of ranks, until two parts are left.
    """
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pair_ranks = [ranks.get(left + right, float('inf')) for left, right in zip(parts, parts[1:])]
        rank = min(pair_ranks)
        if rank == float('inf'):
            return None
        i = pair_ranks.index(rank)
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return parts if len(parts) == 2 else None
