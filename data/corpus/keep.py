"""An example of a filter for data/corpus/prepare.py: documents of at least 200 characters, half of them letters."""


def keep(text):
    """True to keep a document, False to leave it out, or the text to keep instead."""
    return len(text) >= 200 and sum(map(str.isalpha, text)) >= len(text) / 2
