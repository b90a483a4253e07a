"""Byte-pair encodings by tiktoken and by gigatoken."""
import base64
import os
import re
import tempfile

from data.tokens import Tokenizer, bytes_to_unicode

# gigatoken 0.10 caches every word it has seen, with up to 5 bytes of memory for each byte of text. To bound
# the cache, its tokenizer is rebuilt after this many bytes of text.
GIGATOKEN_BYTES = 2 ** 28
# How a text is split into words, within which tokens are merged. The second is that of cl100k_base (GPT-4)
# without its possessive quantifiers, which libraries read differently and which change nothing here.
PATTERNS = dict(
    gpt2=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    gpt4=r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|"
         r"\s+(?!\S)|\s+")


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
                             "tokenizer.json, a run's folder, a dataset, a GGUF file, or org/name on the hub")
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
