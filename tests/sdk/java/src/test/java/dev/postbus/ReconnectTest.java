package dev.postbus;

import static dev.postbus.Bus.LONG;
import static dev.postbus.Bus.SOON;
import static dev.postbus.Bus.bodies;
import static dev.postbus.Bus.builder;
import static dev.postbus.Bus.one;
import static dev.postbus.Bus.retries;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import com.azure.messaging.servicebus.ServiceBusClientBuilder;
import com.azure.messaging.servicebus.ServiceBusException;
import com.azure.messaging.servicebus.ServiceBusFailureReason;
import com.azure.messaging.servicebus.ServiceBusMessage;
import com.azure.messaging.servicebus.ServiceBusProcessorClient;
import com.azure.messaging.servicebus.ServiceBusReceivedMessage;
import com.azure.messaging.servicebus.ServiceBusReceiverClient;
import com.azure.messaging.servicebus.ServiceBusSenderClient;
import com.azure.messaging.servicebus.ServiceBusSessionReceiverClient;
import java.util.List;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentSkipListSet;
import org.junit.jupiter.api.Test;

/** The broker ends, or is killed, under clients that stay. */
class ReconnectTest {
    private static ServiceBusClientBuilder patient() {
        return builder().retryOptions(retries(20, LONG));
    }

    @Test
    void clientsGoOnAfterTheBrokerWasStoppedOrKilled() throws InterruptedException {
        Set<String> seen = new ConcurrentSkipListSet<>();
        try (ServiceBusSenderClient sender =
                    patient().sender().queueName("plain-8").buildClient();
                ServiceBusProcessorClient processor =
                    patient()
                        .processor()
                        .queueName("plain-8")
                        .processMessage(
                            context -> seen.add(context.getMessage().getBody().toString()))
                        .processError(context -> {})
                        .buildProcessorClient()) {
            processor.start();
            for (String how : List.of("stop", "kill")) {
                sender.sendMessage(new ServiceBusMessage("before " + how));
                Bus.keeper("restart?how=" + how);
                sender.sendMessage(new ServiceBusMessage("after " + how));
            }
            long deadline = System.nanoTime() + 2 * LONG.toNanos();
            while (seen.size() < 4 && System.nanoTime() < deadline) {
                Thread.sleep(50);
            }
        }
        assertEquals(
            new TreeSet<>(List.of("after kill", "after stop", "before kill", "before stop")), seen);
    }

    @Test
    void whatWasLockedWhenTheBrokerDiedIsDeliveredAgain() {
        try (ServiceBusSenderClient sender =
                    patient().sender().queueName("plain-9").buildClient();
                ServiceBusReceiverClient receiver =
                    patient().receiver().queueName("plain-9").disableAutoComplete().buildClient();
                ServiceBusSenderClient ofSession =
                    patient().sender().queueName("sessions-6").buildClient();
                ServiceBusSessionReceiverClient sessions =
                    patient().sessionReceiver().queueName("sessions-6").buildClient()) {
            sender.sendMessage(new ServiceBusMessage("once"));
            ofSession.sendMessage(new ServiceBusMessage("kept").setSessionId("s"));
            ServiceBusReceivedMessage locked = one(receiver);
            Bus.keeper("restart?how=kill");
            ServiceBusException lost =
                assertThrows(ServiceBusException.class, () -> receiver.complete(locked));
            assertEquals(ServiceBusFailureReason.MESSAGE_LOCK_LOST, lost.getReason());
            receiver.complete(one(receiver));
            assertEquals(List.of(), bodies(receiver.receiveMessages(1, SOON)));
            try (ServiceBusReceiverClient session = sessions.acceptSession("s")) {
                assertEquals("kept", one(session).getBody().toString());
            }
        }
    }
}
