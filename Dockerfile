# Images of Postbus. Targets:
#
#   postbus           the broker, `postbus serve`, and the operator, `postbus-operator`
#   postbus-store     Postgres 15 of Debian as the managed store of a bus, `postbus-store`
#   postbus-pipeline  Spark and Java 17 for pipelines, `postbus-pipeline`
#
# `make images` builds them, also where no registry can be reached (docs/guides/images.md). Everything
# that runs is the user 10001 on a read-only root: what a program writes is below a mount.

# Debian 12 with Python 3.11. All stages need the same one: the environment refers to its Python, and
# postbus-store to its releases of packages.
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
# The compiler of the functions for bursts, and headers where Python is Debian's, in this stage only.
RUN apt-get update -q && headers=$(python3 -c "import sysconfig as s; print(s.get_path('include'))") \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends gcc libc6-dev \
        $(test -e "$headers/Python.h" || echo python3-dev)
COPY LICENSE README.md pyproject.toml ./
COPY dataplane dataplane
COPY operator operator
COPY pipeline pipeline
ENV POSTBUS_ACCELERATE=require
# Beside the libraries: a layer of its own, since it changes with each commit.
RUN python3 -m pip --python /opt/build/bin/python wheel --quiet --no-index --no-deps \
        --no-build-isolation --wheel-dir /wheels . \
    && python3 -m pip --python /opt/postbus/bin/python install --quiet --no-index --no-deps \
        --prefix /opt/own /wheels/*.whl

# --- broker and operator ------------------------------------------------------------------------

FROM ${BASE} AS user
RUN groupadd --gid 10001 postbus \
    && useradd --uid 10001 --gid postbus --no-create-home --home-dir /var/lib/postbus \
        --shell /usr/sbin/nologin postbus \
    && find / -xdev -type f -perm /6000 -exec chmod a-s {} +

FROM user AS postbus
RUN install -d -o postbus -g postbus -m 750 /var/lib/postbus
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

# --- store --------------------------------------------------------------------------------------

FROM user AS postbus-store
# Postgres without what only compiles its expressions (jit is off), makes clusters at an install, or
# makes a certificate that every container would share. dpkg still knows what is there.
RUN mkdir /etc/postgresql-common \
    && echo 'create_main_cluster = false' > /etc/postgresql-common/createcluster.conf \
    && apt-get update -q \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends postgresql-15 \
    && dpkg --purge --force-depends \
        libc-l10n libgdbm-compat4 libgdbm6 libjson-perl libllvm14 libperl5.36 libz3-4 locales perl \
        perl-modules-5.36 postgresql-client-common postgresql-common ssl-cert 2> /dev/null \
    && rm -r /var/lib/apt/lists/* /usr/lib/postgresql/15/lib/bitcode \
        /usr/lib/postgresql/15/lib/llvmjit* /usr/share/postgresql/15/man \
    && rm -rf /var/cache/apt/* /var/cache/debconf/* /var/log/* \
    && install -d -o postbus -g postbus -m 700 /var/lib/postbus-store /run/postgresql
COPY operator/store_image /opt/postbus-store
RUN ln -s /opt/postbus-store/postbus_store.py /usr/local/bin/postbus-store \
    && ln -s /opt/postbus-store/postbus-store-ready /usr/local/bin/postbus-store-ready
ENV PATH=/usr/lib/postgresql/15/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /var/lib/postbus-store
USER 10001:10001
CMD ["postbus-store", "--max-connections", "100"]
ARG VERSION=0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Postbus store" \
      org.opencontainers.image.description="Postgres 15 as the managed store of a Postbus bus" \
      org.opencontainers.image.licenses="PostgreSQL AND Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

# --- pipelines ----------------------------------------------------------------------------------

FROM libraries AS spark
COPY requirements-pipeline.lock ./
# In the same place, where the programs of `build` look for Python. pyspark is no wheel anywhere, and
# becomes one without a compiler.
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.crt \
    --mount=type=cache,target=/root/.cache/pip \
    rm -r /opt/postbus && python3 -m venv --without-pip /opt/postbus \
    && python3 -m pip --python /opt/postbus/bin/python install --quiet --only-binary :all: \
        --no-binary pyspark --require-hashes -r requirements-pipeline.lock

FROM user AS postbus-pipeline
# Java's package links its pages of the manual, whose folder slim bases lack.
RUN mkdir -p /usr/share/man/man1 \
    && apt-get update -q \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
        openjdk-17-jre-headless procps \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/* /var/log/*
COPY --from=spark /opt/postbus /opt/postbus
COPY --from=build /opt/own /opt/postbus
ENV PATH=/opt/postbus/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp
USER 10001:10001
CMD ["postbus-pipeline", "--help"]
ARG VERSION=0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Postbus pipeline" \
      org.opencontainers.image.description="Pipelines of Postbus on Spark" \
      org.opencontainers.image.licenses="Apache-2.0 AND GPL-2.0-only WITH Classpath-exception-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
