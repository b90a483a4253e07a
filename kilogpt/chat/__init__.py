"""Conversations with a model, for `python sample.py --chat` and `--serve`.

conversation.py generates an answer token by token, and keeps what the model has read for the next one: read
it first. terminal.py talks with a person, and server.py with programs that speak OpenAI's protocol.
"""
