"""Find and replace the parts of a model that a device or a layout needs in another form (GPT.replaceable)."""


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
