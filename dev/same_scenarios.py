"""The scenarios of dev/same_runs.py: what is run, and what must come of it."""
import signal
from typing import NamedTuple

# A model and a batch that train in milliseconds. An iteration on one process has three forward passes.
TINY = ('--device=cpu --compile=False --dtype=float32 --n_layer=2 --n_head=4 --n_embd=32 --block_size=32 '
        '--batch_size=4 --gradient_accumulation_steps=3 --eval_iters=4 --eval_interval=6 --log_interval=1 '
        '--max_iters=12 --lr_decay_iters=12 --warmup_iters=2 --learning_rate=1e-2 --min_lr=1e-3')
# There is no spike before the 17th iteration.
LONG = '--max_iters=34 --lr_decay_iters=34 --eval_iters=0 --save_interval=10'
ISLANDS = '--islands=2 --outer_interval=4'


class Run(NamedTuple):
    """One launch of train.py."""
    arguments: str = ''  # on top of TINY
    processes: int = 1
    exit_code: int = 0  # what it must be; torchrun turns any failure of its processes into 1
    disturb: dict = {}  # what dev/same_disturb.py does to the run
    kill_at: int = 0  # all processes get SIGKILL when metrics.jsonl has this iteration; 0 = they do not


class Scenario(NamedTuple):
    """Runs in the same out_dir, one after the other."""
    about: str
    runs: list
    depends_on_timing: bool = False  # compare the last line for each iteration, and the newest checkpoint
    are_jobs: bool = False  # the runs are islands that are jobs of their own, and run at the same time
    shows: dict = {}  # entries that a line of metrics.jsonl must have: the scenario is what it is meant to be

    def processes(self):
        """How many processes run at the same time."""
        return len(self.runs) if self.are_jobs else max(run.processes for run in self.runs)

    def exit_codes(self):
        return [run.exit_code for run in self.runs]


def stopped(phase, number, **disturb):
    """A run that SIGTERM stops, and one that continues."""
    first = Run('--init_from=auto', exit_code=143, disturb=dict(disturb, sigterm=[phase, number]))
    return [first, Run('--init_from=auto')]


# A process learns of a signal within an iteration or an evaluation only if the passes before took long.
SCENARIOS = {
    'one': Scenario('one process', [Run()]),
    'fp16': Scenario(
        'float16, whose scaler meets an overflow in iteration 4',
        [Run('--dtype=float16', disturb=dict(multiply=[10, 12, 1e6]))], shows=dict(grad_norm=None)),
    'nonfinite': Scenario(
        'on_nonfinite=skip: one gradient of NaN in iteration 4',
        [Run('--on_nonfinite=skip', disturb=dict(multiply=[11, 11, float('nan')]))],
        shows=dict(iter=4, grad_norm=None)),
    'diverged': Scenario(
        'on_nonfinite=skip: NaN from iteration 2 on, until the run gives up',
        [Run('--on_nonfinite=skip --learning_rate=1e30', exit_code=1)], shows=dict(iter=10, loss=None)),
    'spike': Scenario(
        'on_spike=skip: spikes in iterations 22 and 23',
        [Run(f'{LONG} --on_spike=skip', disturb=dict(multiply=[64, 69, 1e3]))],
        shows=dict(iter=34, spikes=2, tokens=34 * 384)),
    'rollback': Scenario(
        'on_spike=rollback: from iteration 26 back to 20, and on with other batches',
        [Run(f'{LONG} --on_spike=rollback', disturb=dict(multiply=[67, 78, 1e3]))],
        shows=dict(iter=34, spikes=4, tokens=40 * 384)),
    'muon': Scenario('the optimizer Muon', [Run('--optimizer=muon')]),
    'wsd': Scenario('the schedule wsd, and dropout', [Run('--lr_schedule=wsd --dropout=0.1')]),
    'save': Scenario(
        'saves in the background', [Run('--save_interval=2 --keep_checkpoints=9')]),
    'save-blocking': Scenario(
        'saves for which training waits',
        [Run('--save_interval=2 --keep_checkpoints=9 --async_checkpoint=False')]),
    'eval-only': Scenario(
        'eval_only, of a checkpoint', [Run(), Run('--init_from=resume --eval_only')]),
    'term-training': Scenario(
        'SIGTERM in the middle of iteration 4, and resume',
        stopped('training', 11, slow=[9, 11]), depends_on_timing=True),
    'term-evaluation': Scenario(
        'SIGTERM in the evaluation of iteration 6, and resume',
        stopped('evaluation', 9, slow=[17, 18]), depends_on_timing=True),
    'term-save': Scenario(
        'SIGTERM in the save of iteration 6 (the first call of fsync tries out_dir), and resume',
        stopped('saving', 2, pace=0.03), depends_on_timing=True),
    'dp2': Scenario('DDP', [Run(processes=2)]),
    'zero1': Scenario('ZeRO 1', [Run('--zero_stage=1', 2)]),
    'zero3': Scenario('ZeRO 3', [Run('--zero_stage=3', 2)]),
    'tp2': Scenario('tensor parallel', [Run('--tp=2', 2)]),
    'pp2': Scenario(
        'pipeline with the schedule zbv',
        [Run('--pp=2 --pp_schedule=zbv --n_layer=4 --gradient_accumulation_steps=4', 2)]),
    'cp2': Scenario('context parallel', [Run('--cp=2', 2)]),
    'ep2': Scenario('a mixture of experts, expert parallel', [Run('--mlp=moe --ep=2', 2)]),
    'fp16-dp2': Scenario(
        'float16 under DDP, whose scaler meets an overflow',
        [Run('--dtype=float16', 2, disturb=dict(multiply=[9, 9, 1e6]))], shows=dict(grad_norm=None)),
    'islands': Scenario('two islands in one torchrun', [Run(ISLANDS, 2)], shows=dict(exchange=2)),
    'jobs': Scenario(
        'two islands that are jobs of their own',
        [Run(f'{ISLANDS} --island=0'), Run(f'{ISLANDS} --island=1')],
        are_jobs=True, shows=dict(exchange=2)),
    'fewer': Scenario(
        'two processes, then one', [Run('--max_iters=6', 2), Run('--init_from=resume')]),
    'term-dp2': Scenario(
        'SIGTERM on the second process of two, and resume',
        [Run('--init_from=auto', 2, exit_code=1, disturb=dict(pace=0.03, sigterm=['training', 12], rank=1)),
         Run('--init_from=auto', 2)], depends_on_timing=True),
    'kill': Scenario(
        'SIGKILL of two processes in iteration 8, and resume',
        [Run('--init_from=auto --save_interval=2', 2, -signal.SIGKILL, dict(pace=0.05), kill_at=8),
         Run('--init_from=auto --save_interval=2', 2)], depends_on_timing=True),
}
