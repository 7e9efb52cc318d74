package dev.postbus;

import static dev.postbus.Bus.LONG;
import static dev.postbus.Bus.builder;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.azure.messaging.servicebus.ServiceBusMessage;
import com.azure.messaging.servicebus.ServiceBusMessageBatch;
import com.azure.messaging.servicebus.ServiceBusReceivedMessage;
import com.azure.messaging.servicebus.ServiceBusReceiverAsyncClient;
import com.azure.messaging.servicebus.ServiceBusRuleManagerAsyncClient;
import com.azure.messaging.servicebus.ServiceBusSenderAsyncClient;
import com.azure.messaging.servicebus.ServiceBusSessionReceiverAsyncClient;
import com.azure.messaging.servicebus.ServiceBusTransactionContext;
import com.azure.messaging.servicebus.administration.models.CreateRuleOptions;
import com.azure.messaging.servicebus.administration.models.SqlRuleFilter;
import com.azure.messaging.servicebus.models.AbandonOptions;
import com.azure.messaging.servicebus.models.CompleteOptions;
import com.azure.messaging.servicebus.models.CreateMessageBatchOptions;
import com.azure.messaging.servicebus.models.DeadLetterOptions;
import com.azure.messaging.servicebus.models.DeferOptions;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.time.OffsetDateTime;
import java.util.List;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;
import reactor.core.Disposable;
import reactor.core.publisher.Flux;

/** The clients that answer with a Mono or a Flux. */
class AsyncTest {
    private static ServiceBusSenderAsyncClient sender(String queue) {
        return builder().sender().queueName(queue).buildAsyncClient();
    }

    private static ServiceBusReceiverAsyncClient receiver(String queue) {
        return builder().receiver().queueName(queue).disableAutoComplete().buildAsyncClient();
    }

    private static ServiceBusMessage message(String body) {
        return new ServiceBusMessage(body);
    }

    /** Receives until it is closed: messages are settled while their receiver is subscribed. */
    private static final class Inbox implements AutoCloseable {
        private final BlockingQueue<ServiceBusReceivedMessage> came = new LinkedBlockingQueue<>();
        private final Disposable subscription;

        Inbox(ServiceBusReceiverAsyncClient from) {
            subscription = from.receiveMessages().subscribe(came::add, error -> {});
        }

        ServiceBusReceivedMessage next() throws InterruptedException {
            ServiceBusReceivedMessage message = came.poll(LONG.toSeconds(), TimeUnit.SECONDS);
            assertNotNull(message, "no message came");
            return message;
        }

        @Override
        public void close() {
            subscription.dispose();
        }
    }

    private static List<String> bodies(Flux<ServiceBusReceivedMessage> messages) {
        return messages.map(each -> each.getBody().toString()).collectList().block(LONG);
    }

    @Test
    void messagesAreSentInEveryWay() {
        OffsetDateTime later = OffsetDateTime.now().plusDays(30);
        try (ServiceBusSenderAsyncClient sender = sender("plain-21");
                ServiceBusReceiverAsyncClient receiver = receiver("plain-21")) {
            assertEquals("plain-21", sender.getEntityPath());
            assertEquals(Bus.HOST, sender.getFullyQualifiedNamespace());
            assertFalse(sender.getIdentifier().equals(receiver.getIdentifier()));
            assertEquals("plain-21", receiver.getEntityPath());
            assertEquals(Bus.HOST, receiver.getFullyQualifiedNamespace());
            sender.sendMessage(message("1")).block(LONG);
            sender.sendMessages(List.of(message("2"), message("3"))).block(LONG);
            ServiceBusMessageBatch batch = sender.createMessageBatch().block(LONG);
            batch.tryAddMessage(message("4"));
            sender.sendMessages(batch).block(LONG);

            ServiceBusTransactionContext undone = sender.createTransaction().block(LONG);
            sender.sendMessage(message("never"), undone).block(LONG);
            sender.rollbackTransaction(undone).block(LONG);
            ServiceBusTransactionContext done = sender.createTransaction().block(LONG);
            sender.sendMessage(message("5"), done).block(LONG);
            sender.sendMessages(List.of(message("6")), done).block(LONG);
            CreateMessageBatchOptions small =
                new CreateMessageBatchOptions().setMaximumSizeInBytes(2_000);
            batch = sender.createMessageBatch(small).block(LONG);
            batch.tryAddMessage(message("7"));
            sender.sendMessages(batch, done).block(LONG);
            ServiceBusTransactionContext late = sender.createTransaction().block(LONG);
            sender.scheduleMessage(message("x"), later, late).block(LONG);
            sender.scheduleMessages(List.of(message("x")), later, late).blockLast();
            sender.rollbackTransaction(late).block(LONG);
            sender.commitTransaction(done).block(LONG);

            long one = sender.scheduleMessage(message("cancelled"), later).block(LONG);
            List<Long> more =
                sender.scheduleMessages(List.of(message("too")), later).collectList().block(LONG);
            sender.cancelScheduledMessage(one).block(LONG);
            sender.cancelScheduledMessages(more).block(LONG);
            assertEquals(
                List.of("1", "2", "3", "4", "5", "6", "7"),
                bodies(receiver.peekMessages(20)));
        }
    }

    @Test
    void messagesAreSettledInEveryWay() throws InterruptedException {
        try (ServiceBusSenderAsyncClient sender = sender("plain-22");
                ServiceBusReceiverAsyncClient receiver = receiver("plain-22")) {
            sender.sendMessages(List.of(message("a"), message("b"), message("c"), message("d")))
                .block(LONG);
            assertEquals("a", receiver.peekMessage().block(LONG).getBody().toString());
            assertEquals("a", receiver.peekMessage(1).block(LONG).getBody().toString());
            assertEquals(List.of("a", "b"), bodies(receiver.peekMessages(2, 1)));
            settle(receiver);
            assertEquals(List.of(), bodies(receiver.peekMessages(5, 1)));
        }
    }

    private static void settle(ServiceBusReceiverAsyncClient receiver) throws InterruptedException {
        try (Inbox inbox = new Inbox(receiver)) {
            ServiceBusReceivedMessage got = inbox.next();
            OffsetDateTime until = receiver.renewMessageLock(got).block(LONG);
            assertFalse(until.isBefore(got.getLockedUntil()));
            receiver.renewMessageLock(got, Duration.ofSeconds(1)).block(LONG);
            receiver.deadLetter(got).block(LONG);
            receiver.deadLetter(inbox.next(), new DeadLetterOptions()).block(LONG);
            receiver.abandon(inbox.next()).block(LONG);
            receiver.abandon(inbox.next(), new AbandonOptions()).block(LONG);
            ServiceBusReceivedMessage again = inbox.next();
            receiver.defer(again).block(LONG);
            ServiceBusReceivedMessage too = inbox.next();
            receiver.defer(too, new DeferOptions()).block(LONG);
            ServiceBusReceivedMessage first =
                receiver.receiveDeferredMessage(again.getSequenceNumber()).block(LONG);
            receiver.complete(first).block(LONG);
            ServiceBusReceivedMessage last =
                receiver.receiveDeferredMessages(List.of(too.getSequenceNumber())).blockLast(LONG);
            ServiceBusTransactionContext undone = receiver.createTransaction().block(LONG);
            receiver.rollbackTransaction(undone).block(LONG);
            ServiceBusTransactionContext done = receiver.createTransaction().block(LONG);
            receiver.complete(last, new CompleteOptions().setTransactionContext(done)).block(LONG);
            receiver.commitTransaction(done).block(LONG);
        }
    }

    @Test
    void sessions() throws InterruptedException {
        byte[] state = "state".getBytes(StandardCharsets.UTF_8);
        try (ServiceBusSenderAsyncClient sender = sender("sessions-8");
                ServiceBusSessionReceiverAsyncClient sessions =
                    builder()
                        .sessionReceiver()
                        .queueName("sessions-8")
                        .disableAutoComplete()
                        .buildAsyncClient()) {
            sender.sendMessage(message("a").setSessionId("s")).block(LONG);
            try (ServiceBusReceiverAsyncClient session = sessions.acceptSession("s").block(LONG)) {
                assertEquals("s", session.getSessionId());
                session.setSessionState(state).block(LONG);
                assertArrayEquals(state, session.getSessionState().block(LONG));
                OffsetDateTime until = session.renewSessionLock().block(LONG);
                assertTrue(until.isAfter(OffsetDateTime.now()));
                session.renewSessionLock(Duration.ofSeconds(1)).block(LONG);
                try (Inbox inbox = new Inbox(session)) {
                    session.complete(inbox.next()).block(LONG);
                }
            }
            sender.sendMessage(message("b").setSessionId("t")).block(LONG);
            try (ServiceBusReceiverAsyncClient session = sessions.acceptNextSession().block(LONG)) {
                assertEquals("t", session.getSessionId());
            }
        }
    }

    @Test
    void rules() {
        try (ServiceBusRuleManagerAsyncClient rules =
                builder()
                    .ruleManager()
                    .topicName("topic-4")
                    .subscriptionName("all")
                    .buildAsyncClient()) {
            assertEquals("topic-4/subscriptions/all", rules.getEntityPath());
            assertEquals(Bus.HOST, rules.getFullyQualifiedNamespace());
            rules.createRule("big", new CreateRuleOptions(new SqlRuleFilter("a > 1"))).block(LONG);
            rules.deleteRule("$Default").block(LONG);
            assertEquals("big", rules.listRules().blockLast(LONG).getName());
        }
    }
}
