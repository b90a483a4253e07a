"""The reward of a text that continues a prompt of data/sums: 1 if it is the sum, and up to a half for digits in place."""


def reward(row, text):
    expected = str(row['sum'])
    if text == expected:
        return 1.0
    places = zip(reversed(text), reversed(expected))  # units first
    return 0.5 * sum(found == digit for found, digit in places) / max(len(text), len(expected))
