"""The table of the control API: its operations with their bodies and answers.

The server serves exactly these routes, and the OpenAPI document is generated from them. Texts here
are for readers of that document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from postbus.contract.control import (
    DEFAULT_PAGE,
    MAX_PAGE,
    MAX_WAIT_S,
    Advance,
    Applied,
    AuditPage,
    AuthorizationRuleDefinition,
    AuthorizationRuleDescription,
    AuthorizationRulePage,
    Clock,
    ConnectionPage,
    Deleted,
    DeletionPolicy,
    EntityChanges,
    LocksLost,
    LoseLocksOf,
    NamespaceDescription,
    QueueDescription,
    QueuePage,
    RuleDescription,
    RulePage,
    RuntimeInformation,
    Status,
    StoreInterrupted,
    StoreOutage,
    SubscriptionDefinition,
    SubscriptionDescription,
    SubscriptionPage,
    Tombstones,
    TopicDescription,
    TopicPage,
)
from postbus.contract.control_counts import EntityCountsPage
from postbus.contract.control_groups import (
    CreateReaderGroup,
    DroppedReaderGroup,
    MoveReaderGroup,
    OfReaderGroup,
    ReaderGroupDescription,
    ReaderGroupList,
)
from postbus.contract.control_messages import (
    DeletedMessages,
    DeleteMessages,
    MessagePage,
    MessageSummary,
    PeekMessages,
    PurgedMessages,
    PurgeMessages,
    ResendMessages,
    ResentMessages,
    SummarizeMessages,
)
from postbus.contract.entities import (
    ENTITY_NAME,
    FILTER_NAME,
    RULE_NAME,
    SUBSCRIPTION_NAME,
    QueueProperties,
    RuleProperties,
    TopicProperties,
)
from postbus.contract.namespace import NamespaceDefinition
from postbus.edge.control.callers import Scope

MAX_VERSION: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Query:
    """A parameter behind the question mark; `schema` is its JSON schema.

    Without a default in it, the call does not have the parameter when the request has not. `form`
    completes "must …" in the refusal of a text that does not match the pattern.
    """

    name: str
    schema: dict[str, Any]
    meaning: str
    form: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """One operation.

    `refusals`: statuses besides those that every operation may answer. `scope`: required of a
    caller's token; operations on keys require all scopes. `is_change`: it takes the caller's epoch,
    and the store may be unavailable. `is_versioned`: it takes `If-Match`, or `If-None-Match` where
    something can be created. `answer` None: JSON.
    """

    operation: str
    method: str
    path: str
    tag: str
    summary: str
    answer: type[BaseModel] | None
    body: type[BaseModel] | None = None
    queries: tuple[Query, ...] = ()
    refusals: tuple[int, ...] = ()
    is_change: bool = False
    is_versioned: bool = False
    is_open: bool = False
    scope: Scope = Scope.READ


SKIP: Final = Query(
    "skip",
    {"type": "integer", "minimum": 0, "maximum": 1_000_000, "default": 0},
    "Number of entries to skip.",
)
TOP: Final = Query(
    "top",
    {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": DEFAULT_PAGE},
    "Maximum number of entries to return.",
)
PAGE: Final = (SKIP, TOP)
SINCE: Final = Query(
    "since",
    {"type": "integer", "minimum": 0, "maximum": MAX_VERSION, "default": 0},
    "Return changes after this catalog version.",
)
CURSOR: Final = Query(
    "since",
    {"type": "string", "pattern": r"^(?:0|[0-9a-f]{16}\.[0-9]{1,19})$", "default": "0"},
    "Return changes after this `cursor` of the last answer; 0 begins with all entities.",
    form="be 0 or the cursor of an answer",
)
BEGUN: Final = Query(
    "begun",
    {"type": "integer", "minimum": 0, "maximum": MAX_VERSION, "default": 0},
    "Version of the catalog when a list began with `since=0`; older deletions do not end the list.",
)
WAIT: Final = Query(
    "wait",
    {"type": "integer", "minimum": 0, "maximum": MAX_WAIT_S, "default": 0},
    "Seconds to wait for a change if there is none yet.",
)
POLICY: Final = Query(
    "policy",
    {"type": "string", "enum": [policy.value for policy in DeletionPolicy], "default": "Delete"},
    "`DeleteIfEmpty` fails if there are messages; `Retain` keeps them for a restore.",
)

MANAGED_BY: Final = Query(
    "managed-by",
    {"type": "string", "maxLength": 512, "pattern": "^[ -~]*$"},
    "Set the opaque mark of the program that keeps this definition; empty removes it. Without this"
    " parameter the mark stays. Updates over the administration API keep it; tombstones have it.",
    form="have at most 512 printable ASCII characters",
)

KEYS: Final = Query(
    "keys", {"type": "boolean", "default": False}, "Include the keys, which are secret."
)

BEFORE: Final = Query(
    "before",
    {"type": "integer", "minimum": 1, "maximum": MAX_VERSION, "default": MAX_VERSION},
    "Return entries with lower numbers than this, which are older.",
)
OF_ENTITY: Final = Query(
    "entity", {"type": "string", "default": ""}, "Return entries about this entity only."
)
OF_CALLER: Final = Query(
    "caller",
    {"type": "string", "default": ""},
    "Return entries of this caller only, such as `token ci`.",
)

NAMES: Final[dict[str, dict[str, Any]]] = {
    "queue": {"type": "string", "pattern": f"^{ENTITY_NAME.pattern}$"},
    "topic": {"type": "string", "pattern": f"^{ENTITY_NAME.pattern}$"},
    "subscription": {"type": "string", "pattern": f"^{SUBSCRIPTION_NAME.pattern}$"},
    "rule": {"type": "string", "pattern": f"^(?:{FILTER_NAME.pattern})$"},
    "authorization_rule": {"type": "string", "pattern": f"^{RULE_NAME.pattern}$"},
    "entity_id": {"type": "integer", "minimum": 1, "maximum": 2_147_483_647},
}
"""Parameters of paths. A `/` in a name is written `%2F`."""

QUEUES: Final = "/v1/queues"
QUEUE: Final = "/v1/queues/{queue}"
TOPICS: Final = "/v1/topics"
TOPIC: Final = "/v1/topics/{topic}"
SUBSCRIPTIONS: Final = "/v1/topics/{topic}/subscriptions"
SUBSCRIPTION: Final = "/v1/topics/{topic}/subscriptions/{subscription}"
RULES: Final = "/v1/topics/{topic}/subscriptions/{subscription}/rules"
RULE: Final = "/v1/topics/{topic}/subscriptions/{subscription}/rules/{rule}"


def _listed(operation: str, path: str, tag: str, what: str, answer: type[BaseModel]) -> Route:
    refusals = (404,) if "{" in path else ()
    summary = f"List {what}"
    return Route(operation, "GET", path, tag, summary, answer, queries=PAGE, refusals=refusals)


def _get(operation: str, path: str, tag: str, what: str, answer: type[BaseModel]) -> Route:
    return Route(operation, "GET", path, tag, f"Get {what}", answer, refusals=(404,))


def _put(operation: str, path: str, tag: str, what: str, body: type[BaseModel]) -> Route:
    return Route(
        operation,
        "PUT",
        path,
        tag,
        f"Create or replace {what}",
        Applied,
        body,
        queries=(MANAGED_BY,),
        refusals=(403, 404, 409, 412),
        is_change=True,
        is_versioned=True,
        scope=Scope.DEFINITIONS,
    )


def _deleted(operation: str, path: str, tag: str, what: str) -> Route:
    return Route(
        operation,
        "DELETE",
        path,
        tag,
        f"Delete {what}",
        Deleted,
        queries=(POLICY,),
        refusals=(404, 409, 412),
        is_change=True,
        is_versioned=True,
        scope=Scope.DEFINITIONS,
    )


def _counted(operation: str, path: str, tag: str, what: str) -> Route:
    summary, refusals = f"Get the message counts of {what}", (404, 503)
    return Route(
        operation, "GET", f"{path}/runtime", tag, summary, RuntimeInformation, refusals=refusals
    )


ENTITIES: Final = (
    _listed("listQueues", QUEUES, "queues", "queues by name", QueuePage),
    _get("getQueue", QUEUE, "queues", "a queue", QueueDescription),
    _put("putQueue", QUEUE, "queues", "a queue", QueueProperties),
    _deleted("deleteQueue", QUEUE, "queues", "a queue"),
    _counted("countQueue", QUEUE, "queues", "a queue"),
    _listed("listTopics", TOPICS, "topics", "topics by name", TopicPage),
    _get("getTopic", TOPIC, "topics", "a topic", TopicDescription),
    _put("putTopic", TOPIC, "topics", "a topic", TopicProperties),
    _deleted("deleteTopic", TOPIC, "topics", "a topic and its subscriptions"),
    _counted("countTopic", TOPIC, "topics", "a topic"),
    _listed(
        "listSubscriptions",
        SUBSCRIPTIONS,
        "subscriptions",
        "subscriptions by name",
        SubscriptionPage,
    ),
    _listed(
        "listAllSubscriptions",
        "/v1/subscriptions",
        "subscriptions",
        "the subscriptions of all topics by path",
        SubscriptionPage,
    ),
    _get(
        "getSubscription", SUBSCRIPTION, "subscriptions", "a subscription", SubscriptionDescription
    ),
    _put(
        "putSubscription",
        SUBSCRIPTION,
        "subscriptions",
        "a subscription with its rules",
        SubscriptionDefinition,
    ),
    _deleted("deleteSubscription", SUBSCRIPTION, "subscriptions", "a subscription"),
    _counted("countSubscription", SUBSCRIPTION, "subscriptions", "a subscription"),
    _listed("listRules", RULES, "rules", "the rules of a subscription by name", RulePage),
    _get("getRule", RULE, "rules", "a rule", RuleDescription),
    Route(
        "putRule",
        "PUT",
        RULE,
        "rules",
        "Create or replace a rule",
        Applied,
        RuleProperties,
        refusals=(403, 404, 409),
        is_change=True,
        scope=Scope.DEFINITIONS,
    ),
    Route(
        "deleteRule",
        "DELETE",
        RULE,
        "rules",
        "Delete a rule; a subscription without rules receives nothing",
        Applied,
        refusals=(404, 409),
        is_change=True,
        scope=Scope.DEFINITIONS,
    ),
)


def _authorization(at: str, of: str, what: str) -> tuple[Route, ...]:
    """Return the operations of the rules of the namespace, of a queue or of a topic."""
    tag, path = "authorization", f"{at}/authorization-rules"
    one = path + "/{authorization_rule}"
    rule = f"{what} authorization rule"
    return (
        Route(
            f"list{of}AuthorizationRules",
            "GET",
            path,
            tag,
            f"List the {what} authorization rules",
            AuthorizationRulePage,
            queries=(KEYS,),
            refusals=(404,),
        ),
        Route(
            f"get{of}AuthorizationRule",
            "GET",
            one,
            tag,
            f"Get a {rule}",
            AuthorizationRuleDescription,
            queries=(KEYS,),
            refusals=(404,),
        ),
        Route(
            f"put{of}AuthorizationRule",
            "PUT",
            one,
            tag,
            f"Create or replace a {rule}",
            AuthorizationRuleDescription,
            AuthorizationRuleDefinition,
            queries=(MANAGED_BY,),
            refusals=(404, 409),
            is_change=True,
            scope=Scope.ALL,
        ),
        Route(
            f"delete{of}AuthorizationRule",
            "DELETE",
            one,
            tag,
            f"Delete a {rule} and detach the links that it authorized",
            AuthorizationRuleDescription,
            refusals=(404, 409),
            is_change=True,
            scope=Scope.ALL,
        ),
    )


AUTHORIZATION: Final = (
    *_authorization("/v1", "", "namespace"),
    *_authorization(QUEUE, "Queue", "queue"),
    *_authorization(TOPIC, "Topic", "topic"),
)

NAMESPACE: Final = (
    _get("getNamespace", "/v1/namespace", "namespace", "the namespace", NamespaceDescription),
    Route(
        "putNamespace",
        "PUT",
        "/v1/namespace",
        "namespace",
        "Replace the namespace definition; tier, partitions and rules may be omitted",
        Applied,
        NamespaceDefinition,
        refusals=(409, 412),
        is_change=True,
        is_versioned=True,
        scope=Scope.DEFINITIONS,
    ),
    *(
        Route(
            f"{verb}Namespace",
            "POST",
            f"/v1/namespace/{verb}",
            "namespace",
            text,
            NamespaceDescription,
            refusals=(409,),
            is_change=True,
            scope=Scope.DEFINITIONS,
        )
        for verb, text in (
            ("close", "Refuse messages if no entity holds any; otherwise name those that do"),
            ("open", "Accept messages again after the namespace was closed"),
        )
    ),
    Route(
        "getStatus",
        "GET",
        "/v1/status",
        "namespace",
        "Get the status of the broker and its partitions",
        Status,
    ),
    Route(
        "listCounts",
        "GET",
        "/v1/runtime",
        "namespace",
        "List the message counts of all entities whose counts changed since a cursor",
        EntityCountsPage,
        queries=(CURSOR, TOP),
        refusals=(503,),
    ),
    Route(
        "listConnections",
        "GET",
        "/v1/connections",
        "namespace",
        "List the AMQP connections of this broker",
        ConnectionPage,
        queries=PAGE,
    ),
    Route(
        "forgetCallerEpoch",
        "DELETE",
        "/v1/caller-epoch",
        "namespace",
        "Reset the caller epoch, after the lease of the callers was recreated",
        Status,
        refusals=(503,),
        scope=Scope.ALL,
    ),
    Route(
        "getOpenApi",
        "GET",
        "/openapi.json",
        "namespace",
        "Get this document",
        None,
        is_open=True,
    ),
)

HISTORY: Final = (
    Route(
        "listChanges",
        "GET",
        "/v1/changes",
        "changes",
        "List changes since a version, optionally waiting for one",
        EntityChanges,
        queries=(SINCE, BEGUN, WAIT),
        refusals=(410, 503),
    ),
    Route(
        "listTombstones",
        "GET",
        "/v1/tombstones",
        "changes",
        "List the deletions since a version, with caller or reason",
        Tombstones,
        queries=(SINCE,),
        refusals=(410, 503),
    ),
    Route(
        "restoreEntity",
        "POST",
        "/v1/deleted/{entity_id}/restore",
        "changes",
        "Restore a retained entity with its messages",
        Applied,
        refusals=(404, 409),
        is_change=True,
        scope=Scope.DEFINITIONS,
    ),
)

AUDIT: Final = (
    Route(
        "listAudit",
        "GET",
        "/v1/audit",
        "audit",
        "List manual changes with their callers, newest first",
        AuditPage,
        queries=(BEFORE, TOP, OF_ENTITY, OF_CALLER),
        refusals=(503,),
    ),
)

MESSAGES: Final = (
    Route(
        "peekMessages",
        "POST",
        "/v1/messages/peek",
        "messages",
        "Peek at messages of a queue or sub-queue, optionally filtered",
        MessagePage,
        PeekMessages,
        refusals=(404, 409, 503),
        scope=Scope.MESSAGES,
    ),
    Route(
        "summarizeMessages",
        "POST",
        "/v1/messages/summary",
        "messages",
        "Group dead letters by reason and description",
        MessageSummary,
        SummarizeMessages,
        refusals=(404, 409, 503),
        scope=Scope.MESSAGES,
    ),
    Route(
        "deleteMessages",
        "POST",
        "/v1/messages/delete",
        "messages",
        "Delete messages by sequence number",
        DeletedMessages,
        DeleteMessages,
        refusals=(404,),
        is_change=True,
        scope=Scope.MESSAGES,
    ),
    Route(
        "purgeMessages",
        "POST",
        "/v1/messages/purge",
        "messages",
        "Delete messages by filter, or count them in a dry run",
        PurgedMessages,
        PurgeMessages,
        refusals=(404,),
        is_change=True,
        scope=Scope.MESSAGES,
    ),
    Route(
        "resendMessages",
        "POST",
        "/v1/messages/resend",
        "messages",
        "Resend dead letters, as they are or edited",
        ResentMessages,
        ResendMessages,
        refusals=(404,),
        is_change=True,
        scope=Scope.MESSAGES,
    ),
)


def _change_group(
    operation: str, summary: str, answer: type[BaseModel], body: type[BaseModel], *refusals: int
) -> Route:
    verb = operation.removesuffix("ReaderGroup")
    return Route(
        operation, "POST", f"/v1/reader-groups/{verb}", "reader groups", summary, answer, body,
        refusals=(404, *refusals), is_change=True, scope=Scope.DEFINITIONS,
    )  # fmt: skip


READER_GROUPS: Final = (
    Route(
        "listReaderGroups", "GET", "/v1/reader-groups", "reader groups",
        "List reader groups: who reads, and how far", ReaderGroupList,
    ),
    _change_group(
        "createReaderGroup", "Create a reader group, which keeps messages until it has read them",
        ReaderGroupDescription, CreateReaderGroup, 409,
    ),
    _change_group(
        "resetReaderGroup", "Let a reader group go on elsewhere, and refuse its reader",
        ReaderGroupDescription, MoveReaderGroup, 409,
    ),
    _change_group(
        "deleteReaderGroup", "Delete a reader group, and the messages that only it kept",
        DroppedReaderGroup, OfReaderGroup,
    ),
)  # fmt: skip

DEVELOPMENT: Final = (
    _get("getClock", "/v1/clock", "development", "the time of messages", Clock),
    Route(
        "advanceClock",
        "POST",
        "/v1/clock/advance",
        "development",
        "Advance the time of messages; responds once everything due by then has happened",
        Clock,
        Advance,
        refusals=(404, 409, 503),
        scope=Scope.ALL,
    ),
    Route(
        "loseLocks",
        "POST",
        "/v1/faults/lose-locks",
        "development",
        "Expire all locks of an entity",
        LocksLost,
        LoseLocksOf,
        refusals=(404,),
        scope=Scope.ALL,
    ),
    Route(
        "interruptStore",
        "POST",
        "/v1/faults/store-outage",
        "development",
        "Simulate an outage of the store",
        StoreInterrupted,
        StoreOutage,
        refusals=(404,),
        scope=Scope.ALL,
    ),
)

ROUTES: Final = (
    *NAMESPACE,
    *ENTITIES,
    *AUTHORIZATION,
    *HISTORY,
    *AUDIT,
    *MESSAGES,
    *READER_GROUPS,
    *DEVELOPMENT,
)
"""All operations of the control API."""
