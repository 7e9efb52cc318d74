"""The OpenAPI 3.1 document of the control API, generated from its table and its models.

docs/openapi.json is a copy; a test compares both, `make openapi` writes it.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any, Final, Literal

from pydantic import BaseModel
from pydantic.alias_generators import to_camel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from postbus.contract.control import (
    EPOCH_HEADER,
    MAX_EPOCH,
    PROTOCOL,
    Problem,
    QueueDescription,
    SubscriptionDescription,
    TopicDescription,
)
from postbus.edge.control.routes import NAMES, ROUTES, Route

REFUSED: Final = {
    400: "The request is invalid; `problems` names the fields",
    401: "The token is missing or wrong",
    403: "The token lacks the scope, a quota is exhausted, or `Host` is not a name of the bus",
    404: "The resource does not exist",
    409: "The request conflicts with the current state; `type` says how",
    410: "Changes since this version are no longer known: list everything again",
    412: "The version differs from `If-Match`, or the resource exists already",
    413: "The request body is too large",
    415: "The content type is not JSON",
    429: "Too many requests with a wrong token",
    500: "An internal error",
    503: "The store is unavailable; repeat the request",
}
ALWAYS: Final = (400, 401, 403, 429, 500)
PARAMETER: Final = re.compile(r"{(\w+)}")
PYTHON_NAME: Final = re.compile(r"`([a-z]+(?:_[a-z]+)+)`")
VERSIONED: Final = (QueueDescription, TopicDescription, SubscriptionDescription)
MODE: Final[Literal["serialization"]] = "serialization"
"""Schemas describe serialized models, so that defaults have their form on the wire."""

DESCRIPTION: Final = """\
Definitions, counts and status of a Postbus namespace. A `PUT` replaces the whole definition and
is idempotent. Errors are problem details (RFC 9457); `detail` says what to do. Later
versions may add fields to responses.
"""


@cache
def openapi_text() -> str:
    """Return the document as served and checked in."""
    return json.dumps(openapi_document(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def openapi_document() -> dict[str, Any]:
    """Return the document."""
    schemas, names = _schemas()
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, names)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Postbus control API",
            "version": f"{PROTOCOL}",
            "description": DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "http://127.0.0.1:9465"}],
        "security": [{"token": []}, {"certificate": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {f"Refused{status}": _refused(status, names) for status in REFUSED},
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A token from the file named by `control_token_file`.",
                },
                "certificate": {
                    "type": "mutualTLS",
                    "description": "A client certificate of the CA in `control_client_ca_file`.",
                },
            },
        },
    }


# --- operations ---------------------------------------------------------------------------------


def _operation(route: Route, names: dict[type[BaseModel], str]) -> dict[str, Any]:
    said: dict[str, Any] = {
        "operationId": route.operation,
        "tags": [route.tag],
        "summary": route.summary,
        "parameters": _parameters(route),
        "responses": _responses(route, names),
    }
    if route.body is not None:
        content = {"application/json": {"schema": _reference(names[route.body])}}
        said["requestBody"] = {"required": True, "content": content}
    if route.is_open:
        said["security"] = []
    else:
        said["description"] = f"Requires the token scope `{route.scope.value}`."
    return said


def _parameters(route: Route) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": NAMES[name]}
        for name in PARAMETER.findall(route.path)
    ]
    parameters += [
        {
            "name": query.name,
            "in": "query",
            "required": False,
            "schema": query.schema,
            "description": query.meaning,
        }
        for query in route.queries
    ]
    if route.is_change:
        parameters.append(
            _header(
                EPOCH_HEADER,
                "For callers with leader election: the number of leadership changes"
                " (leaseTransitions of a Kubernetes Lease). A lower value than before is refused"
                " with 409. Other callers omit it.",
                {"type": "integer", "minimum": 0, "maximum": MAX_EPOCH},
            )
        )
    if route.is_versioned:
        tag = {"type": "string", "pattern": r'^(\*|"[0-9]{1,18}")$'}
        parameters.append(
            _header("If-Match", "The version the resource must have, `*` for any.", tag)
        )
        if route.method == "PUT" and PARAMETER.search(route.path):
            star = {"type": "string", "const": "*"}
            parameters.append(
                _header("If-None-Match", "`*`: the resource must not exist yet.", star)
            )
    return parameters


def _header(name: str, meaning: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "in": "header",
        "required": False,
        "description": meaning,
        "schema": schema,
    }


def _responses(route: Route, names: dict[type[BaseModel], str]) -> dict[str, dict[str, Any]]:
    schema: dict[str, Any] = (
        {"type": "object"} if route.answer is None else _reference(names[route.answer])
    )
    done = {"description": "Success", "content": {"application/json": {"schema": schema}}}
    responses = {"200": done}
    if route.operation.startswith("put") and PARAMETER.search(route.path):
        responses["201"] = {**done, "description": "Created"}
    if route.is_versioned or route.answer in VERSIONED:
        for answer in responses.values():
            answer["headers"] = {
                "ETag": {"schema": {"type": "string"}, "description": "The version, quoted."}
            }
    refusals = {*ALWAYS, *route.refusals}
    refusals |= {413, 415} if route.body is not None else set()
    refusals |= {409, 503} if route.is_change else set()
    for status in sorted(refusals):
        responses[str(status)] = {"$ref": f"#/components/responses/Refused{status}"}
    return responses


def _refused(status: int, names: dict[type[BaseModel], str]) -> dict[str, Any]:
    content = {"application/problem+json": {"schema": _reference(names[Problem])}}
    return {"description": REFUSED[status], "content": content}


# --- models -------------------------------------------------------------------------------------


class _Untitled(GenerateJsonSchema):
    """Writes no titles, which repeat the names of fields."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False


def _schemas() -> tuple[dict[str, Any], dict[type[BaseModel], str]]:
    """Return the schemas by name, and the names of the models used by operations."""
    wanted: dict[type[BaseModel], None] = {Problem: None}
    for route in ROUTES:
        wanted |= {model: None for model in (route.body, route.answer) if model is not None}
    references, document = models_json_schema(
        [(model, MODE) for model in wanted],
        by_alias=True,
        ref_template="#/components/schemas/{model}",
        schema_generator=_Untitled,
    )
    schemas: dict[str, Any] = document["$defs"]
    for schema in schemas.values():
        if "description" in schema:
            schema["description"] = _for_readers(schema["description"])
    names = {model: references[model, MODE]["$ref"].rpartition("/")[2] for model in wanted}
    return schemas, names


def _for_readers(text: str) -> str:
    """Return a docstring in one line, with fields named as on the wire."""
    named = PYTHON_NAME.sub(lambda found: f"`{to_camel(found[1].removesuffix('_ms'))}`", text)
    return " ".join(named.split())


def _reference(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}
