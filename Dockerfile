# An image for NVIDIA GPUs; the host needs the NVIDIA Container Toolkit.
#
#   docker build -t opensora .
#   docker run --gpus all --ipc=host -v "$PWD:/workspace" opensora train CONFIG --data-path clips.csv
#   docker run --gpus all --ipc=host -v "$PWD:/workspace" --entrypoint torchrun opensora --standalone --nproc_per_node 8 -m opensora train CONFIG
#
# --ipc=host: data workers hand over batches in shared memory, of which a container has 64 MB.
ARG BASE=pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime
FROM ${BASE}

# gcc: Triton compiles its launchers when it runs; libgl1, libglib2.0-0: opencv-python
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev libgl1 libglib2.0-0 make \
 && rm -rf /var/lib/apt/lists/*

COPY . /src
# The image's PyTorch is new enough and stays.
RUN PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1 make -C /src install PYTHON=python && rm -rf /src

# The user of the host who is to own what is written: --build-arg UID=$(id -u)
ARG UID=1000
RUN useradd --create-home --uid ${UID} opensora && mkdir -p /workspace && chown opensora /workspace
USER opensora
WORKDIR /workspace
ENTRYPOINT ["opensora"]
CMD ["--help"]
