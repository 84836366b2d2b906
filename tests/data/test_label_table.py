"""Tables of labels: what they may look like, splits, batches, refusals."""

import json

from batch_checks import colored, fingerprint_of, take
import numpy as np
import pytest

from mod_jax import errors
from mod_jax.data import augment, fingerprint, images

LISTS = """file,tags
a.png,cat;dog
b.png, dog | emu
sub/c.png,"emu, cat"
d.png,
e.png,dog
f.png,cat
"""
COLUMNS = """file,dog,cat,emu,split
a.png,1,1,0,train
b.png,1,0,1,train
sub/c.png,0,1,1,val
d.png,0,0,,train
e.png,1,0,0,test
f.png,0,1,0,train
"""
# By name; the columns of COLUMNS, in their order.
TRUE = {
  'a.png': {'cat', 'dog'},
  'b.png': {'dog', 'emu'},
  'sub/c.png': {'cat', 'emu'},
  'd.png': set(),
  'e.png': {'dog'},
  'f.png': {'cat'},
}


@pytest.fixture
def folder(tmp_path):
  colored(tmp_path, *TRUE, 'not_in_the_table.png')
  return tmp_path


def make_config(folder, text, **kwargs):
  (folder / 'labels.csv').write_text(text, encoding='utf-8-sig')
  return images.ImageDataConfig(
    source='folder',
    path=str(folder),
    label_table='labels.csv',
    image_size=4,
    **kwargs,
  )


def number(pixels, config):
  return int(images.denormalize(config, pixels)[0, 0, 0])


def seen(config, split):
  """Returns the labels of every picture of a split, by its name."""
  names, classes = list(TRUE), images.class_names(config)
  rows = {}
  if split == 'eval':
    for batch in images.eval_batches(config, batch_size=4):
      assert batch['label'].dtype == np.int32
      for pixels, label, weight in zip(
        batch['image'], batch['label'], batch['weight'], strict=True
      ):
        if weight:
          rows[names[number(pixels, config)]] = label
        else:
          assert not label.any()
  else:
    count = len(images.open_split(config, 'train'))
    batches = take(images.train_iterator(config, batch_size=1, seed=0), count)
    for batch in batches:
      assert batch['target'].dtype == np.float32
      name = names[number(batch['image'][0], config)]
      rows[name] = batch['target'][0]
  return {
    name: {classes[v] for v in np.flatnonzero(row)}
    for name, row in rows.items()
  }


def test_columns_and_their_split(folder):
  config = make_config(folder, COLUMNS)
  assert images.class_names(config) == ('dog', 'cat', 'emu')
  train, held_out = seen(config, 'train'), seen(config, 'eval')
  assert train.keys() == {'a.png', 'b.png', 'd.png', 'f.png'}
  assert held_out.keys() == {'sub/c.png', 'e.png'}
  assert train | held_out == TRUE
  split = images.open_split(config, 'eval')
  assert [split.name(i) for i in range(len(split))] == ['sub/c.png', 'e.png']


def test_lists_and_a_split_by_names(folder):
  config = make_config(folder, LISTS, eval_fraction=0.4)
  assert images.class_names(config) == ('cat', 'dog', 'emu')
  train, held_out = seen(config, 'train'), seen(config, 'eval')
  assert train | held_out == TRUE
  assert not train.keys() & held_out.keys()
  assert held_out
  assert set().union(*train.values()) == {'cat', 'dog', 'emu'}
  # The split is of the names alone.
  more = LISTS.replace('a.png,cat;dog', 'a.png,dog;cat')
  assert seen(make_config(folder, more, eval_fraction=0.4), 'eval') == held_out


def test_smoothed_labels(folder):
  config = make_config(
    folder, COLUMNS, augment=augment.AugmentConfig(label_smoothing=0.2)
  )
  (batch,) = take(images.train_iterator(config, batch_size=4, seed=0), 1)
  np.testing.assert_allclose(np.unique(batch['target']), [0.1, 0.9])


def test_a_changed_label_is_noticed(folder):
  config = make_config(folder, COLUMNS)
  told = fingerprint_of(config)
  assert json.loads(json.dumps(told)) == told
  assert fingerprint_of(config) == told
  changed = make_config(folder, COLUMNS.replace('f.png,0', 'f.png,1'))
  (difference,) = fingerprint.differences(told, fingerprint_of(changed))
  assert 'training' in difference


def test_weights_balance_true_and_false(folder):
  config = make_config(folder, COLUMNS, class_weights='balanced')
  # Of four pictures, dog is true of 2, cat of 2, emu of 1.
  np.testing.assert_allclose(images.class_weights(config), [1, 1, 3])
  # A label that is true of all is still learned.
  table = COLUMNS.replace('d.png,0', 'd.png,1').replace('f.png,0', 'f.png,1')
  config = make_config(folder, table, class_weights='balanced')
  np.testing.assert_allclose(images.class_weights(config), [1 / 4, 1, 3])


def test_balanced_draws_of_labels(folder):
  config = make_config(folder, COLUMNS, sampling='balanced')
  batches = take(images.train_iterator(config, batch_size=4, seed=0), 30)
  count = dict.fromkeys(TRUE, 0)
  for batch in batches:
    for pixels in batch['image']:
      count[list(TRUE)[number(pixels, config)]] += 1
  # Three labels and none of them, 30 draws each: d alone has none, b alone emu.
  assert count['d.png'] == 30
  assert count['b.png'] == 30 + count['a.png'] - count['f.png']
  assert count['f.png'] == 15


@pytest.mark.parametrize(
  ('text', 'said'),
  [
    ('file,tags\n', 'line 1: expected a header'),
    ('file;tags\na.png;cat\n', 'row per picture, with commas between'),
    ('file,cat,cat\na.png,1,0\n', 'line 1: expected each title once'),
    ('file,cat\na.png,1\nb.png,0\n', "two labels or more, and there is ('0'"),
    ('file,tags\n\na.png,cat,dog', 'line 3: 3 cells, where the header has 2'),
    (COLUMNS.replace('b.png', 'a.png'), "line 3: 'a.png' stands above already"),
    (COLUMNS.replace('test', 'later'), "line 6: split='later': expected one"),
    (COLUMNS.replace('d.png,0', 'd.png,no'), "line 5: dog='no': expected 0 or"),
    (COLUMNS.replace('b.png,1,0,1', 'b.png,1,0,0'), "'emu' has no picture to"),
    (COLUMNS.replace('val', 'train').replace('test', 'train'), 'to hold out'),
    (COLUMNS.replace('e.png', 'nowhere.png'), 'nowhere.png'),
  ],
)
def test_tables_that_are_refused(folder, text, said):
  config = make_config(folder, text)
  with pytest.raises(errors.UserError) as info:
    len(images.open_split(config, 'train'))
  assert said in str(info.value)


def test_a_table_that_is_not_there(folder):
  config = images.ImageDataConfig(
    source='folder', path=str(folder), label_table='no.csv'
  )
  with pytest.raises(errors.UserError, match=r"label_table='no.csv' is not"):
    images.class_names(config)
  with pytest.raises(errors.UserError, match='read only with source='):
    images.ImageDataConfig(label_table='labels.csv')


def test_files_that_cannot_be_read_are_left_out(folder):
  (folder / 'd.png').write_bytes(b'no picture')
  with pytest.raises(errors.UserError, match=r'd\.png'):
    len(images.open_split(make_config(folder, COLUMNS), 'train'))
  config = make_config(folder, COLUMNS, unreadable='skip')
  assert len(images.open_split(config, 'train')) == 3
