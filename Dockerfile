# Two images from one file:
#   docker build --target web -t slotline-web .         the web API and the batches, without llama.cpp
#   docker build --target worker -t slotline-worker .   the worker, with llama.cpp built for CUDA
ARG CUDA=12.8.1
ARG UBUNTU=24.04

FROM python:3.12-slim AS web
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir ".[web,s3]"
# A volume that is mounted on the folder belongs to whom the folder belongs to.
RUN useradd --system --create-home --uid 10001 slotline \
    && mkdir -p /data/files && chown slotline /data/files
USER slotline
WORKDIR /home/slotline
ENV SLOTLINE_HOST=0.0.0.0 PYTHONUNBUFFERED=1
EXPOSE 8000
ENTRYPOINT ["slotline"]
CMD ["web"]

FROM nvidia/cuda:${CUDA}-devel-ubuntu${UBUNTU} AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv python3-dev build-essential \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/slotline
# Not tuned to the machine that builds; the driver's library is there at run time only, hence the stub.
ENV CMAKE_ARGS="-DGGML_CUDA=on -DGGML_NATIVE=off -DCMAKE_EXE_LINKER_FLAGS=-Wl,--allow-shlib-undefined" \
    LIBRARY_PATH=/usr/local/cuda/lib64/stubs
RUN /opt/slotline/bin/pip install --no-cache-dir --no-binary llama-cpp-python llama-cpp-python
COPY . /src
RUN /opt/slotline/bin/pip install --no-cache-dir '/src[worker]'

FROM nvidia/cuda:${CUDA}-runtime-ubuntu${UBUNTU} AS worker
# libgomp1: llama.cpp's CPU part is built with OpenMP.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --create-home --uid 10001 slotline
COPY --from=build /opt/slotline /opt/slotline
USER slotline
WORKDIR /home/slotline
ENV PATH=/opt/slotline/bin:$PATH PYTHONUNBUFFERED=1
ENTRYPOINT ["slotline"]
CMD ["worker"]
