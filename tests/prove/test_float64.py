"""A run in float64, with which `kilogpt.prove` compares layouts, computes nothing in fewer bits."""
import pytest

from helpers import FAULTS

MODERN = ['--pos=rope', '--norm=rmsnorm', '--mlp=swiglu', '--qk_norm=True', '--softcap=15', '--attention_softcap=10',
          '--attention_gate=True', '--value_pattern=VN', '--attention_conv=3', '--mlp_conv=2', '--tie_weights=False']
EXPERTS = ['--mlp=moe', '--n_experts=4', '--n_active_experts=2', '--expert_hidden=16', '--router_z_loss=0.01',
           '--qk_norm=True', '--qk_norm_over=all', '--window=5']
# {name: (processes, arguments)}
RUNS = {
    'experts ep2 zero3': (2, [*EXPERTS, '--router_balance=loss', '--ep=2', '--zero_stage=3']),
    'modern muon tp2': (2, [*MODERN, '--optimizer=muon', '--tp=2']),
    'gpt2 zero1': (2, ['--zero_stage=1']),
    'gpt2 pp2 tp2': (4, ['--pp=2', '--tp=2', '--pp_schedule=1f1b']),
    'experts muon cp2': (2, [*EXPERTS, '--router=sigmoid', '--optimizer=muon', '--cp=2']),
    'islands': (2, ['--islands=2', '--outer_interval=2']),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in list(RUNS)[1:]]


@pytest.mark.parametrize('name', [next(iter(RUNS)), *SLOW])
def test_no_operation_of_a_float64_run_is_in_float32(train, name):
    processes, arguments = RUNS[name]
    run = train('--max_iters=3', '--eval_interval=2', '--log_interval=1', *arguments, nproc=processes,
                faults=[FAULTS / 'narrow_tensors.py'])
    assert [line for line in run.stderr.splitlines() if line.startswith('narrower')] == []
