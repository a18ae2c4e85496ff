# Gambit's server on a CPU, with the bundled model unless another is named:
#   docker build -t gambit .
#   docker run -p 8000:8000 -e GAMBIT_API_KEY=sk-secret gambit
# Without a key it does not start: a container is reached from other machines (--no-auth says that this is wanted).
FROM python:3.12-slim

# The local engine compiles its decode step where it finds a compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir "uv>=0.9,<1"

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN uv pip install --system --no-cache --torch-backend=cpu '.[serve]'

RUN useradd --create-home --uid 10001 gambit \
    && mkdir -p /cache/huggingface \
    && chown -R gambit /cache
USER 10001
WORKDIR /home/gambit
ENV HF_HOME=/cache/huggingface PYTHONUNBUFFERED=1

EXPOSE 8000
HEALTHCHECK --interval=10s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ping', timeout=5)"]
ENTRYPOINT ["gambit", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["pawn"]
