"""What a run starts from: a checkpoint, weights trained elsewhere, or a new model; and its tokenizer.

What reads weights trained elsewhere (kilogpt/weights) is imported where a run has such weights.
"""
import contextlib
import dataclasses
import json
import os

from data import storage
from data.datasets import REFERENCE_FILE, Source, find_dataset, fingerprint, join_tokenizers
from data.mixtures import parse_mixture
from kilogpt.keys import parse_init_from
from kilogpt.layers.options import ADAPTER_KEYS
from kilogpt.layers.precision import at_least_float32
from kilogpt.layers.rope import read_scaling
from kilogpt.parallel.dtensor import fill
from kilogpt.run import checkpoint
from model import GPTConfig


@dataclasses.dataclass
class Start:
    """What a run starts from. With adapters (LoRA), the tensors are those of their base, and the checkpoint, if any,
    holds the adapters.
    """
    source: str | None  # a checkpoint
    tensors: dict | None  # {name: LazyTensor} of weights from elsewhere
    saved: dict  # the state of the checkpoint, if the run resumes it; else {}
    model_args: dict  # the GPTConfig arguments
    meta: dict  # the dataset's meta.json, which names the model's tokenizer if the dataset does not name one
    base: dict | None  # what state.json keeps of the base of adapters

    def load(self, parallel, model, optimizer, cluster, seed):
        """Give a model that is laid out its values: loaded ones, or those of a new model, by the seed."""
        if self.tensors or not self.source:
            fill(parallel.named_parameters(), initial_values(self.tensors, model, seed))
        if self.source:
            checkpoint.load(self.source, cluster.islands.parameters(), optimizer if self.saved else None)
        cluster.watchdog.beat()


def find_start(keys, meta, cluster):
    """The Start of a run.

    ValueError if init_from does not exist, or if its model has another tokenizer than the dataset.
    keys: the values of train.py's keys; with the vocab_size of the data, they define a new model.
    meta: the dataset's meta.json. cluster: the run's Cluster, which has the checkpoints to resume.
    """
    cluster.watchdog.beat()
    resumes, weights = parse_init_from(keys['init_from'])
    fields = [field.name for field in dataclasses.fields(GPTConfig)]
    new_model = {name: keys[name] for name in fields if name in keys} | dict(vocab_size=meta['vocab_size'])
    block_size = new_model['block_size']
    source, tensors, saved, arguments, model_meta, base = None, None, {}, new_model, None, None
    if resumes:
        source, saved = cluster.islands.find_checkpoint()
        arguments, model_meta = saved.get('model', new_model), saved.get('tokenizer')
        base = saved.get('base')
    if keys['init_from'] == 'resume' and not source:
        raise ValueError(f'there is no checkpoint to resume in {cluster.out_dir}/ckpt: '
                         'set --out_dir, or --init_from=scratch')
    if source:
        weights = ''
    elif weights:
        with waits_for_hub(weights, cluster.watchdog):
            source, tensors, arguments, model_meta, base = find_initial(weights, cluster.processes)
        if keys['rope_scaling'] not in ('', arguments.get('rope_scaling')):
            arguments = with_longer_context(arguments, keys)
    longest = arguments['block_size']
    if block_size > longest:
        extend = ''
        if arguments['pos'] == 'rope' and weights:
            extend = (f", or extend it with --rope_scaling='yarn factor={-(-block_size // longest)} "
                      f"original_max_position_embeddings={longest}'")
        raise ValueError(f'block_size is {block_size}, but the model of {source or weights} has only '
                         f'{longest} positions: set --block_size={longest} or less{extend}')
    meta = join_tokenizers(model_meta, source or weights, meta, keys['dataset'])
    if keys['loss'] == 'dpo' and not saved:
        check_reference(keys, weights, meta)
    if base:
        from kilogpt.weights.importing import open_base
        with waits_for_hub(base['source'], cluster.watchdog):
            tensors = open_base(base, source)
        if keys['lora_rank'] not in (0, arguments['lora_rank']):
            raise ValueError(f'lora_rank is {keys["lora_rank"]}, but {source} has adapters of rank '
                             f'{arguments["lora_rank"]}: set that, or start from its weights as '
                             'python -m kilogpt.convert export writes them')
    elif keys['lora_rank'] and not saved:
        source, tensors, arguments, base = with_adapters(source, tensors, arguments, keys, weights)
    cluster.watchdog.beat()
    return Start(source, tensors, saved, arguments | dict(dropout=keys['dropout']), meta, base)


def waits_for_hub(source, watchdog):
    """A context in which weights may be downloaded, however long that takes."""
    from data import hub
    return watchdog.suspended() if hub.is_name(source) else contextlib.nullcontext()


def check_reference(keys, weights, meta):
    """Raise ValueError unless a dataset of pairs has the log-probabilities of the weights that training starts from.

    keys, meta: as in `find_start`. weights: those that init_from names, or ''.
    """
    dataset = keys['dataset']
    if not weights:
        raise ValueError(f'init_from is {keys["init_from"]!r}, but loss=dpo needs a trained model: set init_from to '
                         'its weights')
    if len(parse_mixture(dataset)) > 1 or keys['max_epochs'] or keys['mixture_phases']:
        raise ValueError(f'dataset is {dataset!r}, max_epochs {keys["max_epochs"]} and mixture_phases '
                         f'{keys["mixture_phases"]!r}, but loss=dpo takes one dataset as it is: prepare all pairs '
                         'together, and leave the other two keys out')
    if not meta.get('pairs'):
        raise ValueError(f'loss is dpo, but dataset {dataset!r} does not have pairs of answers: make some with '
                         'data/preferences/prepare.py, or set loss to cross_entropy')
    folder, command = find_dataset(dataset), f'python -m kilogpt.evaluate {weights} --reference={dataset}'
    path = os.path.join(folder, REFERENCE_FILE)
    if not storage.exists(path):
        raise ValueError(f'{folder} does not have the log-probabilities of a reference: run {command}')
    from kilogpt.weights.importing import describe_weights
    reference, start = json.loads(storage.read(path)), describe_weights(weights)
    if reference['digest'] != start['digest']:
        raise ValueError(f'the reference in {folder} is {reference["source"]} (digest {reference["digest"]}), but '
                         f'training starts from {start["source"]} (digest {start["digest"]}): set init_from to '
                         f'the former, or run {command}')
    if reference['shards'] != fingerprint({dataset: Source(folder, {})}):
        raise ValueError(f'the token files in {folder} have changed since the reference was computed: run '
                         f'{command}')


def with_adapters(source, tensors, arguments, keys, weights):
    """What a Start to which the keys add adapters has: (None, tensors, GPTConfig arguments, base)."""
    if not source and not tensors:
        raise ValueError(f'lora_rank is {keys["lora_rank"]}, but adapters need a trained model beside them: '
                         'set init_from to its weights, or lora_rank to 0')
    from kilogpt.weights.checkpoint_tensors import open_weights
    from kilogpt.weights.importing import describe_base
    tensors = tensors or open_weights(source, GPTConfig(**arguments))
    arguments = arguments | {key: keys[key] for key in ADAPTER_KEYS}
    return None, tensors, arguments, describe_base(source or weights, tensors)


def with_longer_context(arguments, keys):
    """The GPTConfig arguments of a model whose context the keys rope_scaling and block_size extend.

    ValueError if the scaling does not reach block_size.
    """
    _, scaling = read_scaling(keys['rope_scaling'])
    original = scaling.get('original_max_position_embeddings', arguments['block_size'])
    longest, block_size = int(original * scaling.get('factor', 1)), keys['block_size']
    if block_size > longest:
        raise ValueError(f'block_size is {block_size}, but rope_scaling={keys["rope_scaling"]!r} reaches '
                         f'only {longest} positions: set a larger factor, or block_size to {longest} or less')
    return arguments | dict(rope_scaling=keys['rope_scaling'],
                            block_size=max(block_size, arguments['block_size']))


def initial_values(tensors, model, seed):
    """The function for parallel.dtensor.fill that returns loaded weights, or the values of a new model.

    tensors: of a Start.
    """
    scales = {name for name, _ in model.named_parameters() if name.endswith('.weight_scale')}

    def value(name, shape, rows):
        weight, is_scale, _ = name.partition('_scale')
        if f'{weight}_scale' in scales:
            from kilogpt.layers.lora import quantize
            quantized, scale = quantize(at_least_float32(tensors[weight][rows]))
            return scale if is_scale else quantized
        if tensors and name in tensors:
            from kilogpt.weights.tensors import pad_rows
            return pad_rows(tensors[name], shape, rows)
        return model.initial_value(name, shape, seed, rows)  # adapters beside loaded weights, too

    return value


def find_initial(init_from, processes):
    """The weights of a new run: (checkpoint, tensors, GPTConfig arguments, tokenizer meta, base).

    init_from: a run's folder, for its best checkpoint, or a checkpoint (tensors are None), or a source of
    read_weights, for tensors ({name: LazyTensor}; checkpoint is None). Raises the errors of read_weights, and
    ValueError for a damaged checkpoint.
    """
    path = processes.share(checkpoint.choose(init_from) if processes.is_main else None)
    if not path:
        from kilogpt.weights.importing import read_weights
        arguments, tensors, meta = read_weights(init_from)
        return None, tensors, arguments, meta, None
    if problem := checkpoint.damage_on_any(path, processes):
        raise ValueError(f'{path} is damaged ({problem}): delete it, and the next best one is used')
    state = checkpoint.read_state(path)
    return path, None, state['model'], state['tokenizer'], state.get('base')
