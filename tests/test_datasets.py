"""How a dataset is found by its name, what is read of its meta files, and what its fingerprint notices."""
import numpy as np
import pytest

from data.datasets import fingerprint

pytestmark = pytest.mark.quick


def test_fingerprint_notices_other_data_and_only_other_data(tmp_path):
    for name, seed in ('train_000.bin', 0), ('train_001.bin', 1), ('val.bin', 2):
        np.random.default_rng(seed).integers(0, 65, 100_000, dtype='<u2').tofile(tmp_path / name)
    former = fingerprint(str(tmp_path))
    assert {name: size for name, (size, _) in former.items()} == dict.fromkeys(
        ['train_000.bin', 'train_001.bin', 'val.bin'], 200_000)
    assert len({digest for _, digest in former.values()}) == 3
    (tmp_path / 'meta.json').write_text('{}')  # not a shard
    assert fingerprint(str(tmp_path)) == former
    for changed in 0, 99_999:  # the first and the last token
        tokens = np.fromfile(tmp_path / 'val.bin', '<u2')
        tokens[changed] ^= 1
        tokens.tofile(tmp_path / 'val.bin')
        later = fingerprint(str(tmp_path))
        assert [name for name in former if later[name] != former[name]] == ['val.bin']
        tokens[changed] ^= 1
        tokens.tofile(tmp_path / 'val.bin')
    (tmp_path / 'train_001.bin').write_bytes(b'short')
    assert fingerprint(str(tmp_path))['train_001.bin'][0] == 5
    (tmp_path / 'train_001.bin').unlink()
    assert list(fingerprint(str(tmp_path))) == ['train_000.bin', 'val.bin']
