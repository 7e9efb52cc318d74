"""Access to the API server, on the asyncio half of the official client.

Objects are plain JSON. Each call is one request: what fails is raised as a typed error, and the
worker tries again later. Answers to writes are handed to `on_object`, so that the cache knows what
was written before the watch reports it.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final

import aiohttp
from kubernetes.aio.client import ApiClient

from postbus_operator.annotations import FIELD_MANAGER, WATCH_LABEL
from postbus_operator.kube.resource_types import SECRETS, ResourceType, type_of

Json = dict[str, Any]

REQUEST_S: Final = 30.0
"""Limit of a request; the API server itself gives up after 60 s."""

PAGE: Final = 500
"""Objects in an answer to a list, as in kubectl."""

MERGE_PATCH: Final = "application/merge-patch+json"
JSON_PATCH: Final = "application/json-patch+json"
APPLY_PATCH: Final = "application/apply-patch+yaml"


class ApiError(Exception):
    """The API server refused a request. `message` is its own text."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message


class NotFound(ApiError):
    """The object, or its type, does not exist (404, 410)."""


class Conflict(ApiError):
    """The object exists already, or is not the one that was expected (409, 422 for its uid)."""


class Forbidden(ApiError):
    """The operator lacks a right, or an admission rule or quota refuses the object (401, 403)."""


class Invalid(ApiError):
    """The API server does not accept the object (400, 422)."""


class ApiUnavailable(ApiError):
    """No answer, or one that another attempt may change (429, 5xx). The write may have happened."""

    def __init__(
        self, status: int, reason: str, message: str, retry_after_s: float | None = None
    ) -> None:
        super().__init__(status, reason, message)
        self.retry_after_s = retry_after_s


class Api:
    """Requests to the API server as one field manager."""

    def __init__(
        self,
        client: ApiClient,
        *,
        on_answer: Callable[[str, int, float], None],
        on_object: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """`on_answer`: verb, status (0: no answer) and seconds, for metrics.

        `on_object`: called with what a write made of an object.
        """
        self._client = client
        self._on_answer = on_answer
        self._on_object = on_object

    async def get(self, type: ResourceType, namespace: str, name: str) -> Json:
        """Return an object. Raises NotFound."""
        return await self._request("GET", "get", type.path(namespace, name))

    async def list(
        self, type: ResourceType, namespace: str | None = None, *, labels: str = ""
    ) -> AsyncIterator[Json]:
        """Yield the objects of a namespace, or of all, that a label selector matches, by pages."""
        query: dict[str, str] = {"limit": str(PAGE)}
        if labels:
            query["labelSelector"] = labels
        while True:
            page = await self._request("GET", "list", type.path(namespace), query=query)
            for item in page["items"]:
                # Items of a list lack what the list says of all of them.
                item.setdefault("apiVersion", type.api_version)
                item.setdefault("kind", type.kind)
                yield item
            token = page["metadata"].get("continue")
            if not token:
                return
            query["continue"] = token

    async def apply(self, wanted: Mapping[str, Any]) -> Json:
        """Apply an object on the server's side and return it; the fields in it become ours.

        Fields that an earlier call had and this one lacks are removed. A Secret gets the label by
        which Secrets are watched.
        """
        type = type_of(wanted)
        metadata = dict(wanted["metadata"])
        if type is SECRETS:
            metadata["labels"] = {**metadata.get("labels", {}), WATCH_LABEL: "true"}
        return await self._write(
            "PATCH",
            "apply",
            type.path(metadata.get("namespace"), metadata["name"]),
            {**wanted, "metadata": metadata},
            content=APPLY_PATCH,
            query={"fieldManager": FIELD_MANAGER, "force": "true"},
        )

    async def create(self, type: ResourceType, namespace: str, wanted: Mapping[str, Any]) -> Json:
        """Create an object. Raises Conflict if it exists."""
        return await self._write(
            "POST", "create", type.path(namespace), wanted, query={"fieldManager": FIELD_MANAGER}
        )

    async def replace(self, type: ResourceType, wanted: Mapping[str, Any]) -> Json:
        """Replace an object; with a resourceVersion in it only that version (else Conflict)."""
        metadata = wanted["metadata"]
        path = type.path(metadata["namespace"], metadata["name"])
        return await self._write(
            "PUT", "update", path, wanted, query={"fieldManager": FIELD_MANAGER}
        )

    async def patch(
        self,
        type: ResourceType,
        namespace: str,
        name: str,
        change: Mapping[str, Any],
    ) -> Json:
        """Merge a change into an object: null removes a field, lists are replaced whole.

        With `metadata.uid` in the change only that object is changed, and with
        `metadata.resourceVersion` only that version (else Conflict).
        """
        return await self._write(
            "PATCH",
            "patch",
            type.path(namespace, name),
            change,
            content=MERGE_PATCH,
            query={"fieldManager": FIELD_MANAGER},
        )

    async def put_status(
        self, type: ResourceType, namespace: str, name: str, uid: str, status: Mapping[str, Any]
    ) -> Json:
        """Replace the status of the object with this uid (else Conflict).

        The API server compares no uid in a merge patch of a status, and does not say what failed
        in a JSON patch.
        """
        change: list[Json] = [
            {"op": "test", "path": "/metadata/uid", "value": uid},
            {"op": "add", "path": "/status", "value": status},
        ]
        path = type.path(namespace, name, "status")
        query = {"fieldManager": FIELD_MANAGER}
        try:
            return await self._write(
                "PATCH", "patch", path, change, content=JSON_PATCH, query=query
            )
        except Invalid as error:
            found = await self.get(type, namespace, name)
            if found["metadata"]["uid"] == uid:
                raise
            text = f"{name} has the uid {found['metadata']['uid']}, not {uid}"
            raise Conflict(409, "Conflict", text) from error

    async def delete(
        self,
        type: ResourceType,
        namespace: str,
        name: str,
        *,
        uid: str | None = None,
        version: str | None = None,
    ) -> bool:
        """Delete an object; return whether it existed.

        With `uid` only that one, and with `version` only as it was then (else Conflict).
        """
        body: Json = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
        }
        wanted = {"uid": uid, "resourceVersion": version}
        preconditions = {name: each for name, each in wanted.items() if each is not None}
        if preconditions:
            body["preconditions"] = preconditions
        try:
            await self._request("DELETE", "delete", type.path(namespace, name), body)
        except NotFound:
            return False
        return True

    async def serves(self, group: str, version: str) -> set[str]:
        """Return the plurals that a version of a group has; none if it is not installed."""
        try:
            found = await self._request("GET", "get", f"/apis/{group}/{version}")
        except NotFound:
            return set()
        return {each["name"] for each in found["resources"] if "/" not in each["name"]}

    async def _write(
        self,
        method: str,
        verb: str,
        path: str,
        body: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        query: Mapping[str, str],
        content: str = "application/json",
    ) -> Json:
        written = await self._request(method, verb, path, body, content=content, query=query)
        self._on_object(written)
        return written

    async def _request(
        self,
        method: str,
        verb: str,
        path: str,
        body: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        *,
        content: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> Json:
        client = self._client
        start = time.monotonic()
        status = 0
        try:
            call = await client.param_serialize(
                method,
                path,
                query_params=list((query or {}).items()),
                header_params={"Accept": "application/json", "Content-Type": content},
                body=body,
                auth_settings=["BearerToken"],
            )
            answer = await client.call_api(*call, _request_timeout=REQUEST_S)
            data = await answer.response.read()
            status = answer.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ApiUnavailable(0, "NoAnswer", f"{method} {path}: {error!r}") from error
        finally:
            self._on_answer(verb, status, time.monotonic() - start)
        if status >= 400:
            raise _error_of(status, data, answer.headers.get("Retry-After"))
        try:
            found: Json = json.loads(data)
        except ValueError:
            raise ApiUnavailable(status, "NoJson", f"{method} {path}: no JSON") from None
        return found


def _error_of(status: int, data: bytes, retry_after: str | None) -> ApiError:
    fields: list[object] = []
    try:
        said = json.loads(data)
        reason, message = str(said.get("reason") or ""), str(said.get("message") or "")
        fields += [each.get("field") for each in (said.get("details") or {}).get("causes") or ()]
    except (ValueError, AttributeError, TypeError):
        reason, message = "", data[:500].decode("utf-8", "replace")
    match status:
        case 404 | 410:
            return NotFound(status, reason, message)
        case 409:
            return Conflict(status, reason, message)
        case 422 if "metadata.uid" in fields:  # a merge patch of an object with another uid
            return Conflict(status, reason, message)
        case 401 | 403:
            return Forbidden(status, reason, message)
        case 429:
            return ApiUnavailable(status, reason, message, _seconds(retry_after))
        case _ if status >= 500:
            return ApiUnavailable(status, reason, message, _seconds(retry_after))
        case _:
            return Invalid(status, reason, message)


def _seconds(retry_after: str | None) -> float | None:
    """Return the seconds of a Retry-After; the API server never writes a date there."""
    return float(retry_after) if retry_after is not None and retry_after.isdigit() else None
