"""PyTorch's files: what it wrote is read, and nothing in them is run.

`tools/golden/make_vit.py` wrote the files, with PyTorch.
"""

import collections
import io
import os
import pathlib
import pickle
import zipfile

import numpy as np
import pytest
import tiny

from mod_jax.convert import files, torch_files
from mod_jax.errors import UserError

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
SAVED = ('tensors.pth', 'tensors_legacy.pth')


@pytest.mark.parametrize('name', SAVED)
def test_tensors_of_each_type_and_views(name):
  found = torch_files.read(GOLDEN / name)
  with np.load(GOLDEN / 'tensors.npz') as wanted:
    assert set(found) == set(wanted.files)
    for name, array in wanted.items():
      np.testing.assert_array_equal(found[name], array, err_msg=name)
      assert found[name].shape == array.shape
      dtype = 'bfloat16' if name == 'bfloat16' else array.dtype.name
      assert found[name].dtype.name == dtype
  assert files.read(GOLDEN / SAVED[0])['bfloat16'].dtype == np.float32


class Unpickler(pickle.Unpickler):
  """Another reader: runs the pickle, with stand-ins for what it calls."""

  def find_class(self, module, name):
    return {
      'collections.OrderedDict': collections.OrderedDict,
      'torch._utils._rebuild_tensor_v2': lambda *view: view,
      'torch.FloatStorage': np.float32,
      'torch.LongStorage': np.int64,
    }[f'{module}.{name}']

  def persistent_load(self, pid):
    return pid


@pytest.mark.parametrize('key', [None, 'model'])
def test_what_is_written_is_a_pickle_of_tensors(tmp_path, key):
  arrays = {
    'a.weight': np.arange(6, dtype=np.float32).reshape(2, 3),
    'turned': np.arange(600, dtype=np.float32).reshape(2, 300).T,
    'count': np.int64(128),
  }
  path = tmp_path / 'w.pth'
  files.write(path, arrays, torch_key=key)
  with zipfile.ZipFile(path) as archive:
    value = Unpickler(io.BytesIO(archive.read('archive/data.pkl'))).load()
    value = value[key] if key else value
    assert list(value) == list(arrays)
    for name, array in arrays.items():
      (kind, dtype, place, device, count), offset, shape, strides, *_ = value[
        name
      ]
      assert (kind, device, offset) == ('storage', 'cpu', 0)
      numbers = np.frombuffer(archive.read(f'archive/data/{place}'), dtype)
      assert count == len(numbers) == array.size
      assert shape == array.shape
      assert len(strides) == array.ndim
      np.testing.assert_array_equal(numbers.reshape(shape), array)
  found = files.read(path)
  tiny.same(found, arrays)
  assert all(found[name].dtype == x.dtype for name, x in arrays.items())


def archive(path, pickled, *, kind=zipfile.ZIP_STORED, **entries):
  with zipfile.ZipFile(path, 'w', kind) as file:
    for name, data in {'data.pkl': pickled, **entries}.items():
      file.writestr(f'x/{name}', data)
  return path


class Fault:
  """Pickled, a call of whatever it was made with."""

  def __init__(self, function, *args):
    self.call = function, args

  def __reduce__(self):
    return self.call


@pytest.mark.parametrize('beside', [False, True])
@pytest.mark.parametrize('legacy', [False, True])
def test_nothing_is_run(tmp_path, beside, legacy):
  made = tmp_path / 'made'
  value = Fault(os.mkdir, str(made))
  value = {'model': {}, 'args': value} if beside else {'model': value}
  pickled = pickle.dumps(value, protocol=2)
  path = tmp_path / 'w.pth'
  if legacy:
    header = (0x1950A86A20F9469CFC6C, 1001, {'little_endian': True})
    path.write_bytes(
      b''.join(pickle.dumps(x, protocol=2) for x in header) + pickled
    )
  else:
    archive(path, pickled)
  pattern = r'w.pth asks for posix.mkdir, and nothing is run here'
  with pytest.raises(UserError, match=pattern):
    files.read(path)
  assert not made.exists()
  # It would have been.
  pickle.loads(pickled)
  assert made.exists()


def plain(value):
  """Returns the instructions that make a value."""
  return pickle.dumps(value, protocol=2)[2:-1]


def tensor(*view):
  """Returns a pickle of one tensor, this view of 4 numbers."""
  storage = (
    *(b'(', plain('storage'), b'ctorch\nFloatStorage\n'),
    *(plain('0'), plain('cpu'), plain(4), b'tQ'),
  )
  return b''.join(
    (
      *(b'\x80\x02}', plain('x'), b'ctorch._utils\n_rebuild_tensor_v2\n('),
      *(*storage, *map(plain, view), b'tRs.'),
    )
  )


def test_views_within_their_numbers(tmp_path):
  data = {'data/0': np.arange(4, dtype='<f4').tobytes()}

  def read(*view):
    return files.read(archive(tmp_path / 'w.pth', tensor(*view), **data))

  found = read(0, (2, 2), (1, 2))['x']
  np.testing.assert_array_equal(found, [[0, 2], [1, 3]])
  for view in (
    (1, (2, 2), (2, 1)),
    (0, (5,), (1,)),
    (-1, (2,), (1,)),
    (0, (2,), (-1,)),
    (0, (2, 2), (1,)),
    (0, ('2',), (1,)),
  ):
    with pytest.raises(UserError, match='cannot be read as pth'):
      read(*view)
  with pytest.raises(UserError, match='more numbers than it holds bytes'):
    read(0, (10**12,), (0,))


def test_storages_are_no_larger_than_the_file(tmp_path):
  """Nor are entries that overlap, or are longer than their storage, read."""
  storages = [
    b''.join(
      (
        *(plain(str(i)), b'(', plain('storage'), b'ctorch\nFloatStorage\n'),
        *(plain(str(i)), plain('cpu'), plain(100), b'tQs'),
      )
    )
    for i in range(9)
  ]
  path = archive(tmp_path / 'w.pth', b'\x80\x02}' + b''.join(storages) + b'.')
  with pytest.raises(UserError, match='more numbers than it holds bytes'):
    files.read(path)
  data = {'data/0': bytes(100)}
  archive(path, tensor(0, (4,), (1,)), **data)
  with pytest.raises(UserError, match='data/0 is longer'):
    files.read(path)


def test_small_files_do_not_grow(tmp_path):
  path = archive(
    tmp_path / 'w.pth', b'\x80\x02}.' + bytes(10**6), kind=zipfile.ZIP_DEFLATED
  )
  assert path.stat().st_size < 10**4
  with pytest.raises(UserError, match="compressed entry 'x/data.pkl'"):
    files.read(path)
  # An index of four billions would be a list as long, in Python's own reader.
  archive(path, b'\x80\x02}r\xff\xff\xff\xff.')
  with pytest.raises(UserError, match='no dictionary of weights'):
    files.read(path)
  # Tuples of tuples of tuples, as a key: hashing them would take for ever.
  nested = b')' + b'q\x00h\x00\x86' * 60
  archive(path, b'\x80\x02}' + nested + b'K\x00s.')
  with pytest.raises(UserError, match='a key that is neither'):
    files.read(path)


def test_the_prefix_of_parallel_training_is_taken_off(tmp_path):
  files.write(tmp_path / 'w.pth', {'module.a': np.ones(1, np.float32)})
  assert list(files.read(tmp_path / 'w.pth')) == ['a']
