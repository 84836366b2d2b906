"""The console commands `mod-jax-train`, `mod-jax-eval` and `mod-jax-serve`.

They are the modules `train`, `eval` and `serve`.
"""
