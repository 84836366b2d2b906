# mod_jax for NVIDIA GPUs. CUDA comes with JAX's wheels; the host needs a driver
# for CUDA 13 and the NVIDIA Container Toolkit. What is built runs as an ordinary
# user, with the number of whoever builds it, to whom the runs then belong.
#
#   docker build --tag mod_jax --build-arg USER_ID="$(id -u)" .
#   docker run --rm --gpus all --volume "$PWD/runs:/data/runs" mod_jax \
#     mod-jax-train --config=configs/lm/mod.py --workdir=runs/mod
FROM python:3.12-slim

ARG USER_ID=1000
RUN useradd --create-home --uid "$USER_ID" user \
  && mkdir /data && chown user /data
USER user
ENV PATH=/home/user/env/bin:$PATH

COPY --chown=user requirements-gpu.txt /home/user/
RUN python -m venv /home/user/env && pip install --no-cache-dir \
  --require-hashes -r /home/user/requirements-gpu.txt

COPY --chown=user setup.cfg pyproject.toml README.md LICENSE /home/user/mod_jax/
COPY --chown=user mod_jax /home/user/mod_jax/mod_jax
COPY --chown=user kernels /home/user/mod_jax/kernels
COPY --chown=user configs /home/user/mod_jax/configs
RUN pip install --no-cache-dir --no-deps --no-build-isolation \
  /home/user/mod_jax && rm -r /home/user/mod_jax

WORKDIR /data
CMD ["mod-jax-train", "--help"]
