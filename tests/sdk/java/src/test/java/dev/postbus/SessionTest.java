package dev.postbus;

import static dev.postbus.Bus.LONG;
import static dev.postbus.Bus.SOON;
import static dev.postbus.Bus.advance;
import static dev.postbus.Bus.bodies;
import static dev.postbus.Bus.builder;
import static dev.postbus.Bus.one;
import static dev.postbus.Bus.receive;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.azure.core.amqp.exception.AmqpErrorCondition;
import com.azure.core.amqp.exception.AmqpException;
import com.azure.messaging.servicebus.ServiceBusException;
import com.azure.messaging.servicebus.ServiceBusFailureReason;
import com.azure.messaging.servicebus.ServiceBusMessage;
import com.azure.messaging.servicebus.ServiceBusProcessorClient;
import com.azure.messaging.servicebus.ServiceBusReceivedMessage;
import com.azure.messaging.servicebus.ServiceBusReceiverClient;
import com.azure.messaging.servicebus.ServiceBusSenderClient;
import com.azure.messaging.servicebus.ServiceBusSessionReceiverClient;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.time.OffsetDateTime;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.function.Executable;

/** Sessions as the official SDK accepts them. */
class SessionTest {
    private static ServiceBusSessionReceiverClient sessions(String queue) {
        return builder().sessionReceiver().queueName(queue).disableAutoComplete().buildClient();
    }

    private static void fill(String queue, String session, String... bodies) {
        try (ServiceBusSenderClient sender = Bus.sender(queue)) {
            for (String body : bodies) {
                sender.sendMessage(new ServiceBusMessage(body).setSessionId(session));
            }
        }
    }

    @Test
    void aSessionKeepsOrderAndState() {
        byte[] state = "state".getBytes(StandardCharsets.UTF_8);
        fill("sessions-1", "java", "a", "b", "c");
        try (ServiceBusSessionReceiverClient sessions = sessions("sessions-1")) {
            try (ServiceBusReceiverClient receiver = sessions.acceptSession("java")) {
                assertEquals(List.of("a", "b", "c"), bodies(receiver.peekMessages(5)));
                List<ServiceBusReceivedMessage> got = receive(receiver, 3);
                assertEquals(List.of("a", "b", "c"), bodies(got));
                for (ServiceBusReceivedMessage each : got) {
                    assertEquals("java", each.getSessionId());
                    receiver.complete(each);
                }
                receiver.setSessionState(state);
                assertArrayEquals(state, receiver.getSessionState());
            }
            fill("sessions-1", "another", "next");
            try (ServiceBusReceiverClient receiver = sessions.acceptNextSession()) {
                assertEquals("another", receiver.getSessionId());
                receiver.complete(one(receiver));
            }
            try (ServiceBusReceiverClient receiver = sessions.acceptSession("java")) {
                assertArrayEquals(state, receiver.getSessionState());
                receiver.setSessionState(null);
                assertEquals(0, lengthOf(receiver.getSessionState()));
            }
        }
    }

    private static int lengthOf(byte[] state) {
        return state == null ? 0 : state.length;
    }

    @Test
    void aSessionIsLockedRenewedAndLost() {
        fill("sessions-2", "held", "work");
        try (ServiceBusSessionReceiverClient sessions = sessions("sessions-2");
                ServiceBusSessionReceiverClient others = sessions("sessions-2");
                ServiceBusReceiverClient receiver = sessions.acceptSession("held")) {
            AmqpException taken =
                assertThrows(AmqpException.class, () -> others.acceptSession("held"));
            assertEquals(
                AmqpErrorCondition.SESSION_CANNOT_BE_LOCKED, taken.getErrorCondition());
            ServiceBusReceivedMessage work = one(receiver);
            OffsetDateTime first = receiver.renewSessionLock();
            advance("PT30S");
            assertTrue(receiver.renewSessionLock().isAfter(first.plusSeconds(29)));
            receiver.renewSessionLock(Duration.ofMillis(100), error -> {});
            advance("PT2M");
            // Its answer comes behind the end of the link: to a link that ends while it settles
            // the SDK says only that it ended.
            assertLost(() -> receiver.renewSessionLock());
            assertLost(() -> receiver.complete(work));
            try (ServiceBusReceiverClient next = others.acceptSession("held")) {
                next.complete(one(next));
            }
        }
    }

    private static void assertLost(Executable work) {
        ServiceBusException lost = assertThrows(ServiceBusException.class, work);
        assertEquals(ServiceBusFailureReason.SESSION_LOCK_LOST, lost.getReason());
    }

    @Test
    void aSubscriptionHasSessions() {
        try (ServiceBusSenderClient sender =
                    builder().sender().topicName("topic-2").buildClient();
                ServiceBusSessionReceiverClient sessions =
                    builder()
                        .sessionReceiver()
                        .topicName("topic-2")
                        .subscriptionName("sessions")
                        .disableAutoComplete()
                        .buildClient()) {
            sender.sendMessage(new ServiceBusMessage("news").setSessionId("s"));
            try (ServiceBusReceiverClient receiver = sessions.acceptSession("s")) {
                ServiceBusReceivedMessage got = one(receiver);
                assertEquals("news", got.getBody().toString());
                receiver.complete(got);
                assertEquals(List.of(), bodies(receiver.receiveMessages(1, SOON)));
            }
        }
    }

    @Test
    void aProcessorTakesSessionsInTurnAndKeepsTheirOrder() throws InterruptedException {
        Map<String, List<String>> seen = new ConcurrentHashMap<>();
        CountDownLatch all = new CountDownLatch(12);
        for (String session : List.of("a", "b", "c", "d")) {
            fill("sessions-3", session, "1", "2", "3");
        }
        try (ServiceBusProcessorClient processor =
                builder()
                    .sessionProcessor()
                    .queueName("sessions-3")
                    .maxConcurrentSessions(2)
                    .sessionIdleTimeout(Duration.ofMillis(500))
                    .processMessage(
                        context -> {
                            ServiceBusReceivedMessage message = context.getMessage();
                            seen.computeIfAbsent(
                                    message.getSessionId(), id -> new CopyOnWriteArrayList<>())
                                .add(message.getBody().toString());
                            all.countDown();
                        })
                    .processError(context -> {})
                    .buildProcessorClient()) {
            processor.start();
            assertTrue(all.await(LONG.toSeconds(), TimeUnit.SECONDS), seen.toString());
        }
        assertEquals(4, seen.size());
        seen.values().forEach(each -> assertEquals(List.of("1", "2", "3"), each));
    }

    @Test
    void anEmptyQueueHasNoNextSession() {
        try (ServiceBusSessionReceiverClient sessions =
                builder()
                    .retryOptions(Bus.retries(0, Duration.ofSeconds(3)))
                    .sessionReceiver()
                    .queueName("sessions-4")
                    .buildClient()) {
            assertThrows(RuntimeException.class, () -> assertNull(sessions.acceptNextSession()));
        }
    }
}
