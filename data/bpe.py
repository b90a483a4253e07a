"""Byte-pair encodings by tiktoken and by gigatoken, and the base class of all tokenizers."""
import base64
import json
import os
import re
import tempfile

# gigatoken 0.10 caches every word it has seen, with up to 5 bytes of memory for each byte of text. To bound
# the cache, its tokenizer is rebuilt after this many bytes of text.
GIGATOKEN_BYTES = 2 ** 28
# How a text is split into words, within which tokens are merged. The second is that of cl100k_base (GPT-4)
# without its possessive quantifiers, which libraries read differently and which change nothing here.
PATTERNS = dict(
    gpt2=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    gpt4=r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|"
         r"\s+(?!\S)|\s+")


class Tokenizer:
    """Base class. A tokenizer has a name, a vocab_size, eot (the end-of-text id, or None), bos (the id that
    comes before a text, or None), special_ids (ids that stand for no text), and these methods:

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
    can_cut = True  # whether the parts of a text, as data.prepare cuts it, have the ids of the text
    gains_from_processes = True  # False = encoding takes no longer than sending the text to another process

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

    def bytes_of_tokens(self):
        """Return the number of bytes of text that each id stands for, an array: 0 for special tokens."""
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


class BPETokenizer(Tokenizer):
    def __init__(self, encoding, name=None):
        """encoding: a tiktoken.Encoding."""
        self.encoding, self.name = encoding, name
        self.vocab_size = encoding.n_vocab
        self.eot = self.bos = encoding._special_tokens.get('<|endoftext|>')
        self.special_ids = set(encoding._special_tokens.values())

    @classmethod
    def named(cls, name):
        """The tokenizer of an encoding of tiktoken; OSError if its vocabulary cannot be had."""
        try:
            import tiktoken
        except ImportError:
            raise ImportError(f'tokenizer {name!r} needs tiktoken: pip install tiktoken') from None
        from data.fetch import fetch_gpt2_vocabulary, vocabulary_folder
        encodings = sorted(tiktoken.list_encoding_names())
        if name not in encodings:
            raise ValueError(f"unknown tokenizer {name!r}: choose 'char', 'bytes', 'gpt2-gigatoken', an "
                             f'encoding of tiktoken ({", ".join(encodings)}), or a folder with a '
                             'tokenizer.json')
        cache = vocabulary_folder()
        os.environ['TIKTOKEN_CACHE_DIR'] = cache  # read by tiktoken, here and in worker processes
        if name == 'gpt2':
            fetch_gpt2_vocabulary(cache)
        try:
            return cls(tiktoken.get_encoding(name), name)
        except OSError as error:
            raise OSError(f'the vocabulary of {name} is not in {cache} and cannot be downloaded '
                          f'({error})') from None

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

    def bytes_of_tokens(self):
        import numpy as np
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        for token, i in self.encoding._mergeable_ranks.items():  # some encodings do not use all ids
            sizes[i] = len(token)
        return sizes

    def describe_as_bpe(self):
        ranks = self.encoding._mergeable_ranks
        vocab = {bytes_to_unicode(token): i for token, i in ranks.items()}
        merges = []
        for token in sorted(ranks, key=ranks.get):
            parts = _last_two_parts(token, ranks)
            if parts:
                merges.append([bytes_to_unicode(part) for part in parts])
        # Oniguruma, which Hugging Face uses, reads the + of a possessive {1,3}+ as one more repetition. Here
        # the possessive quantifiers are at the end of a branch, where removing the + changes nothing.
        pattern = re.sub(r'(\{\d+,\d+\})\+', r'\1', self.encoding._pat_str)
        return vocab, merges, pattern, self.encoding._special_tokens


class GigatokenTokenizer(BPETokenizer):
    """GPT-2's tokenizer by gigatoken: gives the same ids as tiktoken, much faster."""
    gains_from_processes = False

    def __init__(self, encoding, name):
        super().__init__(encoding, name)
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


def train_bpe(texts, vocab_size, pattern, special_tokens):
    """Train on an iterator of texts; the same texts give the same tokens. Returns a BPETokenizer.

    pattern: a key of PATTERNS, or a regular expression. The bytes have the first ids, then the merged tokens
    in the order of their merges (Sennrich et al., arXiv 1508.07909), then the special tokens.
    ValueError if the pattern is not a regular expression.
    """
    try:
        import rustbpe
        import tiktoken
    except ImportError as error:
        raise ImportError(f'training a tokenizer needs {error.name}: pip install rustbpe tiktoken') from None
    pattern = PATTERNS.get(pattern, pattern)
    trainer = rustbpe.Tokenizer()
    try:
        trainer.train_from_iterator(texts, vocab_size - len(special_tokens), pattern=pattern)
        ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
        special = {token: len(ranks) + i for i, token in enumerate(special_tokens)}
        return BPETokenizer(tiktoken.Encoding('trained', pat_str=pattern, mergeable_ranks=ranks,
                                              special_tokens=special))
    except ValueError as error:
        raise ValueError(f'pattern is {pattern!r}, which is not a regular expression ({error})') from None


# GPT-2's vocab.json writes a byte as a character: its own if that is printable, otherwise one from 256 on.
_PRINTABLE_BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHER_BYTES = [byte for byte in range(256) if byte not in _PRINTABLE_BYTES]
BYTE_TO_UNICODE = {byte: chr(byte) for byte in _PRINTABLE_BYTES}
BYTE_TO_UNICODE |= {byte: chr(256 + i) for i, byte in enumerate(_OTHER_BYTES)}


def bytes_to_unicode(token):
    """Write a token's bytes as GPT-2's vocab.json does."""
    return ''.join(BYTE_TO_UNICODE[byte] for byte in token)


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
