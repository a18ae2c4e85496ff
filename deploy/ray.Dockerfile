# Gambit for the machines of a Ray cluster, on top of the image of the server (Dockerfile.cuda, or Dockerfile for CPUs):
#   docker build -t gambit-ray -f deploy/ray.Dockerfile --build-arg BASE=gambit-cuda .
ARG BASE=gambit-cuda
# hadolint ignore=DL3006
FROM ${BASE}
USER root
# KubeRay asks machines with wget how they are, and submits jobs to Ray's dashboard.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends wget \
    && rm -rf /var/lib/apt/lists/*
RUN uv pip install --system --no-cache 'ray[default]==2.60.0'
USER 10001
ENTRYPOINT []
