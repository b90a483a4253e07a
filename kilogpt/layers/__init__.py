"""Layers that `model.py` builds in where a config asks for them: what a GPT can have besides GPT-2's parts.

options.py is the list of keys, and the place to begin. rope.py computes rotary angles, attention.py has
attention with a window or a cap and the norm over all heads, cache.py keeps keys and values while a text is
written, and mixture.py is the mixture of experts.
"""
