"""Files of arrays: read whatever was written, written whole or not at all."""

import io
import zipfile

import chex
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.flax

from mod_jax.convert import files
from mod_jax.errors import UserError

RNG = np.random.default_rng(0)


@pytest.mark.parametrize('suffix', files.SUFFIXES)
def test_round_trip(tmp_path, suffix):
  square = RNG.normal(size=(3, 3)).astype(np.float32)
  path = tmp_path / 'new' / f'weights{suffix}'
  files.write(path, {'a.b': square, 'turned': square.T})
  found = files.read(path)
  assert set(found) == {'a.b', 'turned'}
  np.testing.assert_array_equal(found['a.b'], square)
  np.testing.assert_array_equal(found['turned'], square.T)
  assert [child.name for child in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16', 'float64'])
def test_floats_are_read_as_float32(tmp_path, dtype):
  array = jnp.asarray(RNG.normal(size=4), jnp.float32)
  if dtype == 'float64':
    np.savez(tmp_path / 'w.npz', x=np.asarray(array, dtype))
    path = tmp_path / 'w.npz'
  else:
    array = array.astype(dtype)
    path = tmp_path / 'w.safetensors'
    safetensors.flax.save_file({'x': array}, path)
  found = files.read(path)['x']
  assert found.dtype == np.float32
  np.testing.assert_array_equal(found, np.asarray(array, np.float32))


def test_safetensors_carry_the_note_that_hugging_face_wants(tmp_path):
  path = tmp_path / 'w.safetensors'
  files.write(path, {'x': np.zeros(1, np.float32)})
  with safetensors.safe_open(path, framework='np') as file:
    assert file.metadata() == {'format': 'pt'}


def test_small_files_do_not_become_large(tmp_path):
  """Nor is less of a packed array read than its hash is of."""
  path = tmp_path / 'w.npz'
  np.savez_compressed(path, x=RNG.normal(size=2000))
  assert files.read(path)['x'].shape == (2000,)
  np.savez_compressed(path, x=np.zeros(10**6))
  with pytest.raises(UserError, match='more than 16 times its own size'):
    files.read(path)
  with zipfile.ZipFile(path, 'w') as archive:
    header = io.BytesIO()
    array = {'shape': (10**13,), 'fortran_order': False, 'descr': '<f4'}
    np.lib.format.write_array_header_1_0(header, array)
    archive.writestr('x.npy', header.getvalue())
  with pytest.raises(UserError, match='cannot be read as npz'):
    files.read(path)


def test_the_model_of_a_directory(tmp_path, monkeypatch):
  (tmp_path / 'pytorch_model.bin').touch()
  assert files.find(tmp_path).name == 'pytorch_model.bin'
  values = {'a': np.zeros(2, np.float32), 'b': np.ones(3, np.float32)}
  monkeypatch.setattr(files, 'SHARD', 8)
  files.write_sharded(
    tmp_path, [(k, 8, lambda x=x: x) for k, x in values.items()]
  )
  assert len(list(tmp_path.glob(files.SHARDS))) == 2
  chex.assert_trees_all_equal(files.read(tmp_path), values)
  chex.assert_trees_all_equal(files.read(files.find(tmp_path)), values)
  path = tmp_path / 'model.safetensors'
  files.write(path, {'x': np.ones(1, np.float32)})
  assert files.find(tmp_path) == path
  assert list(files.read(tmp_path)) == ['x']


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
  path = tmp_path / 'w.npz'
  files.write(path, {'x': np.ones(1, np.float32)})
  before = path.read_bytes()

  def full(file, **arrays):
    file.write(b'half')
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(np, 'savez', full)
  with pytest.raises(UserError, match='cannot be written .No space left'):
    files.write(path, {'x': np.zeros(1, np.float32)})
  assert path.read_bytes() == before
  assert list(tmp_path.iterdir()) == [path]
