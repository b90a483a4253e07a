"""Evaluates models on tasks, `python -m kilogpt.evaluate`, and runs while they train.

tasks.py says what a task is and what its scores mean; scorer.py computes log-likelihoods, in any layout. Read
tasks.py first. generation.py continues texts, and harness.py lets lm-evaluation-harness use both.
"""
