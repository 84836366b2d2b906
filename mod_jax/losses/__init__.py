"""Losses and metrics: arrays in, (total, weight) pairs out; no models.

A pair is a sum and the number of things summed. Pairs of microbatches and
hosts are added, and divided once.
"""

from mod_jax.losses.language import next_token_loss
from mod_jax.losses.routing import choice_agreement
from mod_jax.losses.routing import choice_bce

__all__ = ('choice_agreement', 'choice_bce', 'next_token_loss')
