"""Find and replace the parts of a model that a device or a layout needs in another form (GPT.replaceable)."""
import torch


def find_parts(model, kind):
    """[(module, name of its attribute)] of all parts of one kind, in the model and in its blocks.

    A path of the table that the model does not have is left out, as one of split_plan is.
    """
    blocks = model.get_submodule(model.split_plan['blocks']).values()
    found = []
    for root in (model, *blocks):
        modules = dict(root.named_modules(remove_duplicate=False))
        for path in model.replaceable[kind]:
            owner, _, name = path.rpartition('.')
            part = modules.get(owner), name
            if hasattr(*part) and part not in found:
                found.append(part)
    return found


def replace_parts(model, kind, build):
    """Replace every part of one kind by build(part), in place."""
    for module, name in find_parts(model, kind):
        setattr(module, name, build(getattr(module, name)))


def replace_all(model, kind, build):
    """Replace every module of a class, but not of its subclasses, by build(module), in place."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is kind:
                setattr(parent, name, build(child))


@torch.no_grad()
def is_same_attention(attention, other, config, length, masks=(None,)):
    """Whether an attention module without dropout gives the results of other(q, k, v, mask), on the CPU.

    An attention that was edited in model.py may differ, even if only in training, which is compared if it has no
    dropout. The sequence has the heads of the model's config.
    masks: those to compare with, each None (causal) or bool (1, 1, length, length).
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, 16, generator=generator)
               for heads in (config.n_head, config.n_kv_head, config.n_kv_head))
    was_training = attention.training
    try:
        return all(torch.allclose(attention.train(mode)(q, k, v, mask=mask), other(q, k, v, mask), atol=1e-4)
                   for mask in masks for mode in {False, not getattr(attention, 'dropout', 0)})
    except (AttributeError, RuntimeError, TypeError, ValueError):  # of other arguments
        return False
    finally:
        attention.train(was_training)


def find_experts(model):
    """{name: module} of the model's RoutedExperts, which its split_plan names."""
    plan, found = model.split_plan, {}
    if 'experts' not in plan:
        return found
    for number, block in model.get_submodule(plan['blocks']).items():
        modules = dict(block.named_modules())
        if plan['experts'] in modules:
            found[f'{plan["blocks"]}.{number}.{plan["experts"]}'] = modules[plan['experts']]
    return found
