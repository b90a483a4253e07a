"""Conversations with a model, for `python sample.py --chat` and `--serve`.

terminal.py talks with a person, by conversation.py, and server.py with programs that speak OpenAI's protocol.
"""
