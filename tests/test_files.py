"""The first of the cases that `python tools/fuzz_files.py` goes on with."""

import random
import shutil

import fuzz_files
import pytest


@pytest.mark.slow
@pytest.mark.parametrize('name', fuzz_files.KINDS)
def test_flipped_bits_neither_crash_nor_deceive(name, tmp_path):
  kind = fuzz_files.KINDS[name]
  source = tmp_path / 'whole'
  source.mkdir()
  kind.make(source)
  whole = kind.read(source)
  for i in range(6):
    folder = tmp_path / str(i)
    shutil.copytree(source, folder)
    path, data = fuzz_files.draw(source, kind, random.Random(i))
    (folder / path.relative_to(source)).write_bytes(data)
    end = fuzz_files.attempt(kind, folder, whole)
    assert end in ('refused', 'accepted'), f'{path.name}: {end}'
