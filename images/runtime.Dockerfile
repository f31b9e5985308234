# The runtime with torch: one StatefulSet per group. Build in the root of the checkout:
#   docker build -f images/runtime.Dockerfile -t REGISTRY/phalanx-runtime:dev .
# --build-arg BASE=debian:12-slim@sha256:... pins the build's base (docs/supply.md).
# images/build.py runs the steps, for the test cluster's archives too; images/layout.py lists contents and paths.
ARG BASE=debian:12-slim
FROM ${BASE} AS build
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates g++ python3 python3-dev python3-venv
WORKDIR /src
COPY tools tools
COPY images images
COPY pyproject.toml ./
COPY requirements/runtime.txt requirements/runtime.txt
RUN python3 -m images.build base /layers/base
RUN python3 -m images.build requirements runtime /layers/base /layers/requirements
COPY runtime/phalanx_runtime/model/native runtime/phalanx_runtime/model/native
RUN python3 -m images.build kernels runtime /layers/base /layers/kernels
COPY crds/phalanx_api crds/phalanx_api
COPY runtime/phalanx_frontend runtime/phalanx_frontend
COPY runtime/phalanx_runtime runtime/phalanx_runtime
RUN python3 -m images.build packages runtime /layers/base /layers/packages
RUN python3 -m images.build gpu-kernels runtime /layers/base /layers/requirements /layers/gpu-kernels

# Only an init, Python, its libraries and our packages: no shell, no package manager.
FROM scratch
COPY --from=build /layers/base /
COPY --from=build /layers/requirements /
COPY --from=build /layers/kernels /
COPY --from=build /layers/packages /
COPY --from=build /layers/gpu-kernels /
ENV HOME=/tmp LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
USER 65532:65532
WORKDIR /
EXPOSE 8000 8100
ENTRYPOINT ["/usr/bin/tini", "--", "/usr/local/bin/phalanx-runtime"]
