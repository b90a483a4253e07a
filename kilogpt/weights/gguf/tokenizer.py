"""The tokenizer of a GGUF file as a tokenizer.json, and the inverse. The library `tokenizers` does the work.

llama.cpp knows two kinds that matter here: 'gpt2', a BPE over bytes whose pre-tokenizer has a name, and
'llama', SentencePiece's BPE over characters, with bytes for unknown ones. The source for regular expressions
and for what follows from a name is llama.cpp's llama-vocab.cpp.
"""
import json
import os
import re

from data.tokens import BYTE_TO_UNICODE
from data.tokens.bpe import PATTERNS
from data.tokens.chat_template import find_template
from data.tokens.special_tokens import roles_of

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PUNCTUATION = r' ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
UPPER, LOWER = r'[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]', r'[\p{Ll}\p{Lm}\p{Lo}\p{M}]'
WORD = r'[^\r\n\p{L}\p{N}]?'
LLAMA3 = rf'{CONTRACTIONS}|{WORD}\p{{L}}+|\p{{N}}{{1,3}}|{PUNCTUATION}'
QWEN2 = rf'{CONTRACTIONS}|{WORD}\p{{L}}+|\p{{N}}|{PUNCTUATION}'
QWEN35 = (rf'{CONTRACTIONS}|{WORD}[\p{{L}}\p{{M}}]+|\p{{N}}|'
          r' ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+')
GPT4O = (rf'{WORD}{UPPER}*{LOWER}+{CONTRACTIONS}?|{WORD}{UPPER}+{LOWER}*{CONTRACTIONS}?|\p{{N}}{{1,3}}|'
         r' ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+')
TEKKEN = (rf'{WORD}{UPPER}*{LOWER}+|{WORD}{UPPER}+{LOWER}*|\p{{N}}|'
          r' ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+')
HAN = '[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+'
# Cased letters, without escapes some would be composed characters that look the same.
DEEPSEEK_LETTERS = (
    'A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376'
    '\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-'
    '\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b'
    '\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59'
    '\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3'
    '\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d'
    '\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00'
    '-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787'
    '\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f'
    '\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-'
    '\U000118df\U0001e900-\U0001e943')
DEEPSEEK_MARKS = '!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002'
DEEPSEEK3 = (r'[!"#$%&' "'" r'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|'
             r' ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+')
# {tokenizer.ggml.pre: regular expressions that split a text, one after the other}. If a tokenizer.json splits
# as several do, the first name is written.
PRE_TOKENIZERS = {
    'gpt-2': [PATTERNS['gpt2']], 'llama-bpe': [LLAMA3], 'qwen2': [QWEN2], 'gpt-4o': [GPT4O],
    'tekken': [TEKKEN], 'smollm': [r'\p{N}', PATTERNS['gpt2']], 'qwen35': [QWEN35],
    'deepseek-llm': [r'[\r\n]', rf'\s?[{DEEPSEEK_LETTERS}]+', rf'\s?[{DEEPSEEK_MARKS}]+', r'\s+$', HAN,
                     r'\p{N}+'],
    'deepseek-coder': [r'[\r\n]', r'\s?\p{L}+', r'\s?\p{P}+', HAN, r'\p{N}'],
    'deepseek-v3': [r'\p{N}{1,3}', '[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+', DEEPSEEK3],
    'falcon': [r'[\p{P}\$\+<=>\^~\|`]+', PATTERNS['gpt2'], '[0-9][0-9][0-9]'],
    'default': [r'[\p{P}\$\+<=>\^~\|]+', PATTERNS['gpt2'], r'\p{N}+', '[0-9][0-9][0-9]']}
SAME_SPLIT = {
    'gpt-2': 'phi-2 mpt olmo jais trillion gigachat exaone4 mellum granite-docling',
    'llama-bpe': 'llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2 dbrx smaug-bpe chatglm-bpe glm4',
    'qwen2': 'deepseek-r1-qwen megrez stablelm2 hunyuan grok-2', 'gpt-4o': 'llama4 kanana2 minimax-m2',
    'smollm': 'starcoder refact command-r codeshell exaone minerva-7b'}
for name, others in SAME_SPLIT.items():
    PRE_TOKENIZERS |= dict.fromkeys(others.split(), PRE_TOKENIZERS[name])
# Names for which llama.cpp puts <s> before a text unless the file says otherwise.
WITH_BOS = {'llama-bpe', 'llama3', 'llama-v3', 'falcon3', 'falcon-h1', 'pixtral', 'lfm2'}
# Names for which a word that is a token becomes this token, whatever its merges.
IGNORE_MERGES = WITH_BOS | {'tekken', 'glm4'}
NORMALIZED = {'qwen2'}  # The tokenizers of these models apply Unicode's NFC first.
# A text that each of PRE_TOKENIZERS splits in another way.
PROBE = ("It's HE'S 1234567 hello  World\n\n \n x_y=z;\r\n/a //b\tÄÖü naïve日本語テスト가나 e\u0301a नमस्ते"
         " (abc) fooBar FOObar don'T 12 $5+5 «q» !!!\n   end ")
# Ends of a turn in a conversation, at which llama.cpp stops besides the end-of-text token.
TURN_ENDS = '<|im_end|>', '<|eot_id|>', '<|end|>', '<end_of_turn>', '<|eot|>'
SPECIAL = dict(bos='bos', eos='eos', unk='unknown', pad='padding')  # {in tokenizer_config.json: in GGUF}
PLACES = dict(bos='before', eos='after')
UNUSED_NAME = re.compile(r'\[PAD\d+\]')
NEVER = BYTE_TO_UNICODE[255]  # a byte that no UTF-8 has


# --- from a file --------------------------------------------------------------------------------------------

def tokenizer_from_gguf(metadata):
    """{file name: text} of a tokenizer.json and tokenizer_config.json, from {key: value} of a GGUF file.

    None for a file that has no tokenizer. ValueError if the kind of the tokenizer is not supported.
    """
    own = {key.removeprefix('tokenizer.ggml.'): value for key, value in metadata.items()
           if key.startswith('tokenizer.ggml.')}
    kind = own.get('model', 'no_vocab')
    if kind in ('no_vocab', 'none'):
        return None
    if kind not in ('gpt2', 'llama'):
        raise ValueError(f"its tokenizer is {kind!r}, but only 'gpt2' (BPE over bytes) and 'llama' "
                         '(SentencePiece) are supported')
    tokens = own['tokens']
    types = own.get('token_type', [NORMAL] * len(tokens))
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ValueError(f'its {len(tokens)} tokens have {len(types)} types and {len(set(tokens))} names')
    names = {name: tokens[own[f'{key}_token_id']] for name, key in SPECIAL.items()
             if own.get(f'{key}_token_id', len(tokens)) < len(tokens)}
    build = build_byte_level if kind == 'gpt2' else build_sentence_piece
    backend = build(own, tokens, types)
    add_special_tokens(backend, tokens, types)
    add_bos = own.get('add_bos_token', kind == 'llama' or own.get('pre') in WITH_BOS)
    add_eos = own.get('add_eos_token', False)
    for name, is_added in dict(bos=add_bos, eos=add_eos).items():  # llama.cpp takes an id that is usual for the kind
        if is_added and name not in names:
            raise ValueError(f'its tokenizer adds {name} (add_{name}_token), but has no {name}_token_id: add the id to its '
                             'metadata')
    add_template(backend, kind, names, add_bos, add_eos)
    config = dict(tokenizer_class='PreTrainedTokenizerFast', clean_up_tokenization_spaces=False)
    config |= {f'{name}_token': token for name, token in names.items()}
    if 'tokenizer.chat_template' in metadata:
        config['chat_template'] = metadata['tokenizer.chat_template']
    return {'tokenizer.json': backend.to_str(),
            'tokenizer_config.json': json.dumps(config, ensure_ascii=False, indent=1)}


def build_byte_level(own, tokens, types):
    """The `tokenizers.Tokenizer` of a BPE over bytes, without its special tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    pre = own.get('pre', 'default')
    if pre not in PRE_TOKENIZERS:
        raise ValueError(f'its tokenizer.ggml.pre is {pre!r}, but only {", ".join(PRE_TOKENIZERS)} are '
                         'supported')
    vocabulary = {token: i for i, token in enumerate(tokens)
                  if types[i] != UNUSED or not UNUSED_NAME.fullmatch(token)}
    merges = []
    for merge in own.get('merges', []):
        space = merge.index(' ', 1)  # a token can begin with a space
        pair = merge[:space], merge[space + 1:]
        if ''.join(pair) in vocabulary:
            merges.append(pair)
    model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in IGNORE_MERGES)
    backend = Tokenizer(model)
    backend.pre_tokenizer = build_pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    if pre in NORMALIZED:
        backend.normalizer = normalizers.NFC()
    return backend


def build_pre_tokenizer(pre):
    from tokenizers import Regex, pre_tokenizers
    steps = [pre_tokenizers.Split(Regex(pattern), 'isolated') for pattern in PRE_TOKENIZERS[pre]]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


def build_sentence_piece(own, tokens, types):
    """The `tokenizers.Tokenizer` of a BPE of SentencePiece, whose merges follow from its scores.

    Two neighbouring tokens are merged if their concatenation is a token, in the order of the scores. Several
    spaces are a user-defined token in Gemma, and such tokens do not have scores of their own. There, the order
    of the tokens is the order of the merges.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers
    pieces, by_order = [], False
    for i, token in enumerate(tokens):
        if types[i] == USER_DEFINED and len(token) > 1 and not token.strip(' '):
            pieces.append('▁' * len(token))
            types[i], by_order = NORMAL, True
        else:
            pieces.append(token)
    tokens[:] = pieces
    scores = own.get('scores', [])
    if by_order or len(scores) != len(tokens):
        scores = range(0, -len(tokens), -1)
    normal = {token: i for i, token in enumerate(tokens) if types[i] == NORMAL}
    merges = []
    for token, i in normal.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                merges.append((-scores[i], -len(left), left, right))
    merges.sort(key=lambda merge: merge[:2])
    unknown = own.get('unknown_token_id', 0)
    vocabulary = {token: i for i, token in enumerate(tokens)
                  if types[i] != UNUSED or not UNUSED_NAME.fullmatch(token)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[merge[2:] for merge in merges], fuse_unk=True,
                                   byte_fallback=BYTE in types, unk_token=tokens[unknown]))
    steps = [normalizers.Replace(' ', '▁')]
    decoding = [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()]
    if own.get('add_space_prefix', True):
        steps.insert(0, normalizers.Prepend('▁'))
        decoding.append(decoders.Strip(' ', 1, 0))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(decoding)
    return backend


def add_special_tokens(backend, tokens, types):
    from tokenizers import AddedToken
    for i, token in enumerate(tokens):
        if types[i] == CONTROL:
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif types[i] == USER_DEFINED:
            backend.add_tokens([AddedToken(token, normalized=False)])


def add_template(backend, kind, names, add_bos, add_eos):
    """Let the tokenizer put <s> before a text, or </s> after a text, if the model expects them."""
    from tokenizers import processors
    before = [names['bos']] if add_bos and 'bos' in names else []
    after = [names['eos']] if add_eos and 'eos' in names else []
    if before or after:
        special = [(token, backend.token_to_id(token)) for token in {*before, *after}]
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, '$A', *after], pair=[*before, '$A', *after, *before, '$B:1', *after],
            special_tokens=special)
    elif kind == 'gpt2':
        backend.post_processor = processors.ByteLevel(trim_offsets=False)


# --- to a file ----------------------------------------------------------------------------------------------

def tokenizer_to_gguf(folder, vocab_size):
    """{key: value} of a GGUF file for the tokenizer.json in a folder.

    folder: None for a model without a tokenizer. vocab_size: rows of the token table. Rows without a token
    get an unused one. ValueError if llama.cpp does not have such a tokenizer.
    """
    if folder is None:
        return {'tokenizer.ggml.model': 'no_vocab'}
    from data.tokens.json_tokenizer import JsonTokenizer
    tokenizer = JsonTokenizer(folder)
    backend, content = tokenizer.backend, json.loads(tokenizer.files['tokenizer.json'])
    path = os.path.join(folder, 'tokenizer.json')
    backend.encode_special_tokens = False
    if content['model']['type'] != 'BPE' or not (tokenizer.is_byte_level or tokenizer.has_byte_tokens):
        raise ValueError(f'{path} is {content["model"]["type"]} without bytes, but llama.cpp needs BPE over '
                         "bytes, or SentencePiece's BPE with bytes for unknown characters")
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(f'{path} has {tokenizer.vocab_size} tokens, but the model has {vocab_size}')
    tokens = [f'[PAD{i}]' for i in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for token, i in backend.get_vocab(with_added_tokens=True).items():
        tokens[i] = token
        is_byte = tokenizer.has_byte_tokens and re.fullmatch('<0x[0-9A-F]{2}>', token)
        types[i] = BYTE if is_byte else NORMAL
    for i, token in backend.get_added_tokens_decoder().items():
        types[i] = CONTROL if token.special else USER_DEFINED
    merges = [merge if isinstance(merge, list) else merge.split(' ') for merge in content['model']['merges']]
    if tokenizer.has_byte_tokens:
        found = sentence_piece_to_gguf(backend, content, tokens, types, merges)
    else:
        found = byte_level_to_gguf(path, backend, content, merges)
    found |= {'tokens': tokens, 'token_type': types}
    found |= special_to_gguf(tokenizer, tokens)
    found = {f'tokenizer.ggml.{key}': value for key, value in found.items()}
    if template := find_template(tokenizer.files):
        found['tokenizer.chat_template'] = template
    return found


def byte_level_to_gguf(path, backend, content, merges):
    normalizer = (content.get('normalizer') or {}).get('type')
    if normalizer not in (None, 'NFC'):
        raise ValueError(f'{path} has the normalizer {normalizer}, which llama.cpp does not have')
    # llama.cpp refuses a file without merges. This merge cannot occur in a text.
    merges = merges or [[NEVER, NEVER]]
    pre = 'gpt-2' if merges[0] == [NEVER, NEVER] else find_pre_tokenizer(path, backend, content)
    return dict(model='gpt2', pre=pre, merges=[' '.join(merge) for merge in merges])


def find_pre_tokenizer(path, backend, content):
    """The first of PRE_TOKENIZERS that splits the probe as a tokenizer.json does. ValueError if none does."""
    ignores_merges = content['model'].get('ignore_merges', False)
    if backend.pre_tokenizer is None:
        raise ValueError(f'{path} has no pre_tokenizer, and llama.cpp has no name for that')
    split = backend.pre_tokenizer.pre_tokenize_str(PROBE)
    same = [name for name in PRE_TOKENIZERS if build_pre_tokenizer(name).pre_tokenize_str(PROBE) == split]
    if not same:
        raise ValueError(f'{path} splits words in a way for which llama.cpp has no name that is supported: '
                         f'use a pre_tokenizer like that of {", ".join(PRE_TOKENIZERS)}')
    best = [name for name in same if (name in IGNORE_MERGES) == ignores_merges]
    return (best or same)[0]


def sentence_piece_to_gguf(backend, content, tokens, types, merges):
    """Scores that let llama.cpp merge in the order of a tokenizer.json: the later its merge, the lower."""
    order = {}
    for merge in merges:
        order.setdefault(''.join(merge), -float(len(order)) - 1)
    for i, token in enumerate(tokens):
        if types[i] == USER_DEFINED:
            tokens[i] = token.replace('▁', ' ')
        if token == content['model'].get('unk_token'):
            types[i] = UNKNOWN
    scores = [order.get(token, 0.0) for token in tokens]
    first = backend.encode('a', add_special_tokens=False).tokens[0]
    return dict(model='llama', pre='default', scores=scores, add_space_prefix=first.startswith('▁'))


def special_to_gguf(tokenizer, tokens):
    """The ids of special tokens by their roles, and whether a text begins with <s> and ends with </s>."""
    backend = tokenizer.backend
    roles = roles_of(tokenizer.files)
    found = {}
    for name, key in SPECIAL.items():
        i = backend.token_to_id(roles.get(f'{name}_token', ''))
        if i is not None:
            found[f'{key}_token_id'] = i
    ids, text = backend.encode('a').ids, backend.encode('a', add_special_tokens=False).ids
    n_before = len(tokenizer.begin_ids)
    for name, added in dict(bos=ids[:n_before], eos=ids[n_before + len(text):]).items():
        if added:
            found.setdefault(f'{name}_token_id', added[0])
        if f'{name}_token_id' in found:
            found[f'add_{name}_token'] = added == [found[f'{name}_token_id']]
        if added and not found[f'add_{name}_token']:
            print(f'warning: the tokenizer puts {" ".join(tokens[i] for i in added)} {PLACES[name]} each text, but '
                  f'llama.cpp can only put the {name}_token there')
    strips = [token.content for token in backend.get_added_tokens_decoder().values() if token.lstrip or token.rstrip]
    if strips:
        print(f'warning: {", ".join(strips)} swallow the white space beside them, which a GGUF file cannot say')
    turn_end = next((tokens.index(token) for token in TURN_ENDS if token in tokens), None)
    if turn_end is not None:
        found['eot_token_id'] = turn_end
    return found
