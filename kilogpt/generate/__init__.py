"""One engine for all text: sample.py, conversations, the server, kilogpt.load, evaluation, rollouts.

engine.py has the engine: requests join and leave a batch that runs on. draw.py draws tokens. layouts.py continues
prompts by a model in any layout: there `generate_in_layout` is what evaluation and rollouts call.
"""
