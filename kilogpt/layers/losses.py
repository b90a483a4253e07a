"""Gives a model the loss that the key `loss` names, besides the cross-entropy. Imports its neighbours alone."""
from kilogpt.layers.distillation import Distillation
from kilogpt.layers.preferences import use_preferences
from kilogpt.layers.rewards import use_rewards


def use_loss(model, config):
    """Let a model compute the loss of a config's keys, in place, and add up what is logged beside it."""
    if config['loss'] == 'dpo':
        use_preferences(model, config['dpo_beta'])
    if config['loss'] == 'rl':
        use_rewards(model, config['rl_kl'], config['rl_clip'] if config['rl_updates'] > 1 else 0.0)
    if config['loss'] == 'distill':
        model.loss.distillation = Distillation(
            model.loss, config['distill_divergence'], config['distill_temperature'], config['distill_share'])
