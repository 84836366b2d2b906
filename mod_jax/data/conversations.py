"""Conversations about pictures: scenes, LLaVA's files, and tables.

The default needs no files: it asks questions about scenes of digits
(`data.scenes`). Held-out questions are about held-out scenes.
"""

from collections.abc import Callable, Iterator
import csv
import dataclasses
import functools
import json
import os
import pathlib
from typing import Any, Literal, NamedTuple, get_args

from absl import logging
import numpy as np
from PIL import Image

from mod_jax import config as config_lib
from mod_jax import errors, paths
from mod_jax.data import common, image_folder
from mod_jax.data import fingerprint as fingerprints
from mod_jax.data import resize as resize_lib
from mod_jax.data.images import Preprocess
from mod_jax.data.scenes import SceneConfig, Scenes

IMAGE = '<image>'  # Placeholder for a picture in a text.
Kind = Literal['text', 'question', 'answer']
Topic = Literal[
  *('leftmost', 'rightmost', 'highest', 'lowest'),
  *('count', 'presence', 'sum', 'digits'),
]
TOPICS: tuple[Topic, ...] = get_args(Topic)
# Topics that ask for a single answer; 'digits' asks for the scene's caption.
QUESTIONS = TOPICS[:-1]
# Scenes that are tried for a wanted answer; few have a rare one, as some sums.
_TRIES = 500
_DRAWS = 200  # Pairs of topic and answer that are tried for a question.
# Least distance of two digits to compare, as a fraction of the picture's side.
_APART = 0.03
_WORDS = (
  *('zero', 'one', 'two', 'three', 'four'),
  *('five', 'six', 'seven', 'eight', 'nine'),
)


class Conversation(NamedTuple):
  """Pictures, and questions and answers about them.

  Attributes:
    pictures: Pillow images, in the order of the placeholders.
    turns: (question, answer) one after another; questions have an `IMAGE` for
      each picture.
    topic: index into `TOPICS` of a question about scenes; -1 for others.
    objects: (box, digit) of each digit of a scene, where a box is centre x,
      centre y, width and height as fractions of the picture.
  """

  pictures: tuple[Image.Image, ...]
  turns: tuple[tuple[str, str], ...]
  topic: int = -1
  objects: tuple[tuple[tuple[float, ...], str], ...] = ()

  def pieces(self) -> list[tuple[Kind, str]]:
    """Returns the text as pieces (kind, text) in LLaVA 1.5's prompt format."""
    pieces = []
    for question, answer in self.turns:
      pieces += prompt(question)
      pieces.append(('answer', f' {answer}'))
    return pieces


def prompt(question: str) -> list[tuple[Kind, str]]:
  """Returns a turn's pieces (see `Conversation.pieces`) before the answer."""
  return [
    ('text', 'USER: '),
    ('question', question),
    ('text', ' ASSISTANT:'),
  ]


def with_pictures(question: str, count: int) -> str:
  """Returns a question with a placeholder for each of its pictures.

  The placeholders come first, as in LLaVA 1.5. A question that already has
  placeholders is returned as it is.
  """
  if IMAGE in question:
    return question
  return f'{IMAGE}\n' * count + question


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversationDataConfig:
  """Where conversations about pictures come from, and how long they may be.

  Attributes:
    source: 'scenes' asks about scenes of digits; 'llava' is a JSON file in the
      format of LLaVA, with `image` and `conversations` of each example; 'table'
      is a TSV or Parquet file with columns `image`, `question` and `answer`.
    scenes: what scenes are made of, for 'scenes'.
    topics: topics of questions about scenes, each drawn equally often.
    marks: whether in training each image token that shows a digit of a scene
      must also predict that digit. A model that is trained from scratch then
      learns to read digits many times as fast; other models have a pretrained
      tower.
    path: the file, for 'llava' and 'table'.
    folder: directory of the file's pictures; '' is the directory of the file.
    eval_fraction: fraction of a file's pictures to hold out, with all examples
      that have one of these as the first picture. Examples with a held-out
      picture as another one are left out.
    image_size: height and width of the tower's input in pixels.
    crop_fraction: side of the centred square crop over the resized picture's
      shorter side.
    resize: see `ImageDataConfig.resize`.
    rounding: see `ImageDataConfig.rounding`.
    resample: the filter for resizing.
    mean: subtracted from values in [0, 1], per channel.
    std: divided by, per channel.
    pictures: most pictures of a conversation.
    length: most tokens of a conversation besides its pictures. Longer
      conversations are cut.
    tokenizer: 'bytes', or a 'sentencepiece' or 'huggingface' model.
    tokenizer_path: file or directory of that model.
    workers: processes that read pictures; 0 uses threads in this process.
  """

  source: Literal['scenes', 'llava', 'table'] = 'scenes'
  scenes: SceneConfig = SceneConfig()
  topics: tuple[Topic, ...] = QUESTIONS
  marks: bool = False
  path: str = ''
  folder: str = ''
  eval_fraction: config_lib.Proper = 0.02
  image_size: config_lib.Pixels = 64
  crop_fraction: config_lib.Positive = 1.0
  resize: resize_lib.Resize = 'shorter_side'
  rounding: resize_lib.Rounding = 'down'
  resample: Literal['nearest', 'bilinear', 'bicubic', 'lanczos'] = 'bicubic'
  mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
  std: config_lib.Positives = (0.5, 0.5, 0.5)
  pictures: config_lib.Size = 1
  length: config_lib.Size = 64
  tokenizer: Literal['bytes', 'sentencepiece', 'huggingface'] = 'bytes'
  tokenizer_path: str = ''
  workers: config_lib.Workers = 0

  def __post_init__(self):
    check = config_lib.validate(self)
    check(self.topics, 'at least one of TOPICS', 'topics')
    common.check_source(
      self,
      needed={'llava': ['path'], 'table': ['path']},
      own={
        **dict.fromkeys(('path', 'folder'), ['llava', 'table']),
        'marks': ['scenes'],
      },
    )

  @property
  def preprocess(self) -> Preprocess:
    names = ('image_size', 'crop_fraction', 'mean', 'std')
    return Preprocess(
      **{name: getattr(self, name) for name in (*names, 'resize', 'rounding')},
      resample=Image.Resampling[self.resample.upper()],
    )


@functools.lru_cache(maxsize=4)
def open_split(config: ConversationDataConfig, split: Literal['train', 'eval']):
  """Returns a split, which has a length and `fingerprint()`.

  Its `load(index)` returns a `Conversation`.
  """
  if config.source == 'scenes':
    return SceneQuestions(
      config.scenes, config.image_size, split, config.topics
    )
  return Examples(config, split)


# The next functions are of the kind of `_Question.ask`.
def _at_an_end(wanted, rng, boxes_N4, digits_N, *, axis: int, sign: int):
  """Returns '' and the first digit along an axis (if `sign` is -1, the last).

  Returns None if two digits are too close to say which is first.
  """
  order_N = np.argsort(sign * boxes_N4[:, axis])
  place_N = boxes_N4[order_N, axis]
  if len(place_N) > 1 and abs(place_N[1] - place_N[0]) < _APART:
    return None
  return '', int(digits_N[order_N[0]])


def _count(wanted: int, rng, boxes_N4, digits_N):
  """Asks how often there is a digit that is in the scene `wanted` times."""
  fits = np.flatnonzero(np.bincount(digits_N, minlength=10) == wanted)
  return (_WORDS[rng.choice(fits)], wanted) if len(fits) else None


def _presence(wanted: str, rng, boxes_N4, digits_N):
  """Asks whether a digit is in the scene; `wanted` is the answer, yes or no."""
  there = np.bincount(digits_N, minlength=10) > 0
  fits = np.flatnonzero(there == (wanted == 'yes'))
  return (_WORDS[rng.choice(fits)], wanted) if len(fits) else None


def _sum(wanted, rng, boxes_N4, digits_N):
  return '', int(digits_N.sum())


def _all(wanted, rng, boxes_N4, digits_N):
  x_N = np.sort(boxes_N4[:, 0])
  if (np.diff(x_N) < _APART).any():
    return None
  in_order_N = digits_N[np.argsort(boxes_N4[:, 0])]
  return '', ''.join(map(str, in_order_N))


class _Question(NamedTuple):
  """A kind of question.

  Attributes:
    question: with `{}` for a digit's name.
    answers: the possible answers, which are drawn equally often; None if any
      answer of a random scene will do.
    ask: takes the wanted answer, a random generator, and the boxes and digits
      of a scene; returns the digit's name and the scene's true answer, or None
      if the scene has no answer.
  """

  question: str
  answers: tuple[Any, ...] | None
  ask: Callable[..., tuple[str, Any] | None]


def _of_an_end(question: str, axis: int, sign: int) -> _Question:
  """Returns a question about the first or the last digit along an axis."""
  ask = functools.partial(_at_an_end, axis=axis, sign=sign)
  return _Question(question, (*range(10),), ask)


_ASKED: dict[Topic, _Question] = {
  'leftmost': _of_an_end('Which digit is leftmost?', 0, 1),
  'rightmost': _of_an_end('Which digit is rightmost?', 0, -1),
  'highest': _of_an_end('Which digit is highest?', 1, 1),
  'lowest': _of_an_end('Which digit is lowest?', 1, -1),
  'count': _Question('How often is there a {}?', (0, 1, 2), _count),
  'presence': _Question('Is there a {}?', ('yes', 'no'), _presence),
  # These sums are common in scenes of two to four digits.
  'sum': _Question('What is the sum?', (*range(6, 22),), _sum),
  # The answer has the digits from left to right.
  'digits': _Question('Which digits are there?', None, _all),
}


class SceneQuestions:
  """Questions about scenes, with random access.

  For all topics but 'digits', an answer is drawn first, then a scene that has
  that answer. So all answers to a question are equally frequent, and none can
  be guessed without the picture.
  """

  def __init__(
    self,
    config: SceneConfig,
    size: int,
    split: str,
    topics: tuple[Topic, ...] = QUESTIONS,
  ):
    """Draws nothing yet; the first arguments are those of `Scenes`."""
    self._scenes = Scenes(config, size, split)
    self._topics = topics
    self._key = (config.seed, int(split == 'eval'), 1)
    # Cached, since most scenes are tried for many questions.
    self._objects = functools.lru_cache(maxsize=1 << 17)(self._scenes.objects)

  def __len__(self) -> int:
    return len(self._scenes)

  def fingerprint(self) -> dict[str, Any]:
    asked = [_ASKED[topic][:2] for topic in self._topics]
    return self._scenes.fingerprint() | {
      'questions': fingerprints.of_value(repr(asked))
    }

  def question(self, index: int) -> tuple[int, str, str, int]:
    """Returns the scene's index, question, answer, and index into `TOPICS`."""
    rng = np.random.default_rng((*self._key, int(index)))
    for _ in range(_DRAWS):
      topic = self._topics[rng.integers(len(self._topics))]
      question, answers, ask = _ASKED[topic]
      wanted = answers and answers[rng.integers(len(answers))]
      for _ in range(_TRIES):
        scene = int(rng.integers(len(self._scenes)))
        found = ask(wanted, rng, *self._objects(scene))
        if found is not None and wanted in (None, found[1]):
          name, answer = found
          number = TOPICS.index(topic)
          return scene, question.format(name), str(answer), number
    raise errors.UserError(
      f'data.topics={self._topics}: in {_DRAWS} tries no scene had an answer'
      ' that is asked for; add topics, or change the number of digits in'
      ' data.scenes.'
    )

  def load(self, index: int) -> Conversation:
    scene, question, answer, topic = self.question(index)
    image_SSC, boxes_N4, digits_N = self._scenes.scene(scene)
    turn = f'{IMAGE}\n{question}', answer
    objects = zip(
      map(tuple, boxes_N4.tolist()), map(str, digits_N), strict=True
    )
    image = Image.fromarray(image_SSC)
    return Conversation((image,), (turn,), topic, tuple(objects))


class Examples:
  """A split of a file's conversations, with random access."""

  def __init__(self, config: ConversationDataConfig, split: str):
    """Reads the file, and no picture that it names."""
    file = pathlib.Path(config.path).expanduser()
    if not file.is_file():
      raise paths.missing(file)
    folder = pathlib.Path(config.folder).expanduser()
    self._folder = folder if config.folder else file.parent
    read = {'llava': _read_llava, 'table': _read_table}[config.source]
    examples = [_checked(file, i, *x) for i, x in enumerate(read(file))]
    most = max((len(images) for images, _ in examples), default=0)
    if most > config.pictures:
      raise errors.UserError(
        f'pictures={config.pictures}: a conversation in {file} has {most}'
        f' pictures; set data.pictures={most}.'
      )
    # Hold out all examples with the same first picture together. The held-out
    # ones are evenly spread over the file.
    number = {}
    for images, turns in examples:
      number.setdefault(images[:1] or turns, len(number))

    def is_held_out(images, turns):
      i, part = number[images[:1] or turns], config.eval_fraction
      return int((i + 1) * part) > int(i * part)

    held_out = [example for example in examples if is_held_out(*example)]
    rest = [example for example in examples if not is_held_out(*example)]
    # A conversation may have a held-out picture as a later one, too. Leave it
    # out, so that no picture is both trained on and asked about in evaluation.
    hidden = {image for images, _ in held_out for image in images}
    train = [example for example in rest if hidden.isdisjoint(example[0])]
    if split == 'train' and len(train) < len(rest):
      logging.warning(
        '%s: %d of %d conversations are left out of training, since they show'
        ' held-out pictures.',
        *(file, len(rest) - len(train), len(rest)),
      )
    self._examples = held_out if split == 'eval' else train
    if not self._examples:
      raise errors.UserError(
        f'{file} has {len(examples)} examples, of which eval_fraction='
        f'{config.eval_fraction} holds {len(held_out)} out and leaves'
        f' {len(train)} to train on: change it, or add pictures.'
      )

  def __len__(self) -> int:
    return len(self._examples)

  def fingerprint(self) -> dict[str, Any]:
    """Returns a fingerprint of the texts and the pictures."""
    shown = (image for images, _ in self._examples for image in images)
    names = [x for x in dict.fromkeys(shown) if isinstance(x, str)]
    return fingerprints.of_files(
      [(name, os.fspath(self._folder / name)) for name in names]
    ) | {'examples': fingerprints.of_value(repr(self._examples))}

  def load(self, index: int) -> Conversation:
    images, turns = self._examples[index]
    pictures = (
      image_folder.decode(
        *(image, f'the image of a question {turns[0][0]!r}')
        if isinstance(image, bytes)
        else (os.fspath(self._folder / image), f'image {image!r}')
      )
      for image in images
    )
    return Conversation(tuple(pictures), turns)


# Names of pictures or the bytes of their files; (question, answer) pairs.
_Example = tuple[tuple[str | bytes, ...], tuple[tuple[str, str], ...]]


def _wrong(file, index: int, what: str) -> errors.UserError:
  return errors.UserError(
    f'{file}: example {index} {what}: correct it or remove it.'
  )


def _checked(file, index: int, images, turns) -> _Example:
  """Returns an example; UserError if paths or numbers of pictures are wrong."""
  for name in images:
    if isinstance(name, bytes):
      continue
    parts = pathlib.PurePosixPath(name)
    if parts.is_absolute() or '..' in parts.parts:
      raise _wrong(
        file, index, f'has the image {name!r}, outside of the folder'
      )
  placed = sum(question.count(IMAGE) for question, _ in turns)
  if placed != len(images) or any(IMAGE in answer for _, answer in turns):
    what = f'has {len(images)} pictures and {placed} {IMAGE} in its questions'
    raise _wrong(file, index, what)
  return tuple(images), tuple(turns)


def _read_llava(file: pathlib.Path) -> Iterator[_Example]:
  """Yields the examples of a JSON file in LLaVA's format.

  The only picture of a question moves to its beginning, as in LLaVA's training:
  in the published files it is often at the end.
  """
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
  for index, example in enumerate(examples):
    fields = example if isinstance(example, dict) else {}
    said = fields.get('conversations')
    if not isinstance(said, list) or not said or len(said) % 2:
      what = 'has no conversations, of questions and answers in turn'
      raise _wrong(file, index, what)
    values = []
    for i, part in enumerate(said):
      expected = ('human', 'gpt')[i % 2]
      part = part if isinstance(part, dict) else {}
      value = part.get('value')
      if part.get('from') != expected or not isinstance(value, str):
        raise _wrong(file, index, f'has in part {i} no text from {expected!r}')
      if expected == 'human' and value.count(IMAGE) == 1:
        value = with_pictures(value.replace(IMAGE, '').strip(), 1).strip()
      values.append(value)
    names = fields.get('image', [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(
      isinstance(name, str) for name in names
    ):
      raise _wrong(file, index, 'has an image that is no name of a file')
    yield names, list(zip(values[::2], values[1::2], strict=True))


_COLUMNS = ('image', 'question', 'answer')


def _read_table(file: pathlib.Path) -> Iterator[_Example]:
  """Yields a conversation for each line of a TSV or Parquet file.

  In a TSV file, the first line names the columns, and quotes are ordinary
  characters. In a Parquet file, `image` may also be the bytes of a picture's
  file, or a dictionary as Hugging Face's `datasets` writes it; such bytes are
  kept in memory.
  """
  if file.suffix == '.parquet':
    # Imported here, since it takes long and other files do not need it.
    from mod_jax.data import tables

    names, rows = tables.read_rows(file, _COLUMNS)
  else:
    try:
      # Not `splitlines`, which also cuts at characters such as U+2028 that may
      # be part of a text.
      lines = file.read_text('utf-8-sig').split('\n')
      reader = csv.DictReader(lines, delimiter='\t', quoting=csv.QUOTE_NONE)
      names, rows = reader.fieldnames or [], list(reader)
    except (OSError, ValueError, csv.Error) as error:
      raise errors.UserError(
        f'{file} cannot be read as TSV in UTF-8 ({error}): write it anew.'
      ) from error
  if not set(_COLUMNS) <= set(names):
    raise errors.UserError(
      f'{file} has the columns {", ".join(names)}: expected'
      f' {", ".join(_COLUMNS)}.'
    )
  for index, row in enumerate(rows):
    if None in row:
      raise _wrong(file, index, 'has more cells than there are columns')
    image, *said = (row[name] for name in _COLUMNS)
    if isinstance(image, dict):
      image = image.get('bytes') or image.get('path')
    if not isinstance(image, str | bytes) or not image:
      raise _wrong(file, index, 'has no image')
    if not all(isinstance(text, str) and text for text in said):
      raise _wrong(file, index, 'has no question, or no answer')
    question, answer = said
    yield [image], [(f'{IMAGE}\n{question}', answer)]
