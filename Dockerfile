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
# Else it would be root's.
RUN mkdir /home/user/mod_jax
ENV PATH=/home/user/env/bin:$PATH

COPY --chown=user setup.cfg pyproject.toml README.md LICENSE /home/user/mod_jax/
COPY --chown=user requirements.txt /home/user/mod_jax/
COPY --chown=user mod_jax /home/user/mod_jax/mod_jax
COPY --chown=user kernels /home/user/mod_jax/kernels
COPY --chown=user configs /home/user/mod_jax/configs
# The versions that are pinned, also of what builds the package. pip refuses the
# hashes beside them, since the libraries of CUDA are not pinned.
RUN cd /home/user && python -m venv env \
  && sed -n 's/ .*//; /==/p' mod_jax/requirements.txt > pins \
  && PIP_CONSTRAINT=/home/user/pins pip install --no-cache-dir './mod_jax[gpu]' \
  && rm -r mod_jax pins

WORKDIR /data
CMD ["mod-jax-train", "--help"]
