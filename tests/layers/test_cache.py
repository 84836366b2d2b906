"""Keys and values of processed tokens: appended, read, and attended to."""

import jax.numpy as jnp

from mod_jax.layers import cache as cache_lib
from mod_jax.layers.cache import KVCache

EMPTY = cache_lib.EMPTY


def tokens(*rows):
  """Keys [R, T, 1, 1] of the given values."""
  return jnp.array(rows, jnp.float32)[..., None, None]


def append(cache, keys, positions, valid=None, rows=None):
  if rows is None:
    rows = list(range(len(keys)))
  return cache.append(
    tokens(*keys),
    -tokens(*keys),
    jnp.array(positions),
    None if valid is None else jnp.array(valid) > 0,
    jnp.array(rows),
  )


class TestKVCache:
  def test_some_rows_only(self):
    cache = KVCache.empty(3, 2, 1, 1, 'float32')
    # The batch has 3 rows: row 3 is past the end, and nowhere.
    cache = append(cache, [[5], [6], [7]], [[0]] * 3, rows=[2, 0, 3])
    assert cache.key_BGSC[:, 0, :, 0].tolist() == [[6, 0], [0, 0], [5, 0]]
    assert cache.length_B.tolist() == [1, 0, 1]
    key_RSGC, _, position_RS = cache.read(jnp.array([2, 3]))
    assert key_RSGC[0, 0, 0, 0] == 5
    assert position_RS[0].tolist() == [0, EMPTY]
    assert (
      cache.read(None)[0].tolist() == cache.key_BGSC.swapaxes(1, 2).tolist()
    )

  def test_an_invalid_token_past_the_end_overwrites_nothing(self):
    cache = KVCache.empty(1, 1, 1, 1, 'float32')
    cache = append(cache, [[5]], [[0]])
    cache = append(cache, [[6]], [[1]], valid=[[0]])
    cache = append(cache, [[7]], [[1]])
    assert cache.key_BGSC[0, 0, 0, 0] == 5
    assert cache.position_BS.tolist() == [[0]]

  def test_forgets_what_came_later(self):
    cache = KVCache.empty(2, 3, 1, 1, 'float32')
    cache = append(
      cache, [[1, 2, 3]] * 2, [[0, 4, 5]] * 2, [[1, 1, 1], [0, 1, 1]]
    )
    cache = cache.before(jnp.array([5, 4]))
    assert cache.length_B.tolist() == [2, 0]
    assert cache.position_BS.tolist() == [[0, 4, EMPTY], [EMPTY] * 3]
    cache = append(cache, [[7], [8]], [[5], [4]])
    assert cache.key_BGSC[:, 0, :2, 0].tolist() == [[1, 2], [8, 3]]
    assert cache.key_BGSC[0, 0, 2, 0] == 7

  def test_room_is_given_in_order(self):
    cache = KVCache.empty(3, 2, 1, 1, 'float32')
    cache = append(cache, [[1, 2]] * 3, [[0, 1]] * 3, [[0, 0], [1, 0], [1, 1]])
    wanted_BT = jnp.array([[0, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 0]]) > 0
    assert cache.room(wanted_BT).astype(int).tolist() == [
      [0, 1, 1, 0],
      [1, 0, 0, 0],
      [0, 0, 0, 0],
    ]
