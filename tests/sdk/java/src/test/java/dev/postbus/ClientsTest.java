package dev.postbus;

import static org.junit.jupiter.api.Assertions.assertEquals;

import com.azure.messaging.servicebus.ServiceBusClientBuilder;
import com.azure.messaging.servicebus.ServiceBusMessage;
import com.azure.messaging.servicebus.ServiceBusReceivedMessage;
import com.azure.messaging.servicebus.ServiceBusReceiverClient;
import com.azure.messaging.servicebus.ServiceBusSenderClient;
import jakarta.jms.ConnectionFactory;
import jakarta.jms.JMSContext;
import jakarta.jms.Queue;
import java.util.ArrayList;
import java.util.List;
import org.apache.qpid.jms.JmsConnectionFactory;
import org.junit.jupiter.api.Test;

/** What docs/clients.md shows. */
class ClientsTest {
    private final List<String> printed = new ArrayList<>();
    private final ClientsTest out = this;

    private void println(Object line) {
        printed.add(line.toString());
    }

    @Test
    void theFirstStepsOfTheSdk() {
        ClientsTest System = this;
        ServiceBusClientBuilder builder =
            new ServiceBusClientBuilder()
                .connectionString(
                    "Endpoint=sb://localhost;SharedAccessKeyName=RootManageSharedAccessKey;"
                        + "SharedAccessKey=SAS_KEY_VALUE;UseDevelopmentEmulator=true");
        ServiceBusSenderClient sender = builder.sender().queueName("orders").buildClient();
        sender.sendMessage(new ServiceBusMessage("hello"));
        ServiceBusReceiverClient receiver =
            builder.receiver().queueName("orders").disableAutoComplete().buildClient();
        for (ServiceBusReceivedMessage message : receiver.receiveMessages(1)) {
            System.out.println(message.getBody());
            receiver.complete(message);
        }
        assertEquals(List.of("hello"), printed);
        sender.close();
        receiver.close();
    }

    @Test
    void theFirstStepsOfJms() {
        ClientsTest System = this;
        ConnectionFactory factory =
            new JmsConnectionFactory("amqps://localhost:5671?amqp.saslMechanisms=PLAIN");
        try (JMSContext context =
                factory.createContext("RootManageSharedAccessKey", "SAS_KEY_VALUE")) {
            Queue queue = context.createQueue("orders");
            context.createProducer().send(queue, "hello");
            System.out.println(context.createConsumer(queue).receiveBody(String.class, 20_000));
        }
        assertEquals(List.of("hello"), printed);
    }
}
