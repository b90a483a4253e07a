"""The tokenizer that comes with weights: a tokenizer.json, read by the library `tokenizers`.

A dataset and a run's folder have a copy of its files, so that each remains complete when it is moved.
"""
import functools
import hashlib
import json
import os
import re

from data.tokens import BYTE_TO_UNICODE, FILES, Tokenizer
from data.tokens.special_tokens import add_tokens, read_json, roles_of

# The entries of tokenizer.json that decide which ids a text has, and so are in the digest.
DECISIVE = 'normalizer', 'pre_tokenizer', 'model', 'added_tokens'
# Usual names of the end-of-text token, for folders that do not say which one it is.
END_TOKENS = '<|endoftext|>', '<|end_of_text|>', '</s>', '<eos>', '<|im_end|>'
UNICODE_TO_BYTE = {char: byte for byte, char in BYTE_TO_UNICODE.items()}
# A text with the borders at which data.make.prepare cuts a document.
PROBE = "It's 12345 words.\nThe second line,\nthird 'line'\n2 more\nand ÄÖ\nlast\n"
MOST_PROBED = 500  # tokens


class JsonTokenizer(Tokenizer):
    """A tokenizer.json. `folder` is where it is, and `digest` tells it from others."""
    name = 'tokenizer.json'

    def __init__(self, path):
        """path: the folder, or the file. OSError without the file, ValueError if it cannot be read."""
        try:
            import tokenizers
        except ImportError:
            raise ImportError(f'tokenizer {path!r} needs tokenizers: pip install tokenizers') from None
        path = os.path.join(path, self.name) if os.path.isdir(path) else path
        self.folder = os.path.dirname(os.path.abspath(path))
        self.files = {name: _read(os.path.join(self.folder, name)) for name in FILES[1:]
                      if os.path.exists(os.path.join(self.folder, name))}
        self.files[self.name] = _read(path)
        try:
            self.backend = tokenizers.Tokenizer.from_str(self.files[self.name])
            content = json.loads(self.files[self.name])
        except Exception as error:  # the library raises a bare Exception
            raise ValueError(f'{path} is not a tokenizer.json ({error})') from None
        self.backend.no_truncation()
        self.backend.no_padding()
        own = self._describe_added()
        try:
            add_tokens(self.backend, self.files, content.get('added_tokens', []))
        except (TypeError, ValueError) as error:
            raise ValueError(f'{self.folder} describes its special tokens in a way that is not known ({error})') from None
        decisive = [content.get(entry) for entry in DECISIVE]
        if self._describe_added() != own:
            decisive.append(self._describe_added())
        decisive = json.dumps(decisive, sort_keys=True)
        self.digest = hashlib.sha256(decisive.encode()).hexdigest()
        self._check_ids(path)
        vocabulary = self.backend.get_vocab()  # with the special tokens
        self.vocab_size = max(vocabulary.values()) + 1
        added = self.backend.get_added_tokens_decoder()
        self.special = {token.content for token in added.values()}
        self.special_ids = {i for i, token in added.items() if token.special}
        self.splits_special = bool(read_json(self.files, 'tokenizer_config.json').get('split_special_tokens'))
        steps = json.dumps(content.get('decoder'))
        self.is_byte_level, self.has_byte_tokens = '"ByteLevel"' in steps, '"ByteFallback"' in steps
        usual_end = next((name for name in END_TOKENS if name in vocabulary), None)
        roles = roles_of(self.files)
        self.eot = vocabulary.get(roles.get('eos_token', usual_end))
        self.bos = vocabulary.get(roles.get('bos_token'), self.eot)

    def _check_ids(self, path):
        """ValueError for two tokens with one id, which `tokenizers` gives to new ones if ids are left out."""
        for i, token in self.backend.get_added_tokens_decoder().items():
            other = self.backend.model.id_to_token(i)
            if other not in (None, token.content):
                raise ValueError(f'{path} gives the id {i} to {token.content!r} and to {other!r}: give each token an id '
                                 'of its own, from 0 on without a gap')

    def _describe_added(self):
        return [[i, str(token)] for i, token in self.backend.get_added_tokens_decoder().items()]

    @functools.cached_property
    def end_ids(self):
        named = read_json(self.files, 'generation_config.json').get('eos_token_id')
        return super().end_ids | {i for i in (named if isinstance(named, list) else [named]) if i is not None}

    @functools.cached_property
    def begin_ids(self):
        prompt, text = self.encode_prompt('a'), self.encode('a')
        starts = [i for i in range(len(prompt)) if prompt[i:i + len(text)] == text]
        return prompt[:starts[0]] if starts else []

    @property
    def can_cut(self):
        """Whether a text may be cut where data.make.prepare cuts it, without a change of its ids.

        A tokenizer of SentencePiece, for example, puts a space before each text.
        """
        parts = PROBE.splitlines(keepends=True)
        return self.encode(PROBE) == [i for part in parts for i in self.encode(part)]

    def encode(self, text):
        self.backend.encode_special_tokens = True  # as ordinary text
        return self._encode(text, add_special_tokens=False)

    def encode_prompt(self, text):
        """Like `encode`, but with special tokens: those in the text, and those around it, as Llama's <s>."""
        self.backend.encode_special_tokens = self.splits_special
        return self._encode(text, add_special_tokens=True)

    def _encode(self, text, add_special_tokens):
        # JSON can carry lone surrogates, which have no UTF-8
        text = text.encode(errors='replace').decode()
        # `encode` also computes where each token is in the text, which takes a third of its time.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_places(self, text, is_text=False):
        self.backend.encode_special_tokens = is_text or self.splits_special
        encoding = self.backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids):
        return self.backend.decode(ids, skip_special_tokens=False)

    @functools.cached_property
    def joins_tokens(self):
        """Whether a text is that of its tokens, one after the other. For WordPiece, for example, it is not."""
        step = max(1, self.vocab_size // MOST_PROBED)
        whole = [i for i in range(0, self.vocab_size, step) if '\ufffd' not in self._bytes_of(i).decode(errors='replace')]
        for ids in (self.encode(PROBE), whole):
            text = b''.join(map(self._bytes_of, ids)).decode(errors='replace')
            if self.decode(ids).lstrip(' ') != text.lstrip(' '):
                return False
        return True

    def decode_bytes(self, ids):
        return b''.join(map(self._bytes_of, ids)) if self.joins_tokens else self.decode(ids).encode()

    def text_stream(self):
        if self.joins_tokens:
            return super().text_stream()
        from tokenizers.decoders import DecodeStream
        stream = DecodeStream(skip_special_tokens=False)
        return lambda token=None: '' if token is None else stream.step(self.backend, token) or ''

    def bytes_of_tokens(self):
        return super().bytes_of_tokens() if self.joins_tokens else None

    def _bytes_of(self, i):
        """A token's part of the text: b'' for an id without a token."""
        token = self.backend.id_to_token(i)
        if token is None:
            return b''
        if self.has_byte_tokens and re.fullmatch('<0x[0-9A-F]{2}>', token):
            return bytes([int(token[3:5], 16)])
        if token in self.special:
            return token.encode()
        if self.is_byte_level and all(char in UNICODE_TO_BYTE for char in token):
            return bytes(UNICODE_TO_BYTE[char] for char in token)
        return token.replace('▁', ' ').encode()

    def meta(self):
        return super().meta() | {'digest': self.digest, 'folder': self.folder}

    def hugging_face(self, block_size):
        return self.files


def _read(path):
    try:
        with open(path, encoding='utf-8') as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f'{path} is not UTF-8 ({error})') from None


def load_tokenizer(path):
    """The JsonTokenizer of a folder or file. A large one takes a second to read, so a file is read once."""
    path = os.path.join(path, JsonTokenizer.name) if os.path.isdir(path) else path
    return _load(path, os.stat(path).st_mtime_ns)


@functools.lru_cache(2)
def _load(path, modified):
    return JsonTokenizer(path)


def open_tokenizer(meta):
    """The JsonTokenizer of a meta, from its `folder`. ValueError if it is not there, or another one is."""
    advice = 'set tokenizer to a folder or tokenizer.json that has it'
    path = os.path.join(meta['folder'], JsonTokenizer.name)
    if not os.path.exists(path):
        raise ValueError(f'the tokenizer is not in {meta["folder"]}, where it was: {advice}')
    tokenizer = load_tokenizer(path)
    if tokenizer.digest != meta['digest']:
        raise ValueError(f'{path} has the digest {tokenizer.digest[:8]}, but the tokenizer had '
                         f'{meta["digest"][:8]}: {advice}')
    return tokenizer
