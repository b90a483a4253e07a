"""The outer optimizer of islands, and how payloads are encoded (islands.py says who sends when)."""
import itertools

import torch
import torch.distributed as dist

from kilogpt.optim import local_part

BLOCK = 256  # elements that share a scale in int8 and int4
LARGEST = dict(int8=127, int4=7)


def encode(tensor, compress):
    """Encode a tensor as bytes, uint8 on the CPU. compress: 'none', 'bf16', 'int8' or 'int4'.

    int8 and int4 have one scale in bfloat16 for each BLOCK of elements. The product of a number and its scale
    is then exact in float32, so that encoding the result of `decode` gives the same bytes again.
    """
    flat = tensor.flatten()
    if compress == 'none':
        return flat.cpu().view(torch.uint8)
    if compress == 'bf16':
        return flat.to(torch.bfloat16).cpu().view(torch.uint8)
    largest = LARGEST[compress]
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = (blocks.abs().amax(1) / largest).to(torch.bfloat16)
    divisors = torch.where(scales == 0, 1, scales).to(flat.dtype)
    numbers = (blocks / divisors[:, None]).round().clamp(-largest, largest).to(torch.int8).flatten()
    if compress == 'int4':  # two numbers in a byte
        numbers = (numbers[0::2] & 15) | (numbers[1::2] << 4)
    numbers = numbers[:_numbers_size(len(flat), compress)]
    return torch.cat([numbers.cpu().view(torch.uint8), scales.cpu().view(torch.uint8)])


def _numbers_size(count, compress):
    """The bytes of `count` numbers in int8 or int4, without their scales."""
    return -(-count // 2) if compress == 'int4' else count


def encoded_size(tensor, compress):
    """The number of bytes that `encode` returns for a tensor."""
    count = tensor.numel()
    if compress in LARGEST:
        return _numbers_size(count, compress) + 2 * -(-count // BLOCK)
    return count * (2 if compress == 'bf16' else tensor.element_size())


def decode(payload, like, compress):
    """Decode a tensor from bytes, with the shape, dtype and device of the tensor `like`."""
    if compress in LARGEST:
        count = like.numel()
        size = _numbers_size(count, compress)
        numbers = payload[:size].view(torch.int8)
        if compress == 'int4':  # << and >> extend the sign of the low half
            numbers = torch.stack([numbers << 4 >> 4, numbers >> 4], dim=1).flatten()[:count]
        numbers = numbers.to(like.device, like.dtype)
        scales = payload[size:].clone().view(torch.bfloat16).to(like.device, like.dtype)
        return (numbers * scales.repeat_interleave(BLOCK)[:count]).view(like.shape)
    dtype = torch.bfloat16 if compress == 'bf16' else like.dtype
    return payload.clone().view(dtype).to(like.device, like.dtype).view(like.shape)


# --- the outer optimizer ------------------------------------------------------------------------------------

class OuterOptimizer:
    """SGD with Nesterov momentum on the mean change of the islands' parameters, one fragment at a time.

    parameters: [(name, parameter or DTensor)]. fragment_of(name): the number of a parameter's fragment.
    compress: how changes are encoded, with error feedback: the rounding error is added to the next change.
    mix: the share of an island's own parameters in those with which it continues after an exchange.
    offload: keep the state in host memory.

    state: {kind: [a tensor for each parameter, with the same layout]}. 'outer' are the parameters that all
    islands share. 'sent_0' and 'sent_1' are what was sent last, which a run that resumes may send again.
    """

    def __init__(self, parameters, fragment_of, fragments, lr, momentum, compress, mix, offload):
        self.parameters = parameters
        self.lr, self.momentum, self.compress, self.mix = lr, momentum, compress, mix
        self.fragments = [[] for _ in range(fragments)]
        for index, (name, _) in enumerate(parameters):
            self.fragments[fragment_of(name)].append(index)
        kinds = ['outer', 'momentum', 'sent_0']
        if fragments == 1:  # two exchanges of the same parameters may have to be sent again
            kinds.append('sent_1')
        if compress != 'none':
            kinds.append('residual')
        self.state = {kind: [_zeros_like(parameter, offload) for _, parameter in parameters]
                      for kind in kinds}
        self._local = {kind: [local_part(tensor) for tensor in tensors]
                       for kind, tensors in self.state.items()}

    def bytes_on(self, device):
        """Bytes of the state in a device's memory."""
        tensors = itertools.chain.from_iterable(self._local.values())
        return sum(tensor.nbytes for tensor in tensors if tensor.device.type == device.type)

    def _sent(self, number):
        return self._local['sent_1' if len(self.fragments) == 1 and number % 2 else 'sent_0']

    def of_fragment(self, number):
        """{index: outer parameter} of the fragment that exchange `number` is about."""
        return {index: self._local['outer'][index] for index in self.fragments[number % len(self.fragments)]}

    @torch.no_grad()
    def encode(self, number):
        """Store what this process sends in exchange `number`: the parameters, or their compressed change."""
        for index in self.fragments[number % len(self.fragments)]:
            value, sent = local_part(self.parameters[index][1].detach()), self._sent(number)[index]
            if self.compress == 'none':
                sent.copy_(value)
                continue
            change = self._local['outer'][index] - value.to(sent.device) + self._local['residual'][index]
            sent.copy_(decode(encode(change, self.compress), change, self.compress))
            self._local['residual'][index].copy_(change - sent)

    def payload(self, number):
        """The bytes to send in exchange `number`, which `encode` has stored."""
        indices = self.fragments[number % len(self.fragments)]
        parts = [encode(self._sent(number)[index], self.compress) for index in indices]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def mean(self, number, payloads):
        """({index: mean of what the islands sent}, squared distance of the islands from it, squared size).

        All islands compute the same bits, since they add in the same order. The squared distance is the sum
        over elements of the squared deviation from the mean, averaged over islands. The squared size is the
        sum of the squared outer parameters.
        """
        means, distance, size, begin = {}, 0.0, 0.0, 0
        for index in self.fragments[number % len(self.fragments)]:
            outer = self._local['outer'][index]
            end = begin + encoded_size(outer, self.compress)
            sent = [decode(payloads[island][begin:end], outer, self.compress) for island in sorted(payloads)]
            means[index] = torch.stack(sent).sum(0) / len(sent) if len(sent) > 1 else sent[0]
            distance += sum((tensor - means[index]).square().sum().item() for tensor in sent) / len(sent)
            size += outer.square().sum().item()
            begin = end
        return means, distance, size

    @torch.no_grad()
    def step(self, means):
        """Update the outer parameters, then the island's own. means: {index: mean of what islands sent}."""
        for index, mean in means.items():
            outer, momentum = self._local['outer'][index], self._local['momentum'][index]
            if self.compress != 'none':
                mean = outer - mean
            momentum.mul_(self.momentum).add_(outer - mean)
            # outer - lr · (outer - mean + momentum factor · momentum), in a form that gives the mean to the
            # bit at lr 1 and momentum factor 0.
            outer.lerp_(mean, self.lr).sub_(momentum, alpha=self.lr * self.momentum)
            value = local_part(self.parameters[index][1].detach())
            new = outer.to(value.device)
            value.copy_(torch.lerp(new, value, self.mix) if self.mix else new)

    @torch.no_grad()
    def reset(self, to_outer=False):
        """Set the outer parameters to the island's own, or if to_outer the island's own to the outer ones."""
        for (_, parameter), outer in zip(self.parameters, self._local['outer']):
            value = local_part(parameter.detach())
            (value if to_outer else outer).copy_(outer if to_outer else value)
        for residual in self._local.get('residual', ()):
            residual.zero_()

    def snapshot(self):
        """The outer parameters and the momentum as bytes, for an island that joins."""
        tensors = self._local['outer'] + self._local['momentum']
        return torch.cat([tensor.flatten().cpu().view(torch.uint8) for tensor in tensors])

    def snapshot_size(self):
        """The bytes of a `snapshot`."""
        return sum(tensor.nbytes for tensor in self._local['outer'] + self._local['momentum'])

    @torch.no_grad()
    def load_snapshot(self, snapshot):
        """Take over the outer parameters and the momentum from the `snapshot` of another island."""
        tensors = self._local['outer'] + self._local['momentum']
        for tensor, part in zip(tensors, snapshot.split([tensor.nbytes for tensor in tensors])):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))

    def broadcast_means(self, number, means, group, device):
        """The means for exchange `number`, which the first process of a group of replicas broadcasts."""
        like = self.of_fragment(number)
        if not like:  # a pipeline stage may have no parameter of a fragment, or with adapters none at all
            return {}
        sizes = [tensor.numel() for tensor in like.values()]
        flat = torch.empty(sum(sizes), dtype=next(iter(like.values())).dtype, device=device)
        if means:
            flat = torch.cat([mean.flatten() for mean in means.values()]).to(device)
        dist.broadcast(flat, dist.get_global_rank(group, 0), group)
        parts = flat.split(sizes)
        return {index: part.view(tensor.shape).to(tensor.device)
                for part, (index, tensor) in zip(parts, like.items())}

    def broadcast_state(self, group, device):
        """Take over the outer parameters and the momentum of the first process of a group of replicas."""
        for tensor in self._local['outer'] + self._local['momentum']:
            copy = tensor.to(device, copy=True)
            dist.broadcast(copy, dist.get_global_rank(group, 0), group)
            tensor.copy_(copy)

    @torch.no_grad()
    def swap_parameters(self):
        """Swap the values of the outer parameters and the island's."""
        for (_, parameter), outer in zip(self.parameters, self._local['outer']):
            value = local_part(parameter.detach())
            copy = value.to(outer.device, copy=True)
            value.copy_(outer)
            outer.copy_(copy)


def _zeros_like(parameter, offload):
    """Zeros with the layout of a parameter, in host memory if offload."""
    local = local_part(parameter.detach())
    zeros = torch.zeros_like(local, device='cpu' if offload else local.device)
    if not hasattr(parameter, 'placements'):
        return zeros
    from torch.distributed.tensor import DTensor
    return DTensor(zeros, parameter._spec, requires_grad=False)
