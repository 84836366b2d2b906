"""Conversations about pictures: questions and answers in LLaVA's format.

The embedded default asks about scenes of digits (`data.scenes`), as much as
wanted; held-out questions are about held-out scenes.
"""

from collections.abc import Callable
import dataclasses
import functools
import json
import os
import pathlib
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from mod_jax import config as config_lib
from mod_jax import errors, paths
from mod_jax.data import augment as augment_lib
from mod_jax.data import common, image_folder
from mod_jax.data import fingerprint as fingerprints
from mod_jax.data.images import Preprocess
from mod_jax.data.scenes import SceneConfig, Scenes

IMAGE = '<image>'  # Stands in a text for a picture.
Kind = Literal['text', 'question', 'answer']
# Of each scene that is tried, few have a wanted answer, such as a rare sum.
_TRIES = 500
_APART = 0.03  # Least distance of two digits that are compared, of the side.
_WORDS = (
  *('zero', 'one', 'two', 'three', 'four'),
  *('five', 'six', 'seven', 'eight', 'nine'),
)


class Conversation(NamedTuple):
  """What is said about pictures.

  Attributes:
    pictures: Pillow images, in the order of the placeholders.
    turns: (question, answer) one after another; questions have an `IMAGE` for
      each picture.
    topic: index into `TOPICS` of a question about scenes; -1 for others.
  """

  pictures: tuple[Image.Image, ...]
  turns: tuple[tuple[str, str], ...]
  topic: int = -1

  def pieces(self) -> list[tuple[Kind, str]]:
    """Returns the text in pieces by kind, as LLaVA 1.5 is asked."""
    pieces = []
    for question, answer in self.turns:
      pieces += prompt(question)
      pieces.append(('answer', f' {answer}'))
    return pieces


def prompt(question: str) -> list[tuple[Kind, str]]:
  """Returns the pieces before an answer."""
  return [
    ('text', 'USER: '),
    ('question', question),
    ('text', ' ASSISTANT:'),
  ]


def with_pictures(question: str, count: int) -> str:
  """Returns a question with a placeholder for each of its pictures.

  They come first, as in LLaVA 1.5, unless the question has its own.
  """
  if IMAGE in question:
    return question
  return f'{IMAGE}\n' * count + question


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversationDataConfig:
  """Where conversations about pictures come from, and how long they may be.

  Attributes:
    source: 'scenes' asks about scenes of digits; 'llava' is a JSON file in the
      format of LLaVA, with `image` and `conversations` of each example.
    scenes: what scenes are made of, for 'scenes'.
    path: the JSON file, for 'llava'.
    folder: directory of its pictures; '' is that of the file.
    eval_fraction: part of the examples that is held out, for 'llava'.
    image_size: height and width of the tower's input in pixels.
    crop_fraction: side of the centred square crop over the resized picture's
      shorter side.
    resize: see `ImageDataConfig.resize`.
    resample: the filter for resizing.
    mean: subtracted from values in [0, 1], per channel.
    std: divided by, per channel.
    pictures: most pictures of a conversation.
    length: most tokens of a conversation besides its pictures. Longer ones are
      cut.
    tokenizer: 'bytes', or a 'sentencepiece' or 'huggingface' model.
    tokenizer_path: file or directory of that model.
    workers: processes that read pictures; 0 uses threads in this process.
  """

  source: Literal['scenes', 'llava'] = 'scenes'
  scenes: SceneConfig = SceneConfig()
  path: str = ''
  folder: str = ''
  eval_fraction: config_lib.Proper = 0.02
  image_size: config_lib.Pixels = 64
  crop_fraction: config_lib.Positive = 1.0
  resize: augment_lib.Resize = 'shorter_side'
  resample: Literal['nearest', 'bilinear', 'bicubic', 'lanczos'] = 'bicubic'
  mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
  std: tuple[config_lib.Positive, config_lib.Positive, config_lib.Positive] = (
    0.5,
    0.5,
    0.5,
  )
  pictures: config_lib.Size = 1
  length: config_lib.Size = 64
  tokenizer: Literal['bytes', 'sentencepiece', 'huggingface'] = 'bytes'
  tokenizer_path: str = ''
  workers: config_lib.Workers = 0

  def __post_init__(self):
    config_lib.validate(self)
    common.check_source(
      self,
      needed={'llava': ['path']},
      own={'path': ['llava'], 'folder': ['llava']},
    )

  @property
  def preprocess(self) -> Preprocess:
    names = ('image_size', 'crop_fraction', 'mean', 'std', 'resize')
    return Preprocess(
      **{name: getattr(self, name) for name in names},
      resample=Image.Resampling[self.resample.upper()],
    )


@functools.lru_cache(maxsize=4)
def open_split(config: ConversationDataConfig, split: Literal['train', 'eval']):
  """Returns a split: a length, `load(i)` for a `Conversation`, `fingerprint()`.

  Raises:
    errors.UserError: the data cannot be read.
  """
  if config.source == 'scenes':
    return SceneQuestions(config.scenes, config.image_size, split)
  return Llava(config.path, config.folder, split, config.eval_fraction)


def fingerprint(config: ConversationDataConfig) -> dict[str, Any]:
  """Returns a fingerprint of the data."""
  return {
    'source': config.source,
    'train': open_split(config, 'train').fingerprint(),
    'held_out': open_split(config, 'eval').fingerprint(),
  }


def _at_an_end(axis: int, sign: int):
  """Returns a function of a scene: its first or last digit along an axis."""

  def digit(rng, boxes_N4, digits_N):
    del rng
    order_N = np.argsort(sign * boxes_N4[:, axis])
    place_N = boxes_N4[order_N, axis]
    if len(place_N) > 1 and abs(place_N[1] - place_N[0]) < _APART:
      return None  # Nobody could tell.
    return '', int(digits_N[order_N[0]])

  return digit


def _count(wanted: int):
  """Returns a function that asks for a digit that is there so many times."""

  def ask(rng, boxes_N4, digits_N):
    del boxes_N4
    fits = np.flatnonzero(np.bincount(digits_N, minlength=10) == wanted)
    return (_WORDS[rng.choice(fits)], wanted) if len(fits) else None

  return ask


def _presence(wanted: str):
  def ask(rng, boxes_N4, digits_N):
    del boxes_N4
    there = np.bincount(digits_N, minlength=10) > 0
    fits = np.flatnonzero(there == (wanted == 'yes'))
    return _WORDS[rng.choice(fits)], wanted

  return ask


def _sum(rng, boxes_N4, digits_N):
  del rng, boxes_N4
  return '', int(digits_N.sum())


class _Topic(NamedTuple):
  """A kind of question.

  Attributes:
    question: with `{}` for a digit's name.
    answers: the possible answers, each asked for equally often.
    ask: makes of an answer a function that returns, of a scene, the digit's
      name and the true answer; None if it has none.
  """

  question: str
  answers: tuple[Any, ...]
  ask: Callable[[Any], Callable]


def _place(axis, sign):
  return lambda _: _at_an_end(axis, sign)


# Sums are asked for in the range where scenes of two to four digits are common.
_TOPICS = {
  'leftmost': _Topic('Which digit is leftmost?', (*range(10),), _place(0, 1)),
  'rightmost': _Topic(
    'Which digit is rightmost?', (*range(10),), _place(0, -1)
  ),
  'highest': _Topic('Which digit is highest?', (*range(10),), _place(1, 1)),
  'lowest': _Topic('Which digit is lowest?', (*range(10),), _place(1, -1)),
  'count': _Topic('How many times is there a {}?', (0, 1, 2), _count),
  'presence': _Topic('Is there a {}?', ('yes', 'no'), _presence),
  'sum': _Topic('What is the sum?', (*range(6, 22),), lambda _: _sum),
}
TOPICS = tuple(_TOPICS)


class SceneQuestions:
  """Questions about scenes, with random access.

  An answer is drawn first, then a scene that has it. So all answers to a
  question are equally frequent, and none can be guessed without the picture.
  """

  def __init__(self, config: SceneConfig, size: int, split: str):
    """Draws nothing yet; arguments are those of `Scenes`."""
    self._scenes = Scenes(config, size, split)
    self._key = (config.seed, int(split == 'eval'), 1)

  def __len__(self) -> int:
    return len(self._scenes)

  def fingerprint(self) -> dict[str, Any]:
    asked = [[topic.question, *topic.answers] for topic in _TOPICS.values()]
    return self._scenes.fingerprint() | {
      'questions': fingerprints.of_value(repr(asked))
    }

  def question(self, index: int) -> tuple[int, str, str, int]:
    """Returns scene, question, answer and topic, and paints nothing."""
    rng = np.random.default_rng((*self._key, int(index)))
    while True:
      number = int(rng.integers(len(_TOPICS)))
      topic = _TOPICS[TOPICS[number]]
      wanted = topic.answers[rng.integers(len(topic.answers))]
      ask = topic.ask(wanted)
      for _ in range(_TRIES):
        scene = int(rng.integers(len(self._scenes)))
        found = ask(rng, *self._scenes.objects(scene))
        if found is not None and found[1] == wanted:
          return scene, topic.question.format(found[0]), str(wanted), number

  def load(self, index: int) -> Conversation:
    scene, question, answer, topic = self.question(index)
    image = Image.fromarray(self._scenes.scene(scene).image_SSC)
    turn = f'{IMAGE}\n{question}', answer
    return Conversation((image,), (turn,), topic)


class Llava:
  """A part of a JSON file in the format of LLaVA, with random access."""

  def __init__(self, path: str, folder: str, split: str, eval_fraction: float):
    """Reads the file, and no picture.

    Args:
      path: of the JSON file, a list of objects with `conversations`, and
        `image` where there is a picture, or a list of several.
      folder: of the pictures; '' is that of the file.
      split: 'train' or 'eval'.
      eval_fraction: part of the examples that is held out, evenly spread.

    Raises:
      errors.UserError: it is no such file; names the example.
    """
    file = pathlib.Path(path).expanduser()
    if not file.is_file():
      raise paths.missing(file)
    try:
      examples = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
      raise errors.UserError(
        f'{file} is no JSON ({error}): fetch it again.'
      ) from error
    if not isinstance(examples, list) or not examples:
      raise errors.UserError(
        f'{file}: expected a list of objects with conversations, at least one.'
      )
    self._file = file
    self._folder = pathlib.Path(folder).expanduser() if folder else file.parent
    every = max(2, round(1 / eval_fraction))
    chosen = [
      (i, example)
      for i, example in enumerate(examples)
      if (i % every == every - 1) == (split == 'eval')
    ]
    if not chosen:
      raise errors.UserError(
        f'{file} has {len(examples)} examples, of which eval_fraction='
        f'{eval_fraction} holds none out: raise it, or add examples.'
      )
    self._examples = [self._read(*example) for example in chosen]

  def __len__(self) -> int:
    return len(self._examples)

  def fingerprint(self) -> dict[str, Any]:
    """Returns a fingerprint of the texts, and of the names of pictures."""
    return {'examples': fingerprints.of_value(repr(self._examples))}

  def load(self, index: int) -> Conversation:
    names, turns = self._examples[index]
    pictures = (
      image_folder.decode(os.fspath(self._folder / name), f'image {name!r}')
      for name in names
    )
    return Conversation(tuple(pictures), turns)

  def _read(self, index: int, example) -> tuple[tuple, tuple]:
    """Returns the names of the pictures, and the turns."""

    def wrong(what):
      return errors.UserError(
        f'{self._file}: example {index} {what}: correct it or remove it.'
      )

    fields = example if isinstance(example, dict) else {}
    said = fields.get('conversations')
    if not isinstance(said, list) or not said or len(said) % 2:
      raise wrong('has no conversations, of questions and answers in turn')
    values = []
    for i, part in enumerate(said):
      expected = ('human', 'gpt')[i % 2]
      part = part if isinstance(part, dict) else {}
      value = part.get('value')
      if part.get('from') != expected or not isinstance(value, str):
        raise wrong(f'has in part {i} no text from {expected!r}')
      values.append(value)
    names = fields.get('image', [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(
      isinstance(name, str) for name in names
    ):
      raise wrong('has an image that is no name of a file')
    for name in names:
      parts = pathlib.PurePosixPath(name)
      if parts.is_absolute() or '..' in parts.parts:
        raise wrong(f'has the image {name!r}, outside of the folder')
    placed = sum(value.count(IMAGE) for value in values[::2])
    if placed != len(names) or any(IMAGE in value for value in values[1::2]):
      raise wrong(
        f'has {len(names)} pictures and {placed} {IMAGE} in its questions'
      )
    return tuple(names), tuple(zip(values[::2], values[1::2], strict=True))
