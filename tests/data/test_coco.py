"""Detection data: COCO's files, batches of them, and what is refused."""

import copy
import dataclasses
import json

import numpy as np
from PIL import Image
import pytest

from mod_jax.data import coco, detection, fingerprint
from mod_jax.errors import UserError

# Ids of categories have gaps, and pictures are of different shapes.
DATA = {
  'categories': [{'id': 3, 'name': 'cat'}, {'id': 7, 'name': 'dog'}],
  'images': [
    {'id': 20, 'file_name': 'a.png', 'width': 40, 'height': 20},
    {'id': 10, 'file_name': 'b.png', 'width': 10, 'height': 30},
  ],
  'annotations': [
    {'image_id': 20, 'category_id': 7, 'bbox': [4, 2, 8, 10], 'iscrowd': 0},
    # Reaches beyond the picture's right edge, and is cut off there.
    {'image_id': 20, 'category_id': 3, 'bbox': [30, 10, 20, 5]},
    {'image_id': 20, 'category_id': 3, 'bbox': [0, 0, 4, 5], 'iscrowd': 1},
    # Left out: a box without an area.
    {'image_id': 20, 'category_id': 3, 'bbox': [50, 0, 5, 5]},
  ],
}


def write(folder, data=DATA, split='train'):
  (folder / 'annotations').mkdir(exist_ok=True)
  file = folder / 'annotations' / f'instances_{split}.json'
  file.write_text(data if isinstance(data, str) else json.dumps(data))
  (folder / split).mkdir(exist_ok=True)
  rng = np.random.default_rng(0)
  for image in DATA['images']:
    shape = (image['height'], image['width'], 3)
    pixels = rng.integers(0, 256, shape, np.uint8)
    Image.fromarray(pixels).save(folder / split / image['file_name'])
  return folder


def config(folder, **changes):
  return detection.DetectionDataConfig(
    **{'source': 'coco', 'path': str(folder), 'image_size': (20, 20)},
    **{'train_split': 'train', 'eval_split': 'train', 'most': 3},
    **changes,
  )


def test_objects_are_fractions_of_their_picture(tmp_path):
  split = coco.Coco(write(tmp_path), 'train')
  assert split.class_names == ('', '', '', 'cat', '', '', '', 'dog')
  assert [split.name(i) for i in range(2)] == ['a.png', 'b.png']
  assert split.most == 3
  _, objects = split.load(0)
  assert objects.label_N.tolist() == [7, 3, coco.of_crowd(3)]
  np.testing.assert_allclose(
    objects.box_N4,
    [
      [8 / 40, 7 / 20, 8 / 40, 10 / 20],
      [35 / 40, 12.5 / 20, 10 / 40, 5 / 20],
      [2 / 40, 2.5 / 20, 4 / 40, 5 / 20],
    ],
  )
  _, nothing = split.load(1)
  assert not len(nothing.label_N)  # A picture of nothing remains.


def test_both_splits_number_categories_alike(tmp_path):
  fewer = {name: DATA[name][-1:] for name in ('categories', 'images')}
  write(write(tmp_path), fewer | {'annotations': []}, 'fewer')
  both = config(tmp_path)
  for split in ('train', 'fewer'):
    detection.open_split(dataclasses.replace(both, eval_split=split), 'eval')
  swapped = dataclasses.replace(both, train_split='fewer')
  with pytest.raises(UserError, match="category 3 is 'cat', and 'none' in"):
    detection.open_split(swapped, 'eval')


def test_a_changed_box_or_picture_is_noticed(tmp_path):
  data = copy.deepcopy(DATA)
  before = coco.Coco(write(tmp_path, data), 'train').fingerprint()
  assert coco.Coco(write(tmp_path, data), 'train').fingerprint() == before
  Image.new('RGB', (10, 30)).save(tmp_path / 'train' / 'b.png')
  now = coco.Coco(tmp_path, 'train').fingerprint()
  assert fingerprint.differences({'train': before}, {'train': now}) == [
    'the training file b.png is changed'
  ]
  data['annotations'][0]['bbox'][2] += 1
  assert coco.Coco(write(tmp_path, data), 'train').fingerprint() != before


def test_batches_are_padded_and_count_each_picture_once(tmp_path):
  (batch,) = detection.eval_batches(config(write(tmp_path)), batch_size=3)
  assert batch['weight'].tolist() == [1, 1, 0]
  # The longer side fits, the other keeps the aspect ratio.
  assert batch['size'][:2].tolist() == [[10, 20], [20, 6]]
  assert batch['label'][:2].tolist() == [[7, 3, -5], [-1, -1, -1]]
  image = batch['image'][1]
  assert np.abs(image[:20, :6]).min(axis=-1).max() > 0
  assert not image[:, 6:].any()


def test_a_mirrored_picture_has_mirrored_boxes(tmp_path):
  write(tmp_path)
  plain, mirrored = (
    next(
      detection.train_iterator(config(tmp_path, flip=p), batch_size=2, seed=0)
    )
    for p in (0.0, 1.0)
  )
  (row,) = np.flatnonzero(plain['label'][:, 0] == 7)
  height, width = plain['size'][row]
  np.testing.assert_allclose(
    mirrored['image'][row, :height, :width],
    plain['image'][row, :height, :width][:, ::-1],
    atol=0.05,
  )
  box_N4, other_N4 = plain['box'][row, :2], mirrored['box'][row, :2]
  np.testing.assert_allclose(other_N4[:, 0], 1 - box_N4[:, 0], rtol=1e-6)
  np.testing.assert_array_equal(other_N4[:, 1:], box_N4[:, 1:])


def test_a_window_shows_what_its_boxes_say(tmp_path):
  white, corner = (20, 10, 30, 25), (0, 0, 6, 6)  # Left, top, width, height.
  data = {
    'categories': [{'id': 0, 'name': 'white'}, {'id': 1, 'name': 'corner'}],
    'images': [{'id': 0, 'file_name': 'c.png', 'width': 80, 'height': 60}],
    'annotations': [
      {'image_id': 0, 'category_id': i, 'bbox': box}
      for i, box in enumerate((white, corner))
    ],
  }
  write(tmp_path, data)
  pixels = np.zeros((60, 80, 3), np.uint8)
  pixels[10:35, 20:50] = 255
  Image.fromarray(pixels).save(tmp_path / 'train' / 'c.png')
  batches = detection.train_iterator(
    config(tmp_path, crop=1.0, flip=0.5, mean=(0, 0, 0), std=(1, 1, 1)),
    **{'batch_size': 1, 'seed': 0},
  )
  sizes, numbers, cut = set(), set(), 0
  for _ in range(40):
    batch = {name: x[0] for name, x in next(batches).items()}
    height, width = batch['size']
    white_HW = batch['image'][:height, :width, 0] > 0.5
    rows, columns = (np.flatnonzero(white_HW.any(axis=i)) for i in (1, 0))
    x, y, across, down = batch['box'][batch['label'] == 0][0]
    np.testing.assert_allclose(
      [columns[0], columns[-1] + 1, rows[0], rows[-1] + 1],
      np.array([x - across / 2, x + across / 2, y - down / 2, y + down / 2])
      * [width, width, height, height],
      atol=1.1,
    )
    sizes.add((int(height), int(width)))
    numbers.add(int((batch['label'] >= 0).sum()))
    cut += rows[0] == 0 or columns[0] == 0
  assert len(sizes) > 3
  assert numbers == {1, 2}  # The small one is not in all windows.
  assert cut


def changed(path, value):
  data = copy.deepcopy(DATA)
  *parents, last = path
  row = data
  for name in parents:
    row = row[name]
  row[last] = value
  return data


BOX = ('annotations', 0, 'bbox')
CATEGORIES = {'categories': DATA['categories']}
REFUSED = [
  ('{', 'no JSON'),
  ({'images': [], 'annotations': []} | CATEGORIES, 'images is empty'),
  (changed(('images',), []), 'image_id=20, which no image has'),
  (changed(('images', 0, 'width'), '40'), r"images\[0\] has width='40'"),
  (changed(('images', 0, 'height'), 0), r'images\[0\] has no area'),
  (changed(('images', 1, 'id'), 20), r'images\[1\] has id=20 once more'),
  (changed(('images', 0, 'file_name'), '../x.png'), 'outside of the folder'),
  (changed(('categories', 0, 'id'), 10**9), 'ids from 0 to 10,000'),
  (changed(('annotations', 0, 'category_id'), 4), 'category_id=4, which no'),
  (changed(BOX, [1, 2, 3]), r'annotations\[0\] has bbox=\[1, 2, 3\]'),
  (changed(BOX, [1, 2, 10**400, 4]), r'annotations\[0\] has bbox=\[1, 2, 10'),
  (changed(('annotations', 0, 'iscrowd'), '0'), r"\[0\] has iscrowd='0'"),
  (changed(BOX, [1, 2, float('inf'), 4]), r'annotations\[0\] has bbox'),
]


@pytest.mark.parametrize(('data', 'words'), REFUSED)
def test_is_refused_in_one_sentence(tmp_path, data, words):
  with pytest.raises(UserError, match=f'instances_train.json: .*{words}'):
    coco.Coco(write(tmp_path, data), 'train')


def test_what_does_not_fit_is_named(tmp_path):
  with pytest.raises(UserError, match='instances_val'):
    coco.Coco(write(tmp_path), 'val')
  with pytest.raises(UserError, match=r'no/annot.* downloaded: give the path'):
    coco.Coco(tmp_path / 'no', 'val')
  crowded = detection.DetectionDataConfig(
    **{'source': 'coco', 'path': str(tmp_path), 'train_split': 'train'}, most=1
  )
  with pytest.raises(UserError, match='most=1: a picture has 3 objects'):
    detection.open_split(crowded, 'train')
  (tmp_path / 'train' / 'a.png').write_bytes(b'no picture')
  with pytest.raises(UserError, match='a.png'):
    list(detection.eval_batches(config(tmp_path), batch_size=2))
  lying = Image.Exif()
  lying[0x0112] = 6  # It is shown turned by 90 degrees.
  Image.new('RGB', (40, 20)).save(tmp_path / 'train' / 'a.png', exif=lying)
  with pytest.raises(UserError, match='a.png has 20 x 40 .* has 40 x 20'):
    list(detection.eval_batches(config(tmp_path), batch_size=2))
