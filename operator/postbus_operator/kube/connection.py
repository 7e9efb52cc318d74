"""Where the API server is, and how the operator identifies itself there."""

from __future__ import annotations

import os

from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import load_incluster_config, load_kube_config


async def load_configuration(*, connections: int) -> Configuration:
    """Return the address and credentials: of `KUBECONFIG`, of the pod, or of `~/.kube/config`.

    A pod's token is read again each minute. `connections`: limit of those at the same time.
    """
    configuration = Configuration()
    # By default aiohttp looks for a proxy and for a password in .netrc before each request, each in
    # a thread: a twentieth of the operator's time, and an error where .netrc names the API server.
    # kopf's watches never did.
    configuration.client_session_kwargs = {"trust_env": False}
    configuration.connection_pool_maxsize = connections
    if "KUBECONFIG" not in os.environ and "KUBERNETES_SERVICE_HOST" in os.environ:
        load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    else:
        path = os.environ.get("KUBECONFIG") or "~/.kube/config"
        await load_kube_config(  # type: ignore[no-untyped-call]
            config_file=path, client_configuration=configuration
        )
    return configuration


def api_client(configuration: Configuration) -> ApiClient:
    """Return a client; it must be closed."""
    client = ApiClient(configuration)
    client.user_agent = "postbus-operator"
    return client
