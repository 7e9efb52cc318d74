import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { assertEmpty, bodies, collect, connect, receive, receiveOne } from "../lib/bus.js";

let client;
before(() => (client = connect()));
after(() => client.close());

test("every subscription gets a copy", async () => {
  const sender = client.createSender("topic-1");
  await sender.sendMessages([1, 2].map((at) => ({ body: at, sessionId: "s" })));
  const receiver = client.createReceiver("topic-1", "all");
  assert.equal(receiver.entityPath, "topic-1/Subscriptions/all");
  const got = await receive(receiver, 2);
  assert.deepEqual(bodies(got), [1, 2]);
  await receiver.deadLetterMessage(got[0]);
  await receiver.completeMessage(got[1]);
  const dead = client.createReceiver("topic-1", "all", { subQueueType: "deadLetter" });
  assert.equal((await receiveOne(dead)).body, 1);
  const session = await client.acceptSession("topic-1", "sessions", "s");
  assert.deepEqual(bodies(await receive(session, 2)), [1, 2]);
  await session.close();
  const next = await client.acceptNextSession("topic-1", "sessions");
  assert.equal(next.sessionId, "s");
  await next.close();
});

test("rules are made, listed, removed, and choose", async () => {
  const rules = client.createRuleManager("topic-2", "all");
  const [standard] = await collect(rules.listRules());
  assert.equal(standard.name, "$Default");
  assert.equal(standard.filter.sqlExpression, "1=1");
  await rules.deleteRule("$Default");
  await rules.createRule("big", { sqlExpression: "amount > 10" }, { sqlExpression: "SET size = 'L'" });
  await rules.createRule("eu", {
    subject: "order",
    correlationId: "c",
    applicationProperties: { region: "eu", number: 3 },
  });
  const listed = Object.fromEntries((await collect(rules.listRules())).map((each) => [each.name, each]));
  assert.deepEqual(Object.keys(listed).toSorted(), ["big", "eu"]);
  assert.equal(listed.big.filter.sqlExpression, "amount > 10");
  assert.equal(listed.big.action.sqlExpression, "SET size = 'L'");
  assert.equal(listed.eu.filter.subject, "order");
  assert.deepEqual(listed.eu.filter.applicationProperties, { region: "eu", number: 3 });
  await assert.rejects(rules.createRule("big", { sqlExpression: "1=1" }), {
    code: "MessagingEntityAlreadyExists",
  });
  await assert.rejects(rules.createRule("bad", { sqlExpression: "amount >" }));
  await assert.rejects(rules.deleteRule("none"), /none/);

  const sender = client.createSender("topic-2");
  await sender.sendMessages([
    { body: "big", applicationProperties: { amount: 11 } },
    { body: "small", applicationProperties: { amount: 9 } },
    {
      body: "eu",
      subject: "order",
      correlationId: "c",
      applicationProperties: { region: "eu", number: 3 },
    },
  ]);
  const receiver = client.createReceiver("topic-2", "all", { receiveMode: "receiveAndDelete" });
  const got = await receive(receiver, 2);
  assert.deepEqual(bodies(got), ["big", "eu"]);
  assert.equal(got[0].applicationProperties.size, "L");
  await assertEmpty(receiver);
  await rules.deleteRule("big");
  await rules.deleteRule("eu");
  const pages = await collect(rules.listRules().byPage());
  assert.deepEqual(pages, []); // without pages the SDK gives one `undefined` for no rules
});

test("schedules of a topic", async () => {
  const sender = client.createSender("topic-3");
  const [number] = await sender.scheduleMessages({ body: "later" }, new Date(Date.now() + 9e7));
  await sender.cancelScheduledMessages(number);
});
