"""Pictures in the engine, in chats and in the server."""

import base64
import dataclasses
import functools
import io
import json
import pathlib
import struct
import zlib

import numpy as np
import openai
from PIL import Image
import pytest
import tiny
from tiny_server import serving

from mod_jax import config as config_lib
from mod_jax.data import conversations
from mod_jax.errors import UserError
from mod_jax.models.vlm import place_images
from mod_jax.sampling import generate
from mod_jax.serving import pictures, text_process
from mod_jax.serving.engine import Engine

SCENES = config_lib.load(
  pathlib.Path(__file__).parents[2] / 'configs/vlm/scenes.py'
)
LENGTH, NEW = 60, 5
QUESTIONS = ['Is it<image> as<image>?', '<image>\nWhat?', 'And now?', '<image>']
PICTURES = np.asarray(tiny.images(4, size=32))
OF_QUESTIONS = [PICTURES[:2], PICTURES[2:3], PICTURES[:0], PICTURES[3:]]


@functools.cache
def run_of(name):
  experiment = config_lib.replace(
    SCENES.get_config(f'{name}_tiny'),
    {'data.pictures': 2, 'data.length': LENGTH},
  )
  run = tiny.run(experiment)
  return dataclasses.replace(run, preprocess=experiment.data.preprocess)


def asked(run, question):
  return run.task.modality.encode(conversations.prompt(question))


def alone(run, tokens, images, kinds):
  """Returns the tokens that `generate` adds, and their log-probabilities."""
  # With room for all, so that it is compiled once.
  placed = place_images(
    *(run.config, [tokens], [images], [kinds]), text=48, count=2, side='left'
  )
  found = generate(
    run.model,
    run.variables,
    placed.tokens_BL,
    placed.valid_BL,
    images_BIHWC=placed.images_BIHWC,
    kind_BP=placed.kind_BL,
    max_new_tokens=NEW,
    mode=run.config.decoding_mode,
    temperature=0.0,
    end_token=run.task.modality.end,
  )
  count = int(found.length_B[0])
  return found.tokens_BN[0, :count].tolist(), found.log_prob_BN[0, :count]


@pytest.mark.parametrize(
  'name', ['pmod', pytest.param('gamma', marks=pytest.mark.slow)]
)
def test_answers_are_those_of_each_alone(name):
  """Whatever is beside it: other pictures, none, or what a slot held before."""
  run = run_of(name)
  engine, ids = Engine(run, slots=2, max_length=48), []
  for question, images in zip(QUESTIONS, OF_QUESTIONS, strict=True):
    tokens, kinds = asked(run, question)
    more = {'images': images, 'kinds': kinds, 'max_new_tokens': NEW}
    ids.append(engine.submit(tokens, **more))
  for wrong, count, named in (
    ([256, 1], 0, 'row 0 has 0 pictures'),
    ([1], 1, 'row 0 has 1 pictures'),
    ([256] * 3, 3, 'images=3: expected at most 2, for which this engine'),
    ([256] + [1] * 48, 1, '48 tokens and 1 new .* max_length=48'),
  ):
    with pytest.raises(UserError, match=named):
      engine.submit(wrong, images=PICTURES[:count], max_new_tokens=1)
  events = list(engine.run())
  patches, firsts = run.config.num_patches, set()
  for id, question, images in zip(ids, QUESTIONS, OF_QUESTIONS, strict=True):
    found = [e for e in events if e.id == id and e.token is not None]
    tokens, kinds = asked(run, question)
    expected, log_prob_N = alone(run, tokens, images, kinds)
    assert [event.token for event in found] == expected
    log_probs = [event.log_prob for event in found]
    np.testing.assert_allclose(log_probs, log_prob_N, atol=1e-4)
    firsts.add(round(log_probs[0], 3))
    placed = question.count('<image>')
    assert engine.num_read(tokens) == len(tokens) + (patches - 1) * placed
  assert len(firsts) == len(ids)
  # Slots of routed blocks hold the image tokens that these choose, and no more.
  slots = [block.num_slots for block in engine._state.cache.blocks]
  for capacity, count in zip(run.config.capacities, slots, strict=True):
    assert count == 48 + round(2 * patches * (capacity or 1), 9) // 1


def test_a_picture_moves_the_answer():
  run, (tokens, kinds) = run_of('pmod'), asked(run_of('pmod'), '<image>')
  engine = Engine(run, slots=1, max_length=48)

  def first(image, kinds=kinds):
    engine.submit(tokens, images=[image], kinds=kinds, max_new_tokens=1)
    return [event.log_prob for event in engine.run()][0]

  assert first(PICTURES[0]) != first(PICTURES[1])
  # Blocks of p-MoD choose among image tokens alone, whatever the others are.
  assert first(PICTURES[0]) == first(PICTURES[0], None)


@pytest.mark.slow
def test_the_warm_up_compiles_what_pictures_need():
  engine, told = Engine(run_of('pmod'), slots=1, max_length=9), []
  engine.warm_up(told.append)
  assert told[-1].endswith('prompts of up to 8 tokens and 2 pictures')
  tokens = [engine._program.config.image_token, 1, 2]
  with tiny.compilations() as compiled:
    engine.submit(tokens, images=PICTURES[:1], max_new_tokens=2)
    assert list(engine.run())
  assert not compiled


def test_a_chat_is_the_format_of_training():
  which, digit = ({'type': 'text', 'text': x} for x in ('Which', ' digit?'))
  shown = {'type': 'image', 'image': 'a'}
  turns = [
    {'role': 'system', 'content': 'Be brief.'},
    {'role': 'user', 'content': [which, shown, digit]},
    {'role': 'assistant', 'content': '7'},
    {'role': 'user', 'content': 'Sure?'},
  ]
  said = conversations.Conversation((), (('<image>\nWhich digit?', '7'),))
  assert pictures.pieces(turns) == (
    [('text', 'Be brief. '), *said.pieces(), *conversations.prompt('Sure?')],
    ['a'],
  )
  for wrong, named in (
    ({'role': 'tool', 'content': 'x'}, "role='tool': expected system, user"),
    ({'role': 'user', 'content': ['a']}, "'a': expected a part such as"),
    (turns[1] | {'role': 'system'}, 'has 1 pictures, and <image> stands 0'),
  ):
    with pytest.raises(UserError, match=named):
      pictures.pieces([wrong])


def png(pixels=None, size=None, mode='RGB'):
  image = Image.new(mode, size) if pixels is None else Image.fromarray(pixels)
  file = io.BytesIO()
  image.save(file, 'PNG')
  return file.getvalue()


def url(data, kind='image/png'):
  return f'data:{kind};base64,{base64.b64encode(data).decode()}'


def claims(width, height):
  """Returns a PNG that says it is so large, and ends."""
  fields = b'IHDR' + struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)
  checksum = struct.pack('>I', zlib.crc32(fields))
  return b'\x89PNG\r\n\x1a\n' + struct.pack('>I', 13) + fields + checksum


@pytest.fixture(scope='module')
def client():
  run = run_of('pmod')
  engine = Engine(run, slots=2)
  with serving(engine, run) as client:
    yield client


def parts_of(urls, text='What is it?'):
  shown = [{'type': 'image_url', 'image_url': {'url': url}} for url in urls]
  return [*shown, {'type': 'text', 'text': text}]


def ask(client, parts, **settings):
  messages = [{'role': 'user', 'content': parts}]
  settings = {'max_tokens': 4, 'temperature': 0} | settings
  return client.chat.completions.create(
    model='tiny', messages=messages, **settings
  )


PIXELS = np.random.default_rng(1).integers(0, 256, (40, 50, 3), np.uint8)


@pytest.mark.slow
def test_the_server_takes_pictures(client):
  run, shown = run_of('pmod'), parts_of([url(png(PIXELS))])
  found = ask(client, shown)
  (expected,) = run.predict((PIXELS, 'What is it?'), max_new_tokens=4)
  assert found.choices[0].message.content.strip() == expected
  tokens, _ = asked(run, '<image>\nWhat is it?')
  assert found.usage.prompt_tokens == len(tokens) + run.config.num_patches - 1
  without = ask(client, 'What is it?')
  assert without.usage.prompt_tokens == len(tokens) - 2
  assert ask(client, parts_of([url(png(PIXELS))] * 2, 'Same?')).choices


# A picture of few bytes that would take 192 MB.
BOMB = png(size=(8000, 8000), mode='1')


@pytest.mark.slow
@pytest.mark.parametrize(
  ('parts', 'message'),
  [
    ('What is <image>?', 'has 0 pictures, and <image> stands 1 times'),
    (parts_of(['https://example.org/a.png']), 'nothing is fetched'),
    (parts_of(['data:image/png,abc']), 'expected data:image/png;base64'),
    (parts_of(['data:image/png;base64,?']), 'no base64'),
    (parts_of([url(png(PIXELS)[:300])]), 'a picture cannot be decoded'),
    (parts_of([url(BOMB)]), '8,000 x 8,000 pixels, and at most 33,554,432'),
    (parts_of([url(claims(2**30, 2**30))]), 'a picture cannot be decoded'),
    (parts_of([url(bytes(2**22 + 3))]), 'expected at most 4194304'),
    (parts_of([url(png(PIXELS))] * 3), '3 pictures in one request: .* most 2'),
    (parts_of([url(png(PIXELS))], 'x' * 50), 'do not fit max_length=60'),
    ([{'type': 'image_url', 'image_url': 'data:'}], 'a list of parts: of the'),
    ([{'type': 'input_audio'}], 'a list of parts: of the type text'),
  ],
)
def test_bad_pictures_are_refused_and_others_unharmed(client, parts, message):
  with pytest.raises(openai.BadRequestError, match=message):
    ask(client, parts)
  assert ask(client, parts_of([url(png(PIXELS))])).choices


@pytest.mark.slow
def test_a_picture_that_fails_ends_alone():
  run = run_of('pmod')
  process = text_process.TextProcess('bytes', '', pretrained=False)
  try:
    fit = run.preprocess.fit.keywords
    with pytest.raises(UserError, match='decoding this picture failed'):
      process.call('fit_picture', url(png(PIXELS))[22:], fit | {'size': -1})
    assert process.call('fit_picture', url(png(PIXELS))[22:], fit)
  finally:
    process.stop()


def test_json_ends_where_it_is_whole():
  """These models end at a line break, which is white space in JSON."""
  run = run_of('pmod')
  number = {'type': 'integer', 'minimum': 0, 'maximum': 9}
  schema = {'type': 'array', 'items': number, 'minItems': 1, 'maxItems': 2}
  engine = Engine(run, slots=2, max_length=120)
  settings = {'max_new_tokens': 100, 'temperature': 1.0, 'schema': schema}
  for seed in range(4):
    (found,) = engine.generate(['A'], seed=seed, **settings)
    assert all(0 <= x <= 9 for x in json.loads(found.text))
