"""Trained and pretrained models: loads, routes and exports them.

* `source`: finds out which kind of model a path contains;
* `load`: a model with its weights, ready for use;
* `route`: makes a routed model from a dense one;
* `export`: writes folders for mod_jax and other libraries;
* `complete`: completes configs from data and weights.
"""
