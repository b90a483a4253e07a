r"""Write English text from Debian's packages, to compare recipes on.

    python dev/english.py english.txt
    python data/text/train_tokenizer.py --input=english.txt --vocab_size=4096 --out=bpe4096
    python data/text/prepare.py --input=english.txt --tokenizer=bpe4096 --out=data4096

Downloads manuals and dictionaries with `apt-get download` to a temporary folder, and nothing is installed. Text
loses its markup, a paragraph that appears again is left out, and pieces of about 3 kB are shuffled, so that the
validation text at the end is like the rest. PACKAGES gave 126 MB in November 2026; their later versions give a
little more or less, so that losses compare only on the same file.
"""
import argparse
import glob
import gzip
import html
import os
import random
import re
import subprocess
import tempfile

PACKAGES = ('dict-gcide dict-wn linux-doc-6.1 python3.11-doc llvm-14-doc perl-doc git-doc postgresql-doc-15 '
            'debian-reference-en r-doc-html').split()
PIECE = 3000  # characters
NOT_TEXT = re.compile(r'(?is)<(script|style|head|nav)\b.*?</\1>|<!--.*?-->')
BLOCK = re.compile(r'(?i)</?(p|div|li|ul|ol|dl|dt|dd|table|tr|h[1-6]|pre|section|br)\b[^>]*>')
TAG = re.compile(r'<[^>]*>')
LETTER = re.compile('[A-Za-z]')  # of English: pages come in other languages too


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('out', help='the text file to write')
    parser.add_argument('--packages', nargs='+', default=PACKAGES)
    options = parser.parse_args()
    seen, pieces, piece = set(), [], []
    with tempfile.TemporaryDirectory() as folder:
        for package in options.packages:
            before = sum(map(len, pieces))
            for paragraph in paragraphs_of(package, folder):
                if hash(paragraph) in seen:
                    continue
                seen.add(hash(paragraph))
                piece.append(paragraph)
                if sum(map(len, piece)) > PIECE:
                    pieces.append('\n\n'.join(piece))
                    piece = []
            print(f'{package}: {(sum(map(len, pieces)) - before) / 1e6:.1f} million characters')
    random.Random(1).shuffle(pieces)
    with open(options.out, 'w', encoding='utf-8') as file:
        file.write('\n\n'.join(pieces))


def paragraphs_of(package, folder):
    """The paragraphs of a package's dictionaries, web pages, manual pages in Perl's format and plain texts."""
    root = os.path.join(folder, package)
    os.makedirs(root)
    subprocess.run(['apt-get', 'download', '-qq', '-o', 'APT::Sandbox::User=root', package], cwd=root, check=True)
    subprocess.run(['dpkg', '-x', *glob.glob('*.deb', root_dir=root), 'files'], cwd=root, check=True)
    for path in sorted(glob.glob(os.path.join(root, 'files', '**'), recursive=True)):
        if os.path.isfile(path) and not os.path.islink(path):
            yield from paragraphs_in(path)


def paragraphs_in(path):
    name = path.removesuffix('.gz')
    is_page = name.endswith(('.html', '.htm'))
    if not is_page and not name.endswith(('.dict.dz', '.pod', '.txt', '.info')) or name.endswith('.rst.txt'):
        return
    with (gzip.open if path.endswith(('.gz', '.dz')) else open)(path, 'rb') as file:
        text = file.read().decode('utf-8', errors='ignore')
    if is_page:
        text = html.unescape(TAG.sub('', BLOCK.sub('\n\n', NOT_TEXT.sub('', text))))
    for paragraph in re.split(r'\n\s*\n', text):
        paragraph = re.sub(r'[ \t]+', ' ', paragraph).strip()
        if len(paragraph) > 60 and len(LETTER.findall(paragraph)) > 0.6 * len(paragraph):
            yield paragraph


if __name__ == '__main__':
    main()
