"""The command `python -m kilogpt.convert`: weights for other programs, and from them.

__main__.py reads its arguments, and kilogpt/weights does the work. docs/weights.md has examples.
"""
