"""The documented limits: sentences with which train.py may refuse keys that do not go together."""
import functools
import os
import re

from kilogpt.launch_train import ROOT

PAGE = os.path.join(ROOT, 'docs', 'layouts.md')


@functools.cache
def documented_sentences():
    """[compiled pattern] of the table of sentences in docs/layouts.md, in which … stands for any text."""
    with open(PAGE, encoding='utf-8') as file:
        table = file.read().partition('<!-- refused -->')[2].partition('<!-- end -->')[0]
    sentences = re.findall(r'^\| `(.+?)` \|', table, re.MULTILINE)
    return [re.compile(re.escape(sentence).replace('…', '.*')) for sentence in sentences]


def is_documented(sentence):
    """Whether docs/layouts.md has this sentence."""
    return any(pattern.search(sentence) for pattern in documented_sentences())
