"""The outer optimizer of islands, and how what they send is encoded (islands.py says who sends when)."""
import torch
import torch.distributed as dist

from kilogpt.optim import local_part

BLOCK = 256  # elements that share a scale in int8 and int4
LARGEST = dict(int8=127, int4=7)


def encode(tensor, compress):
    """A tensor as bytes, uint8 on the CPU. compress: 'none', 'bf16', 'int8' or 'int4'.

    int8 and int4 have a scale for each BLOCK elements, in bfloat16: then a product of the two is exact in
    float32, and encoding what `decode` returned gives the same bytes again.
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
    if compress == 'int4':  # two to a byte
        numbers = (numbers[0::2] & 15) | (numbers[1::2] << 4)
    numbers = numbers[:_numbers_size(len(flat), compress)]
    return torch.cat([numbers.cpu().view(torch.uint8), scales.cpu().view(torch.uint8)])


def _numbers_size(count, compress):
    """How many bytes int8 or int4 have for so many elements, without their scales."""
    return -(-count // 2) if compress == 'int4' else count


def encoded_size(tensor, compress):
    """How many bytes `encode` makes of a tensor."""
    count = tensor.numel()
    if compress in LARGEST:
        return _numbers_size(count, compress) + 2 * -(-count // BLOCK)
    return count * (2 if compress == 'bf16' else tensor.element_size())


def decode(payload, like, compress):
    """The tensor of these bytes, with the shape, dtype and device of another."""
    if compress in LARGEST:
        count = like.numel()
        size = _numbers_size(count, compress)
        numbers = payload[:size].view(torch.int8)
        if compress == 'int4':  # >> keeps the sign
            numbers = torch.stack([numbers << 4 >> 4, numbers >> 4], dim=1).flatten()[:count]
        numbers = numbers.to(like.device, like.dtype)
        scales = payload[size:].clone().view(torch.bfloat16).to(like.device, like.dtype)
        return (numbers * scales.repeat_interleave(BLOCK)[:count]).view(like.shape)
    dtype = torch.bfloat16 if compress == 'bf16' else like.dtype
    return payload.clone().view(dtype).to(like.device, like.dtype).view(like.shape)


# --- the outer optimizer ------------------------------------------------------------------------------------

class OuterOptimizer:
    """SGD with Nesterov momentum on what islands changed in the parameters, one fragment at a time.

    parameters: [(name, parameter or DTensor)]. fragment_of(name): which of the fragments has a parameter.
    compress: of the changes that are sent, with error feedback: what rounding leaves out is added to the next
    change. mix: the share of an island's own parameters in those with which it goes on after an exchange.
    offload: keep the state in host memory.

    state: {kind: [a tensor for each parameter, laid out as it]}: 'outer' are the parameters that all islands
    share, 'sent_0' and 'sent_1' what was sent last, which a run that resumes may have to send again.
    """

    def __init__(self, parameters, fragment_of, fragments, lr, momentum, compress, mix, offload):
        self.parameters = parameters
        self.lr, self.momentum, self.compress, self.mix = lr, momentum, compress, mix
        self.fragments = [[] for _ in range(fragments)]
        for index, (name, _) in enumerate(parameters):
            self.fragments[fragment_of(name)].append(index)
        kinds = ['outer', 'momentum', 'sent_0']
        if fragments == 1:  # two exchanges of the same parameters follow each other
            kinds.append('sent_1')
        if compress != 'none':
            kinds.append('residual')
        self.state = {kind: [_zeros_like(parameter, offload) for _, parameter in parameters]
                      for kind in kinds}
        self._local = {kind: [local_part(tensor) for tensor in tensors]
                       for kind, tensors in self.state.items()}

    def bytes_on(self, device):
        """Bytes of the state in a device's memory."""
        return sum(local.nbytes for tensors in self._local.values() for local in tensors
                   if local.device.type == device.type)

    def _sent(self, number):
        return self._local['sent_1' if len(self.fragments) == 1 and number % 2 else 'sent_0']

    def of_fragment(self, number):
        """{index: outer parameter} of those that exchange `number` is about."""
        return {index: self._local['outer'][index] for index in self.fragments[number % len(self.fragments)]}

    @torch.no_grad()
    def encode(self, number):
        """Note what this process sends in exchange `number`: the parameters, or their compressed change."""
        for index in self.fragments[number % len(self.fragments)]:
            value, sent = local_part(self.parameters[index][1].detach()), self._sent(number)[index]
            if self.compress == 'none':
                sent.copy_(value)
                continue
            change = self._local['outer'][index] - value.to(sent.device) + self._local['residual'][index]
            sent.copy_(decode(encode(change, self.compress), change, self.compress))
            self._local['residual'][index].copy_(change - sent)

    def payload(self, number):
        """The bytes to send in exchange `number`: all that `encode` has noted."""
        indices = self.fragments[number % len(self.fragments)]
        parts = [encode(self._sent(number)[index], self.compress) for index in indices]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def mean(self, number, payloads):
        """(the means of what islands sent, by index; squared distance of the islands from them, and size).

        The islands compute equal bits, since they add in the same order. Distance and size are sums over the
        elements: of the squared deviations from the mean, in the mean over islands, and of the squares.
        """
        means, distance, size, begin = {}, 0.0, 0.0, 0
        for index in self.fragments[number % len(self.fragments)]:
            outer = self._local['outer'][index]
            end = begin + encoded_size(outer, self.compress)
            sent = [decode(payloads[island][begin:end], outer, self.compress) for island in sorted(payloads)]
            means[index] = torch.stack(sent).sum(0) / len(sent) if len(sent) > 1 else sent[0]
            distance += sum((one - means[index]).square().sum().item() for one in sent) / len(sent)
            size += outer.square().sum().item()
            begin = end
        return means, distance, size

    @torch.no_grad()
    def step(self, means):
        """Move the outer parameters, and then the island's. means: {index: mean of what islands sent}."""
        for index, mean in means.items():
            outer, momentum = self._local['outer'][index], self._local['momentum'][index]
            if self.compress != 'none':
                mean = outer - mean
            momentum.mul_(self.momentum).add_(outer - mean)
            # That is outer - lr · (outer - mean + momentum factor · momentum), and at lr 1 and factor 0 the
            # mean to the bit.
            outer.lerp_(mean, self.lr).sub_(momentum, alpha=self.lr * self.momentum)
            value = local_part(self.parameters[index][1].detach())
            new = outer.to(value.device)
            value.copy_(torch.lerp(new, value, self.mix) if self.mix else new)

    @torch.no_grad()
    def reset(self, to_outer=False):
        """Make the outer parameters equal to the island's, or the island's to them."""
        for (_, parameter), outer in zip(self.parameters, self._local['outer']):
            value = local_part(parameter.detach())
            (value if to_outer else outer).copy_(outer if to_outer else value)
        for residual in self._local.get('residual', ()):
            residual.zero_()

    def snapshot(self):
        """The bytes of what an island takes over that joins: the outer parameters and the momentum."""
        tensors = self._local['outer'] + self._local['momentum']
        return torch.cat([tensor.flatten().cpu().view(torch.uint8) for tensor in tensors])

    @torch.no_grad()
    def restore(self, snapshot):
        """Take over a snapshot."""
        tensors = self._local['outer'] + self._local['momentum']
        for tensor, part in zip(tensors, snapshot.split([t.numel() * t.element_size() for t in tensors])):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))

    def share_means(self, number, means, group, device):
        """The means for exchange `number` on all of a group of replicas, of which the first has them."""
        like = self.of_fragment(number)
        sizes = [tensor.numel() for tensor in like.values()]
        flat = torch.empty(sum(sizes), dtype=next(iter(like.values())).dtype, device=device)
        if means:
            flat = torch.cat([mean.flatten() for mean in means.values()]).to(device)
        dist.broadcast(flat, dist.get_global_rank(group, 0), group)
        parts = flat.split(sizes)
        return {index: part.view(tensor.shape).to(tensor.device)
                for part, (index, tensor) in zip(parts, like.items())}

    def share(self, group, device):
        """Take over the outer parameters and the momentum of the first process of a group of replicas."""
        for tensor in self._local['outer'] + self._local['momentum']:
            copy = tensor.to(device, copy=True)
            dist.broadcast(copy, dist.get_global_rank(group, 0), group)
            tensor.copy_(copy)

    @torch.no_grad()
    def swap(self):
        """Exchange the values of the outer parameters and the island's."""
        for (_, parameter), outer in zip(self.parameters, self._local['outer']):
            value = local_part(parameter.detach())
            copy = value.to(outer.device, copy=True)
            value.copy_(outer)
            outer.copy_(copy)


def _zeros_like(parameter, offload):
    """Zeros laid out as a parameter is, in host memory if asked."""
    local = local_part(parameter.detach())
    zeros = torch.zeros_like(local, device='cpu' if offload else local.device)
    if not hasattr(parameter, 'placements'):
        return zeros
    from torch.distributed.tensor import DTensor
    return DTensor(zeros, parameter._spec, requires_grad=False)
