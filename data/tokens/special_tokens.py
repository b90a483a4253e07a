"""The special tokens of a folder of weights: their roles, and those that its tokenizer.json does not have.

tokenizer_config.json, special_tokens_map.json and added_tokens.json may name more. They are read as
`TokenizersBackend` of transformers 5.24 reads them, with one exception: a token that they add for padding alone
stays text, since most models to whose files it was added have no row for it, and no text of a GPT has padding.
"""
import json

CONFIG, MAP, ADDED = 'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json'
STATED = 'added_tokens_decoder'  # entry of CONFIG; with it, transformers reads neither MAP nor ADDED
EXTRA = 'extra_special_tokens', 'additional_special_tokens'  # the second is the older name
ROLES = [f'{name}_token' for name in ('bos', 'eos', 'unk', 'sep', 'pad', 'cls', 'mask')]


def read_json(files, name):
    """The JSON object of a tokenizer's file; {} without it. files: {name: text}."""
    content = json.loads(files.get(name, '{}'))
    return content if isinstance(content, dict) else {}


def roles_of(files):
    """{role: text of its token}, such as {'eos_token': '</s>'}, also roles that only this model has."""
    return {role: _text(entry) for role, entry in _named(files)[0].items()}


def add_tokens(backend, files, own):
    """Add to a `tokenizers.Tokenizer` the tokens that its files name beside tokenizer.json.

    own: the added_tokens of tokenizer.json.
    """
    from tokenizers import AddedToken
    roles, extra = _named(files)
    pad = _text(roles.get('pad_token'))
    others = {_text(entry) for role, entry in roles.items() if role != 'pad_token'}.union(map(_text, extra))
    leaves_out_pad = backend.token_to_id(pad or '') is None and pad not in others
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    tokens = [token for _, token in sorted(_stated_tokens(files, own).items())]
    known.update(token.content for token in tokens)
    named = []
    for entry in (*roles.values(), *extra):
        if _text(entry) not in known and entry not in named:  # of two with the same text the second counts
            named.append(entry)
            flags = {key: value for key, value in entry.items() if key != '__type'} if isinstance(entry, dict) else {}
            tokens.append(AddedToken(**{'content': _text(entry), 'special': True} | flags))
    for token in tokens:
        token.special |= token.content in map(_text, roles.values())
    backend.add_tokens([token for token in tokens if not (leaves_out_pad and token.content == pad)])


def _named(files):
    """({role: entry}, [entry]): the tokens with a role, and the others. An entry is a text or the token's entries."""
    config = read_json(files, CONFIG)
    more = {} if STATED in config else read_json(files, MAP)
    extra = [entries.get(key) for entries in (config, more) for key in EXTRA]
    roles = {key: (config | more).get(key) for key in ROLES}
    roles |= {key: entry for key, entry in (more | config).items() if key.endswith('_token') and key not in ROLES}
    for named in extra:
        roles |= named if isinstance(named, dict) else {}
    roles = {key: entry for key, entry in roles.items() if isinstance(_text(entry), str)}
    return roles, [token for tokens in extra if isinstance(tokens, list) for token in tokens]


def _text(entry):
    return entry.get('content') if isinstance(entry, dict) else entry


def _stated_tokens(files, own):
    """{id: AddedToken} of the files. `tokenizers` ignores the id of a token that is new."""
    from tokenizers import AddedToken
    config = read_json(files, CONFIG)
    if STATED in config:
        return {int(i): AddedToken(**entry) for i, entry in config[STATED].items()}
    roles, extra = _named(files)
    special = {_text(entry) for role, entry in roles.items() if role in ROLES}.union(map(_text, extra))
    stated = {}
    for text, i in read_json(files, ADDED).items():
        stated[i] = AddedToken(text, normalized=text not in special, special=text in special)
    for entry in own:
        stated[entry['id']] = AddedToken(**{key: value for key, value in entry.items() if key != 'id'})
    return stated
