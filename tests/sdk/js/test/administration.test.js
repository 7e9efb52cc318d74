import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { AzureNamedKeyCredential } from "@azure/core-auth";
import { ServiceBusAdministrationClient } from "@azure/service-bus";
import { administer, collect, connect, host, keyed } from "../lib/bus.js";

// Endings of names keep runs over several transports apart.
const end = process.env.POSTBUS_TRANSPORT;
let admin;
let client;
before(() => {
  admin = administer();
  client = connect();
});
after(() => client.close());

const names = (entities) => entities.map((each) => each.name ?? each.subscriptionName);

test("the namespace", async () => {
  const said = await admin.getNamespaceProperties();
  assert.equal(said.messagingSku, "Standard");
  assert.ok(said.createdAt instanceof Date);
  assert.equal(said.name, "sdk-suite");
});

test("a queue from its creation to its end", async () => {
  const name = `admin/queue-${end}`;
  const wanted = {
    lockDuration: "PT45S",
    maxSizeInMegabytes: 2048,
    requiresDuplicateDetection: true,
    requiresSession: true,
    defaultMessageTimeToLive: "P7D",
    deadLetteringOnMessageExpiration: true,
    duplicateDetectionHistoryTimeWindow: "PT5M",
    maxDeliveryCount: 3,
    enableBatchedOperations: false,
    status: "Active",
    userMetadata: "mine & yours",
    autoDeleteOnIdle: "PT1H",
    forwardDeadLetteredMessagesTo: "plain-39",
  };
  assert.equal(await admin.queueExists(name), false);
  const created = await admin.createQueue(name, wanted);
  assert.equal(created._response.status, 201);
  const got = await admin.getQueue(name);
  for (const [field, value] of Object.entries(wanted)) {
    if (field === "forwardDeadLetteredMessagesTo") assert.match(got[field], /\/plain-39$/);
    else assert.deepEqual(got[field], value, field);
  }
  assert.equal(got.name, name);
  assert.equal(got.availabilityStatus, "Available");
  assert.equal(await admin.queueExists(name), true);
  await assert.rejects(admin.createQueue(name), { code: "MessageEntityAlreadyExistsError" });

  const updated = await admin.updateQueue({ ...got, maxDeliveryCount: 9, lockDuration: "PT1M" });
  assert.equal(updated.maxDeliveryCount, 9);
  assert.equal((await admin.getQueue(name)).lockDuration, "PT1M");
  await assert.rejects(admin.updateQueue({ ...got, requiresSession: false }));
  await assert.rejects(admin.createQueue(`bad-${end}`, { lockDuration: "PT1H" }));

  await admin.deleteQueue(name);
  assert.equal(await admin.queueExists(name), false);
  await assert.rejects(admin.getQueue(name), { code: "MessageEntityNotFoundError" });
  await assert.rejects(admin.deleteQueue(name), { code: "MessageEntityNotFoundError" });
});

test("counts of a queue", async () => {
  const name = `counted-${end}`;
  await admin.createQueue(name);
  const sender = client.createSender(name);
  await sender.sendMessages([1, 2, 3].map((body) => ({ body })));
  await sender.scheduleMessages({ body: 4 }, new Date(Date.now() + 9e8));
  const receiver = client.createReceiver(name);
  const [first] = await receiver.receiveMessages(1);
  await receiver.deadLetterMessage(first);
  await receiver.close();
  const counts = await admin.getQueueRuntimeProperties(name);
  assert.equal(counts.activeMessageCount, 2);
  assert.equal(counts.deadLetterMessageCount, 1);
  assert.equal(counts.scheduledMessageCount, 1);
  assert.equal(counts.transferMessageCount, 0);
  assert.equal(counts.totalMessageCount, 4);
  assert.ok(counts.sizeInBytes > 0);
  assert.ok(counts.createdAt <= counts.modifiedAt);
  const listed = await collect(admin.listQueuesRuntimeProperties());
  assert.equal(listed.find((each) => each.name === name).deadLetterMessageCount, 1);
  await admin.deleteQueue(name);
});

test("queues in pages", async () => {
  const all = await collect(admin.listQueues());
  assert.ok(all.length > 50);
  assert.ok(names(all).includes("plain-1"));
  const pages = await collect(admin.listQueues().byPage({ maxPageSize: 10 }));
  assert.equal(pages[0].length, 10);
  assert.deepEqual(names(pages.flat()), names(all));
});

test("topics and subscriptions", async () => {
  const topic = `events-${end}`;
  const wanted = {
    defaultMessageTimeToLive: "P1D",
    maxSizeInMegabytes: 1024,
    requiresDuplicateDetection: true,
    duplicateDetectionHistoryTimeWindow: "PT1M",
    enableBatchedOperations: true,
    userMetadata: "of the topic",
    autoDeleteOnIdle: "P2D",
    supportOrdering: true,
  };
  assert.equal(await admin.topicExists(topic), false);
  const made = await admin.createTopic(topic, wanted);
  for (const [field, value] of Object.entries(wanted)) assert.deepEqual(made[field], value, field);
  const got = await admin.getTopic(topic);
  assert.equal((await admin.updateTopic({ ...got, userMetadata: "new" })).userMetadata, "new");
  assert.equal(await admin.topicExists(topic), true);
  assert.ok(names(await collect(admin.listTopics())).includes(topic));

  assert.equal(await admin.subscriptionExists(topic, "all"), false);
  const subscription = await admin.createSubscription(topic, "all", {
    lockDuration: "PT30S",
    maxDeliveryCount: 5,
    deadLetteringOnMessageExpiration: true,
    deadLetteringOnFilterEvaluationExceptions: false,
    userMetadata: "of the subscription",
    forwardTo: "plain-38",
    defaultRuleOptions: { name: "only", filter: { sqlExpression: "amount > 1" } },
  });
  assert.equal(subscription.subscriptionName, "all");
  assert.equal(subscription.topicName, topic);
  const read = await admin.getSubscription(topic, "all");
  assert.equal(read.maxDeliveryCount, 5);
  assert.equal(read.deadLetteringOnFilterEvaluationExceptions, false);
  assert.match(read.forwardTo, /\/plain-38$/);
  const changed = await admin.updateSubscription({ ...read, maxDeliveryCount: 6 });
  assert.equal(changed.maxDeliveryCount, 6);
  assert.equal(await admin.subscriptionExists(topic, "all"), true);
  await admin.createSubscription(topic, "more");
  assert.deepEqual(names(await collect(admin.listSubscriptions(topic))), ["all", "more"]);

  await client.createSender(topic).sendMessages({ body: "x", applicationProperties: { amount: 1 } });
  const counts = await admin.getSubscriptionRuntimeProperties(topic, "more");
  assert.equal(counts.activeMessageCount, 1);
  assert.equal(counts.totalMessageCount, 1);
  const listed = await collect(admin.listSubscriptionsRuntimeProperties(topic));
  assert.deepEqual(listed.map((each) => each.activeMessageCount), [0, 1]);
  assert.equal((await admin.getTopicRuntimeProperties(topic)).subscriptionCount, 2);
  const topics = await collect(admin.listTopicsRuntimeProperties());
  assert.equal(topics.find((each) => each.name === topic).subscriptionCount, 2);

  await admin.deleteSubscription(topic, "more");
  await assert.rejects(admin.getSubscription(topic, "more"), { code: "MessageEntityNotFoundError" });
  await admin.deleteTopic(topic);
  assert.equal(await admin.topicExists(topic), false);
});

test("rules", async () => {
  const at = ["topic-4", "all"];
  const [standard] = await collect(admin.listRules(...at));
  assert.equal(standard.name, "$Default");
  const big = await admin.createRule(
    ...at,
    `big-${end}`,
    { sqlExpression: "amount > @least", sqlParameters: { "@least": 10 } },
    { sqlExpression: "SET size = 'L'" },
  );
  assert.equal(big.filter.sqlExpression, "amount > @least");
  assert.deepEqual(big.filter.sqlParameters, { "@least": 10 });
  assert.equal(big.action.sqlExpression, "SET size = 'L'");
  const correlation = {
    correlationId: "c",
    messageId: "m",
    to: "t",
    replyTo: "r",
    subject: "s",
    sessionId: "g",
    replyToSessionId: "h",
    contentType: "x",
    applicationProperties: { text: "a", number: 2, flag: true, due: new Date(1_767_225_600_123) },
  };
  const name = `exact-${end}`;
  await admin.createRule(...at, name, correlation);
  const exact = await admin.getRule(...at, name);
  for (const [field, value] of Object.entries(correlation)) {
    assert.deepEqual(exact.filter[field], value, field);
  }
  const other = { ...exact, filter: { subject: "other" } };
  assert.equal((await admin.updateRule(...at, other)).filter.subject, "other");
  assert.equal(await admin.ruleExists(...at, name), true);
  await assert.rejects(admin.createRule(...at, name, { sqlExpression: "1=1" }), {
    code: "MessageEntityAlreadyExistsError",
  });
  await assert.rejects(admin.createRule(...at, "bad", { sqlExpression: "amount >" }));
  await admin.deleteRule(...at, name);
  await admin.deleteRule(...at, `big-${end}`);
  assert.equal(await admin.ruleExists(...at, name), false);
  assert.deepEqual(names(await collect(admin.listRules(...at))), ["$Default"]);
});

test("keys and rights of administration", async () => {
  for (const [rule, key] of [
    ["RootManageSharedAccessKey", "wrong"],
    ["sender", "s3nd=s3nd=s3nd=s3nd="],
  ]) {
    await assert.rejects(administer(keyed(rule, key)).getQueue("plain-1"), {
      code: "UnauthorizedRequestError",
    });
  }
  const credential = new AzureNamedKeyCredential("RootManageSharedAccessKey", "SAS_KEY_VALUE");
  const own = new ServiceBusAdministrationClient(host, credential);
  assert.equal((await own.getQueue("plain-1")).name, "plain-1");
});
