# Quire on an NVIDIA GPU or a CPU: docker build -t quire . (docs/deploy.md says how to run it so that it is safe)
# For this machine alone: docker run --rm [--gpus all] -p 127.0.0.1:8000:8000 -v quire-cache:/var/cache/quire quire
# Flags follow the image's name: docker run … quire org/name --max-model-len 4096 --api-key-file /run/secrets/keys

FROM python:3.11-slim AS build
# Without a GPU the CPU build of torch is enough, and a tenth of the size: --build-arg TORCH_INDEX=<an index that has it>
ARG TORCH_INDEX=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /venv
WORKDIR /src
# Dependencies first: this layer is built again only when they change.
COPY pyproject.toml README.md LICENSE ./
RUN mkdir -p src/quire && touch src/quire/__init__.py \
 && if [ -n "$TORCH_INDEX" ]; then /venv/bin/pip install --index-url "$TORCH_INDEX" torch; fi \
 && /venv/bin/pip install ".[hub,otel]" \
 && /venv/bin/pip uninstall -y quire
COPY src ./src
RUN /venv/bin/pip install --no-deps . && /venv/bin/quire --version

FROM python:3.11-slim
# g++ compiles kernels at the first start, on a CPU all of them, on a GPU what launches Triton's; a GPU's driver comes
# from the host, its libraries with torch. pip, which the image has, fetches the default model.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 quire \
 && useradd --system --uid 10001 --gid quire --create-home quire \
 && install -d -o quire -g quire /var/cache/quire
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 NVIDIA_DRIVER_CAPABILITIES=compute,utility
# All that is ever written, but for /tmp: the rest of the file system may be read-only.
ENV QUIRE_CACHE=/var/cache/quire HF_HOME=/var/cache/quire/hub TRITON_CACHE_DIR=/var/cache/quire/triton
USER quire
WORKDIR /home/quire
VOLUME /var/cache/quire
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
# A container's port is published by whoever runs it, so all of its own interfaces are listened on.
ENTRYPOINT ["quire", "serve", "--host", "0.0.0.0", "--port", "8000"]
