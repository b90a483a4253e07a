"""Data: documents, mixtures, pairs of answers."""
from kilogpt.keys.checks import check_at_least, check_choice

documents = 'stream'  # 'stream' = one text; 'mask' = attention within documents; 'pack' = whole ones in rows
loss = 'cross_entropy'  # 'cross_entropy' of tokens; 'dpo' of pairs; 'distill' of a teacher; 'rl' of rewards
dpo_beta = 0.1  # with loss='dpo': how much a margin counts; smaller values lead further from the reference
mixture_phases = ''  # other weights from a number of tokens on: '5e9: web:0.4, code:0.6; 9e9: code:1'
max_epochs = 0  # epochs of each source, after which the others share its part of a mixture; 0 = any number
data_cache_gb = 100.0  # of a dataset in object storage, keep up to so much on this machine; 0 = read from there
accept_new_data = False  # resume although the files of the dataset have changed since the checkpoint


def check(config):
    """Raise ValueError for values that no run can have."""
    check_at_least(config, 0, 'max_epochs', 'data_cache_gb')
    check_choice(config, 'documents', 'stream', 'mask', 'pack')
    check_choice(config, 'loss', 'cross_entropy', 'dpo', 'distill', 'rl')
    if config['documents'] != 'stream' and config['rope_scaling'].startswith('dynamic'):
        raise ValueError(f'rope_scaling is {config["rope_scaling"]!r}, which depends on the length of the whole '
                         f'sequence, but with documents={config["documents"]} a sequence has several texts: set '
                         'documents to stream, or rope_scaling to yarn')
    if config['loss'] == 'dpo':
        if config['documents'] != 'pack':
            raise ValueError(f'documents is {config["documents"]!r}, but loss=dpo needs both answers of a pair in one '
                             'row: set documents to pack')
        if not config['dpo_beta'] > 0:
            raise ValueError(f'dpo_beta is {config["dpo_beta"]}: it must be above 0')
