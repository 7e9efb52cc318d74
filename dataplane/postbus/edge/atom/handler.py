"""Administration over HTTP: requests of `ServiceBusAdministrationClient`s become administration.

Every request needs Manage on its path, before its body is read; only the root needs no right.
Definitions are answered with exact counts or not at all: while a partition cannot be asked, a query
is answered "busy".
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Final, TypeVar, assert_never
from xml.etree.ElementTree import Element

from aiohttp import web

from postbus.broker.access.authorization_rules import AuthorizationRules, WantedRule
from postbus.broker.access.authz import Grant
from postbus.broker.administration import (
    Administration,
    Availability,
    EntityDescription,
    PutMode,
    RuntimeInformation,
)
from postbus.broker.audit import Audit, AuditedChange
from postbus.broker.catalog.preconditions import DirectoryRefusal, Precondition, WantedEntity
from postbus.contract.entities import (
    EntityKind,
    EntityProperties,
    Right,
)
from postbus.edge.atom.descriptions import DESCRIPTIONS, Place, Shown, Wanted, read_description
from postbus.edge.atom.errors import bad_request, explained, not_found
from postbus.edge.atom.feeds import DEFAULT_VERSION, Feeds, nothing
from postbus.edge.atom.paths import (
    Entities,
    EntityAt,
    NamespaceInfo,
    ParsedPath,
    Root,
    RuleAt,
    Rules,
    SubscriptionAt,
    Subscriptions,
    Unknown,
    parse_path,
)
from postbus.edge.atom.rules import read_rule
from postbus.edge.atom.xml_text import (
    ENTRY,
    FEED,
    MAX_BODY_BYTES,
    BadDocument,
    description_of,
    read_document,
)
from postbus.edge.web.authorization import HttpAuthorizer, HttpRefused
from postbus.edge.web.http_server import read_limited
from postbus.entity.commands import Refusal, Refused

T = TypeVar("T")

MAX_TOP: Final = 100
"""Entries of a page; the same limit as Service Bus."""

COUNTS_FILTERS_SINCE: Final = "2024-05"
"""First version of the API that counts a topic's filters."""

AUTHORITY: Final = re.compile(r"[A-Za-z0-9.:_\[\]-]{1,259}")
VERSION: Final = re.compile(r"\d{4}-\d{2}(-\d{2})?")
ETAG: Final = re.compile(r'(?:W/)?"?(\d{1,18})"?')
SUPPLEMENTS: Final = {
    "forward_to": "ServiceBusSupplementaryAuthorization",
    "forward_dead_lettered_messages_to": "ServiceBusDlqSupplementaryAuthorization",
}
"""Property -> header with a token for the entity that it names."""

EMPTY: Final = RuntimeInformation(0, 0, 0, 0, 0, 0, 0, Availability.AVAILABLE, 0)
"""Counts of a new entity: its partitions need not be loaded."""

NOT_COUNTED: Final = RuntimeInformation(0, 0, 0, 0, 0, 0, 0, Availability.LIMITED, 0)
"""Counts in the answer to a change when the partitions cannot be asked after it."""


class AtomHandler:
    """See the module's docstring. Raises `HttpRefused`."""

    def __init__(
        self,
        administration: Administration,
        rules: AuthorizationRules,
        authorizer: HttpAuthorizer,
        now_ms: Callable[[], int],
        created_ms: int,
        audit: Audit,
    ) -> None:
        """`created_ms` is the creation time of the namespace; times are real."""
        self._audit = audit
        self._administration = administration
        self._rules = rules
        self._authorizer = authorizer
        self._now_ms = now_ms
        self._created_ms = created_ms

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request."""
        parsed = parse_path(request.path)
        if isinstance(parsed, Root) and request.method == "GET":
            return _feed(nothing(self._now_ms()))
        if isinstance(parsed, Subscriptions):  # Manage on a topic includes its subscriptions
            path, below = parsed.topic, "subscriptions"
        else:
            path, below = "/".join(part for part in request.path.split("/") if part), ""
        grant = await self._authorizer.authorize(request, path, Right.MANAGE, below=below)
        request[GRANT] = grant
        try:
            match request.method:
                case "GET":
                    return await self._get(request, parsed)
                case "PUT":
                    return await self._put(request, parsed)
                case "DELETE":
                    return await self._delete(request, parsed)
                case other:
                    text = f"Administration supports GET, PUT and DELETE, not {other}."
                    raise HttpRefused(405, text, ALLOW)
        except BadDocument as error:
            raise bad_request(str(error)) from None
        except DirectoryRefusal as error:
            raise explained(error.refused) from error

    # --- queries --------------------------------------------------------------------------------

    async def _get(self, request: web.BaseRequest, parsed: ParsedPath) -> web.Response:
        administration = self._administration
        feeds = self._feeds(request)
        match parsed:
            case Root():
                return _feed(nothing(self._now_ms()))
            case NamespaceInfo():
                return _entry(feeds.namespace(administration.properties, self._created_ms))
            case Entities(kind):
                path = f"$Resources/{kind.value}s"
                return await self._list(request, path, f"{kind.value.title()}s", kind, None)
            case EntityAt(name):
                found = administration.find(name)
                if found is None:
                    return _feed(nothing(self._now_ms()))
                return await self._answer(request, found)
            case Subscriptions(topic):
                path = f"{topic}/Subscriptions"
                kind = EntityKind.SUBSCRIPTION
                return await self._list(request, path, "Subscriptions", kind, topic)
            case SubscriptionAt():
                return await self._answer(request, self._subscription(parsed))
            case Rules(at):
                return self._list_rules(request, self._subscription(at))
            case RuleAt(at, name):
                subscription = self._subscription(at)
                for rule in subscription.rules:
                    if rule.properties.name.lower() == name.lower():
                        return _entry(feeds.rule(subscription, rule))
                raise not_found(f"{subscription.name} has no rule {name}")
            case Unknown():
                raise not_found(f"there is nothing at {request.path}")
            case _:
                assert_never(parsed)

    async def _list(
        self,
        request: web.BaseRequest,
        path: str,
        title: str,
        kind: EntityKind,
        topic: str | None,
    ) -> web.Response:
        skip, top = _page_of(request)
        feeds = self._feeds(request)
        found = self._administration.listed(kind, topic, skip, top + 1)
        entries = []
        for description in found[:top]:
            try:
                runtime = await self._administration.runtime(description.name)
            except DirectoryRefusal as error:
                if error.refused.refusal is Refusal.ENTITY_NOT_FOUND:
                    continue  # it was deleted meanwhile
                runtime = self._administration.uncounted(description)
            entries.append(feeds.entity(self._shown(request, description, runtime)))
        following = _next(skip, top) if len(found) > top else None
        return _feed(feeds.feed(path, title, entries, self._now_ms(), following))

    def _list_rules(
        self, request: web.BaseRequest, subscription: EntityDescription
    ) -> web.Response:
        skip, top = _page_of(request)
        feeds = self._feeds(request)
        entries = [feeds.rule(subscription, rule) for rule in subscription.rules[skip : skip + top]]
        following = _next(skip, top) if len(subscription.rules) > skip + top else None
        path = f"{subscription.name}/Rules"
        return _feed(feeds.feed(path, "Rules", entries, self._now_ms(), following))

    def _subscription(self, at: SubscriptionAt) -> EntityDescription:
        found = self._administration.find(at.path)
        if found is None:
            raise not_found(f"there is no subscription {at.path}")
        return found

    # --- changes --------------------------------------------------------------------------------

    async def _put(self, request: web.BaseRequest, parsed: ParsedPath) -> web.Response:
        match parsed:
            case EntityAt() | SubscriptionAt():
                return await self._put_entity(request, parsed)
            case RuleAt(at, name):
                return await self._put_rule(request, at, name)
            case _:
                text = f"{request.path} cannot be created: it is not the name of an entity"
                raise bad_request(text)

    async def _put_entity(
        self, request: web.BaseRequest, parsed: EntityAt | SubscriptionAt
    ) -> web.Response:
        condition = _condition(request)
        tag, description = await self._read(request)
        kind = DESCRIPTIONS.get(tag)
        is_subscription = isinstance(parsed, SubscriptionAt)
        if kind is None or is_subscription is not (kind is EntityKind.SUBSCRIPTION):
            expected = "SubscriptionDescription"
            if not is_subscription:
                expected = "QueueDescription or a TopicDescription"
            raise bad_request(f"the entry describes something else; send a {expected}")
        path = parsed.path if isinstance(parsed, SubscriptionAt) else parsed.name
        known = self._administration.find(path)
        before = None if known is None else known.properties
        wanted = read_description(kind, description, before, self._administration.limits)
        await self._check_forwards(request, wanted.properties, known)
        if wanted.authorization_rules is not None:
            self._rules.check(path, wanted.authorization_rules)
        entity = _wanted_entity(parsed, kind, wanted, condition.mode)
        work = self._administration.run(
            self._put_whole(entity, condition, wanted.authorization_rules)
        )
        rules = [each.name for each in wanted.authorization_rules or ()]
        detail = {"authorizationRules": rules} if rules else {}
        put = await self._audited(request, "put", path, detail, work)
        status = CREATED if condition.mode is PutMode.CREATE else 200
        return await self._answer(request, put, status)

    async def _put_whole(
        self,
        wanted: WantedEntity,
        condition: Precondition,
        rules: tuple[WantedRule, ...] | None,
    ) -> EntityDescription:
        """Store a definition and its authorization rules, if any."""
        put = await self._administration.put(wanted, condition)
        if rules is not None:
            await self._put_authorization_rules(put, condition.mode, rules)
        return put

    async def _put_authorization_rules(
        self, put: EntityDescription, mode: PutMode, wanted: tuple[WantedRule, ...]
    ) -> None:
        """Store an entity's authorization rules, which were validated before.

        If the store fails now, an entity created by this request is deleted again.
        """
        try:
            await self._rules.replace(put.name, wanted)
        except DirectoryRefusal:
            if mode is not PutMode.CREATE:
                raise _half_done() from None
            try:
                made = Precondition(versions=frozenset({put.version}))
                await self._administration.delete(put.name, condition=made)
            except DirectoryRefusal:
                raise _half_done() from None
            raise

    async def _read(self, request: web.BaseRequest) -> tuple[str, Element]:
        """Return a tag and its content; check the right again, since reading a body takes time."""
        root = read_document(await read_limited(request, MAX_BODY_BYTES))
        self._authorizer.check_again(request[GRANT], Right.MANAGE)
        return description_of(root)

    async def _put_rule(
        self, request: web.BaseRequest, at: SubscriptionAt, name: str
    ) -> web.Response:
        condition = _condition(request)
        if condition.versions is not None:
            raise explained(Refused(Refusal.CONFLICT, "A rule has no ETag; send If-Match: *"))
        tag, description = await self._read(request)
        if tag != "RuleDescription":
            raise bad_request("the entry describes something else; send a RuleDescription")
        mode = condition.mode
        work = self._administration.put_rule(at.path, read_rule(description, name), mode=mode)
        rule = await self._audited(request, "put rule", at.path, {"rule": name}, work)
        entry = self._feeds(request).rule(self._subscription(at), rule)
        return _entry(entry, CREATED if mode is PutMode.CREATE else 200)

    async def _delete(self, request: web.BaseRequest, parsed: ParsedPath) -> web.Response:
        administration = self._administration
        condition = Precondition(versions=_condition(request).versions)
        match parsed:
            case EntityAt() | SubscriptionAt():
                path = parsed.name if isinstance(parsed, EntityAt) else parsed.path
                work = administration.delete(path, condition=condition)
                await self._audited(request, "delete", path, {}, work)
            case RuleAt(at, name):
                work = administration.delete_rule(at.path, name)
                await self._audited(request, "delete rule", at.path, {"rule": name}, work)
            case _:
                raise not_found(f"nothing can be deleted at {request.path}")
        return web.Response()

    async def _audited(
        self,
        request: web.BaseRequest,
        verb: str,
        path: str,
        detail: Mapping[str, object],
        work: Awaitable[T],
    ) -> T:
        """Return the result of a change, recorded in the audit with its caller."""
        caller, address = request[GRANT].caller, request.remote or ""
        return await self._audit.recorded(
            AuditedChange(caller, address, "administration", verb, path, detail), work
        )

    async def _check_forwards(
        self,
        request: web.BaseRequest,
        wanted: EntityProperties,
        known: EntityDescription | None,
    ) -> None:
        """Refuse to forward to an entity the client may not send to; it may bring another token for
        it.
        """
        for name, header in SUPPLEMENTS.items():
            to = getattr(wanted, name, None)
            before = None if known is None else getattr(known.properties, name, None)
            if to is None or to == before:
                continue
            if header in request.headers:
                await self._authorizer.authorize(request, to, Right.SEND, header)
                continue
            try:
                await self._authorizer.authorize(request, to, Right.SEND)
            except HttpRefused as error:
                text = f"{error.text} To forward to {to}, send a token for it in {header}."
                raise HttpRefused(error.status, text, error.headers) from None

    # --- answers --------------------------------------------------------------------------------

    def _feeds(self, request: web.BaseRequest) -> Feeds:
        version = request.query.get("api-version", "")
        if VERSION.fullmatch(version) is None:
            version = DEFAULT_VERSION
        return Feeds(self._place(request), self._administration.namespace, version)

    def _place(self, request: web.BaseRequest) -> Place:
        host = request.headers.get("Host", "")
        is_good = AUTHORITY.fullmatch(host) is not None
        return Place(request.scheme, host if is_good else self._administration.namespace)

    def _shown(
        self,
        request: web.BaseRequest,
        description: EntityDescription,
        runtime: RuntimeInformation,
    ) -> Shown:
        is_subscription = description.kind is EntityKind.SUBSCRIPTION
        is_counting = (
            description.kind is EntityKind.TOPIC
            and request.query.get("api-version", "") >= COUNTS_FILTERS_SINCE
        )
        return Shown(
            description,
            runtime,
            self._place(request),
            () if is_subscription else self._rules.listed(description.name),
            self._filter_counts(description.name, runtime) if is_counting else None,
            self._administration.limits.size_factor(is_partitioned=description.is_partitioned),
        )

    def _filter_counts(self, topic: str, runtime: RuntimeInformation) -> tuple[int, int]:
        """Return the numbers of SQL and correlation filters of a topic's subscriptions."""
        sql = correlation = 0
        subscriptions = self._administration.listed(
            EntityKind.SUBSCRIPTION, topic, 0, runtime.subscription_count
        )
        for subscription in subscriptions:
            for rule in subscription.rules:
                if rule.properties.sql_filter is None:
                    correlation += 1
                else:
                    sql += 1
        return sql, correlation

    async def _answer(
        self, request: web.BaseRequest, description: EntityDescription, status: int = 200
    ) -> web.Response:
        """Return the entry of an entity with its ETag; a completed change is never refused."""
        runtime = replace(EMPTY, accessed_ms=description.created_ms)
        if status != CREATED:
            try:
                runtime = await self._administration.runtime(description.name)
            except DirectoryRefusal:
                if request.method == "GET":
                    raise
                runtime = replace(NOT_COUNTED, accessed_ms=description.created_ms)
        shown = self._shown(request, description, runtime)
        answer = _entry(self._feeds(request).entity(shown), status)
        answer.headers["ETag"] = f'"{description.version}"'
        return answer


GRANT: Final = web.RequestKey("grant", Grant)
"""Key of the grant in a request."""

CREATED: Final = 201
ALLOW: Final = {"Allow": "GET, PUT, DELETE"}


def _half_done() -> DirectoryRefusal:
    text = "The definition is stored, its authorization rules are not: repeat the request"
    return DirectoryRefusal(Refused(Refusal.UNKNOWN, text))


def _entry(text: str, status: int = 200) -> web.Response:
    return web.Response(body=text.encode(), status=status, headers={"Content-Type": ENTRY})


def _feed(text: str) -> web.Response:
    return web.Response(body=text.encode(), headers={"Content-Type": FEED})


def _wanted_entity(
    parsed: EntityAt | SubscriptionAt, kind: EntityKind, wanted: Wanted, mode: PutMode
) -> WantedEntity:
    """Return the definition in a request; its default rule is for a new subscription."""
    sent = wanted.forwards_as_sent
    if isinstance(parsed, EntityAt):
        return WantedEntity(kind, parsed.name, wanted.properties, forwards_as_sent=sent)
    rule = wanted.default_rule if mode is PutMode.CREATE else None
    rules = None if rule is None else [rule]
    return WantedEntity(kind, parsed.name, wanted.properties, parsed.topic, rules, sent)


def _condition(request: web.BaseRequest) -> Precondition:
    """Return the precondition of a change: nothing exists, something exists, or a version of it."""
    said = request.headers.get("If-Match", "").strip()
    if not said:
        return Precondition(PutMode.CREATE)
    if said == "*":
        return Precondition(PutMode.UPDATE)
    found = ETAG.fullmatch(said)
    if found is None:
        raise explained(
            Refused(Refusal.CONFLICT, "If-Match must be * or the ETag of a GET response")
        )
    return Precondition(PutMode.UPDATE, frozenset({int(found[1])}))


def _page_of(request: web.BaseRequest) -> tuple[int, int]:
    """Return skip and top of a list; raises `HttpRefused` 400."""
    return (
        _number(request, "$skip", 0, 2**31 - 1),
        max(1, min(_number(request, "$top", MAX_TOP, 2**31 - 1), MAX_TOP)),
    )


def _number(request: web.BaseRequest, name: str, default: int, most: int) -> int:
    text = request.query.get(name, "").strip() or str(default)
    if not (text.isascii() and text.isdigit()) or len(text) > 10 or int(text) > most:
        raise bad_request(f"{name}: use a whole number from 0 to {most}")
    return int(text)


def _next(skip: int, top: int) -> str:
    return f"$skip={skip + top}&$top={top}"
