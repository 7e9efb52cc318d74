# Images of Postbus. Targets:
#
#   postbus         the broker, `postbus serve`, and the operator, `postbus-operator`
#
# `make images` builds them, also where no registry can be reached (docs/guides/images.md). Everything
# that runs is the user 10001 on a read-only root: what a program writes is below a mount.

# Debian 12 with Python 3.11. All stages need the same one: the environment refers to its Python.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

# --- packages of Python -------------------------------------------------------------------------

FROM ${BASE} AS libraries
# A base without pip gets Debian's in this stage only.
RUN python3 -m pip --version || { apt-get update -q \
    && apt-get install -y -q --no-install-recommends python3-pip; }
RUN python3 -m venv --without-pip /opt/build && python3 -m venv --without-pip /opt/postbus
WORKDIR /src
# The settings of pip are the builder's: an index of its own, its certificate. Neither is kept.
ENV PIP_CONFIG_FILE=/run/secrets/pip.conf PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
COPY requirements-build.lock requirements-image.lock ./
# Wheels only: nothing is compiled, so that no compiler is needed.
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.crt \
    --mount=type=cache,target=/root/.cache/pip \
    python3 -m pip --python /opt/postbus/bin/python install --quiet --only-binary :all: \
        --require-hashes -r requirements-image.lock \
    && python3 -m pip --python /opt/build/bin/python install --quiet --only-binary :all: \
        --require-hashes -r requirements-build.lock

FROM libraries AS build
COPY LICENSE README.md pyproject.toml ./
COPY dataplane dataplane
COPY operator operator
# Beside the libraries: a layer of its own, since it changes with each commit.
RUN python3 -m pip --python /opt/build/bin/python wheel --quiet --no-index --no-deps \
        --no-build-isolation --wheel-dir /wheels . \
    && python3 -m pip --python /opt/postbus/bin/python install --quiet --no-index --no-deps \
        --prefix /opt/own /wheels/*.whl

# --- broker and operator ------------------------------------------------------------------------

FROM ${BASE} AS postbus
RUN groupadd --gid 10001 postbus \
    && useradd --uid 10001 --gid postbus --no-create-home --home-dir /var/lib/postbus \
        --shell /usr/sbin/nologin postbus \
    && install -d -o postbus -g postbus -m 750 /var/lib/postbus
COPY --from=libraries /opt/postbus /opt/postbus
COPY --from=build /opt/own /opt/postbus
ENV PATH=/opt/postbus/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    POSTBUS_DATA=/var/lib/postbus/data
WORKDIR /var/lib/postbus
USER 10001:10001
CMD ["postbus", "serve"]
ARG VERSION=0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Postbus" \
      org.opencontainers.image.description="Service bus with Azure Service Bus semantics: broker and operator" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
