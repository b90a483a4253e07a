"""The families of models in `transformers`: entries of config.json and names of tensors."""
from kilogpt.convert.hugging_face import (
    arguments_from_hugging_face, gpt2_config, keys_without_standard_form, llama_config, tensors_from_gpt2,
    tensors_from_llama, tensors_to_gpt2, tensors_to_llama)

arguments_of = arguments_from_hugging_face


def to_ours(tensors, theirs, arguments):
    """{our name: Stored} from {their name: Stored}. theirs: config.json; arguments: those of GPTConfig."""
    if theirs['model_type'] == 'gpt2':
        return tensors_from_gpt2(tensors)
    return tensors_from_llama(tensors, theirs['model_type'], arguments.get('router_balance'))


def entries_of(config):
    """The entries of config.json for a GPTConfig. ValueError if no family can represent it."""
    if unknown := keys_without_standard_form(config):
        raise ValueError(f'the model has {", ".join(unknown)}, which no standard form has: use the '
                         'checkpoint with our own sample.py and train.py')
    return gpt2_config(config) if config.pos == 'learned' else llama_config(config)


def to_theirs(tensors, entries, config):
    """{their name: Stored} from {our name: Stored}. entries: what `entries_of` returned."""
    return tensors_to_gpt2(tensors) if config.pos == 'learned' else tensors_to_llama(tensors, config)
