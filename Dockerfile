# The server alone, for CPUs. Weights are not in the image: they are fetched at the first start, into the volume.
FROM python:3.11-slim AS build

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
    && python -m venv /opt/latebranch
ENV PATH=/opt/latebranch/bin:$PATH
WORKDIR /app

# torch by itself: the largest layer changes least, and its CPU build lives in its own index.
COPY constraints.txt ./
RUN pip install -c constraints.txt --index-url https://download.pytorch.org/whl/cpu --extra-index-url https://pypi.org/simple torch

COPY pyproject.toml README.md LICENSE NOTICE ./
COPY engine engine
COPY selector selector
COPY server server
COPY configs configs
# Not editable: the package has everything that serves, and the image below needs no sources.
RUN pip install -c constraints.txt .


FROM python:3.11-slim

# torch and its kernels need the OpenMP runtime.
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home --shell /usr/sbin/nologin latebranch \
    && install -d -o latebranch -g latebranch /var/cache/latebranch

COPY --from=build /opt/latebranch /opt/latebranch
ENV PATH=/opt/latebranch/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    LATEBRANCH_HOST=0.0.0.0 \
    LATEBRANCH_CACHE=/var/cache/latebranch \
    HF_HOME=/var/cache/latebranch/huggingface

# A number: Kubernetes (runAsNonRoot) does not look up names.
USER 10001
VOLUME /var/cache/latebranch
EXPOSE 8000

# The first start downloads 98 MB and converts them; a probe that fails meanwhile does not count.
HEALTHCHECK --start-period=5m --interval=10s --timeout=5s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]

STOPSIGNAL SIGTERM
ENTRYPOINT ["latebranch"]
CMD ["serve"]
