package dev.postbus;

import static org.junit.jupiter.api.Assertions.assertEquals;

import com.azure.messaging.servicebus.ServiceBusMessage;
import com.azure.messaging.servicebus.ServiceBusSenderAsyncClient;
import com.azure.messaging.servicebus.ServiceBusSenderClient;
import org.junit.jupiter.api.Test;

/** Calls are noted; needs no bus. */
class CoverageTest {
    private static final String OFFLINE =
        "Endpoint=sb://offline.invalid;SharedAccessKeyName=x;SharedAccessKey=y";

    @Test
    void whatTestsCallIsNoted() {
        try (ServiceBusSenderClient sender =
                Bus.builder(OFFLINE).sender().queueName("q").buildClient()) {
            int before = Coverage.worked("ServiceBusSenderClient.getEntityPath()");
            assertEquals("q", sender.getEntityPath());
            assertEquals(before + 1, Coverage.worked("ServiceBusSenderClient.getEntityPath()"));
        }
    }

    @Test
    void whatIsNeverSubscribedHasNotWorked() {
        try (ServiceBusSenderAsyncClient sender =
                Bus.builder(OFFLINE).sender().queueName("q").buildAsyncClient()) {
            String method = "ServiceBusSenderAsyncClient.sendMessage(ServiceBusMessage)";
            int before = Coverage.worked(method);
            sender.sendMessage(new ServiceBusMessage("x"));
            assertEquals(before, Coverage.worked(method));
        }
    }
}
