"""The reward of a text that continues a prompt of data/sums: 1 if it is the answer, up to a half for digits in place."""


def reward(row, text):
    if text == row['answer']:
        return 1.0
    in_place = sum(found == digit for found, digit in zip(text, row['answer']))
    return 0.5 * in_place / max(len(text), len(row['answer']))
