"""Learning from a teacher and from rewards (docs/rewards.md)."""
from kilogpt.keys.checks import check_at_least, check_choice

teacher = ''  # weights that stay in memory as the teacher; '' = what kilogpt.evaluate --teach wrote beside the data
teacher_dtype = 'float32'  # of a teacher in memory: 'float32' or 'bfloat16'
distill_divergence = 'forward'  # with loss='distill': 'forward', 'reverse', or 'js' (Jensen-Shannon)
distill_top_k = 32  # tokens of the teacher that count one by one; all others count together
distill_temperature = 1.0  # divides the logits of both; above 1 unlikely tokens count more
distill_share = 0.5  # share of the divergence in the loss; the rest is the cross-entropy
rl_prompts = ''  # with loss='rl': a .jsonl file, whose rows have a prompt or messages, and what the reward needs
rl_val_prompts = ''  # such a file of held-out prompts, for pass@1; '' = none
rl_reward = ''  # a Python file with reward(row, text) -> number, or reasoning_gym:TASK; '' with a teacher alone
rl_reward_seconds = 10.0  # how long a reward may take
rl_reward_errors = 'end'  # what an error in a reward does: 'end' the run, or 'skip' the text
rl_samples = 8  # texts of each prompt, whose mean reward is the baseline
rl_tokens = 64  # tokens after which a text is cut off
rl_scale = False  # divide advantages by the standard deviation of their prompt's rewards (GRPO)
rl_kl = 0.0  # weight of the divergence from the teacher, or without one from the weights at the start
rl_updates = 1  # updates with the same texts
rl_clip = 0.2  # with several updates, limit the ratio of probabilities to 1 ± rl_clip
rl_pass = 1.0  # reward from which a text has passed
rl_eval_prompts = 100  # held-out prompts of an evaluation; 0 = all
rl_eval_samples = 1  # texts of each, for pass@1 and pass@N; 1 = only the likeliest text


def check(config):
    """Raise ValueError for values that no run can have."""
    check_at_least(config, 1, 'distill_top_k', 'rl_tokens', 'rl_updates', 'rl_eval_samples')
    check_at_least(config, 0, 'rl_kl', 'rl_eval_prompts')
    check_choice(config, 'teacher_dtype', 'float32', 'bfloat16')
    check_choice(config, 'distill_divergence', 'forward', 'reverse', 'js')
    check_choice(config, 'rl_reward_errors', 'end', 'skip')
    if not 0 <= config['distill_share'] <= 1:
        raise ValueError(f'distill_share is {config["distill_share"]}: it must be from 0 to 1')
    if not 0 < config['rl_clip'] < 1:
        raise ValueError(f'rl_clip is {config["rl_clip"]}: it must be between 0 and 1')
    for key in ('distill_temperature', 'rl_reward_seconds'):
        if not config[key] > 0:
            raise ValueError(f'{key} is {config[key]}: it must be above 0')
    if config['loss'] == 'rl':
        _check_rewards(config)


def _check_rewards(config):
    batch, samples = config['batch_size'] * config['gradient_accumulation_steps'], config['rl_samples']
    if not config['rl_prompts']:
        raise ValueError("rl_prompts is '', but loss=rl needs prompts: name a .jsonl file")
    if not config['rl_reward'] and not (config['teacher'] and config['rl_kl']):
        raise ValueError("rl_reward is '', but loss=rl needs a file with rewards, or a teacher with rl_kl above 0")
    if samples < 1 or batch % samples:
        raise ValueError(f'rl_samples is {samples}, which does not divide the {batch} sequences of an iteration '
                         '(batch_size * gradient_accumulation_steps): set it to a divisor')
    if samples == 1 and config['rl_reward']:
        raise ValueError('rl_samples is 1, but an advantage compares the texts of a prompt: set it to 2 or more')
    if config['rl_tokens'] >= config['block_size']:
        raise ValueError(f'rl_tokens is {config["rl_tokens"]}, which leaves no room for a prompt in block_size='
                         f'{config["block_size"]}: set it lower')
    if config['islands'] > 1 or config['outer_interval']:
        raise ValueError(f'islands is {config["islands"]} and outer_interval {config["outer_interval"]}, but loss=rl '
                         'makes its data in the processes of one island: leave both out')
