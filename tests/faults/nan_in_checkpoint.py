"""Each checkpoint has NaN in the first value of its last norm, while training goes on without it."""
import torch

from kilogpt.run import checkpoint

save = checkpoint.Saver.save


def save_with_nan(self, iteration, parameters, *arguments, **options):
    weight = dict(parameters)['transformer.ln_f.weight']
    value = weight.detach()[0].clone()
    with torch.no_grad():
        weight[0] = torch.nan
    path = save(self, iteration, parameters, *arguments, **options)
    self.wait()
    with torch.no_grad():
        weight[0] = value
    return path


checkpoint.Saver.save = save_with_nan
