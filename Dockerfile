# An image with the command `areal`: recipes on NVIDIA GPUs and CPUs. docs/clusters.md describes its use.
#
#     docker build --tag areal .
#     docker run --rm --gpus all --ipc host --volume "$PWD:/work" areal grpo run.toml
#
# pip installs torch with the CUDA libraries that its wheels require. Models and data sets are mounted, not downloaded.
FROM python:3.12-slim

# Kernels that are compiled at run time, such as those of torch.compile, need a C compiler.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/areal
COPY pyproject.toml README.md LICENSE ./
COPY areal ./areal
RUN pip install --no-cache-dir '.[recipes,rollout,trackers]'

# The run directory is written by the user of the host whose number is this one.
ARG USER_ID=1000
RUN useradd --create-home --uid "$USER_ID" areal \
    && mkdir /work \
    && chown areal /work
USER areal
WORKDIR /work
ENTRYPOINT ["areal"]
