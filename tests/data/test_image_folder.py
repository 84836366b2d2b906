"""Folders of pictures: layouts, splits, decoding, bad files."""

import io

import batch_checks
import numpy as np
from PIL import Image
import pytest

from mod_jax import errors
from mod_jax.data import image_folder, images


def encoded(color=(10, 20, 30), kind='PNG', mode='RGB', size=(6, 4), **kwargs):
  file = io.BytesIO()
  image = Image.new('RGB', size, color).convert(mode)
  image.save(file, kind, **kwargs)
  return file.getvalue()


def write(root, *names, content=None):
  content = encoded() if content is None else content
  batch_checks.write(root, dict.fromkeys(names, content))


def open_split(root, split='train', eval_fraction=0.3, unreadable='refuse'):
  return image_folder.open_split(
    str(root), split, eval_fraction=eval_fraction, unreadable=unreadable
  )


def contents(files):
  return [
    (name, int(label))
    for name, label in zip(files.names, files.labels, strict=True)
  ]


def config(root, **kwargs):
  return images.ImageDataConfig(
    source='folder', path=str(root), image_size=4, **kwargs
  )


@pytest.mark.parametrize('name', ['eval', 'val', 'validation', 'test'])
def test_split_layout(tmp_path, name):
  write(tmp_path, 'train/b/1.png', 'train/a/deep/er/2.PNG', 'train/a/1.png')
  write(tmp_path, 'train/c/3.png', f'{name}/b/9.png', f'{name}/c/8.png')
  # None of these is a picture of a class.
  write(tmp_path, 'train/notes.txt', 'train/a/notes.txt', 'train/a/._1.png')
  write(tmp_path, 'train/.hidden/1.png', 'other/x.png')
  assert images.class_names(config(tmp_path)) == ('a', 'b', 'c')
  train = open_split(tmp_path)
  assert contents(train) == [
    ('a/1.png', 0),
    ('a/deep/er/2.PNG', 0),
    ('b/1.png', 1),
    ('c/3.png', 2),
  ]
  held_out = open_split(tmp_path, 'eval')
  assert contents(held_out) == [('b/9.png', 1), ('c/8.png', 2)]
  assert held_out.class_names == ('a', 'b', 'c')
  _, decode, label = held_out.entry(1)
  assert label == 2
  assert decode().getpixel((0, 0)) == (10, 20, 30)
  assert len(images.open_split(config(tmp_path), 'train')) == 4
  assert len(images.open_split(config(tmp_path), 'eval')) == 2


def test_the_earlier_of_two_evaluation_folders_counts(tmp_path):
  for split in ('train', 'val', 'test'):
    write(tmp_path, f'{split}/a/{split}.png', f'{split}/b/{split}.png')
  assert contents(open_split(tmp_path, 'eval')) == [
    ('a/val.png', 0),
    ('b/val.png', 1),
  ]


@pytest.mark.parametrize('folder', ['', 'train/'])
def test_a_part_is_held_out_by_name(tmp_path, folder):
  names = [f'{c}/{i}.png' for c in 'ab' for i in range(40)]
  write(tmp_path, *(folder + n for n in names))
  train = [n for n, _ in contents(open_split(tmp_path))]
  held_out = [n for n, _ in contents(open_split(tmp_path, 'eval'))]
  assert sorted(train + held_out) == sorted(names)
  assert [sum(n[0] == c for n in held_out) for c in 'ab'] == [12, 12]
  image_folder._list_images.cache_clear()
  write(tmp_path, *(f'{folder}c/{i}.png' for i in (80, 81)))
  # A file's side does not change when other classes come.
  assert set(train) <= {n for n, _ in contents(open_split(tmp_path))}
  assert set(held_out) <= {n for n, _ in contents(open_split(tmp_path, 'eval'))}


def test_extreme_fractions_leave_something_on_each_side(tmp_path):
  write(tmp_path, 'a/1.png', 'a/2.png', 'b/1.png', 'b/2.png', 'b/3.png')
  most = [n for n, _ in contents(open_split(tmp_path, eval_fraction=0.999))]
  assert [n[0] for n in most] == ['a', 'b']
  least = contents(open_split(tmp_path, 'eval', eval_fraction=1e-9))
  assert [n[0] for n, _ in least] == ['a', 'b']


def test_a_class_may_be_called_train(tmp_path):
  write(tmp_path, *(f'{c}/{i}.png' for c in ('train', 'car') for i in (1, 2)))
  assert images.class_names(config(tmp_path)) == ('car', 'train')


@pytest.mark.parametrize(
  ('kind', 'mode'),
  [
    *(('PNG', mode) for mode in ('RGB', 'RGBA', 'L', 'LA', 'P', '1')),
    ('JPEG', 'CMYK'),
    *((kind, 'RGB') for kind in ('JPEG', 'WEBP', 'BMP', 'GIF', 'TIFF')),
  ],
)
def test_formats_and_modes(kind, mode):
  color = (10, 20, 30) if mode == 'RGB' else (255, 255, 255)
  image = image_folder.decode(encoded(color, kind, mode), 'it')
  assert image.mode == 'RGB'
  assert image.size == (6, 4)
  np.testing.assert_allclose(image.getpixel((3, 2)), color, atol=4)


@pytest.mark.filterwarnings('error', 'ignore:Corrupt EXIF')
def test_what_else_a_file_may_hold():
  turned = Image.Exif()
  turned[0x0112] = 6  # By 90 degrees.
  damaged = b'Exif\x00\x00MM\x00*\x00\x00\x00\x08\xff\xff'
  frame = Image.new('RGB', (6, 4), 'blue')
  for kwargs, size in (
    ({'mode': 'P', 'transparency': bytes(256)}, (6, 4)),
    ({'kind': 'GIF', 'save_all': True, 'append_images': [frame]}, (6, 4)),
    ({'kind': 'JPEG', 'exif': turned}, (4, 6)),
    ({'kind': 'JPEG', 'exif': damaged}, (6, 4)),
  ):
    file = encoded((204, 0, 0), **kwargs)
    opened = images.as_image(Image.open(io.BytesIO(file)))
    for image in (image_folder.decode(file, 'it'), opened):
      assert image.size == size
      np.testing.assert_allclose(image.getpixel((0, 0)), (204, 0, 0), atol=4)


# Files that are no pictures.


def test_bad_files_are_named_or_left_out(tmp_path, caplog):
  names = [f'{c}/{i}.png' for c in 'ab' for i in range(3)]
  write(tmp_path, *(f'{s}/{n}' for s in ('train', 'val') for n in names))
  write(tmp_path, 'train/a/empty.png', content=b'')
  write(tmp_path, 'train/b/text.jpg', content=b'no picture at all')
  message = (
    r'2 of the 8 files under .* cannot be read as pictures: a/empty.png '
    r"\(empty\), b/text.jpg \(no picture.*\); repair.*unreadable='skip'"
  )
  with pytest.raises(errors.UserError, match=message):
    images.train_iterator(config(tmp_path), batch_size=1, seed=0)
  # The held-out files are in order.
  assert len(list(images.eval_batches(config(tmp_path), batch_size=2))) == 3
  with caplog.at_level('WARNING', logger='absl'):
    train = open_split(tmp_path, unreadable='skip')
  assert [n for n, _ in contents(train)] == names
  assert '2 of the 8 files' in caplog.text
  assert 'a/empty.png (empty)' in caplog.text


def test_a_file_that_fails_at_decoding_is_named_or_left_out(tmp_path, caplog):
  # Files that begin well; one of each split ends too early.
  for split in ('train', 'val'):
    for c, color in (('a', (255, 0, 0)), ('b', (0, 0, 255))):
      for i in range(2):
        write(tmp_path, f'{split}/{c}/{i}.png', content=encoded(color))
    cut = encoded((9, 99, 9), size=(64, 64))[:-60]
    write(tmp_path, f'{split}/b/cut.png', content=cut)
  for batches in (
    images.train_iterator(config(tmp_path), batch_size=5, seed=0),
    images.eval_batches(config(tmp_path), batch_size=5),
  ):
    message = r"cut\.png' cannot be decoded \(.*unreadable='skip'"
    with pytest.raises(errors.UserError, match=message):
      next(batches)

  caplog.clear()
  skip = config(tmp_path, unreadable='skip')
  batches = list(images.eval_batches(skip, batch_size=5))
  assert [b['weight'].tolist() for b in batches] == [[1, 1, 1, 1, 0]]
  assert not batches[0]['image'][4].any()

  def pictures(seed):
    iterator = images.train_iterator(skip, batch_size=5, seed=seed)
    return [next(iterator) for _ in range(3)]

  for batch, again in zip(pictures(1), pictures(1), strict=True):
    np.testing.assert_array_equal(batch['image'], again['image'])
    # Red and blue alone, each with its own label; the next file is the first.
    red = batch['image'][:, 0, 0, 0] > 0
    blue = batch['image'][:, 0, 0, 2] > 0
    np.testing.assert_array_equal(batch['target'], np.stack([red, blue], 1))
    assert red.sum() == 3
  # Each file once, however often it was met, and without the advice.
  for split in ('train', 'val'):
    assert caplog.text.count(f"{split}/b/cut.png' cannot be decoded") == 1
  assert 'unreadable=' not in caplog.text


def tiff(values):
  file = io.BytesIO()
  Image.fromarray(values).save(file, 'TIFF')
  return file.getvalue()


def test_floating_point_pictures_run_from_0_to_1():
  values = np.array([[0, 0.25], [0.5, 1]], np.float32)
  decoded = np.asarray(image_folder.decode(tiff(values), 'x'))
  np.testing.assert_array_equal(decoded[..., 0], [[0, 64], [128, 255]])
  assert decoded.shape == (2, 2, 3)
  for value, told in ((1.5, '0.25 to 1.5'), (-1, '-1 to 1'), (np.nan, 'nan')):
    values[0, 0] = value
    with pytest.raises(image_folder.UnreadableImageError, match=told):
      image_folder.decode(tiff(values), 'x')


def test_integers_of_unknown_scale_are_refused(tmp_path):
  # When the files are listed, and not after an hour of training.
  measured = tiff(np.array([[0, 70_000], [1, 2]], np.int32))
  write(tmp_path, *(f'train/{c}/{i}.png' for c in 'ab' for i in '12'))
  write(tmp_path, 'train/b/3.tif', content=measured)
  with pytest.raises(errors.UserError, match=r'b/3.tif \(nothing says which'):
    open_split(tmp_path)
  assert len(open_split(tmp_path, unreadable='skip')) > 0


def test_greys_of_16_bits_keep_their_upper_8():
  pgm = b'P5 2 1 65535\n' + np.array([[512, 65535]], '>u2').tobytes()
  png = io.BytesIO()
  Image.fromarray(np.array([[512, 65535]], np.uint16)).save(png, 'PNG')
  for content in (pgm, png.getvalue()):
    decoded = np.asarray(image_folder.decode(content, 'x'))
    np.testing.assert_array_equal(decoded[0, :, 0], [2, 255])


@pytest.mark.parametrize('layout', ['', 'train/'])
def test_links_in_circles_do_not_multiply_pictures(tmp_path, layout, caplog):
  names = [
    f'{c}/{sub}{i}.png' for c in 'ab' for sub in ('', 'in/') for i in '12'
  ]
  write(tmp_path, *(layout + name for name in names))
  shared = tmp_path.with_name(f'{tmp_path.name}_shared')
  write(shared, '7.png')
  for link, target in (
    ('a/above', tmp_path),
    ('a/classes', tmp_path / layout),
    ('a/in/self', tmp_path / layout / 'a'),
    ('a/sibling', tmp_path / layout / 'b'),
    ('a/inner', tmp_path / layout / 'a/in'),
    ('a/shared', shared),
    ('b/shared', shared),
  ):
    (tmp_path / layout / link).symlink_to(target, target_is_directory=True)
  with caplog.at_level('WARNING', logger='absl'):
    train = contents(open_split(tmp_path))
  held_out = contents(open_split(tmp_path, 'eval'))
  found = [name for name, _ in train + held_out]
  real = [(tmp_path / layout / name).resolve() for name in found]
  assert len(real) == len(set(real)) == len(names) + 1
  assert all(name[0] == 'ab'[label] for name, label in train + held_out)
  assert "a/above' leads to" in caplog.text
