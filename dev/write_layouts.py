"""Write the tables of docs/layouts.md that the planner's formulas compute: python dev/write_layouts.py"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / 'tests' / 'plan')]
from kilogpt.configurator import config_of
from kilogpt.machines import find_machine
from kilogpt.plan.planner import Planner
from published import ROWS, predict

PAGE = ROOT / 'docs' / 'layouts.md'
GPT2, XL, LLAMA, BIG = 'train_gpt2', 'gpt2_xl_fsdp', 'llama_7b_tp_fsdp', 'gpt_70b_3d'
NAMES = {GPT2: 'GPT-2 (0.12B)', XL: 'GPT-2 XL (1.56B)', LLAMA: 'Llama 7B (6.86B)',
         BIG: 'Llama 2 70B (55.94B)'}
# (config, number of GPUs, layout, micro-batch, micro-steps)
EXAMPLES = [
    (GPT2, 8, 'zero_stage=0', 12, 5),
    (GPT2, 64, 'zero_stage=0', 8, 1),
    (GPT2, 1024, 'zero_stage=0', 1, 1),
    (XL, 8, 'zero_stage=2', 8, 8),
    (XL, 64, 'zero_stage=2 dp_replicate=8', 8, 1),
    (XL, 1024, 'zero_stage=2 dp_replicate=128', 2, 1),
    (LLAMA, 8, 'zero_stage=3 activation_checkpoint=selective', 2, 16),
    (LLAMA, 64, 'zero_stage=3 tp=2 dp_replicate=8', 4, 8),
    (LLAMA, 1024, 'zero_stage=2 tp=2 dp_replicate=128', 2, 1),
    (BIG, 8, 'zero_stage=3 activation_checkpoint=full cpu_offload', 4, 8),
    (BIG, 64, 'zero_stage=2 tp=8 pp=4', 1, 256),
    (BIG, 1024, 'zero_stage=2 tp=8 pp=8 pp_schedule=interleaved1f1b', 1, 64),
]
PLAIN = ('--zero_stage=0 --dp_replicate=1 --tp=1 --cp=1 --pp=1 --pp_schedule=1f1b --cpu_offload=False '
         '--activation_checkpoint=none --dtype=bfloat16').split()


def header(*columns):
    return [f'| {" | ".join(columns)} |', '| --- ' * len(columns) + '|']


def examples():
    """The table of examples on H100 GPUs with 400 Gb/s."""
    lines = header('model', 'GPUs', 'keys', 'B × m × dp', 'tokens', 'state', 'gathered', 'activations',
                   'sum, GB', 'idle', 'MFU')
    for config, gpus, keys, micro_batch, micro_steps in EXAMPLES:
        arguments = [str(ROOT / 'config' / f'{config}.py'), *PLAIN, *(f'--{key}' for key in keys.split())]
        planner = Planner(config_of(str(ROOT / 'train.py'), arguments), find_machine('H100'), gpus)
        layout = planner.layout({})
        planner.tokens = micro_batch * micro_steps * layout.dp * planner.config['block_size']
        row = planner.row({}, layout, split=(micro_batch, micro_steps))
        memory = row['memory']
        state = memory['parameters'] + memory['gradients'] + memory['moments']
        idle = row['milliseconds']['bubble'] / row['ms']
        lines.append(
            f'| {NAMES[config]} | {gpus:,} | `{keys}` | {micro_batch} × {micro_steps} × {layout.dp:,} '
            f'| {planner.tokens / 1e6:.1f}M | {state:.1f} | {memory["gathered"]:.1f} '
            f'| {memory["activations"] + memory["logits"]:.0f} | {row["memory_gb"]:.0f} '
            f'| {f"{idle:.1%}" if idle else "-"} | {row["mfu"]:.0%} |')
    return '\n'.join(lines)


def published():
    """The table of published runs: measured and predicted."""
    lines = header('Llama 3.1', 'GPUs', 'tokens a sequence', 'tokens/s/GPU measured', 'predicted',
                   'GiB measured', 'predicted', '')
    for row in ROWS:
        speed, gib = predict(row)
        memory = f'{row.gib} | {gib:.0f} ({gib / row.gib - 1:+.0%})' if row.gib else '- | -'
        note = f'fitted: {row.fitted}' if row.fitted else row.misses
        lines.append(f'| {row.name} | {row.gpus} | {row.block_size:,} | {row.tokens_per_sec:,} '
                     f'| {speed:,.0f} ({speed / row.tokens_per_sec - 1:+.0%}) | {memory} | {note} |')
    return '\n'.join(lines)


def page_with_tables(text):
    """The text of the page with new tables. Two comments in the text enclose each table."""
    for name, table in dict(examples=examples(), published=published()).items():
        text = re.sub(rf'(<!-- {name}: .*? -->\n).*?(<!-- end -->)',
                      lambda found, table=table: f'{found[1]}\n{table}\n\n{found[2]}', text, flags=re.S)
    return text


if __name__ == '__main__':
    PAGE.write_text(page_with_tables(PAGE.read_text('utf-8')), 'utf-8')
