"""Questions about scenes that nobody can guess, and LLaVA's files."""

import collections
import dataclasses
import json

import numpy as np
from PIL import Image
import pyarrow as pa
from pyarrow import parquet
import pytest

from mod_jax.data import conversations, fingerprint
from mod_jax.data.conversations import ConversationDataConfig
from mod_jax.data.scenes import SceneConfig, Scenes
from mod_jax.errors import UserError

SCENES = SceneConfig(num_train=300, num_eval=100)
WORDS = dict(zip(conversations._WORDS, range(10), strict=True))


def truth(topic, question, boxes_N4, digits_N):
  """Returns the answer, by another way than that of the generator."""
  x_N, y_N, *_ = boxes_N4.T
  named = [digit for word, digit in WORDS.items() if f'a {word}?' in question]
  count = sum(digits_N == digit for digit in named[:1])
  count = int(np.sum(count))
  return {
    'leftmost': lambda: digits_N[x_N == x_N.min()][0],
    'rightmost': lambda: digits_N[x_N == x_N.max()][0],
    'highest': lambda: digits_N[y_N == y_N.min()][0],
    'lowest': lambda: digits_N[y_N == y_N.max()][0],
    'count': lambda: count,
    'presence': lambda: 'yes' if count else 'no',
    'sum': lambda: sum(digits_N),
    'digits': lambda: ''.join(str(digits_N[i]) for i in np.argsort(x_N)),
  }[topic]()


def test_answers_are_true_and_equally_frequent():
  source = conversations.SceneQuestions(
    SCENES, 64, 'train', conversations.TOPICS
  )
  scenes = Scenes(SCENES, 64, 'train')
  asked = collections.defaultdict(collections.Counter)
  for i in range(200):
    scene, question, answer, number = source.question(i)
    topic = conversations.TOPICS[number]
    found = truth(topic, question, *scenes.objects(scene))
    assert answer == str(found), (question, found)
    asked[topic][answer] += 1
  assert set(asked) == set(conversations.TOPICS)
  del asked['digits']  # As they come.
  for topic, counts in asked.items():
    answers = conversations._ASKED[topic].answers
    expected = counts.total() / len(answers)
    # Chance alone: a chi-squared of as many degrees, at four deviations.
    squares = sum((counts[str(x)] - expected) ** 2 for x in answers) / expected
    freedom = len(answers) - 1
    assert squares < freedom + 4 * (2 * freedom) ** 0.5


def test_questions_are_the_same_at_each_call_and_held_out():
  train, held_out = (
    conversations.SceneQuestions(SCENES, 64, split)
    for split in ('train', 'eval')
  )
  one, again = train.load(5), train.load(5)
  assert one.turns == again.turns
  pixels = [np.asarray(x.pictures[0]) for x in (one, again)]
  np.testing.assert_array_equal(*pixels)
  assert train.fingerprint() != held_out.fingerprint()
  assert [train.question(i) for i in range(9)] != [
    held_out.question(i) for i in range(9)
  ]
  (kind, _), (_, question), *_, (_, answer) = one.pieces()
  assert kind == 'text'
  assert question.startswith(conversations.IMAGE)
  assert answer == ' ' + one.turns[0][1]


def part(speaker, text):
  return {'from': speaker, 'value': text}


PAIR = [part('human', '<image>\nWhat is it?'), part('gpt', 'A dog.')]


def write(folder, examples):
  (folder / 'pictures').mkdir()
  Image.new('RGB', (6, 4), 'red').save(folder / 'pictures' / 'a.png')
  file = folder / 'data.json'
  file.write_text(json.dumps(examples))
  return ConversationDataConfig(
    source='llava', path=str(file), eval_fraction=0.5
  )


def test_a_file_of_llava_is_read(tmp_path):
  text = [part('human', 'Hello?'), part('gpt', 'Hi.')]
  config = write(
    tmp_path,
    [
      {'image': 'pictures/a.png', 'conversations': PAIR + text},
      {'conversations': text},
    ],
  )
  train, held_out = (
    conversations.open_split(config, x) for x in ('train', 'eval')
  )
  assert (len(train), len(held_out)) == (1, 1)
  found = train.load(0)
  assert found.pictures[0].size == (6, 4)
  assert found.turns == (
    ('<image>\nWhat is it?', 'A dog.'),
    ('Hello?', 'Hi.'),
  )
  assert held_out.load(0) == conversations.Conversation(
    (), (('Hello?', 'Hi.'),)
  )
  before = train.fingerprint()
  Image.new('RGB', (6, 4), 'blue').save(tmp_path / 'pictures' / 'a.png')
  assert fingerprint.differences(
    {'train': before}, {'train': train.fingerprint()}
  ) == ['the training file pictures/a.png is changed']


@pytest.mark.parametrize(
  ('written', 'read'),
  [
    ('What is it?\n<image>', '<image>\nWhat is it?'),
    ('<image>What is it?', '<image>\nWhat is it?'),
    ('<image>', '<image>'),
    ('Is <image> as <image>?', 'Is <image> as <image>?'),
  ],
)
def test_a_single_picture_of_llava_comes_first(tmp_path, written, read):
  """As in the training of LLaVA 1.5, whose models are asked in this order."""
  example = {
    'image': ['pictures/a.png'] * written.count('<image>'),
    'conversations': [part('human', written), PAIR[1]],
  }
  config = write(
    tmp_path, [example, {'conversations': [part('human', 'Hi?'), PAIR[1]]}]
  )
  config = dataclasses.replace(config, pictures=2)
  assert conversations.open_split(config, 'train').load(0).turns == (
    (read, 'A dog.'),
  )


def test_no_picture_is_both_trained_on_and_held_out(tmp_path):
  config = write(
    tmp_path,
    [
      {'image': f'pictures/{i // 3}.png', 'conversations': PAIR}
      for i in range(30)
    ],
  )
  for part, pictures in ((0.1, 1), (0.3, 3), (0.7, 7)):
    held_out, train = (
      {example[0] for example in conversations.Examples(split, name)._examples}
      for split in [dataclasses.replace(config, eval_fraction=part)]
      for name in ('eval', 'train')
    )
    assert (len(held_out), len(train)) == (pictures, 10 - pictures)
    assert not held_out & train


def test_conversations_that_show_held_out_pictures_too_are_not_trained_on(
  tmp_path,
):
  compared = [part('human', '<image><image>\nWhich is larger?'), PAIR[1]]
  shown = [('0', '1'), ('1', '2'), ('2', '3'), ('3', '0')]
  config = write(
    tmp_path, [{'image': [*x], 'conversations': compared} for x in shown]
  )
  config = dataclasses.replace(config, pictures=2, eval_fraction=0.25)
  held_out, train = (
    [images for images, _ in conversations.Examples(config, name)._examples]
    for name in ('eval', 'train')
  )
  assert held_out == [('3', '0')]
  assert train == [('1', '2')]
  with pytest.raises(UserError, match='holds 3 out and leaves 0 to train on'):
    conversations.Examples(
      dataclasses.replace(config, eval_fraction=0.75), 'train'
    )


def test_what_no_scene_answers_is_refused():
  # Ten digits and more add up to more than is asked for.
  config = SceneConfig(least=12, most=12, scales=(1, 1.5))
  source = conversations.SceneQuestions(config, 64, 'train', ('sum',))
  digits_N = np.full(12, 9)
  source._objects = lambda i: (np.zeros((12, 4)), digits_N)
  with pytest.raises(UserError, match='no scene had an answer'):
    source.question(0)
  rng, all_N = np.random.default_rng(0), np.arange(10)
  assert conversations._presence('no', rng, None, all_N) is None


TABLE = 'image\tquestion\tanswer\textra\n'


@pytest.mark.parametrize('kind', ['tsv', 'names', 'bytes', 'datasets'])
def test_a_table_is_read(tmp_path, kind):
  # With a separator of lines that does not end one in a table.
  rows = [
    ('red.png', 'What "is"\u2028it?', 'red'),
    ('sub/blue.png', 'And?', 'blue'),
  ]
  (tmp_path / 'sub').mkdir()
  for name, _, colour in rows:
    Image.new('RGB', (6, 4), colour).save(tmp_path / name)
  images, questions, answers = map(list, zip(*rows, strict=True))
  if kind == 'tsv':
    path = tmp_path / 'data.tsv'
    text = TABLE + ''.join('\t'.join((*x, '?')) + '\n' for x in rows)
    path.write_text(text, 'utf-8-sig')  # As spreadsheets begin a file.
  else:
    path = tmp_path / 'data.parquet'
    if kind != 'names':
      images = [(tmp_path / name).read_bytes() for name in images]
    if kind == 'datasets':
      images = [{'bytes': x, 'path': 'gone.png'} for x in images]
    columns = {'image': images, 'question': questions, 'answer': answers}
    parquet.write_table(pa.table(columns), path)
  config = ConversationDataConfig(
    source='table', path=str(path), eval_fraction=0.5
  )
  for split, (_, question, answer) in zip(('train', 'eval'), rows, strict=True):
    found = conversations.open_split(config, split).load(0)
    assert found.turns == ((f'<image>\n{question}', answer),)
    expected = Image.new('RGB', (6, 4), answer)
    np.testing.assert_array_equal(found.pictures[0], expected)


@pytest.mark.parametrize(
  ('content', 'sentence'),
  [
    # Tables.
    (b'image\tanswer\na\tb\n', 'expected image, question, answer'),
    (b'\xff', 'cannot be read as TSV'),
    (f'{TABLE}\tWhat?\tIt\t\n'.encode(), 'example 0 has no image'),
    (f'{TABLE}a\tIs\tit\tone\ttoo many\n'.encode(), 'more cells than there'),
    (f'{TABLE}a\tWhat?\n'.encode(), 'example 0 has no question, or no answer'),
    (f'{TABLE}/a\tWhat?\tIt\t\n'.encode(), 'outside of the folder'),
    (f'{TABLE}a\t<image>\tIt\t\n'.encode(), '1 pictures and 2 <image>'),
    (TABLE.encode(), 'has 0 examples'),
    # Files of LLaVA: an example of them, or what is no list of such.
    ({'conversations': PAIR}, 'example 0 has 0 pictures and 1 <image>'),
    (
      {
        'image': ['a', 'b'],
        'conversations': [part('human', '<image><image>'), PAIR[1]],
      },
      'has 2 pictures; set data.pictures=2',
    ),
    ({'image': '../a', 'conversations': PAIR}, 'outside of the folder'),
    ({'image': 3, 'conversations': PAIR}, 'no name of a file'),
    ({'conversations': PAIR[::-1]}, "in part 0 no text from 'human'"),
    ({'conversations': PAIR[:1]}, 'has no conversations'),
    ('{}', 'expected a list'),
    ('{', 'is no JSON'),
  ],
)
def test_wrong_files_are_named(tmp_path, content, sentence):
  if isinstance(content, dict):
    config = write(tmp_path, [content, content])
  else:
    source = 'table' if isinstance(content, bytes) else 'llava'
    path = tmp_path / 'data.tsv'
    path.write_bytes(content if source == 'table' else content.encode())
    config = ConversationDataConfig(source=source, path=str(path))
  with pytest.raises(UserError, match=sentence):
    conversations.open_split(config, 'train')
