"""Sessions with the buses of a cluster: where a bus is, its credentials, and who is woken by it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from postbus.contract.entities import is_subscription_path, subscription_name, topic_of
from postbus_operator.bus.control_client import Access
from postbus_operator.bus.session import BUS_PATH, USUAL, BusSessions, Periods
from postbus_operator.certificates import CertificateInvalid, trust_of
from postbus_operator.context import StillLeads
from postbus_operator.kube.api import Api, ApiError, Forbidden, NotFound
from postbus_operator.kube.cache import Cache
from postbus_operator.kube.resource_types import SECRETS
from postbus_operator.names import child_name
from postbus_operator.objects import Key, Resource
from postbus_operator.outcome import BackendUnavailable

CONTROL_PORT: Final = 9465


def open_sessions(
    api: Api,
    cache: Cache,
    epoch: int,
    wake: Callable[[Key, float], None],
    still_leads: StillLeads,
    *,
    cluster_domain: str,
    control_url: Callable[[Resource], str] | None = None,
    periods: Periods = USUAL,
) -> BusSessions:
    """Return sessions that are opened as they are needed; they end with their Namespace."""

    async def read_access(bus: Resource) -> Access:
        url = (control_url or (lambda each: url_of(each, cluster_domain)))(bus)
        return await read_credentials(api, bus, url)

    def is_current(bus: Resource) -> bool:
        found = cache.get(bus.key)
        return found is not None and found.uid == bus.uid

    def moved(bus: Resource, paths: Collection[str] | None) -> None:
        for key in _everything(cache, bus) if paths is None else _of_paths(cache, bus, paths):
            wake(key, 0)

    return BusSessions(read_access, epoch, still_leads, is_current, moved, periods)


def url_of(bus: Resource, cluster_domain: str) -> str:
    """Return the address of the control API of a bus's first broker."""
    name = child_name(bus.key.name)
    host = f"{name}-broker-0.{name}-brokers.{bus.key.namespace}.svc.{cluster_domain}"
    return f"https://{host}:{CONTROL_PORT}"


async def read_credentials(api: Api, bus: Resource, url: str) -> Access:
    """Return token and trust from the Secrets of a bus; the certificate may be a user's."""
    name, namespace = child_name(bus.key.name), bus.key.namespace
    try:
        token = _value(await api.get(SECRETS, namespace, f"{name}-control-token"), "token")
        if not url.startswith("https:"):
            return Access(url, token)
        served = await api.get(SECRETS, namespace, f"{name}-tls")
        trust = trust_of(
            {key: base64.b64decode(value) for key, value in (served.get("data") or {}).items()},
            str(urlsplit(url).hostname),
        )
        return Access(url, token, trust.authorities, trust.server_name)
    except CertificateInvalid as error:
        raise BackendUnavailable(f"Secret {name}-tls: {error}") from None
    except NotFound as error:
        raise BackendUnavailable(f"a Secret of the bus is not there yet: {error.message}") from None
    except Forbidden:
        raise BackendUnavailable(
            f"the operator may not read Secrets in {namespace}: install its chart with this"
            " cluster namespace in watchNamespaces"
        ) from None
    except ApiError as error:
        raise BackendUnavailable(f"the Secrets of the bus cannot be read: {error}") from None


def _value(secret: Mapping[str, Any], key: str) -> str:
    packed = (secret.get("data") or {}).get(key)
    if packed is None:
        raise BackendUnavailable(f"the Secret {secret['metadata']['name']} has no {key} yet")
    return base64.b64decode(packed).decode("utf-8").strip()


# --- who is woken -------------------------------------------------------------------------------


def _everything(cache: Cache, bus: Resource) -> list[Key]:
    entities = cache.owned_by(bus.key)
    below = [one for each in entities for one in cache.owned_by(each.key)]
    return [bus.key, *(each.key for each in (*entities, *below))]


def _of_paths(cache: Cache, bus: Resource, paths: Collection[str]) -> set[Key]:
    """Return the resources that stand for entities, use them, or count them."""
    found: set[Key] = set()
    for path in paths:
        if path == BUS_PATH:
            found.add(bus.key)
        elif is_subscription_path(path):
            topics = [
                each for each in cache.named(bus.key, topic_of(path)) if each.key.kind == "Topic"
            ]
            name = subscription_name(path)
            for topic in topics:
                found |= {topic.key, *(each.key for each in cache.named(topic.key, name))}
            found |= {each.key for each in cache.forwarding_to(bus.key, path)}
        else:
            found |= {each.key for each in cache.named(bus.key, path)}
            found |= {each.key for each in cache.forwarding_to(bus.key, path)}
    return found
