"""Models: configs and linen modules built from `mod_jax.layers`."""
