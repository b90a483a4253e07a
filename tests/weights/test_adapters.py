"""Adapters in other forms: merged in a folder for transformers, and in the files of PEFT, both ways."""
import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import newest_state, run_forked
from kilogpt.loading import load_model
from kilogpt.weights.peft import READ, read_entries

TOKENS = torch.arange(24).view(2, 12) % 65
LLAMA = '--pos=rope --norm=rmsnorm --mlp=swiglu --n_kv_head=2'
FAMILIES = dict(llama=LLAMA, gpt2='--bias --mlp=gelu_tanh', phi3=LLAMA,
                gpt_neox='--bias --pos=rope --tie_weights=False --parallel_block',
                deepseek_v3='--pos=rope --norm=rmsnorm --kv_latent=16 --q_latent=12 --rope_width=4 --value_width=6 '
                            '--mlp=moe --n_experts=4 --expert_hidden=16 --router=sigmoid --n_shared_experts=1')


@pytest.fixture(scope='module')
def tuned(train, tmp_path_factory):
    """Function (family) -> (a folder of transformers, the folder of a run with adapters for it)."""
    done = {}

    def get(family):
        if family not in done:
            run = train(*FAMILIES[family].split(), '--max_iters=6', '--eval_interval=6')
            folder = tmp_path_factory.mktemp('base') / family
            run_forked('kilogpt.convert', 'export', run.out_dir, folder, f'--family={family}')
            targets = 'attention' if '--mlp=moe' in FAMILIES[family] else 'all'
            adapted = train(f'--init_from={folder}', f'--lora_targets={targets}', '--lora_rank=3', '--lora_alpha=12', '--lora_rank_stabilised',
                            '--learning_rate=3e-2', '--max_iters=6', '--eval_interval=6')
            done[family] = folder, adapted.out_dir
        return done[family]

    return get


@torch.no_grad()
def logits_of(source):
    """The logits of our model, or of one of transformers or peft."""
    if isinstance(source, torch.nn.Module):
        return source.eval()(TOKENS).logits
    model, *_ = load_model(str(source))
    return model(TOKENS)


def assert_equal(logits, others):
    torch.testing.assert_close(logits[..., :65], others[..., :65], rtol=0, atol=1e-5)


def test_merged_export_and_adapters_in_files_of_peft_are_the_same_model(tuned, tmp_path):
    base, run = tuned('llama')
    run_forked('kilogpt.convert', 'export', run, tmp_path / 'merged')
    run_forked('kilogpt.convert', 'export', run, tmp_path / 'adapter', '--adapter')
    run_forked('kilogpt.convert', 'import', tmp_path / 'adapter', tmp_path / 'imported')
    ours = logits_of(run)
    assert (ours - logits_of(base)).abs().max() > 1e-2
    for source in (tmp_path / 'merged', tmp_path / 'imported'):
        assert_equal(logits_of(source), ours)
    assert newest_state(tmp_path / 'imported')['base'] == newest_state(run)['base']
    entries = json.loads((tmp_path / 'adapter' / 'adapter_config.json').read_text())
    assert entries['base_model_name_or_path'] == str(base) and entries['use_rslora']
    assert entries['target_modules'] == ['mlp.down_proj', 'mlp.gate_proj', 'mlp.up_proj', 'self_attn.k_proj',
                                         'self_attn.o_proj', 'self_attn.q_proj', 'self_attn.v_proj']


def test_base_that_others_cannot_load_is_exported_too(train, dataset, tuned, tmp_path):
    """A run whose weights came from a GGUF file. The folder has the tokenizer, and a page that says how to load it."""
    base, _ = tuned('llama')
    run_forked('kilogpt.convert', 'import', base, tmp_path / 'base-run')
    run_forked('kilogpt.convert', 'export', tmp_path / 'base-run', tmp_path / 'base.gguf')
    run_forked('kilogpt.convert', 'import', tmp_path / 'base.gguf', tmp_path / 'from-gguf', f'--tokenizer={dataset}')
    run = train(f'--init_from={tmp_path / "from-gguf"}', '--lora_rank=3', '--max_iters=6', '--eval_interval=6',
                '--learning_rate=3e-2').out_dir
    said = run_forked('kilogpt.convert', 'export', run, tmp_path / 'adapter', '--adapter').stdout
    entries = json.loads((tmp_path / 'adapter/adapter_config.json').read_text())
    assert entries['base_model_name_or_path'] == str(tmp_path / 'adapter/base')
    assert 'is nothing that peft can load' in said and (tmp_path / 'adapter/tokenizer.json').exists()
    assert_equal(logits_of(tmp_path / 'adapter/base'), logits_of(base))
    run_forked('kilogpt.convert', 'import', tmp_path / 'adapter', tmp_path / 'imported')
    assert_equal(logits_of(tmp_path / 'imported'), logits_of(run))
    if importlib.util.find_spec('peft'):
        from peft import AutoPeftModelForCausalLM
        assert_equal(logits_of(AutoPeftModelForCausalLM.from_pretrained(tmp_path / 'adapter')), logits_of(run))
    card = (tmp_path / 'adapter/README.md').read_text()
    assert 'of rank 3' in card and "from_pretrained('" in card and (tmp_path / 'adapter/base/README.md').exists()


def test_imported_adapters_are_trained_on(train, tuned, tmp_path):
    _, run = tuned('llama')
    run_forked('kilogpt.convert', 'export', run, tmp_path / 'adapter', '--adapter')
    run_forked('kilogpt.convert', 'import', tmp_path / 'adapter', tmp_path / 'imported')
    continued = train(f'--init_from={tmp_path / "imported"}', '--max_iters=1')
    assert continued.evals[0]['val_loss'] == pytest.approx(newest_state(run)['val_loss'], abs=1e-5)


def test_adapters_that_ours_cannot_be_are_refused_in_one_sentence(tuned, tmp_path):
    base, run = tuned('llama')
    adapter = tmp_path / 'adapter'
    run_forked('kilogpt.convert', 'export', run, adapter, '--adapter')
    entries = json.loads((adapter / 'adapter_config.json').read_text())
    tensors = load_file(adapter / 'adapter_model.safetensors')

    def error_of(*arguments):
        done = run_forked('kilogpt.convert', *arguments, check=False)
        assert done.returncode == 1 and 'Traceback' not in done.stderr
        return done.stderr

    for change in (dict(use_dora=True), dict(init_lora_weights='pissa'), dict(alora_invocation_tokens=[5]),
                   dict(an_entry_of_next_year=2), dict(peft_type='LOHA')):
        (adapter / 'adapter_config.json').write_text(json.dumps(entries | change))
        key, value = next(iter(change.items()))
        assert f'has {key}={value!r} in its adapter_config.json' in error_of('import', adapter, tmp_path / 'out')
    (adapter / 'adapter_config.json').write_text(json.dumps(entries))
    first = sorted(tensors)[0]
    save_file({name: tensor for name, tensor in tensors.items() if name != first},
              adapter / 'adapter_model.safetensors')
    assert f'lacks {first}' in error_of('import', adapter, tmp_path / 'out')
    save_file(tensors | {first: torch.zeros(3, 8)}, adapter / 'adapter_model.safetensors')
    assert 'with shape (3, 8), but the base' in error_of('import', adapter, tmp_path / 'out')
    assert 'has lora_rank=3' in error_of('export', run, tmp_path / 'a.gguf', '--adapter')
    assert 'nanoGPT does not have' in error_of('export', run, tmp_path / 'ckpt.pt')


@pytest.mark.slow
def test_what_peft_writes_by_default_is_read_and_every_other_entry_is_known_or_refused(tmp_path):
    peft = pytest.importorskip('peft')
    defaults = peft.LoraConfig(task_type='CAUSAL_LM').to_dict()

    def read(**changes):
        (tmp_path / 'adapter_config.json').write_text(json.dumps(defaults | changes, default=list))
        return read_entries(str(tmp_path))

    read()
    for key in defaults.keys() - READ:
        with pytest.raises(ValueError, match=f'has {key}='):
            read(**{key: 'something else'})


@pytest.mark.slow
@pytest.mark.parametrize('family', FAMILIES)
def test_peft_loads_our_adapters_and_we_load_those_of_peft(tuned, family, tmp_path):
    peft = pytest.importorskip('peft')
    from transformers import AutoModelForCausalLM
    base, run = tuned(family)
    run_forked('kilogpt.convert', 'export', run, tmp_path / 'adapter', '--adapter', f'--family={family}')
    run_forked('kilogpt.convert', 'export', run, tmp_path / 'merged', f'--family={family}')
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / 'adapter')
    ours = logits_of(run)
    assert (ours - logits_of(base)).abs().max() > 1e-2
    assert_equal(logits_of(theirs), ours)
    assert_equal(logits_of(peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / 'adapter')), ours)
    assert_equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / 'merged')), ours)
    if family == 'llama':  # an adapter that peft has made
        config = peft.LoraConfig(r=2, lora_alpha=5, target_modules=['q_proj', 'down_proj'], task_type='CAUSAL_LM',
                                 init_lora_weights=False)
        theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        theirs.save_pretrained(tmp_path / 'theirs')
        run_forked('kilogpt.convert', 'import', tmp_path / 'theirs', tmp_path / 'imported', f'--base={base}')
        assert_equal(logits_of(tmp_path / 'imported'), logits_of(theirs))
