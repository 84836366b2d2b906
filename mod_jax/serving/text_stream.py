"""Incremental detokenisation: the text of new tokens, up to a stop text."""

from absl import logging

from mod_jax.data import tokenizers


class TextStream:
  """Turns tokens into text, and releases only text that is final.

  Final text has no incomplete character, and ends before the first stop text.
  `prompt` has the tokens before the text. Without a tokenizer, texts are empty.
  """

  def __init__(self, tokenizer, prompt: list[int], stop: tuple[str, ...]):
    self._tokenizer = tokenizer
    self._stop = stop
    self._tokens = []  # Not decoded yet.
    self._before = prompt[-tokenizers.CONTEXT :]  # Decoded already.
    self._held = ''  # May be the beginning of a stop text.
    self.stopped = False  # Whether a stop text was met.
    self.failed = False  # Whether the tokenizer failed; it is not used again.

  def add(self, token: int) -> str:
    """Returns the text that has become final with this token."""
    if self._tokenizer is None:
      return ''
    self._tokens.append(token)
    new_text = ''
    while self._tokens:
      count = len(self._tokens)
      text = self._decoded(count)
      if text.endswith(tokenizers.REPLACEMENT):
        if count < tokenizers.CONTEXT:
          break  # Wait for the missing bytes of a character.
        # CONTEXT tokens complete any character that the first one begins, so
        # the first one's text is final, also if it is U+FFFD. Release it with
        # all further tokens that add no text.
        text = self._decoded(1)
        count = max(n for n in range(1, count) if self._decoded(n) == text)
      # A special token has no text, and spaces may be left out at the beginning
      # of a text. Keep the context before these, or the next token would be
      # decoded as the first of a text.
      kept = [] if text.strip() else self._before
      self._before = [*kept, *self._tokens[:count]][-tokenizers.CONTEXT :]
      del self._tokens[:count]
      new_text += text
    return self._release(new_text)

  def end(self) -> str:
    """Returns the text that was held back; no token follows."""
    if self._tokenizer is None or self.stopped:
      return ''
    text = self._release(self._decoded(len(self._tokens)))
    if not self.stopped:
      text, self._held = text + self._held, ''
    return text

  def _decoded(self, count) -> str:
    if self.failed:
      return ''
    try:
      return self._tokenizer.decode_after(self._before, self._tokens[:count])
    except Exception as error:  # The tokenizer may be untrusted.
      logging.warning('tokens cannot be turned into text: %s', error)
      self.failed = True
      return ''

  def _release(self, new: str) -> str:
    text = self._held + new
    positions = [text.find(stop) for stop in self._stop]
    matches = [i for i in positions if i >= 0]
    if matches:
      self.stopped, self._held = True, ''
      return text[: min(matches)]
    cut = len(text)
    for stop in self._stop:
      for count in range(1, len(stop)):
        if text.endswith(stop[:count]):
          cut = min(cut, len(text) - count)
    self._held = text[cut:]
    return text[:cut]
