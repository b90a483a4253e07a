"""kilogpt.prove as a user runs it: it finds and names planted mistakes, and accepts correct edits."""
import json

import pytest
from helpers import FAULTS, ROOT, copy_repository, run_forked, run_script
from kilogpt.prove.__main__ import shorten
from kilogpt.prove.diagnosis import inspect
from model import GPT, GPTConfig

SMALL = ['--n_layer=2', '--n_head=4', '--n_embd=32']
ONE_MICRO_STEP = 'dp1 batch_size=8 gradient_accumulation_steps=1 eval_iters=1'
BLOCK = ("        x = x + self.scaled(self.ln_1_after("
         "self.attn(self.ln_1(x), rope, mask, cache, tokens, positions)))\n")
NORM_2 = "        self.ln_2 = build_norm(config.n_embd, config, 'before', layer)\n"
INPUT_2 = "        h = self.ln_2(inputs if self.is_parallel else x)\n"
PRODUCT = "        return F.scaled_dot_product_attention(\n"
QUERIES = "        q = self.q_norm_all(q).view(B, T, -1, self.head_width)"

# {name: (edits of model.py, layouts, texts that the report must contain)}
MISTAKES = {
    'a linear that split_plan does not name': (
        {NORM_2: NORM_2 + "        self.extra = nn.Linear(config.n_embd, config.n_embd, bias=False)\n",
         BLOCK: BLOCK + "        x = x + self.extra(x)\n"},
        'dp2; tp2', ['transformer.h.0.extra.weight is in no part of split_plan',
                     'name transformer.h.*.extra in GPT.split_plan', 'a gate of each channel, as local']),
    'a parameter that belongs to a block itself': (
        {NORM_2: NORM_2 + "        self.gain = nn.Parameter(torch.empty(1, config.n_embd))\n",
         BLOCK: BLOCK + "        x = x + self.gain * x\n"},
        'dp2; tp2', ['transformer.h.*.gain belongs to a block or the model itself', 'a module of its own']),
    'a buffer': (
        {NORM_2: NORM_2 + "        self.register_buffer('gain', torch.ones(config.n_embd))\n",
         BLOCK: BLOCK + "        x = x * (1 + 0 * self.gain)\n"},
        'dp2', ['transformer.h.*.gain: a buffer has no values']),
    'a loss that is a mean': (
        {"ignore_index=-1, reduction=reduction)": "ignore_index=-1)"},
        ONE_MICRO_STEP,
        ['4.00 times too small', 'must return the sum of the losses']),
    'a loss in another place': (
        {"            return self.loss(x, self.lm_head, targets)\n":
         "            logits = self.lm_head(x)[..., :self.config.vocab_size].flatten(0, 1)\n"
         "            return F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction='sum', "
         "label_smoothing=0.1)\n"},
        'dp2; tp2', ['with tp a rank has a part of the vocabulary', 'at the end of model.py']),
    'a norm over features that tp splits': (
        {QUERIES: "        q = F.normalize(q, dim=-1).view(B, T, -1, self.head_width)"},
        'dp2; tp2', ['the input of transformer.h.0.attn.q_norm is the first value that is wrong',
                     'A norm, softmax or mean over them sees only a part']),
    'a bias for each head that counts heads from 0': (
        {PRODUCT: "        heads = torch.arange(q.size(1), device=q.device)[:, None, None]\n"
                  "        mask = torch.ones(q.size(2), q.size(2)).tril().log() * (1 + heads)\n"
                  "        mask = mask + heads * torch.arange(q.size(2), device=q.device) / 8\n" + PRODUCT},
        'tp2; cp2', ['with tp=2 and cp=1 a process has 1/2 of the heads there',
                     'with tp=1 and cp=2 a process has 1/2 of the heads there',
                     'must count heads from first_head on']),
    'a bias for each head of all processes': (
        {PRODUCT: "        mask = torch.ones(4, q.size(2), q.size(2)).tril().log()\n" + PRODUCT},
        'cp2', ['of the heads in attention (tp, cp), which there begin at first_head']),
    'random numbers in a block': (
        {BLOCK: BLOCK + "        if self.training:\n            x = x + 0.1 * torch.randn_like(x)\n"},
        'dp2', ['transformer.h.* draws random numbers']),
    'a change in place': (
        {BLOCK: "        x += self.attn(self.ln_1(x), rope, mask, cache, tokens, positions)\n"},
        'dp2', ['modified by an inplace operation', 'is changed in place: write x = x + ...']),
    'a change of the input in place': (
        {BLOCK: "        x.data.mul_(0.9)\n" + BLOCK},
        'dp2; dp2 full', ['transformer.h.*.attn.c_k.weight: gradient',
                          'does a block change its input in place']),
    'starting weights from the global generator': (
        {"return draw_normal(std, name, seed, shape, rows)":
            "return torch.empty(stop - start, *shape[1:], device='cpu').normal_(0.0, std)"},
        'dp2 zero3', ['transformer.h.*.attn.c_q.weight', 'GPT.initial_value returns other values']),
    'positions that forget where a process begins': (
        {"positions[:, self.first_position:self.first_position + T]": "positions[:, :T]"},
        'dp2; cp2', ['the output of transformer.wpe is the first value that is wrong', 'first_position']),
    'a mean over the batch': (
        {BLOCK: BLOCK + "        x = x - x.mean(dim=0, keepdim=True)\n"},
        ONE_MICRO_STEP,
        ['the input of transformer.h.0.ln_2 is the first value that is wrong',
         'mix the sequences of a batch']),
    'a parameter that the loss does not need': (
        {NORM_2: NORM_2 + "        self.ln_3 = build_norm(config.n_embd, config)\n"},
        'dp2', ['transformer.h.*.ln_3.weight has no gradient', 'the loss does not depend on it']),
    'a parameter of the model itself': (
        {"        self.loss = Loss(config)\n":
         "        self.ln_0 = build_norm(config.n_embd, config).to_empty(device='meta')\n"
         "        self.loss = Loss(config)\n",
         "        x = self.transformer.ln_f(x)\n": "        x = self.transformer.ln_f(self.ln_0(x))\n"},
        'pp2', ['ln_0.weight is in no block, so every pipeline stage has a copy']),
    'one layer in two blocks': (
        {"        self._apply(lambda x:":
         "        self.transformer.h['1'].mlp = self.transformer.h['0'].mlp\n"
         "        self._apply(lambda x:"},
        'dp2; pp2', ['transformer.h.0.mlp.c_fc.weight = transformer.h.1.mlp.c_fc.weight',
                     'one parameter has two names']),
    'something kept from one micro-batch to the next': (
        {BLOCK: "        x, self.last = x + 0.5 * getattr(self, 'last', 0), x.detach()\n" + BLOCK},
        'dp2', ['the input of transformer.h.0.ln_1 is the first value that is wrong',
                'keep something from one micro-batch to the next']),
    'a tensor made in __init__': (
        {NORM_2: NORM_2 + "        self.gain = torch.ones(config.n_embd)\n",
         BLOCK: BLOCK + "        x = x * self.gain\n"},
        'dp2', ['a tensor created in __init__ has no values']),
    'a norm behind attention that split_plan calls sequence': (
        {NORM_2: NORM_2 + "        self.ln_3 = build_norm(config.n_embd, config)\n",
         BLOCK: "        x = x + self.ln_3(self.attn(self.ln_1(x), rope, mask, cache, tokens, positions))\n",
         "sequence=('ln_1', 'ln_2', ": "sequence=('ln_1', 'ln_2', 'ln_3', "},
        'tp2', ['a norm whose output is added to x is local in split_plan, not sequence']),
    'a row-wise linear that split_plan calls column-wise': (
        {"        colwise=('attn.c_q',": "        colwise=('attn.c_proj', 'attn.c_q',",
         "        rowwise=('attn.c_proj', ": "        rowwise=("},
        'dp2; tp2', ['a layer missing in split_plan, or under the wrong kind']),
}
HARMLESS = {
    'a renamed layer': {'self.c_fc': 'self.up', "'mlp.c_fc'": "'mlp.up'",
                        "'mlp.shared.c_fc'": "'mlp.shared.up'"},
    'a norm behind attention': {
        NORM_2: NORM_2 + "        self.ln_3 = build_norm(config.n_embd, config)\n",
        BLOCK: "        x = x + self.ln_3(self.attn(self.ln_1(x), rope, mask, cache, tokens, positions))\n",
        "local=('attn.q_norm', ": "local=('ln_3', 'attn.q_norm', "},
    "a gate of each channel of attention's output": {
        NORM_2: NORM_2 + "        self.channels = nn.Linear(config.n_embd, config.n_embd)\n",
        BLOCK: "        h = self.ln_1(x)\n        y = self.attn(h, rope, mask, cache, tokens, positions)\n"
               "        x = x + 2 * torch.sigmoid(self.channels(h)) * y\n",
        "local=('attn.q_norm', ": "local=('channels', 'attn.q_norm', "},
    'a block with one norm': {
        BLOCK: "        h = self.ln_1(x)\n        x = x + self.attn(h, rope, cache)\n", NORM_2: "", INPUT_2: "",
        "self.ln_2_after(h)": "h"},
    'sliding-window attention': {
        "        return F.scaled_dot_product_attention(\n":
            "        T = q.size(2)\n"
            "        mask = torch.ones(T, T, dtype=torch.bool, device=q.device).tril().triu(-7)\n"
            "        return F.scaled_dot_product_attention(\n"},
}


@pytest.fixture
def edited(tmp_path):
    """Function that copies the repository with edits {text in model.py: replacement}; returns the folder."""
    def edit(edits):
        copy_repository(tmp_path)
        text = (tmp_path / 'model.py').read_text()
        for old, new in edits.items():
            assert old in text, old
            text = text.replace(old, new)
        (tmp_path / 'model.py').write_text(text)
        return tmp_path
    return edit


def prove(*arguments, folder=ROOT, **options):
    return run_forked('kilogpt.prove', *arguments, cwd=folder, check=False, timeout=1800, **options)


@pytest.mark.drawn(6)
@pytest.mark.parametrize('name', [
    pytest.param(name, marks=() if name == 'a loss that is a mean' else pytest.mark.slow) for name in MISTAKES])
def test_mistake_in_the_model_is_found_and_named(edited, name):
    edits, layouts, sentences = MISTAKES[name]
    done = prove(*SMALL, f'--layouts={layouts}', folder=edited(edits))
    print(done.stdout, done.stderr)
    assert done.returncode == 1
    for sentence in sentences:
        assert sentence in done.stdout, sentence


@pytest.mark.parametrize('edit, error', [
    pytest.param("        x = x + torch.ones(3)\n", 'must match the size of tensor b (3) at non-singleton '
                 'dimension 2', marks=pytest.mark.slow),
    # The forward pass of a line that PyTorch complains about in the backward pass
    pytest.param("        x += self.ln_1(x)\n", 'modified by an inplace operation', marks=pytest.mark.slow)])
def test_error_on_one_process_names_the_line_of_code_and_no_layout(edited, edit, error):
    folder = edited({BLOCK: edit + BLOCK})
    before, _, _ = (folder / 'model.py').read_text().partition(edit)
    done = run_script('kilogpt.prove', *SMALL, '--layouts=tp2', cwd=folder, check=False)
    report, = [line for line in done.stdout.splitlines() if error in line]
    assert report.endswith(f' (model.py, line {before.count(chr(10)) + 1}, in forward)')
    assert done.returncode == 1 and 'split_plan' not in done.stdout


@pytest.mark.slow
def test_values_that_init_gives_are_said_to_be_lost(edited):
    """In each way that PyTorch has, and not where a module of PyTorch fills its own weights."""
    folder = edited({NORM_2: NORM_2 + "        self.channels = nn.Linear(config.n_embd, config.n_embd)\n"
                                      "        nn.init.zeros_(self.channels.weight)\n"
                                      "        self.channels.bias.data.fill_(3.0)\n",
                     BLOCK: "        x = x * torch.sigmoid(self.channels(x))\n" + BLOCK,
                     "local=('attn.q_norm', ": "local=('channels', 'attn.q_norm', "})
    first = (folder / 'model.py').read_text().partition('        nn.init.zeros_')[0].count('\n') + 1
    done = prove(*SMALL, '--layouts=dp2', folder=folder)
    assert done.returncode == 0 and done.stdout.count('has no effect') == 2, done.stdout
    assert f'-> model.py:{first}: zero_ in __init__ has no effect, since GPT.initial_value' in done.stdout
    assert f'-> model.py:{first + 1}: fill_ in __init__ has no effect' in done.stdout


@pytest.mark.slow
@pytest.mark.drawn(2)
@pytest.mark.parametrize('name', HARMLESS)
def test_harmless_edit_raises_no_alarm(edited, name):
    done = prove(*SMALL, '--layouts=dp2 zero3 full; tp2; cp2; pp2 zbv', folder=edited(HARMLESS[name]))
    assert done.returncode == 0 and done.stdout.count('same: ') == 4, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize('is_once', [True, False])
def test_run_whose_process_crashes_is_repeated_once(edited, tmp_path, is_once):
    mark = tmp_path / 'has crashed'
    crash = ('        import os\n'
             f"        if os.environ.get('RANK') == '1' and not ({is_once} and os.path.exists('{mark}')):\n"
             f"            open('{mark}', 'w').close()\n"
             '            os.abort()\n')
    done = prove(*SMALL, '--layouts=dp2', folder=edited({BLOCK: BLOCK + crash}))
    assert done.stderr.count('warning: a process of') == 1 and 'the run is repeated' in done.stderr
    assert done.returncode == (0 if is_once else 1), done.stdout
    assert done.stdout.count('same: ') == is_once and done.stdout.count('FAILED') == (not is_once)


@pytest.mark.slow
def test_unchanged_model_passes_and_says_so_in_json():
    mixture = ['--dataset=web:1, code:2', '--mixture_phases=9e9: code:1', '--max_epochs=1']  # not needed
    done = prove(*SMALL, *mixture, '--layouts=dp2', '--json')
    one, two = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 0 and (one['verdict'], two['verdict']) == ('reference', 'same'), done.stdout
    assert 0 < two['gradient'] < 1e-4 and two['differences'] == two['advice'] == []


@pytest.mark.slow
@pytest.mark.drawn(1)
@pytest.mark.parametrize('config', ['dpo', 'gpt_70b_3d', 'train_gpt2_moe'])
def test_shipped_config_passes(config):
    done = prove(f'config/{config}.py', '--quick', '--nproc=4')
    assert done.returncode == 0 and done.stdout.count('same: ') >= 6, done.stdout


@pytest.mark.slow
def test_compiled_layout_is_compared_with_an_uncompiled_process():
    done = prove(*SMALL, '--layouts=dp2 compile=True')
    assert done.returncode == 0 and done.stdout.count('same: ') == 1, done.stdout


@pytest.mark.slow
def test_layout_that_cannot_be_compiled_is_left_out():
    done = prove(*SMALL, '--layouts=pp2 zbv compile=True')
    assert done.returncode == 0 and 'same' not in done.stdout, done.stdout
    assert 'left out\n    compile=False: a compiled backward pass cannot be split' in done.stdout, done.stdout


@pytest.mark.parametrize('arguments, sentence', [
    (['--layouts=tp2; tq2'], "'tq2': the words of a layout are dpN"),
    (['--nproc=0'], '--nproc is 0'),
    (['--keep=n_head,n_heads'], "--keep has 'n_heads': choose from the shrunk keys, n_layer, n_head,"),
    (['--n_layers=2'], "unknown key 'n_layers'"),
])
def test_wrong_arguments_are_a_sentence(arguments, sentence):
    done = prove(*arguments)
    assert done.returncode == 1 and sentence in done.stderr and 'Traceback' not in done.stderr


# {fault of wrong_layouts.py: (keys and options, texts that the report must contain)}
FAULTY_LAYOUTS = {
    'sum for mean': ('--layouts=dp2', ['2.00 times too small', 'off by the same factor']),
    'evaluation counts twice': ('--layouts=tp2', ['train_loss', 'training is right, but evaluation is not']),
    'last micro-step alone': (f'--layouts={ONE_MICRO_STEP}', ['gradient differs']),
    'keys counted twice': ('--layouts=tp2', [
        'transformer.h.*.attn.c_k.weight: gradient 2.00 times too large in all blocks',
        'does split_plan list it as whole on each rank']),
    'norm of a part': ('--layouts=tp2', [
        'transformer.h.*.ln_2.weight: gradient 2.00 times too small in all blocks',
        'does split_plan list it as whole on each rank']),
    'one rank alone': ('--layouts=dp2', [
        'gradient 1.50 times too large in all blocks on rank 1', 'gradients are wrong only on rank 1']),
    'padding counts': ('--layouts=dp3', ['the loss differs too', 'padding']),
    'same batch everywhere': ('--layouts=dp2', ['the output of transformer.wte is the first value']),
    'tied pair': ('--layouts=pp2', ['transformer.wte.weight: gradient differs']),
    'heads of a part': ('--layouts=cp2', [
        'the output of transformer.h.0.attn.dot_product is the first value']),
    'rows not gathered': ('--layouts=dp2 zero1', ['update', 'the gradients are right']),
    'matrices in parts': ('--optimizer=muon --layouts=dp2 zero2', ['update', 'the gradients are right']),
    'local norm': ('--layouts=dp2 zero2', ['grad_norm']),
    'no decay of shards': ('--layouts=dp2 zero2 --weight_decay=1.0', ['update', 'the gradients are right']),
    'moments forgotten': ('--layouts=dp2 zero2', ['resumed from the checkpoint of one process']),
}
MOE = '--mlp=moe --expert_hidden=32 --n_experts=4'
# Mistakes that other projects have shipped: in one layout, gradients were wrong while the loss looked normal.
# The names are those of the issues or pull requests.
FAULTS_OF_OTHERS = {
    # With tp, to_local() on the experts' tokens did not declare their gradients as terms of a sum.
    'torchtitan 1805': (f'{MOE} --layouts=tp2', [
        'Look at transformer.h.1.ln_2.weight and what reads its output', 'to_local in expert.py']),
    # Gradients were no longer divided in FSDP2, but replicas (DDP, HSDP) still averaged them.
    'torchtitan 2318': ('--layouts=dp2 zero2; dp4 rep2 zero2', [
        'same: ', '2.00 times too small', 'replicas (rep) count too']),
    # With tp, the same was missing only for the router, whose copies on the ranks drifted apart.
    'torchtitan 2416': (f'{MOE} --layouts=tp2', ['transformer.h.*.mlp.routed.router.weight: gradient']),
    # With tp but without ep, the sum over tp ranks of all gradients that leave the experts was left out.
    'torchtitan 4054': (f'{MOE} --layouts=ep2 tp2; tp2', [
        'same: ', 'Look at transformer.h.1.mlp.routed.router.weight and what']),
    # A pipeline divided the gradients by the number of its micro-batches each time that it added to them.
    'torchtitan 1733': ('--layouts=pp2', ['4.00 times too small', 'a pipeline adds up its micro-batches']),
    # With tp, the loss that is shown was not summed over the ranks of cp.
    'torchtitan 3280': ('--layouts=tp2; cp2; tp2 cp2', [
        'same: ', 'iteration 1: loss ', 'training is right, but the logged loss is not']),
    # With tp, the gradient returned by the loss is one term of a sum, but was treated as the sum.
    'torchtitan 3412': ('--layouts=tp2', ['Look at transformer.ln_f.weight and what reads its output']),
    # Experts' gradients were averaged over the ranks that share an expert, not over all: ep times too large.
    'pytorch 160285': (f'{MOE} --layouts=ep2', [
        'transformer.h.*.mlp.routed.experts.c_fc: gradient 2.00 times too large in all blocks',
        'see local_matrix in expert.py']),
}
# {fault of wrong_documents.py: (keys and options, number of right layouts, texts that the report must contain)}
WHOLE_WITH_CP = 'starts of documents are whole on each rank, and windows count positions'
OF_EACH_STAGE = 'each stage needs the starts of the same micro-batch as the first stage'
FAULTY_DOCUMENTS = {
    'starts cut': ('--layouts=dp2; cp2', 1, [
        'a part of a sequence, 16 positions, meets a whole one, 32',
        'starts of documents and masks are whole']),
    'stages without starts': ('--pos=rope --layouts=dp2; pp2', 1, [
        'the rope of transformer.h.1 is the first value that is wrong', OF_EACH_STAGE]),
    'starts of the first micro-batch': ('--layouts=pp2', 0, [
        'the output of transformer.wpe is the first value that is wrong', OF_EACH_STAGE]),
    'positions of the row': ('--pos=rope --layouts=cp2', 0, [
        'the rope of transformer.h.0 is the first value that is wrong: positions, which count from the start',
        'which begins at first_position']),
    'positions of a part': ('--pos=rope --layouts=cp2', 0, [
        'the rope of transformer.h.0 is the first value that is wrong', WHOLE_WITH_CP]),
    'window of a part': ('--window=5 --layouts=dp2; cp2', 1, [
        'the mask of transformer.h.0 is the first value that is wrong: the positions that each query sees',
        WHOLE_WITH_CP]),
    'layers of a stage': ('--n_layer=12 --window=512 --window_pattern=SSSL --layouts=pp2; pp2 zbv', 0, [
        'window 512 -> 5, window_pattern SSSL -> SSL', 'the mask of transformer.h.2 is the first value',
        'the numbers of its blocks are those in their names']),
    'tokens of a part': ('--layouts=cp2', 0, ['2.00 times too large', 'off by the same factor']),
    'mean over documents': (f'--layouts={ONE_MICRO_STEP}', 0, [
        'must return the sum of the losses over the targets, not a mean over targets or documents']),
    'rows of each rank': ('--documents=pack --layouts=dp2', 0, [
        'the output of transformer.wte is the first value', 'must not depend on the rank']),
    'starts of other sequences': ('--pos=rope --layouts=dp2', 0, [
        'Starts of documents must come from the same sequences as inputs and targets']),
    'mask of the last micro-batch': ('--layouts=pp2; pp2 full', 1, [
        'when activation_checkpoint recomputes them in the backward pass, they differ',
        'keep something between calls']),
    'evaluated as one text': ('--layouts=dp2; pp2', 1, [
        'training is right, but evaluation is not', 'Does it get the starts of documents']),
}


def prove_fault(file, fault, options):
    """The finished command with a fault of a file. options: text, which may have spaces in values."""
    arguments = [f'--{option}' for option in options.removeprefix('--').split(' --')]
    done = prove(*SMALL, *arguments, faults=[FAULTS / file], env=dict(FAULT=fault))
    print(done.stdout, done.stderr)
    assert done.returncode == 1
    return done


@pytest.mark.slow
@pytest.mark.drawn(7)
@pytest.mark.parametrize('fault', FAULTY_LAYOUTS | FAULTS_OF_OTHERS)
def test_mistake_in_a_layout_is_found_and_named(fault):
    options, sentences = (FAULTY_LAYOUTS | FAULTS_OF_OTHERS)[fault]
    done = prove_fault('wrong_layouts.py', fault, options)
    for sentence in sentences:
        assert sentence in done.stdout, sentence


@pytest.mark.slow
@pytest.mark.drawn(5)
@pytest.mark.parametrize('fault', FAULTY_DOCUMENTS)
def test_mistake_with_documents_is_found_and_named(fault):
    options, n_right, sentences = FAULTY_DOCUMENTS[fault]
    done = prove_fault('wrong_documents.py', fault, f'--documents=mask {options}')
    assert done.stdout.count('same: ') == n_right
    for sentence in sentences:
        assert sentence in done.stdout, sentence


@pytest.mark.parametrize('options', [dict(), dict(qk_norm=True, qk_norm_over='all', norm_place='both'),
                                     dict(value_pattern='V', attention_gate=True, attention_conv=3, mlp_conv=3),
                                     dict(mlp='moe', n_shared_experts=1, tie_weights=False),
                                     dict(pos='rope', kv_latent=8, q_latent=8, attention_sinks=True),
                                     dict(mixer_pattern='DA', mlp='moe', n_shared_experts=1, shared_gate=True,
                                          expert_bias=True)], ids=str)
def test_plan_names_every_parameter_of_our_parts(options):
    assert not inspect(GPT(GPTConfig(n_layer=2, n_head=4, n_embd=32, bias=False, **options), seed=None)).unplanned


@pytest.mark.parametrize('pattern, expected', [
    ('S', 'S'), ('SL', 'SL'), ('SSL', 'SSL'), ('SSSL', 'SSL'), ('RRRN', 'RRN'), ('SSSSSL', 'SSL'),
    ('LSSS', 'LLS'), ('SLSLL', 'SLS'), ('LLLL', 'LLL')])
def test_shorter_pattern_has_each_kind_of_block(pattern, expected):
    assert shorten(pattern, 3) == expected
