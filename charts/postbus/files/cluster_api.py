"""Requests to the Kubernetes API server with the token of a pod, by the standard library alone."""

from __future__ import annotations

import json
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

KINDS = "/apis/postbus.dev/v1alpha1"
SERVER = "https://kubernetes.default.svc"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
REQUEST_S = 30.0
ATTEMPTS = 5
PAUSE_S = 1.0


class ApiError(Exception):
    """The API server refused a request; the text is its own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class ClusterApi:
    """The API server as the ServiceAccount of the pod may use it."""

    def __init__(self, server: str = SERVER, account: Path = ACCOUNT) -> None:
        self._server = server
        self._token = account / "token"
        self._context = ssl.create_default_context(cafile=str(account / "ca.crt"))

    def request(self, method: str, path: str, body: object = None) -> Any:
        """Return the JSON of an answer. Raises ApiError, for a busy server after some attempts."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._request(method, path, body)
            except ApiError as error:
                is_busy = error.status == 429 or error.status >= 500
                if not is_busy or attempt == ATTEMPTS:
                    raise
            time.sleep(PAUSE_S)
        raise AssertionError

    def _request(self, method: str, path: str, body: object) -> Any:
        request = urllib.request.Request(
            self._server + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {self._token.read_text().strip()}",
                "Content-Type": "application/json",
            },
        )
        try:
            with urllib.request.urlopen(
                request, context=self._context, timeout=REQUEST_S
            ) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")
            try:
                message = json.loads(text)["message"]
            except (ValueError, KeyError, TypeError):
                message = text
            raise ApiError(error.code, message) from None

    def exists(self, path: str) -> bool:
        """Return whether there is an object."""
        try:
            self.request("GET", path)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return True
