"""Tiny data sets of TFDS, in ArrayRecord, written without TensorFlow."""

import io

import numpy as np
from PIL import Image
import pytest


@pytest.fixture(scope='session')
def prepare_tfds(tmp_path_factory):
  """Returns a function (name, features, splits) -> directory of a data set."""
  import tensorflow_datasets as tfds

  tfds.disable_progress_bar()
  root = str(tmp_path_factory.mktemp('tfds'))

  def prepare(name, features, **splits):
    def info(self):
      described = tfds.features.FeaturesDict(features)
      return tfds.core.DatasetInfo(builder=self, features=described)

    members = {
      # For a class in a package TFDS would want importlib_resources, which it
      # does not install on this version of Python.
      '__module__': 'tiny_sets',
      'VERSION': tfds.core.Version('1.0.0'),
      '_info': info,
      '_split_generators': lambda self, _: {
        split: enumerate(examples) for split, examples in splits.items()
      },
      '_generate_examples': None,
    }
    kind = type(name, (tfds.core.GeneratorBasedBuilder,), members)
    builder = kind(data_dir=root, file_format='array_record')
    builder.download_and_prepare()
    return str(builder.data_path)

  return prepare


@pytest.fixture(scope='session')
def tfds_pictures(prepare_tfds):
  """By name: 12 training pictures of colours 0 to 11, held-out 20 to 24."""
  from tensorflow_datasets import features

  def png(i):
    file = io.BytesIO()
    Image.new('RGB', (6, 4), (i, 100, 7)).save(file, 'PNG')
    # From bytes, TFDS encodes without TensorFlow. The last one is cut off.
    return file.getvalue() if i != 24 else file.getvalue()[:45]

  def array(channels=3, dtype=np.uint8):
    return features.Tensor(shape=(4, 6, channels), dtype=dtype)

  def rgb(i):
    return np.full((4, 6, 3), (i, 100, 7), np.uint8)

  classes = features.ClassLabel(names=['cat', 'dog', 'emu'])
  integers = features.Scalar(np.int64)
  kinds = {
    # The name and the feature of the label, the feature of the picture, both.
    'Files': ('label', classes, features.Image(), lambda i: (i % 3, png(i))),
    'Arrays': ('label', classes, array(), lambda i: (i % 3, rgb(i))),
    'Grey': ('label', classes, array(1), lambda i: (i % 3, rgb(i)[..., :1])),
    'Floats': (
      *('label', classes, array(dtype=np.float32)),
      lambda i: (i % 3, rgb(i).astype(np.float32)),
    ),
    'Unlabelled': ('n', integers, array(), lambda i: (i, rgb(i))),
    'Hidden': ('label', classes, array(), lambda i: (-1, rgb(i))),
  }
  splits = {'train': range(12), 'validation': range(20, 25)}
  return {
    name: prepare_tfds(
      f'Tiny{name}',
      {label: labels, 'image': pictures},
      **{
        split: [
          dict(zip((label, 'image'), make(i), strict=True)) for i in numbers
        ]
        for split, numbers in splits.items()
      },
    )
    for name, (label, labels, pictures, make) in kinds.items()
  }


@pytest.fixture(scope='session')
def tfds_documents(prepare_tfds):
  """The directory of 90 texts to train on, 17 held out, and blank ones."""
  from tensorflow_datasets import features

  texts = [f'<{i:03d}>' + 'é' * (i % 7) if i != 5 else '' for i in range(90)]
  splits = {'train': texts, 'test': texts[:17], 'blank': [''] * 3}
  return prepare_tfds(
    'TinyDocuments',
    {'text': features.Text(), 'n': features.Scalar(np.int64)},
    **{
      split: [{'text': text, 'n': n} for n, text in enumerate(texts)]
      for split, texts in splits.items()
    },
  )
