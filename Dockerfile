# hydrajax serve, on a CPU by default:
#   docker build -t hydrajax .
#   docker run --rm -p 8000:8000 -v hydrajax:/home/hydrajax/.cache hydrajax --base smollm2 --draft hydra++
# On NVIDIA GPUs: docker build --build-arg EXTRA=cuda12 (or cuda13), docker run --gpus all.
# The volume keeps downloaded models and compiled programs. A key for clients: -e HYDRAJAX_API_KEY.

FROM python:3.12-slim-bookworm AS build
ARG EXTRA=
# The compiler builds the CPU kernels. Debian's packages have the release's versions.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY hydrajax hydrajax
RUN python -m venv /opt/hydrajax \
    && /opt/hydrajax/bin/pip install --no-cache-dir ".[serve,gguf,grammar${EXTRA:+,$EXTRA}]"

FROM python:3.12-slim-bookworm
COPY --from=build /opt/hydrajax /opt/hydrajax
RUN useradd --create-home --uid 1000 hydrajax \
    && install --directory --owner hydrajax --group hydrajax /home/hydrajax/.cache
ENV PATH=/opt/hydrajax/bin:$PATH
USER 1000
WORKDIR /home/hydrajax
EXPOSE 8000
# The first start compiles programs. Without a handler, urllib would ask a proxy of the environment.
HEALTHCHECK --interval=30s --timeout=10s --start-period=10m \
    CMD ["python", "-c", "from urllib.request import *; build_opener(ProxyHandler({})).open('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["hydrajax", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["--base", "shipped", "--draft", "draft-model"]
