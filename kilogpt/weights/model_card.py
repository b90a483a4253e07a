"""The README.md of an exported folder, which the Hugging Face hub shows as the page of the model."""
import math
import os
import subprocess

from data import hub
from data.tokens.tokenizer import describe_tokenizer
from kilogpt.keys import initial_weights
from kilogpt.weights.checkpoint_tensors import expected_shapes

HOW_TO_LOAD = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(FOLDER)
```
"""


def write_model_card(folder, config, state, entries, dtype):
    """Write the README.md of an exported folder.

    config: the GPTConfig. state: the checkpoint's state.json. entries: those of config.json.
    dtype: the name of the weights' dtype.
    """
    name = os.path.basename(os.path.abspath(folder))
    kind = entries['architectures'][0]
    # The hub reads the lines between the dashes. The license is not known, and so is left out.
    text = ('---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n'
            f'- {entries["model_type"]}\n- kilogpt\n---\n\n')
    text += f'# {name}\n\n{describe_model(config, kind, dtype)}\n\n'
    facts = [*describe_training(state), *describe_code()]
    text += ''.join(f'- {fact}\n' for fact in facts)
    load = HOW_TO_LOAD.replace('FOLDER', repr(name))
    if describe_tokenizer(state['tokenizer']):
        load = load.replace('model =', f'tokenizer = AutoTokenizer.from_pretrained({name!r})\nmodel =')
    else:
        load = load.replace(', AutoTokenizer', '')
    text += f'\nTo load this folder:\n\n{load}'
    with open(os.path.join(folder, 'README.md'), 'w', encoding='utf-8') as file:
        file.write(text)


HOW_TO_LOAD_ADAPTERS = """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), FOLDER)
```
"""


def write_adapter_card(folder, config, state, base):
    """Write the README.md of exported adapters. base: their base's folder or name. Others: as in write_model_card."""
    name = os.path.basename(os.path.abspath(folder))
    text = f'---\nlibrary_name: peft\ntags:\n- lora\n- kilogpt\n---\n\n# {name}\n\n'
    text += f'Adapters (LoRA) of rank {config.lora_rank} for the linears {config.lora_targets} of {base}.\n\n'
    text += ''.join(f'- {fact}\n' for fact in [*describe_training(state), *describe_code()])
    load = HOW_TO_LOAD_ADAPTERS.replace('BASE', repr(base)).replace('FOLDER', repr(name))
    text += f'\nTo load this folder:\n\n{load}'
    with open(os.path.join(folder, 'README.md'), 'w', encoding='utf-8') as file:
        file.write(text)


def describe_model(config, kind, dtype):
    """One sentence: the number of parameters and the shape."""
    parameters = sum(math.prod(shape) for shape in expected_shapes(config).values())
    experts = ''
    if config.mlp == 'moe':
        experts = f', {config.n_experts} experts of which a token goes to {config.n_active_experts}'
    return (f'A language model in the form of {kind}: {parameters:,} parameters in {dtype}, {config.n_layer} '
            f'layers, width {config.n_embd}, {config.n_head} attention heads ({config.n_kv_head} for keys '
            f'and values){experts}, a vocabulary of {config.vocab_size:,} tokens, and a context of '
            f'{config.block_size:,} tokens.')


def describe_training(state):
    """Sentences about the data, the losses and the start of the run, as far as the checkpoint knows them."""
    run = state['config']
    if run.get('dataset'):
        yield f'Data: the dataset {os.path.basename(os.path.normpath(run["dataset"]))} of the run.'
    if state['iteration']:
        yield f'Training: {state["iteration"]:,} iterations, {state["tokens"]:,} tokens.'
    if state['val_loss'] is not None:
        yield (f'Loss on the validation split: {state["val_loss"]:.4f} nats per token; the best of the run '
               f'until then: {state["best_val_loss"]:.4f}.')
    if start := initial_weights(run.get('init_from', 'scratch')):
        name = start if hub.is_name(start) else os.path.basename(os.path.normpath(start))
        yield f'The run started from the weights of {name}.'
    if description := describe_tokenizer(state['tokenizer']):
        yield f'Tokenizer: {description}.'


def describe_code():
    """The commit of the code that writes the folder; nothing if git does not know it."""
    try:
        done = subprocess.run(['git', 'rev-parse', 'HEAD'], cwd=os.path.dirname(os.path.abspath(__file__)),
                              capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return
    if done.returncode == 0:
        yield f'Exported by kiloGPT, commit {done.stdout.strip()}.'
