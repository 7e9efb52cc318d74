package dev.postbus;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.azure.messaging.servicebus.ServiceBusClientBuilder;
import com.azure.messaging.servicebus.ServiceBusMessage;
import com.azure.messaging.servicebus.ServiceBusReceivedMessage;
import com.azure.messaging.servicebus.ServiceBusReceiverClient;
import com.azure.messaging.servicebus.ServiceBusSenderClient;
import com.azure.messaging.servicebus.ServiceBusSessionReceiverClient;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.time.OffsetDateTime;
import java.util.ArrayList;
import java.util.List;
import org.junit.jupiter.api.Test;

/** Sessions as the official SDK accepts them. */
class SessionTest {
    private static final Duration LONG = Duration.ofSeconds(20);
    private static final String QUEUE = "sessions-5";

    @Test
    void aSessionKeepsOrderAndState() {
        ServiceBusClientBuilder builder =
            new ServiceBusClientBuilder()
                .connectionString(System.getenv("POSTBUS_TLS"));
        try (ServiceBusSenderClient sender = builder.sender().queueName(QUEUE).buildClient();
                ServiceBusSessionReceiverClient sessions =
                    builder
                        .sessionReceiver()
                        .queueName(QUEUE)
                        .disableAutoComplete()
                        .buildClient()) {
            for (String body : List.of("a", "b", "c")) {
                sender.sendMessage(new ServiceBusMessage(body).setSessionId("java"));
            }
            byte[] state = "state".getBytes(StandardCharsets.UTF_8);
            List<String> bodies = new ArrayList<>();
            try (ServiceBusReceiverClient receiver = sessions.acceptSession("java")) {
                while (bodies.size() < 3) {
                    for (ServiceBusReceivedMessage each :
                            receiver.receiveMessages(3 - bodies.size(), LONG)) {
                        bodies.add(each.getBody().toString());
                        receiver.complete(each);
                    }
                }
                assertTrue(receiver.renewSessionLock().isAfter(OffsetDateTime.now()));
                receiver.setSessionState(state);
                assertArrayEquals(state, receiver.getSessionState());
            }
            assertEquals(List.of("a", "b", "c"), bodies);
            sender.sendMessage(new ServiceBusMessage("next").setSessionId("another"));
            try (ServiceBusReceiverClient receiver = sessions.acceptNextSession()) {
                assertEquals("another", receiver.getSessionId());
                ServiceBusReceivedMessage next =
                    receiver.receiveMessages(1, LONG).stream().findFirst().orElseThrow();
                receiver.complete(next);
            }
        }
    }
}
